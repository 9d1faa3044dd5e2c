"""Which parameter groups have a copy on the device, for many plans at once, in as few bits as possible.

A group's copy matters to a search from the group's first layer, which can load it, to its last, which can use it. A
group has a bit only in that span, and disjoint spans share a bit. So the number of bits is the largest number of groups
that are open at once, not the number of groups.

A set of bits is a row of 64-bit words, (states, words).
"""

import numpy as np

from jaxferry.costs.records import Profile

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
