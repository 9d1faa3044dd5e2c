"""Copies between host and device, by `jax.device_put`: pure JAX, asynchronous, one direction each."""

from __future__ import annotations

import jax

from jaxferry.engine.placement import Placement

Vectors = tuple[jax.Array, ...]


class Transfers:
    """Moves the flat vectors of a layer.

    Args:
      placement: where they come from and go to.

    Attributes:
      device_bytes: bytes of parameters on the device now.
      peak_device_bytes: the most that they have been since `reset_peak`.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self.device_bytes = 0
        self.peak_device_bytes = 0

    def reset_peak(self) -> None:
        """Starts a new measurement of the peak."""
        self.peak_device_bytes = self.device_bytes

    def load(self, vectors: Vectors) -> Vectors:
        """Starts the copy of parameters from pinned memory into new device buffers."""
        self.device_bytes += sum(v.nbytes for v in vectors)
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)
        return tuple(jax.device_put(v, self._placement.device) for v in vectors)

    def drop(self, vectors: Vectors) -> None:
        """Frees device buffers of parameters once the programs that were given them have run."""
        for vector in vectors:
            self.device_bytes -= vector.nbytes
            vector.delete()

    def store(self, gradients: Vectors) -> Vectors:
        """Starts the copy of gradients to host memory, where the optimizer can read them, and frees theirs."""
        pinned = tuple(jax.device_put(g, self._placement.pinned) for g in gradients)
        for gradient in gradients:
            gradient.delete()
        if self._placement.is_cpu:
            return pinned
        return tuple(jax.device_put(g, self._placement.host) for g in pinned)
