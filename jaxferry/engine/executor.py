"""Runs a training step.

    pinned host vectors --load--> device --forward--> values, residuals --loss, backward--> gradient
           ^                                                                                   | store
           +---- update (CPU backend): clip, Optax, cast <------------------ host gradient <---+

Python only issues work: loads, programs, stores and updates are asynchronous, and an update starts by itself when its
gradient has arrived. The order is the script's; every device buffer is deleted as soon as its last reader is issued.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.engine.host_optimizer import HostOptimizer, Unit
from jaxferry.engine.interrupts import deferred_interrupts
from jaxferry.engine.placement import Placement
from jaxferry.engine.programs import Programs, squared_norm
from jaxferry.engine.script import Event
from jaxferry.engine.shadow import Kind, Source, Target
from jaxferry.engine.state import TrainState, to_pinned
from jaxferry.engine.transfers import DeviceLayer, HostGradient, Transport
from jaxferry.partition import Partition, Segment


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a step gives back.

    Attributes:
      loss: scalar on the device.
      aux: the auxiliary outputs, flattened.
      grad_norm: global norm of the gradients before clipping, fp32 scalar in host memory.
      is_applied: whether the state was updated; it is not if the loss (or, where that is to be skipped, a gradient) is
        not finite.
      finite: for each segment, whether its outputs are finite; boolean scalars on the device.
      device_param_bytes_peak: the most bytes of parameters that were on the device at a time.
    """

    loss: jax.Array
    aux: list[Any]
    grad_norm: jax.Array
    is_applied: bool
    finite: list[jax.Array]
    device_param_bytes_peak: int


@dataclasses.dataclass
class _Flight:
    """What is alive within one step."""

    values: dict[int, Any]
    held: dict[int, DeviceLayer]
    saved: dict[int, list[Any]] = dataclasses.field(default_factory=dict)
    cotangents: dict[int, jax.Array] = dataclasses.field(default_factory=dict)
    gradients: dict[int, HostGradient] = dataclasses.field(default_factory=dict)
    landing: collections.deque[int] = dataclasses.field(default_factory=collections.deque)
    arrived: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    norms: dict[int, jax.Array | None] = dataclasses.field(default_factory=dict)
    finite: list[jax.Array] = dataclasses.field(default_factory=list)


