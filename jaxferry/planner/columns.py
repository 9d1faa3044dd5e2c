"""Columns: for each layer, one choice of everything that a plan decides.

A column says where the layer's programs read the parameters, where its gradient goes, whether its backward runs the
forward again, and where its parameters are updated. What a column costs comes from the step program itself: a plan in
which every layer has the column is lowered, and its tasks are summed by layer and kind. So there is no second model of
the machine, and a new kind of choice is one more field of a column.

Layers that cost the same are of one class. A search moves runs of a class, which are neighbours in its order.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from jaxferry.costs import LayerProfile, Profile
from jaxferry.modes import ActivationPlace, GradientPlace, Mode, Remat, UpdatePlace
from jaxferry.step import LayerPlan, reads_back

ALL_PLACES = tuple(UpdatePlace)
_LOADED = (Mode.GFGB, Mode.RELOAD, Mode.RESIDENT)
"""Where activations may wait in host memory: other programs take the links' time themselves."""
_SHORT = 6
_NOT_COMPARED = (
    "name",
    "parameters",
    "block",
    "temporary_bytes",
    "offloadable_bytes",
    "forward_workspace_bytes",
    "backward_workspace_bytes",
)
"""What differs between layers that count as equal: buffers of equal programs differ by some bytes."""


@dataclasses.dataclass(frozen=True, order=True)
class Column:
    """One choice for a layer; the fields are those of `LayerPlan`."""

    mode: Mode
    gradient: GradientPlace = GradientPlace.DEVICE
    remat: Remat = Remat.NONE
    update: UpdatePlace = UpdatePlace.HOST
    activations: ActivationPlace = ActivationPlace.DEVICE

    @property
    def reliance(self) -> tuple[int, ...]:
        """How much a layer with this column relies on the machine model, see `jaxferry.planner.preference`."""
        in_host_memory = (self.mode in (Mode.DHA, Mode.DFGB)) + (self.gradient is GradientPlace.HOST)
        leaves = self.activations is ActivationPlace.HOST
        return in_host_memory, self.mode is Mode.RELOAD, leaves, self.remat is not Remat.NONE


def classes_of(profile: Profile) -> list[list[int]]:
    """The layers that cost the same, in forward order."""
    names = [field.name for field in dataclasses.fields(LayerProfile) if field.name not in _NOT_COMPARED]
    found: dict[tuple[object, ...], list[int]] = {}
    for index, layer in enumerate(profile.layers):
        members = profile.groups[profile.group_of[index]]
        costs = (getattr(layer, name) for name in names)
        key = (*costs, *sorted(layer.offloadable_bytes.items()), members.index(index), len(members))
        found.setdefault(key, []).append(index)
    return list(found.values())


def updatable_groups(profile: Profile) -> list[int]:
    """The groups that a plan may update on the device: those whose layers state `update_gpu_s`."""
    layers = ((group, profile.layers[members[0]]) for group, members in enumerate(profile.groups))
    return [group for group, layer in layers if layer.has_gradient and layer.update_gpu_s is not None]


def streamable_groups(profile: Profile) -> list[int]:
    """The groups that a policy may stream: those whose layers state all times of that."""
    layers = {group: profile.layers[profile.groups[group][0]] for group in updatable_groups(profile)}
    return [group for group, x in layers.items() if x.state_up_s is not None and x.state_down_s is not None]


