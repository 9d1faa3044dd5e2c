"""Modes that fit into a memory budget, by the engine's own count of bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxferry.engine.script import Peak, make_script, peak_bytes
from jaxferry.engine.shadow import Use
from jaxferry.errors import BudgetError
from jaxferry.modes import GradientPlace, Mode
from jaxferry.partition import Derivative, Partition
from jaxferry.units import format_bytes


def peak_of(
    partition: Partition,
    derivatives: Mapping[int, Derivative],
    modes: Sequence[Mode],
    gradients: Sequence[GradientPlace],
    temporary_bytes: Mapping[Use, int],
    loads_first: bool = False,
    lag: int = 0,
) -> Peak:
    """The most device memory that a step under these modes needs."""
    script = make_script(partition, derivatives, modes, gradients, loads_first)
    return peak_bytes(partition, derivatives, modes, script, temporary_bytes, lag)


def fit_modes(
    partition: Partition,
    derivatives: Mapping[int, Derivative],
    modes: Sequence[Mode],
    gradients: Sequence[GradientPlace],
    budget_bytes: int | None,
    temporary_bytes: Mapping[Use, int],
    loads_first: bool = False,
    lag: int = 0,
) -> list[Mode]:
    """Turns as few segments as needed into RELOAD, first to last, until the step fits.

    The first segments hold their parameters longest between forward and backward, so dropping those frees most. DHA
    segments hold nothing and stay.

    Raises:
      BudgetError: if not even all RELOAD fits; it says what would.
    """
    fitted = list(modes)
    if budget_bytes is None:
        return fitted

    def peak(candidate: Sequence[Mode]) -> int:
        return peak_of(partition, derivatives, candidate, gradients, temporary_bytes, loads_first, lag).total

    if peak(fitted) <= budget_bytes:
        return fitted
    reload = [mode if mode is Mode.DHA else Mode.RELOAD for mode in fitted]
    smallest = peak(reload)
    if smallest > budget_bytes:
        largest = max(partition.layers, key=lambda layer: layer.num_bytes)
        raise BudgetError(
            f"memory_budget {format_bytes(budget_bytes)} ({budget_bytes} bytes) is too small: the smallest possible is "
            f"{format_bytes(smallest)} ({smallest} bytes), of which layer {largest.name!r}, the largest, takes "
            f"{format_bytes(largest.num_bytes)}",
            smallest,
        )
    for place in range(len(fitted)):
        if peak(fitted) <= budget_bytes:
            break
        fitted[place] = reload[place]
    return fitted
