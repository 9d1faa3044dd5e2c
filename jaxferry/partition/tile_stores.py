"""Chooses what the loops over tiles store for each other, and which loop makes what outlives it.

Where rows meet rows, as the queries of attention meet its keys, one operand is stored by one loop and read whole by the
next one. Which operand is found by search: the one that takes the fewest loops. What else a loop reads of the rows that
an earlier one computes is stored too if it is expensive to compute again: a minimum cut, as of residuals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from jaxferry.partition.derivatives import values_to_keep
from jaxferry.partition.graph import Equation, Graph
from jaxferry.partition.tile_analysis import Analysis, is_repeated
from jaxferry.partition.tile_rules import CannotTile, Rows

_MOST_LOOPS = 8
"""That store what later ones read."""


def analysed(graph: Graph, rows: Mapping[int, Rows | None], num_rows: int) -> Analysis:
    """Returns the analysis that takes the fewest loops where rows may be stored and read whole.

    Of equal ones it is the one that reads the fewest bytes whole. The choices are tried one by one.

    Args:
      graph: the program.
      rows: those of its inputs.
      num_rows: B.

    Raises:
      CannotTile: with the first equation in the way of the first attempt.
    """
    stops: list[CannotTile] = []
    found: Analysis | None = None

    def attempt(first: list[int]) -> tuple[list[int], tuple[float, float], Analysis | None]:
        choices, most_loops = first, _MOST_LOOPS if found is None else found.num_loops
        try:
            made = Analysis(graph, rows, num_rows, choices=choices, most_loops=most_loops)
        except CannotTile as stop:
            stops.append(stop)
            return choices, (math.inf, -len(choices)), None
        return choices, (made.num_loops, sum(map(graph.num_bytes, (*made.read_whole, *made.sums)))), made

    choices, least, found = attempt([])
    place = 0
    while place < len(choices):
        others, cost, made = attempt([*choices[:place], 1])
        if cost < least:
            choices, least, found = others, cost, made
        place += 1
    if found is None:
        raise stops[0]
    return found


class Schedule:
    """Which loop makes what.

    Args:
      analysis: the program's.
      stores: whether loops store what later ones read; else these compute it again.

    Attributes:
      loops: the loop that makes each value that outlives it: sums, rows that are results, and rows that are stored.
    """

    def __init__(self, analysis: Analysis, stores: bool) -> None:
        self._analysis, graph, last = analysis, analysis.graph, analysis.num_loops - 1
        self._computed: list[set[Equation]] = [set() for _ in range(last + 1)]
        self.loops: dict[int, int] = {}
        outputs = dict.fromkeys(value for value in graph.outputs if isinstance(value, int))
        results = [v for v in outputs if v in analysis.made_by and analysis.rows[v] is not None]
        latest = self._loops_of_sums(lambda value, first, last: last)
        if not stores:
            self.loops = latest | dict.fromkeys(results, last)
            return
        free = {value for value, at in analysis.rows.items() if at is None or value not in analysis.made_by}
        whole = values_to_keep(graph, analysis.read_whole, free, is_repeated)
        self.loops |= {value: analysis.stage[value] for value in whole}
        fixed = self.loops | {v: n for v, n in latest.items() if n == analysis.stage[v] - 1}
        fixed |= {value: last for value in results if analysis.stage[value] == last}
        for number in range(last + 1):
            self._store([value for value, loop in fixed.items() if loop == number], number, free)
        sums = self._loops_of_sums(self._best_loop)
        self.loops |= sums
        for value in results:
            if value not in self.loops:
                self.loops[value] = self._best_loop(value, analysis.stage[value], last)

    @property
    def last_read(self) -> dict[int, int]:
        """The last loop that reads each input, as far as is known."""
        inputs = self._analysis.graph.parameters
        read = [{value for equation in each for value in equation.reads} for each in self._computed]
        return {value: n for n, values in enumerate(read) for value in inputs if value in values}

    def _store(self, values: Iterable[int], number: int, free: set[int]) -> None:
        """Chooses what earlier loops store for the one that makes these values."""
        analysis = self._analysis
        equations, early = self._missing(values, number, lambda value: analysis.stage[value] == number)
        done = set[Equation]().union(*self._computed[:number])
        self._computed[number] |= equations

        def can_repeat(equation: Equation) -> bool:
            return is_repeated(equation) or equation not in done

        for value in values_to_keep(analysis.graph, early, free.union(self.loops), can_repeat):
            self.loops[value] = own = analysis.stage[value]
            self._computed[own] |= self._again([value], own)
        self._computed[number] |= self._again(early, number)

    def _again(self, values: Iterable[int], number: int) -> set[Equation]:
        """What a loop computes in addition for some values, without what earlier ones store."""

        def is_open(value: int) -> bool:
            return self.loops.get(value, number) >= number

        return self._missing(filter(is_open, values), number, is_open)[0]

    def _missing(
        self, values: Iterable[int], number: int, is_open: Callable[[int], bool]
    ) -> tuple[set[Equation], list[int]]:
        """The equations that a loop computes in addition for some values, and the closed values that they read."""
        analysis, stack = self._analysis, list(values)
        equations, closed = set[Equation](), dict[int, None]()
        while stack:
            equation = analysis.made_by.get(stack.pop())
            if equation not in analysis.tiles or equation in equations or equation in self._computed[number]:
                continue
            equations.add(equation)
            for atom, at in zip(equation.inputs, analysis.tiles[equation].reads, strict=True):
                if isinstance(atom, int) and at is not None and at == analysis.rows[atom]:
                    if is_open(atom):
                        stack.append(atom)
                    elif atom in analysis.made_by:
                        closed[atom] = None
        return equations, list(closed)

    def _best_loop(self, value: int, first: int, last: int) -> int:
        """The loop that computes the least in addition to make a value; of equal ones the last."""
        added = {number: self._again([value], number) for number in range(last, first - 1, -1)}
        best = min(added, key=lambda number: sum(not is_repeated(equation) for equation in added[number]))
        self._computed[best] |= added[best]
        return best

    def _loops_of_sums(self, choose: Callable[[int, int, int], int]) -> dict[int, int]:
        """The loop that makes each sum, chosen from the first and the last one that can."""
        analysis, last = self._analysis, self._analysis.num_loops - 1
        needed: dict[int, int] = {}
        loop: dict[int, int] = {}
        for equation in reversed(analysis.graph.equations):
            needs = [needed.get(value, last + 1) for value in equation.outputs]
            if equation in analysis.tiles:
                for value, need in zip(equation.outputs, needs, strict=True):
                    if value in analysis.sums:
                        loop[value] = choose(value, analysis.stage[value] - 1, min(need - 1, last))
                needs = [loop.get(value, analysis.stage[value]) for value in equation.outputs]
            for value in equation.reads:
                if analysis.rows[value] is None:
                    needed[value] = min(needed.get(value, last + 1), *needs)
        return loop
