"""Plans that stream the updates of some groups through the GPU, and may keep the state of others there.

A candidate has streamed groups, groups that stay on the device, and modes, gradients and recomputation of one start.

- Streamed groups are the last k ones with a gradient, or k of them spread evenly. The last ones have their gradients
  first, so that most of their stream passes during the backward.
- Groups that stay on the device are the first m of the others in forward order.
- A start is a plan that the search without such updates found, or one mode for all layers.
- A backward waits for the updates that free its room, or for none.

Each candidate has a lower bound on its time, mostly its busiest lane, and an estimate of its memory. Those that others
beat in both are left out, `_FRONTS` times over. None of this depends on the budget, which only picks the fastest one
that fits; so more memory is never slower. Candidates are simulated in the order of their bounds, until no other can be
faster. One that could not gain `LEAST_GAIN` over plans that need no more memory is left out too.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np

from jaxferry.holdings import DFGB, DHA, GFGB, RELOAD, RESIDENT, effective_codes
from jaxferry.modes import GradientPlace, Mode, UpdatePlace
from jaxferry.plan.device_updates import Placed, streamable_groups, updatable_groups
from jaxferry.plan.effort import fewer
from jaxferry.plan.order import best_order
from jaxferry.plan.records import Loads, Plan, Updates
from jaxferry.plan.search import Best, plan_of
from jaxferry.profiling.records import Profile
from jaxferry.schedule import needed_bytes, step_demand

LEAST_GAIN = 0.02
"""The least gain for which a plan with streamed updates is worth a simulation."""

_POINTS, _LEAST_POINTS = 8, 2
_STARTS = 4
_FRONTS = 2
_EXACT = 1e-12


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """A start, the groups that stream, those that stay on the device, whether gradients may fill all memory."""

    start: int
    through_gpu: frozenset[int]
    on_device: frozenset[int]
    fills_memory: bool


class StreamedUpdateSearch:
    """The candidates of one profile; answers any number of budgets.

    Args:
      policy: the name that the plans carry.
      profile: the layers.
      starts: plans without updates on the device, fastest first; none beats another in time and memory.
    """

    def __init__(self, policy: str, profile: Profile, starts: Sequence[Best]):
        self.policy, self.profile, self.known = policy, profile, starts
        chosen = np.unique(np.linspace(0, max(len(starts) - 1, 0), _STARTS).astype(int))
        self.starts = [starts[number] for number in chosen] if starts else []
        self.starts += self._uniform()
        pairs = self._choices()
        candidates = [
            _Candidate(start, *groups, fills)
            for start, groups, fills in itertools.product(range(len(self.starts)), pairs, (False, True))
        ]
        rows = [(self._bound_s(each), self._estimated_bytes(each), each) for each in candidates]
        self.bounded = sorted(_fronts(rows), key=lambda row: row[:2])

    def best(self, budget_bytes: int | None, below_s: float = np.inf) -> Placed | None:
        """The fastest candidate that fits, if it is faster than `below_s`; else None."""
        found: Placed | None = None
        for bound_s, _, each in self.bounded:
            least_s = below_s if found is None else found.objective_s
            if bound_s >= least_s * (1 - _EXACT):
                break
            num_bytes = self._plan(each)[1]
            fits = budget_bytes is None or num_bytes <= budget_bytes
            if not fits or bound_s > (1 - LEAST_GAIN) * self._known_s(num_bytes):
                continue
            placed = self._placed(each)
            if placed.objective_s < least_s * (1 - _EXACT):
                found = placed
        return found

    def _uniform(self) -> list[Best]:
        """Plans of one mode for all layers: the plain one, and the leanest."""
        size = len(self.profile.layers)
        none = np.zeros(size, dtype=bool)
        again = np.array([layer.can_recompute for layer in self.profile.layers])
        whole = ((GFGB, none, none), (DHA, ~none, again), (RELOAD, ~none, again))
        return [
            Best(np.full(size, mode, dtype=np.int8), on_host, recomputes, *_KIND, objective_s=1.0, needed_bytes=0)
            for mode, on_host, recomputes in whole
        ]

    def _estimated_bytes(self, each: _Candidate) -> int:
        layers, groups = self.profile.layers, self.profile.groups
        first = [layers[groups[group][0]] for group in each.on_device]
        gradients = [layers[member].device_gradient_bytes for group in each.through_gpu for member in groups[group]]
        more = sum(gradients) if each.fills_memory else max(gradients)
        return self._start_bytes[each.start] + sum(x.state_bytes + x.param_bytes for x in first) + more

    @functools.cached_property
    def _start_bytes(self) -> list[int]:
        plans = [plan_of(self.policy, 1.0, self.profile, start) for start in self.starts]
        return [needed_bytes(self.profile, plan) for plan in plans]

    def _choices(self) -> list[tuple[frozenset[int], frozenset[int]]]:
        """Pairs of streamed groups and groups that stay on the device."""
        groups, num_layers = streamable_groups(self.profile), len(self.profile.layers)
        points = np.unique(np.linspace(1, len(groups), fewer(_POINTS, num_layers, _LEAST_POINTS)).astype(int))
        spread = [np.unique(np.linspace(0, len(groups) - 1, count).astype(int)) for count in points[::2]]
        sets = [frozenset(groups[-count:]) for count in points]
        sets += [frozenset(groups[index] for index in each) for each in spread]
        pairs = []
        for through_gpu in dict.fromkeys(sets):
            others = [group for group in updatable_groups(self.profile) if group not in through_gpu]
            counts = np.unique(np.linspace(0, len(others), fewer(_POINTS, num_layers, _LEAST_POINTS)).astype(int))
            pairs += [(through_gpu, frozenset(others[:count])) for count in counts]
        return pairs

    def _known_s(self, num_bytes: int) -> float:
        """The least time of the known plans that need no more memory."""
        return min((best.objective_s for best in self.known if best.needed_bytes <= num_bytes), default=np.inf)

    @functools.cache  # noqa: B019 - as long as the search lives
    def _plan(self, each: _Candidate) -> tuple[Plan, int]:
        """A candidate's plan and the least budget within which it runs."""
        start, group_of = self.starts[each.start], self.profile.group_of
        plan = plan_of(self.policy, 1.0, self.profile, dataclasses.replace(start, memory_bytes=None))
        layers = list(plan.layers)
        for index, layer in enumerate(layers):
            own = dataclasses.replace(layer, gradient=GradientPlace.DEVICE)
            if group_of[index] in each.on_device:
                layers[index] = dataclasses.replace(own, mode=Mode.RESIDENT, update=UpdatePlace.RESIDENT)
            elif group_of[index] in each.through_gpu:
                mode = Mode.GFGB if layer.mode is Mode.RESIDENT else layer.mode
                layers[index] = dataclasses.replace(own, mode=mode, update=UpdatePlace.GPU)
        plan = dataclasses.replace(plan, layers=tuple(layers))
        needs = step_demand(self.profile, plan)[1]
        needed = int(needs.natural[0])
        if each.fills_memory:
            outstanding = np.cumsum(needs.gradient[::-1, 0])[::-1]
            more = np.maximum(needs.backward, needs.backward_after)[:-1, 0] + outstanding[1:]
            needed = max(needed, int(more.max(initial=0)))
            plan = dataclasses.replace(plan, memory_bytes=needed)
        return plan, needed

    @functools.cache  # noqa: B019 - as long as the search lives
    def _placed(self, each: _Candidate) -> Placed:
        plan, num_bytes = self._plan(each)
        return Placed(*best_order(self.profile, plan), num_bytes)

    def _bound_s(self, each: _Candidate) -> float:
        """The steady step is no less: each lane's work, or the GPU's work up to a gradient and then the stream.

        The next step's programs wait for all updates of the stream, and no state goes up before its gradient exists.
        """
        costs, start = self._costs, self._start_costs[each.start]
        streams, stays = costs.members(each.through_gpu), costs.members(each.on_device)
        on_host = start.grad_on_host & ~streams & ~stays
        forward_s = float(np.where(stays, costs.forward_s, start.forward_s).sum())
        backward_s = np.where(stays, start.loaded_s, np.where(on_host, start.backward_go_s, start.backward_s))
        up_s, down_s = costs.up_s * streams, costs.down_s * streams
        until_s = np.cumsum(backward_s[::-1])[::-1]
        until_s = np.full_like(until_s, until_s[0]) if self.profile.updates_after_all else until_s
        stream_s = float(np.where(up_s > 0, until_s + np.cumsum(up_s), 0.0).max())
        gpu_s = float(backward_s.sum() + (costs.update_gpu_s * (streams | stays)).sum())
        load_s = float((start.load_s * ~stays).sum() + up_s.sum())
        offload_s = float((costs.offload_s * ~(on_host | streams | stays)).sum() + down_s.sum())
        elsewhere = each.through_gpu | each.on_device
        host_s = sum(s for group, s in enumerate(self.profile.group_update_s) if group not in elsewhere)
        return max(host_s, forward_s + max(gpu_s, stream_s), load_s, offload_s)

    @functools.cached_property
    def _costs(self) -> "_Costs":
        return _Costs(self.profile)

    @functools.cached_property
    def _start_costs(self) -> list["_StartCosts"]:
        return [_StartCosts.of(self.profile, start) for start in self.starts]


