"""Link rates and overlaps computed from measured times."""

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
      plain_s: time of a plain copy of the same bytes of pinned memory, in the same direction.
      compute_s: time of the operation's computation with all operands on the device; 0 for none.
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
        """The share of the possible speed, that of the slower of link and device."""
        return max(self.plain_s, self.compute_s) / self.seconds

    def to_json(self):
        return dataclasses.asdict(self) | {
            "bytes_per_s": self.bytes_per_s,
            "share_of_plain_copy": self.plain_s / self.seconds,
            "share": self.share,
        }


@dataclasses.dataclass(frozen=True)
class Overlap:
    """How far a transfer hid behind a concurrent computation."""

    name: str
    load_s: float
    compute_s: float
    both_s: float

    @property
    def hidden(self):
        """1 if both together took as long as the longer one, 0 if they took as long as one after the other."""
        return (self.load_s + self.compute_s - self.both_s) / min(self.load_s, self.compute_s)

    def to_json(self):
        return dataclasses.asdict(self) | {"hidden": self.hidden}


def median_seconds(functions, repetitions=5):
    """Returns the median time of each function, called in turn; each must return only when its work has ended."""
    return {name: statistics.median(times) for name, times in interleaved(functions, repetitions).items()}
