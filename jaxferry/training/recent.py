"""A cache of the values used last."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """The values of the keys that were used last.

    Args:
      most: the number of values that are kept.
      drop: called with each value that is dropped for a newer one.
    """

    def __init__(self, most: int, drop: Callable[[Value], object]) -> None:
        self._most, self._drop = most, drop
        self._values: collections.OrderedDict[Hashable, Value] = collections.OrderedDict()

    def __iter__(self) -> Iterator[Value]:
        return iter(list(self._values.values()))

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Returns the value of a key, made if it is not kept."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        # Made before anything is dropped: it may fail.
        made = self._values[key] = make()
        if len(self._values) > self._most:
            self._drop(self._values.popitem(last=False)[1])
        return made

    def clear(self) -> None:
        """Forgets all values."""
        self._values.clear()
