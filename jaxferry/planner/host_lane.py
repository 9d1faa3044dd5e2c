"""The host lane of `planner/recurrences.py`: when it updates which group, for many plans at once."""

import heapq
from collections.abc import Sequence

import numpy as np


def update_ends(
    due: Sequence[np.ndarray], seconds: Sequence[np.ndarray], host: np.ndarray, by_need: bool
) -> list[np.ndarray]:
    """When each update ends, (plans,) each.

    Args:
      due: when each update could start, (plans,) each; the first ones are needed first, the last ones come first.
      seconds: of each update, (plans,) each; 0 with `due` -inf for no update.
      host: when the host is free, (plans,).
      by_need: whether the host picks the update that is needed first, of those that could start.
    """
    if by_need:
        return list(_by_need(np.stack(due), np.stack(seconds), host))
    ends = []
    for due_s, update_s in zip(reversed(due), reversed(seconds), strict=True):
        host = np.maximum(host, due_s) + update_s
        ends.append(host)
    return ends[::-1]


def _by_need(due: np.ndarray, seconds: np.ndarray, host: np.ndarray) -> np.ndarray:
    """The ends of the updates, (groups, plans): the lowest group of those that could start is next."""
    if len(due) > _MOST_TOGETHER or 0 < due.shape[1] <= _FEW_PLANS:
        each = zip(due.T, seconds.T, host, strict=True)
        return np.array([_by_need_of_plan(*plan) for plan in each]).T
    ends, columns = np.zeros(due.shape), np.arange(due.shape[1])
    for _ in range(len(due)):
        now = np.maximum(host, due.min(axis=0))
        chosen = (due <= now).argmax(axis=0)
        host = ends[chosen, columns] = now + seconds[chosen, columns]
        due[chosen, columns] = np.inf
    return ends


def _by_need_of_plan(due: np.ndarray, seconds: np.ndarray, host: float) -> list[float]:
    """Likewise for one plan and many groups."""
    order, ends = np.argsort(due, kind="stable").tolist(), [0.0] * len(due)
    due_s, seconds_s = due.tolist(), seconds.tolist()
    could_start: list[int] = []
    number, now = 0, float(host)
    for _ in order:
        if not could_start:
            now = max(now, due_s[order[number]])
        while number < len(order) and due_s[order[number]] <= now:
            heapq.heappush(could_start, order[number])
            number += 1
        chosen = heapq.heappop(could_start)
        ends[chosen] = now = now + seconds_s[chosen]
    return ends


_MOST_TOGETHER = 512
_FEW_PLANS = 8
