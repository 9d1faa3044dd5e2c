"""Modes and recomputation with which a step fits into a memory budget, by the engine's own count of bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxferry.engine.script import Peak
from jaxferry.errors import BudgetError
from jaxferry.modes import Mode
from jaxferry.partition import Partition
from jaxferry.units import format_bytes


def fit_plan(
    partition: Partition,
    modes: Sequence[Mode],
    recomputes: Sequence[bool],
    may_recompute: Sequence[int],
    budget_bytes: int | None,
    peak_of: Callable[[Sequence[Mode], Sequence[bool]], Peak],
) -> tuple[list[Mode], list[bool]]:
    """Turns as few segments as needed into RELOAD; if that does not do, as few as needed recompute besides.

    Args:
      partition: the segments.
      modes: what the plan wishes.
      recomputes: which segments recompute in any case.
      may_recompute: segments that may recompute too, the first of them first.
      budget_bytes: device memory; None for no limit.
      peak_of: the most device memory that a step needs under some modes, with some segments that recompute.

    Returns:
      The modes, and which segments recompute.

    Raises:
      BudgetError: if not even that fits; it says what would.
    """
    fitted = list(recomputes)

    def peak_of_modes(modes: Sequence[Mode]) -> Peak:
        return peak_of(modes, fitted)

    more = [number for number in may_recompute if not fitted[number]]
    fallbacks = _fallbacks(modes)
    if budget_bytes is None or not more or any(peak_of_modes(m).total <= budget_bytes for m in (modes, *fallbacks)):
        return fit_modes(partition, modes, budget_bytes, peak_of_modes), fitted
    peaks = []
    for number in more:
        fitted[number] = True
        peaks.append(_smallest(fallbacks, peak_of_modes))
        if peaks[-1].total <= budget_bytes:
            return fit_modes(partition, modes, budget_bytes, peak_of_modes), fitted
    smallest = min(peaks, key=_total)
    count = sum(recomputes) + peaks.index(smallest) + 1
    raise _too_small(partition, budget_bytes, smallest, f", with {count} segments that recompute their activations")


def fit_modes(
    partition: Partition, modes: Sequence[Mode], budget_bytes: int | None, peak_of: Callable[[Sequence[Mode]], Peak]
) -> list[Mode]:
    """Turns as few segments as needed into RELOAD, first to last, until the step fits.

    The first segments hold their parameters longest between forward and backward, so dropping those frees most. DHA
    segments hold no parameters and stay, unless it is the temporaries of their programs that do not fit.

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
    fallbacks = _fallbacks(fitted)
    fallback = next((modes for modes in fallbacks if peak_of(modes).total <= budget_bytes), None)
    if fallback is None:
        raise _too_small(partition, budget_bytes, _smallest(fallbacks, peak_of))
    for place in range(len(fitted)):
        if peak_of(fitted).total <= budget_bytes:
            break
        fitted[place] = fallback[place]
    return fitted


def _fallbacks(modes: Sequence[Mode]) -> list[list[Mode]]:
    """What is tried where the wished modes do not fit: the preferred one first."""
    reload = [mode if mode is Mode.DHA else Mode.RELOAD for mode in modes]
    return [reload, [Mode.RELOAD] * len(modes)] if Mode.DHA in reload else [reload]


def _smallest(fallbacks: Sequence[Sequence[Mode]], peak_of: Callable[[Sequence[Mode]], Peak]) -> Peak:
    return min(map(peak_of, fallbacks), key=_total)


def _total(peak: Peak) -> int:
    return peak.total


def _too_small(partition: Partition, budget_bytes: int, smallest: Peak, how: str = "") -> BudgetError:
    largest = max(partition.layers, key=lambda layer: layer.num_bytes)
    remedy = "a smaller batch" if how else "a smaller batch or remat='auto'"
    return BudgetError(
        f"memory_budget {format_bytes(budget_bytes)} ({budget_bytes} bytes) is too small: the smallest possible is "
        f"{format_bytes(smallest.total)} ({smallest.total} bytes){how}, of which parameters take "
        f"{format_bytes(smallest.parameters)} at most (layer {largest.name!r}, the largest, "
        f"{format_bytes(largest.num_bytes)}); the rest is activations, gradients and temporaries, of which {remedy} "
        "needs less",
        smallest.total,
    )
