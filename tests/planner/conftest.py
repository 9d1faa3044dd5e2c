"""The tests of planners search for plans as users do."""

import pytest

from jaxferry.planner import search

MOST_EFFORT = search.MOST_EFFORT
"""Read while tests are collected, before other tests' is lowered (tests/conftest.py)."""


@pytest.fixture(autouse=True, scope="module")
def whole_effort():
    """All of the search's effort."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "MOST_EFFORT", MOST_EFFORT)
        yield
