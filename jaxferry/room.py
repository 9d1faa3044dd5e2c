"""Room for gradients in bytes: which gradient transfers a backward waits for.

A gradient on the device is outstanding until its transfer has ended. A backward waits only for those transfers without
which it would not fit into device memory. All counts here are worst cases, since transfers may take any time: a copy
may exist once its load can start, and a gradient may be outstanding until some program has waited for it.

Names: a **place** is a program's position in the step. Layer l's forward has place l, its backward place 2L - 1 - l.
Layers of one program (`shares_program`) have neighbouring places: the first of them waits for all, and the last of them
ends the program. So their copies stay, and their gradients leave, from there on.

- `copy_bytes`: bytes of copies that may exist at each place.
- `Demand.natural`: the most memory that the step needs in any case: the only outstanding gradient is the program's own.
- limit: the larger of `natural` and the plan's `memory_bytes`.
- A backward with demand n may run while gradients of limit - n bytes are outstanding. It waits for as many of the
  oldest transfers as that requires. The link is FIFO, so waiting for the newest of these is enough.

The count at any instant from the start of a place's program to the start of the next one includes:

- RESIDENT copies, and other copies from the place where their load may start to their last use. A load may start once
  all programs have ended that it, or an earlier load of the link, waits for.
- Kept activations, minus saved values once a program has waited for the save, plus values that may have been fetched.
- The program's workspace, its temporaries and its own gradient.
- Copies for the next step. Their loads wait for updates, which wait for gradients. A copy whose load waits for a
  gradient never exists together with that gradient.
- At the start of the next step, gradients of this one that no forward has waited for through their update. Until then,
  only layers before the lowest one whose gradient leaves by a transfer can run.

So a chain of steps never exceeds the limit, for any duration of the transfers. Arrays are (..., plans).
"""

import dataclasses
import itertools
from typing import Self

import numpy as np

from jaxferry.holdings import DFGB, DHA, RELOAD, Holdings, of_program
from jaxferry.profiling.records import LayerProfile, Profile
from jaxferry.profiling.tables import column, flags_of, per_choice, program_ends

CROSSING_SLOTS = 2
"""Number of programs whose values may be on the device on their way to host memory, or back for their backward."""

NO_WAIT = -1
UNLIMITED = 2**62
"""A limit in bytes under which no backward waits for room."""


@dataclasses.dataclass(frozen=True)
class Demand:
    """Bytes that programs need on the device, without the gradients of other programs.

    Attributes:
      forward: need of each layer's forward, (layers, plans).
      backward: need of each layer's backward, including its own gradient; 0 without a backward.
      backward_after: likewise with copies for the next step. Their loads have waited for offloads, so only gradients of
        layers below `beside_below` may then be outstanding.
      beside_below: (plans,), see above.
      gradient: each layer's gradient if it leaves by a transfer, else 0.
      natural: the maximum over all programs, (plans,).
    """

    forward: np.ndarray
    backward: np.ndarray
    backward_after: np.ndarray
    beside_below: np.ndarray
    gradient: np.ndarray
    natural: np.ndarray

    def beside(self, num_bytes: int) -> Self:
        """The needs with so many more bytes in use all the time."""
        if num_bytes == 0:
            return self
        names = ("forward", "backward", "backward_after", "natural")
        return dataclasses.replace(self, **{name: getattr(self, name) + num_bytes for name in names})


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
    updated = _update_places(held, after_all)
    refreshed = np.where(held.group_resident, updated, 0).max(axis=0)
    link = np.maximum(link, refreshed)
    of_group = np.array(held.profile.group_of)
    first_place = np.where(held.first_ends_by_backward, 2 * size - 1 - first[held.first_end], last[held.first_end])
    reusable = np.where(updated[of_group] > 0, updated[of_group], first_place + 1)
    next_wait = np.where(held.loads_forward, np.where(first_wait > 0, 2 * size + first_wait, reusable), 0)
    lowest = _lowest_offloads(held, after_all)[of_group]
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


def _update_places(held: Holdings, after_all: bool) -> np.ndarray:
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


def resident_bytes(held: Holdings) -> np.ndarray:
    """Bytes that RESIDENT copies hold all the time, with optimizer state that stays on the device; (plans,)."""

    def params(profile: Profile) -> np.ndarray:
        return column(profile, "param_bytes")[[members[0] for members in profile.groups]]

    own = params(held.profile)
    if held.on_device is not None:
        own = np.where(held.on_device.groups, params(held.on_device.profile), own)
    return (own * held.group_resident).sum(axis=0)


