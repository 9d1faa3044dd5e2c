"""Cuts loss functions into segments, by the structure of a call. Steps of one loss function share the programs."""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxferry.costs import Machine
from jaxferry.engine import RematVariants
from jaxferry.errors import InputError
from jaxferry.modes import BLOCK, FASTER, MODULE
from jaxferry.partition import (
    ForwardPartition,
    Layer,
    Partition,
    check_byte_order,
    held_whole,
    partition,
    partition_forward,
    refused_by_jax,
    traced_jaxpr,
    with_flags,
)
from jaxferry.planner import merge_rule
from jaxferry.settings import for_platform, traced_settings
from jaxferry.training.choice import known_machine
from jaxferry.training.model import Model
from jaxferry.training.options import Planning
from jaxferry.transport import Placement


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of a function of the parameters after these: traced ones, `args` and by name, and static flags."""

    args: Any
    arrays: Mapping[str, Any]
    flags: Mapping[str, Any]

    @classmethod
    def of(cls, args: Any, kwargs: Mapping[str, Any]) -> Self:
        """Tells flags, which are booleans, strings and None, from traced keyword arguments."""
        flags = {name: value for name, value in kwargs.items() if value is None or isinstance(value, bool | str)}
        return cls(args, {name: value for name, value in kwargs.items() if name not in flags}, flags)

    @property
    def leaves(self) -> list[Any]:
        """The values of the traced arguments; raises `InputError` for shapes alone, which suffice to prepare."""
        found = jax.tree.leaves((self.args, self.arrays))
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in found):
            raise InputError("a step needs the values of its arguments, got shapes alone: step.prepare takes shapes")
        return found


def weighted(loss_fn: Callable[..., Any], name: str, is_applied: bool) -> Callable[..., Any]:
    """The loss times an entry of its `aux`, with `(weight, (loss, aux))` as auxiliary output, the weight in fp32.

    A weight that is not applied is only checked.
    """

    def weighted_loss(*args: Any, **kwargs: Any) -> Any:
        made = loss_fn(*args, **kwargs)
        entries = made[1] if isinstance(made, tuple) and len(made) == 2 else None
        weight: Any = entries.get(name) if isinstance(entries, Mapping) else getattr(entries, name, None)
        dtype = getattr(weight, "dtype", None)
        is_array = dtype is not None and (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer))
        if not (jnp.shape(weight) == () if is_array else isinstance(weight, numbers.Real)):
            found = "no such entry" if weight is None else str(jax.typeof(weight)) if dtype else type(weight).__name__
            raise InputError(
                f"weight must name a real scalar in the aux of loss_fn's (loss, aux), got {name!r}: {found}"
            )
        if not is_applied:
            return made
        weight = jax.lax.stop_gradient(jnp.asarray(weight, jnp.float32))
        loss = made[0] * weight if hasattr(made[0], "dtype") or isinstance(made[0], numbers.Number) else made[0]
        return loss, (weight, made)

    return weighted_loss


def structure_of(call: Call) -> Any:
    """The structure: the tree, the shapes and dtypes (weak or not) of its leaves, the flags, and JAX's settings.

    Raises `InputError` if a leaf is traced, or is no array or number that JAX can hold.
    """
    leaves, structure = jax.tree.flatten((call.args, call.arrays))
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise InputError(
            "a step moves layers between host and device and compiles its own programs: it cannot be called under "
            "jax.jit, jax.grad or another transformation; pass concrete arrays"
        )
    try:
        # Python's numbers are weakly typed.
        weak = [isinstance(leaf, int | float | complex) or bool(getattr(leaf, "weak_type", False)) for leaf in leaves]
        kinds = tuple(
            (np.shape(leaf), jax.dtypes.result_type(leaf), own) for leaf, own in zip(leaves, weak, strict=True)
        )
    except (TypeError, ValueError) as error:
        _name_unfit_leaf(call)
        raise InputError(f"the arguments must be trees of arrays and numbers: {error}") from error
    return structure, kinds, tuple(sorted(call.flags.items(), key=repr)), traced_settings()


def _name_unfit_leaf(call: Call) -> None:
    """Raises InputError for the first leaf that JAX cannot hold."""
    named = [(f"argument {number} after the state", tree) for number, tree in enumerate(call.args, 1)]
    named += [(f"keyword argument {name!r}", tree) for name, tree in call.arrays.items()]
    for name, tree in named:
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            place = f"{name}, leaf {jax.tree_util.keystr(path)}," if path else f"{name}"
            check_byte_order(leaf, place)
            try:
                jax.dtypes.result_type(leaf)
            except (TypeError, ValueError) as error:
                dtype = f" of dtype {leaf.dtype}" if hasattr(leaf, "dtype") else ""
                raise InputError(
                    f"{place} must be an array or a number, got a {type(leaf).__name__}{dtype}: take it out of the "
                    "batch, or encode it as numbers"
                ) from error


class Cut:
    """The segments of one loss function, structure and choice of groups, with their compiled programs by content.

    Programs live as long as the loss function does, as those of `jax.jit`, unless a step drops them for newer
    structures'.
    """

    def __init__(self, parts: Partition, jaxpr: core.ClosedJaxpr, key: Any) -> None:
        self.parts = parts
        self._jaxpr, self._key = weakref.ref(jaxpr), key
        self.programs: dict[Any, Any] = {}
        self._variants: dict[Any, RematVariants] = {}

    def variants(self, remat: Any, tiles: Any) -> RematVariants:
        """The rematerialized variants for checked arguments of `train_step`; only those of a name are shared."""
        if not isinstance(remat, str) or isinstance(tiles, Mapping):
            return RematVariants(self.parts, remat, tiles)
        if (remat, tiles) not in self._variants:
            self._variants[remat, tiles] = RematVariants(self.parts, remat, tiles)
        return self._variants[remat, tiles]

    def forget(self) -> None:
        """Makes later steps cut and compile anew."""
        cuts = {} if (jaxpr := self._jaxpr()) is None else _CUTS.get(jaxpr, {})
        if cuts.get(self._key) is self:
            del cuts[self._key]


_CUTS: weakref.WeakKeyDictionary[core.ClosedJaxpr, dict[Any, Cut]] = weakref.WeakKeyDictionary()
"""By the jaxpr of a loss function, which lives as long as the function does."""


class Cutter:
    """Cuts functions of one model's parameters; the first batch decides the groups, `known_layers`."""

    def __init__(self, model: Model, loss_fn: Callable[..., Any], planning: Planning, placement: Placement) -> None:
        self._model, self._loss_fn, self._planning, self._placement = model, loss_fn, planning, placement
        self.known_layers: tuple[Layer, ...] | None = None
        self._merges_small = planning.merge_small
        self.granularity = BLOCK if planning.granularity == FASTER else planning.granularity

    def keep_small_apart(self) -> bool:
        """Makes the next cut decide the groups anew, without merging small layers; False if none would be merged."""
        may_merge, self._merges_small = self._merges_small, False
        if may_merge:
            self.known_layers = None
        return may_merge

    def take_modules(self) -> bool:
        """Makes the next cut take layers of modules, if the choice is open; False if it is not, or has them already."""
        if self._planning.granularity != FASTER or self.granularity == MODULE:
            return False
        self.restart(MODULE)
        return True

    def restart(self, granularity: str) -> None:
        """Makes the next cut decide the groups anew."""
        self.granularity, self.known_layers = granularity, None

    def cut(self, call: Call) -> Cut:
        """The loss function for these arguments. The first cut decides the groups; later ones keep them if possible."""
        model, known = self._model, self.known_layers
        loss = with_flags(self._loss_fn, call.flags)
        dtype, frozen, whole = model.compute_dtype, model.optimizer.frozen, model.optimizer.whole
        with for_platform(self._placement.platform):
            jaxpr = traced_jaxpr(loss, model.params, call.args, call.arrays, dtype, frozen)
        cuts = _CUTS.setdefault(jaxpr, {})
        names, machine = self._merging()
        granularity = self.granularity
        rule = names or (machine and machine.name), granularity
        num, num_processes = self._placement.num_devices, self._placement.num_processes
        dtypes = tuple(leaf.dtype for leaf in jax.tree.leaves(model.params))
        key = (dtypes, known, frozen, whole, rule, num, num_processes)
        if key not in cuts:
            merge = merge_rule(names, machine) if granularity == BLOCK else None
            with for_platform(self._placement.platform):
                settings = self._settings() | {"merge": merge, "granularity": granularity}
                parts = partition(loss, model.params, call.args, call.arrays, **settings)
            cuts[key] = Cut(dataclasses.replace(parts, layers=held_whole(parts.layers, whole)), jaxpr, key)
        if known is None:
            self.known_layers = cuts[key].parts.layers
        return cuts[key]

    @contextlib.contextmanager
    def refused_by_jax(self, call: Call) -> Iterator[None]:
        """Raises what JAX itself raises for the loss function's gradient in place of an internal error of the body."""
        model, given = self._model, (call.args, call.arrays)
        loss = with_flags(self._loss_fn, call.flags)
        refused = refused_by_jax(loss, model.params, *given, model.compute_dtype, model.optimizer.frozen)
        with for_platform(self._placement.platform), refused:
            yield

    def forward(self, function: Callable[..., Any], call: Call) -> ForwardPartition:
        """Any function of the parameters, without derivatives."""
        model, function = self._model, with_flags(function, call.flags)
        with for_platform(self._placement.platform):
            parts = partition_forward(function, model.params, call.args, call.arrays, **self._settings())
        return dataclasses.replace(parts, layers=held_whole(parts.layers, model.optimizer.whole))

    def _settings(self) -> dict[str, Any]:
        """The settings that all partitions share."""
        return {
            "compute_dtype": self._model.compute_dtype,
            "layers": self.known_layers,
            "frozen": self._model.optimizer.frozen,
            "num_devices": self._placement.num_devices,
            "num_processes": self._placement.num_processes,
        }

    def _merging(self) -> tuple[tuple[str, ...], Machine | None]:
        """What decides the merges of small layers: the names of a given plan or profile, or the machine."""
        if self.known_layers is not None:
            return (), None
        # Mappings name layers as they are.
        has_names = any(isinstance(given, Mapping) for given in (self._planning.remat, self._planning.tiles))
        may_merge = self._merges_small and not self._placement.is_cpu and not has_names
        machine = known_machine(self._placement.device_kind) if may_merge else None
        return self._planning.given_names, machine
