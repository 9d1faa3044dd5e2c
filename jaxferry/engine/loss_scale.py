"""The factor that keeps small gradients of 16-bit floats from vanishing.

The loss is multiplied by it before the backward, the gradients are divided by it in the update, in fp32. Too large a
factor makes gradients infinite: then the update is skipped, exactly, and the factor halved (Micikevicius et al., Mixed
Precision Training, 2018, section 3.2).
"""

from __future__ import annotations

import dataclasses

LARGEST = 2.0**24
GROWTH_STEPS = 2000
"""After so many updates in a row whose gradients were finite, the factor is doubled."""


@dataclasses.dataclass(frozen=True)
class LossScale:
    """The factor and how it has fared; powers of two, so that multiplying and dividing change no bit.

    Attributes:
      value: the factor.
      is_dynamic: whether it is adapted.
      num_finite: updates since it was last changed.
    """

    value: float = 2.0**16
    is_dynamic: bool = True
    num_finite: int = 0

    @property
    def is_least(self) -> bool:
        """Whether halving it would help no more."""
        return self.value <= 1

    def after(self, is_finite: bool) -> LossScale:
        """The factor for the next update."""
        if not self.is_dynamic:
            return self
        if not is_finite:
            return LossScale(max(self.value / 2, 1.0))
        if self.num_finite + 1 < GROWTH_STEPS:
            return dataclasses.replace(self, num_finite=self.num_finite + 1)
        return LossScale(min(self.value * 2, max(self.value, LARGEST)))


UNSCALED = LossScale(1.0, is_dynamic=False)
"""Changes nothing."""
