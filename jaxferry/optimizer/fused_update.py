"""The update of a unit by the native library: one call for all its parameters, prepared once.

one device:       masters, moments <--> library <-- gradients    library --> compute copy, where the device reads it
several devices:  the same with the share that each device has of the vectors
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.native import FACTORS, HostStep, StepFactors, StepPart
from jaxferry.optimizer.optimizers import HostRule
from jaxferry.optimizer.split_masters import SplitMaster, rests
from jaxferry.optimizer.update_group import OfLayers, UpdateGroup
from jaxferry.partition import Layer, Leaf, Ownership, Piece
from jaxferry.transport import Placement, Vectors, as_numpy, shares_of, updated_vectors


def in_order(layers: Sequence[Layer], ownership: Ownership) -> list[tuple[int, Leaf, list[Piece]]]:
    """A process's trained parameters in the order of a unit's masters, with the layer's number and their pieces."""
    placed = [(number, *own) for number, layer in enumerate(layers) for own in ownership.placed(layer)]
    return sorted(placed, key=lambda found: found[1].index)


def factors_program(rule: HostRule, state: Any, clip_norm: float | None) -> tuple[Callable[..., jax.Array], int]:
    """Returns a function, for a jitted one, of counts, norm and scale to a step's factors; and the number of counts."""
    leaves, structure = jax.tree.flatten(state)
    _, numbers = _moments_and_counts(rule, structure)

    def factors(counts: Sequence[jax.Array], norm: jax.Array, scale: jax.Array) -> jax.Array:
        # No factor depends on moments.
        known: list[Any] = [None] * len(leaves)
        for number, count in zip(numbers, counts, strict=True):
            known[number] = count
        one = jnp.float32(1)
        clip = one if clip_norm is None else jnp.where(norm < clip_norm, one, jnp.float32(clip_norm) / norm)
        found = {"unscale": 1 / scale, "clip": clip, **rule.factors(jax.tree.unflatten(structure, known))}
        return jnp.stack([found[name] for name in FACTORS])

    return factors, len(numbers)


