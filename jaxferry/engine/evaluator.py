"""Runs the forward alone, layer after layer, with at most two layers' parameters on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxferry.engine.interrupts import deferred_interrupts
from jaxferry.engine.placement import Placement
from jaxferry.engine.programs import compile_evaluation, make_prelude
from jaxferry.engine.state import TrainState
from jaxferry.engine.transfers import DeviceLayer, Transport
from jaxferry.partition import Partition


class Evaluator:
    """Evaluates the loss of one partition without derivatives.

    Args:
      partition: the segments.
      placement: where arrays live.
      transport: what loads the layers.
    """

    def __init__(self, partition: Partition, placement: Placement, transport: Transport) -> None:
        self.partition, self._transfers = partition, transport
        self._placement = placement
        self._programs = compile_evaluation(partition, placement)
        self._prelude = make_prelude(partition, placement)
        self._last_reader = {v: i for i, s in enumerate(partition.segments) for v in (*s.inputs, *s.passive)}

    def run(self, state: TrainState, batch: Sequence[Any]) -> tuple[jax.Array, list[Any]]:
        """The loss and the flattened auxiliary outputs; `state` must be arranged in the partition's layers."""
        partition, transfers = self.partition, self._transfers
        leaves = [jax.device_put(leaf, self._placement.device) for leaf in batch]
        values = {**partition.graph.constants, **dict(zip(partition.graph.batch, leaves, strict=True))}
        values = {number: jax.device_put(value, self._placement.device) for number, value in values.items()}
        if self._prelude is not None:
            values |= zip(partition.prelude_outputs, self._prelude(leaves), strict=True)
        layers = [segment.layer for segment in partition.segments]
        held: dict[int, DeviceLayer] = {}
        try:
            for place, segment in enumerate(partition.segments):
                # An interrupt comes between two segments, when every copy is known.
                with deferred_interrupts():
                    for layer in layers[place : place + 2]:
                        if layer not in held:
                            held[layer] = state.resident.get(layer) or transfers.load(layer, state.vectors[layer])
                    outputs, extras = self._programs[segment.program](
                        held[segment.layer].parameters(),
                        [values[v] for v in segment.inputs],
                        [values[v] for v in segment.passive],
                    )
                    values |= zip((*segment.outputs, *segment.extras), (*outputs, *extras), strict=True)
                    if segment.layer not in layers[place + 1 : place + 2]:
                        self._drop(held.pop(segment.layer), state)
                    for value in {*segment.inputs, *segment.passive}:
                        if self._last_reader[value] == place and value not in partition.aux:
                            values.pop(value, None)
        finally:
            with deferred_interrupts():
                for done in held.values():
                    self._drop(done, state)
        aux = [values[atom] if isinstance(atom, int) else atom.val for atom in partition.aux]
        return values[partition.loss], aux

    def _drop(self, held: DeviceLayer, state: TrainState) -> None:
        if held.layer not in state.resident:
            self._transfers.drop(held)
