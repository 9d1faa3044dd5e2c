"""The update of a unit by one call into the native library, where the optimizer has a native rule.

    counts, norm, scale --a program, once a step--> factors
    factors, gradient vectors, masters, moments, compute copy --HostStep--> all in place

`update_programs.py` chooses it. JAX's arrays stay where they are and take new values, as pinned memory does.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.native import DTYPES, FACTORS, HostStep, StepFactors, StepPart, is_available
from jaxferry.optimizer.optimizers import FusedTransformation, HostRule
from jaxferry.optimizer.update_group import OfLayers, UpdateGroup
from jaxferry.partition import Layer
from jaxferry.transport import Placement, Vectors, as_numpy, updated_vectors


def fused_rule(optimizer: Any, state: Any, layers: Sequence[Layer], reads: Sequence[bool]) -> HostRule | None:
    """Returns the library's rule for the update of these layers; None if Optax has to do it."""
    rule = optimizer.rule if isinstance(optimizer, FusedTransformation) else None
    if rule is None or not all(reads) or not rule.fits(state):
        return None
    leaves = [leaf for layer in layers for leaf in layer.leaves]
    if not all(leaf.master_dtype == np.float32 and leaf.dtype in DTYPES for leaf in leaves):
        return None
    return rule if is_available("cpu") else None


def clip_factor(norm: jax.Array, clip_norm: float | None) -> jax.Array:
    """Returns the factor that clips gradients of this global norm to `clip_norm`; fp32 scalars."""
    one = jnp.float32(1)
    return one if clip_norm is None else jnp.where(norm < clip_norm, one, jnp.float32(clip_norm) / norm)


def factors_program(rule: HostRule, state: Any, clip_norm: float | None) -> tuple[Callable[..., jax.Array], int]:
    """Returns a function, for a jitted one, of counts, norm and scale to a step's factors; and the number of counts."""
    leaves, structure = jax.tree.flatten(state)
    _, places = _moments_and_counts(rule, structure)

    def factors(counts: Sequence[jax.Array], norm: jax.Array, scale: jax.Array) -> jax.Array:
        # No factor depends on moments.
        known: list[Any] = [None] * len(leaves)
        for place, count in zip(places, counts, strict=True):
            known[place] = count
        found = {
            "unscale": 1 / scale,
            "clip": clip_factor(norm, clip_norm),
            **rule.factors(jax.tree.unflatten(structure, known)),
        }
        return jnp.stack([found[name] for name in FACTORS])

    return factors, len(places)


def _moments_and_counts(rule: HostRule, structure: Any) -> tuple[list[list[int]], list[int]]:
    """Where the moments of a state, and all else, which counts steps, are among its leaves."""
    numbered = jax.tree.unflatten(structure, range(structure.num_leaves))
    moments = [jax.tree.leaves(moment) for moment in rule.moments(numbered)]
    of_moments = {place for places in moments for place in places}
    return moments, [place for place in range(structure.num_leaves) if place not in of_moments]


class Factors:
    """The `shared` factors of a step with `norm` and `scale`, computed once for units with as many steps."""

    def __init__(self, program: Callable[..., Any], num_counts: int) -> None:
        self._program, self.shared = program, StepFactors(num_counts)
        self.norm: Any = None
        self.scale: Any = None

    def compute(self, counts: Sequence[np.ndarray], norm: Any, scale: Any) -> None:
        """Computes them from int32 counts and fp32 scalars; `norm` and `scale` are one object each for a step."""
        self.norm = self.scale = None
        taken = [np.int32(count) for count in counts]
        self.shared.values[:] = np.asarray(self._program(taken, norm, scale))
        self.shared.counts[:] = taken
        self.norm, self.scale = norm, scale


