"""Room for gradients in bytes: which gradient transfers a backward waits for.

A gradient on the device is outstanding until its transfer has ended. A backward waits only for those transfers without
which it would not fit into device memory. All counts here are worst cases, since transfers may take any time: a copy
may exist once its load can start, and a gradient may be outstanding until some program has waited for it.

Names: a **place** is a program's position in the step. Layer l's forward has place l, its backward place 2L - 1 - l.
Layers of one program (`shares_program`) have neighbouring places: the first of them waits for all, and the last of them
ends the program. So their copies stay, and their gradients leave, from there on.

- `copy_bytes` (`jaxferry.step.effective_plan`): bytes of copies that may exist at each place.
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

So a chain of steps never exceeds the limit, for any duration of the transfers.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Self

import numpy as np

from jaxferry.costs import LayerProfile, Profile
from jaxferry.modes import GradientPlace, Mode, Remat
from jaxferry.step.effective_plan import EffectivePlan, Spans, copy_bytes
from jaxferry.step.streaming import slots_bytes

CROSSING_SLOTS = 2
"""Number of programs whose values may be on the device on their way to host memory, or back for their backward."""

NO_WAIT = -1
UNLIMITED = 2**62
"""A limit in bytes under which no backward waits for room."""


def program_bytes(layer: LayerProfile, mode: Mode, gradient: GradientPlace, remat: Remat) -> tuple[int, int, int]:
    """What a layer's forward and its backward need of their own, and what it keeps from one to the other, in bytes."""
    return (
        layer.forward_bytes(mode in (Mode.DHA, Mode.DFGB), remat),
        layer.backward_bytes(mode is Mode.DHA, gradient is GradientPlace.HOST, remat),
        layer.kept_bytes(remat),
    )


@dataclasses.dataclass(frozen=True)
class Demand:
    """Bytes that programs need on the device, without the gradients of other programs; arrays are (layers,).

    Attributes:
      forward: need of each layer's forward.
      backward: need of each layer's backward, including its own gradient; 0 without a backward.
      backward_after: likewise with copies for the next step. Their loads have waited for offloads, so only gradients of
        layers below `beside_below` may then be outstanding.
      beside_below: see above.
      gradient: each layer's gradient if it leaves by a transfer, else 0.
      natural: the maximum over all programs.
    """

    forward: np.ndarray
    backward: np.ndarray
    backward_after: np.ndarray
    beside_below: int
    gradient: np.ndarray
    natural: int

    @classmethod
    def of(cls, effective: EffectivePlan) -> Self:
        """The needs of each program, see the module's docstring."""
        profile, layers = effective.profile, effective.profile.layers
        size, spans = len(layers), Spans.of(effective)
        now, free, following = copy_bytes(effective, spans)
        now += _all_the_time(effective)
        left, fetched, twice = profile.once(_crossing_without_choice)
        if effective.leaving is not None:
            left, fetched, twice = _crossing_bytes(profile, Crossings.of(profile, effective.leaving))
        chosen = zip(layers, effective.modes, effective.plan.gradients, effective.remats, strict=True)
        own_forward, own_backward, kept = np.array(list(itertools.starmap(program_bytes, chosen)), dtype=np.int64).T
        own_backward = own_backward + _of_program_so_far(profile, np.array(effective.until_update, dtype=np.int64))
        kept = np.cumsum(kept)
        kept_after = np.concatenate([[0], kept[:-1]])
        gradient = np.array(effective.gradient_bytes, dtype=np.int64) * effective.offloads
        back = 2 * size - 1 - np.arange(size)
        early = now + following
        forward = np.maximum(early[:size] + own_forward, early[1 : size + 1] + fetched[1 : size + 1])
        forward = forward + kept - left[:size]

        def backward(copies: np.ndarray) -> np.ndarray:
            """The need while it runs and until the next program starts."""
            during = copies[back] + kept + fetched[back] + own_backward
            ended = copies[back + 1] + kept_after + fetched[back + 1] - twice[back]
            found: np.ndarray = np.maximum(during, ended) - left[back]
            return found

        beside_below = max(each if each < size else 0 for each in spans.next_waits_for)
        beside = np.where(np.arange(size) < beside_below, gradient, 0)
        runs_back, own = np.array([layer.has_backward for layer in layers]), _of_program_so_far(profile, gradient)
        before = np.where(runs_back, backward(now + free) + own, 0)
        after = np.where(runs_back, backward(early) + _of_program_so_far(profile, beside), 0)
        needs = cls(forward, before, after, beside_below, gradient, int(forward.max()))
        needs = needs._with_next_forwards(effective, spans, own)
        return dataclasses.replace(
            needs, natural=int(max(forward.max(), needs.backward.max(), needs.backward_after.max()))
        )

    def _with_next_forwards(self, effective: EffectivePlan, spans: Spans, own: np.ndarray) -> Self:
        """Adds the next step's forwards that may run while gradients of this step are still outstanding.

        Args:
          effective: the plan.
          spans: when copies may exist.
          own: bytes of the gradients that leave, of each layer and later ones of its program, (layers,).
        """
        size, profile = len(effective.profile.layers), effective.profile
        if effective.holds_up[0] or not any(effective.holds_up):
            return self
        lowest, offloads = effective.holds_up.index(True), effective.lowest_offloads()
        ended = np.minimum.accumulate([offloads[group] for group in profile.group_of])
        changes = np.zeros(2 * size + 2, dtype=np.int64)
        for layer, num_bytes in enumerate(effective.param_bytes):
            if effective.loads_forward[layer] and spans.next_waits_for[layer] < size:
                changes[spans.first_start[layer]] += num_bytes
                changes[spans.first_end[layer] + 1] -= num_bytes
        absent = np.cumsum(changes)
        absent = np.minimum(absent[:size], absent[1 : size + 1])
        all_beside = int(np.where(ended > lowest, self.forward - absent, 0).max())
        few_beside = int(np.where((ended > lowest) & (lowest < self.beside_below), self.forward, 0).max())
        before, after = self.backward.copy(), self.backward_after.copy()
        for needs, beside in ((before, all_beside), (after, few_beside)):
            if beside > 0:
                needs[lowest] = max(needs[lowest], beside + own[lowest])
        return dataclasses.replace(self, backward=before, backward_after=after)


