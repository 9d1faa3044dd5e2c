"""When copies of parameters may exist on the device, as places of the step: the worst case of `jaxferry.step.room`."""

import dataclasses

import numpy as np

from jaxferry.costs.records import Profile
from jaxferry.costs.tables import column, program_ends
from jaxferry.step.holdings import RELOAD, Holdings


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
