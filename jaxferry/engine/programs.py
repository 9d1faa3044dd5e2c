"""The compiled programs of a partition: forward and backward for each distinct segment, or its evaluation.

The shadow model determines which programs exist: where each reads parameters and writes gradients. The last segment's
forward and backward follow each other, so they are one program, `loss`, which stores nothing in between. Donating a
dropped layer's buffers to its backward, for the gradients, does not pay: XLA first copies the weights elsewhere, which
costs the same memory and more time than it saves.
"""

from __future__ import annotations

import concurrent.futures
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp

from jaxferry.engine.program_functions import ProgramTracer
from jaxferry.native import check_donated, library, targets
from jaxferry.partition import Derivative, ForwardPartition, Partition, Segment, differentiate, evaluate
from jaxferry.processes import check_same
from jaxferry.step import ProgramKey
from jaxferry.transport import Placement, begin_shared, finished, in_background

Compiled = Callable[..., Any]


class Programs:
    """The programs that the executor runs, compiled in parallel if the machine has the cores.

    Attributes:
      derivatives: for each program number, the values that its backward reads and keeps; empty for evaluations.
      is_scaled: whether the loss is scaled before its backward, by an additional argument of the loss program.
      prelude: `batch leaves -> prelude values, [flag]`, or None; compiled beside the first programs.
      temporary_bytes: device memory that each program needs beside its arguments and results.
    """

    def __init__(
        self,
        partition: ForwardPartition,
        derivatives: dict[int, Derivative],
        placement: Placement,
        native: bool = False,
        is_scaled: bool = False,
        held: dict[Hashable, Compiled] | None = None,
    ) -> None:
        self._held = {} if held is None else held
        self.is_scaled, self._has_others = is_scaled, placement.num_processes > 1
        self._platform: str = placement.platform
        self._devices: Any = placement.device.addressable_devices
        self.derivatives = derivatives
        self.prelude = make_prelude(partition, placement)
        self.temporary_bytes: dict[ProgramKey, int] = {}
        self._native = native
        self._tracer = ProgramTracer(partition, derivatives, placement, native, is_scaled)
        self._prelude: Future[None] | None = None
        self._compiled: dict[ProgramKey, Any] = {}
        self._lowered: dict[ProgramKey, Any] = {}

    def run_prelude(self, leaves: Sequence[Any], is_awaited: bool) -> tuple[list[Any], list[jax.Array]]:
        """Runs what depends on the batch alone, before the first layer; with `is_awaited`, its errors surface here.

        Returns:
          The prelude's values, and a flag that is ready once it has ended, or fails with it; none without a prelude.
        """
        if self._prelude is not None and not self._prelude.done():
            concurrent.futures.wait([self._prelude])  # the call finds what it has compiled
        made: tuple[list[Any], list[jax.Array]] = ([], []) if self.prelude is None else self.prelude(leaves)
        return jax.block_until_ready(made) if is_awaited else made

    def lowered(self, key: ProgramKey) -> Any:
        """Returns the program of a key before XLA compiles it (`jax.stages.Lowered`)."""
        if key not in self._lowered:
            lowered = self._lowered[key] = lower_traced(self.traced(key))
            if self._native:
                check_donated(lowered, f"the {key.kind.value} of program {key.program}")
        return self._lowered[key]

    def traced(self, key: ProgramKey) -> Any:
        """Returns the program of a key before it is lowered for a platform (`jax.stages.Traced`)."""
        return self._tracer.trace(key)

    def keep(self, keys: Iterable[ProgramKey]) -> None:
        """Drops all programs except these, and holds these for later steps."""
        kept = set(keys)
        self._lowered = {}
        self._compiled = {key: program for key, program in self._compiled.items() if key in kept}
        contents = {key: self._tracer.content(key) for key in self._compiled}
        self._held |= {content: self._compiled[key] for key, content in contents.items() if content is not None}

    def require(self, keys: Iterable[ProgramKey], meanwhile: Callable[[], object] | None = None) -> None:
        """Compiles the programs that are not compiled yet; if there are any, calls `meanwhile` beside that."""
        missing = {key: self._tracer.content(key) for key in keys if key not in self._compiled}
        if self._has_others:
            check_same("their programs", "".join(self.lowered(key).as_text() for key in missing))
        begun = begin_shared(missing, self.lowered)
        if begun:
            self._begin_prelude()
        if begun and meanwhile is not None:
            meanwhile()
        made = finished(begun)
        self._compiled |= made
        for key, program in made.items():
            stats = program.memory_analysis()
            own = 0 if stats is None else stats.temp_size_in_bytes
            # An exchange may run before a program that reads host memory, and ends before it.
            self.temporary_bytes[key] = max(own, self._tracer.exchanged_bytes(key))
        if made and self._native and self._platform != "cpu":
            for product in targets.PRODUCTS:
                for device in self._devices:
                    library(self._platform).plan_product(device.local_hardware_id, *product)

    def _begin_prelude(self) -> None:
        """Lets a thread compile the prelude; what fails there fails in `run_prelude`."""
        prelude: Any = self.prelude
        if prelude is not None and self._prelude is None:
            self._prelude = in_background(lambda: prelude.trace(self._tracer.batch()).lower().compile())

    def temporary_bytes_of(self, keys: Iterable[ProgramKey]) -> Mapping[ProgramKey, int]:
        """Compiles these programs and returns `temporary_bytes`."""
        self.require(keys)
        return self.temporary_bytes

    def bytes_of(self, key: ProgramKey) -> int:
        """The device memory that a compiled program needs by itself: arguments, results and temporaries."""
        stats = self._compiled[key].memory_analysis()
        if stats is None:
            return 0
        return int(stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes)

    def __getitem__(self, key: ProgramKey) -> Compiled:
        """Returns the compiled program.

        `weights` are the parameters of each group, or its vectors in host memory if the key reads those:

            evaluation (weights, inputs, nondiff_inputs) -> outputs, nondiff_outputs
            forward   (weights, inputs, nondiff_inputs) -> outputs, nondiff_outputs, saved, is_finite
            loss      ([destinations,] weights, inputs, nondiff_inputs [, scale])
                      -> gradients, (outputs, nondiff_outputs, is_finite, input cotangents), squared norms
            backward  ([destinations,] weights, inputs, nondiff_inputs, outputs, saved, cotangents)
                      -> gradients, input cotangents, squared norms

        Gradients and norms are lists, one element for each group. Small gradients are joined (`Layer.join_small`),
        unless some are rows of lookups. A program that writes host memory takes the vectors to write as
        `destinations`, and returns them instead of gradients. The weights of a group that a backward does not read are
        an empty list. A norm is None unless all gradients of the group were whole on the device.

        A program that stores takes `destinations` too, and returns them with the gradients that it copies there, as a
        pair in place of gradients. One that arrives has a last argument, the vectors that the load of its weights
        reads. It is donated the weights, and returns these and everything else.
        """
        program: Compiled = self._compiled[key]
        return program

    def gradients_of(self, key: ProgramKey) -> Any:
        """The shapes of the gradients that a compiled program returns, by group."""
        made = self._compiled[key].out_info
        return made[1][0] if key.arrives else made[0]

    @property
    def num_executables(self) -> int:
        """The number of programs that XLA compiled for a step."""
        return len(self._compiled) + (self.prelude is not None)


