"""Arithmetic on gradients: norms, sums over uses on the device, loss scaling.

    one device:       arrays of the parameters' shapes
    several devices:  shares of them, flat, where the update is element-wise; gathered otherwise

Loss scaling prevents underflow of small 16-bit gradients. The factor multiplies the loss before the backward and
divides the gradients in the update, in fp32. If it is too large, gradients become infinite: the update is then
skipped, exactly, and the factor halved (Micikevicius et al., Mixed Precision Training, 2018, section 3.2).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.engine.program_functions import squared_norm
from jaxferry.engine.streamed_updates import Uses
from jaxferry.native import as_stored
from jaxferry.partition import Gradient, Layer, Leaf, RowGradient, SharedLayer
from jaxferry.settings import ThreadPool
from jaxferry.transport import Placement, Vectors, added, split

SquaredNorm = Future[jax.Array] | jax.Array  # a scalar in host memory that a thread computes, or one on the device
_norm_of_vectors = jax.jit(lambda vectors: squared_norm(jax.device_put(vectors, jax.memory.Space.Device)))
_together = jax.jit(jnp.stack)


class Norms:
    """Computes squared norms of gradients.

    With `on_host`, every norm is computed from the vectors in host memory. This gives every plan the same bits, as
    needed if the norm changes the update. Else a program's own norm is used if it covers the whole gradient.
    """

    def __init__(self, placement: Placement, on_host: bool) -> None:
        self._placement, self._on_host = placement, on_host
        self._thread = ThreadPool(1, "jaxferry norms")
        self.none = jax.device_put(np.float32(0), placement.host_compute)
        """The argument of an update that needs no norm."""

    def compile(self, num_uses: Collection[int]) -> None:
        """Compiles what collects the norms that programs return, so that the first step need not."""
        place, num = self._placement, sum(uses == 1 for uses in num_uses)
        if num > 1 and not (self._on_host or place.is_cpu or place.num_devices > 1):
            # The step collects them under this thread's settings, which are not those of a trace.
            self._thread.submit(_compile_together, num, place.device).result()

    def of(self, gather: Callable[[], Vectors], known: jax.Array | None) -> SquaredNorm:
        """Returns the squared norm of a whole gradient: `known` by its program, or of what `gather` returns."""
        if known is None or self._on_host:
            # The next step may write into the gradient's memory once the norm is known.
            return self._thread.submit(lambda: jax.block_until_ready(_norm_of_vectors(gather())))
        return known

    def values(self, squared: Mapping[int, SquaredNorm], layers: Sequence[Layer]) -> dict[int, Any]:
        """Returns the squared norms of whole gradients by group.

        Several processes add up theirs, so each must call this.
        """
        found = {group: norm.result() if isinstance(norm, Future) else norm for group, norm in squared.items()}
        place = self._placement
        there = [group for group, norm in squared.items() if not isinstance(norm, Future)]
        if len(there) > 1 and place.num_devices == 1 and not place.is_cpu:
            # One copy in place of one for each.
            found |= zip(there, np.asarray(_together([found[group] for group in there])), strict=True)
        own = [g for g, norm in squared.items() if isinstance(norm, Future) and not layers[g].is_whole]
        if own and place.num_processes > 1:
            table = np.zeros((place.num_processes, len(own)), np.float32)
            table[place.process] = [found[group] for group in own]
            found |= zip(own, place.merged(table).sum(axis=0), strict=True)
        return found

    def total(self, squared: Sequence[Any], scale: np.floating) -> jax.Array:
        """Returns the global norm of the mean gradient, an fp32 scalar in host memory."""
        with np.errstate(all="ignore"):  # as XLA computes it: what is not finite stays so
            norm = np.sqrt(sum(jax.device_get(list(squared)), start=np.float32(0))) / np.float32(scale)
        return jax.device_put(np.float32(norm), self._placement.host_compute)


class GradientNorms:
    """The squared norms of one step's gradients, by parameter group."""

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
        """Starts computing the norm of a group's gradient; with `is_whole`, the program's own norm covers it."""
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


def have_rows(uses: Sequence[Sequence[Any]]) -> bool:
    """Whether some gradients are rows of lookups."""
    return any(isinstance(gradient, RowGradient) for use in uses for gradient in use)


def total_of(layer: Layer, uses: Uses, adds_rows: bool = False) -> list[jax.Array]:
    """The sum over all uses, in the master dtypes, one array for each leaf; zeros without any.

    Of a layer that devices share, they are flat, as of `SharedLayer.filled_up`. With `adds_rows`, rows of the first use
    are added in the master dtypes as well, as the host does over micro-batches.
    """
    zeros = [jnp.zeros(leaf.shape, leaf.master_dtype) for leaf in layer.leaves]
    total = None
    for use in uses:
        gradients = _of_shares(layer, use, zeros, adds_rows) if isinstance(layer, SharedLayer) else split(layer, use)
        if total is None:
            total = [_widened(g, z, adds_rows) for g, z in zip(gradients, zeros, strict=True)]
        else:
            total = [added(a, g) for a, g in zip(total, gradients, strict=True)]
    if total is None and isinstance(layer, SharedLayer):
        return layer.filled_up(zeros)
    return zeros if total is None else total


def _of_shares(
    layer: SharedLayer, use: Sequence[Gradient], zeros: Sequence[jax.Array], adds_rows: bool
) -> list[Gradient]:
    """The gradients of a use as devices share them; those with rows are whole until now."""
    if not have_rows([use]):
        return [*layer.split_shares([array for array in use if not isinstance(array, RowGradient)])]
    return [*layer.filled_up([_widened(g, z, adds_rows) for g, z in zip(use, zeros, strict=True)])]


def _widened(gradient: Gradient, zeros: jax.Array, adds_rows: bool) -> jax.Array:
    if not isinstance(gradient, RowGradient):
        return gradient.astype(zeros.dtype)
    return gradient.onto(zeros) if adds_rows else as_stored(gradient.dense()).astype(zeros.dtype)


def gathered(array: jax.Array, leaf: Leaf) -> jax.Array:
    """A parameter, or its gradient, of which devices may have shares; gathers them."""
    return array if array.shape == leaf.shape else array[: leaf.size].reshape(leaf.shape)


LARGEST = 2.0**24
GROWTH_STEPS = 2000  # the number of consecutive updates with finite gradients after which the factor is doubled


@dataclasses.dataclass(frozen=True)
class LossScale:
    """The factor, and the number of updates since its last change.

    Dynamic factors are powers of two, so scaling is exact.
    """

    value: float = 2.0**16
    is_dynamic: bool = True
    num_finite: int = 0

    @property
    def is_least(self) -> bool:
        """Whether the factor is at its minimum."""
        return self.value <= 1

    def after(self, is_finite: bool) -> LossScale:
        """Returns the factor for the next update."""
        if not self.is_dynamic:
            return self
        if not is_finite:
            return LossScale(max(self.value / 2, 1.0))
        if self.num_finite + 1 < GROWTH_STEPS:
            return dataclasses.replace(self, num_finite=self.num_finite + 1)
        return LossScale(min(self.value * 2, max(self.value, LARGEST)))


UNSCALED = LossScale(1.0, is_dynamic=False)  # the identity: no scaling
