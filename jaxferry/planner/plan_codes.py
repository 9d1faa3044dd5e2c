"""Many plans as one array, (plans, 2, layers): mode codes, and codes of gradients, recomputation and updates."""

from collections.abc import Collection

import numpy as np

_RECOMPUTES = 2
_ON_DEVICE = 4


def coded(
    modes: np.ndarray,
    grad_on_host: np.ndarray,
    recomputes: np.ndarray | bool = False,
    on_device: np.ndarray | bool = False,
) -> np.ndarray:
    """The plans with these mode codes and flags, (plans, layers) or (layers,) each."""
    modes = np.atleast_2d(np.asarray(modes, dtype=np.int8))
    codes = np.asarray(grad_on_host, dtype=np.int8) + _RECOMPUTES * np.asarray(recomputes, dtype=np.int8)
    codes = codes + _ON_DEVICE * np.asarray(on_device, dtype=np.int8)
    return np.stack([modes, np.broadcast_to(codes, modes.shape)], axis=1)


def different_rows(plans: np.ndarray, known: Collection[bytes] = ()) -> np.ndarray:
    """The first of each group of equal plans that are not known, by index; `np.unique` compares far slower.

    In lexicographic order.
    """
    first: dict[bytes, int] = {}
    for row, key in enumerate(row_bytes(plans)):
        if key not in known:
            first.setdefault(key, row)
    return np.array([first[key] for key in sorted(first)], dtype=np.int64)


def row_bytes(plans: np.ndarray) -> list[bytes]:
    """The bytes of each plan."""
    size = plans[0].nbytes if len(plans) else 1
    joined = plans.tobytes()
    return [joined[first : first + size] for first in range(0, len(joined), size)]


def columns(plans: np.ndarray) -> tuple[np.ndarray, ...]:
    """Modes and flags of gradients, of recomputation and of updates on the device, (plans, layers) each."""
    return plans[:, 0], *flags(plans[:, 1])


def flags(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Flags of gradients, of recomputation and of updates on the device."""
    return codes % _RECOMPUTES == 1, codes % _ON_DEVICE >= _RECOMPUTES, codes >= _ON_DEVICE
