"""What one tile computes, in order: the parts of values that have rows, and the parts that it needs of whole values.

A whole value that meets rows (a mask, positions, labels, the bits of a dropout) is computed for the tile: a search
finds the operand whose rows give these rows of the result. Where none is found, the value is made whole before the loop
and sliced.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.random import threefry2x32_p

from jaxferry.partition.derivatives import is_cheap
from jaxferry.partition.graph import Atom, Equation, bind
from jaxferry.partition.tile_analysis import Analysis, states_sharding
from jaxferry.partition.tile_rules import CannotTile, Result, Rows, is_short, reshaped

Part = tuple[Atom, Result]
"""A value, and which part of it: some rows, a sum over the rows of a tile (`"add"`), or all of it (None)."""

Run = Callable[[Sequence[Any], Any, int], Sequence[Any]]
"""Computes parts of results from parts of operands, the first row, and the number of rows."""


@dataclasses.dataclass(frozen=True)
class _Step:
    reads: tuple[Part, ...]
    makes: tuple[Part, ...]
    run: Run


class Body:
    """The steps of a tile.

    Args:
      analysis: the program's.
      wanted: the parts to compute.
      known: values that exist before the loop. Others that are needed whole are made before it, unless they are cheap
        and larger than what they are made of.
      is_inner: whether the program is a part of another one's step, which makes whole values itself.

    Attributes:
      whole: the values of which the tile reads more than its own rows, or that exist before.
      sliced: the values before the loop of which it reads only these rows.
    """

    def __init__(
        self, analysis: Analysis, wanted: Iterable[Part], known: Collection[int], is_inner: bool = False
    ) -> None:
        self._analysis, self._wanted = analysis, tuple(wanted)
        self._wants: dict[Atom, dict[Result, None]] = {}
        self._is_inner, self._known = is_inner, frozenset(known)
        self._ask(self._wanted)
        self._inflated = _inflated(analysis)
        steps: list[_Step] = []
        for equation in reversed(analysis.graph.equations):
            for step in self._steps_of(equation):
                steps.append(step)
                self._ask(step.reads)
        self._steps = tuple(reversed(steps))
        made = {part for step in steps for part in step.makes}
        left = [(v, at) for v, wants in self._wants.items() for at in wants if (v, at) not in made]
        self.whole = tuple(dict.fromkeys(v for v, _ in left if isinstance(v, int)))
        self.sliced = {v: at for v, at in left if isinstance(at, Rows) and set(self._wants[v]) == {at}}

    def run(
        self,
        before: Mapping[int, Any],
        start: Any,
        size: int,
        given: Mapping[Part, Any] = types.MappingProxyType({}),
        laid_out: Callable[[jax.Array], jax.Array] = lambda tile: tile,
    ) -> list[Any]:
        """Computes the wanted parts of a tile.

        Args:
          before: the values of `whole`.
          start: the first row; may be traced.
          size: the number of rows.
          given: parts of the tile that exist already.
          laid_out: applied to each tile of the values before.
        """
        parts: dict[Part, Any] = dict(given)

        def read(part: Part) -> Any:
            atom, at = part
            if not isinstance(atom, int):
                return atom.val
            if part not in parts:
                whole = parts[atom, None] if (atom, None) in parts else before[atom]
                assert not isinstance(at, str), "a sum is read before its loop has ended"
                own = whole if at is None else slice_rows(whole, at, self._analysis.num_rows, start, size)
                parts[part] = own if at is None else laid_out(own)
            return parts[part]

        for step in self._steps:
            parts.update(zip(step.makes, step.run([read(part) for part in step.reads], start, size), strict=True))
        return [read(part) for part in self._wanted]

    def _ask(self, parts: Iterable[Part]) -> None:
        for atom, at in parts:
            if isinstance(atom, int):
                self._wants.setdefault(atom, {})[at] = None

    def _steps_of(self, equation: Equation) -> list[_Step]:
        """The steps that compute what is wanted of an equation, last first."""
        analysis, found = self._analysis, list[_Step]()
        if self._known.issuperset(equation.outputs):
            return found
        tile = analysis.tiles.get(equation)
        wants = [self._wants.get(value, {}) for value in equation.outputs]
        if tile is not None and any(at in own for at, own in zip(tile.results, wants, strict=True)):
            run = tile.run or functools.partial(_bound, equation, tile.params)
            if "add" in tile.results and equation.primitive.name in ("reduce_sum", "scatter-add"):
                run = functools.partial(_in_fp32, equation)
            reads = tuple(zip(equation.inputs, tile.reads, strict=True))
            found.append(_Step(reads, tuple(zip(equation.outputs, tile.results, strict=True)), run))
        if tile is not None or not self._known.isdisjoint(equation.outputs):
            return found
        asked = dict.fromkeys(at for own in wants for at in own)
        for at in [at for at in asked if isinstance(at, Rows)]:
            step = self._pulled(equation, at)
            if step is None:
                asked[None] = None
            else:
                found.append(step)
        if None in asked and (self._is_inner or self._inflated.issuperset(equation.outputs)):
            whole = tuple((value, None) for value in equation.outputs)
            run = functools.partial(_bound, equation, lambda size: equation.params)
            found.append(_Step(tuple((atom, None) for atom in equation.inputs), whole, run))
        return found

    def _pulled(self, equation: Equation, at: Rows) -> _Step | None:
        """The step that computes these rows of a whole value; None if it is not known how."""
        analysis, params, name = self._analysis, equation.params, equation.primitive.name
        site, makes = analysis.site(equation), tuple((value, at) for value in equation.outputs)
        if states_sharding(equation) or name in ("scan", "cond", "optimization_barrier"):
            return None
        if name in ("iota", "random_bits"):
            run = _numbers if name == "iota" else _random_bits
            if name == "iota" or _can_draw(analysis, equation):
                reads = tuple((atom, None) for atom in equation.inputs)
                return _Step(reads, makes, functools.partial(run, params, site.results[0], at, analysis.num_rows))
            return None
        if name == "broadcast_in_dim":
            dims = [int(axis) for axis in params["broadcast_dimensions"]]
            if at.axis not in dims or site.shapes[0][dims.index(at.axis)] == 1:
                resized = functools.partial(_resized, params, at)
                reads = tuple((atom, None) for atom in equation.inputs)
                return _Step(reads, makes, functools.partial(_bound, equation, resized))
        for place, shape in enumerate(site.shapes):
            for axis, length in enumerate(shape):
                own = at.at(axis)
                try:
                    if name == "reshape":
                        own = reshaped(params["new_sizes"], shape, at, analysis.num_rows)
                    elif length != at.size(analysis.num_rows):
                        continue
                    rows = [own if other == place else None for other in range(len(site.shapes))]
                    tile = analysis.tile(equation, rows)
                except CannotTile:
                    continue
                if all(result == at for result in tile.results):
                    return _Step(
                        tuple(zip(equation.inputs, tile.reads, strict=True)),
                        makes,
                        functools.partial(_bound, equation, tile.params),
                    )
        return None


def _inflated(analysis: Analysis) -> set[int]:
    """The whole values that are cheap and made of less than they are, so that each tile makes them again."""
    graph, found = analysis.graph, set[int]()
    for equation in graph.equations:
        if equation not in analysis.tiles and is_cheap(equation):
            num_bytes = sum(graph.num_bytes(value) for value in equation.reads if value not in found)
            if found.issuperset(equation.reads) or num_bytes < sum(map(graph.num_bytes, equation.outputs)):
                found.update(equation.outputs)
    return found


def _bound(
    equation: Equation, params: Callable[[int], Mapping[str, Any]], operands: Sequence[Any], start: Any, size: int
) -> Sequence[Any]:
    return bind(equation, operands, params(size))


def _in_fp32(equation: Equation, operands: Sequence[Any], start: Any, size: int) -> Sequence[Any]:
    """Sums of a tile in fp32: they stay so until all tiles are added."""
    operands, params = [x.astype(jnp.float32) if is_short(x.dtype) else x for x in operands], equation.params
    if equation.primitive.name == "reduce_sum":
        return bind(equation, operands, params)
    table, indices, rows = operands
    options = {name: params[name] for name in ("indices_are_sorted", "unique_indices", "mode")}
    return [jax.lax.scatter_add(table, indices, rows, params["dimension_numbers"], **options)]


def _resized(params: Mapping[str, Any], at: Rows, size: int) -> Mapping[str, Any]:
    shape = list(params["shape"])
    shape[at.axis] = at.size(size)
    return {**params, "shape": tuple(shape)}


def _places(shape: Sequence[int], at: Rows, num_rows: int, start: Any, size: int) -> jax.Array:
    """The indices of the tile's rows along their axis."""
    return slice_rows(jnp.arange(shape[at.axis], dtype=jnp.uint32), at.at(0), num_rows, start, size)


