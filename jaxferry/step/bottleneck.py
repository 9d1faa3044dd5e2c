"""What limits the speed of training, in a word and in a sentence: for predicted and for recorded steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxferry.step.tasks import Lane
from jaxferry.units import format_bytes, format_seconds

_LIMITS = {
    Lane.GPU: ("GPU", "the GPU computes"),
    Lane.H2D: ("link", "the link to the device is busy"),
    Lane.D2H: ("link", "the link from the device is busy"),
    Lane.HOST: ("host", "the host updates parameters"),
}
_LEAST_GAIN = 0.05


@dataclasses.dataclass(frozen=True)
class Bottleneck:
    """What limits the speed.

    Attributes:
      limit: `GPU`, `link`, `host` or `device memory`.
      reason: the same in a clause, with figures.
    """

    limit: str
    reason: str

    @property
    def noun(self) -> str:
        """The limit in a sentence, after "the"."""
        return self.limit if self.limit != "host" else "host's updates"


def find_bottleneck(busy_share: Mapping[Lane, float], details: Mapping[str, Any], step_s: float) -> Bottleneck:
    """Names the lane that works for the largest share of a step, or device memory if that makes the plan slower.

    Args:
      busy_share: the share of a step in which each lane works.
      details: the plan's `details`; `binding` says whether a budget binds it.
      step_s: the plan's predicted seconds a step.
    """
    lane = max(busy_share, key=lambda each: busy_share[each])
    name, does = _LIMITS[lane]
    most = f"{does} {min(busy_share[lane], 1.0):.0%} of the time"
    if details.get("binding") != "memory":
        return Bottleneck(name, most)
    free_s, free = details["unlimited_steady_step_s"], format_bytes(details["unlimited_needed_bytes"])
    faster = f"with {free} of device memory a step would take {format_seconds(free_s)}, not {format_seconds(step_s)}"
    is_slower = free_s < (1 - _LEAST_GAIN) * step_s
    return Bottleneck("device memory" if is_slower else name, f"{most}; {faster}")
