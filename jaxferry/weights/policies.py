"""The weight policies of "Weight Offloading Strategies": which weights leave the device, and when they are transferred.

    B_L ... B_1 F_1 ... F_L      the GPU, one cycle
    prefetch  | prefetch         host to device, in the order of need
    offload   | offload          device to host, in the order of production

`schedule_transfers` is Algorithm 2 of section 5. Every operation and transfer starts as soon as its data, its resource
and the memory allow. The state at the start of the cycle is unknown, so every cut through the merged sequence (offloads
after the forwards, then prefetches before the backwards) is tried: transfers before the cut have finished when B_L
starts, those after it are still to do. The best cut wins. It is not optimal: the problem is strongly NP-complete even
for fixed choices (section 4). Two departures from the printed algorithm: a waiting weight is copied to the host in any
gap of the link, not only in gaps before another offload; and a weight that the host already holds is deleted when its
forward ends, without waiting for the link, which it does not use.

`select` is Algorithm 1. It is not optimal: it considers memory, not time. The printed algorithm counts an operation's
own weight twice (once in M_o, once in the sum over all weights) and so offloads more than the memory requires; here it
counts once. A negative excess counts as zero; otherwise an operation with spare room would argue against a choice.

`greedy_best` runs `greedy` with several smaller memories and keeps the best schedule. Algorithm 1 makes room for
operations, not for transfers in flight. A selection for a memory that is smaller by 0 to 3 times the largest weight
leaves room for both; all schedules respect the true memory. Selections without the discount are tried too: on slow
links it can pay to spread the transfers over more layers. This is our own addition; it is never worse than `greedy`,
but not optimal.

`l2l`, layer to layer, is the paper's baseline, from Pudipeddi et al., arXiv:2002.05645. The device holds only the
running layer's weights. Each forward and each backward first waits for its weights, so a cycle takes
`sum u + 2 sum w / beta`; offloads to the host are hidden behind the loads of other layers. Some of the 2 L waits move
nothing, because the weights are already on the device: the last layer's between its forward and its backward, the first
layer's between its backward and its forward (its new weights are offloaded meanwhile), and that of any layer whose
offload has not finished when its next forward starts. The formula charges them nevertheless.
"""

import bisect
import importlib
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxferry.errors import InputError, JaxFerryError
from jaxferry.weights.instance import Choice, Event, Instance, Outcome, Schedule

_NOTE = "the formula leaves too little time for the offloads of this instance: no schedule of this length is known"
_KINDS = ("backward", "forward", "prefetch", "offload", "delete")


class NoRoomError(Exception):
    """Some bytes never fit; the scheduler abandons this attempt."""


class MemoryTimeline:
    """Bytes in use over time, as a list of changes; simultaneous changes keep the order of their calls."""

    def __init__(self, instance: Instance, initial_bytes: float):
        self.instance = instance
        self.times_s: list[float] = []
        self.changes: list[float] = []
        self.final_bytes = initial_bytes

    def add(self, time_s: float, change: float) -> None:
        """Changes the bytes in use from `time_s` on."""
        index = bisect.bisect_right(self.times_s, time_s)
        self.times_s.insert(index, time_s)
        self.changes.insert(index, change)
        self.final_bytes += change

    def earliest_s(self, ready_s: float, extra_bytes: float) -> float:
        """Returns the earliest time from `ready_s` on from which so much more always fits, or raises `NoRoomError`."""
        used = self.final_bytes + extra_bytes
        if not self.instance.fits(used):
            raise NoRoomError
        for time_s, change in zip(reversed(self.times_s), reversed(self.changes), strict=True):
            if time_s <= ready_s:
                break
            used -= change
            if not self.instance.fits(used):
                return time_s
        return ready_s


