"""Memory use over time, for the two schedulers of weight transfers."""

import bisect

from jaxferry.weights.instance import Instance


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
        """Returns the earliest time, not before `ready_s`, from which `extra_bytes` more always fit.

        Raises:
          NoRoomError: if they do not fit after the last known change.
        """
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