class FusedUpdate:
    """Updates units of one layout by the native library.

    `layers` have this process's elements of the trained parameters; `decays` is for each master; `gradient_dtypes` are
    of the vectors of all layers. With `writes_in_place`, the compute copy is overwritten where it is.
    """

    def __init__(
        self,
        rule: HostRule,
        factors: Factors,
        layers: Sequence[Layer],
        state: Any,
        decays: Sequence[bool],
        gradient_dtypes: Sequence[np.dtype],
        placement: Placement,
        writes_in_place: bool,
    ) -> None:
        self._rule, self._factors, self._layers, self._placement = rule, factors, layers, placement
        self._writes_in_place = writes_in_place
        self._copies = [vector for layer in layers for vector in layer.vectors]
        self._gradients = [(v.size, dtype) for v, dtype in zip(self._copies, gradient_dtypes, strict=True)]
        places = sorted((leaf.index, number, leaf) for number, layer in enumerate(layers) for leaf in layer.leaves)
        starts = np.cumsum([0, *(len(layer.vectors) for layer in layers)])
        self._parts = [
            StepPart(int(starts[number]) + leaf.vector, leaf.offset, decay)
            for (_, number, leaf), decay in zip(places, decays, strict=True)
        ]
        self._moments, self._counts = _moments_and_counts(rule, jax.tree.structure(state))

    def __call__(
        self, unit: UpdateGroup, vectors: OfLayers, gradients: OfLayers, norm: Any, scale: Any, extra: Any = ()
    ) -> OfLayers:
        """See `update_programs.Update`. The arrays of the unit stay, with new content."""
        prepared = unit.prepared
        if prepared is None or prepared.update is not self:
            prepared = self._prepare(unit)
        number = 0
        for of_layer in gradients:
            for vector in of_layer:
                if prepared.arrived[number]() is not vector:
                    self._note_gradient(prepared, number, vector)
                number += 1
        if not self._writes_in_place:
            made = [np.empty(vector.size, vector.dtype) for vector in self._copies]
            prepared.step.copies[:] = [array.ctypes.data for array in made]
            self._run(prepared, norm, scale)
            return self._stored(vectors, made)
        for known, of_layer in zip(prepared.vectors, vectors, strict=True):
            if known is not of_layer:
                self._note_copies(prepared, vectors)
        self._run(prepared, norm, scale)
        return vectors

    def begin_step(self, unit: UpdateGroup, norm: Any, scale: Any) -> None:
        """See `update_programs.Update`."""
        self._factors.compute((unit.prepared or self._prepare(unit)).counts, norm, scale)

    def _run(self, prepared: _Prepared, norm: Any, scale: Any) -> None:
        factors = self._factors
        is_known = factors.norm is norm and factors.scale is scale
        if not (is_known and prepared.step.run()):
            factors.compute(prepared.counts, norm, scale)
            prepared.step.run()

    def _prepare(self, unit: UpdateGroup) -> _Prepared:
        masters, state = (list(map(as_numpy, own)) for own in (unit.masters, unit.state))
        moments, counts = [[state[i] for i in places] for places in self._moments], [state[i] for i in self._counts]
        gradient_dtypes, copy_dtypes = [dtype for _, dtype in self._gradients], [copy.dtype for copy in self._copies]
        step = HostStep(
            self._rule.step, self._parts, masters, moments, gradient_dtypes, copy_dtypes, counts, self._factors.shared
        )
        unit.prepared = _Prepared(self, step, counts, [_nothing for _ in self._gradients], [()] * len(self._layers))
        return unit.prepared

    def _note_gradient(self, prepared: _Prepared, number: int, vector: jax.Array) -> None:
        """Notes where a gradient is. Later ones are mostly in the same arrays, which only the transport keeps alive."""
        if (vector.size, vector.dtype) != self._gradients[number]:
            raise ValueError(
                f"an update takes a gradient of {self._gradients[number]}, got {vector.shape} {vector.dtype}"
            )
        prepared.step.gradients[number] = vector.unsafe_buffer_pointer()
        prepared.arrived[number] = weakref.ref(vector)

    def _note_copies(self, prepared: _Prepared, vectors: Sequence[Vectors]) -> None:
        """Notes where the compute copy is: each layer's vectors of trained parameters are its first ones."""
        pairs = zip(vectors, self._layers, strict=True)
        trained = [vector for of_layer, layer in pairs for vector in of_layer[: len(layer.vectors)]]
        prepared.step.copies[:] = [vector.unsafe_buffer_pointer() for vector in jax.block_until_ready(trained)]
        prepared.vectors = list(vectors)

    def _stored(self, vectors: Sequence[Vectors], made: Sequence[np.ndarray]) -> list[Vectors]:
        """The compute copy with these vectors of trained parameters."""
        left = iter(made)
        new = [tuple(next(left) for _ in layer.vectors) for layer in self._layers]
        return updated_vectors(vectors, new, self._placement, self._layers)


@dataclasses.dataclass
class _Prepared:
    """What an update knows of a unit until its arrays are replaced."""

    update: FusedUpdate
    step: HostStep
    counts: list[np.ndarray]
    arrived: list[Callable[[], Any]]
    vectors: list[Vectors]


def _nothing() -> None: ...
