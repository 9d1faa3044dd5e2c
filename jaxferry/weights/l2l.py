"""L2L, layer to layer: the baseline of "Weight Offloading Strategies", from Pudipeddi et al., arXiv:2002.05645.

The device holds only the running layer's weights. Each forward and each backward first waits for its weights, so a
cycle takes `sum u + 2 sum w / beta`; offloads to the host are hidden behind the loads of other layers.

Some of the 2 L waits move nothing, because the weights are already on the device: the last layer's between its forward
and its backward, the first layer's between its backward and its forward (its new weights are offloaded meanwhile), and
that of any layer whose offload has not finished when its next forward starts. The formula charges them nevertheless.
"""

import math

from jaxferry.weights.instance import Instance
from jaxferry.weights.records import Choice, Event, Outcome, Schedule
from jaxferry.weights.timeline import MemoryTimeline, NoRoomError

_NOTE = "the formula leaves too little time for the offloads of this instance: no schedule of this length is known"


def l2l(instance: Instance) -> Outcome:
    """Returns the baseline's duration by formula, and a schedule of that duration if one is found.

    Raises:
      BudgetError: if no schedule exists.
    """
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
