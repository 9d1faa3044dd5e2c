"""The model that a training step trains: its parameter tree, its optimizer, and their layout in host memory."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxferry.costs import UpdateBytes
from jaxferry.engine import UNSCALED, Owner, TrainState, groups_with_buffers
from jaxferry.errors import HostMemoryError, InputError
from jaxferry.optimizer import (
    Disk,
    HostOptimizer,
    MasterForm,
    Stored,
    host_array,
    host_memory,
    joined_bytes,
    masters_from_arrays,
    masters_layer_by_layer,
    stored_whole,
)
from jaxferry.partition import (
    Layer,
    Span,
    frozen_leaves,
    held_whole,
    layers_by_path,
    stored_struct,
)
from jaxferry.processes import is_key, largest
from jaxferry.settings import users_stacklevel
from jaxferry.step import streamed_state_bytes
from jaxferry.training.disk import NO_DISK, DiskOptions, StateOnDisk
from jaxferry.training.host_usage import (
    FEW_BUFFERS,
    GRADIENTS,
    MASTERS,
    SUMS,
    buffered_groups,
    bytes_by_use,
    few_buffers,
    forms_of,
    master_dtypes,
    update_bytes_of,
)
from jaxferry.training.options import ALL, Numerics
from jaxferry.training.step import Prepared
from jaxferry.transport import Placement, choose_transport

ACCELERATOR_DTYPE: Any = jnp.bfloat16
"""The dtype in which an accelerator sees fp32 parameters, unless `compute_dtype` says otherwise."""

_COPIES = "copies to read in place"
_SAVED = "saved activations"
_WHOLE = "master parameters that are not split"
_LESS_MOVED = "take smaller or shorter batches (with offload_activations=True), or a plan that reads no layer in place"
_JOINED = "masters while they are updated"
_OF_STEPS = ("compute copy", GRADIENTS, SUMS)


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
        self._gradient_buffers, self._disk_options = gradient_buffers, disk
        by_default = None if placement.platform == "cpu" else accelerator_dtype(params)
        self.compute_dtype: Any = by_default if numerics.compute_dtype is None else numerics.compute_dtype
        hidden = frozen_leaves(numerics.trainable, params)
        layers = layers_by_path(params, self.compute_dtype, hidden)
        self.params = abstract(params)
        leaves, tree = jax.tree.flatten(self.params)
        dtypes = master_dtypes(layers)
        masters = [jax.ShapeDtypeStruct(stored_struct(leaf).shape, dtypes[i]) for i, leaf in enumerate(leaves)]
        self.optimizer = HostOptimizer(
            optimizer, tree, masters, placement, numerics.clip_norm, hidden, numerics.extra_args
        )
        by_path = layers_by_path(params, self.compute_dtype, self.optimizer.frozen)
        self.layers = held_whole(by_path, self.optimizer.whole)
        self.optimizer.check_parts(self.layers)
        self.transport = choose_transport(transport, placement, self.layers)
        in_memory = functools.partial(self.host_bytes, uses_disk=False)
        self.disk = StateOnDisk(disk, self.optimizer, placement.ownership, in_memory, self._fits)
        self._known: dict[str, Any] = {}
        self._split_masters()

    def _split_masters(self) -> None:
        """Has masters split that XLA updates whole, if host memory does not hold them beside the fewest gradients."""
        updates, given = self.optimizer.updates, self._gradient_buffers
        is_alone = self._placement.num_processes == 1 and self.optimizer.is_by_layer(self.layers)
        if not (is_alone and updates.can_split_all()):
            return
        has_all = given in (None, ALL) or self.numerics.rules.need_all_gradients
        num = given if isinstance(given, int) else None if has_all else FEW_BUFFERS[-1]

        def needed() -> dict[str, int]:
            return self.host_bytes(with_buffers=self._with_buffers(self.layers, num), uses_disk=False)

        whole = needed()
        if self._fits(whole):
            return
        updates.split_all(True)
        split = needed()
        if sum(split.values()) >= sum(whole.values()):
            updates.split_all(False)
        elif self._fits(split) or self._disk_options.scratch is not None:
            warnings.warn(
                "host memory does not hold the fp32 masters: they are stored as the compute copy and what it lacks, so "
                "updates take longer (those of jaxferry.adamw, adam, lion and sgd do not)",
                stacklevel=users_stacklevel(),
            )

    def on(self, placement: Placement) -> Model:
        """The same model on other devices, with the same transport."""
        own = self.numerics, placement, self.transport, self._gradient_buffers, self._disk_options
        return Model(self.params, self._optax, *own)

    @functools.cached_property
    def gradient_buffers(self) -> int | None:
        """The most programs whose gradients may be in host memory at one time; None for all.

        Unless the user says so, it is None if host memory holds all. Several processes would have to agree.
        """
        given = self._gradient_buffers
        if given is None or given == ALL:
            return None
        if isinstance(given, int):
            if not self.optimizer.is_by_layer(self.layers):
                raise InputError(
                    f"gradient_buffers={given} needs an optimizer that updates each layer alone: this one waits for "
                    "all gradients"
                )
            return given
        can_few = not self.numerics.rules.need_all_gradients and self.optimizer.is_by_layer(self.layers)
        if not can_few or self._placement.num_processes > 1:
            return None

        def fits(num: int | None) -> bool:
            return self._fits(self.host_bytes(with_buffers=self._with_buffers(self.layers, num), uses_disk=False))

        num = few_buffers(fits)
        if num is not None and fits(num):
            warnings.warn(
                f"host memory does not hold all gradients: it holds those of {num} programs at a time "
                f"(gradient_buffers={num}), so steps may take longer",
                stacklevel=users_stacklevel(),
            )
        return num

    def _fits(self, found: dict[str, int]) -> bool:
        """Whether host memory holds these bytes, before a state exists."""
        if (most := self._disk_options.host_memory_bytes) is not None:
            return sum(found.values()) <= most
        with contextlib.suppress(HostMemoryError):
            self._check(found)
            return True
        return False

    def masters_from(self, init_fn: Callable[[Any], Any], rng: Any) -> dict[int, Stored]:
        """The parameters that `init_fn(rng)` makes, layer by layer: see `masters_layer_by_layer`."""
        return masters_layer_by_layer(init_fn, rng, self.layers, self._placement, self.disk.keeper(self.layers))

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
        uses_disk: bool = True,
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
          uses_disk: whether some masters and state are in the scratch file, if there is one.
        """
        own, layers = self._placement.ownership, layers or self.layers
        state: Iterable[Any] = self.optimizer.state_shapes.values()
        if not own.is_all:
            state = [aval for unit in self.optimizer.units_of(layers) for aval in unit.state]
        copies = sum(own.num_whole_bytes(layers[group]) for group in read)
        more = {_COPIES: copies, _SAVED: saved_bytes}
        if self.numerics.accumulate > 1:
            widened = dict.fromkeys(range(len(layers)), 1) | dict(widened or {})
        forms = self._forms(layers, streamed)
        if with_buffers is None:
            with_buffers = self._with_buffers(layers, self.gradient_buffers)
        of_training = bytes_by_use(layers, state, own, widened or {}, self._placement.is_cpu, forms, with_buffers)
        of_training = self.disk.left(of_training, layers) if uses_disk else of_training
        if self.optimizer.updates.joins_masters:
            split = (layer for layer, form in zip(layers, forms, strict=True) if form is MasterForm.SPLIT)
            more[_JOINED] = max((joined_bytes(own.placed(layer.trained)) for layer in split), default=0)
        return of_training | {name: num_bytes for name, num_bytes in more.items() if num_bytes}

    def update_bytes(self, layers: Sequence[Layer]) -> UpdateBytes:
        """The bytes of an update, by parameter: those of the whole model, so that all processes have the same."""
        state, updates = self.optimizer.state_shapes.values(), self.optimizer.updates
        return update_bytes_of(layers, state, self._forms(layers, ()), updates.joins_masters)

    def _forms(self, layers: Sequence[Layer], streamed: Collection[int]) -> list[MasterForm]:
        """The form of each group's masters."""
        updates = self.optimizer.updates
        if not updates.joins_masters:
            return forms_of(updates.master_form, layers, streamed)
        # Layers that hold parts of a parameter, as only a batch shows, may be updated together.
        units = self.optimizer.units_of(layers)
        known = {group: updates.form_of(unit, layers) for unit in units for group in unit.layers}
        known |= dict.fromkeys(streamed, MasterForm.WHOLE)
        return [known.get(group, MasterForm.WHOLE) for group in range(len(layers))]

    def host_bytes_of(self, prepared: Prepared) -> dict[str, int]:
        """Bytes of host memory that training by a prepared step keeps in this process."""
        read = prepared.program.read_in_place
        return self.host_bytes(read=read, saved_bytes=prepared.saved_bytes, **_updated(prepared))

    def _with_buffers(self, layers: Sequence[Layer], num: int | None) -> frozenset[int]:
        """The groups with gradient buffers, if each has a program of its own."""
        return groups_with_buffers(layers, [[group] for group in reversed(range(len(layers)))], num)

    def _known_bytes(self) -> dict[str, int]:
        """Bytes of host memory as the last step prepared shows them, without what depends on its plan."""
        return self.host_bytes(**self._known)

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
        remedy = self._less_state
        if self._placement.allocator is not None:
            num_bytes = host_memory.pinned_bytes(found)
            advice = host_memory.pinned_advice(num_bytes)
            remedy = f"{remedy}, {advice}" if advice else remedy
            found = found | {"unused pinned memory": host_memory.unused_of_pool(num_bytes)}
        host_memory.check(found, remedy=remedy)

    @property
    def _less_state(self) -> str:
        return host_memory.less_state(self._disk_options.scratch is not None)

    def _check_pinned(self, found: Mapping[str, int], streamed_bytes: int = 0) -> None:
        if not self._placement.is_cpu:
            host_memory.check_pinned(host_memory.pinned_bytes(found, streamed_bytes))

    def holds_whole_masters(self, layers: Sequence[Layer], is_first: bool) -> bool:
        """Whether host memory holds the masters of these groups whole, as updates that stream need them."""
        known, whole = self._known_bytes(), self.host_bytes(layers, streamed=range(len(layers)))[MASTERS]
        needed = {_WHOLE: max(whole - known[MASTERS], 0)}
        needed |= {name: known[name] for name in _OF_STEPS if is_first and name in known}
        with contextlib.suppress(HostMemoryError):
            held_bytes = sum(known.values()) - sum(known.get(name, 0) for name in needed)
            host_memory.check(needed, held_bytes=held_bytes)
            return True
        return not needed[_WHOLE]

    def left_bytes(self, is_first: bool) -> int | None:
        """What host memory has left for activations beside training, `is_first` as of `check_step`; None for any.

        Of several processes, each must call this: the one with the least counts, so that their plans are the same.
        """
        known = self._known_bytes()
        needed = sum(known[name] for name in _OF_STEPS if is_first and name in known)
        limits = [host_memory.left_bytes(needed, sum(known.values()) - needed), self.disk.left_bytes(known)]
        if not self._placement.is_cpu:
            limits.append(max(host_memory.pinned_limit().num_bytes - host_memory.pinned_bytes(known), 0))
        least = min((float(each) for each in limits if each is not None), default=math.inf)
        if self._placement.num_processes > 1:
            [most] = largest([-least])
            least = -most * (1 - 2**-23)  # in single precision
        return None if least == math.inf else int(least)

    def check_step(self, prepared: Prepared, is_first: bool, kept_bytes: int, is_begun: bool) -> None:
        """Checks that host memory can hold what a prepared step keeps there beside the state.

        If no step has been prepared before (`is_first`), that includes gradients and compute copy, unless a thread has
        made these and sums (`is_begun`). Of saved activations, `kept_bytes` exist, which the device's client keeps.
        Raises `HostMemoryError` if it cannot.
        """
        found, streamed_bytes = self.host_bytes_of(prepared), streamed_state_bytes(prepared.profile, prepared.plan)
        self._check_pinned(found, streamed_bytes)
        needed = {name: found[name] for name in (_COPIES, _SAVED) if name in found}
        self.disk.check(found, needed)
        remedy = self._less_state if not needed else _LESS_MOVED
        # Only batches show which gradients are summed in more bits; what is known has been checked before.
        known = self._known_bytes()
        more_sums = found.get(SUMS, 0) - known.get(SUMS, 0)
        if more_sums > 0:
            needed[SUMS] = more_sums
        if found[MASTERS] > known[MASTERS]:
            needed[_WHOLE] = found[MASTERS] - known[MASTERS]
        if self.gradient_buffers is not None and found[GRADIENTS] > known[GRADIENTS]:
            needed[GRADIENTS] = found[GRADIENTS] - known[GRADIENTS]
        if not needed:
            return
        if is_first and not is_begun:
            needed |= {name: found[name] for name in _OF_STEPS if name in found}
        held_bytes = sum(found.values()) - sum(needed.values())
        existing_bytes = min(kept_bytes, needed.get(_SAVED, 0)) + is_begun * needed.get(SUMS, 0)
        host_memory.check(needed, "a step", remedy, held_bytes, existing_bytes)
        if needed.keys() & {SUMS, _WHOLE, GRADIENTS}:
            self._known = _updated(prepared)

    def masters(self, leaves: Sequence[Any]) -> dict[int, Stored]:
        """Copies parameters, or what this process owns of them, to host memory in the masters' dtypes.

        Raises `InputError` if they are shapes alone.
        """
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            raise InputError(
                "a state needs the parameters' values, got shapes alone: pass arrays, or to step.init_from the function"
                " that makes them; step.declare takes shapes"
            )
        dtypes, own, numbers = master_dtypes(self.layers), self._placement.ownership, range(len(leaves))
        spans = {leaf.index: own.span(layer, leaf) for layer in self.layers for leaf in layer.leaves}
        own_dtypes, own_spans = [dtypes[leaf] for leaf in numbers], [spans[leaf] for leaf in numbers]
        return masters_from_arrays(leaves, own_dtypes, self._placement, own_spans, self.disk.keeper(self.layers))

    def optimizer_state(self, leaves: Mapping[str, Any]) -> dict[str, Stored]:
        """Reads the leaves of the optimizer's state from a checkpoint likewise, by path; they keep their dtypes."""
        state = [key for unit in self.optimizer.units_of(self.layers) for key in unit.state_keys]
        spans = {name: span for name, span in state if isinstance(span, Span)}
        where, keep = self._placement.host, self.disk.keeper(self.layers)
        return {
            name: stored_whole(jax.device_put(leaf.read(), where, may_alias=False))
            if is_key(leaf)
            else keep(name, host_array(leaf, self._placement, leaf.dtype, spans.get(name)))
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
        disk = None if self.disk.scratch is None else Disk(self.disk.scratch, self.disk.groups)
        own = self.params, self.optimizer, self._placement, layers, masters, owner, held_bytes
        return TrainState(*own, optimizer, step, scale, disk)


def _updated(prepared: Prepared) -> dict[str, Any]:
    """The arguments of `Model.host_bytes` that say what updates of a prepared step keep."""
    program, num = prepared.program, prepared.plan.gradient_buffers
    kinds = {"layers": program.partition.layers, "widened": program.widened, "streamed": program.streamed}
    return kinds | {"with_buffers": buffered_groups(program.partition, num)}


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
