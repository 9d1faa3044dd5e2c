"""Plans that a search starts from: the linear programme's solution in whole layers, and plans of two columns."""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from jaxferry.modes import ActivationPlace, GradientPlace, Mode, Remat, UpdatePlace
from jaxferry.planner.columns import Column, Columns
from jaxferry.planner.moves import Estimates
from jaxferry.planner.place_bound import Solution
from jaxferry.step import save_seconds_a_byte

_LEAST_SHARE = 1e-6
_POINTS = 24
_REMATS = list(Remat)[::-1]
_PLACES = list(UpdatePlace)[::-1]
"""Places of updates: forwards come first, so first the groups that no update on the host holds up."""


def _resident_first(column: Column) -> tuple[int, ...]:
    place, remat = _PLACES.index(column.update), _REMATS.index(column.remat)
    leaves = column.activations is not ActivationPlace.HOST, column.gradient is GradientPlace.HOST
    return place, column.mode is not Mode.RESIDENT, remat, *leaves


def _recomputing_first(column: Column) -> tuple[int, ...]:
    return _REMATS.index(column.remat), *_resident_first(column)


_ORDERS: tuple[Callable[[Column], tuple[int, ...]] | None, ...] = (
    _resident_first,
    _recomputing_first,
    lambda column: tuple(-each for each in _resident_first(column)),
    lambda column: tuple(-each for each in _recomputing_first(column)),
    None,
)
"""Orders of runs; None deals the choices evenly."""


def rounded(columns: Columns, solution: Solution) -> Iterator[np.ndarray]:
    """Plans with as many groups of each choice as the programme has, in runs of several orders, or evenly dealt."""
    counts: dict[tuple[tuple[Column, ...], ...], tuple[list[tuple[int, ...]], np.ndarray]] = {}
    for groups, chosen, shares in solution.shares:
        known, total = counts.get(chosen, ([], np.zeros(len(chosen))))
        counts[chosen] = [*known, *groups], total + shares
    for order in _ORDERS:
        codes = columns.uniform(Column(Mode.GFGB))
        for chosen, (equal, shares) in counts.items():
            used = [int(choice) for choice in np.flatnonzero(shares > _LEAST_SHARE)]
            if order is not None:
                used.sort(key=lambda choice: [order(column) for column in chosen[choice]])
            numbers = np.diff(np.round(np.cumsum([0.0, *shares[used]])).astype(int))
            dealt = np.repeat(used, numbers)
            if order is None:
                places = [(index + 0.5) / number for number in numbers for index in range(number)]
                dealt = dealt[np.argsort(places, kind="stable")]
            for choice, members in zip(dealt.tolist(), sorted(equal), strict=False):
                for member, column in zip(members, chosen[choice], strict=True):
                    number = columns.nearest(member, column)
                    codes[member] = codes[member] if number is None else number
        yield columns.agreed(codes)


def alternating(columns: Columns, solution: Solution, fits: Callable[[np.ndarray], bool]) -> Iterator[np.ndarray]:
    """Plans in which the activations of evenly spread layers leave, as many as the link has time for during forwards.

    Those that leave do so as in the programme. Of the others, the first or the last ones compute more again, as few as
    make the plan fit.
    """
    used = (zip(chosen, shares, strict=True) for _, chosen, shares in solution.shares)
    found = {column for pairs in used for each, share in pairs if share > _LEAST_SHARE for column in each}
    profile, layers = columns.profile, np.arange(len(columns.profile.layers))
    for column in sorted(each for each in found if each.activations is ActivationPlace.HOST):
        num_bytes = sum(layer.leaving_bytes(column.remat, column.activations) for layer in profile.layers)
        saving_s, forward_s = num_bytes * profile.once(save_seconds_a_byte), sum(x.forward_s for x in profile.layers)
        period = math.ceil(np.clip(saving_s / (forward_s or saving_s or 1.0), 1, len(layers)))
        stays = dataclasses.replace(column, activations=ActivationPlace.DEVICE)
        leaves = (layers + 1) % period == 0
        plain = np.where(leaves, columns.uniform(column), columns.uniform(stays))
        for remat, order in itertools.product(Remat, (layers[~leaves], layers[~leaves][::-1])):
            again = columns.uniform(dataclasses.replace(stays, remat=remat))
            yield _with_fewest(columns, plain, again, order, fits)


def _with_fewest(
    columns: Columns, codes: np.ndarray, others: np.ndarray, order: np.ndarray, fits: Callable[[np.ndarray], bool]
) -> np.ndarray:
    """The plan with the columns of another one for as few layers, the first ones in some order, as make it fit."""

    def made(number: int) -> np.ndarray:
        return columns.agreed(np.where(np.isin(np.arange(len(codes)), order[:number]), others, codes))

    return made(bisect.bisect_left(range(len(order)), True, key=lambda number: fits(made(number))))


def of_two_columns(
    columns: Columns, estimates: Estimates, most_bytes: float | None
) -> Iterator[tuple[np.ndarray, float]]:
    """Plans with one column for the first layers and another one for the rest, with the seconds that the rows say.

    Always the one that is the fastest by all rows so far: rows may be added meanwhile.
    """
    tried = [column for column, may in zip(columns.all, np.any(columns.movable, axis=0), strict=True) if may]
    uniform = np.unique(np.array([columns.uniform(column) for column in tried]), axis=0)
    size = uniform.shape[1]
    cuts = np.unique(np.linspace(0, size, _POINTS + 1).astype(int))[1:]

    def largest(table: np.ndarray) -> np.ndarray:
        """The largest sum over rows of a (rows, layers, columns) table: (first, second, cuts)."""
        both = table[:, np.arange(size), uniform]
        sums = np.concatenate([np.zeros((*both.shape[:2], 1)), np.cumsum(both, axis=2)], axis=2)
        head, rest = sums[:, :, cuts], (sums[:, :, -1:] - sums)[:, :, cuts]
        found: np.ndarray = (head[:, :, None] + rest[:, None]).max(axis=0)
        return found

    seconds, seen = largest(estimates.rows), len(estimates.rows)
    if most_bytes is not None:
        seconds[largest(estimates.bytes) > most_bytes] = np.inf
    while True:
        index = int(np.argmin(seconds))
        least_s = float(seconds.flat[index])
        if not np.isfinite(least_s):
            return
        seconds.flat[index] = np.inf
        first, second, cut = np.unravel_index(index, seconds.shape)
        yield columns.agreed(np.where(np.arange(size) < cuts[cut], uniform[first], uniform[second])), least_s
        if len(estimates.rows) > seen:
            seconds = np.maximum(seconds, largest(estimates.rows[seen:]))
        seen = len(estimates.rows)
