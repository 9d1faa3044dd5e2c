"""Modes that fit into a memory budget, by the engine's own count of bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxferry.engine.script import Peak, make_script, peak_bytes
from jaxferry.errors import BudgetError
from jaxferry.modes import Mode
from jaxferry.partition import Derivative, Partition
from jaxferry.units import format_bytes


def peak_of(
    partition: Partition,
    derivatives: Mapping[int, Derivative],
    modes: Sequence[Mode],
    temporary_bytes: int,
    loads_first: bool = False,
) -> Peak:
    """The most device memory that a step under these modes needs."""
    script = make_script(partition, derivatives, modes, loads_first)
    return peak_bytes(partition, derivatives, modes, script, temporary_bytes)


def fit_modes(
    partition: Partition,
    derivatives: Mapping[int, Derivative],
    modes: Sequence[Mode],
    budget_bytes: int | None,
    temporary_bytes: int,
    loads_first: bool = False,
) -> list[Mode]:
    """Turns as few segments as needed into RELOAD, first to last, until the step fits.

    The first segments hold their parameters longest between forward and backward, so dropping those frees most.

    Raises:
      BudgetError: if not even all RELOAD fits; it says what would.
    """
    fitted = list(modes)
    if budget_bytes is None:
        return fitted
    reload = [Mode.RELOAD] * len(fitted)
    smallest = peak_of(partition, derivatives, reload, temporary_bytes, loads_first).total
    if smallest > budget_bytes:
        largest = max(partition.layers, key=lambda layer: layer.num_bytes)
        raise BudgetError(
            f"memory_budget {format_bytes(budget_bytes)} ({budget_bytes} bytes) is too small: the smallest possible is "
            f"{format_bytes(smallest)} ({smallest} bytes), of which layer {largest.name!r}, the largest, takes "
            f"{format_bytes(largest.num_bytes)}",
            smallest,
        )
    for place in range(len(fitted)):
        if peak_of(partition, derivatives, fitted, temporary_bytes, loads_first).total <= budget_bytes:
            break
        fitted[place] = Mode.RELOAD
    return fitted
