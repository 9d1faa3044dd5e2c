"""Norms of gradients, computed in a separate thread while the step runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.engine.program_functions import squared_norm
from jaxferry.partition import Layer
from jaxferry.settings import ThreadPool
from jaxferry.transport.pinned import Vectors
from jaxferry.transport.placement import Placement

SquaredNorm = Future[jax.Array] | jax.Array
"""A scalar in host memory that a thread computes, or one on the device."""

_norm_of_vectors = jax.jit(lambda vectors: squared_norm(jax.device_put(vectors, jax.memory.Space.Device)))
_together = jax.jit(jnp.stack)
_total = jax.jit(lambda norms, scale: jnp.sqrt(sum(norms, start=jnp.float32(0))) / scale)


class Norms:
    """Computes squared norms of gradients.

    Args:
      placement: where arrays live.
      on_host: whether every norm is computed from the vectors in host memory. This gives every plan the same bits, as
        needed if the norm changes the update. Else a program's own norm is used if it covers the whole gradient.
    """

    def __init__(self, placement: Placement, on_host: bool) -> None:
        self._placement, self._on_host = placement, on_host
        self._thread = ThreadPool(1, "jaxferry norms")
        self.none = jax.device_put(np.float32(0), placement.host_compute)
        """The argument of an update that needs no norm."""

    def compile(self, num_uses: Collection[int]) -> None:
        """Compiles what collects the norms that programs return, so that the first step need not.

        Args:
          num_uses: how often a step uses each group that has a gradient.
        """
        place, num = self._placement, sum(uses == 1 for uses in num_uses)
        if num > 1 and not (self._on_host or place.is_cpu or place.num_devices > 1):
            _compile_together(num, place.device)

    def of(self, gather: Callable[[], Vectors], known: jax.Array | None) -> SquaredNorm:
        """The squared norm of a whole gradient. The caller does not wait for the device.

        Args:
          gather: returns the gradient in host memory; may wait.
          known: the norm computed by the gradient's program; None if it does not cover the whole gradient.
        """
        if known is None or self._on_host:
            # The next step may write into the gradient's memory once the norm is known.
            return self._thread.submit(lambda: jax.block_until_ready(_norm_of_vectors(gather())))
        return known

    def values(self, squared: Mapping[int, SquaredNorm], layers: Sequence[Layer]) -> dict[int, Any]:
        """The squared norms of whole gradients, by group; waits for them.

        Several processes add up those of what each owns, so each must call this.
        """
        found = {group: norm.result() if isinstance(norm, Future) else norm for group, norm in squared.items()}
        place = self._placement
        there = [group for group, norm in squared.items() if not isinstance(norm, Future)]
        if len(there) > 1 and place.num_devices == 1:
            # One copy in place of one for each.
            found |= zip(there, np.asarray(_together([found[group] for group in there])), strict=True)
        own = [g for g, norm in squared.items() if isinstance(norm, Future) and not layers[g].is_whole]
        if own and place.num_processes > 1:
            table = np.zeros((place.num_processes, len(own)), np.float32)
            table[place.process] = [found[group] for group in own]
            found |= zip(own, place.merged(table).sum(axis=0), strict=True)
        return found

    def total(self, squared: Sequence[Any], scale: np.floating) -> jax.Array:
        """The global norm of the mean gradient, an fp32 scalar in host memory.

        Args:
          squared: the squared norms of all groups, as `values` has found them.
          scale: the divisor of the gradients.
        """
        norm: jax.Array = _total(jax.device_get(list(squared)), jax.device_put(scale, self._placement.host_compute))
        return norm


class GradientNorms:
    """The squared norms of one step's gradients, by parameter group.

    Args:
      norms: computes them.
      layers: the groups.
    """

    def __init__(self, norms: Norms, layers: Sequence[Layer]) -> None:
        self._norms, self._layers = norms, layers
        self._of_programs: dict[int, jax.Array | None] = {}
        self._taken: dict[int, SquaredNorm] = {}
        self._known: dict[int, Any] = {}

    def note(self, group: int, norm: jax.Array | None) -> None:
        """Notes the norm of what a program has computed; None if it has none."""
        self._of_programs[group] = norm

    def of_program(self, group: int) -> jax.Array | None:
        """What was noted last."""
        return self._of_programs[group]

    def begin(self, group: int, gather: Callable[[], Vectors], is_whole: bool) -> None:
        """Starts computing the norm of a group's gradient.

        Args:
          group: the group.
          gather: returns the gradient in host memory; may wait.
          is_whole: whether the program's own norm is that of the whole gradient.
        """
        self._taken[group] = self._norms.of(gather, self._of_programs[group] if is_whole else None)

    def take(self, group: int, norm: SquaredNorm) -> None:
        """Takes a norm that is computed elsewhere."""
        self._taken[group] = norm

    def squared(self) -> list[Any]:
        """The squared norm of each group's whole gradient, in the order of the groups; waits for them."""
        if not self._known:
            taken = {group: self._taken[group] for group in sorted(self._taken)}
            self._known = self._norms.values(taken, self._layers)
        return list(self._known.values())

    def first_nonfinite(self) -> int | None:
        """The first group whose gradient has a squared norm that is not finite, once they are known."""
        return next((group for group, norm in self._known.items() if not np.isfinite(np.asarray(norm))), None)

    def release(self) -> None:
        """Drops the norms once the step's results are known."""
        self._of_programs, self._taken, self._known = {}, {}, {}


@functools.cache
def _compile_together(num: int, where: jax.sharding.Sharding) -> Any:
    return _together.lower([jax.ShapeDtypeStruct((), np.float32, sharding=where)] * num).compile()
