"""The model that a training step trains: its parameter tree, its optimizer, and their layout in host memory."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxferry.engine import UNSCALED, Owner, TrainState, groups_backward, groups_with_buffers
from jaxferry.errors import HostMemoryError, InputError
from jaxferry.optimizer import (
    Disk,
    HostOptimizer,
    Scratch,
    Stored,
    UpdateGroup,
    host_array,
    host_memory,
    init_of,
    master_bytes,
    masters_from_arrays,
    masters_layer_by_layer,
    put_on_disk,
    splits_masters,
    stored_whole,
)
from jaxferry.partition import (
    Layer,
    Ownership,
    Partition,
    Span,
    aval_bytes,
    frozen_leaves,
    held_whole,
    layers_by_path,
    result_shapes,
    stored_struct,
)
from jaxferry.processes import is_key
from jaxferry.step import DISK_SLOTS, streamed_state_bytes
from jaxferry.training.options import ALL, Numerics
from jaxferry.training.step import Prepared
from jaxferry.transport import Placement, choose_transport

ACCELERATOR_DTYPE: Any = jnp.bfloat16
"""The dtype in which an accelerator sees fp32 parameters, unless `compute_dtype` says otherwise."""

_COPIES = "copies to read in place"
_SAVED = "saved activations"
_SUMS = "sums of gradients"
_MASTERS = "master parameters"
_WHOLE = "master parameters that are not split"
_LESS_MOVED = "take smaller or shorter batches (with offload_activations=True), or a plan that reads no layer in place"
_GRADIENTS = "gradients"
_STATE = "optimizer state"
_OF_STEPS = ("compute copy", _GRADIENTS, _SUMS)
_FEW_BUFFERS = (32, 16, 8, 4, 2)
"""Numbers of gradient buffers to try where host memory does not hold all gradients."""


@dataclasses.dataclass(frozen=True)
class DiskOptions:
    """The scratch file for masters and optimizer state that `host_memory_bytes` do not hold.

    Without these, what the process may still take counts, before a state is made.
    """

    scratch: Scratch | None = None
    host_memory_bytes: int | None = None


NO_DISK = DiskOptions()


class Model:
    """Shapes and dtypes of a model's parameters, with the host optimizer that updates them.

    Raises `InputError` if a parameter or the transport is not acceptable.

    Attributes:
      params: the tree, of shape structs.
      compute_dtype: the dtype in which the device sees parameters; None for their own.
      layers: the parameter groups that the paths of the tree suggest.
      transport: the kind of transport, one of `engine.TRANSPORTS`.
    """

    def __init__(
        self,
        params: Any,
        optimizer: optax.GradientTransformation,
        numerics: Numerics,
        placement: Placement,
        transport: str | None,
        gradient_buffers: int | str | None = None,
        disk: DiskOptions = NO_DISK,
    ) -> None:
        self.numerics, self._placement, self._optax = numerics, placement, optimizer
        self._gradient_buffers, self._disk = gradient_buffers, disk
        by_default = None if placement.platform == "cpu" else accelerator_dtype(params)
        self.compute_dtype: Any = by_default if numerics.compute_dtype is None else numerics.compute_dtype
        hidden = frozen_leaves(numerics.trainable, params)
        layers = layers_by_path(params, self.compute_dtype, hidden)
        self.params = abstract(params)
        leaves, tree = jax.tree.flatten(self.params)
        dtypes = _master_dtypes(layers)
        masters = [jax.ShapeDtypeStruct(stored_struct(leaf).shape, dtypes[i]) for i, leaf in enumerate(leaves)]
        self.optimizer = HostOptimizer(
            optimizer, tree, masters, placement, numerics.clip_norm, hidden, numerics.extra_args
        )
        by_path = layers_by_path(params, self.compute_dtype, self.optimizer.frozen)
        self.layers = held_whole(by_path, self.optimizer.whole)
        self.optimizer.check_parts(self.layers)
        self.transport = choose_transport(transport, placement, self.layers)
        self._disk_groups: dict[tuple[Layer, ...], frozenset[int]] = {}
        self._left_bytes: int | None = None
        self._known: tuple[tuple[Layer, ...], Mapping[int, int], Collection[int], Collection[int] | None]
        self._known = (), {}, (), None

    def on(self, placement: Placement) -> Model:
        """The same model on other devices, with the same transport."""
        own = self.numerics, placement, self.transport, self._gradient_buffers, self._disk
        return Model(self.params, self._optax, *own)

    @functools.cached_property
    def gradient_buffers(self) -> int | None:
        """The most programs whose gradients may be in host memory at one time; None for all.

        Unless the user says so, it is None if host memory holds all. Several processes would have to agree.
        """
        given = self._gradient_buffers
        if given is None or isinstance(given, int) or given == ALL:
            return given if isinstance(given, int) else None
        can_few = not self.numerics.rules.need_all_gradients and self.optimizer.is_by_layer(self.layers)
        if not can_few or self._placement.num_processes > 1:
            return None

        def fits(num: int | None) -> bool:
            return self._fits(self.host_bytes(with_buffers=self._with_buffers(self.layers, num), on_disk=()))

        return few_buffers(fits)

    def _fits(self, found: dict[str, int]) -> bool:
        if self._disk.host_memory_bytes is not None:
            return sum(found.values()) <= self._disk.host_memory_bytes
        with contextlib.suppress(HostMemoryError):
            self._check(found)
            return True
        return False

    def disk_groups(self, layers: Sequence[Layer]) -> frozenset[int]:
        """The groups whose masters and optimizer state are in the scratch file: as few as host memory allows.

        They are spread evenly, so that the disk works beside other groups' updates. The first answer is given before a
        state exists; later ones, for other groups, leave as many bytes to the disk.
        """
        key = tuple(layers)
        if self._disk.scratch is None:
            return frozenset()
        if not self.optimizer.is_by_layer(layers):
            raise InputError(
                "scratch needs an optimizer that updates each layer alone: this one updates several at once"
            )
        if key not in self._disk_groups:
            sizes = self._state_sizes(layers)
            usual = 2 * sorted(sizes.values())[len(sizes) // 2] if sizes else 0
            able = sorted(sizes, key=lambda group: (sizes[group] > usual, group))
            num_usual = sum(sizes[group] <= usual for group in able)
            self._disk_groups[key] = chosen = frozenset(self._fewest(layers, able, num_usual, sizes))
            if self._left_bytes is None:
                self._left_bytes = sum(sizes[group] for group in chosen)
        return self._disk_groups[key]

    def _fewest(
        self, layers: Sequence[Layer], able: Sequence[int], num_usual: int, sizes: Mapping[int, int]
    ) -> list[int]:
        chosen: list[int] = []
        for num in range(len(able) + 1):
            if num <= num_usual:
                chosen = [able[num_usual * (2 * place + 1) // (2 * num)] for place in range(num)]
            else:
                chosen = list(able[:num])
            if self._left_bytes is None:
                is_enough = self._fits(self.host_bytes(layers, on_disk=chosen))
            else:
                is_enough = sum(sizes[group] for group in chosen) >= self._left_bytes
            if is_enough:
                break
        return chosen

    def _state_sizes(self, layers: Sequence[Layer]) -> dict[int, int]:
        """The bytes of masters and optimizer state, by group, as host memory or the scratch file has them."""
        splits, found = self.optimizer.updates.splits_masters, dict[int, int]()
        for unit in self.optimizer.units_of(layers):
            own = [leaf for group in unit.layers for leaf in layers[group].trained.leaves]
            found[unit.layers[0]] = sum(master_bytes(leaf, splits) for leaf in own) + _moved_bytes(unit)
        return found

    @functools.cached_property
    def disk_seconds_a_byte(self) -> tuple[float, float]:
        """What a byte takes from the scratch file, and to it, as measured."""
        assert self._disk.scratch is not None
        return self._disk.scratch.seconds_a_byte()

    def state_on_disk(self, layers: Sequence[Layer]) -> dict[str, int]:
        """The bytes of masters and optimizer state of each group that is in the scratch file, by name."""
        groups = self.disk_groups(layers)
        return {layers[group].name: size for group, size in self._state_sizes(layers).items() if group in groups}

    def _kept(self, stored: Stored) -> Stored:
        """An array that a new state is made of; in the scratch file, if there is one."""
        if (scratch := self._disk.scratch) is None or not self.disk_groups(self.layers):
            return stored
        return dataclasses.replace(
            stored, pieces={where: put_on_disk(array, scratch) for where, array in stored.pieces.items()}
        )

    def masters_from(self, init_fn: Callable[[Any], Any], rng: Any) -> dict[int, Stored]:
        """The parameters that `init_fn(rng)` makes, layer by layer: see `masters_layer_by_layer`."""
        return masters_layer_by_layer(init_fn, rng, self.layers, self._placement, self._kept)

    @functools.cached_property
    def update_text(self) -> str:
        """What an update computes, traced: equal in processes with the same optimizer and options."""
        traced = self.optimizer.jaxprs()
        constants = [np.asarray(constant).tobytes().hex() for jaxpr in traced for constant in jaxpr.consts]
        # Printed functions have addresses, which differ.
        steps = re.sub(r" at 0x[0-9a-f]+", "", "".join(map(str, traced)))
        return f"{steps} {constants} {self.numerics.clip_norm} {self.numerics.weight}"

    @property
    def is_native(self) -> bool:
        """Whether programs access host memory through the native library."""
        return self.transport == "ferry"

    def host_bytes(
        self,
        layers: Sequence[Layer] = (),
        read: Collection[int] = (),
        saved_bytes: int = 0,
        widened: Mapping[int, int] | None = None,
        streamed: Collection[int] = (),
        with_buffers: Collection[int] | None = None,
        on_disk: Collection[int] | None = None,
    ) -> dict[str, int]:
        """Bytes of host memory that a training step keeps in this process, by what they are for.

        Args:
          layers: the parameter groups; none for those that paths suggest, whose shares differ by a few elements.
          read: the groups that programs read in host memory; each of several processes has them whole.
          saved_bytes: activations that wait in host memory for their backward.
          widened: the groups whose gradients are summed in more bits, as in `StepProgram`; None if no batch has shown
            these.
          streamed: the groups whose updates stream through the GPU, with whole masters.
          with_buffers: the groups whose gradients have memory of their own; None if no batch has shown the programs.
          on_disk: the groups whose masters and optimizer state are in the scratch file; None for `disk_groups`.
        """
        own, layers = self._placement.ownership, layers or self.layers
        state: Iterable[Any] = self.optimizer.state_shapes.values()
        if not own.is_all:
            state = [aval for unit in self.optimizer.units_of(layers) for aval in unit.state]
        copies = sum(own.num_whole_bytes(layers[group]) for group in read)
        more = {_COPIES: copies, _SAVED: saved_bytes}
        if self.numerics.accumulate > 1:
            widened = dict.fromkeys(range(len(layers)), 1) | dict(widened or {})
        splits = [self.optimizer.updates.splits_masters and group not in streamed for group in range(len(layers))]
        if with_buffers is None:
            with_buffers = self._with_buffers(layers, self.gradient_buffers)
        of_training = _host_bytes(layers, state, own, widened or {}, self._placement.is_cpu, splits, with_buffers)
        on_disk = self.disk_groups(layers) if on_disk is None else on_disk
        if on_disk:
            self._leave_out(of_training, layers, on_disk)
        return of_training | {name: num_bytes for name, num_bytes in more.items() if num_bytes}

    def _leave_out(self, found: dict[str, int], layers: Sequence[Layer], on_disk: Collection[int]) -> None:
        """Takes masters and state that are in the scratch file from these bytes, and adds the slots for updates."""
        sizes, slots = self._state_sizes(layers), collections.Counter[int]()
        for unit in self.optimizer.units_of(layers):
            if (group := unit.layers[0]) in on_disk:
                state_bytes = _moved_bytes(unit)
                found[_STATE] -= state_bytes
                found[_MASTERS] -= sizes[group] - state_bytes
                slots[sizes[group]] += 1
        found[host_memory.SLOTS] = sum(size * min(num, DISK_SLOTS) for size, num in slots.items())

    def host_bytes_of(self, prepared: Prepared) -> dict[str, int]:
        """Bytes of host memory that training by a prepared step keeps in this process."""
        program = prepared.program
        layers, saved_bytes = program.partition.layers, prepared.saved_bytes
        kinds = program.widened, program.streamed, buffered_groups(program.partition, prepared.plan.gradient_buffers)
        return self.host_bytes(layers, program.read_in_place, saved_bytes, *kinds)

    def _with_buffers(self, layers: Sequence[Layer], num: int | None) -> frozenset[int]:
        """The groups with gradient buffers, if each has a program of its own."""
        return groups_with_buffers(layers, [[group] for group in reversed(range(len(layers)))], num)

    def _known_bytes(self) -> dict[str, int]:
        """Bytes of host memory as the last step prepared shows them, without what depends on its plan."""
        layers, widened, streamed, with_buffers = self._known
        return self.host_bytes(layers, widened=widened, streamed=streamed, with_buffers=with_buffers)

    def check_host_memory(self) -> None:
        """Checks that host memory can hold everything that a training step keeps there, before a state is made.

        Raises `HostMemoryError` if it cannot.
        """
        found = self._known_bytes()
        self._check_pinned(found)
        self._check(found)
        host_memory.return_freed_blocks()

    def _check(self, found: dict[str, int]) -> None:
        """Raises `HostMemoryError` if these bytes do not fit."""
        if self._placement.allocator is None:
            host_memory.check(found)
        else:
            num_bytes = host_memory.pinned_bytes(found)
            advice = host_memory.pinned_advice(num_bytes)
            remedy = f"{host_memory.LESS_STATE}, {advice}" if advice else host_memory.LESS_STATE
            host_memory.check(found | {"unused pinned memory": host_memory.unused_of_pool(num_bytes)}, remedy=remedy)

    def _check_pinned(self, found: Mapping[str, int], streamed_bytes: int = 0) -> None:
        if not self._placement.is_cpu:
            host_memory.check_pinned(host_memory.pinned_bytes(found, streamed_bytes))

    def holds_whole_masters(self, layers: Sequence[Layer], is_first: bool) -> bool:
        """Whether host memory holds the masters of these groups whole, as updates that stream need them."""
        known, whole = self._known_bytes(), self.host_bytes(layers, streamed=range(len(layers)))[_MASTERS]
        needed = {_WHOLE: max(whole - known[_MASTERS], 0)}
        needed |= {name: known[name] for name in _OF_STEPS if is_first and name in known}
        with contextlib.suppress(HostMemoryError):
            held_bytes = sum(known.values()) - sum(known.get(name, 0) for name in needed)
            host_memory.check(needed, held_bytes=held_bytes)
            return True
        return not needed[_WHOLE]

    def check_step(self, prepared: Prepared, is_first: bool, kept_bytes: int, is_begun: bool) -> None:
        """Checks that host memory can hold what a prepared step keeps there beside the state.

        If no step has been prepared before (`is_first`), that includes gradients and compute copy, unless a thread has
        made these and sums (`is_begun`). Of saved activations, `kept_bytes` exist, which the device's client keeps.
        Raises `HostMemoryError` if it cannot.
        """
        found, streamed_bytes = self.host_bytes_of(prepared), streamed_state_bytes(prepared.profile, prepared.plan)
        self._check_pinned(found, streamed_bytes)
        needed = {name: found[name] for name in (_COPIES, _SAVED) if name in found}
        remedy = host_memory.LESS_STATE if not needed else _LESS_MOVED
        # Only batches show which gradients are summed in more bits; what is known has been checked before.
        known = self._known_bytes()
        more_sums = found.get(_SUMS, 0) - known.get(_SUMS, 0)
        if more_sums > 0:
            needed[_SUMS] = more_sums
        if found[_MASTERS] > known[_MASTERS]:
            needed[_WHOLE] = found[_MASTERS] - known[_MASTERS]
        if self.gradient_buffers is not None and found[_GRADIENTS] > known[_GRADIENTS]:
            needed[_GRADIENTS] = found[_GRADIENTS] - known[_GRADIENTS]
        if not needed:
            return
        if is_first and not is_begun:
            needed |= {name: found[name] for name in _OF_STEPS if name in found}
        held_bytes = sum(found.values()) - sum(needed.values())
        existing_bytes = min(kept_bytes, needed.get(_SAVED, 0)) + is_begun * needed.get(_SUMS, 0)
        host_memory.check(needed, "a step", remedy, held_bytes, existing_bytes)
        if needed.keys() & {_SUMS, _WHOLE, _GRADIENTS}:
            program, num = prepared.program, prepared.plan.gradient_buffers
            kinds = program.widened, program.streamed, buffered_groups(prepared.partition, num)
            self._known = prepared.partition.layers, *kinds

    def masters(self, leaves: Sequence[Any]) -> dict[int, Stored]:
        """Copies parameters, or what this process owns of them, to host memory in the masters' dtypes."""
        dtypes, own, numbers = _master_dtypes(self.layers), self._placement.ownership, range(len(leaves))
        spans = {leaf.index: own.span(layer, leaf) for layer in self.layers for leaf in layer.leaves}
        return masters_from_arrays(
            leaves, [dtypes[leaf] for leaf in numbers], self._placement, [spans[leaf] for leaf in numbers], self._kept
        )

    def optimizer_state(self, leaves: Mapping[str, Any]) -> dict[str, Stored]:
        """Reads the leaves of the optimizer's state from a checkpoint likewise, by path; they keep their dtypes."""
        state = [key for unit in self.optimizer.units_of(self.layers) for key in unit.state_keys]
        spans = {name: span for name, span in state if isinstance(span, Span)}
        where = self._placement.host
        return {
            name: stored_whole(jax.device_put(leaf.read(), where, may_alias=False))
            if is_key(leaf)
            else self._kept(host_array(leaf, self._placement, leaf.dtype, spans.get(name)))
            for name, leaf in leaves.items()
        }

    def new_state(
        self,
        masters: dict[int, Stored],
        layers: Sequence[Layer],
        optimizer: dict[str, Stored] | None = None,
        step: int = 0,
        *,
        owner: Owner,
    ) -> TrainState:
        """A training state after `step` steps.

        `masters`, by index in the flattened tree, and leaves of the optimizer's state, by path, are donated; without
        the latter, the state is initial.
        """
        scale = self.numerics.loss_scale or UNSCALED
        held_bytes = sum(self._known_bytes().values())
        disk = None if self._disk.scratch is None else Disk(self._disk.scratch, self.disk_groups)
        own = self.params, self.optimizer, self._placement, layers, masters, owner, held_bytes
        return TrainState(*own, optimizer, step, scale, disk)