def _crossing_bytes(profile: Profile) -> tuple[np.ndarray, np.ndarray]:
    """At each place: saved bytes that have certainly left, and fetched bytes that may be back; (2 * layers + 1, 1).

    Kept activations include both. So fetched bytes still count here once their backward has freed them.
    """
    size, programs = len(profile.layers), profile.programs
    saved = np.cumsum([0, *(sum(profile.layers[layer].save_bytes for layer in members) for members in programs)])
    left, fetched = np.zeros(2 * size + 1, dtype=np.int64), np.zeros(2 * size + 2, dtype=np.int64)
    backwards = [members for members in reversed(programs) if profile.layers[members[0]].has_backward]
    for number, members in enumerate(programs):
        left[list(members)] = saved[max(number + 1 - CROSSING_SLOTS, 0)]
    number, last_place = len(programs), size - 1
    for members, following in itertools.zip_longest(backwards, backwards[1:]):
        places = [2 * size - 1 - layer for layer in members]
        left[places] = left[last_place]
        if not profile.layers[members[0]].fused_backward:
            left[places] = saved[min(max(number + 1 - CROSSING_SLOTS, 0), len(programs))]
            number += 1
        if following is not None:
            fetched[last_place + 1] += profile.layers[following[0]].fetch_bytes
        last_place = places[0]
    return left[:, None], np.cumsum(fetched)[:-1, None]


def demand(
    held: Holdings,
    recomputes: np.ndarray | None,
    bulk: bool = False,
    after_all: bool = False,
    updates_stream: bool = False,
) -> Demand:
    """The needs of each program, see the module's docstring.

    Args:
      held: the layers' loads and copies.
      recomputes: whether each layer's backward runs its forward again, (layers, plans); None for none.
      bulk: whether `loads` is "bulk".
      after_all: whether `updates` is "after-all".
      updates_stream: whether some updates stream through the GPU. Then some gradients leave by updates, not by the
        link, and a load that waits for an offload does not wait for earlier ones of these.
    """
    profile, size = held.profile, held.num_layers
    spans = copy_spans(held, bulk, after_all)
    if updates_stream:
        spans = dataclasses.replace(spans, next_waits_for=np.full_like(spans.next_waits_for, size))
    now, free, following = copy_bytes(held, spans)
    now = now + resident_bytes(held)
    left, fetched = profile.once(_crossing_bytes)
    again = np.zeros(held.modes.shape, dtype=bool) if recomputes is None else of_program(profile, recomputes)
    by_dha, by_dha_back = (held.modes == DHA) | (held.modes == DFGB), held.modes == DHA
    forward_own = per_choice(profile, LayerProfile.forward_bytes, by_dha, again)
    backward_own = per_choice(profile, LayerProfile.backward_bytes, by_dha_back, held.grad_on_host, again)
    if held.on_device is not None:
        there = per_choice(held.on_device.profile, LayerProfile.backward_bytes, by_dha_back, held.grad_on_host, again)
        backward_own = np.where(held.on_device.groups[list(profile.group_of)], there, backward_own)
    kept = np.cumsum(per_choice(profile, LayerProfile.kept_bytes, again), axis=0)
    kept_after = np.concatenate([np.zeros((1, held.num_plans), dtype=np.int64), kept[:-1]])
    sizes = column(profile, "device_gradient_bytes")
    gradient = sizes * held.offloads
    back = 2 * size - 1 - np.arange(size)
    early = now + following
    forward = np.maximum(early[:size] + forward_own, early[1 : size + 1] + fetched[1 : size + 1])
    forward = forward + kept - left[:size]

    def backward(copies: np.ndarray) -> np.ndarray:
        """The need while it runs and until the next program starts."""
        during = copies[back] + kept + fetched[back] + backward_own
        return np.maximum(during, copies[back + 1] + kept_after + fetched[back + 1]) - left[back]

    beside_below = np.where(spans.next_waits_for < size, spans.next_waits_for, 0).max(axis=0)
    beside = np.where(np.arange(size)[:, None] < beside_below, gradient, 0)
    runs_back, own = flags_of(profile, "has_backward"), _of_program_so_far(profile, gradient)
    before = np.where(runs_back, backward(now + free) + own, 0)
    after = np.where(runs_back, backward(early) + _of_program_so_far(profile, beside), 0)
    needs = Demand(forward, before, after, beside_below, gradient, forward.max(axis=0))
    before, after = _with_next_forwards(held, spans, needs, own, after_all)
    natural = np.maximum(needs.natural, np.maximum(before, after).max(axis=0))
    return dataclasses.replace(needs, backward=before, backward_after=after, natural=natural)


def _of_program_so_far(profile: Profile, sizes: np.ndarray) -> np.ndarray:
    """Adds the sizes of later layers of the same program to those of each layer, (layers, plans)."""
    if len(profile.programs) == len(sizes):
        return sizes
    from_here = np.concatenate([np.cumsum(sizes[::-1], axis=0)[::-1], np.zeros((1, sizes.shape[1]), dtype=sizes.dtype)])
    return from_here[:-1] - from_here[program_ends(profile)[1] + 1]


