"""Plans that stream the updates of some groups through the GPU, and may keep the state of others there.

A candidate has groups that stay on the device, streamed groups, and modes, gradients and recomputation of one start.
The compute copies of all streamed groups stay on the device, or none.

- Groups that stay are the first m ones in forward order, the streamed ones the k that follow. The host updates the last
  ones: their gradients come first and their parameters are needed last, so it works almost all the time, while a stream
  takes little longer than its transfers. k makes the busiest lane's work the least.
- A start is a plan that the search without such updates found, or one mode for all layers. Where the host sets the
  pace, the found plans hardly depend on the GPU and the links, so the others may be better.
- A backward waits for the updates that free its room, for none, or for some: a quarter of all that would wait has room.

Each candidate has a lower bound on its time, and estimates of its time and memory: of equal bounds, the one with less
work on all lanes is taken as faster. Those that others with as much room beat in both estimates are left out, found
starts and others apart. None of this depends on the budget, which only picks the fastest one that fits; so more memory
is never slower. Candidates are simulated in the order of their bounds, until no other can be faster. One that would
count as equal to a plan that needs no more memory (`planner/preference.py`) is left out too.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np

from jaxferry.costs import Profile, column
from jaxferry.modes import GradientPlace, Mode, Subgroups, UpdatePlace
from jaxferry.planner.base import best_order
from jaxferry.planner.device_updates import Placed
from jaxferry.planner.effort import fewer, streamable_groups, updatable_groups
from jaxferry.planner.preference import Best, longest_equal_s, picked_plan
from jaxferry.step import (
    DFGB,
    DHA,
    GFGB,
    RELOAD,
    RESIDENT,
    Lane,
    Loads,
    StepSchedules,
    Updates,
    effective_codes,
    needed_bytes,
    num_subgroups,
    of_program,
    slots_bytes,
)

_POINTS, _LEAST_POINTS = 48, 2
_SCHEDULES = 4
_BESIDE = 1
_STARTS = 4
_OTHER_LANES = 0.02
_ROOMS = (0.0, 0.25, 1.0)
_EXACT = 1e-12


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """A start, the groups that stream, those that stay on the device, the share of gradients with room of their own.

    `copies_stay`: whether the compute copies of those that stream stay on the device.
    """

    start: int
    through_gpu: frozenset[int]
    on_device: frozenset[int]
    copies_stay: bool
    room: float


@dataclasses.dataclass(frozen=True)
class _Row:
    """A candidate, a lower bound on its time, estimates of its time and of its memory."""

    candidate: _Candidate
    bound_s: float
    estimated_s: float
    estimated_bytes: int


class StreamedUpdateSearch:
    """The candidates of one profile; answers any number of budgets.

    Args:
      policy: the name that the plans carry.
      profile: the layers.
      starts: plans without updates on the device, fastest first; none beats another in time and memory.
      size: that of the subgroups.
    """

    def __init__(self, policy: str, profile: Profile, starts: Sequence[Best], size: Subgroups = Subgroups.LARGE):
        self.policy, self.profile, self.known, self.size = policy, profile, starts, size
        chosen = np.unique(np.linspace(0, max(len(starts) - 1, 0), _STARTS).astype(int))
        self.starts = [starts[number] for number in chosen] if starts else []
        num_known = len(self.starts)
        self.starts += self._uniform()
        pairs = (
            (number, *groups, copies_stay)
            for number, copies_stay in itertools.product(range(len(self.starts)), (False, True))
            for groups in self._choices(number, copies_stay)
        )
        rows: dict[tuple[bool, float], list[_Row]] = {}
        for row in itertools.chain.from_iterable(self._rows(*pair) for pair in pairs):
            rows.setdefault((row.candidate.start < num_known, row.candidate.room), []).append(row)
        fronts = itertools.chain.from_iterable(_front(some) for some in rows.values())
        self.bounded = sorted(fronts, key=lambda row: (row.bound_s, row.estimated_bytes))

    def best(self, budget_bytes: int | None, below_s: float = np.inf) -> Placed | None:
        """The fastest candidate that fits, if it is faster than `below_s`; else None."""
        found: Placed | None = None
        for row in self.bounded:
            bound_s, each = row.bound_s, row.candidate
            least_s = below_s if found is None else found.objective_s
            if bound_s >= least_s * (1 - _EXACT):
                break
            if budget_bytes is not None and self._least_bytes(each) > budget_bytes:
                continue
            num_bytes = self._needed_bytes(each)
            fits = budget_bytes is None or num_bytes <= budget_bytes
            if not fits or longest_equal_s(bound_s) > self._known_s(num_bytes):
                continue
            placed = self._placed(each)
            if placed.objective_s < least_s * (1 - _EXACT):
                found = placed
        return found

    def _uniform(self) -> list[Best]:
        """Plans of one mode for all layers: the plain one, the leanest, and a lean one whose gradients all stay."""
        size = len(self.profile.layers)
        none = np.zeros(size, dtype=bool)
        again = np.array([layer.can_recompute for layer in self.profile.layers])
        whole = ((GFGB, none, none), (DHA, ~none, again), (RELOAD, ~none, again), (RELOAD, none, again))
        return [
            Best(np.full(size, mode, dtype=np.int8), on_host, recomputes, *_KIND, objective_s=1.0, needed_bytes=0)
            for mode, on_host, recomputes in whole
        ]

    def _rows(
        self, start: int, through_gpu: frozenset[int], on_device: frozenset[int], copies_stay: bool
    ) -> list[_Row]:
        """The candidates with these groups.

        The estimated time is the bound and a small share of all work that does not take the busiest lane's time.
        """
        streams, stays = self._costs.members(through_gpu), self._costs.members(on_device)
        work_s = self._work_s(start, streams, stays, copies_stay)
        bound_s, lanes_s = self._bound_s(work_s, streams, stays, copies_stay), self._with_lost(work_s.sum(axis=0))
        estimated_s = bound_s + _OTHER_LANES * float(lanes_s.sum() - lanes_s.max())
        num_bytes = self._estimated_bytes(start, through_gpu, stays, copies_stay)
        gradients = self._costs.gradient_bytes[streams]
        one = int(gradients.max(initial=0))
        more = int(gradients.sum()) - one
        return [
            _Row(
                _Candidate(start, through_gpu, on_device, copies_stay, room),
                bound_s,
                estimated_s,
                num_bytes + one + int(room * more),
            )
            for room in (_ROOMS if through_gpu else _ROOMS[:1])
        ]

    def _least_bytes(self, each: _Candidate) -> int:
        """What the last forward certainly needs: what stays on the device all the time, slots and kept activations."""
        first = (self.profile.layers[self.profile.groups[group][0]] for group in each.on_device)
        copies = each.through_gpu if each.copies_stay else ()
        more = (self.profile.layers[self.profile.groups[group][0]].param_bytes for group in copies)
        stays = sum(layer.state_bytes + layer.param_bytes for layer in first) + sum(more)
        return stays + slots_bytes(self.profile, each.through_gpu, copies, self.size) + self._kept_bytes[each.start]

    @functools.cached_property
    def _kept_bytes(self) -> list[int]:
        """Activations that each start certainly keeps on the device across the last forward."""
        layers, saved = self.profile.layers, sum(layer.save_bytes for layer in self.profile.layers)
        flags = (of_program(self.profile, start.recomputes) for start in self.starts)
        kept = (sum(layer.kept_bytes(bool(x)) for layer, x in zip(layers, own, strict=True)) for own in flags)
        return [max(num_bytes - saved, 0) for num_bytes in kept]

    def _estimated_bytes(self, start: int, through_gpu: frozenset[int], stays: np.ndarray, copies_stay: bool) -> int:
        """About the bytes that a candidate needs besides gradients, given the layers whose groups stay."""
        costs, modes = self._costs, self.starts[start].modes
        first = stays & costs.is_first
        copies = costs.param_bytes * ~np.isin(modes, (GFGB, RESIDENT))
        more = int((costs.state_bytes + copies)[first].sum())
        if copies_stay:
            more += int(copies[costs.members(through_gpu) & costs.is_first].sum())
        staying = through_gpu if copies_stay else frozenset[int]()
        return self._start_bytes[start] + more + slots_bytes(self.profile, through_gpu, staying, self.size)

    @functools.cached_property
    def _start_bytes(self) -> list[int]:
        plans = [picked_plan(self.policy, 1.0, self.profile, start) for start in self.starts]
        return [needed_bytes(self.profile, plan) for plan in plans]

    def _choices(self, start: int, copies_stay: bool) -> list[tuple[frozenset[int], frozenset[int]]]:
        """Pairs of streamed groups and groups that stay on the device, for one start.

        With `copies_stay` only pairs with streamed groups: the others are no other candidates.
        """
        may_stay, may_stream = updatable_groups(self.profile), streamable_groups(self.profile)
        on_host, streamed, stays = (self._lanes_s(start, *choice, copies_stay) for choice in _CHOICES)
        more_s = np.zeros((len(may_stream) + 1, len(Lane)))
        np.cumsum((streamed - on_host)[may_stream], axis=0, out=more_s[1:])
        counts = np.unique(np.linspace(0, len(may_stay), fewer(_POINTS, len(self.profile.layers), _LEAST_POINTS)))
        pairs = []
        for count in counts.astype(int):
            chosen, first = may_stay[:count], int(np.isin(may_stream, may_stay[:count]).sum())
            lanes_s = on_host.sum(axis=0) + (stays - on_host)[chosen].sum(axis=0)
            busiest_s = (lanes_s + more_s[first:] - more_s[first]).max(axis=1)
            best = int(busiest_s.argmin())
            for number in range(max(best - _BESIDE, 0), min(best + _BESIDE, len(busiest_s) - 1) + 1):
                pairs.append((frozenset(may_stream[first : first + number]), frozenset(chosen)))
        return [pair for pair in dict.fromkeys(pairs) if (pair[0] if copies_stay else any(pair))]

    def _lanes_s(self, start: int, streams: np.bool, stays: np.bool, copies_stay: bool) -> np.ndarray:
        """Seconds of each group on each lane, (groups, lanes), if all groups have the same choice."""
        layers_s = self._work_s(start, streams, stays, copies_stay)
        found = np.zeros((len(self.profile.groups), len(Lane)))
        np.add.at(found, np.array(self.profile.group_of), layers_s)
        return self._with_lost(found)

    def _with_lost(self, lanes_s: np.ndarray) -> np.ndarray:
        """The lanes' work, (..., lanes), with what those that use host memory lose to each other."""
        gpu_s, shared_s = lanes_s[..., :1], lanes_s[..., 1:]
        return np.concatenate([gpu_s, shared_s + self.profile.contention.lost_s(shared_s.T).T], axis=-1)

    def _known_s(self, num_bytes: int) -> float:
        """The least time of the known plans that need no more memory."""
        return min((best.objective_s for best in self.known if best.needed_bytes <= num_bytes), default=np.inf)

    def _needed_bytes(self, each: _Candidate) -> int:
        """The least budget within which a candidate runs."""
        least_bytes, most_bytes = self._range_bytes(dataclasses.replace(each, room=0.0))
        return least_bytes + int(each.room * (most_bytes - least_bytes))

    @functools.cache  # noqa: B019 - as long as the search lives
    def _range_bytes(self, each: _Candidate) -> tuple[int, int]:
        """The least budget within which a candidate runs, and that in which no backward waits for room."""
        needs = self._schedules(each).needs
        needed, outstanding = int(needs.natural[0]), np.cumsum(needs.gradient[::-1, 0])[::-1]
        more = np.maximum(needs.backward, needs.backward_after)[:-1, 0] + outstanding[1:]
        return needed, max(needed, int(more.max(initial=0)))

    @functools.lru_cache(maxsize=_SCHEDULES)  # noqa: B019 - as long as the search lives
    def _schedules(self, each: _Candidate) -> StepSchedules:
        start, group_of = self.starts[each.start], self.profile.group_of
        plan = picked_plan(self.policy, 1.0, self.profile, dataclasses.replace(start, memory_bytes=None))
        layers = list(plan.layers)
        for index, layer in enumerate(layers):
            mode, update = layer.mode, UpdatePlace.HOST
            if group_of[index] in each.on_device:
                mode, update = Mode.RESIDENT, UpdatePlace.RESIDENT
            elif group_of[index] in each.through_gpu:
                mode = Mode.GFGB if mode is Mode.RESIDENT else mode
                mode, update = Mode.RESIDENT if each.copies_stay else mode, UpdatePlace.GPU
            if update is not UpdatePlace.HOST:
                own = dataclasses.replace(layer, gradient=GradientPlace.DEVICE)
                layers[index] = dataclasses.replace(own, mode=mode, update=update)
        return StepSchedules(self.profile, dataclasses.replace(plan, layers=tuple(layers), subgroups=self.size))

    def _placed(self, each: _Candidate) -> Placed:
        return self._within(dataclasses.replace(each, room=0.0), self._needed_bytes(each))

    @functools.cache  # noqa: B019 - as long as the search lives
    def _within(self, without_room: _Candidate, num_bytes: int) -> Placed:
        """The plan within so many bytes; room for gradients that needs none is no other plan."""
        schedules, (least_bytes, _) = self._schedules(without_room), self._range_bytes(without_room)
        plan = dataclasses.replace(schedules.plan, memory_bytes=num_bytes if num_bytes > least_bytes else None)
        return Placed(*best_order(plan, schedules), num_bytes)

    def _work_s(
        self, start: int, streams: np.ndarray | np.bool, stays: np.ndarray | np.bool, copies_stay: bool
    ) -> np.ndarray:
        """Seconds of each layer on GPU, H2D, D2H and host, (layers, lanes), with flags of the layers' groups."""
        costs, given = self._costs, self._start_costs[start]
        on_host, held = given.grad_on_host & ~(streams | stays), (streams | stays) if copies_stay else stays
        backward_s = np.where(held, given.loaded_s, np.where(on_host, given.backward_go_s, given.backward_s))
        gpu_s = np.where(held, costs.forward_s, given.forward_s) + backward_s + costs.on_gpu_s(streams, stays)
        up_s = np.where(held, 0.0, given.load_s) + costs.up_s * streams
        down_s = np.where(on_host | streams | stays, 0.0, costs.offload_s) + costs.down_s[copies_stay] * streams
        return np.stack([gpu_s, up_s, down_s, costs.update_s * ~(streams | stays)], axis=1)

    def _bound_s(self, work_s: np.ndarray, streams: np.ndarray, stays: np.ndarray, copies_stay: bool) -> float:
        """The steady step is no less: the work of each lane, and loops.

        The streams of the groups up to some one start after its backward, and the last of their transfers up, or down,
        belongs to one of these, whose next forward waits for it. Between them lie the forwards and backwards of all
        layers from that group on. Likewise for the updates on the host. Where compute copies stay, no forward waits for
        a transfer down.
        """
        costs = self._costs
        programs_s = work_s[:, 0] - costs.on_gpu_s(streams, stays)
        loop_s = np.cumsum(programs_s[::-1])[::-1]
        of_streams = streams & costs.is_first
        found = [self._with_lost(work_s.sum(axis=0)), loop_s + np.where(work_s[:, 3] > 0, np.cumsum(work_s[:, 3]), 0.0)]
        down_s = costs.down_s[copies_stay]
        loops = ((costs.up_s, 0.0),) if copies_stay else ((costs.up_s, down_s), (down_s, costs.up_s))
        for seconds, others_s in loops:
            alone_s = np.where(of_streams, (costs.streamed_s + others_s) / costs.num_subgroups, np.inf)
            stream_s = np.cumsum(seconds * of_streams) + np.minimum.accumulate(alone_s)
            found.append(np.where(of_streams, loop_s + stream_s, 0.0))
        return max(float(each.max()) for each in found)

    @functools.cached_property
    def _costs(self) -> "_Costs":
        return _Costs(self.profile, self.size)

    @functools.cached_property
    def _start_costs(self) -> list["_StartCosts"]:
        return [_StartCosts.of(self.profile, start) for start in self.starts]