def host_bytes(
    params: Any,
    optimizer: optax.GradientTransformation,
    compute_dtype: Any,
    layers: Sequence[Layer],
    widened: Mapping[int, int],
    streamed: Collection[int] = (),
    with_buffers: Collection[int] | None = None,
) -> dict[str, int]:
    """`Model.host_bytes` for an optimizer that trains all parameters, of which shapes are enough; traces no update."""
    dtypes = _master_dtypes(layers_by_path(params, compute_dtype))
    leaves, tree = jax.tree.flatten(params)
    masters = [jax.ShapeDtypeStruct(leaf.shape, dtypes[i]) for i, leaf in enumerate(leaves)]
    state = result_shapes(init_of(optimizer), jax.tree.unflatten(tree, masters))
    splits = [splits_masters(optimizer, state) and group not in streamed for group in range(len(layers))]
    with_buffers = range(len(layers)) if with_buffers is None else with_buffers
    return _host_bytes(layers, jax.tree.leaves(state), Ownership(), widened, False, splits, with_buffers)


def _moved_bytes(unit: UpdateGroup) -> int:
    """The bytes of a unit's optimizer state, without counts, which units share."""
    return sum(aval_bytes(leaf) for leaf in unit.state if leaf.ndim)


def buffered_groups(parts: Partition, num: int | None) -> frozenset[int]:
    """The groups whose gradients have memory of their own on the host: see `Plan.gradient_buffers`."""
    return groups_with_buffers(parts.layers, groups_backward(parts), num)


