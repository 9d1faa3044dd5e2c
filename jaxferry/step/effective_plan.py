"""What a plan means for a profile: the modes and gradient places that run, and when copies are on the device.

A **place** is a program's position in the step: layer l's forward has place l, its backward has place 2L - 1 - l.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Self

import numpy as np

from jaxferry.costs import LayerProfile, Profile
from jaxferry.modes import GradientPlace, Mode, Remat
from jaxferry.step.plans import Loads, Plan, UpdateOrder, Updates
from jaxferry.step.streaming import kept_gradients

GFGB, DHA, DFGB, RELOAD, RESIDENT = range(5)
CODES = {Mode.GFGB: GFGB, Mode.DHA: DHA, Mode.DFGB: DFGB, Mode.RELOAD: RELOAD, Mode.RESIDENT: RESIDENT}
MODES = {code: mode for mode, code in CODES.items()}

_NONE = -1


def of_program(profile: Profile, remats: Sequence[Remat]) -> list[Remat]:
    """What each layer keeps: the first layer of a program decides."""
    return [remats[first] for first, _ in profile.program_ends]


def reads_back(layer: LayerProfile, remat: Remat) -> bool:
    """Whether a layer's backward reads parameters: one that computes anything again always does."""
    return layer.has_backward and (layer.backward_reads or remat is not Remat.NONE)


def effective(profile: Profile, plan: Plan) -> Plan:
    """The plan with the modes, gradient places and updates that its step runs with.

    DFGB becomes DHA if no backward could read the copy: a lookup's backward, a missing one, or one fused with its
    forward. A gradient that leaves as rows of lookups counts as on the device. So does a missing gradient. Updates are
    in backward order unless `may_reorder`. There are as many gradient buffers as `buffers_of` says.
    """
    remats, layers = of_program(profile, plan.remats), list(plan.layers)
    for index, (given, layer) in enumerate(zip(plan.layers, profile.layers, strict=True)):
        mode, gradient = given.mode, given.gradient
        if mode is Mode.DFGB and (layer.fused_backward or not reads_back(layer, remats[index])):
            mode = Mode.DHA
        if gradient is GradientPlace.HOST and (layer.gradient_rows or not layer.has_gradient):
            gradient = GradientPlace.DEVICE
        if mode is not given.mode or gradient is not given.gradient:
            layers[index] = dataclasses.replace(given, mode=mode, gradient=gradient)
    updates = Updates.AFTER_ALL if profile.updates_after_all else plan.updates
    order = plan.update_order if may_reorder(profile, plan) else UpdateOrder.BACKWARD
    num = buffers_of(profile, plan)
    is_same = (updates, order, num) == (plan.updates, plan.update_order, plan.gradient_buffers)
    if is_same and all(map(lambda own, given: own is given, layers, plan.layers)):
        return plan
    return dataclasses.replace(plan, layers=tuple(layers), updates=updates, update_order=order, gradient_buffers=num)


def may_reorder(profile: Profile, plan: Plan) -> bool:
    """Whether updates by need are possible: nothing within the step waits for an update on the host."""
    return buffers_of(profile, plan) is None and not profile.once(_has_state_on_disk)


def buffers_of(profile: Profile, plan: Plan) -> int | None:
    """The most programs whose gradients host memory holds, by the plan and by the profile; None for all."""
    known = (plan.gradient_buffers, None if _waits_for_all(profile, plan) else profile.gradient_buffers)
    return min((num for num in known if num is not None), default=None)


def _waits_for_all(profile: Profile, plan: Plan) -> bool:
    return profile.updates_after_all or plan.updates is Updates.AFTER_ALL


def _has_state_on_disk(profile: Profile) -> bool:
    return any(layer.state_read_s is not None for layer in profile.layers)


def may_defer(profile: Profile, plan: Plan) -> bool:
    """Whether some updates may follow all backwards: with state in a scratch file, where none are by need."""
    is_free = not _waits_for_all(profile, plan) and buffers_of(profile, plan) is None
    return is_free and profile.once(_has_state_on_disk)