def _front(rows: list[_Row]) -> list[_Row]:
    """The rows that no other beats in estimated time and memory."""
    least_bytes, found = np.inf, []
    for row in sorted(rows, key=lambda row: (row.estimated_s, row.estimated_bytes)):
        if row.estimated_bytes < least_bytes:
            least_bytes = row.estimated_bytes
            found.append(row)
    return found


class _Costs:
    """Seconds and bytes of each layer, (layers,) arrays; those of a group's update at its first layer.

    `down_s` has two of them, for compute copies that go down and for those that stay.
    """

    def __init__(self, profile: Profile, size: Subgroups):
        layers, self.group_of, self.num_groups = profile.layers, np.array(profile.group_of), len(profile.groups)
        self.is_first = first = np.zeros(len(layers), dtype=bool)
        first[[members[0] for members in profile.groups]] = True
        self.num_subgroups = np.array([num_subgroups(layer, size) for layer in layers])
        keys = ("param_bytes", "state_bytes", "device_gradient_bytes")
        self.param_bytes, self.state_bytes, self.gradient_bytes = (column(profile, key)[:, 0] for key in keys)
        self.update_s = first * np.array([profile.group_update_s[group] for group in profile.group_of])
        self.forward_s = np.array([layer.forward_s + layer.inter_forward_s for layer in layers])
        self.offload_s = np.array([layer.offload_s for layer in layers])
        self.resident_s = first * np.array([layer.update_gpu_s or 0.0 for layer in layers])
        self.streamed_s = first * np.array([layer.streamed_update_s for layer in layers])
        self.up_s = first * np.array([layer.state_up_s or 0.0 for layer in layers])
        self.down_s = [
            first * np.array([layer.state_down_for(copy_stays) or 0.0 for layer in layers])
            for copy_stays in (False, True)
        ]

    def on_gpu_s(self, streams: np.ndarray | np.bool, stays: np.ndarray | np.bool) -> np.ndarray:
        """Updates on the GPU, with flags of the layers' groups."""
        return self.streamed_s * streams + self.resident_s * stays

    def members(self, groups: frozenset[int]) -> np.ndarray:
        """The layers of these groups as flags."""
        found = np.zeros(self.num_groups, dtype=bool)
        found[list(groups)] = True
        return found[self.group_of]