class _Cycle:
    """A cycle under construction; `present_bytes` are the weights on the device at its start."""

    def __init__(self, instance: Instance, present_bytes: float):
        self.instance = instance
        self.memory = MemoryTimeline(instance, present_bytes + instance.kept_activations[-1])
        self.events: list[Event] = []
        self.gpu_free_s = 0.0

    def _add(self, kind: str, layer: int, start_s: float, length_s: float) -> float:
        """Adds an event; returns its end."""
        self.events.append(Event(kind, layer, start_s, start_s + length_s))
        return start_s + length_s

    def _compute(self, kind: str, layer: int, ready_s: float, extra_bytes: float) -> float:
        start_s = self.memory.earliest_s(ready_s, extra_bytes)
        length_s = (self.instance.backward_s if kind == "backward" else self.instance.forward_s)[layer]
        self.gpu_free_s = self._add(kind, layer, start_s, length_s)
        self.memory.add(start_s, extra_bytes)
        return self.gpu_free_s

    def _run_backward(self, layer: int, ready_s: float) -> float:
        """A backward's gradient takes as much memory as its weight; then both gradient and activation are gone."""
        weight = self.instance.weights[layer]
        end_s = self._compute("backward", layer, ready_s, weight)
        self.memory.add(end_s, -weight - self.instance.activations[layer + 1])
        return end_s

    def _transfer(self, kind: str, layer: int, start_s: float) -> float:
        return self._add(kind, layer, start_s, self.instance.transfer_s(layer))

    def _prefetch_after(self, layer: int, ready_s: float) -> float:
        start_s = self.memory.earliest_s(ready_s, self.instance.weights[layer])
        self.memory.add(start_s, self.instance.weights[layer])
        return self._transfer("prefetch", layer, start_s)

    def _delete(self, layer: int, time_s: float) -> None:
        self.memory.add(time_s, -self.instance.weights[layer])
        self._add("delete", layer, time_s, 0.0)


def schedule_transfers(instance: Instance, choices: Sequence[Choice], discount: bool = True) -> Schedule:
    """Runs Algorithm 2: returns the shortest cycle over all cuts.

    With the weights that leave the device by `choices`, every operation must fit into the memory. With `discount`, a
    weight that leaves after both its backward and its forward is sent to the host only once. Raises `JaxFerryError` if
    the choices leave too little memory for some operation.
    """
    moved = [choice for choice in choices if instance.weights[choice.layer]]
    before_backward = {choice.layer for choice in moved if choice.before_backward}
    before_forward = {choice.layer for choice in moved if not choice.before_backward}
    resent = [k for k in sorted(before_backward) if not (discount and k in before_forward)]
    prefetched = sorted(before_backward, reverse=True)
    best: Schedule | None = None
    for cut in range(len(resent) + len(prefetched) + 1):
        cycle = _GreedyCycle(
            instance,
            before_backward,
            before_forward,
            carried_over=resent[cut:],
            fetched_ahead=prefetched[: max(0, cut - len(resent))],
            limit_s=math.inf if best is None else best.duration_s,
        )
        best = cycle.run(resent) or best
    if best is None:
        raise JaxFerryError("the choices leave too little memory for an operation: select more weights to offload")
    return best