def _moments_and_counts(rule: HostRule, structure: Any) -> tuple[list[list[int]], list[int]]:
    """Where the moments of a state, and all else, which counts steps, are among its leaves."""
    numbered = jax.tree.unflatten(structure, range(structure.num_leaves))
    moments = [jax.tree.leaves(moment) for moment in rule.moments(numbered)]
    of_moments = {number for numbers in moments for number in numbers}
    return moments, [number for number in range(structure.num_leaves) if number not in of_moments]


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

    `layers` are the trained parameters; `decays` is for each master; `gradient_dtypes` are of the vectors of all
    layers. With `writes_in_place`, the compute copy is overwritten where it is: of several devices, in their shares,
    in which it may read gradients too.
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
        self._writes_in_place, self.reads_shares = writes_in_place, writes_in_place and placement.num_devices > 1
        self._copies = [vector for layer in layers for vector in placement.ownership.of(layer).vectors]
        self._gradient_dtypes = list(gradient_dtypes)
        starts = np.cumsum([0, *(len(layer.vectors) for layer in layers)])
        self._parts: list[StepPart] = []
        self._vectors: list[int] = []  # of each part
        self._cuts: list[list[slice]] = []
        # Of each vector, the pieces of masters: the number of the part, the piece, and its place in the joined vector.
        self._pieces: list[list[tuple[int, Piece, int]]] = [[] for _ in self._copies]
        for (number, leaf, pieces), decay in zip(in_order(layers, placement.ownership), decays, strict=True):
            own = pieces if self._writes_in_place else [Piece(0, leaf.offset, 0, leaf.size)]
            self._cuts.append([slice(piece.first, piece.stop) for piece in own])
            for piece in own:
                vector = int(starts[number]) + leaf.vector
                self._pieces[vector].append((len(self._parts), piece, leaf.offset + piece.first))
                self._parts.append(StepPart(len(self._parts), 0, decay))
                self._vectors.append(vector)
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
            for number, array in enumerate(made):
                self._point(prepared.step.copies, number, [array])
            self._run(prepared, norm, scale)
            left = iter(made)
            new = [tuple(next(left) for _ in layer.vectors) for layer in self._layers]
            return updated_vectors(vectors, new, self._placement, self._layers)
        if any(known is not of_layer for known, of_layer in zip(prepared.vectors, vectors, strict=True)):
            # Each layer's vectors of trained parameters are its first ones.
            pairs = zip(vectors, self._layers, strict=True)
            trained = [vector for of_layer, layer in pairs for vector in of_layer[: len(layer.vectors)]]
            for number, vector in enumerate(trained):
                self._point(prepared.step.copies, number, shares_of(vector, self._placement))
            prepared.vectors = list(vectors)
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
        masters = [own.rest if isinstance(own, SplitMaster) else as_numpy(own) for own in unit.masters]
        state = list(map(as_numpy, unit.state))
        moments, counts = [[state[i] for i in numbers] for numbers in self._moments], [state[i] for i in self._counts]
        step = HostStep(
            self._rule.step,
            self._parts,
            self._in_parts(masters, _cut_master),
            [self._in_parts(each, _cut) for each in moments],
            [self._gradient_dtypes[vector] for vector in self._vectors],
            [self._copies[vector].dtype for vector in self._vectors],
            counts,
            self._factors.shared,
        )
        unit.prepared = _Prepared(self, step, counts, [_nothing for _ in self._copies], [()] * len(self._layers))
        return unit.prepared

    def _in_parts(self, arrays: Sequence[np.ndarray], cut: Callable[..., list[np.ndarray]]) -> list[np.ndarray]:
        return [part for own, cuts in zip(arrays, self._cuts, strict=True) for part in cut(own, cuts)]

    def _note_gradient(self, prepared: _Prepared, number: int, vector: jax.Array) -> None:
        """Notes where a gradient is. Later ones are mostly in the same arrays, which only the transport keeps alive."""
        if vector.dtype != self._gradient_dtypes[number]:
            raise ValueError(f"an update takes a gradient of {self._gradient_dtypes[number]}, got {vector.dtype}")
        are_shares = self.reads_shares and vector.sharding != self._placement.host
        shares = shares_of(vector, self._placement) if are_shares else [as_numpy(vector)]
        self._point(prepared.step.gradients, number, shares, not are_shares)
        prepared.arrived[number] = weakref.ref(vector)

    def _point(self, addresses: Any, number: int, shares: Sequence[np.ndarray], is_joined: bool = False) -> None:
        """Sets the addresses of the parts in a vector: in shares of it, or in the joined vector."""
        for part, piece, start in self._pieces[number]:
            share, first = (shares[0], start) if is_joined else (shares[piece.device], piece.start)
            if first + piece.size > share.size:
                raise ValueError(f"an update takes a vector of {first + piece.size} elements, got {share.size}")
            addresses[part] = share.ctypes.data + first * share.itemsize


def _cut(array: np.ndarray, cuts: Sequence[slice]) -> list[np.ndarray]:
    """The parts of a moment; of the scales of its blocks, which several parts never have, all."""
    return [array] if len(cuts) == 1 else [array.reshape(-1)[cut] for cut in cuts]


def _cut_master(array: np.ndarray, cuts: Sequence[slice]) -> list[np.ndarray]:
    """The parts of a master, or of what its compute copy lacks."""
    is_rest = array.dtype == np.uint16
    return rests(array, [cut.stop - cut.start for cut in cuts]) if is_rest else _cut(array, cuts)


@dataclasses.dataclass
class _Prepared:
    """What an update knows of a unit until its arrays are replaced."""

    update: FusedUpdate
    step: HostStep
    counts: list[np.ndarray]
    arrived: list[Callable[[], Any]]
    vectors: list[Vectors]


def _nothing() -> None: ...
