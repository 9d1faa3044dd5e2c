"""What a plan means for a profile: effective modes and gradient places, and when copies exist on the device.

Arrays are (layers, plans): searches ask for many plans at once, the lowering for one. Modes are codes, see `CODES`.

A **place** is a program's position in the step: layer l's forward has place l, its backward has place 2L - 1 - l.
"""

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from jaxferry.costs import LayerProfile, Profile, column, flags_of, program_ends
from jaxferry.modes import GradientPlace, Mode
from jaxferry.step.plans import Plan, Updates

GFGB, DHA, DFGB, RELOAD, RESIDENT = range(5)
CODES = {Mode.GFGB: GFGB, Mode.DHA: DHA, Mode.DFGB: DFGB, Mode.RELOAD: RELOAD, Mode.RESIDENT: RESIDENT}
MODES = {code: mode for mode, code in CODES.items()}

_NONE = -1


def mode_codes(plan: Plan) -> np.ndarray:
    """The plan's modes as (layers,) codes."""
    return np.array([CODES[mode] for mode in plan.modes], dtype=np.int8)


def gradient_flags(plan: Plan) -> np.ndarray:
    """The plan's gradients as (layers,) flags: written to the host or not."""
    return np.array([place is GradientPlace.HOST for place in plan.gradients])


def of_program(profile: Profile, recomputes: np.ndarray) -> np.ndarray:
    """Whether each layer's backward runs its forward again, (layers, ...): the first layer of a program decides."""
    return recomputes if len(profile.programs) == len(recomputes) else recomputes[program_ends(profile)[0]]


def reads_back(profile: Profile, recomputes: np.ndarray | None) -> np.ndarray:
    """Whether each backward reads parameters, (layers, plans or 1): one that runs its forward again always does."""
    reads = flags_of(profile, "backward_reads")
    again = reads if recomputes is None else reads | of_program(profile, recomputes)
    return again & flags_of(profile, "has_backward")