class _GreedyCycle(_Cycle):
    """Builds one cycle for one cut."""

    def __init__(
        self,
        instance: Instance,
        before_backward: set[int],
        before_forward: set[int],
        carried_over: Sequence[int],
        fetched_ahead: Sequence[int],
        limit_s: float,
    ):
        absent = before_backward - set(carried_over) - set(fetched_ahead)
        super().__init__(instance, sum(weight for k, weight in enumerate(instance.weights) if k not in absent))
        self.before_backward, self.before_forward = before_backward, before_forward
        self.carried_over, self.fetched_ahead, self.limit_s = carried_over, fetched_ahead, limit_s
        self.offload_free_s = self.prefetch_free_s = 0.0
        self.deleted_s: dict[int, float] = {}
        self.waiting: dict[int, float] = {}

    def run(self, resent: Sequence[int]) -> Schedule | None:
        """Returns the schedule, or None if it is not shorter than `limit_s`."""
        for layer in self.carried_over:
            self._drop(layer, self._offload(layer, 0.0))
        try:
            for layer in reversed(range(self.instance.num_layers)):
                self._backward(layer, resent)
                if self.gpu_free_s >= self.limit_s:
                    return None
            for layer in range(self.instance.num_layers):
                self._forward(layer, resent)
                if self.gpu_free_s >= self.limit_s:
                    return None
            for layer in self.fetched_ahead:
                self._prefetch(layer)
        except NoRoomError:
            return None
        schedule = Schedule.from_events(self.events)
        return schedule if schedule.duration_s < self.limit_s else None

    def _backward(self, layer: int, resent: Sequence[int]) -> None:
        ready_s = self.gpu_free_s
        if layer in self.before_backward and layer not in self.fetched_ahead:
            ready_s = max(ready_s, self._prefetch(layer))
        end_s = self._run_backward(layer, ready_s)
        self._copy_waiting(end_s)
        if layer in self.before_forward:
            self._drop(layer, self._offload(layer, end_s))
        elif layer in resent and layer not in self.carried_over:
            self.waiting[layer] = end_s

    def _forward(self, layer: int, resent: Sequence[int]) -> None:
        ready_s = self.gpu_free_s
        if layer in self.before_forward:
            ready_s = max(ready_s, self._prefetch(layer))
        end_s = self._compute("forward", layer, ready_s, self.instance.activations[layer + 1])
        if layer not in self.before_backward or layer in self.carried_over:
            return
        copied_s = 0.0
        if layer in self.waiting:
            copied_s = self._offload(layer, self.waiting.pop(layer))
        elif layer in self.before_forward and layer in resent:
            copied_s = self._offload(layer, end_s)
        self._drop(layer, max(end_s, copied_s))

    def _prefetch(self, layer: int) -> float:
        ready_s = max(self.prefetch_free_s, self.deleted_s.get(layer, 0.0))
        self.prefetch_free_s = self._prefetch_after(layer, ready_s)
        return self.prefetch_free_s

    def _offload(self, layer: int, ready_s: float) -> float:
        self.offload_free_s = self._transfer("offload", layer, max(ready_s, self.offload_free_s))
        return self.offload_free_s

    def _drop(self, layer: int, time_s: float) -> None:
        self.deleted_s[layer] = time_s
        self._delete(layer, time_s)

    def _copy_waiting(self, until_s: float) -> None:
        """Copies waiting weights to the host, smallest first, as long as the copies end by `until_s`."""
        while self.waiting:
            layer = min(self.waiting, key=lambda k: self.instance.weights[k])
            start_s = max(self.waiting[layer], self.offload_free_s)
            if start_s + self.instance.transfer_s(layer) > until_s:
                return
            self._offload(layer, start_s)
            del self.waiting[layer]


def l2l(instance: Instance) -> Outcome:
    """Returns the baseline's duration by formula, and a schedule of it if found; raises `BudgetError` if none."""
    instance.check_feasible()
    transfers_s = math.fsum(map(instance.transfer_s, range(instance.num_layers)))
    duration_s = instance.compute_s + 2 * transfers_s
    for paced in (True, False):
        cycle = _LayerToLayer(instance, paced)
        try:
            schedule = cycle.build(duration_s)
        except NoRoomError:
            schedule = None
        if schedule is not None:
            return Outcome("l2l", duration_s, instance.compute_s, cycle.choices(), schedule)
    return Outcome("l2l", duration_s, instance.compute_s, cycle.choices(), None, _NOTE)


