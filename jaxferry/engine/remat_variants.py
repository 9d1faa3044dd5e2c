"""A partition whose segments may recompute their forward, and the derivatives of all programs that this gives.

    remat (none, full, policy, auto) --base--> nothing recomputes but what the argument says
                                     --of(flags)--> besides, these segments do

Programs have the same numbers in all of them, so a program that is compiled for one serves the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxferry.engine.programs import derivatives_of
from jaxferry.partition import AUTO, Derivative, Partition, remat_of, with_remat


class RematVariants:
    """What can be chosen of a partition's recomputation.

    Args:
      partition: the segments, as they were made.
      remat: the checked argument of `train_step`.

    Attributes:
      base: the partition in which nothing recomputes but what the argument says.
      derivatives: by program number, of all partitions that were asked for.
      may_recompute: of each segment, whether the choice is left to the plan and frees memory. The last one's forward
        and backward are one program, between which nothing is held.
    """

    def __init__(self, partition: Partition, remat: Any) -> None:
        self._partition, self._choices = partition, remat_of(partition, remat)
        self.derivatives: dict[int, Derivative] = {}
        self.base = self.of([False] * len(self._choices))
        kept = [self.derivatives[segment.program] for segment in self.base.segments]
        frees = [bool(derivative.saved or derivative.outputs_read) for derivative in kept[:-1]] + [False]
        self.may_recompute = tuple(choice == AUTO and can for choice, can in zip(self._choices, frees, strict=True))

    @property
    def largest_first(self) -> list[int]:
        """Segments that may recompute, those that hold most between forward and backward first."""
        numbers = [number for number, may in enumerate(self.may_recompute) if may]
        held = {n: self.derivatives[self.base.segments[n].program].saved_bytes for n in numbers}
        return sorted(numbers, key=lambda number: (-held[number], number))

    def of(self, recomputes: Sequence[bool]) -> Partition:
        """The partition in which these segments recompute, beside those of which the argument says so."""
        chosen = ["full" if again else choice for again, choice in zip(recomputes, self._choices, strict=True)]
        made = with_remat(self._partition, chosen)
        self.derivatives |= derivatives_of(made, known=self.derivatives)
        return made