def _deferred_groups(profile: Profile, plan: Plan, elsewhere: frozenset[int]) -> tuple[int, ...]:
    """The groups whose updates a plan defers, in their order; never the first or the last of those not `elsewhere`."""
    if not plan.deferred_updates or not may_defer(profile, plan):
        return ()
    trained = [profile.layers[members[0]].has_gradient for members in profile.groups]
    groups = [group for group, is_trained in enumerate(trained) if is_trained and group not in elsewhere]
    num = max(len(groups) - plan.deferred_updates, min(2, len(groups)))
    in_time = {groups[place * (len(groups) - 1) // max(num - 1, 1)] for place in range(num)}
    return tuple(group for group in groups if group not in in_time)


def updated_on_device(profile: Profile, plan: Plan) -> frozenset[int]:
    """The groups that a plan updates on the device, where they stay."""
    return _updated_groups(profile, plan.updates_on_device)


def streamed_groups(profile: Profile, plan: Plan) -> frozenset[int]:
    """The groups whose updates a plan streams through the GPU."""
    return _updated_groups(profile, plan.updates_streamed)


def leaving_bytes(profile: Profile, plan: Plan) -> list[int]:
    """What each layer's forward lets leave by the plan's choice, to return for its backward; `save_bytes` are more."""
    pairs = zip(profile.layers, plan.layers, strict=True)
    return [layer.leaving_bytes(own.remat, own.activations) for layer, own in pairs]


def saved_bytes(profile: Profile, plan: Plan) -> int:
    """The host memory of each process in which values wait for their backward."""
    num_bytes = sum(layer.save_bytes for layer in profile.layers) + sum(leaving_bytes(profile, plan))
    return num_bytes * profile.num_devices // profile.num_processes


def streamed_state_bytes(profile: Profile, plan: Plan) -> int:
    """The bytes of masters and optimizer state that a plan streams through the GPU, which are pinned."""
    return sum(profile.layers[profile.groups[group][0]].state_bytes for group in streamed_groups(profile, plan))


def _updated_groups(profile: Profile, chosen: Sequence[bool]) -> frozenset[int]:
    groups = enumerate(profile.groups)
    return frozenset(g for g, members in groups if chosen[members[0]] and profile.layers[members[0]].has_gradient)


class EffectivePlan:
    """A plan as it runs: when each layer loads a copy of its parameters, and how long the copy is on the device.

    While a group's copy is held, no layer loads another one. The first copy is the one that a layer loads for its
    forward. It loads the second copy later: as DFGB after its forward, or as RELOAD for its backward.

    Args:
      profile: the layers.
      plan: any plan for it.

    Attributes, by layer unless said otherwise:
      plan: the plan with the modes, gradient places and updates that run, see `effective`.
      on_device, through_gpu, staying: the groups that are updated on the device where they stay, that stream through
        the GPU, and of these the ones whose compute copy stays.
      kept: bytes of gradients that stay until an update which streams, see `kept_gradients`.
      remats: what is kept on the device from the forward to the backward.
      leaving: bytes that leave after its forward and return for its backward by the plan's choice; None if none do.
      param_bytes: bytes of a copy; of a group that is updated on the device, with the optimizer state beside it and the
        gradients that stay there: all if updates wait for all gradients, else all of the group's but the last one.
      gradient_bytes: the gradient on the device; 0 if it stays and is counted elsewhere.
      is_trained: whether there is a gradient that leaves.
      until_update: the gradient that stays from its backward to its update on the device, in bytes.
      loads_forward: whether the layer loads a first copy.
      loads_between: whether it loads a second copy as DFGB.
      loads_backward: whether it loads a second copy as RELOAD.
      first_end: the layer whose program reads the first copy last.
      first_ends_by_backward: whether that program is a backward, not a forward.
      second_end: the layer whose backward reads the second copy last.
      offloads: whether the gradient leaves by a transfer, or by an update that streams.
      holds_up: likewise, but for those of which no forward waits for the link down.
      deferred: the groups whose updates follow all backwards, in this order.
      resident: by group, whether its copy is RESIDENT.
      refreshed: by group, whether that is refreshed after the group's update.
    """

    def __init__(self, profile: Profile, plan: Plan):
        self.profile, self.plan, layers = profile, effective(profile, plan), profile.layers
        plan = self.plan
        self.after_all, self.bulk = plan.updates is Updates.AFTER_ALL, plan.loads is Loads.BULK
        self.remats, self.modes = of_program(profile, plan.remats), plan.modes
        self.leaving = leaving_bytes(profile, plan) if plan.offloads_activations else None
        self.on_device, self.through_gpu = updated_on_device(profile, plan), streamed_groups(profile, plan)
        self.staying = _updated_groups(profile, plan.copies_stay)
        self.deferred = _deferred_groups(profile, plan, self.on_device | self.through_gpu)
        self.kept = kept_gradients(profile, self.through_gpu, self.after_all)
        self.param_bytes = [layer.param_bytes for layer in layers]
        self.gradient_bytes = [layer.device_gradient_bytes for layer in layers]
        self.is_trained, self.until_update = [layer.has_gradient for layer in layers], [0] * len(layers)
        for group in self.on_device:
            self._stay(profile.groups[group])
        for layer in self.kept:
            self.gradient_bytes[layer] = 0
        on_host = [place is GradientPlace.HOST for place in plan.gradients]
        self.offloads = [trained and not host for trained, host in zip(self.is_trained, on_host, strict=True)]
        stays = [group in self.staying for group in profile.group_of]
        self.holds_up = [offloads and not there for offloads, there in zip(self.offloads, stays, strict=True)]
        self.loads_forward = [mode in (Mode.GFGB, Mode.RELOAD) for mode in self.modes]
        self.loads_between = [mode is Mode.DFGB for mode in self.modes]
        self.loads_backward = [
            mode is Mode.RELOAD and reads_back(layer, remat) and not layer.fused_backward
            for mode, layer, remat in zip(self.modes, layers, self.remats, strict=True)
        ]
        self.first_end, self.second_end = list(range(len(layers))), list(range(len(layers)))
        self.first_ends_by_backward = [
            layer.fused_backward if mode is Mode.RELOAD else layer.has_backward
            for mode, layer in zip(self.modes, layers, strict=True)
        ]
        self.resident = [any(self.modes[layer] is Mode.RESIDENT for layer in members) for members in profile.groups]
        self.refreshed = [there and group not in self.staying for group, there in enumerate(self.resident)]
        for group, members in enumerate(profile.groups):
            if len(members) > 1:
                self._in_group(members, self.resident[group])

    def _stay(self, members: Sequence[int]) -> None:
        """Counts a group that is updated on the device."""
        layers, sizes = self.profile.layers, [self.gradient_bytes[member] for member in members]
        more_bytes = max(layers[member].state_bytes for member in members)
        more_bytes += sum(sizes) if self.after_all else sum(sizes[1:])
        self.until_update[members[0]] = 0 if self.after_all else sizes[0]
        for member in members:
            self.param_bytes[member] += more_bytes
            self.gradient_bytes[member], self.is_trained[member] = 0, False

    def _in_group(self, members: tuple[int, ...], resident: bool) -> None:
        is_held, last_forward, modes = resident, _NONE, self.modes
        for member in members:
            self.loads_forward[member] &= not is_held
            if modes[member] is Mode.GFGB or (modes[member] is Mode.RELOAD and is_held):
                last_forward = member
            is_held |= modes[member] is Mode.GFGB
        for member in members:
            self.loads_between[member] &= not is_held
            is_held |= modes[member] is Mode.DFGB
        last_backward = self._last_backward(members, resident)
        for member in members:
            if modes[member] in (Mode.GFGB, Mode.DFGB):
                self.first_end[member] = last_backward if last_backward >= 0 else last_forward
                self.first_ends_by_backward[member] = last_backward >= 0
                self.second_end[member] = last_backward

    def _last_backward(self, members: tuple[int, ...], resident: bool) -> int:
        """The last member whose backward reads the held copy; notes which ones load none of their own."""
        has_holder, found = False, _NONE
        for member in members:
            layer, mode = self.profile.layers[member], self.modes[member]
            shares = mode is Mode.RELOAD and not resident and has_holder
            shares &= not (layer.fused_backward and self.loads_forward[member])
            self.loads_backward[member] &= not resident and not has_holder
            holds = mode in (Mode.GFGB, Mode.DFGB)
            if layer.has_backward and (holds or shares) and found < 0:
                found = member
            has_holder |= holds
        return found

    def update_places(self) -> list[int]:
        """For each group, the place that its update may precede; 0 without one that waits for gradients to leave."""
        profile = self.profile
        first = [members[0] for members in profile.groups]
        size = len(profile.layers)
        places = [2 * size - profile.program_ends[layer][0] if self.is_trained[layer] else 0 for layer in first]
        return [place and max(places) for place in places] if self.after_all else places

    def lowest_offloads(self) -> list[int]:
        """For each group, the lowest layer whose offload its update waits for; the number of layers if none.

        In backward order the host's updates wait for each other, so for the offloads that earlier ones wait for.
        """
        size, profile = len(self.profile.layers), self.profile
        found = [min((x for x in members if self.holds_up[x]), default=size) for members in profile.groups]
        updated = [bool(place) for place in self.update_places()]
        if self.after_all:
            return [min(found) if is_updated else own for own, is_updated in zip(found, updated, strict=True)]
        if self.plan.update_order is UpdateOrder.BACKWARD:
            earlier = size
            for group in sorted(range(len(found)), key=lambda group: -profile.groups[group][0]):
                if updated[group] and group not in self.through_gpu:
                    found[group] = earlier = min(earlier, found[group])
        return found


@dataclasses.dataclass(frozen=True)
class Spans:
    """The first and last place at which each layer's copies may exist; see `EffectivePlan` for the two copies.

    Attributes:
      first_start, first_end: of the copy for the forward, both inclusive.
      second_start, second_end: of the copy that is loaded later.
      next_start: first place of the copy for the next step's forward; from 2L on, a place of that step.
      next_waits_for: the lowest layer whose offload that copy's load, or an earlier one, waits for; L if none. With
        updates that stream always L: some gradients leave by these, and a load waits for no earlier ones.
    """

    first_start: list[int]
    first_end: list[int]
    second_start: list[int]
    second_end: list[int]
    next_start: list[int]
    next_waits_for: list[int]

    @classmethod
    def of(cls, effective: EffectivePlan) -> Self:
        """The places of all copies."""
        profile = effective.profile
        size, ends, group_of = len(profile.layers), profile.program_ends, profile.group_of
        layers, order = range(size), load_order(profile, effective.bulk)
        first_wait, second_wait = _slot_waits(effective)
        first_start = _in_order([first_wait[x] if effective.loads_forward[x] else 0 for x in layers], order)
        link = max(first_start)
        between = _in_order([ends[x][1] + 1 if effective.loads_between[x] else 0 for x in layers], layers, link)
        again = [max(ends[x][1] + 1, second_wait[x]) if effective.loads_backward[x] else 0 for x in layers]
        again = _in_order(again, layers[::-1], between[-1])
        updated, lowest = effective.update_places(), effective.lowest_offloads()
        link = max([again[0], *itertools.compress(updated, effective.refreshed)])
        first_end = [
            2 * size - 1 - ends[last][0] if is_backward else ends[last][1]
            for last, is_backward in zip(effective.first_end, effective.first_ends_by_backward, strict=True)
        ]
        next_wait, waits_for = [0] * size, [0] * size
        for layer in itertools.compress(layers, effective.loads_forward):
            reusable = updated[group_of[layer]] or first_end[layer] + 1
            next_wait[layer] = 2 * size + first_wait[layer] if first_wait[layer] else reusable
            waits_for[layer] = 0 if effective.through_gpu else size - lowest[group_of[layer]]
        return cls(
            first_start=first_start,
            first_end=first_end,
            second_start=[between[x] if effective.loads_between[x] else again[x] for x in layers],
            second_end=[2 * size - 1 - ends[last][0] for last in effective.second_end],
            next_start=_in_order(next_wait, order, link),
            next_waits_for=[size - wait for wait in _in_order(waits_for, order)],
        )


def load_order(profile: Profile, bulk: bool) -> Sequence[int]:
    """Layers in the order of their loads for the forward: forward order, or with bulk loads the order of updates."""
    layers = range(len(profile.layers))
    return sorted(layers, key=lambda x: (-profile.groups[profile.group_of[x]][0], x)) if bulk else layers


def _in_order(waits: list[int], order: Sequence[int], least: int = 0) -> list[int]:
    """The waits of a FIFO link's loads, including those of all earlier loads."""
    found = waits.copy()
    for layer in order:
        found[layer] = least = max(least, waits[layer])
    return found


def _slot_waits(effective: EffectivePlan) -> tuple[list[int], list[int]]:
    """The place that a RELOAD layer's loads may precede, given its slot; for forward and backward, by layer."""
    profile, size = effective.profile, len(effective.profile.layers)
    first, second = [0] * size, [0] * size
    if Mode.RELOAD not in effective.modes:
        return first, second
    last = before = 0
    for members in profile.programs:
        loads = [x for x in members if effective.modes[x] is Mode.RELOAD and effective.loads_forward[x]]
        if loads:
            for layer in loads:
                first[layer] = before
            before, last = last, members[-1] + 1
    for members in reversed(profile.programs):
        end = 2 * size - members[0]
        is_fused = profile.layers[members[0]].fused_backward
        if is_fused and any(effective.modes[x] is Mode.RELOAD and effective.loads_forward[x] for x in members):
            last = end
        loads = [x for x in members if effective.loads_backward[x]]
        if loads:
            for layer in loads:
                second[layer] = before
            before, last = last, end
    return first, second


def copy_bytes(effective: EffectivePlan, spans: Spans) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes of copies that may exist at each place, (2 * layers + 1,) each.

    The first array counts this step's copies. The second counts the next step's copies whose loads wait for no offload,
    the third all copies of the next step.
    """
    size = len(effective.profile.layers)
    changes, free, following = ([0] * (2 * size + 2) for _ in range(3))
    for layer, num_bytes in enumerate(effective.param_bytes):
        if effective.loads_forward[layer]:
            changes[spans.first_start[layer]] += num_bytes
            changes[spans.first_end[layer] + 1] -= num_bytes
            start = min(spans.next_start[layer], 2 * size + 1)
            following[start] += num_bytes
            if spans.next_waits_for[layer] == size:
                free[start] += num_bytes
        if effective.loads_between[layer] or effective.loads_backward[layer]:
            changes[spans.second_start[layer]] += num_bytes
            changes[spans.second_end[layer] + 1] -= num_bytes
    now, free_bytes, next_bytes = (np.cumsum(each[:-1], dtype=np.int64) for each in (changes, free, following))
    return now, free_bytes, next_bytes
