"""Updates of parameter groups whose master parameters and optimizer state live on the device.

    gradients of each use --sum, unscale, clip--> Optax --> masters, state, copy of the parameters (all in place)

Of several devices, each updates its share of every parameter, and they gather the new copy (`host.on_devices`).
Nothing waits for the host: where no update needs the norm of all gradients, the program itself leaves everything as it
was if the loss is not finite. All programs are compiled before the step begins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxferry.engine.program_functions import has_rows, squared_norm
from jaxferry.engine.programs import Programs, lower_traced
from jaxferry.engine.streamed_updates import Compiled, StreamedUpdates, Uses
from jaxferry.native import as_stored
from jaxferry.optimizer import (
    HostOptimizer,
    Subgroup,
    UpdateGroup,
    is_shared,
    masters_by_leaf,
    num_bytes_on_each,
    subgroups_of,
    unit_on_devices,
    where_on_devices,
)
from jaxferry.partition import Gradient, Layer, Leaf, RowGradient, SharedLayer, Span
from jaxferry.step import SLOTS, Operation, StepProgram
from jaxferry.transport import Placement, Transport, added, compile_shared, split, transport_like


@dataclasses.dataclass(frozen=True)
class DeviceUpdates:
    """The compiled updates of one step program, by the layers of their units.

    An update maps `(masters, state, copies, gradients, norm, scale, loss, *extra)` to masters, state and copies, in the
    memory of the former ones, which are donated. For each of the unit's layers, `copies` has the trained parameters in
    the compute dtype, and `gradients` its uses, none if no segment reads it. Gradients are divided by `scale`; `norm`
    is their global norm afterwards, read only if the optimizer clips. Nothing changes unless `loss`, a scalar on the
    device, is finite. `extra`: see `HostOptimizer.extra`.

    `folds` adds up the gradients of a group, with an earlier sum or not; `norms` has the squared norm of their sum.
    `device_bytes` counts masters, optimizer state, sums of micro-batches, and what one update needs besides.
    """

    updates: Mapping[tuple[int, ...], Compiled]
    folds: Mapping[tuple[int, bool], Compiled]
    norms: Mapping[int, Compiled]
    streamed: StreamedUpdates
    device_bytes: int
    in_turn: Callable[[Any], Any]

    def fold(self, group: int, earlier: Sequence[list[jax.Array]], uses: Uses) -> list[jax.Array]:
        """Adds the uses of a group to an earlier sum, which is donated: a dense fp32 gradient, joined."""
        folded: list[jax.Array] = self.in_turn(self.folds[group, bool(earlier)](earlier, uses))
        return folded

    def squared_norm(self, group: int, uses: Uses) -> jax.Array:
        """The squared norm of the sum of the uses, an fp32 scalar on the device."""
        norm: jax.Array = self.in_turn(self.norms[group](uses))
        return norm


class _Wanted(NamedTuple):
    """A program to compile: its key in one compiler, that for all steps or None, how to lower it, and its arguments."""

    own: Any
    shared: Any
    lower: Callable[[], Any]
    arguments: list[Any]


class DeviceUpdateCompiler:
    """Compiles updates on the device, equal ones once. Another transport like `transport` moves masters and state."""

    def __init__(
        self,
        optimizer: HostOptimizer,
        layers: Sequence[Layer],
        placement: Placement,
        transport: Transport,
        accumulates: bool,
    ) -> None:
        self._updates, self._placement, self._accumulates = optimizer.updates, placement, accumulates
        self._optimizer, self._transport, self._groups = optimizer, transport, layers
        self._layers = [layer.trained for layer in layers]
        self._there = [placement.ownership.shared(layer) for layer in self._layers]
        self._units = optimizer.units_of(layers)
        self._on_devices = {u.layers: unit_on_devices(optimizer, u, layers, placement) for u in self._units}
        self._compiled: dict[Any, Any] = {}
        self._cut: dict[tuple[int, int], list[Subgroup]] = {}
        self._transports: dict[tuple[Layer, ...], Transport] = {}

    def compile(self, program: StepProgram, programs: Programs) -> DeviceUpdates:
        """Returns the compiled updates of a step; the compiled `programs` state the shapes of the gradients."""
        units = [unit for unit in self._units if program.stays_on_device.issuperset(unit.layers)]
        uses = _uses(program, programs)
        folds, sums = {}, {}
        if self._accumulates:
            # A sum has the shapes that its program returns.
            folds = self._all({(group, False): self._fold(group, [], shapes) for group, shapes in uses.items()})
            sums = {group: program.out_info for (group, _), program in folds.items()}
            folds |= self._all({(group, True): self._fold(group, [sums[group]], uses[group]) for group in sums})
        read = {group: [sums[group]] if group in sums else shapes for group, shapes in uses.items()}
        # The program that makes a gradient returns its norm as well, unless some are rows.
        unknown = [
            group for group, shapes in read.items() if group in sums or len(shapes) > 1 or any(map(has_rows, shapes))
        ]
        norms = self._all({group: self._norm(group, read[group]) for group in unknown})
        loss = program.partition.graph.avals[program.partition.loss]
        gradients = {unit.layers: [read.get(group, []) for group in unit.layers] for unit in units}
        updates = self._all({unit.layers: self._update(unit, gradients[unit.layers], loss) for unit in units})
        streamed, slots_bytes = self._streamed(program, read, loss)
        on_each = (num_bytes_on_each(self._on_devices[unit.layers], self._placement) for unit in units)
        num = self._placement.num_devices
        held = slots_bytes + sum(on_each) + sum(-(-4 * self._layers[group].num_parameters // num) for group in sums)
        made = [*folds.values(), *norms.values(), *updates.values(), *streamed.updates.values()]
        held += max(map(_more_bytes, made), default=0)
        return DeviceUpdates(updates, folds, norms, streamed, held, self._placement.in_turn)

    def alone(self, unit: UpdateGroup, gradients: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Returns the update of a unit of one layer that stays on the device, lowered, and its arguments' shapes.

        These are masters, state, copies, gradients, norm, scale, loss and `extra`. `gradients` are shapes as one
        segment's program returns them.
        """
        wanted = self._update(unit, [[list(gradients)]], jax.ShapeDtypeStruct((), jnp.float32))
        return wanted.lower(), wanted.arguments

    def alone_streamed(self, unit: UpdateGroup, gradients: Sequence[Any], count: int) -> tuple[Any, list[Any]]:
        """Returns the same for the first of `count` subgroups of a unit that streams; it has some elements.

        The arguments are masters and state that move, state that stays, no copies, and the others.
        """
        [group], loss = unit.layers, jax.ShapeDtypeStruct((), jnp.float32)
        subgroup = next(each for each in self._subgroups(group, count) if each.unit.leaves)
        wanted = self._streamed_update(subgroup, group, [list(gradients)], loss, copy_stays=False)
        return wanted.lower(), wanted.arguments

    def _streamed(self, program: StepProgram, uses: Mapping[int, Any], loss: Any) -> tuple[StreamedUpdates, int]:
        """The updates that stream, and the device memory of as many subgroups as are there at once."""
        cut = {group: self._subgroups(group, count) for group, count in program.streamed.items()}
        subgroups = {(group, number): each for group, own in cut.items() for number, each in enumerate(own)}
        layouts = tuple(layer for each in subgroups.values() for layer in (each.streamed, each.trained))
        if layouts and layouts not in self._transports:
            self._transports[layouts] = transport_like(self._transport, self._placement, layouts)
        transport = self._transports.get(layouts, self._transport)
        wanted = {
            key: self._streamed_update(each, key[0], uses.get(key[0], []), loss, key[0] in program.resident)
            for key, each in subgroups.items()
            if each.unit.leaves
        }
        numbers = {key: 2 * number for number, key in enumerate(subgroups)}
        staying = {key: each for key, each in subgroups.items() if key[0] in program.resident}
        sizes = sorted(
            each.streamed.num_bytes + (0 if key in staying else each.trained.num_bytes)
            for key, each in subgroups.items()
        )
        on_device_bytes = sum(sizes[-SLOTS:]) + (transport.staging_bytes if sizes else 0)
        copies = {key: _places_in(self._groups[key[0]], each.trained) for key, each in staying.items()}
        return StreamedUpdates(self._all(wanted), numbers, transport, copies), on_device_bytes

    def _subgroups(self, group: int, count: int) -> list[Subgroup]:
        if (group, count) not in self._cut:
            (unit,) = (unit for unit in self._units if group in unit.layers)
            self._cut[group, count] = subgroups_of(self._optimizer, unit, self._groups, count)
        return self._cut[group, count]

    def _all(self, wanted: Mapping[Any, _Wanted]) -> dict[Any, Any]:
        missing = {each.own: each for each in wanted.values() if each.own not in self._compiled}
        contents = {own: each.shared for own, each in missing.items()}
        self._compiled |= compile_shared(contents, lambda own: missing[own].lower())
        return {name: self._compiled[each.own] for name, each in wanted.items()}

    def _fold(self, group: int, earlier: list[Any], uses: Any) -> _Wanted:
        layer, where = self._there[group], self._placement.shares_of(self._groups[group])

        def fold(earlier: Any, uses: Any) -> Any:
            return layer.join_small(_total_of(layer, [*earlier, *uses], adds_rows=True))

        placed = [self._of_gradients(group, [*earlier]), self._of_gradients(group, uses)]
        return self._of_layer("fold", layer, fold, placed, where, donate=(0,))

    def _norm(self, group: int, uses: Any) -> _Wanted:
        layer = self._there[group]

        def squared_norm_of(uses: Any) -> Any:
            return squared_norm(_total_of(layer, uses))

        placed = [self._of_gradients(group, uses)]
        return self._of_layer("norm", layer, squared_norm_of, placed, self._placement.device)

    def _of_layer(
        self,
        name: str,
        layer: Layer,
        function: Callable[..., Any],
        arguments: list[Any],
        where: NamedSharding,
        donate: tuple[int, ...] = (),
    ) -> _Wanted:
        """A program that depends on a layer's layout alone; all of its results are at one place."""
        key = (name, layer.layout, _content(arguments), self._placement)
        return _Wanted(key, key, lambda: self._lowered(function, donate, *arguments, shardings=where), arguments)

    def _of_gradients(self, group: int, uses: Sequence[Sequence[Gradient]]) -> list[Any]:
        """The gradients of a group as arguments: devices share them, but each has all of some with rows."""
        shares, whole = self._placement.shares_of(self._groups[group]), self._placement.device
        return [_structs(use, whole if has_rows(use) else shares) for use in uses]

    def _update(self, unit: UpdateGroup, uses: list[Any], loss: Any) -> _Wanted:
        own, layers = self._on_devices[unit.layers], [self._layers[group] for group in unit.layers]
        compute = self._computing(own, layers, [self._there[group] for group in unit.layers])

        def update(masters: Any, state: Any, copies: Any, gradients: Any, *numbers: jax.Array) -> Any:
            masters, state, by_leaf = compute(masters, state, gradients, *numbers)
            return masters, state, [[_gathered(by_leaf[leaf.index], leaf) for leaf in layer.leaves] for layer in layers]

        where, device = where_on_devices(own, self._placement), self._placement.device
        held = [
            [_struct(x, at) for x, at in zip(arrays, of_each, strict=True)]
            for arrays, of_each in zip((own.masters, own.state), where, strict=True)
        ]
        copies, number = [_shapes(layer.leaves) for layer in layers], jax.ShapeDtypeStruct((), jnp.float32)
        of_groups = [self._of_gradients(group, of_group) for group, of_group in zip(unit.layers, uses, strict=True)]
        arguments = [
            *held,
            self._on_device(copies),
            of_groups,
            *self._on_device([number, number, loss, *self._optimizer.extra]),
        ]
        content, is_for_all = self._updates.plain_content(unit)
        layouts = tuple(self._there[group].layout for group in unit.layers)
        key = ("update on the device", content, layouts, _content(arguments), self._placement)
        shardings = (*where, device)
        return _Wanted(
            key,
            key if is_for_all else None,
            lambda: self._lowered(update, (0, 1, 2), *arguments, shardings=shardings),
            arguments,
        )

    def _streamed_update(self, subgroup: Subgroup, group: int, uses: list[Any], loss: Any, copy_stays: bool) -> _Wanted:
        unit, trained, streamed, moved = subgroup.unit, subgroup.trained, subgroup.streamed, subgroup.moved
        whole, num = self._layers[group], len(unit.masters)
        compute = self._computing(unit, [trained], [whole], subgroup.spans)
        avals = [*unit.masters, *unit.state]
        stays = [i for i in range(len(avals)) if i not in set(moved)]

        def update(moved_arrays: Any, kept: Any, copies: Any, uses: Any, *numbers: jax.Array) -> Any:
            by_number = dict(zip((*moved, *stays), (*moved_arrays, *kept), strict=True))
            arrays = [by_number[i] for i in range(len(by_number))]
            masters, state, by_leaf = compute(arrays[:num], arrays[num:], [uses], *numbers)
            made = [*masters, *state]
            parameters = [by_leaf[leaf.index] for leaf in trained.leaves]
            if copy_stays:
                spans = [subgroup.spans.get(leaf.index) for leaf in trained.leaves]
                parameters = list(map(_written, copies, parameters, spans))
            else:
                parameters = trained.join_small(parameters)
            return streamed.join_small([made[i] for i in moved]), [made[i] for i in stays], parameters

        number = jax.ShapeDtypeStruct((), jnp.float32)
        copies = [whole.leaves[place] for place in _places_in(whole, trained)] if copy_stays else []
        arrays = [avals[i] for i in moved], [avals[i] for i in stays], _shapes(copies), uses, number, number, loss
        arguments = self._on_device([*arrays, *self._optimizer.extra])
        content, is_for_all = self._updates.plain_content(unit)
        indices = [leaf.index for leaf in whole.leaves]
        chosen = tuple(indices.index(leaf.index) for leaf in trained.leaves)
        layouts = (whole.layout, chosen, trained.layout, streamed.layout, tuple(moved))
        starts = tuple(
            subgroup.spans[leaf.index].start if leaf.index in subgroup.spans else 0 for leaf in trained.leaves
        )
        own = ("streamed update", content, layouts, starts, _content(arguments), self._placement)
        shared = own if is_for_all else None
        return _Wanted(own, shared, lambda: self._lowered(update, (0, 1, 2), *arguments), arguments)

    def _computing(
        self,
        unit: UpdateGroup,
        layers: Sequence[Layer],
        sources: Sequence[Layer],
        spans: Mapping[int, Span] | None = None,
    ) -> Callable[..., Any]:
        """The update of a unit, for a jitted function; nothing changes unless the loss is finite.

        It maps `(masters, state, gradients, norm, scale, loss, *extra)` to masters, state and compute parameters by
        index of the leaf. `sources` are the layers of `gradients`; `spans` the elements of leaves that the unit has in
        part.
        """
        spans = {} if spans is None else spans
        own = {leaf.index for layer in layers for leaf in layer.leaves}
        plain, masters_of = self._updates.plain(unit, layers), masters_by_leaf(unit, layers)
        is_whole = not any(map(is_shared, unit.keys)) or bool(spans)

        def compute(
            masters: Any, state: Any, gradients: Any, norm: jax.Array, scale: jax.Array, loss: jax.Array, *extra: Any
        ) -> Any:
            found: dict[int, jax.Array] = {}
            for layer, uses in zip(sources, gradients, strict=True):
                for leaf, gradient in zip(layer.leaves, _total_of(layer, uses), strict=True):
                    if leaf.index in own:
                        held = _gathered(gradient, leaf) if is_whole else gradient
                        held = spans[leaf.index].of(held) if leaf.index in spans else held
                        found[leaf.index] = held / scale.astype(gradient.dtype)
            made, is_finite = plain(masters, state, found, norm, extra), jnp.isfinite(loss)
            masters, state = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), made, (masters, state))
            by_leaf = masters_of(masters)
            leaves = (leaf for layer in layers for leaf in layer.leaves)
            return masters, state, {leaf.index: by_leaf[leaf.index].astype(leaf.dtype) for leaf in leaves}

        return compute

    def _lowered(
        self, function: Callable[..., Any], donate: tuple[int, ...], *arguments: Any, shardings: Any = None
    ) -> Any:
        shardings = self._placement.device if shardings is None else shardings
        jitted = jax.jit(function, donate_argnums=donate, keep_unused=True, out_shardings=shardings)
        return lower_traced(jitted.trace(*arguments))

    def _on_device(self, tree: Any) -> Any:
        return _structs(tree, self._placement.device)


