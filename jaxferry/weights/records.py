"""The results of a weight policy: the choices, the schedule of one training cycle, and its duration."""

import dataclasses
from collections.abc import Sequence

from jaxferry.weights.instance import Instance


@dataclasses.dataclass(frozen=True, order=True)
class Choice:
    """An offloading choice (k, d) of "Weight Offloading Strategies", section 5.

    Attributes:
      layer: k, counted from 0.
      before_backward: True is the paper's d = 1, choice (a): absent between its forward and its backward;
        False is d = 0, choice (b): absent between its backward and the next forward.
    """

    layer: int
    before_backward: bool

    def to_json(self) -> dict[str, object]:
        """Returns the choice as a JSON object."""
        return {"layer": self.layer, "absent": "forward-to-backward" if self.before_backward else "backward-to-forward"}


@dataclasses.dataclass(frozen=True)
class Event:
    """One interval or instant of a cycle.

    Attributes:
      kind: "forward" or "backward" (the GPU), "prefetch" (host to device), "offload" (device to host; the device copy
        stays until it is deleted), or "delete" (an instant).
      layer: counted from 0.
      start_s, end_s: seconds from the start of the cycle: the start of the last layer's backward, or of the event that
        it waits for.
    """

    kind: str
    layer: int
    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One training cycle, repeated forever: backward from the last to the first layer, then forward.

    Attributes:
      duration_s: the period; all operations and transfers of the cycle end within it.
      events: the events, ordered by start.
    """

    duration_s: float
    events: tuple[Event, ...]

    @classmethod
    def from_events(cls, events: Sequence[Event], duration_s: float | None = None) -> "Schedule":
        """Sorts the events; the duration defaults to the last event's end."""
        last = max((event.end_s for event in events), default=0.0)
        ordered = sorted(events, key=lambda event: (event.start_s, event.end_s))
        return cls(last if duration_s is None else duration_s, tuple(ordered))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a policy.

    Attributes:
      policy: its name.
      duration_s: the period of the schedule; for `bound`, a lower bound on any period.
      compute_s: the sum of all operations' times.
      choices: the weights that leave the device, and when.
      schedule: None for `bound`, and for `l2l` if its formula leaves too little time for the offloads.
      note: a remark for the reader, or "".
    """

    policy: str
    duration_s: float
    compute_s: float
    choices: tuple[Choice, ...]
    schedule: Schedule | None
    note: str = ""

    @classmethod
    def of(cls, policy: str, instance: Instance, choices: Sequence[Choice], schedule: Schedule) -> "Outcome":
        """Returns the outcome of a schedule, with its duration."""
        return cls(policy, schedule.duration_s, instance.compute_s, tuple(sorted(choices)), schedule)

    @property
    def overhead(self) -> float | None:
        """The time beyond the computation as a share of it: 0.02 is 2 %; None without computation."""
        return self.duration_s / self.compute_s - 1 if self.compute_s else None

    def to_json(self) -> dict[str, object]:
        """Returns the document that `jaxferry weights --json` prints."""
        events = () if self.schedule is None else self.schedule.events
        return {
            "policy": self.policy,
            "duration_s": self.duration_s,
            "compute_s": self.compute_s,
            "overhead": self.overhead,
            "choices": [choice.to_json() for choice in self.choices],
            "schedule": [dataclasses.asdict(event) for event in events],
            "note": self.note,
        }