def few_buffers(fits: Callable[[int | None], bool]) -> int | None:
    """The most gradient buffers, None for all, with which training fits into host memory; the fewest if none does."""
    return next(filter(fits, (None, *_FEW_BUFFERS)), _FEW_BUFFERS[-1])


def _host_bytes(
    layers: Sequence[Layer],
    state: Iterable[Any],
    ownership: Ownership,
    widened: Mapping[int, int],
    is_cpu: bool,
    splits: Sequence[bool],
    with_buffers: Collection[int],
) -> dict[str, int]:
    pairs = [(leaf, is_so) for layer, is_so in zip(layers, splits, strict=True) for leaf in ownership.of(layer).leaves]
    # The compute copy of a frozen parameter is its only copy if the dtypes agree.
    masters = [master_bytes(*pair) for pair in pairs if pair[0].is_trained or pair[0].master_dtype != pair[0].dtype]
    trained = [layer.trained for layer in layers]
    # Where gradients of fewer bits are summed, these arrive in memory of their own: all of a step, unless a CPU adds
    # each at once.
    sums = sum(
        ownership.of(layer.wide).num_bytes
        for group, layer in enumerate(trained)
        if group in widened and layer.wide is not layer
    )
    num_arriving = [(1 if is_cpu else widened.get(group, 1)) * (group in with_buffers) for group in range(len(trained))]
    return {
        _MASTERS: sum(masters),
        _STATE: sum(map(aval_bytes, state)),
        "compute copy": sum(map(ownership.num_host_bytes, layers)),
        _GRADIENTS: sum(map(operator.mul, num_arriving, map(ownership.num_host_bytes, trained))),
        **({_SUMS: sums} if sums else {}),
    }


def abstract(params: Any) -> Any:
    """The tree of parameters as shape structs; a leaf that is no array stays as it is."""

    def shape_of(leaf: Any) -> Any:
        is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array else leaf

    return jax.tree.map(shape_of, params)


def accelerator_dtype(params: Any) -> Any:
    """The dtype in which an accelerator sees these parameters by default: `ACCELERATOR_DTYPE` for fp32, else None."""
    is_single = all(getattr(leaf, "dtype", None) == np.float32 for leaf in jax.tree.leaves(params))
    return ACCELERATOR_DTYPE if is_single else None


def _master_dtypes(layers: Sequence[Layer]) -> dict[int, np.dtype]:
    return {leaf.index: leaf.master_dtype for layer in layers for leaf in layer.leaves}
