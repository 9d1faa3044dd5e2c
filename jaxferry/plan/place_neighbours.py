"""Local search among plans with updates on the device: neighbours of the best plans for their memory.

A neighbour changes the mode, gradient or recomputation of one layer, or where one group is updated. Plans spread over
the frontier of time and memory are expanded, independently of any budget, within a limit on work. A long model's
neighbours differ too little for that.
"""

import numpy as np

from jaxferry.holdings import DHA, GFGB, RELOAD, RESIDENT
from jaxferry.plan.neighbours import ALL_MODES
from jaxferry.plan.search import Best, Pool
from jaxferry.plan.update_groups import updatable_groups
from jaxferry.profiling.records import Profile

_NEIGHBOURS = 8
_WORK = 400_000
_MOST_LAYERS = 80
_EXPANDED_AT_ONCE = 6


def refine(pool: Pool) -> None:
    """Adds neighbours to the plans of a pool, and evaluates them."""
    size, expanded, work = len(pool.profile.layers), set[bytes](), 0
    once = _NEIGHBOURS * size**2
    while size <= _MOST_LAYERS and work + once <= _WORK:
        fresh = [best for best in pool.frontier() if _key(best) not in expanded]
        if not fresh:
            break
        number = min(_EXPANDED_AT_ONCE, (_WORK - work) // once)
        for place in np.unique(np.linspace(0, len(fresh) - 1, number).astype(int)):
            expanded.add(_key(fresh[place]))
            modes, *flags = _neighbours(pool.profile, fresh[place])
            pool.add(modes, flags[0], recomputes=flags[1], on_device=flags[2])
            work += modes.size
        pool.run()
    pool.join()


def _key(best: Best) -> bytes:
    return b"".join(each.tobytes() for each in _columns(best))


def _columns(best: Best) -> tuple[np.ndarray, ...]:
    """Modes and flags of gradients, recomputation and updates, (layers,) each."""
    there = np.zeros(len(best.modes), dtype=bool) if best.on_device is None else best.on_device
    return best.modes, best.grad_on_host, best.recomputes, there


def _neighbours(profile: Profile, best: Best) -> list[np.ndarray]:
    """The columns of all neighbours, (plans, layers) each."""
    own = _columns(best)
    found = []

    def add(layers: list[int], *changes: tuple[int, int]) -> None:
        changed = [each.copy() for each in own]
        for column, value in changes:
            changed[column][layers] = value
        found.append(changed)

    for layer, (_, grad_on_host, recomputes, there) in enumerate(zip(*own, strict=True)):
        if profile.layers[layer].can_recompute:
            add([layer], (2, not recomputes))
        if not there:
            add([layer], (1, not grad_on_host))
            for mode in set(ALL_MODES) - {int(own[0][layer])}:
                add([layer], (0, mode))
    for group in updatable_groups(profile):
        members = list(profile.groups[group])
        if own[3][members[0]]:
            for mode in (GFGB, DHA, RELOAD, RESIDENT):
                add(members, (0, mode), (3, False))
        else:
            add(members, (0, RESIDENT), (1, False), (3, True))
    return [np.array(column) for column in zip(*found, strict=True)]
