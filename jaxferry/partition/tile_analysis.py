"""Which values of a program have the rows of a batch, which are sums over them, and how many loops over tiles it takes.

Each value is one of:
    whole       every tile sees all of it; of stage 0 it depends on no row, of stage s on sums that s loops have made
    rows        those of row b depend on row b of the inputs alone, and on whole values
    combined    over tiles, by a sum say: whole one stage later
Rows may also be stored, and be read whole by others one stage later, such as keys by queries.
Whatever inputs are said to have rows, the program in tiles computes the same: a wrong choice is only not tiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence

from jaxferry.partition.derivatives import is_cheap
from jaxferry.partition.graph import Atom, Equation, Graph, are_zeros
from jaxferry.partition.tile_rules import KERNELS, PARTIAL, RULES, CannotTile, Rows, Site, Tile, linear

MOST_LOOPS = 3
"""Each loop after the first computes again what it needs of the loops before, unless that is stored."""


class Analysis:
    """The rows of each value of a program.

    Args:
      graph: the program, which is differentiated and whose calls are inlined (`trace` with `is_derived`).
      rows: those of its inputs; missing ones are whole.
      num_rows: B.
      is_inner: whether the program is the body of a loop or a branch of another one, in which sums are `PARTIAL`.
      is_trial: as for `linear`.
      stops: collects what cannot be tiled, which is then taken as whole, instead of raising; None raises.
      choices: where rows meet rows, which operand is read whole: its place among those that may be, the cheapest first.
        Choices that are missing are 0, and are added to the list. None refuses such equations.
      most_loops: how many loops may follow each other.

    Attributes:
      graph, num_rows: as given.
      rows: by value.
      stage: of rows, the first loop that can make them; of others, the first loop that can read them.
      sums: how tiles of a value combine; of combined values only.
      tiles: what the rule of an equation says; of equations in tiles only.
      read_whole: the values with rows that are read whole.
      num_loops: the number of loops, one after the other.

    Raises:
      CannotTile: with the first equation in the way.
    """

    def __init__(
        self,
        graph: Graph,
        rows: Mapping[int, Rows | None],
        num_rows: int,
        *,
        is_inner: bool = False,
        is_trial: bool = False,
        stops: list[CannotTile] | None = None,
        choices: list[int] | None = None,
        most_loops: int = MOST_LOOPS,
    ) -> None:
        self.graph, self.num_rows = graph, num_rows
        self._is_inner, self._is_trial, self._stops = is_inner, is_trial, stops
        self._choices, self._num_chosen, self._most_loops = choices, 0, most_loops
        self.made_by = {value: equation for equation in graph.equations for value in equation.outputs}
        inputs = (*graph.parameters, *graph.batch, *graph.constants)
        self.rows: dict[int, Rows | None] = {value: rows.get(value) for value in inputs}
        self.stage = dict.fromkeys(inputs, 0)
        self._at_hand = set(inputs)
        self.read_whole: dict[int, None] = {}
        self.tiles: dict[Equation, Tile] = {}
        self.sums: dict[int, str] = {}
        for equation in graph.equations:
            self._visit(equation)
        of_rows = [self.stage[value] for value, at in self.rows.items() if at is not None]
        self.num_loops = 1 + max([*of_rows, *(self.stage[value] - 1 for value in self.sums)], default=0)

    def rows_of(self, atom: Atom) -> Rows | None:
        """The rows of a value; None of whole and combined ones."""
        return self.rows[atom] if isinstance(atom, int) else None

    def site(self, equation: Equation) -> Site:
        """The equation as rules see it."""
        graph = self.graph
        shapes = tuple(tuple(getattr(graph.aval_of(atom), "shape", ())) for atom in equation.inputs)
        results = tuple(tuple(getattr(graph.avals[value], "shape", ())) for value in equation.outputs)
        zeros = tuple(are_zeros(atom, self.made_by) for atom in equation.inputs)
        dtypes = tuple(getattr(graph.aval_of(atom), "dtype", None) for atom in equation.inputs)
        return Site(equation.primitive.name, equation.params, shapes, dtypes, results, zeros, self.num_rows)

    def _visit(self, equation: Equation) -> None:
        rows = [self.rows_of(atom) for atom in equation.inputs]
        stage = max((self.stage[value] for value in equation.reads), default=0)
        self.rows |= dict.fromkeys(equation.outputs)
        self.stage |= dict.fromkeys(equation.outputs, stage)
        if is_repeated(equation) and all(self.rows[v] is None or v in self._at_hand for v in equation.reads):
            self._at_hand.update(equation.outputs)
        if not any(rows) and not equation.has_effects:
            return
        try:
            tile, whole = self._tile_reading(equation, rows)
            stage = max(stage, *map(self._whole_stage, whole), 0)
            if tile is not None and stage >= self._most_loops:
                raise CannotTile(f"it needs {stage} sums over all rows, one after the other")
        except CannotTile as stop:
            operands = ", ".join(self.graph.aval_of(atom).str_short() for atom in equation.inputs)
            stop = CannotTile(stop.reason, stop.where or f"{equation.primitive.name}({operands})")
            if self._stops is None:
                raise stop from None
            self._stops.append(stop)
            return
        self.read_whole |= dict.fromkeys(whole)
        self.stage |= dict.fromkeys(equation.outputs, stage)
        if tile is None:
            return
        self.tiles[equation] = tile
        for value, result in zip(equation.outputs, tile.results, strict=True):
            if isinstance(result, str):
                self.sums[value] = result
                self.stage[value] = stage + 1
            else:
                self.rows[value] = result

    def tile(self, equation: Equation, rows: Sequence[Rows | None]) -> Tile:
        """What the rule of an equation says for these rows of its operands.

        Raises:
          CannotTile: with the reason.
        """
        name = equation.primitive.name
        if equation.has_effects:
            raise CannotTile("it has side effects")
        if states_sharding(equation):
            raise CannotTile("it states a sharding")
        if PARTIAL in rows and name != "scan":
            return linear(self.site(equation), rows, self._is_trial)
        if name not in RULES:
            raise CannotTile("there is no rule for it")
        site = self.site(equation)
        tile = RULES[name](site, rows)
        for at, read in zip(rows, tile.reads, strict=True):
            if at not in (None, PARTIAL, read):
                raise CannotTile("operands have their rows along different axes")
        places = zip((*site.shapes, *site.results), (*tile.reads, *tile.results), strict=True)
        of_rows = [(shape, at) for shape, at in places if isinstance(at, Rows) and at != PARTIAL]
        if any(shape[at.axis : at.axis + 1] != (at.size(self.num_rows),) for shape, at in of_rows):
            raise CannotTile("its rows do not lie along one axis")
        if not self._is_inner:
            return tile
        results = [PARTIAL if each == "add" else each for each in tile.results]
        if any(isinstance(each, str) for each in results):
            raise CannotTile("it combines rows within a loop")
        # The loop's other equations have the dtypes that they had: its sums become fp32 once it has ended.
        is_product = "add" in tile.results and name in ("dot_general", "conv_general_dilated")
        params = (lambda size: site.params) if is_product else tile.params
        return dataclasses.replace(tile, results=results, params=params)

    def _tile_reading(self, equation: Equation, rows: Sequence[Rows | None]) -> tuple[Tile | None, Sequence[int]]:
        """What the rule of an equation says, and which of its operands with rows it reads whole.

        One that only moves data, and a kernel of attention, may read all of them whole: it is in no tile (None).

        Raises:
          CannotTile: as for `tile`.
        """
        try:
            return self.tile(equation, rows), ()
        except CannotTile:
            if self._choices is None or equation.has_effects or states_sharding(equation):
                raise
            found = list[tuple[int, Tile]]()
            for place, atom in enumerate(equation.inputs):
                others = [None if other == place else at for other, at in enumerate(rows)]
                if isinstance(atom, int) and rows[place] is not None and any(others):
                    with contextlib.suppress(CannotTile):
                        found.append((atom, self.tile(equation, others)))
            if not found and not is_repeated(equation) and equation.primitive.name not in KERNELS:
                raise
        if not found:
            return None, [value for value in equation.reads if self.rows[value] is not None]
        found.sort(key=lambda each: (self._whole_stage(each[0]), self.graph.num_bytes(each[0])))
        if len(found) > 1:
            if self._num_chosen == len(self._choices):
                self._choices.append(0)
            found = found[self._choices[self._num_chosen] :]
            self._num_chosen += 1
        atom, tile = found[0]
        return tile, [atom]

    def _whole_stage(self, value: int) -> int:
        """The first loop that can read a value with rows whole; what only moves inputs is at hand without a loop."""
        return self.stage[value] + (value not in self._at_hand)


def is_repeated(equation: Equation) -> bool:
    """Whether a loop computes an equation again rather than have its result stored."""
    return is_cheap(equation) or equation.primitive.name == "optimization_barrier"


def states_sharding(equation: Equation) -> bool:
    """Whether an equation says over which axes of a mesh its result is split, as with explicit axes."""
    stated = (equation.params.get(key) for key in ("sharding", "out_sharding"))
    return any(any(axis is not None for axis in getattr(each, "spec", ())) for each in stated)
