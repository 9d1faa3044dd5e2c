"""Empties a processor's caches, so that each repetition of a microbenchmark finds its arguments in memory.

In a step, a layer's parameters, kept values and optimizer state were last used many layers ago. Repeated on the same
arrays, the update of a small layer takes less than half of that time, since all of it stays in the caches.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import jax
import numpy as np

ACCELERATOR_BYTES = 2**28
"""Twice the caches of NVIDIA's largest GPUs or more; JAX does not tell their size."""
UNKNOWN_BYTES = 2**26
"""The caches of a host CPU that Linux does not describe."""
MOST_BYTES = 2**31
"""The most host memory that is written to empty caches."""

_CPUS = pathlib.Path("/sys/devices/system/cpu")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


class ColdCaches:
    """Writes more bytes than the caches of a processor hold.

    Args:
      where: memory of the processor, unsharded.
    """

    def __init__(self, where: Any) -> None:
        [device] = where.device_set
        num_bytes = min(2 * host_cache_bytes(), MOST_BYTES) if device.platform == "cpu" else ACCELERATOR_BYTES
        self._array = jax.device_put(np.zeros(num_bytes // 4, np.float32), where, may_alias=False)

    def __call__(self) -> jax.Array:
        """Issues the program that empties the caches; the result is ready when it has run."""
        self._array = _written(self._array)
        return self._array


@functools.lru_cache(maxsize=2)
def cold_caches(where: Any) -> ColdCaches:
    """The one of a processor, since its memory takes longer to allocate than to write; `cache_clear()` frees it."""
    return ColdCaches(where)


@functools.partial(jax.jit, donate_argnums=0)
def _written(array: jax.Array) -> jax.Array:
    return array + 1


@functools.cache
def host_cache_bytes(cpus: pathlib.Path = _CPUS) -> int:
    """The bytes of all caches of the host's processors, each shared one counted once; `UNKNOWN_BYTES` if unknown.

    Args:
      cpus: Linux's description of the processors.
    """
    sizes: dict[tuple[str, ...], int] = {}
    for cache in cpus.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            about = {name: (cache / name).read_text().strip() for name in ("level", "type", "shared_cpu_list", "size")}
            size = about.pop("size")
            sizes[tuple(about.values())] = int(size.rstrip("KMG")) * _UNITS.get(size[-1:], 1)
        except (OSError, ValueError):
            continue
    return sum(sizes.values()) or UNKNOWN_BYTES
