"""Schedules the transfers of the chosen weights: "Weight Offloading Strategies", section 5, Algorithm 2.

    B_L ... B_1 F_1 ... F_L      the GPU, one cycle
    prefetch  | prefetch         host to device, in the order of need
    offload   | offload          device to host, in the order of production

Every operation and transfer starts as soon as its data, its resource and the memory allow. The state at the start of
the cycle is unknown, so every cut through the merged sequence (offloads after the forwards, then prefetches before the
backwards) is tried: transfers before the cut have finished when B_L starts, those after it are still to do. The best
cut wins.

Not optimal: the problem is strongly NP-complete even for fixed choices (section 4).

Two departures from the printed algorithm: a waiting weight is copied to the host in any gap of the link, not only in
gaps before another offload; and a weight that the host already holds is deleted when its forward ends, without waiting
for the link, which it does not use.
"""

import bisect
import math
from collections.abc import Sequence

from jaxferry.errors import JaxFerryError
from jaxferry.weights.instance import Choice, Event, Instance, Schedule


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


def schedule_transfers(instance: Instance, choices: Sequence[Choice], discount: bool = True) -> Schedule:
    """Runs Algorithm 2: returns the shortest cycle over all cuts.

    With the weights that leave the device by `choices`, every operation must fit into the memory. With `discount`, a
    weight that leaves after both its backward and its forward is sent to the host only once.

    Raises:
      JaxFerryError: if the choices leave too little memory for some operation.
    """
    moved = [choice for choice in choices if instance.weights[choice.layer]]
    before_backward = {choice.layer for choice in moved if choice.before_backward}
    before_forward = {choice.layer for choice in moved if not choice.before_backward}
    resent = [k for k in sorted(before_backward) if not (discount and k in before_forward)]
    prefetched = sorted(before_backward, reverse=True)
    best: Schedule | None = None
    for cut in range(len(resent) + len(prefetched) + 1):
        cycle = _Cycle(
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


class _Cycle:
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
        self.instance = instance
        self.before_backward = before_backward
        self.before_forward = before_forward
        self.carried_over = carried_over
        self.fetched_ahead = fetched_ahead
        self.limit_s = limit_s
        absent = before_backward - set(carried_over) - set(fetched_ahead)
        present = sum(weight for k, weight in enumerate(instance.weights) if k not in absent)
        self.memory = MemoryTimeline(instance, present + instance.kept_activations[-1])
        self.events: list[Event] = []
        self.gpu_free_s = 0.0
        self.offload_free_s = 0.0
        self.prefetch_free_s = 0.0
        self.deleted_s: dict[int, float] = {}
        self.waiting: dict[int, float] = {}

    def run(self, resent: Sequence[int]) -> Schedule | None:
        """Returns the schedule, or None if it is not shorter than `limit_s`."""
        for layer in self.carried_over:
            self._offload_and_delete(layer, 0.0)
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
        weight = self.instance.weights[layer]
        ready_s = self.gpu_free_s
        if layer in self.before_backward and layer not in self.fetched_ahead:
            ready_s = max(ready_s, self._prefetch(layer))
        start_s = self.memory.earliest_s(ready_s, weight)
        end_s = self._compute("backward", layer, start_s, self.instance.backward_s[layer])
        self.memory.add(start_s, weight)
        self.memory.add(end_s, -weight - self.instance.activations[layer + 1])
        self._copy_waiting(end_s)
        if layer in self.before_forward:
            self._offload_and_delete(layer, end_s)
        elif layer in resent and layer not in self.carried_over:
            self.waiting[layer] = end_s

    def _forward(self, layer: int, resent: Sequence[int]) -> None:
        activation = self.instance.activations[layer + 1]
        ready_s = self.gpu_free_s
        if layer in self.before_forward:
            ready_s = max(ready_s, self._prefetch(layer))
        start_s = self.memory.earliest_s(ready_s, activation)
        end_s = self._compute("forward", layer, start_s, self.instance.forward_s[layer])
        self.memory.add(start_s, activation)
        if layer not in self.before_backward or layer in self.carried_over:
            return
        copied_s = 0.0
        if layer in self.waiting:
            copied_s = self._offload(layer, self.waiting.pop(layer))
        elif layer in self.before_forward and layer in resent:
            copied_s = self._offload(layer, end_s)
        self._delete(layer, max(end_s, copied_s))

    def _compute(self, kind: str, layer: int, start_s: float, length_s: float) -> float:
        self.gpu_free_s = start_s + length_s
        self.events.append(Event(kind, layer, start_s, self.gpu_free_s))
        return self.gpu_free_s

    def _prefetch(self, layer: int) -> float:
        weight = self.instance.weights[layer]
        ready_s = max(self.prefetch_free_s, self.deleted_s.get(layer, 0.0))
        start_s = self.memory.earliest_s(ready_s, weight)
        self.prefetch_free_s = start_s + self.instance.transfer_s(layer)
        self.memory.add(start_s, weight)
        self.events.append(Event("prefetch", layer, start_s, self.prefetch_free_s))
        return self.prefetch_free_s

    def _offload(self, layer: int, ready_s: float) -> float:
        start_s = max(ready_s, self.offload_free_s)
        self.offload_free_s = start_s + self.instance.transfer_s(layer)
        self.events.append(Event("offload", layer, start_s, self.offload_free_s))
        return self.offload_free_s

    def _offload_and_delete(self, layer: int, ready_s: float) -> None:
        self._delete(layer, self._offload(layer, ready_s))

    def _delete(self, layer: int, time_s: float) -> None:
        self.deleted_s[layer] = time_s
        self.memory.add(time_s, -self.instance.weights[layer])
        self.events.append(Event("delete", layer, time_s, time_s))

    def _copy_waiting(self, until_s: float) -> None:
        """Copies waiting weights to the host, smallest first, as long as the copies end by `until_s`."""
        while self.waiting:
            layer = min(self.waiting, key=lambda k: self.instance.weights[k])
            start_s = max(self.waiting[layer], self.offload_free_s)
            if start_s + self.instance.transfer_s(layer) > until_s:
                return
            self._offload(layer, start_s)
            del self.waiting[layer]
