"""Cuts loss functions into segments. Training steps of one loss function share the segments and their programs."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend import core

from jaxferry.costs.machines import Machine
from jaxferry.engine import Placement, RematVariants
from jaxferry.modes import BLOCK, FASTER, MODULE
from jaxferry.partition import (
    ForwardPartition,
    Layer,
    Partition,
    held_whole,
    partition,
    partition_forward,
    traced_jaxpr,
    with_flags,
)
from jaxferry.planner.merging import merge_rule
from jaxferry.settings import for_platform
from jaxferry.training.choice import known_machine
from jaxferry.training.model import Model
from jaxferry.training.options import Options
from jaxferry.training.structure import split_flags


class Cut:
    """The segments of one loss function, structure and choice of groups, with their compiled programs.

    Args:
      parts: the partition.
      jaxpr, key: where `_CUTS` holds it.

    Attributes:
      parts: as given.
      programs: compiled programs by content. They live as long as the loss function does, as those of `jax.jit`, unless
        a step drops them for those of newer structures.
    """

    def __init__(self, parts: Partition, jaxpr: core.ClosedJaxpr, key: Any) -> None:
        self.parts = parts
        self._jaxpr, self._key = weakref.ref(jaxpr), key
        self.programs: dict[Any, Any] = {}
        self._variants: dict[str, RematVariants] = {}

    def variants(self, remat: Any) -> RematVariants:
        """The rematerialized variants for the checked argument of `train_step`; only those of a name are shared."""
        if not isinstance(remat, str):
            return RematVariants(self.parts, remat)
        if remat not in self._variants:
            self._variants[remat] = RematVariants(self.parts, remat)
        return self._variants[remat]

    def forget(self) -> None:
        """Makes later steps cut and compile anew."""
        cuts = {} if (jaxpr := self._jaxpr()) is None else _CUTS.get(jaxpr, {})
        if cuts.get(self._key) is self:
            del cuts[self._key]


_CUTS: weakref.WeakKeyDictionary[core.ClosedJaxpr, dict[Any, Cut]] = weakref.WeakKeyDictionary()
"""By the jaxpr of a loss function, which lives as long as the function does."""


class Cutter:
    """Cuts functions of one model's parameters.

    Args:
      model: the model.
      loss_fn: its loss function.
      options: those of `train_step`.
      placement: where arrays live.

    Attributes:
      known_layers: the parameter groups, which the first batch decides; None until then.
      granularity: how fine they are.
    """

    def __init__(self, model: Model, loss_fn: Callable[..., Any], options: Options, placement: Placement) -> None:
        self._model, self._loss_fn, self._options, self._placement = model, loss_fn, options, placement
        self.known_layers: tuple[Layer, ...] | None = None
        self._merges_small = options.merge_small
        self.granularity = BLOCK if options.granularity == FASTER else options.granularity

    def keep_small_apart(self) -> bool:
        """Makes the next cut decide the groups anew, without merging small layers; False if none would be merged."""
        may_merge, self._merges_small = self._merges_small, False
        if may_merge:
            self.known_layers = None
        return may_merge

    def take_modules(self) -> bool:
        """Makes the next cut take layers of modules, if the choice is open; False if it is not, or has them already."""
        if self._options.granularity != FASTER or self.granularity == MODULE:
            return False
        self.restart(MODULE)
        return True

    def restart(self, granularity: str) -> None:
        """Makes the next cut decide the groups anew."""
        self.granularity, self.known_layers = granularity, None

    def cut(self, args: Any, kwargs: Mapping[str, Any]) -> Cut:
        """The loss function for these arguments. The first cut decides the groups; later ones keep them if possible."""
        arrays, flags = split_flags(kwargs)
        model, known = self._model, self.known_layers
        given = (with_flags(self._loss_fn, flags), model.params, args, arrays)
        dtype, frozen, whole = model.compute_dtype, model.optimizer.frozen, model.optimizer.whole
        with for_platform(self._placement.platform):
            jaxpr = traced_jaxpr(*given, dtype, frozen)
        cuts = _CUTS.setdefault(jaxpr, {})
        names, machine = self._merging()
        granularity = self.granularity
        rule = names or (machine and machine.name), granularity
        num, num_processes = self._placement.num_devices, self._placement.num_processes
        dtypes = tuple(leaf.dtype for leaf in jax.tree.leaves(model.params))
        key = (dtypes, known, frozen, whole, rule, num, num_processes)
        if key not in cuts:
            merge = merge_rule(names, machine) if granularity == BLOCK else None
            settings = {"compute_dtype": dtype, "layers": known, "frozen": frozen, "merge": merge}
            settings["granularity"] = granularity
            with for_platform(self._placement.platform):
                parts = partition(*given, **settings, num_devices=num, num_processes=num_processes)
            cuts[key] = Cut(dataclasses.replace(parts, layers=held_whole(parts.layers, whole)), jaxpr, key)
        if known is None:
            self.known_layers = cuts[key].parts.layers
        return cuts[key]

    def forward(self, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> ForwardPartition:
        """Any function of the parameters, without derivatives."""
        arrays, flags = split_flags(kwargs)
        model = self._model
        with for_platform(self._placement.platform):
            parts = partition_forward(
                with_flags(function, flags),
                model.params,
                args,
                arrays,
                compute_dtype=model.compute_dtype,
                layers=self.known_layers,
                frozen=model.optimizer.frozen,
                num_devices=self._placement.num_devices,
                num_processes=self._placement.num_processes,
            )
        return dataclasses.replace(parts, layers=held_whole(parts.layers, model.optimizer.whole))

    def _merging(self) -> tuple[tuple[str, ...], Machine | None]:
        """What decides the merges of small layers: the names of a given plan or profile, or the machine."""
        if self.known_layers is not None:
            return (), None
        # A mapping of `remat` names layers as they are.
        may_merge = self._merges_small and not self._placement.is_cpu and not isinstance(self._options.remat, Mapping)
        machine = known_machine(self._placement.device_kind) if may_merge else None
        return self._options.given_names, machine