def _numbers(
    params: Mapping[str, Any], shape: Sequence[int], at: Rows, num_rows: int, operands: Any, start: Any, size: int
) -> list[jax.Array]:
    """A tile of an iota."""
    tile, dtype, axis = list(shape), params["dtype"], params["dimension"]
    tile[at.axis] = at.size(size)
    if axis != at.axis:
        return [jax.lax.broadcasted_iota(dtype, tile, axis)]
    return [jax.lax.broadcast_in_dim(_places(shape, at, num_rows, start, size).astype(dtype), tile, [axis])]


def _can_draw(analysis: Analysis, equation: Equation) -> bool:
    """Whether random bits depend on their key and place alone, as threefry's do."""
    [key], params = [analysis.graph.aval_of(atom) for atom in equation.inputs], equation.params
    is_by_place: bool = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    return (
        is_by_place
        and "fry" in str(key.dtype)
        and not key.shape
        and params["bit_width"] <= 32
        and math.prod(params["shape"]) < 2**32
    )


def _random_bits(
    params: Mapping[str, Any], shape: Sequence[int], at: Rows, num_rows: int, operands: Any, start: Any, size: int
) -> list[jax.Array]:
    """A tile of random bits: those that the whole array has there."""
    tile = list(shape)
    tile[at.axis] = at.size(size)
    count = jnp.zeros(tile, jnp.uint32)
    for axis, length in enumerate(shape):
        is_rows = axis == at.axis
        along = _places(shape, at, num_rows, start, size) if is_rows else jnp.arange(length, dtype=jnp.uint32)
        stride = jnp.uint32(math.prod(shape[axis + 1 :]))
        count += jax.lax.broadcast_in_dim(along * stride, tile, [axis])
    [key] = operands
    first, second = jax.random.key_data(key)
    high, low = threefry2x32_p.bind(*(jnp.broadcast_to(x, tile) for x in (first, second, jnp.uint32(0))), count)
    return [(high ^ low).astype(f"uint{params['bit_width']}")]