class _LayerToLayer(_Cycle):
    """Builds the cycle of `l2l`; if `paced`, no operation starts earlier than in the formula.

    If offloads fall behind, the waits that the formula charges for nothing can absorb them; `paced` must then be False.
    """

    def __init__(self, instance: Instance, paced: bool):
        super().__init__(instance, instance.weights[-1])
        self.paced = paced
        self.offloaded_s: dict[int, float] = {}
        self.absent = set[Choice]()
        self.charged_s = 0.0

    def build(self, duration_s: float) -> Schedule | None:
        layers = range(self.instance.num_layers)
        for layer in reversed(layers):
            self._backward(layer)
        for layer in layers:
            self._forward(layer)
        schedule = Schedule.from_events(sorted(self.events, key=lambda event: max(_KINDS.index(event.kind), 1)))
        if schedule.duration_s > duration_s * (1 + 1e-12):
            return None
        return Schedule(max(duration_s, schedule.duration_s), schedule.events)

    def choices(self) -> tuple[Choice, ...]:
        return tuple(sorted(self.absent))

    def _backward(self, layer: int) -> None:
        ready_s = self.gpu_free_s if layer == self.instance.num_layers - 1 else self._prefetch(layer)
        end_s = self._run_backward(layer, self._paced(layer, ready_s))
        self.charged_s += self.instance.backward_s[layer]
        if self.instance.weights[layer]:
            start_s = max(end_s, *self.offloaded_s.values(), 0.0)
            self.offloaded_s[layer] = self._transfer("offload", layer, start_s)
            self._drop(layer, self.offloaded_s[layer], before_backward=False)

    def _forward(self, layer: int) -> None:
        copied_s = self.offloaded_s.get(layer, 0.0)
        if copied_s > self.gpu_free_s:
            self.absent.discard(Choice(layer, False))
            self.events.remove(Event("delete", layer, copied_s, copied_s))
            self.memory.add(copied_s, self.instance.weights[layer])
            ready_s = self.gpu_free_s
        else:
            ready_s = self._prefetch(layer)
        end_s = self._compute("forward", layer, self._paced(layer, ready_s), self.instance.activations[layer + 1])
        self.charged_s += self.instance.forward_s[layer]
        if layer != self.instance.num_layers - 1 and layer in self.offloaded_s:
            self._drop(layer, max(end_s, copied_s), before_backward=True)

    def _paced(self, layer: int, ready_s: float) -> float:
        self.charged_s += self.instance.transfer_s(layer)
        return max(ready_s, self.charged_s) if self.paced else ready_s

    def _prefetch(self, layer: int) -> float:
        return self._prefetch_after(layer, self.gpu_free_s) if self.instance.weights[layer] else self.gpu_free_s

    def _drop(self, layer: int, time_s: float, before_backward: bool) -> None:
        self.absent.add(Choice(layer, before_backward))
        self._delete(layer, time_s)


_LOWERED_BY = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0)  # reductions of the memory, in units of the largest weight


def greedy_best(instance: Instance) -> Outcome:
    """Returns the shortest schedule over all selections; ties go to fewer choices.

    Raises `BudgetError` if none exists.
    """
    instance.check_feasible()
    largest = max(instance.weights)
    selections = dict.fromkeys(
        select(instance, instance.memory_bytes - share * largest, discount)
        for discount in (True, False)
        for share in _LOWERED_BY
    )
    outcomes = [
        Outcome.of("greedy-best", instance, choices, schedule_transfers(instance, choices)) for choices in selections
    ]
    return min(outcomes, key=lambda outcome: (outcome.duration_s, len(outcome.choices)))


def greedy(instance: Instance, discount: bool = True) -> Outcome:
    """Runs Algorithms 1 and 2: the selection, then the schedule of the transfers.

    With `discount`, a weight that is offloaded twice per cycle is sent to the host only once (section 3). Raises
    `BudgetError` if no schedule exists.
    """
    instance.check_feasible()
    choices = select(instance, instance.memory_bytes, discount)
    name = "greedy" if discount else "greedy-no-discount"
    return Outcome.of(name, instance, choices, schedule_transfers(instance, choices, discount))


