"""Values of parametrised tests that only runs with the slow tests try: `[one, *slow(another, third)]`."""

from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Values of one argument."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def slow_cases(*cases: Any) -> list[Any]:
    """Tuples of the values of several arguments."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def slow_but(often: Any, values: Any) -> list[Any]:
    """Values of one argument, or tuples of those of several; all but the ones that run often are slow."""
    cases = [value if isinstance(value, tuple) else (value,) for value in values]
    quick = [value if isinstance(value, tuple) else (value,) for value in often]
    return [pytest.param(*case, marks=[] if case in quick else [pytest.mark.slow]) for case in cases]