class Columns:
    """The columns of a profile's layers. A plan is an array of column numbers, (layers,).

    Args:
      profile: the layers.
      places: where updates may run, besides the host.
      may_go: whether gradients may be written to the host by their backward.
      modes: where programs may read parameters.
      may_recompute: whether backwards may compute anything again, and what is kept wait in host memory.
      goes: the gradients that are written to the host, (layers,) flags, if that is decided; None for any choice.

    Attributes:
      all: every column that some layer may have.
      allowed: whether a layer may have a column, (layers, columns).
      movable: whether moves may give it that, (layers, columns). Where layers may be RELOAD, which loads as late and
        reads no host memory, DFGB is tried in short models alone: its window (`planner/base.py`) forbids most of these.
      classes: the layers of each class, in forward order.
    """

    def __init__(
        self,
        profile: Profile,
        places: Collection[UpdatePlace] = ALL_PLACES,
        may_go: bool = True,
        modes: Collection[Mode] = tuple(Mode),
        may_recompute: bool = True,
        goes: np.ndarray | None = None,
    ):
        self.profile, self._goes = profile, goes
        gradients = GradientPlace if may_go else (GradientPlace.DEVICE,)
        moves = may_recompute and any(layer.offloadable_bytes for layer in profile.layers)
        fields: Any = (modes, gradients, Remat if may_recompute else (Remat.NONE,), UpdatePlace)
        fields = (*fields, ActivationPlace if moves else (ActivationPlace.DEVICE,))
        every = [column for column in itertools.starmap(Column, itertools.product(*fields)) if _is_possible(column)]
        updates = {UpdatePlace.HOST: set(range(len(profile.groups)))}
        updates[UpdatePlace.RESIDENT] = set(updatable_groups(profile)) if UpdatePlace.RESIDENT in places else set()
        streams = UpdatePlace.GPU in places and not profile.updates_together
        updates[UpdatePlace.GPU] = set(streamable_groups(profile)) if streams else set()
        flags = np.array(
            [
                [self._is_useful(index, column) and group in updates[column.update] for column in every]
                for index, group in enumerate(profile.group_of)
            ]
        )
        used: np.ndarray = np.any(flags, axis=0)
        self.all = [column for column, is_used in zip(every, used, strict=True) if is_used]
        self.allowed = flags[:, used]
        is_late = np.array([column.mode is Mode.DFGB for column in self.all])
        tries_late = Mode.RELOAD not in modes or len(profile.layers) <= _SHORT
        self.movable = self.allowed if tries_late else self.allowed & ~is_late
        self.number = {column: number for number, column in enumerate(self.all)}
        self.reliance = np.array([column.reliance for column in self.all])
        self.classes = profile.once(classes_of)
        self._plans = [[LayerPlan(layer.name, **vars(column)) for column in self.all] for layer in profile.layers]

    def _is_useful(self, index: int, column: Column) -> bool:
        """Whether the column differs for the layer from a simpler one."""
        layer = self.profile.layers[index]
        has_choice = layer.has_gradient and not layer.gradient_rows
        if column.gradient is GradientPlace.HOST and not has_choice:
            return False
        if has_choice and self._goes is not None and self._goes[index] != (column.gradient is GradientPlace.HOST):
            return False
        if column.remat is not Remat.NONE:
            is_first = self.profile.program_ends[index][0] == index
            saves = column.remat in layer.levels and layer.kept_bytes(column.remat) < layer.activation_bytes
            if not is_first or not saves:
                return False
        if column.activations is ActivationPlace.HOST and not layer.leaving_bytes(column.remat, column.activations):
            return False
        if column.mode is Mode.DFGB:
            is_last = self.profile.program_ends[index][1] == len(self.profile.layers) - 1
            return reads_back(layer, column.remat) and not layer.fused_backward and not is_last
        return True

    def layers(self, codes: np.ndarray) -> tuple[LayerPlan, ...]:
        """The layers of a plan."""
        return tuple(plans[code] for plans, code in zip(self._plans, codes.tolist(), strict=True))

    def codes(self, layers: Sequence[LayerPlan]) -> np.ndarray | None:
        """The columns of a plan's layers; None if one of them has none."""
        found = []
        for index, layer in enumerate(layers):
            chosen = layer.mode, layer.gradient, layer.remat, layer.update, layer.activations
            number = self.nearest(index, Column(*chosen))
            if number is None:
                return None
            found.append(number)
        return np.array(found, dtype=np.int8)

    @functools.cache  # noqa: B019 - as long as the columns live
    def nearest(self, index: int, column: Column) -> int | None:
        """The column that a layer runs with if it is given this one; None if it may not have that."""
        layer, simpler = self.profile.layers[index], [column]
        if not layer.has_gradient or layer.gradient_rows:
            simpler.append(dataclasses.replace(column, gradient=GradientPlace.DEVICE))
        elif self._goes is not None:
            place = GradientPlace.HOST if self._goes[index] else GradientPlace.DEVICE
            simpler.append(dataclasses.replace(column, gradient=place))
        stays = [dataclasses.replace(each, activations=ActivationPlace.DEVICE) for each in simpler]
        simpler += stays if column.activations is ActivationPlace.HOST else []
        simpler += [dataclasses.replace(each, remat=Remat.NONE) for each in simpler]
        simpler += [dataclasses.replace(each, mode=Mode.DHA) for each in simpler if each.mode is Mode.DFGB]
        for each in simpler:
            number = self.number.get(each)
            if number is not None and self.allowed[index, number]:
                return number
        return None

    def uniform(self, column: Column) -> np.ndarray:
        """The plan in which every layer that may have the column has it; others are on the device in the same mode."""
        found = np.empty(len(self.profile.layers), dtype=np.int8)
        for index in range(len(found)):
            number = self.nearest(index, column)
            if number is None:
                number = self.nearest(index, dataclasses.replace(column, update=UpdatePlace.HOST))
            found[index] = int(np.argmax(self.allowed[index])) if number is None else number
        return self.agreed(found)

    def with_column(self, codes: np.ndarray, layers: Sequence[int], number: int) -> np.ndarray | None:
        """The plan with a column for these layers; None if one of them may not have it."""
        found = codes.copy()
        for layer in layers:
            if not self.allowed[layer, number]:
                return None
            found[layer] = number
            members = self.profile.groups[self.profile.group_of[layer]]
            if len(members) > 1 and not self._agree(found, members, layer):
                return None
        return found

    def agreed(self, codes: np.ndarray) -> np.ndarray:
        """The plan with layers of one group updated in the same place: that of the first one, else on the host."""
        for members in self.profile.groups:
            if len(members) > 1 and not self._agree(codes, members, members[0]):
                for member in members:
                    own = dataclasses.replace(self.all[codes[member]], update=UpdatePlace.HOST)
                    codes[member] = self.number[own]
        return codes

    def _agree(self, codes: np.ndarray, members: Sequence[int], chosen: int) -> bool:
        """Gives the other layers of a group the place of update that one of them has; returns whether they may."""
        column = self.all[codes[chosen]]
        for member in members:
            own = self.all[codes[member]]
            if member == chosen or own.update is UpdatePlace.HOST is column.update:
                continue
            made = dataclasses.replace(own, update=column.update)
            if column.update is not UpdatePlace.HOST:
                made = dataclasses.replace(made, gradient=GradientPlace.DEVICE)
                if (column.mode is Mode.RESIDENT) != (own.mode is Mode.RESIDENT):
                    made = dataclasses.replace(made, mode=column.mode)
            number = self.nearest(member, made)
            if number is None:
                return False
            codes[member] = number
        return True

    def together(self, codes: np.ndarray) -> Iterator[list[int]]:
        """The layers of each class; of these, the ones with the same column, and the runs of them."""
        for members in self.classes:
            runs = [list(run) for _, run in itertools.groupby(members, key=lambda layer: codes[layer])]
            if len(runs) > 1:
                yield members
                for number in np.unique(codes[members]):
                    yield [layer for layer in members if codes[layer] == number]
            yield from runs

    def neighbours(self, codes: np.ndarray) -> Iterator[list[int]]:
        """Layers of several classes: runs with the same column, and the first and the last 2, 4, ... layers."""
        if len(self.classes) > 1:
            size = len(codes)
            yield from (list(run) for _, run in itertools.groupby(range(size), key=lambda layer: codes[layer]))
            for length in (2**power for power in range(1, (size - 1).bit_length())):
                yield list(range(length))
                yield list(range(size - length, size))

    def parts(self, together: list[int], codes: np.ndarray) -> Iterator[list[int]]:
        """The layers that a move changes: all of these, or 1, 2, 4, ... of them if they have the same column."""
        yield together
        if (codes[together] == codes[together[0]]).all():
            length, size = len(together), 1
            while size < length:
                yield together[:size]
                yield together[length - size :]
                if size > 1:
                    yield [together[(2 * index + 1) * length // (2 * size)] for index in range(size)]
                    yield together[1 : 2 * size : 2]
                size *= 2


def _is_possible(column: Column) -> bool:
    on_device = column.gradient is GradientPlace.DEVICE
    if column.activations is ActivationPlace.HOST and not (on_device and column.mode in _LOADED):
        return False
    if column.update is UpdatePlace.HOST:
        return True
    if column.gradient is GradientPlace.HOST:
        return False
    return column.mode is Mode.RESIDENT or column.update is UpdatePlace.GPU
