"""What a measured time says of a link, apart from how it is measured."""

import dataclasses
import statistics

from benchmarks.measure import interleaved


@dataclasses.dataclass(frozen=True)
class Rate:
    """How fast an operation moved bytes.

    Attributes:
      name: the operation and its sizes.
      num_bytes: bytes that crossed the link.
      seconds: the operation's time.
      plain_s: that of a plain copy of as many bytes of pinned memory, in the same direction.
      compute_s: that of what the operation computes, all operands being on the device; 0 for nothing.
    """

    name: str
    num_bytes: int
    seconds: float
    plain_s: float
    compute_s: float = 0.0

    @property
    def bytes_per_s(self):
        return self.num_bytes / self.seconds

    @property
    def share(self):
        """Of the speed that link and device allow, whichever is slower."""
        return max(self.plain_s, self.compute_s) / self.seconds

    def to_json(self):
        return dataclasses.asdict(self) | {
            "bytes_per_s": self.bytes_per_s,
            "share_of_plain_copy": self.plain_s / self.seconds,
            "share": self.share,
        }


@dataclasses.dataclass(frozen=True)
class Overlap:
    """How far a transfer hid behind a computation that was given to the device at the same time."""

    name: str
    load_s: float
    compute_s: float
    both_s: float

    @property
    def hidden(self):
        """1 where the two took no longer than the longer one, 0 where they took as long as one after the other."""
        return (self.load_s + self.compute_s - self.both_s) / min(self.load_s, self.compute_s)

    def to_json(self):
        return dataclasses.asdict(self) | {"hidden": self.hidden}


def median_seconds(functions, repetitions=5):
    """The median time of each function, called in turn; each must end when its work has."""
    return {name: statistics.median(times) for name, times in interleaved(functions, repetitions).items()}