def _total_of(layer: Layer, uses: Uses, adds_rows: bool = False) -> list[jax.Array]:
    """The sum over all uses, in the master dtypes, one array for each leaf; zeros without any.

    Of a layer that devices share, they are flat, as of `SharedLayer.filled_up`. With `adds_rows`, rows of the first use
    are added in the master dtypes as well, as the host does over micro-batches.
    """
    zeros = [jnp.zeros(leaf.shape, leaf.master_dtype) for leaf in layer.leaves]
    total = None
    for use in uses:
        gradients = _of_shares(layer, use, zeros, adds_rows) if isinstance(layer, SharedLayer) else split(layer, use)
        if total is None:
            total = [_widened(g, z, adds_rows) for g, z in zip(gradients, zeros, strict=True)]
        else:
            total = [added(a, g) for a, g in zip(total, gradients, strict=True)]
    if total is None and isinstance(layer, SharedLayer):
        return layer.filled_up(zeros)
    return zeros if total is None else total


def _of_shares(
    layer: SharedLayer, use: Sequence[Gradient], zeros: Sequence[jax.Array], adds_rows: bool
) -> list[Gradient]:
    """The gradients of a use as devices share them; those with rows are whole until now."""
    if not has_rows(use):
        return [*layer.split_shares([array for array in use if not isinstance(array, RowGradient)])]
    return [*layer.filled_up([_widened(g, z, adds_rows) for g, z in zip(use, zeros, strict=True)])]


