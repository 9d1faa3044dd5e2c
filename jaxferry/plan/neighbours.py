"""Local search over a whole pool: neighbours of the best plans for their memory.

A neighbour changes the mode, gradient or recomputation of one layer, or where one group is updated. Plans spread over
the frontier of time and memory are expanded, independently of any budget, within a limit on work.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxferry.holdings import DFGB, DHA, GFGB, RELOAD, RESIDENT
from jaxferry.plan.search import Best

ALL_MODES = (GFGB, DHA, DFGB, RELOAD, RESIDENT)
MOST_WORK = 420_000
"""The most layers of neighbours that a search tries."""

_EXPANDED_AT_ONCE = 6
_MODE, _GRAD_ON_HOST, _RECOMPUTES, _ON_DEVICE = range(4)
_Change = tuple[list[int], dict[int, int]]


@dataclasses.dataclass(frozen=True)
class Neighbours:
    """What may change in one plan.

    Attributes:
      can_recompute: the layers whose recomputation may change, (layers,) flags.
      groups: the layers of each group that may be updated on the device.
    """

    can_recompute: np.ndarray
    groups: Sequence[tuple[int, ...]] = ()

    @property
    def work(self) -> int:
        """About how many layers all neighbours of one plan have."""
        size = len(self.can_recompute)
        return size * (len(ALL_MODES) * size + int(self.can_recompute.sum()) + len(self.groups))

    def of(self, best: Best) -> list[np.ndarray]:
        """Modes and flags of gradients, recomputation and updates of all neighbours, (plans, layers) each."""
        own = np.stack(_columns(best))
        changes = [*self._of_layers(own), *self._of_groups(own)]
        found = np.repeat(own[None], len(changes), axis=0)
        for plan, (layers, values) in zip(found, changes, strict=True):
            plan[np.ix_(list(values), layers)] = np.array(list(values.values()))[:, None]
        return [found[:, _MODE], *(found[:, column].astype(bool) for column in range(1, len(own)))]

    def _of_layers(self, own: np.ndarray) -> Iterator[_Change]:
        for layer, (mode, grad_on_host, recomputes, there) in enumerate(own.T.tolist()):
            if self.can_recompute[layer]:
                yield [layer], {_RECOMPUTES: not recomputes}
            if not there:
                yield [layer], {_GRAD_ON_HOST: not grad_on_host}
                yield from (([layer], {_MODE: other}) for other in ALL_MODES if other != mode)

    def _of_groups(self, own: np.ndarray) -> Iterator[_Change]:
        for members in map(list, self.groups):
            if own[_ON_DEVICE, members[0]]:
                yield from ((members, {_MODE: mode, _ON_DEVICE: 0}) for mode in (GFGB, DHA, RELOAD, RESIDENT))
            else:
                yield members, {_MODE: RESIDENT, _GRAD_ON_HOST: 0, _ON_DEVICE: 1}


def refine(
    frontier: Callable[[], Sequence[Best]],
    neighbours: Neighbours,
    run: Callable[..., None],
    most_work: int = MOST_WORK,
) -> None:
    """Tries neighbours until all plans on the frontier are expanded, or the limit on work is reached.

    Args:
      frontier: gives the plans known by now that no other beats in time and memory, fastest first.
      neighbours: what may change.
      run: evaluates plans, given like `Neighbours.of`.
      most_work: the limit, in layers of neighbours.
    """
    expanded, left = set[bytes](), most_work // max(neighbours.work, 1)
    while left > 0:
        fresh = [best for best in frontier() if _key(best) not in expanded]
        if not fresh:
            return
        spread = np.unique(np.linspace(0, len(fresh) - 1, min(_EXPANDED_AT_ONCE, left)).astype(int))
        expanded |= {_key(fresh[number]) for number in spread}
        left -= len(spread)
        parts = zip(*(neighbours.of(fresh[number]) for number in spread), strict=True)
        run(*(np.concatenate(part) for part in parts))


def _columns(best: Best) -> tuple[np.ndarray, ...]:
    """Modes and flags of gradients, recomputation and updates, (layers,) codes each."""
    there = np.zeros(len(best.modes), dtype=bool) if best.on_device is None else best.on_device
    return tuple(each.astype(np.int8) for each in (best.modes, best.grad_on_host, best.recomputes, there))


def _key(best: Best) -> bytes:
    return b"".join(each.tobytes() for each in _columns(best))
