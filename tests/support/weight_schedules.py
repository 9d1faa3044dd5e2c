"""Checks schedules independently against the model of "Weight Offloading Strategies", section 3.

The check shares no code with the schedulers and derives the location of every weight from the events alone. Times that
differ by less than 1e-9 of the period count as equal, so a transfer may start at the instant when another ends.
"""

import bisect
import itertools

from jaxferry.errors import JaxFerryError
from jaxferry.weights import Event, Instance, Schedule


class ScheduleError(JaxFerryError):
    """A schedule breaks a rule of the model."""


def validate(instance: Instance, schedule: Schedule) -> None:
    """Checks that the cycle can repeat forever.

    Every layer runs forward and backward once, in order, for its time, with its weights on the device. Each direction
    of the link carries one transfer at a time, at full bandwidth. A weight is deleted only if the host has its value
    since the last backward. At every instant, weights, kept activations and the gradient fit into memory.

    Raises:
      ScheduleError: naming the layer and the time.
    """
    _Validator(instance, schedule).check()


class _Validator:
    def __init__(self, instance: Instance, schedule: Schedule):
        self.instance = instance
        self.period_s = schedule.duration_s
        self.events = schedule.events
        self.slack_s = 1e-9 * self.period_s
        self.of_kind = {
            kind: sorted((e for e in self.events if e.kind == kind), key=lambda e: (e.start_s, e.end_s))
            for kind in ("forward", "backward", "prefetch", "offload", "delete")
        }
        if sum(map(len, self.of_kind.values())) != len(self.events):
            raise ScheduleError(f"unknown kind among {sorted({event.kind for event in self.events})}")

    def check(self) -> None:
        for event in self.events:
            if not -self.slack_s <= event.start_s <= event.end_s <= self.period_s + self.slack_s:
                raise ScheduleError(f"{event} does not lie inside the period of {self.period_s} s")
        self._check_operations()
        for kind in ("prefetch", "offload"):
            self._check_link(kind)
        stays = [self._stays(layer) for layer in range(self.instance.num_layers)]
        for layer, intervals in enumerate(stays):
            self._check_uses(layer, intervals)
            self._check_host_copies(layer)
        self._check_memory(stays)

    def _check_operations(self) -> None:
        layers = list(range(self.instance.num_layers))
        order = [("backward", k) for k in reversed(layers)] + [("forward", k) for k in layers]
        by_name = {(e.kind, e.layer): e for kind in ("forward", "backward") for e in self.of_kind[kind]}
        num_operations = len(self.of_kind["forward"]) + len(self.of_kind["backward"])
        if sorted(by_name) != sorted(order) or num_operations != len(order):
            raise ScheduleError("a cycle must run every layer forward and backward once")
        free_s = 0.0
        for kind, layer in order:
            event = by_name[kind, layer]
            length_s = (self.instance.forward_s if kind == "forward" else self.instance.backward_s)[layer]
            if event.start_s < free_s - self.slack_s:
                raise ScheduleError(f"{event} starts before the previous operation ends at {free_s} s")
            self._check_length(event, length_s)
            free_s = event.end_s

    def _check_link(self, kind: str) -> None:
        free_s = 0.0
        for event in self.of_kind[kind]:
            if event.start_s < free_s - self.slack_s:
                raise ScheduleError(f"{event} starts while the link is busy until {free_s} s")
            self._check_length(event, self.instance.weights[event.layer] / self.instance.bandwidth_bytes_per_s)
            free_s = event.end_s

    def _check_length(self, event: Event, length_s: float) -> None:
        if abs(event.end_s - event.start_s - length_s) > self.slack_s:
            raise ScheduleError(f"{event} should take {length_s} s")

    def _layer(self, kind: str, layer: int) -> list[Event]:
        return [event for event in self.of_kind[kind] if event.layer == layer]

    def _stays(self, layer: int) -> list[tuple[float, float, float]]:
        """Returns when the weight is on the device: (reserved, loaded, deleted); deletion may fall after the period."""
        loads, deletes = self._layer("prefetch", layer), self._layer("delete", layer)
        if len(loads) != len(deletes):
            raise ScheduleError(f"layer {layer}: {len(loads)} prefetches and {len(deletes)} deletions do not repeat")
        if not loads:
            return [(-self.period_s, -self.period_s, 2 * self.period_s)]
        # The weight is absent from each deletion to the next prefetch, cyclically.
        carried = deletes[0].start_s < loads[0].end_s - self.slack_s
        ends = [event.start_s for event in deletes]
        if carried:
            ends = [*ends[1:], ends[0] + self.period_s]
        stays = [(load.start_s, load.end_s, end) for load, end in zip(loads, ends, strict=True)]
        for index, (_, loaded_s, end_s) in enumerate(stays):
            next_s = stays[index + 1][0] if index + 1 < len(stays) else stays[0][0] + self.period_s
            if not loaded_s - self.slack_s <= end_s <= next_s + self.slack_s:
                raise ScheduleError(f"layer {layer}: prefetch and deletion do not alternate around {end_s} s")
        return stays

    def _check_uses(self, layer: int, stays: list[tuple[float, float, float]]) -> None:
        uses = [event for kind in ("forward", "backward", "offload") for event in self._layer(kind, layer)]
        for event in uses:
            # An event of this cycle may fall into a stay that began in the previous cycle.
            shifted = ((event.start_s + shift, event.end_s + shift) for shift in (0.0, self.period_s))
            inside = (
                loaded - self.slack_s <= start and end <= deleted + self.slack_s
                for start, end in shifted
                for _, loaded, deleted in stays
            )
            if not any(inside):
                raise ScheduleError(f"{event}: the weight is not on the device")

    def _check_host_copies(self, layer: int) -> None:
        """Checks that at each deletion the host holds the weight as of the last backward."""
        (backward,) = self._layer("backward", layer)
        for delete in self._layer("delete", layer):
            updated_s = backward.end_s
            if backward.start_s >= delete.start_s - self.slack_s:
                updated_s -= self.period_s
            elif updated_s > delete.start_s + self.slack_s:
                raise ScheduleError(f"layer {layer}: deleted during its backward, at {delete.start_s} s")
            copies = [
                event
                for event in self._layer("offload", layer)
                for shift in (0.0, self.period_s)
                if event.start_s - shift >= updated_s - self.slack_s
                and event.end_s - shift <= delete.start_s + self.slack_s
            ]
            if not copies:
                raise ScheduleError(f"layer {layer}: deleted at {delete.start_s} s without a copy on the host")
        for offload in self._layer("offload", layer):
            if offload.start_s < backward.end_s - self.slack_s and offload.end_s > backward.start_s + self.slack_s:
                raise ScheduleError(f"{offload} overlaps the backward that changes the weight")

    def _check_memory(self, stays: list[list[tuple[float, float, float]]]) -> None:
        backwards = sorted(self.of_kind["backward"], key=lambda event: -event.layer)
        operations = backwards + sorted(self.of_kind["forward"], key=lambda event: event.layer)
        instants = {event.start_s for event in self.events} | {event.end_s for event in self.events}
        times = sorted(instants | {0.0, self.period_s})
        probes = [(a + b) / 2 for a, b in itertools.pairwise(times) if b - a > 2 * self.slack_s]
        starts = [event.start_s for event in operations]
        for time_s in probes:
            index = bisect.bisect_right(starts, time_s) - 1
            event = operations[index] if index >= 0 else None
            self._check_instant(time_s, self._other_bytes(event, time_s), stays)
        for event in operations:
            if event.end_s - event.start_s <= 2 * self.slack_s:
                # An operation without duration: weights that arrive or leave at the same instant do not count.
                used = self._other_bytes(event, event.end_s)
                self._check_instant(event.start_s, used, stays, edge_s=2 * self.slack_s, always=event.layer)

    def _other_bytes(self, event: Event | None, time_s: float) -> float:
        """Returns the bytes of activations and gradient at `time_s`; `event` is the operation that started last."""
        kept = self.instance.kept_activations
        if event is None:
            return kept[-1]
        if event.kind == "forward":
            return kept[event.layer + 1]
        if time_s <= event.end_s:
            return kept[event.layer + 1] + self.instance.weights[event.layer]
        return kept[event.layer]

    def _check_instant(
        self,
        time_s: float,
        used: float,
        stays: list[list[tuple[float, float, float]]],
        edge_s: float = 0.0,
        always: int | None = None,
    ) -> None:
        for layer, intervals in enumerate(stays):
            present = layer == always or any(
                reserved + edge_s < time_s + shift < deleted - edge_s
                for reserved, _, deleted in intervals
                for shift in (0.0, self.period_s)
            )
            used += self.instance.weights[layer] * present
        if used > self.instance.memory_bytes * (1 + 1e-9):
            raise ScheduleError(f"{used} bytes in use at {time_s} s, of {self.instance.memory_bytes}")
