"""Local search over a whole pool: neighbours of the best plans for their memory.

A neighbour changes the mode, gradient, recomputation or place of update of one layer (or group), or of several layers
that are equal and treated equally so far: the first or the last two, four, ... of them. Plans spread over the frontier
of time and memory are expanded, independently of any budget, within a limit on work. Layers of a long model change only
together with such others; there layers of equal bytes and about equal times count as equal, as those that were measured
one by one.
"""

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from jaxferry.costs.layer_records import LayerProfile
from jaxferry.costs.records import Profile
from jaxferry.planner.best import Best
from jaxferry.planner.effort import FEW_LAYERS
from jaxferry.step.holdings import DFGB, DHA, GFGB, RELOAD, RESIDENT

ALL_MODES = (GFGB, DHA, DFGB, RELOAD, RESIDENT)
MOST_WORK = 840_000
"""The most layers of neighbours that a search tries."""

_EXPANDED_AT_ONCE = 8
_BYTES, _SECONDS = ("param_bytes", "activation_bytes"), ("forward_s", "load_s")
_ABOUT = 1.25
"""The ratio of times that are about equal."""
_MODE, _GRAD_ON_HOST, _RECOMPUTES, _ON_DEVICE = range(4)
_Change = tuple[list[int], dict[int, int]]


class Neighbours:
    """What may change in one plan.

    Args:
      profile: the layers.
      can_recompute: the layers whose recomputation may change, (layers,) flags.
      groups: the parameter groups whose place of update may change.
    """

    def __init__(self, profile: Profile, can_recompute: np.ndarray, groups: Collection[int] = ()):
        self.can_recompute = can_recompute
        self.groups = [list(profile.groups[group]) for group in groups]
        self.is_alone = np.zeros(len(profile.layers), dtype=bool)
        self.is_alone[[members[0] for members in self.groups if len(members) == 1]] = True
        self.one_by_one = len(profile.layers) <= FEW_LAYERS
        self.kinds = _kinds(profile, can_recompute, 1.0 if self.one_by_one else _ABOUT)

    def of(self, best: Best) -> list[np.ndarray]:
        """Modes and flags of gradients, recomputation and updates of all neighbours, (plans, layers) each."""
        own = np.stack([each.astype(np.int8) for each in best.columns])
        together = list(self._equal_layers(own))
        changes = [*self._of_layers(own, together), *self._of_groups(own, together)]
        found = np.repeat(own[None], len(changes), axis=0)
        cells, layers, counts = list[tuple[int, int, int]](), list[int](), list[int]()
        for number, (chosen, values) in enumerate(changes):
            cells += [(number, column, value) for column, value in values.items()]
            layers += chosen * len(values)
            counts += [len(chosen)] * len(values)
        plan, column, value = np.repeat(np.array(cells, dtype=np.int64).reshape(-1, 3), counts, axis=0).T
        found[plan, column, layers] = value
        return [found[:, _MODE], *(found[:, column].astype(bool) for column in range(1, len(own)))]

    def _of_layers(self, own: np.ndarray, together: list[list[int]]) -> Iterator[_Change]:
        for layers in together:
            mode, grad_on_host, recomputes, there = own[:, layers[0]].tolist()
            if self.can_recompute[layers[0]]:
                yield layers, {_RECOMPUTES: not recomputes}
            if not there:
                yield layers, {_GRAD_ON_HOST: not grad_on_host}
                yield from ((layers, {_MODE: other}) for other in ALL_MODES if other != mode)

    def _of_groups(self, own: np.ndarray, together: list[list[int]]) -> Iterator[_Change]:
        alone = (layers for layers in together if len(layers) > 1 and self.is_alone[layers].all())
        for layers in (*self.groups, *alone):
            if own[_ON_DEVICE, layers[0]]:
                yield from ((layers, {_MODE: mode, _ON_DEVICE: 0}) for mode in (GFGB, DHA, RELOAD, RESIDENT))
            else:
                yield layers, {_MODE: RESIDENT, _GRAD_ON_HOST: 0, _ON_DEVICE: 1}

    def _equal_layers(self, own: np.ndarray) -> Iterator[list[int]]:
        """Layers that may change together."""
        classes: dict[tuple[object, ...], list[int]] = {}
        for layer, key in enumerate(zip(self.kinds, *own.tolist(), strict=True)):
            classes.setdefault(key, []).append(layer)
        if self.one_by_one:
            yield from ([layer] for layer in range(len(self.kinds)))
        for layers in classes.values():
            counts = {*(1 << power for power in range(len(layers).bit_length())), len(layers)}
            for count in sorted(counts - {1} if self.one_by_one else counts):
                yield layers[:count]
                if count < len(layers):
                    yield layers[-count:]


def _kinds(profile: Profile, can_recompute: np.ndarray, most: float) -> list[int]:
    """The first layer of each layer's kind: of equal bytes, and times whose ratio is at most `most`."""
    found: list[int] = []
    firsts: dict[tuple[object, ...], list[int]] = {}
    for index, (layer, can) in enumerate(zip(profile.layers, can_recompute, strict=True)):
        of_bytes = firsts.setdefault((*(getattr(layer, key) for key in _BYTES), bool(can)), [])
        kind = next((first for first in of_bytes if _is_about(layer, profile.layers[first], most)), index)
        of_bytes += [index] if kind == index else []
        found.append(kind)
    return found


def _is_about(layer: LayerProfile, other: LayerProfile, most: float) -> bool:
    """Whether no time of one layer is more than so many times that of the other."""
    times = (sorted((getattr(layer, key), getattr(other, key))) for key in _SECONDS)
    return all(high <= low * most for low, high in times)


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
    expanded, work = set[bytes](), 0
    while work < most_work:
        fresh = [best for best in frontier() if _key(best) not in expanded]
        if not fresh:
            return
        spread = np.unique(np.linspace(0, len(fresh) - 1, _EXPANDED_AT_ONCE).astype(int))
        expanded |= {_key(fresh[number]) for number in spread}
        parts = zip(*(neighbours.of(fresh[number]) for number in spread), strict=True)
        plans = [np.concatenate(part) for part in parts]
        work += plans[0].size
        run(*plans)


def _key(best: Best) -> bytes:
    return b"".join(each.tobytes() for each in best.columns)