def select(instance: Instance, memory_bytes: float, discount: bool = True) -> tuple[Choice, ...]:
    """Runs Algorithm 1: takes the most profitable choice until all operations fit into `memory_bytes`.

    Ties go to the largest weight, then to the last layer, then to choice (b) before (a). If `memory_bytes` is too small
    for some operation, every choice that relieves it is taken.
    """
    excess = _excess_bytes(instance, memory_bytes)
    weights = np.array(instance.weights, dtype=float)
    covers = _covered_operations(instance.num_layers)
    selected = np.zeros((instance.num_layers, 2), dtype=bool)
    selected[weights == 0] = True
    chosen: list[Choice] = []
    while True:
        benefit = np.where(covers, np.minimum(excess, weights[:, None, None]), 0.0).sum(axis=2)
        benefit[selected] = 0.0
        if not benefit.any():
            return tuple(chosen)
        layer, before_backward = _most_profitable(benefit, weights, selected, discount)
        selected[layer, before_backward] = True
        chosen.append(Choice(layer, bool(before_backward)))
        excess[covers[layer, before_backward]] -= weights[layer]
        np.maximum(excess, 0.0, out=excess)


def _excess_bytes(instance: Instance, memory_bytes: float) -> np.ndarray:
    """Returns E_o without offloading: for the forwards of layers 0 to L-1, then for their backwards in that order."""
    total = sum(instance.weights)
    layers = range(instance.num_layers)
    needs = [instance.forward_bytes(k) for k in layers] + [instance.backward_bytes(k) for k in layers]
    others = [total - instance.weights[k] for k in layers] * 2
    return np.maximum(np.array(needs, dtype=float) + np.array(others, dtype=float) - memory_bytes, 0.0)


def _covered_operations(num_layers: int) -> np.ndarray:
    """Returns which operations run while a weight is absent: shape (L, 2, 2 L); the second axis is d."""
    layers = np.arange(num_layers)
    later = layers[None, :] > layers[:, None]
    earlier = layers[None, :] < layers[:, None]
    covers: np.ndarray = np.stack([np.tile(earlier, 2), np.tile(later, 2)], axis=1)
    return covers


def _most_profitable(benefit: np.ndarray, weights: np.ndarray, selected: np.ndarray, discount: bool) -> tuple[int, int]:
    num_layers = len(weights)
    cost = np.full((num_layers, 2), 2.0)
    if discount:
        cost[selected[:, ::-1]] = 1.0
    with np.errstate(invalid="ignore", divide="ignore"):
        profit = np.where(benefit > 0, benefit / (cost * weights[:, None]), -1.0)
    # Different divisions may round equal profits differently.
    candidates = np.argwhere(profit >= profit.max() * (1 - 1e-12))
    layer, before_backward = max(candidates, key=lambda c: (weights[c[0]], c[0], -c[1]))
    return int(layer), int(before_backward)


def _bound(instance: Instance) -> Outcome:
    """See `jaxferry.weights.bounds`, whose solver is imported only here: SciPy takes long to import."""
    outcome: Outcome = importlib.import_module("jaxferry.weights.bounds").bound(instance)
    return outcome


POLICIES: Mapping[str, Callable[[Instance], Outcome]] = {
    "greedy": greedy,
    "greedy-no-discount": lambda instance: greedy(instance, discount=False),
    "greedy-best": greedy_best,
    "l2l": l2l,
    "bound": _bound,
}


def solve(instance: Instance, policy: str) -> Outcome:
    """Runs the policy of that name; raises `InputError` for another one, `BudgetError` if no schedule exists."""
    check_policy(policy)
    return POLICIES[policy](instance)


def check_policy(policy: str) -> None:
    """Raises InputError if the policy is unknown; the message lists the known ones."""
    if policy not in POLICIES:
        raise InputError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
