"""GO-MemFerry: which gradients stay on the device (MemFerry, section IV-D).

Names: `gain_s` is T_GBP - T_CBP, the seconds that a backward saves when its gradient stays, less what its transfer
takes longer than the backwards that follow; the capacity is the reserve factor's share of all gradient bytes. The paper
counts no link time, which for the first layers, whose transfers nothing hides, may exceed T_GBP - T_CBP. Its table D
over (layer, bytes) is kept as its Pareto frontier, so byte sizes are exact: states (bytes, gain) that no other state
beats, less those that Dantzig's bound rules out.

The result is optimal unless the frontier exceeds `MOST_STATES` (hundreds of layers of unrelated sizes with gain
proportional to size). Sizes are then rounded up to multiples of capacity / 32768, which keeps within the capacity. If
even that needs more than `MOST_STATES_IN_ALL` states, the densest gradients stay that fit; at most one gradient's gain
is lost.
"""

import decimal

import numpy as np

from jaxferry.costs.records import Profile

MOST_STATES = 1 << 15
MOST_STATES_IN_ALL = 1 << 25
_ROUNDED_UNITS = 1 << 15


def capacity_bytes(profile: Profile, reserve_factor: float) -> int:
    """Bytes of gradients that may stay. The factor is read as a decimal, so 0.29 of 100 bytes is 29."""
    total = sum(layer.grad_bytes for layer in profile.layers)
    return int(decimal.Decimal(repr(float(reserve_factor))) * total)


def gradients_to_host(profile: Profile, reserve_factor: float) -> np.ndarray:
    """Which gradients the backward writes to the host, (layers,) bools: all except the fitting set with the most gain.

    A gradient without gain never stays. With reserve factor 1, GO is off and every gradient stays.
    """
    if reserve_factor >= 1:
        return np.zeros(len(profile.layers), dtype=bool)
    sizes = [layer.grad_bytes for layer in profile.layers]
    stays = choose_gradients(sizes, gains_s(profile), capacity_bytes(profile, reserve_factor))
    return ~np.array([layer in stays for layer in range(len(sizes))], dtype=bool)


def gains_s(profile: Profile) -> list[float]:
    """For each layer, what a step gains if its gradient stays on the device, with the links for itself."""
    gains, following_s = [], 0.0
    for layer in profile.layers:
        exposed_s = max(layer.offload_s - following_s, 0.0)
        gains.append(layer.backward_go_s - layer.backward_s - exposed_s)
        following_s += layer.backward_s + layer.inter_backward_s
    return gains


def choose_gradients(sizes_bytes: list[int], gains_s: list[float], capacity: int) -> set[int]:
    """The indices with the largest total gain whose total size is at most the capacity (0/1 knapsack).

    Args:
      sizes_bytes: whole numbers, 0 or more.
      gains_s: seconds; indices with a gain of 0 or less are never chosen.
      capacity: bytes.
    """
    useful = [i for i, gain in enumerate(gains_s) if gain > 0 and sizes_bytes[i] <= capacity]
    chosen = {i for i in useful if sizes_bytes[i] == 0}
    rest = [i for i in useful if sizes_bytes[i] > 0]
    rest.sort(key=lambda i: (-gains_s[i] / sizes_bytes[i], i))
    sizes = np.array([sizes_bytes[i] for i in rest], dtype=object)
    gains = np.array([gains_s[i] for i in rest])
    if sum(sizes) <= capacity:
        return chosen | set(rest)
    picked = _knapsack(sizes.astype(np.int64), gains, capacity, MOST_STATES)
    if picked is None and len(rest) * _ROUNDED_UNITS > MOST_STATES_IN_ALL:
        picked = _greedy(sizes.astype(np.int64), gains, capacity)
    if picked is None:
        unit = -(-capacity // _ROUNDED_UNITS)
        picked = _knapsack((-(-sizes // unit)).astype(np.int64), gains, capacity // unit, None)
    assert picked is not None
    return chosen | {rest[i] for i in picked}


def _knapsack(sizes: np.ndarray, gains: np.ndarray, capacity: int, most_states: int | None) -> list[int] | None:
    """The frontier over (bytes, gain), densest items first; None if it outgrows `most_states`."""
    size_sums, gain_sums = np.concatenate([[0], np.cumsum(sizes)]), np.concatenate([[0.0], np.cumsum(gains)])
    least = float(gains[_greedy(sizes, gains, capacity)].sum())
    used, gained = np.zeros(1, dtype=np.int64), np.zeros(1)
    parents: list[np.ndarray] = []
    num_states = 0
    for item in range(len(sizes)):
        fits = np.flatnonzero(used + sizes[item] <= capacity)
        origin = np.concatenate([np.arange(len(used)), fits + len(used)])
        used = np.concatenate([used, used[fits] + sizes[item]])
        gained = np.concatenate([gained, gained[fits] + gains[item]])
        order = np.lexsort((-gained, used))
        used, gained, origin = used[order], gained[order], origin[order]
        best_before = np.concatenate([[-np.inf], np.maximum.accumulate(gained)[:-1]])
        bound = gained + _dantzig(size_sums, gain_sums, item + 1, capacity - used)
        keep = (gained > best_before) & (bound >= least * (1 - 1e-12))
        used, gained, origin = used[keep], gained[keep], origin[keep]
        parents.append(origin)
        num_states += len(used)
        if most_states is not None and (len(used) > most_states or num_states > MOST_STATES_IN_ALL):
            return None
    return _trace(parents, int(np.argmax(gained)))


def _trace(parents: list[np.ndarray], state: int) -> list[int]:
    """Which items were taken. An origin at or beyond the previous frontier's size means taken."""
    picked = []
    for item in reversed(range(len(parents))):
        size_before = len(parents[item - 1]) if item else 1
        state = int(parents[item][state])
        if state >= size_before:
            picked.append(item)
            state -= size_before
    return picked


def _greedy(sizes: np.ndarray, gains: np.ndarray, capacity: int) -> list[int]:
    """The items that fit, densest first."""
    picked = []
    for item, size in enumerate(sizes):
        if size <= capacity:
            capacity = capacity - size
            picked.append(item)
    return picked


def _dantzig(size_sums: np.ndarray, gain_sums: np.ndarray, first: int, room: np.ndarray) -> np.ndarray:
    """The largest gain of items from `first` on within the room, if the last one may be cut."""
    reach = np.searchsorted(size_sums, size_sums[first] + room, side="right") - 1
    whole = gain_sums[reach] - gain_sums[first]
    left = size_sums[first] + room - size_sums[reach]
    following = np.minimum(reach, len(size_sums) - 2)
    density = (gain_sums[following + 1] - gain_sums[following]) / (size_sums[following + 1] - size_sums[following])
    return whole + np.where(reach < len(size_sums) - 1, left * density, 0.0)