def _fronts(rows: list[tuple[float, int, _Candidate]]) -> list[tuple[float, int, _Candidate]]:
    """The rows that no other beats in the first two values, and likewise of the rest."""
    left, found = sorted(rows, key=lambda row: row[:2]), []
    for _ in range(_FRONTS):
        least, dominated = np.inf, []
        for row in left:
            if row[1] < least:
                least = row[1]
                found.append(row)
            else:
                dominated.append(row)
        left = dominated
    return found


class _Costs:
    """Seconds of each layer, (layers,) arrays; those of a group at its first layer."""

    def __init__(self, profile: Profile):
        layers, self.group_of = profile.layers, np.array(profile.group_of)
        first = np.zeros(len(layers), dtype=bool)
        first[[members[0] for members in profile.groups]] = True
        self.forward_s = np.array([layer.forward_s + layer.inter_forward_s for layer in layers])
        self.offload_s = np.array([layer.offload_s for layer in layers])
        self.update_gpu_s = first * np.array([layer.update_gpu_s or 0.0 for layer in layers])
        self.up_s = first * np.array([layer.state_up_s or 0.0 for layer in layers])
        self.down_s = first * np.array([layer.state_down_s or 0.0 for layer in layers])

    def members(self, groups: frozenset[int]) -> np.ndarray:
        """The layers of these groups as flags."""
        return np.isin(self.group_of, list(groups))


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
            rows.append((forward_s, *backward_s, loaded_s, layer.load_s if loads else 0.0))
        return cls(on_host, *np.array(rows).T)


_KIND = (Loads.LAYERWISE, Updates.OVERLAPPED)
