"""Modes that fit into a memory budget, by the engine's own count of bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxferry.engine.script import Peak
from jaxferry.errors import BudgetError
from jaxferry.modes import Mode
from jaxferry.partition import Partition
from jaxferry.units import format_bytes


def fit_modes(
    partition: Partition, modes: Sequence[Mode], budget_bytes: int | None, peak_of: Callable[[Sequence[Mode]], Peak]
) -> list[Mode]:
    """Turns as few segments as needed into RELOAD, first to last, until the step fits.

    The first segments hold their parameters longest between forward and backward, so dropping those frees most. DHA
    segments hold nothing and stay.

    Args:
      partition: the segments.
      modes: what the plan wishes.
      budget_bytes: device memory; None for no limit.
      peak_of: the most device memory that a step under some modes needs.

    Raises:
      BudgetError: if not even all RELOAD fits; it says what would.
    """
    fitted = list(modes)
    if budget_bytes is None or peak_of(fitted).total <= budget_bytes:
        return fitted
    reload = [mode if mode is Mode.DHA else Mode.RELOAD for mode in fitted]
    smallest = peak_of(reload)
    if smallest.total > budget_bytes:
        largest = max(partition.layers, key=lambda layer: layer.num_bytes)
        raise BudgetError(
            f"memory_budget {format_bytes(budget_bytes)} ({budget_bytes} bytes) is too small: the smallest possible is "
            f"{format_bytes(smallest.total)} ({smallest.total} bytes), of which parameters take "
            f"{format_bytes(smallest.parameters)} at most (layer {largest.name!r}, the largest, "
            f"{format_bytes(largest.num_bytes)}); the rest is activations, gradients and temporaries, of which a "
            "smaller batch or remat='full' needs less",
            smallest.total,
        )
    for place in range(len(fitted)):
        if peak_of(fitted).total <= budget_bytes:
            break
        fitted[place] = reload[place]
    return fitted