def effective_codes(
    profile: Profile, modes: np.ndarray, grad_on_host: np.ndarray, recomputes: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The modes and gradient flags that a step runs with, (layers, plans) each.

    DFGB becomes DHA if no backward could read the copy: a lookup's backward, a missing one, or one fused with its
    forward. A gradient that leaves as rows of lookups counts as on the device. So does a missing gradient.
    """
    reads = reads_back(profile, recomputes) & ~flags_of(profile, "fused_backward")
    may_leave = flags_of(profile, "has_gradient") & ~flags_of(profile, "gradient_rows")
    if not reads.all():
        modes = np.where((modes == DFGB) & ~reads, np.int8(DHA), modes)
    return modes, grad_on_host if may_leave.all() else grad_on_host & may_leave


def effective(profile: Profile, plan: Plan) -> Plan:
    """The plan with the modes, gradient places and updates that its step runs with, see `effective_codes`."""
    recomputes = np.array(plan.recomputes)[:, None]
    modes, grad_on_host = effective_codes(profile, mode_codes(plan)[:, None], gradient_flags(plan)[:, None], recomputes)
    places = (GradientPlace.DEVICE, GradientPlace.HOST)
    as_given = (modes == mode_codes(plan)[:, None]) & (grad_on_host == gradient_flags(plan)[:, None])
    layers = tuple(
        layer if same else dataclasses.replace(layer, mode=MODES[int(mode)], gradient=places[int(host)])
        for layer, mode, host, same in zip(plan.layers, modes[:, 0], grad_on_host[:, 0], as_given[:, 0], strict=True)
    )
    updates = Updates.AFTER_ALL if profile.updates_after_all else plan.updates
    return dataclasses.replace(plan, layers=layers, updates=updates)


def updated_on_device(profile: Profile, plan: Plan) -> frozenset[int]:
    """The groups that a plan updates on the device, where they stay."""
    return _updated_groups(profile, plan.updates_on_device)


def streamed(profile: Profile, plan: Plan) -> frozenset[int]:
    """The groups whose updates a plan streams through the GPU."""
    return _updated_groups(profile, plan.updates_streamed)


def streamed_state_bytes(profile: Profile, plan: Plan) -> int:
    """The bytes of masters and optimizer state that a plan streams through the GPU, which are pinned."""
    return sum(profile.layers[profile.groups[group][0]].state_bytes for group in streamed(profile, plan))


def staying(profile: Profile, plan: Plan) -> frozenset[int]:
    """Those of them whose compute copy stays on the device."""
    return _updated_groups(profile, plan.copies_stay)


def _updated_groups(profile: Profile, chosen: Sequence[bool]) -> frozenset[int]:
    groups = enumerate(profile.groups)
    return frozenset(g for g, members in groups if chosen[members[0]] and profile.layers[members[0]].has_gradient)


def as_updated(profile: Profile, groups: Collection[int], after_all: bool) -> Profile:
    """The profile as the host and the links see it if these groups are updated on the device.

    Their layers have no gradient that leaves. Optimizer state stays on the device beside the parameters, and so do the
    gradients if updates wait for all of them; of a group with several, all but the last one (`gradients_to_update`).

    Args:
      profile: the layers.
      groups: the groups.
      after_all: whether updates wait for all gradients.
    """
    if not groups:
        return profile
    updated, chosen = profile.once(_updated_layers, after_all), set(groups)
    layers = (
        own if group in chosen else layer
        for layer, own, group in zip(profile.layers, updated, profile.group_of, strict=True)
    )
    return dataclasses.replace(profile, layers=tuple(layers))


def _updated_layers(profile: Profile, after_all: bool) -> list[LayerProfile]:
    """The layers of `as_updated` for all groups."""
    layers = list(profile.layers)
    for members in profile.groups:
        sizes = [layers[member].device_gradient_bytes for member in members]
        stays = sum(sizes) if after_all else sum(sizes[1:])
        more_bytes = max(layers[member].state_bytes for member in members) + stays
        for member in members:
            param_bytes = layers[member].param_bytes + more_bytes
            layers[member] = dataclasses.replace(layers[member], has_gradient=False, param_bytes=param_bytes)
    return layers


def gradients_to_update(profile: Profile, on_device: np.ndarray, after_all: bool) -> np.ndarray:
    """The gradients that stay from their backward to their update on the device, (layers, plans) bytes.

    Those that stay all the time, see `as_updated`, do not count.

    Args:
      profile: the layers, as the host and the links see them if nothing is updated on the device.
      on_device: whether each group is updated there, (groups, plans).
      after_all: whether updates wait for all gradients.
    """
    found = np.zeros((len(profile.layers), on_device.shape[1]), dtype=np.int64)
    if not after_all:
        first = [members[0] for members in profile.groups]
        sizes = np.array([profile.layers[member].device_gradient_bytes for member in first], dtype=np.int64)
        found[first] = sizes[:, None] * on_device
    return found


@dataclasses.dataclass(frozen=True)
class OnDevice:
    """Which groups plans update on the device.

    Attributes:
      groups: flags, (groups, plans).
      profile: `as_updated` for all groups; its layers count where flags are set.
      gradients: see `gradients_to_update`.
    """

    groups: np.ndarray
    profile: Profile
    gradients: np.ndarray


class Holdings:
    """When each layer loads a copy of its parameters, and how long the copy stays on the device.

    While a group's copy is held, no layer loads another one. The first copy is the one that a layer loads for its
    forward. It loads the second copy later: as DFGB after its forward, or as RELOAD for its backward.

    Args:
      profile: the layers.
      modes: effective codes, (layers, plans).
      grad_on_host: effective gradient flags, (layers, plans).
      recomputes: whether each backward runs its forward again, (layers, plans); None for none.
      on_device: the groups that are updated on the device, where their layers are RESIDENT; None for none.
      staying: the groups whose updates stream through the GPU while their RESIDENT copy stays, in all plans.
      gradients: see `gradients_to_update`, if the profile is `as_updated`; None for those of `on_device`.

    Attributes:
      loads_forward: whether the layer loads a first copy, (layers, plans).
      loads_between: whether it loads a second copy as DFGB.
      loads_backward: whether it loads a second copy as RELOAD.
      waits_between: whether its backward waits for its group's DFGB load.
      on_resident: whether it reads a RESIDENT copy.
      first_end: the layer whose program reads the first copy last.
      first_ends_by_backward: whether that program is a backward, not a forward.
      second_end: the layer whose backward reads the second copy last.
      group_resident: whether a group's copy is RESIDENT, (groups, plans).
      group_refreshed: whether it is refreshed after the group's update.
      offloads: whether the gradient leaves by a transfer, or by an update that streams, (layers, plans).
      holds_up: likewise, but for those of which no forward waits for the link down.
    """

    def __init__(
        self,
        profile: Profile,
        modes: np.ndarray,
        grad_on_host: np.ndarray,
        recomputes: np.ndarray | None = None,
        on_device: OnDevice | None = None,
        staying: Collection[int] = (),
        gradients: np.ndarray | None = None,
    ):
        self.on_device = on_device
        self.gradients = gradients if on_device is None else on_device.gradients
        self.profile, self.modes, self.grad_on_host = profile, modes, grad_on_host
        self.num_layers, self.num_plans = modes.shape
        runs_back, fused = flags_of(profile, "has_backward"), flags_of(profile, "fused_backward")
        own = np.broadcast_to(np.arange(self.num_layers)[:, None], modes.shape)
        self.offloads = ~grad_on_host & flags_of(profile, "has_gradient")
        if on_device is not None:
            self.offloads &= ~on_device.groups[list(profile.group_of)]
        stays = np.isin(np.arange(len(profile.groups)), list(staying))[:, None]
        self.holds_up = self.offloads & ~stays[list(profile.group_of)] if staying else self.offloads
        self.loads_forward = (modes == GFGB) | (modes == RELOAD)
        self.loads_between = modes == DFGB
        self.loads_backward = (modes == RELOAD) & reads_back(profile, recomputes) & ~fused
        self.waits_between = self.loads_between.copy()
        self.on_resident = modes == RESIDENT
        self.first_end = own.copy()
        self.first_ends_by_backward = np.where(modes == RELOAD, fused, runs_back)
        self.second_end = own.copy()
        self.group_resident = np.stack([(modes[list(members)] == RESIDENT).any(axis=0) for members in profile.groups])
        self.group_refreshed = self.group_resident & ~stays if staying else self.group_resident
        for group, members in enumerate(profile.groups):
            if len(members) > 1:
                self._in_group(members, self.group_resident[group])

    def _in_group(self, members: tuple[int, ...], resident: np.ndarray) -> None:
        modes, layers = self.modes, self.profile.layers
        held, last_forward = resident.copy(), np.full(self.num_plans, _NONE)
        for member in members:
            self.loads_forward[member] &= ~held
            reads_it = ((modes[member] == RELOAD) & held) | (modes[member] == GFGB)
            last_forward = np.where(reads_it, member, last_forward)
            held |= modes[member] == GFGB
        for member in members:
            self.loads_between[member] &= ~held
            held |= modes[member] == DFGB
        shares, last_backward = self._backwards_in_group(members, resident)
        loaded_between = self.loads_between[list(members)].any(axis=0)
        for member in members:
            holds = (modes[member] == GFGB) | (modes[member] == DFGB)
            last = np.where(last_backward >= 0, last_backward, last_forward)
            self.first_end[member] = np.where(holds, last, member)
            self.first_ends_by_backward[member] = np.where(
                holds, last_backward >= 0, self.first_ends_by_backward[member]
            )
            self.second_end[member] = np.where(holds, last_backward, member)
            self.waits_between[member] = loaded_between & ((modes[member] == DFGB) | shares[member])
            self.on_resident[member] = resident & (modes[member] != DHA) & (modes[member] != DFGB)
            if not layers[member].has_backward:
                self.waits_between[member] = False

    def _backwards_in_group(
        self, members: tuple[int, ...], resident: np.ndarray
    ) -> tuple[dict[int, np.ndarray], np.ndarray]:
        """For each RELOAD member, whether its backward reads the held copy; and the last member whose backward does."""
        holder, last_backward = np.zeros(self.num_plans, dtype=bool), np.full(self.num_plans, _NONE)
        shares: dict[int, np.ndarray] = {}
        for member in members:
            layer, mode = self.profile.layers[member], self.modes[member]
            shares[member] = (mode == RELOAD) & ~resident & holder
            if layer.fused_backward:
                shares[member] &= ~self.loads_forward[member]
            self.loads_backward[member] &= ~resident & ~holder
            holds = (mode == GFGB) | (mode == DFGB)
            if layer.has_backward:
                last_backward = np.where((holds | shares[member]) & (last_backward < 0), member, last_backward)
            holder |= holds
        return shares, last_backward


@dataclasses.dataclass(frozen=True)
class Spans:
    """The first and last place at which each copy may exist, (layers, plans); see `Holdings` for the two copies.

    Attributes:
      first_start, first_end: of the copy for the forward, both inclusive.
      second_start, second_end: of the copy that is loaded later.
      next_start: first place of the copy for the next step's forward; from 2L on, a place of that step.
      next_waits_for: the lowest layer whose offload that copy's load, or an earlier one, waits for; L if none.
    """

    first_start: np.ndarray
    first_end: np.ndarray
    second_start: np.ndarray
    second_end: np.ndarray
    next_start: np.ndarray
    next_waits_for: np.ndarray


def copy_spans(held: Holdings, bulk: bool, after_all: bool) -> Spans:
    """The places of all copies, see `Spans`.

    Args:
      held: the layers' loads and copies.
      bulk: whether `loads` is "bulk".
      after_all: whether `updates` is "after-all".
    """
    size = held.num_layers
    first, last = program_ends(held.profile)
    first_wait, second_wait = _slot_waits(held)
    order = load_order(held.profile, bulk)
    first_start = _in_link_order(np.where(held.loads_forward, first_wait, 0), order)
    link = first_start.max(axis=0)
    between = np.where(held.loads_between, last[:, None] + 1, 0)
    between_start = np.maximum(np.maximum.accumulate(between, axis=0), link)
    link = between_start[-1]
    again = np.where(held.loads_backward, np.maximum(last[:, None] + 1, second_wait), 0)[::-1]
    again_start = np.maximum(np.maximum.accumulate(again, axis=0), link)[::-1]
    link = again_start[0]
    updated = update_places(held, after_all)
    refreshed = np.where(held.group_refreshed, updated, 0).max(axis=0)
    link = np.maximum(link, refreshed)
    of_group = np.array(held.profile.group_of)
    first_place = np.where(held.first_ends_by_backward, 2 * size - 1 - first[held.first_end], last[held.first_end])
    reusable = np.where(updated[of_group] > 0, updated[of_group], first_place + 1)
    next_wait = np.where(held.loads_forward, np.where(first_wait > 0, 2 * size + first_wait, reusable), 0)
    lowest = lowest_offloads(held, after_all)[of_group]
    next_waits_for = size - _in_link_order(np.where(held.loads_forward, size - lowest, 0), order)
    return Spans(
        first_start=first_start,
        first_end=first_place,
        second_start=np.where(held.loads_between, between_start, again_start),
        second_end=2 * size - 1 - first[held.second_end],
        next_start=np.maximum(_in_link_order(next_wait, order), link),
        next_waits_for=next_waits_for,
    )


def load_order(profile: Profile, bulk: bool) -> np.ndarray:
    """Layers in the order of their loads for the forward: forward order, or with bulk loads the order of updates."""
    if not bulk:
        return np.arange(len(profile.layers))
    return np.array(sorted(range(len(profile.layers)), key=lambda x: (-profile.groups[profile.group_of[x]][0], x)))


def _in_link_order(waits: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The waits of a FIFO link's loads, including those of all earlier loads."""
    result = np.empty_like(waits)
    result[order] = np.maximum.accumulate(waits[order], axis=0)
    return result


def update_places(held: Holdings, after_all: bool) -> np.ndarray:
    """For each group, the place that its update may precede, (groups, plans or 1); 0 without one on the host."""
    profile, size, (first, _) = held.profile, held.num_layers, program_ends(held.profile)
    places = np.array(
        [2 * size - first[members[0]] if profile.layers[members[0]].has_gradient else 0 for members in profile.groups]
    )[:, None]
    places = places if held.on_device is None else np.where(held.on_device.groups, 0, places)
    return np.where(places > 0, places.max(axis=0), 0) if after_all else places


def _slot_waits(held: Holdings) -> tuple[np.ndarray, np.ndarray]:
    """The place that a RELOAD layer's loads may precede, given its slot; for forward and backward, (layers, plans)."""
    size, shape = held.num_layers, held.modes.shape
    first, second = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    reloads = held.modes == RELOAD
    if not reloads.any():
        return first, second
    last = before = np.zeros(held.num_plans, dtype=np.int64)
    for members in map(list, held.profile.programs):
        loads = reloads[members] & held.loads_forward[members]
        first[members] = np.where(loads, before, 0)
        uses, end = loads.any(axis=0), members[-1] + 1
        before, last = np.where(uses, last, before), np.where(uses, end, last)
    for members in map(list, reversed(held.profile.programs)):
        end = 2 * size - members[0]
        if held.profile.layers[members[0]].fused_backward:
            last = np.where((reloads[members] & held.loads_forward[members]).any(axis=0), end, last)
        loads = held.loads_backward[members]
        second[members] = np.where(loads, before, 0)
        uses = loads.any(axis=0)
        before, last = np.where(uses, last, before), np.where(uses, end, last)
    return first, second


def copy_bytes(held: Holdings, spans: Spans) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes of copies that may exist at each place, (2 * layers + 1, plans) each.

    The first array counts this step's copies. The second counts the next step's copies whose loads wait for no offload,
    the third all copies of the next step.
    """
    size, plans = held.num_layers, held.num_plans
    params = column(held.profile, "param_bytes")
    plan = np.broadcast_to(np.arange(plans), held.modes.shape)

    def zeros() -> np.ndarray:
        return np.zeros((2 * size + 2, plans), dtype=np.int64)

    changes, free, following = zeros(), zeros(), zeros()
    first, second = params * held.loads_forward, params * (held.loads_between | held.loads_backward)
    np.add.at(changes, (spans.first_start, plan), first)
    np.subtract.at(changes, (spans.first_end + 1, plan), first)
    np.add.at(changes, (spans.second_start, plan), second)
    np.subtract.at(changes, (spans.second_end + 1, plan), second)
    next_start = np.minimum(spans.next_start, 2 * size + 1)
    np.add.at(following, (next_start, plan), first)
    np.add.at(free, (next_start, plan), first * (spans.next_waits_for == size))
    now, free, following = (np.cumsum(array, axis=0)[:-1] for array in (changes, free, following))
    return now, free, following


def lowest_offloads(held: Holdings, after_all: bool) -> np.ndarray:
    """For each group, the lowest layer whose offload its update waits for, (groups, plans); L if none."""
    size, groups = held.num_layers, held.profile.groups
    first = np.array([members[0] for members in groups])
    found = np.where(held.holds_up[first], first[:, None], size)
    for group, members in enumerate(groups):
        for layer in members[1:]:
            found[group] = np.where(held.holds_up[layer], np.minimum(found[group], layer), found[group])
    if after_all:
        has_update = update_places(held, after_all=False) > 0
        found = np.where(has_update, found.min(axis=0), found)
    return found