def in_order(array: jax.Array) -> jax.Array:
    """A tile with its axes in memory as they are in its shape.

    XLA would give the array that a loop carries, or reads, the layout that an operation on a tile prefers, and
    transpose all of it before or after the loop.
    """
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended)
    return array if is_key or array.ndim < 2 else with_layout_constraint(array, Layout(tuple(range(array.ndim))))


def slice_rows(array: jax.Array, at: Rows, num_rows: int, start: Any, size: int) -> jax.Array:
    """The part of an array that belongs to some rows."""
    if at.major == 1:
        return jax.lax.dynamic_slice_in_dim(array, start * at.minor, size * at.minor, at.axis)
    shape = array.shape
    split = array.reshape(*shape[: at.axis], at.major, num_rows, at.minor, *shape[at.axis + 1 :])
    part = jax.lax.dynamic_slice_in_dim(split, start, size, at.axis + 1)
    return part.reshape(*shape[: at.axis], at.size(size), *shape[at.axis + 1 :])


def write_rows(array: jax.Array, part: jax.Array, at: Rows, num_rows: int, start: Any, size: int) -> jax.Array:
    """The array with some rows replaced."""
    if at.major == 1:
        return jax.lax.dynamic_update_slice_in_dim(array, part, start * at.minor, at.axis)
    before, after = array.shape[: at.axis], array.shape[at.axis + 1 :]
    split = array.reshape(*before, at.major, num_rows, at.minor, *after)
    part = part.reshape(*before, at.major, size, at.minor, *after)
    return jax.lax.dynamic_update_slice_in_dim(split, part, start, at.axis + 1).reshape(array.shape)
