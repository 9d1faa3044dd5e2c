"""Room for gradients in bytes: which gradient transfers a backward waits for.

A gradient on the device is outstanding until its transfer has ended. A backward waits only for those transfers without
which it would not fit into device memory. All counts here are worst cases, since transfers may take any time: a copy
may exist once its load can start, and a gradient may be outstanding until some program has waited for it.

Names: a **place** is a program's position in the step. Layer l's forward has place l, its backward place 2L - 1 - l.
Layers of one program (`shares_program`) have neighbouring places: the first of them waits for all, and the last of them
ends the program. So their copies stay, and their gradients leave, from there on.

- `copy_bytes` (`jaxferry.step.holdings`): bytes of copies that may exist at each place.
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

from jaxferry.costs import LayerProfile, Profile, column, flags_of, per_choice, program_ends
from jaxferry.step.holdings import DFGB, DHA, Holdings, Spans, copy_bytes, copy_spans, lowest_offloads, of_program

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
    if held.gradients is not None:
        backward_own = backward_own + _of_program_so_far(profile, held.gradients)
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
    if held.holds_up[0].all():
        return needs.backward, needs.backward_after
    layer = np.arange(size)[:, None]
    lowest = np.where(held.holds_up, layer, size).min(axis=0)
    ended = np.minimum.accumulate(lowest_offloads(held, after_all)[list(profile.group_of)], axis=0)
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
