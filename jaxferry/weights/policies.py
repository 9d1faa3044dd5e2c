"""The weight policies: L2L, greedy, and the best of several greedy selections.

L2L, layer to layer: the baseline of "Weight Offloading Strategies", from Pudipeddi et al., arXiv:2002.05645.

The device holds only the running layer's weights. Each forward and each backward first waits for its weights, so a
cycle takes `sum u + 2 sum w / beta`; offloads to the host are hidden behind the loads of other layers.

Some of the 2 L waits move nothing, because the weights are already on the device: the last layer's between its forward
and its backward, the first layer's between its backward and its forward (its new weights are offloaded meanwhile), and
that of any layer whose offload has not finished when its next forward starts. The formula charges them nevertheless.

`greedy` runs with several smaller memories and keeps the best schedule. The selection of Algorithm 1 makes room for
operations, not for transfers in flight. A selection for a memory that is smaller by 0 to 3 times the largest weight
leaves room for both; all schedules respect the true memory. Selections without the discount are tried too: on slow
links it can pay to spread the transfers over more layers. This is our own addition; it is never worse than `greedy`,
but not optimal.

Greedy selection of the weights to offload: "Weight Offloading Strategies", section 5, Algorithm 1.

Not optimal: the selection considers memory, not time. The printed algorithm counts an operation's own weight twice
(once in M_o, once in the sum over all weights) and so offloads more than the memory requires; here it counts once. A
negative excess counts as zero; otherwise an operation with spare room would argue against a choice.
"""

import importlib
import math
from collections.abc import Callable, Mapping

import numpy as np

from jaxferry.errors import InputError
from jaxferry.weights.instance import Choice, Event, Instance, Outcome, Schedule
from jaxferry.weights.scheduling import MemoryTimeline, NoRoomError, schedule_transfers

_NOTE = "the formula leaves too little time for the offloads of this instance: no schedule of this length is known"


def l2l(instance: Instance) -> Outcome:
    """Returns the baseline's duration by formula, and a schedule of it if found; raises `BudgetError` if none."""
    instance.check_feasible()
    transfers_s = math.fsum(map(instance.transfer_s, range(instance.num_layers)))
    duration_s = instance.compute_s + 2 * transfers_s
    for paced in (True, False):
        builder = _Builder(instance, paced)
        try:
            schedule = builder.build(duration_s)
        except NoRoomError:
            schedule = None
        if schedule is not None:
            return Outcome("l2l", duration_s, instance.compute_s, builder.choices(), schedule)
    return Outcome("l2l", duration_s, instance.compute_s, builder.choices(), None, _NOTE)


class _Builder:
    """Builds the schedule; if `paced`, no operation starts earlier than in the formula.

    If offloads fall behind, the waits that the formula charges for nothing can absorb them; `paced` must then be False.
    """

    def __init__(self, instance: Instance, paced: bool):
        self.instance = instance
        self.paced = paced
        self.memory = MemoryTimeline(instance, instance.weights[-1] + instance.kept_activations[-1])
        self.operations: list[Event] = []
        self.prefetches: list[Event] = []
        self.offloads: dict[int, Event] = {}
        self.deleted_after_backward_s: dict[int, float] = {}
        self.deleted_after_forward_s: dict[int, float] = {}
        self.charged_s = 0.0

    def build(self, duration_s: float) -> Schedule | None:
        layers = range(self.instance.num_layers)
        for layer in reversed(layers):
            self._backward(layer)
        for layer in layers:
            self._forward(layer)
        deletes = [
            Event("delete", layer, time_s, time_s)
            for deleted_s in (self.deleted_after_backward_s, self.deleted_after_forward_s)
            for layer, time_s in deleted_s.items()
        ]
        schedule = Schedule.from_events([*self.operations, *self.prefetches, *self.offloads.values(), *deletes])
        if schedule.duration_s > duration_s * (1 + 1e-12):
            return None
        return Schedule(max(duration_s, schedule.duration_s), schedule.events)

    def choices(self) -> tuple[Choice, ...]:
        after_forward = [Choice(layer, True) for layer in self.deleted_after_forward_s]
        return tuple(sorted(after_forward + [Choice(layer, False) for layer in self.deleted_after_backward_s]))

    @property
    def _gpu_free_s(self) -> float:
        return self.operations[-1].end_s if self.operations else 0.0

    def _backward(self, layer: int) -> None:
        weight = self.instance.weights[layer]
        ready_s = self._gpu_free_s if layer == self.instance.num_layers - 1 else self._prefetch(layer)
        start_s, end_s = self._compute("backward", layer, ready_s, weight, self.instance.backward_s[layer])
        self.memory.add(start_s, weight)
        self.memory.add(end_s, -weight - self.instance.activations[layer + 1])
        if weight:
            link_free_s = max((event.end_s for event in self.offloads.values()), default=0.0)
            start_s = max(end_s, link_free_s)
            self.offloads[layer] = Event("offload", layer, start_s, start_s + self.instance.transfer_s(layer))
            self._delete(self.deleted_after_backward_s, layer, self.offloads[layer].end_s)

    def _forward(self, layer: int) -> None:
        activation = self.instance.activations[layer + 1]
        copied_s = self.offloads[layer].end_s if layer in self.offloads else 0.0
        if copied_s > self._gpu_free_s:
            del self.deleted_after_backward_s[layer]
            self.memory.add(copied_s, self.instance.weights[layer])
            ready_s = self._gpu_free_s
        else:
            ready_s = self._prefetch(layer)
        start_s, end_s = self._compute("forward", layer, ready_s, activation, self.instance.forward_s[layer])
        self.memory.add(start_s, activation)
        if layer != self.instance.num_layers - 1 and layer in self.offloads:
            self._delete(self.deleted_after_forward_s, layer, max(end_s, copied_s))

    def _compute(
        self, kind: str, layer: int, ready_s: float, extra_bytes: float, length_s: float
    ) -> tuple[float, float]:
        self.charged_s += self.instance.transfer_s(layer)
        if self.paced:
            ready_s = max(ready_s, self.charged_s)
        start_s = self.memory.earliest_s(ready_s, extra_bytes)
        self.charged_s += length_s
        self.operations.append(Event(kind, layer, start_s, start_s + length_s))
        return start_s, start_s + length_s

    def _prefetch(self, layer: int) -> float:
        weight = self.instance.weights[layer]
        if not weight:
            return self._gpu_free_s
        start_s = self.memory.earliest_s(self._gpu_free_s, weight)
        end_s = start_s + self.instance.transfer_s(layer)
        self.memory.add(start_s, weight)
        self.prefetches.append(Event("prefetch", layer, start_s, end_s))
        return end_s

    def _delete(self, deleted_s: dict[int, float], layer: int, time_s: float) -> None:
        deleted_s[layer] = time_s
        self.memory.add(time_s, -self.instance.weights[layer])


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

    With `discount`, a weight that is offloaded twice per cycle is sent to the host only once (section 3).

    Raises:
      BudgetError: if no schedule exists.
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
