"""The forward optimum over GFGB and DHA, by dynamic programming over a Pareto frontier.

Which parameter groups have a copy on the device, for many plans at once, in as few bits as possible.

A group's copy matters to a search from the group's first layer, which can load it, to its last, which can use it. A
group has a bit only in that span, and disjoint spans share a bit. So the number of bits is the largest number of groups
that are open at once, not the number of groups.

A set of bits is a row of 64-bit words, (states, words).

Names: a state is (X, C), the link's end and the GPU's end after the layers so far (MemFerry, section IV-B). Both of a
layer's transitions are monotone in X and C,

    DHA   (X + forward_read_s, C + forward_dha_s + inter_forward_s)
    GFGB  (X + load_s, max(C, X + load_s) + forward_s + inter_forward_s),

so a state that is no better in X and no better in C than another can never end better. It is dropped. So is a state
whose fastest continuation exceeds a known plan. In practice the frontier has some hundred states.

If parameter groups have several layers, a state also records the copies on the device (`planner/frontier.py`), and each
set of copies has its own frontier. The result is always optimal with at most `MOST_OPEN` groups open at once, as with a
tied table or pairs of neighbours. With more groups it is optimal up to `MOST_STATES` states. Beyond that, states are
sorted into buckets of similar X. The earliest few of each bucket stay unchanged. The others are merged into one state
that has their least X, their least C and all their copies. A continuation of merged states is not a plan, but no plan
ends earlier. So the optimum lies between `bound_s` and the best plan.

After each layer of a long model only the earliest states of each bucket stay (`most_kept_states`). `bound_s` then comes
from a knapsack over all layers.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxferry.costs import Profile
from jaxferry.planner.memferry import Forward, forward_modes
from jaxferry.step import DHA, GFGB

_BISECTIONS = 60


class Penalty:
    """The least GPU time that unloaded layers cost, given the link time for loads: convex, decreasing.

    Args:
      load_s: link time of each layer's load, (layers,).
      penalty_s: GPU time that each layer costs if it is not loaded, (layers,).
    """

    def __init__(self, load_s: np.ndarray, penalty_s: np.ndarray):
        penalty_s = np.maximum(penalty_s, 0.0)
        costly = (load_s > 0) & (penalty_s > 0)
        load_s, penalty_s = load_s[costly], penalty_s[costly]
        order = np.argsort(-penalty_s / load_s, kind="stable")
        self.loads = np.concatenate([[0.0], np.cumsum(load_s[order])])
        self.saved = np.concatenate([[0.0], np.cumsum(penalty_s[order])])
        self.worth_it_s = float(load_s[penalty_s > load_s].sum())
        """Link time of the layers whose penalty exceeds their load time."""

    def __call__(self, link_s: float) -> float:
        """Seconds on the GPU if loads may take `link_s` on the link."""
        return float(self.saved[-1] - np.interp(max(link_s, 0.0), self.loads, self.saved))


def least_time(least_s: float, penalty: Callable[[float], float], more_link_s: float) -> float:
    """The least t with t >= least_s + penalty(t + more_link_s), from below."""
    low, high = least_s, least_s + penalty(0.0)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if middle >= least_s + penalty(middle + more_link_s) else (middle, high)
    return low


_WORD_BITS = 64


class SharedCopies:
    """The bits of a profile's groups of several layers.

    Attributes:
      num_words: words in a row.
      num_open: for each layer, the number of groups that have a bit after it.
    """

    def __init__(self, profile: Profile):
        self._slots: list[int | None] = []
        self._closes: list[bool] = []
        self.num_open: list[int] = []
        slot_of: dict[int, int] = {}
        free: list[int] = []
        num_slots = 0
        for index, group in enumerate(profile.group_of):
            members = profile.groups[group]
            if len(members) > 1 and index == members[0]:
                if not free:
                    free, num_slots = [num_slots], num_slots + 1
                slot_of[group] = free.pop()
            self._slots.append(slot_of.get(group))
            self._closes.append(group in slot_of and index == members[-1])
            if self._closes[-1]:
                free.append(slot_of.pop(group))
            self.num_open.append(len(slot_of))
        self.num_words = -(-num_slots // _WORD_BITS)

    def none(self) -> np.ndarray:
        """The row of a state without copies."""
        return np.zeros((1, self.num_words), dtype=np.uint64)

    def held(self, rows: np.ndarray, layer: int) -> np.ndarray:
        """Whether the layer's group has a copy on the device, (states,)."""
        slot = self._slots[layer]
        if slot is None:
            return np.zeros(len(rows), dtype=bool)
        return (rows[:, slot // _WORD_BITS] & _bit(slot)) != 0

    def after(self, rows: np.ndarray, layer: int, loaded: bool) -> np.ndarray:
        """The rows after a layer that used a copy on the device or not; a group's last layer clears its bit."""
        slot = self._slots[layer]
        if slot is None or not (loaded or self._closes[layer]):
            return rows
        rows, word = rows.copy(), slot // _WORD_BITS
        if self._closes[layer]:
            rows[:, word] &= ~_bit(slot)
        else:
            rows[:, word] |= _bit(slot)
        return rows


def _bit(slot: int) -> np.uint64:
    return np.uint64(1 << slot % _WORD_BITS)


def group_rows(rows: np.ndarray) -> np.ndarray:
    """A number for each row, (states,): equal for equal rows."""
    groups = np.zeros(len(rows), dtype=np.int64)
    for word in rows.T:
        words = np.unique(word, return_inverse=True)[1]
        groups = np.unique(groups * len(rows) + words, return_inverse=True)[1]
    return groups


def holds_as_much(rows: np.ndarray) -> np.ndarray:
    """Whether the first state holds every copy that the second one holds, (states, states)."""
    as_much = np.ones((len(rows), len(rows)), dtype=bool)
    for word in rows.T:
        as_much &= (word[None, :] & ~word[:, None]) == 0
    return as_much


MOST_OPEN = 3
MOST_STATES = 4096
BUCKETS = 128
KEPT_IN_BUCKET = 8
_MOST_IN_ALL = 1 << 22
_LEAST_KEPT = 2 * BUCKETS
_TRACED_MERGED = 64
_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True)
class ForwardOptimum:
    """The best forward found.

    Attributes:
      modes: (layers,) codes of GFGB and DHA.
      forward_s: when it ends.
      bound_s: no forward ends earlier; equal to `forward_s` if the optimum is proven.
      memferry: the modes of MemFerry's Algorithm 1, which the search begins with; None if the first layers are given.
    """

    modes: np.ndarray
    forward_s: float
    bound_s: float
    memferry: np.ndarray | None = None


def optimal_forward(profile: Profile, head: int = 0, lead_s: float = 0.0, limit_s: float = np.inf) -> ForwardOptimum:
    """The modes of GFGB and DHA whose forward ends first, and its end in seconds.

    Args:
      profile: the layers.
      head: the number of first layers that are DHA.
      lead_s: seconds by which loads begin before the forward, as they may in a chain of steps.
      limit_s: the search stops above this value; the result then exceeds it too, but may not be the optimum.
    """
    known = _known_plans(profile, head, lead_s)
    known_s = min(end for _, end in known)
    limit = min(limit_s, known_s) * (1 + _ROUNDING)
    fastest_rest = np.array([min(x.forward_s, x.forward_dha_s) + x.inter_forward_s for x in profile.layers])
    rest = np.concatenate([np.cumsum(fastest_rest[::-1])[::-1][1:], [0.0]])
    copies = SharedCopies(profile)
    states, most_states, is_complete = _States.start(copies, lead_s), most_kept_states(len(profile.layers)), True
    history = []
    for index in range(len(profile.layers)):
        states = states.after(profile, copies, index)
        allowed = states.gpu + rest[index] <= limit
        if index < head:
            allowed &= states.origin % 2 == 0
        states = states.take(np.flatnonzero(allowed))
        states = states.take(states.frontier())
        if copies.num_open[index] > MOST_OPEN and len(states.gpu) > MOST_STATES:
            states = states.fewer()
        if len(states.gpu) > most_states:
            states, is_complete = states.thinned(most_states), False
        history.append(states.origin)
    found = [(modes, forward_s(profile, modes, lead_s)) for modes in _traces(states, history)]
    modes, end_s = min([*known, *found], key=lambda plan: plan[1])
    bound_s = float(states.gpu.min(initial=np.inf)) if is_complete else _relaxed_s(profile, head, lead_s)
    return ForwardOptimum(modes, end_s, min(end_s, bound_s), known[-1][0] if head == 0 else None)


def most_kept_states(num_layers: int) -> int:
    """The most states after a layer, so that the states of all layers together stay bounded."""
    return max(_LEAST_KEPT, _MOST_IN_ALL // num_layers)


def _relaxed_s(profile: Profile, head: int, lead_s: float) -> float:
    """No forward ends earlier: the GPU's work, if a knapsack decides what the link loads until then."""
    layers = profile.layers
    forward, by_dha = (np.array([getattr(x, key) for x in layers]) for key in ("forward_s", "forward_dha_s"))
    alone = np.array([len(profile.groups[group]) == 1 for group in profile.group_of])
    load = np.where(alone, np.array([layer.load_s for layer in layers]), 0.0)
    forward[:head] = by_dha[:head]
    least_s = float(np.minimum(forward, by_dha).sum()) + sum(layer.inter_forward_s for layer in layers)
    return least_time(least_s, Penalty(load, by_dha - forward), lead_s)


def forward_s(profile: Profile, modes: np.ndarray, lead_s: float = 0.0) -> float:
    """Seconds to the end of the forward for (layers,) codes; DFGB counts as DHA."""
    forward = Forward(profile)
    forward.link = np.full(1, -lead_s)
    for index in range(len(modes)):
        forward.layer(index, modes[index : index + 1] != GFGB)
    return float(forward.gpu[0])


def _known_plans(profile: Profile, head: int, lead_s: float) -> list[tuple[np.ndarray, float]]:
    size = len(profile.layers)
    plans = [np.full(size, DHA, dtype=np.int8), np.full(size, GFGB, dtype=np.int8)]
    plans += [forward_modes(profile)] if head == 0 else []
    for modes in plans:
        modes[:head] = DHA
    return [(modes, forward_s(profile, modes, lead_s)) for modes in plans]


@dataclasses.dataclass
class _States:
    """States after some layers, (states,) each.

    Attributes:
      link: X.
      gpu: C.
      copies: the groups' copies on the device, (states, words).
      merged: whether the state represents several.
      origin: 2 * the previous state, + 1 for GFGB.
    """

    link: np.ndarray
    gpu: np.ndarray
    copies: np.ndarray
    merged: np.ndarray
    origin: np.ndarray

    @classmethod
    def start(cls, copies: SharedCopies, lead_s: float) -> "_States":
        return cls(np.full(1, -lead_s), np.zeros(1), copies.none(), np.zeros(1, bool), np.zeros(1, dtype=np.int64))

    def take(self, keep: np.ndarray) -> "_States":
        return _States(*(getattr(self, field.name)[keep] for field in dataclasses.fields(self)))

    @classmethod
    def joined(cls, parts: list["_States"]) -> "_States":
        return cls(*(np.concatenate([getattr(x, field.name) for x in parts]) for field in dataclasses.fields(cls)))

    def after(self, profile: Profile, copies: SharedCopies, index: int) -> "_States":
        """All states after one more layer, DHA first."""
        layer = profile.layers[index]
        loads = ~copies.held(self.copies, index)
        link = np.where(loads, self.link + layer.load_s, self.link)
        start = np.where(loads, np.maximum(self.gpu, link), self.gpu)
        by_dha = self.gpu + layer.forward_dha_s + layer.inter_forward_s
        loaded = start + layer.forward_s + layer.inter_forward_s
        origin = 2 * np.arange(len(self.gpu))
        before_dha, before_gfgb = copies.after(self.copies, index, False), copies.after(self.copies, index, True)
        return _States.joined(
            [
                _States(self.link + layer.forward_read_s, by_dha, before_dha, self.merged, origin),
                _States(link, loaded, before_gfgb, self.merged, origin + 1),
            ]
        )

    def frontier(self) -> np.ndarray:
        """Indices of the states that no other with the same copies beats in X and C; merged states beat no others.

        One pass handles all sets of copies: C counts by rank, minus the number of all states for each earlier set.
        """
        if len(self.gpu) == 0:
            return np.zeros(0, dtype=np.int64)
        group = 2 * group_rows(self.copies) + self.merged
        order = np.lexsort((self.gpu, self.link, group))
        rank = np.unique(self.gpu, return_inverse=True)[1].reshape(len(order))[order] - group[order] * len(order)
        best_before = np.concatenate([[len(order)], np.minimum.accumulate(rank)[:-1]])
        return order[rank < best_before]

    def thinned(self, most: int) -> "_States":
        """The earliest states of each bucket of similar X, at most `most` in all."""
        size = len(self.gpu)
        by_link = np.argsort(self.link, kind="stable")
        bucket = np.empty(size, dtype=np.int64)
        bucket[by_link] = np.arange(size) * BUCKETS // size
        order = np.lexsort((self.gpu, self.merged, bucket))
        place = np.arange(size) - np.searchsorted(bucket[order], np.arange(BUCKETS))[bucket[order]]
        return self.take(order[place < most // BUCKETS])

    def fewer(self) -> "_States":
        """The earliest states of each bucket of similar X, and one merged state for the rest of it."""
        size = len(self.gpu)
        by_link = np.argsort(self.link, kind="stable")
        bucket = np.empty(size, dtype=np.int64)
        bucket[by_link] = np.arange(size) * BUCKETS // size
        order = np.lexsort((self.gpu, self.merged, bucket))
        first = np.searchsorted(bucket[order], np.arange(BUCKETS))
        place = np.arange(size) - first[bucket[order]]
        stays = (place < KEPT_IN_BUCKET) & ~self.merged[order]
        rest = order[~stays]
        starts = np.unique(bucket[rest], return_index=True)[1]
        merged = _States(
            np.minimum.reduceat(self.link[rest], starts),
            np.minimum.reduceat(self.gpu[rest], starts),
            np.bitwise_or.reduceat(self.copies[rest], starts, axis=0),
            np.ones(len(starts), dtype=bool),
            self.origin[rest[starts]],
        )
        return _States.joined([self.take(order[stays]), merged])


def _traces(states: _States, history: list[np.ndarray]) -> list[np.ndarray]:
    """The modes of the earliest state, and of the earliest merged states, which may be good plans."""
    order = np.argsort(states.gpu, kind="stable")
    merged = order[states.merged[order]]
    return [_trace(history, int(state)) for state in (*order[~states.merged[order]][:1], *merged[:_TRACED_MERGED])]


def _trace(history: list[np.ndarray], state: int) -> np.ndarray:
    modes = np.full(len(history), DHA, dtype=np.int8)
    for index in reversed(range(len(history))):
        state, loaded = divmod(int(history[index][state]), 2)
        if loaded:
            modes[index] = GFGB
    return modes
