"""Variants of a partition whose segments may recompute their forward, and the derivatives of all their programs.

    remat (none, full, policy, auto) --base--> only segments that the argument names recompute
                                     --of(flags)--> these segments recompute as well

Programs have the same numbers in all variants, so a program that is compiled for one serves the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxferry.engine.programs import derivatives_of
from jaxferry.partition import AUTO, Derivative, Partition, remat_of, with_remat


class RematVariants:
    """The variants of a partition that differ in recomputation.

    Args:
      partition: the segments without recomputation.
      remat: the checked argument of `train_step`.

    Attributes:
      base: the variant in which only segments that the argument names recompute.
      derivatives: by program number, for all variants made so far.
      may_recompute: for each use, whether the plan may choose recomputation of its segment there, which is at the
        segment's first use, and this frees memory. The last segment's forward and backward are one program, which holds
        nothing in between.
    """

    def __init__(self, partition: Partition, remat: Any) -> None:
        self._partition, self._choices = partition, remat_of(partition, remat)
        self.derivatives: dict[int, Derivative] = {}
        self.base = self.of([False] * len(partition.uses))
        kept = [self.derivatives[segment.program] for segment in self.base.segments]
        frees = [bool(derivative.saved or derivative.outputs_read) for derivative in kept[:-1]] + [False]
        can_recompute = [choice == AUTO and can for choice, can in zip(self._choices, frees, strict=True)]
        self.may_recompute = tuple(use.place == 0 and can_recompute[use.segment] for use in partition.uses)

    @property
    def largest_first(self) -> list[int]:
        """The uses at which segments may recompute, largest residuals first."""
        numbers = [number for number, may in enumerate(self.may_recompute) if may]
        segments = {n: self.base.segments[self.base.uses[n].segment] for n in numbers}
        saved = {n: self.derivatives[segment.program].saved for n, segment in segments.items()}
        held = {n: self.base.graph.device_bytes(*avals) for n, avals in saved.items()}
        return sorted(numbers, key=lambda number: (-held[number], number))

    def of(self, recomputes: Sequence[bool]) -> Partition:
        """Returns the variant in which some segments recompute, besides those that the argument names.

        Args:
          recomputes: for each use, whether its segment does; the first use of each segment counts.
        """
        firsts = [recomputes[uses[0]] for uses in self._partition.uses_of]
        chosen = ["full" if again else choice for again, choice in zip(firsts, self._choices, strict=True)]
        made = with_remat(self._partition, chosen)
        self.derivatives |= derivatives_of(made, known=self.derivatives)
        return made