class Executor:
    """Steps of one partition under one assignment of modes.

    Args:
      partition: the segments.
      programs: their compiled programs.
      script: the events of a step.
      resident: layers whose device copy outlives the step.
      optimizer: the host optimizer.
      placement: where arrays live.
      transport: what moves layers and gradients.
      loads_first: whether the first forward waits for all loads (the plan's `loads: "bulk"`).
      updates_last: whether updates wait for the last gradient: for the global norm, or by the plan's wish.
      skip_nonfinite: whether a step is skipped whose loss or gradients are not finite; its updates wait for the last
        gradient likewise.
    """

    def __init__(
        self,
        partition: Partition,
        programs: Programs,
        script: Sequence[Event],
        resident: Iterable[int],
        optimizer: HostOptimizer,
        placement: Placement,
        transport: Transport,
        loads_first: bool = False,
        updates_last: bool = False,
        skip_nonfinite: bool = False,
    ) -> None:
        self.partition, self.programs = partition, programs
        self._script, self._resident = list(script), frozenset(resident)
        self._optimizer, self._placement = optimizer, placement
        self._skip_nonfinite = skip_nonfinite
        self._loads_first, self._updates_last = loads_first, updates_last or skip_nonfinite
        self._transfers = transport
        self._num_uses = [sum(s.layer == i for s in partition.segments) for i in range(len(partition.layers))]
        self._constants = {n: jax.device_put(c, placement.device) for n, c in partition.graph.constants.items()}
        self._add = jax.jit(jnp.add, donate_argnums=0)
        self._norm_of = jax.jit(lambda vectors: squared_norm(jax.device_put(vectors, jax.memory.Space.Device)))
        self._total = jax.jit(lambda norms: jnp.sqrt(sum(norms, start=jnp.float32(0))))

    def step(self, state: TrainState, batch: Sequence[Any]) -> StepResult:
        """Issues one step, which updates `state`; the results may still be on their way.

        Args:
          state: arranged in the partition's layers.
          batch: the leaves of the loss function's further arguments, on any memory of the device.
        """
        flight = self._begin(state, batch)
        self._transfers.reset_peak()
        try:
            for event in self._script:
                if event.kind is Kind.FORWARD:
                    self._run(event, state, flight)
            with deferred_interrupts():
                return self._finish(state, flight)
        finally:
            self._release(state, flight)

    def compile_updates(self, state: TrainState) -> None:
        """Compiles the update of every unit ahead of the first step."""
        self._optimizer.compile_updates(state.units, state.layers, [uses > 0 for uses in self._num_uses])

    def _begin(self, state: TrainState, batch: Sequence[Any]) -> _Flight:
        graph = self.partition.graph
        leaves = [jax.device_put(leaf, self._placement.device) for leaf in batch]
        values = {**self._constants, **dict(zip(graph.batch, leaves, strict=True))}
        if self.programs.prelude is not None:
            values |= zip(self.partition.prelude_outputs, self.programs.prelude(leaves), strict=True)
        for layer in state.resident.keys() ^ self._resident:
            if layer in state.resident:
                self._transfers.drop(state.resident.pop(layer))
            else:
                state.resident[layer] = self._transfers.load(layer, state.vectors[layer])
        return _Flight(values, dict(state.resident))

    def _finish(self, state: TrainState, flight: _Flight) -> StepResult:
        """Everything from the first gradient on: once an update is issued, all of them must be."""
        pending = {layer: unit for unit in state.units for layer in unit.layers}
        complete: list[int] = []
        is_finite = None
        no_norm = jnp.float32(0)
        updates_last = self._updates_last or self._optimizer.is_joint
        is_updating = False
        try:
            for place, event in enumerate(self._script):
                if event.kind is Kind.FORWARD:
                    continue
                self._run(event, state, flight)
                is_last = place == len(self._script) - 1
                complete += self._landed(flight, 0 if is_last else self._transfers.lag)
                # The first backward is issued before the loss is looked at, so the device has work meanwhile.
                if is_finite is None and (event.kind is Kind.BACKWARD or is_last):
                    is_finite = bool(np.isfinite(np.asarray(flight.values[self.partition.loss])))
                while is_finite and complete and not updates_last:
                    is_updating = True
                    self._update(pending.pop(complete.pop(0)), state, flight, no_norm)
            norm = self._total([flight.norms[layer] for layer in sorted(flight.norms)])
            if self._skip_nonfinite:
                is_finite = is_finite and bool(np.isfinite(np.asarray(norm)))
            # The next forward needs the first layers first.
            for unit in _distinct(pending[layer] for layer in sorted(pending)) if is_finite else ():
                is_updating = True
                self._update(unit, state, flight, norm)
            # A step that is skipped on purpose counts as well: the data goes on.
            state.step += is_finite or self._skip_nonfinite
        except Exception as error:
            if is_updating:
                state.damage = f"step {state.step} failed: {error}"
            raise
        partition, values = self.partition, flight.values
        aux = [values[atom] if isinstance(atom, int) else atom.val for atom in partition.aux]
        peak = self._transfers.peak_device_bytes
        return StepResult(values[partition.loss], aux, norm, bool(is_finite), flight.finite, peak)

    def _run(self, event: Event, state: TrainState, flight: _Flight) -> None:
        """Issues the loads of one event, its program, and everything that ends with it."""
        for layer in event.loads:
            flight.held[layer] = self._transfers.load(layer, state.vectors[layer])
        if self._loads_first and event is self._script[0]:
            jax.block_until_ready([held.parameters() for held in flight.held.values()])
        segment, values = self.partition.segments[event.segment], flight.values
        if event.kind is Kind.BACKWARD:
            self._backward(event, state, flight)
        else:
            arguments = (
                self._weights(event, segment.layer, state, flight),
                [values[v] for v in segment.inputs],
                [values[v] for v in segment.passive],
            )
            if event.kind is Kind.FORWARD:
                outputs, extras, saved, finite = self.programs[event.use](*arguments)
                flight.saved[event.segment] = saved
            else:
                destinations = self._destinations(event, segment.layer, flight)
                gradients, rest, norm = self.programs[event.use](*destinations, *arguments)
                outputs, extras, finite, cotangents = rest
                self._receive(event, segment, flight, gradients, cotangents, norm)
            values |= zip((*segment.outputs, *segment.extras), (*outputs, *extras), strict=True)
            flight.finite.append(finite)
        for layer in event.drops:
            self._transfers.drop(flight.held.pop(layer))
        for value in event.frees:
            values.pop(value).delete()

    def _weights(self, event: Event, layer: int, state: TrainState, flight: _Flight) -> Sequence[jax.Array]:
        """What a program reads its layer's parameters from."""
        return list(state.vectors[layer]) if event.use.reads is Source.HOST else flight.held[layer].parameters()

    def _destinations(self, event: Event, layer: int, flight: _Flight) -> list[Sequence[jax.Array]]:
        """The vectors that a program writes its gradient into, if it does."""
        if event.use.writes is Target.DEVICE:
            return []
        return [list(self._transfers.destinations(layer, flight.gradients.get(layer)))]

    def _backward(self, event: Event, state: TrainState, flight: _Flight) -> None:
        segment, values = self.partition.segments[event.segment], flight.values
        derivative = self.programs.derivatives[segment.program]
        gradients, cotangents, norm = self.programs[event.use](
            *self._destinations(event, segment.layer, flight),
            self._weights(event, segment.layer, state, flight) if derivative.reads_weights else [],
            [values[segment.inputs[i]] for i in derivative.inputs_read],
            [values[segment.passive[i]] for i in derivative.passive_read],
            [values[segment.outputs[i]] for i in derivative.outputs_read],
            flight.saved.pop(event.segment),
            [flight.cotangents.pop(v) if v in flight.cotangents else self._zeros(v) for v in segment.outputs],
        )
        self._receive(event, segment, flight, gradients, cotangents, norm)

    def _receive(
        self, event: Event, segment: Segment, flight: _Flight, gradients: Any, cotangents: Any, norm: jax.Array | None
    ) -> None:
        """Sends gradients to the host if they are not there, and adds cotangents to those from later segments."""
        for value, cotangent in zip(segment.inputs, cotangents, strict=True):
            known = flight.cotangents.get(value)
            flight.cotangents[value] = cotangent if known is None else self._add(known, cotangent)
        layer = segment.layer
        if event.use.writes is Target.DEVICE:
            flight.gradients[layer] = self._transfers.store(layer, gradients, flight.gradients.get(layer))
        else:
            flight.gradients[layer] = self._transfers.written(gradients)
        flight.arrived[layer] += 1
        flight.norms[layer] = norm
        flight.landing.append(layer)

    def _zeros(self, value: int) -> jax.Array:
        """The cotangent of an output that only the caller reads."""
        aval = self.partition.graph.avals[value]
        return jnp.zeros(aval.shape, aval.dtype, device=self._placement.device)

    def _landed(self, flight: _Flight, lag: int) -> list[int]:
        """Gathers gradients but for the last `lag` ones; returns the layers whose whole gradient is known then."""
        complete = []
        while len(flight.landing) > lag:
            layer = flight.landing.popleft()
            self._transfers.gather(layer, flight.gradients[layer])
            if flight.arrived[layer] == self._num_uses[layer] and layer not in flight.landing:
                flight.norms[layer] = self._squared_norm(layer, flight)
                complete.append(layer)
        return complete

    def _squared_norm(self, layer: int, flight: _Flight) -> jax.Array:
        """Of the layer's whole gradient, which may be whole on the host only: lookups, several uses, products."""
        norm = flight.norms[layer]
        if self._num_uses[layer] == 1 and norm is not None:
            return jax.device_put(norm, self._placement.host_compute)
        return self._norm_of(self._transfers.gather(layer, flight.gradients[layer]))

    def _update(self, unit: Unit, state: TrainState, flight: _Flight, norm: jax.Array) -> None:
        """Issues the update of a unit; what it reads may still be on its way."""
        gradients = [
            self._transfers.gather(layer, flight.gradients.pop(layer)) if layer in flight.gradients else ()
            for layer in unit.layers
        ]
        vectors = [state.vectors[layer] if self._placement.is_cpu else () for layer in unit.layers]
        program = unit.programs[tuple(bool(used) for used in gradients)]
        scale = jnp.float32(1)
        unit.masters, unit.state, packed = program(unit.masters, unit.state, vectors, gradients, norm, scale)
        for layer, vector, used in zip(unit.layers, packed, gradients, strict=True):
            state.vectors[layer] = to_pinned(vector, self._placement)
            self._transfers.recycle(layer, used)
            if layer in state.resident:
                self._transfers.drop(state.resident.pop(layer))
                state.resident[layer] = self._transfers.load(layer, state.vectors[layer])

    def _release(self, state: TrainState, flight: _Flight) -> None:
        """Frees what an exception left behind."""
        while flight.landing:
            layer = flight.landing.popleft()
            if layer in flight.gradients:
                self._transfers.gather(layer, flight.gradients[layer])
        for layer in list(flight.held):
            if layer not in self._resident:
                self._transfers.drop(flight.held.pop(layer))
        self._transfers.abandon(state.resident.values())


def _distinct(units: Iterable[Unit]) -> list[Unit]:
    return list({id(unit): unit for unit in units}.values())
