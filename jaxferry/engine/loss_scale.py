"""Loss scaling: a factor that prevents underflow of small 16-bit gradients.

The factor multiplies the loss before the backward and divides the gradients in the update, in fp32. If it is too large,
gradients become infinite: the update is then skipped, exactly, and the factor halved (Micikevicius et al., Mixed
Precision Training, 2018, section 3.2).
"""

from __future__ import annotations

import dataclasses

LARGEST = 2.0**24
GROWTH_STEPS = 2000
"""The number of consecutive updates with finite gradients after which the factor is doubled."""


@dataclasses.dataclass(frozen=True)
class LossScale:
    """The factor and its history. Dynamic factors are powers of two, so scaling is exact.

    Attributes:
      value: the factor.
      is_dynamic: whether it adapts.
      num_finite: updates since its last change.
    """

    value: float = 2.0**16
    is_dynamic: bool = True
    num_finite: int = 0

    @property
    def is_least(self) -> bool:
        """Whether the factor is at its minimum."""
        return self.value <= 1

    def after(self, is_finite: bool) -> LossScale:
        """Returns the factor for the next update."""
        if not self.is_dynamic:
            return self
        if not is_finite:
            return LossScale(max(self.value / 2, 1.0))
        if self.num_finite + 1 < GROWTH_STEPS:
            return dataclasses.replace(self, num_finite=self.num_finite + 1)
        return LossScale(min(self.value * 2, max(self.value, LARGEST)))


UNSCALED = LossScale(1.0, is_dynamic=False)
"""The identity: no scaling."""
