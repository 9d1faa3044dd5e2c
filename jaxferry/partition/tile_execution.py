"""Runs a program as loops over tiles.

function --trace, analyse--> loops: rows of results, and those that later loops read, are written into arrays that the
                             loop carries, sums are added to accumulators that it carries, in fp32 at least; what
                             depends on no row is computed once
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.partition import tile_loops
from jaxferry.partition.derivatives import recomputation
from jaxferry.partition.graph import Atom, evaluate, trace
from jaxferry.partition.tile_analysis import Analysis
from jaxferry.partition.tile_body import Body, Part, in_order, write_rows
from jaxferry.partition.tile_products import without_transposes
from jaxferry.partition.tile_rules import COMBINE, CannotTile, Rows, is_short
from jaxferry.partition.tile_stores import Schedule, analysed

__all__ = ["InTiles", "tile_loops"]


class InTiles:
    """A function of arrays that runs in tiles.

    Args:
      function: the function, which will not be differentiated.
      arguments: shape structs of its arguments.
      rows: where each leaf of them has its rows; None for what all tiles see whole.
      num_rows: B.
      num_devices: how many devices share the arrays.
      stores: whether loops may store rows that later ones read, whole where rows meet rows.

    Attributes:
      num_loops: the number of loops, one after the other.
      results: where each leaf of the results has its rows; None of whole ones.

    Raises:
      CannotTile: with the equation in the way.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        rows: Sequence[Rows | None],
        num_rows: int,
        num_devices: int = 1,
        stores: bool = False,
    ) -> None:
        # A constrained layout would keep XLA from sharing the tiles among devices.
        self._laid_out = in_order if num_devices == 1 else lambda tile: tile
        traced = trace(lambda given: function(*given), list(arguments), (), {}, is_derived=True)
        self._graph = graph = without_transposes(traced)
        of_inputs = dict(zip(graph.parameters, rows, strict=True))
        self._analysis = (analysed if stores else Analysis)(graph, of_inputs, num_rows)
        self.results = [self._analysis.rows_of(atom) for atom in graph.outputs]
        schedule = Schedule(self._analysis, stores)
        self._loops, self._last_read = schedule.loops, schedule.last_read
        if any(jax.dtypes.issubdtype(graph.avals[value].dtype, jax.dtypes.extended) for value in self._loops):
            raise CannotTile("its results are random keys, one a row")
        self.num_loops = self._analysis.num_loops if self._loops else 0

    def run(self, num_tiles: int, donated: Collection[int] = ()) -> Callable[..., Any]:
        """The function.

        Args:
          num_tiles: at most so many tiles, of at least a row; the last one is smaller where they do not divide B.
          donated: the leaves of the arguments whose memory results may take, and before them what is stored.
        """
        graph, size = self._graph, -(-self._analysis.num_rows // num_tiles)

        def run(*given: Any) -> Any:
            known: dict[int, Any] = dict(graph.constants)
            known |= zip(graph.parameters, jax.tree.leaves(list(given)), strict=True)
            held = dict[int, int]()
            for number in range(self.num_loops):
                self._loop(number, known, size, donated, held)
            self._complete(known, graph.outputs)
            results = [known[atom] if isinstance(atom, int) else atom.val for atom in graph.outputs]
            return jax.tree.unflatten(graph.out_tree, results)

        run.__name__ = "in_tiles"
        return run

    def _complete(self, known: dict[int, Any], atoms: Sequence[Atom]) -> None:
        """Computes these whole values."""
        wanted = [atom for atom in atoms if isinstance(atom, int) and atom not in known]
        evaluate(recomputation(self._graph, wanted, known), known)

    def _loop(
        self, number: int, known: dict[int, Any], size: int, donated: Collection[int], held: dict[int, int]
    ) -> None:
        """Runs one loop over the tiles, and adds its results to the known values; `held` as of `_in_place`."""
        analysis, graph, num_rows = self._analysis, self._graph, self._analysis.num_rows
        made_here = [value for value, loop in self._loops.items() if loop == number]
        sums = [value for value in made_here if value in analysis.sums]
        written = [value for value in made_here if value not in analysis.sums]
        places = [at for value in written if (at := analysis.rows[value]) is not None]
        wanted: list[Part] = [*zip(written, places, strict=True)]
        wanted += [(value, analysis.sums[value]) for value in sums]
        body = Body(analysis, wanted, known)
        if not wanted:
            return
        self._complete(known, body.whole)
        in_place = self._in_place(number, written, body, donated, held)
        combine = [COMBINE[analysis.sums[value]] for value in sums]

        def step(
            start: Any, size: int, made: list[Any], total: list[Any], known: Mapping[int, Any] = known
        ) -> tuple[list[Any], list[Any]]:
            # Tiles of donated inputs are read from the array into which those of a result are written.
            carried = {in_place[value]: array for value, array in zip(written, made, strict=True) if value in in_place}
            found = body.run({**known, **carried}, start, size, laid_out=self._laid_out)
            parts = found[: len(written)]
            written_to = [
                write_rows(array, self._laid_out(part), at, num_rows, start, size)
                for array, part, at in zip(made, parts, places, strict=True)
            ]
            return written_to, [
                add(a, b.astype(a.dtype)) for add, a, b in zip(combine, total, found[len(written) :], strict=True)
            ]

        made = [
            known[in_place[value]]
            if value in in_place
            else jnp.zeros(graph.avals[value].shape, graph.avals[value].dtype)
            for value in written
        ]
        total = [_neutral(analysis.sums[value], graph.avals[value]) for value in sums]
        full, rest = divmod(num_rows, size)
        made, total = jax.lax.fori_loop(0, full, lambda i, each: step(i * size, size, *each), (made, total))
        if rest:
            # XLA would compute the last tile up to its sums before the loop, and hold that beside the loop's tiles.
            read = {value: known[value] for value in body.whole}
            made, total, read = jax.lax.optimization_barrier((made, total, read))
            made, total = step(full * size, rest, made, total, read)
        known |= zip(written, made, strict=True)
        known |= {v: array.astype(graph.avals[v].dtype) for v, array in zip(sums, total, strict=True)}

    def _in_place(
        self, number: int, written: Sequence[int], body: Body, donated: Collection[int], held: dict[int, int]
    ) -> dict[int, int]:
        """Which of these values take the memory of which donated inputs, tile by tile.

        JAX gives each result the first donated argument that is left of its shape and dtype. Until that result is
        written, what is stored may have the memory: `held` says which value has that of which input, and is updated.
        """
        graph, found = self._graph, dict[int, int]()
        left = [graph.parameters[place] for place in sorted(donated)]
        inputs: dict[int, int] = {}
        for atom in dict.fromkeys(atom for atom in graph.outputs if isinstance(atom, int)):
            if alike := [v for v in left if self._type_of(v) == self._type_of(atom)]:
                left.remove(alike[0])
                inputs[atom] = alike[0]
        open_to_stores = [v for v in inputs.values() if self._last_read.get(v, 0) <= number]
        for value in sorted(written, key=lambda value: value not in inputs):
            alike = [v for v in open_to_stores if v not in held and self._type_of(v) == self._type_of(value)]
            source = inputs.get(value, alike[0] if alike and value not in graph.outputs else None)
            if source is None:
                continue
            holder = held.get(source, source)
            # A tile that has been overwritten must not be read again.
            is_free = holder not in body.whole or body.sliced.get(holder) == self._analysis.rows[value]
            if is_free and source not in graph.outputs:
                found[value], held[source] = holder, value
        return found

    def _type_of(self, value: int) -> tuple[Any, ...]:
        return self._graph.avals[value].shape, self._graph.avals[value].dtype


def _neutral(combine: str, aval: Any) -> jax.Array:
    """What the tiles of a combined value are combined with first; sums of fewer bits than 32 are in fp32."""
    dtype: Any = np.dtype(np.float32) if combine == "add" and is_short(aval.dtype) else aval.dtype
    if combine in ("max", "min"):
        is_max, is_integer = combine == "max", jnp.issubdtype(dtype, jnp.integer)
        least, most = (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max) if is_integer else (-jnp.inf, jnp.inf)
        return jnp.full(aval.shape, least if is_max else most, dtype)
    return jnp.full(aval.shape, np.array(-1 if combine == "and" else 0).astype(dtype), dtype)