@dataclasses.dataclass(frozen=True)
class _StartCosts:
    """Seconds of each layer under a start, (layers,) arrays; `loaded_s`: of a backward on a copy, gradient there."""

    grad_on_host: np.ndarray
    forward_s: np.ndarray
    backward_s: np.ndarray
    backward_go_s: np.ndarray
    loaded_s: np.ndarray
    load_s: np.ndarray

    @classmethod
    def of(cls, profile: Profile, start: Best) -> "_StartCosts":
        given = (start.modes[:, None], start.grad_on_host[:, None], start.recomputes[:, None])
        modes, on_host = (codes[:, 0] for codes in effective_codes(profile, *given))
        alone = [len(profile.groups[group]) == 1 for group in profile.group_of]
        rows = []
        for layer, mode, again, own in zip(profile.layers, modes, start.recomputes, alone, strict=True):
            by_dha = mode in (DHA, DFGB)
            loads = own and (mode in (GFGB, DFGB, RELOAD) or (mode == RESIDENT and layer.has_gradient))
            backward_s = [
                layer.inter_backward_s + layer.backward_for(mode == DHA, to_host, bool(again))
                for to_host in (False, True)
            ]
            loaded_s = layer.inter_backward_s + layer.backward_for(False, False, bool(again))
            forward_s = layer.inter_forward_s + (layer.forward_dha_s if by_dha else layer.forward_s)
            reads_s = (by_dha * layer.forward_read_s) + (mode == DHA) * layer.backward_reads_for(bool(again))
            twice = own and mode == RELOAD and (layer.backward_reads or again) and not layer.fused_backward
            load_s = layer.load_s * (1 + twice) if loads else reads_s
            rows.append((forward_s, *backward_s, loaded_s, load_s))
        return cls(on_host, *np.array(rows).T)


_KIND = (Loads.LAYERWISE, Updates.OVERLAPPED)
_CHOICES: tuple[tuple[np.bool, np.bool], ...] = ((np.False_, np.False_), (np.True_, np.False_), (np.False_, np.True_))
"""Updates on the host, through the GPU, and on the device."""
