"""Cases of parametrised tests: few that contain every pair of two arguments' values, in place of all combinations."""

import itertools
from collections.abc import Iterable
from typing import Any


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Tuples of a value of each axis; each takes as many pairs as it can of those that earlier ones lack."""
    values = [list(axis) for axis in axes]
    every = [tuple(enumerate(numbers)) for numbers in itertools.product(*(range(len(axis)) for axis in values))]
    left, cases = {pair for case in every for pair in itertools.combinations(case, 2)}, list[tuple[Any, ...]]()
    while left:
        best = max(every, key=lambda case: sum(pair in left for pair in itertools.combinations(case, 2)))
        left -= set(itertools.combinations(best, 2))
        cases.append(tuple(values[axis][number] for axis, number in best))
    return cases