def _widened(gradient: Gradient, zeros: jax.Array, adds_rows: bool) -> jax.Array:
    if not isinstance(gradient, RowGradient):
        return gradient.astype(zeros.dtype)
    return gradient.onto(zeros) if adds_rows else as_stored(gradient.dense()).astype(zeros.dtype)


def _gathered(array: jax.Array, leaf: Leaf) -> jax.Array:
    """A parameter, or its gradient, of which devices may have shares; gathers them."""
    return array if array.shape == leaf.shape else array[: leaf.size].reshape(leaf.shape)


def _uses(program: StepProgram, programs: Programs) -> dict[int, list[Any]]:
    """By group updated on the device, the shapes of its gradients: one list for each segment that reads it."""
    uses: dict[int, list[Any]] = {}
    for instruction in program.programs:
        if instruction.operation not in (Operation.LOSS, Operation.BACKWARD) or instruction.key is None:
            continue
        groups = program.partition.segments[instruction.segment].groups
        for place in (place for place, group in enumerate(groups) if group in program.updated_on_device):
            uses.setdefault(groups[place], []).append(programs.gradients_of(instruction.key)[place])
    return uses


def _struct(x: Any, where: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def _structs(tree: Any, where: NamedSharding) -> Any:
    return jax.tree.map(lambda x: _struct(x, where), tree)


def _shapes(leaves: Sequence[Leaf]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]


def _places_in(layer: Layer, part: Layer) -> list[int]:
    """The places of the parameters of a part of a layer among its parameters."""
    places = {leaf.index: place for place, leaf in enumerate(layer.leaves)}
    return [places[leaf.index] for leaf in part.leaves]


def _written(copy: jax.Array, made: jax.Array, span: Span | None) -> jax.Array:
    """A parameter with new elements, in the memory of a donated `copy`; all of them are new if `span` is None."""
    if span is None:
        return made
    return jax.lax.dynamic_update_slice(copy.reshape(-1), made, (span.start,)).reshape(copy.shape)


def _content(arguments: Any) -> Any:
    leaves, structure = jax.tree.flatten(arguments)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _more_bytes(program: Any) -> int:
    """The device memory that a program needs besides its arguments; what it updates in place needs none."""
    stats = program.memory_analysis()
    return 0 if stats is None else stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
