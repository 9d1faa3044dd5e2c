"""Tables of a profile's layers as arrays, each made once for a profile: planners ask for them for every few plans.

Nobody changes an array from here.
"""

import itertools
from collections.abc import Callable

import numpy as np

from jaxferry.costs.records import Profile


def column(profile: Profile, key: str) -> np.ndarray:
    """A field of all layers, (layers, 1)."""
    return profile.once(_column, key)


def flags_of(profile: Profile, key: str) -> np.ndarray:
    """A field of all layers as flags, (layers, 1)."""
    return profile.once(_flags, key)


def per_choice(profile: Profile, count: Callable[..., float], *flags: np.ndarray) -> np.ndarray:
    """What `count`, a method of `LayerProfile`, gives for each layer and its (layers, plans) flags; (layers, plans)."""
    table = profile.once(_table, count, len(flags))
    if (table == table[:, :1]).all():
        return np.broadcast_to(table[:, :1], flags[0].shape)
    row = sum(flag.astype(np.intp) << bit for bit, flag in enumerate(reversed(flags)))
    return np.take_along_axis(table, row, axis=1)


def program_ends(profile: Profile) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last layer of each layer's program, (layers,) each."""
    return profile.once(_program_ends)


def _column(profile: Profile, key: str) -> np.ndarray:
    return np.array([getattr(layer, key) for layer in profile.layers])[:, None]


def _flags(profile: Profile, key: str) -> np.ndarray:
    return _column(profile, key).astype(bool)


def _table(profile: Profile, count: Callable[..., float], num_flags: int) -> np.ndarray:
    """(layers, choices), the last flag changing fastest."""
    choices = list(itertools.product((False, True), repeat=num_flags))
    return np.array([[count(layer, *choice) for choice in choices] for layer in profile.layers])


def _program_ends(profile: Profile) -> tuple[np.ndarray, np.ndarray]:
    first, last = np.array(profile.program_ends).T
    return first, last