def _with_next_forwards(
    held: Holdings, spans: Spans, needs: Demand, own: np.ndarray, after_all: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Adds the next step's forwards that may run while gradients of this step are still outstanding.

    Args:
      held: the layers' loads and copies.
      spans: when copies may exist.
      needs: of this step alone.
      own: bytes of the gradients that leave, of each layer and later ones of its program, (layers, plans).
      after_all: whether `updates` is "after-all".
    """
    size, profile = held.num_layers, held.profile
    if held.offloads[0].all():
        return needs.backward, needs.backward_after
    layer = np.arange(size)[:, None]
    lowest = np.where(held.offloads, layer, size).min(axis=0)
    ended = np.minimum.accumulate(_lowest_offloads(held, after_all)[list(profile.group_of)], axis=0)
    may_run, last = ended > lowest, layer == lowest
    plan = np.broadcast_to(np.arange(held.num_plans), held.modes.shape)
    params = column(profile, "param_bytes")
    waiting = params * (held.loads_forward & (spans.next_waits_for < size))
    changes = np.zeros((2 * size + 2, held.num_plans), dtype=np.int64)
    np.add.at(changes, (spans.first_start, plan), waiting)
    np.subtract.at(changes, (spans.first_end + 1, plan), waiting)
    absent = np.cumsum(changes, axis=0)
    absent = np.minimum(absent[:size], absent[1 : size + 1])
    all_beside = np.where(may_run, needs.forward - absent, 0).max(axis=0)
    few_beside = np.where(may_run & (lowest < needs.beside_below), needs.forward, 0).max(axis=0)

    def with_more(backward: np.ndarray, beside: np.ndarray) -> np.ndarray:
        return np.where(last & (beside > 0), np.maximum(backward, beside + own), backward)

    return with_more(needs.backward, all_beside), with_more(needs.backward_after, few_beside)


def _lowest_offloads(held: Holdings, after_all: bool) -> np.ndarray:
    """For each group, the lowest layer whose offload its update waits for, (groups, plans); L if none."""
    size, groups = held.num_layers, held.profile.groups
    first = np.array([members[0] for members in groups])
    found = np.where(held.offloads[first], first[:, None], size)
    for group, members in enumerate(groups):
        for layer in members[1:]:
            found[group] = np.where(held.offloads[layer], np.minimum(found[group], layer), found[group])
    if after_all:
        has_update = _update_places(held, after_all=False) > 0
        found = np.where(has_update, found.min(axis=0), found)
    return found


def waits(held: Holdings, needs: Demand | None, memory_bytes: int) -> np.ndarray:
    """For each layer, the layer whose offload its backward waits for, or `NO_WAIT`; (layers, plans).

    The last layer of a program, whose backward is its first part, waits for all. A backward that adds to a gradient in
    host memory also waits for the last offload of its group. No backward repeats the wait of an earlier one. The
    needs are None if memory is no limit.
    """
    profile, size = held.profile, held.num_layers
    columns, outstanding = np.arange(held.num_plans), np.zeros((size + 1, held.num_plans), dtype=np.int64)
    least = np.zeros(held.modes.shape, dtype=np.int64)
    if needs is not None and memory_bytes < UNLIMITED:
        least = _least_to_end(needs, memory_bytes, outstanding, program_ends(profile)[1])
    ended, ended_bytes = np.full(held.num_plans, size), np.zeros(held.num_plans, dtype=np.int64)
    found = np.full(held.modes.shape, NO_WAIT, dtype=np.int64)
    may_wait: np.ndarray = np.any(least > 0, axis=1)
    for members in reversed(profile.programs):
        later = {layer: [x for x in profile.groups[profile.group_of[layer]] if x > layer] for layer in members}
        adds = any(later.values())
        if not profile.layers[members[0]].has_backward or not (adds or may_wait[list(members)].any()):
            continue
        before = ended
        for layer, earlier in later.items():
            if earlier:
                mine = np.where(held.offloads[earlier], np.array(earlier)[:, None], size).min(axis=0)
                ended = np.where(held.grad_on_host[layer], np.minimum(ended, mine), ended)
        if adds:
            ended_bytes = outstanding[ended, columns]
        needed = least[list(members)].max(axis=0)
        short = ended_bytes < needed
        while short.any():
            ended = ended - short
            ended_bytes = outstanding[ended, columns]
            short = ended_bytes < needed
        found[members[-1]] = np.where(ended < before, ended, NO_WAIT)
    return found


def _least_to_end(needs: Demand, memory_bytes: int, outstanding: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Bytes of gradients that must have left before each backward, (layers, plans).

    Fills `outstanding`, (layers + 1, plans), with the gradients of each layer and of later ones; `last` is the last
    layer of each layer's program.
    """
    outstanding[:-1] = np.cumsum(needs.gradient[::-1], axis=0)[::-1]
    limit, columns = np.maximum(needs.natural, memory_bytes), np.arange(outstanding.shape[1])
    least = outstanding[last + 1] + needs.backward - limit
    least_after = outstanding[last + 1] + needs.backward_after - limit
    beside = outstanding[np.maximum(needs.beside_below, last[:, None] + 1), columns]
    return np.where(beside < least_after, np.maximum(least, least_after), least)