def _all_the_time(effective: EffectivePlan) -> int:
    """Bytes in use all the time: RESIDENT copies, with what stays beside them, and what streams through the GPU."""
    profile = effective.profile
    first = [members[0] for members in profile.groups]
    found = sum(effective.param_bytes[layer] for layer in itertools.compress(first, effective.resident))
    if effective.through_gpu:
        found += slots_bytes(profile, effective.through_gpu, effective.staying, effective.plan.subgroups)
    return found + sum(effective.kept.values())


@dataclasses.dataclass(frozen=True)
class Crossings:
    """Which values leave for host memory and return in a step; programs are given by their first layers.

    Attributes:
      saves, fetches: bytes that leave after each layer's forward, and that return for its backward, (layers,).
      saving: the programs with saves, each with its number. Every program waits for the save of the last but one before
        it.
      fetched_at: by backward, the later backward whose values may return while it runs.
      awaits_saves: whether a fetch waits for its own save. Else programs have waited for that.
    """

    saves: np.ndarray
    fetches: np.ndarray
    saving: dict[int, int]
    fetched_at: dict[int, int]
    awaits_saves: bool

    @classmethod
    def of(cls, profile: Profile, leaving: Sequence[int] = ()) -> Self:
        """The crossings of a step in which these bytes leave by a plan's choice, by layer; empty for none.

        Then only programs whose values move count: those between them give the links more time.
        """
        more = np.array(leaving or [0] * len(profile.layers), dtype=np.int64)
        saves, fetches = (more + [getattr(x, f"{way}_bytes") for x in profile.layers] for way in ("save", "fetch"))
        firsts = [members[0] for members in profile.programs]
        backwards = [first for first in reversed(firsts) if profile.layers[first].has_backward]
        before, returning = dict(zip(backwards[1:], backwards, strict=False)), backwards
        if leaving:
            firsts = [first for first in firsts if saves[first]]
            returning = [first for first in backwards if fetches[first]]
            returning = [*(before[first] for first in returning[:1] if first in before), *returning]
        saving, fetched_at = {first: place for place, first in enumerate(firsts)}, dict(itertools.pairwise(returning))
        return cls(saves, fetches, saving, fetched_at, bool(leaving))

    @classmethod
    def without_choice(cls, profile: Profile) -> Self:
        """The crossings of plans that choose none."""
        return cls.of(profile)