def derivatives_of(
    partition: Partition, remat: Any = None, known: Mapping[int, Derivative] | None = None
) -> dict[int, Derivative]:
    """Differentiates each distinct segment that is not `known`; `remat` as in `differentiate`, the same for all."""
    first: dict[int, Segment] = {}
    for segment in partition.segments:
        if known is None or segment.program not in known:
            first.setdefault(segment.program, segment)
    return {program: differentiate(partition.graph, segment, remat) for program, segment in first.items()}


def lower_traced(traced: Any, platform: str | None = None) -> Any:
    """Lowers a traced program for a platform (`"cuda"`), by default that of its arguments."""
    with warnings.catch_warnings():
        # XLA chooses which donated buffers fit a result; the others are freed after the call.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        return traced.lower() if platform is None else traced.lower(lowering_platforms=(platform,))


def make_prelude(partition: ForwardPartition, placement: Placement) -> Compiled | None:
    """Returns the jitted prelude, or None if there is nothing to run."""
    if not partition.prelude_outputs:
        return None
    graph = partition.graph

    def prelude(leaves: Sequence[Any]) -> tuple[list[Any], list[jax.Array]]:
        values = {**dict(zip(graph.batch, leaves, strict=True)), **graph.constants}
        evaluate(partition.prelude, values)
        return [values[value] for value in partition.prelude_outputs], [jnp.array(True)]

    shardings: Any = placement.device
    if placement.num_devices > 1:
        shardings = ([placement.of(graph, graph.avals[value]) for value in partition.prelude_outputs], placement.device)
    return jax.jit(prelude, out_shardings=shardings)