def _crossing_bytes(profile: Profile, crossings: Crossings) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """At each place: saved bytes that have certainly left, and fetched bytes that may be back; (2 * layers + 1,).

    Kept activations include both. So fetched bytes still count here once their backward has freed them. The third array
    has the bytes that may be back before the next program, but only if they have left, which is not certain here.
    """
    size, programs, saving = len(profile.layers), profile.programs, crossings.saving
    saved = np.cumsum([0, *(crossings.saves[list(members)].sum() for members in programs if members[0] in saving)])
    left, fetched = np.zeros(2 * size + 1, dtype=np.int64), np.zeros(2 * size + 2, dtype=np.int64)
    twice = np.zeros(2 * size + 1, dtype=np.int64)
    number, num_left, last_place, returning = 0, 0, size - 1, list[int]()
    for members in programs:
        num_left = max(number + 1 - CROSSING_SLOTS, 0)
        left[list(members)] = saved[num_left]
        number += members[0] in saving
    for members in reversed(programs):
        if not profile.layers[members[0]].has_backward:
            continue
        places = [2 * size - 1 - layer for layer in members]
        if not profile.layers[members[0]].fused_backward:
            num_left = min(max(number + 1 - CROSSING_SLOTS, 0), len(saving))
            number += 1
        left[places] = saved[num_left]
        # What waits for its own save is not on the device twice.
        late = [each for each in returning if saving[each] < num_left]
        twice[last_place] += sum(crossings.fetches[each] for each in late)
        if (following := crossings.fetched_at.get(members[0])) is not None:
            is_early = crossings.awaits_saves and saving.get(following, -1) >= num_left
            (returning if is_early else late).append(following)
        fetched[last_place + 1] += sum(crossings.fetches[each] for each in late)
        returning = [each for each in returning if each not in late]
        last_place = places[0]
    return left, np.cumsum(fetched)[:-1], twice


def _crossing_without_choice(profile: Profile) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return _crossing_bytes(profile, profile.once(Crossings.without_choice))


def _of_program_so_far(profile: Profile, sizes: np.ndarray) -> np.ndarray:
    """Adds the sizes of later layers of the same program to those of each layer, (layers,)."""
    if len(profile.programs) == len(sizes):
        return sizes
    from_here = np.concatenate([np.cumsum(sizes[::-1])[::-1], [0]])
    found: np.ndarray = from_here[:-1] - from_here[[last + 1 for _, last in profile.program_ends]]
    return found


def waits(effective: EffectivePlan, needs: Demand | None, memory_bytes: int) -> list[int]:
    """For each layer, the layer whose offload its backward waits for, or `NO_WAIT`.

    The last layer of a program, whose backward is its first part, waits for all. A backward that adds to a gradient in
    host memory also waits for the last offload of its group. No backward repeats the wait of an earlier one. The
    needs are None if memory is no limit.
    """
    profile, size = effective.profile, len(effective.profile.layers)
    least, outstanding = [0] * size, [0] * (size + 1)
    if needs is not None and memory_bytes < UNLIMITED:
        least, outstanding = _least_to_end(effective.profile, needs, memory_bytes)
    ended, found = size, [NO_WAIT] * size
    for members in reversed(profile.programs):
        if not profile.layers[members[0]].has_backward:
            continue
        before = ended
        for layer in members:
            if effective.plan.layers[layer].gradient is GradientPlace.HOST:
                own = profile.groups[profile.group_of[layer]]
                ended = min([ended, *(other for other in own if other > layer and effective.offloads[other])])
        needed = max(least[layer] for layer in members)
        while outstanding[ended] < needed:
            ended -= 1
        if ended < before:
            found[members[-1]] = ended
    return found


def _least_to_end(profile: Profile, needs: Demand, memory_bytes: int) -> tuple[list[int], list[int]]:
    """Bytes of gradients that must have left before each backward; and those of each layer and of later ones."""
    outstanding = np.concatenate([np.cumsum(needs.gradient[::-1])[::-1], [0]])
    limit, last = max(needs.natural, memory_bytes), np.array([last for _, last in profile.program_ends])
    least = outstanding[last + 1] + needs.backward - limit
    least_after = outstanding[last + 1] + needs.backward_after - limit
    beside = outstanding[np.maximum(needs.beside_below, last + 1)]
    least = np.where(beside < least_after, np.maximum(least, least_after), least)
    return least.tolist(), outstanding.tolist()
