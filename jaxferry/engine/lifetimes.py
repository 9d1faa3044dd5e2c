"""When each buffer of a step is requested and freed on the device: what a model of its allocator needs.

    instructions --buffers, each with its earliest and latest times--> unsplit_bytes

The times count four for each program: awaited gradients are freed, copies are requested, the program's results and
temporaries are requested, what the program read last is freed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxferry.engine.memory import Transfers
from jaxferry.partition import Derivative
from jaxferry.step import Instruction, Operation, ProgramKey, ProgramKind, StepProgram, Target, Value
from jaxferry.transport import Allocator, Buffer, unsplit_bytes

_AWAITED, _COPIES, _RESULTS, _FREED, _TIMES = range(5)
_SCALAR_BYTES = 1


def unsplit_by_step(
    program: StepProgram,
    temporary_bytes: Mapping[ProgramKey, int],
    ahead: Sequence[int] = (),
    joins_vectors: bool = False,
    kind: Allocator = Allocator.PREALLOCATED,
) -> int:
    """Returns the memory to leave for what XLA's allocator hands out beyond the buffers of a step; see `unsplit_bytes`.

    Arguments as for `memory.footprints`; `joins_vectors`: copies cross the link as whole vectors beside their arrays.
    """
    found = Lifetimes(program, temporary_bytes, ahead, joins_vectors)
    return unsplit_bytes(found.buffers, found.end, kind)


class Lifetimes:
    """The buffers that programs and transfers of one step request; the step ends at the time `end`."""

    def __init__(
        self, program: StepProgram, temporary_bytes: Mapping[ProgramKey, int], ahead: Sequence[int], joins_vectors: bool
    ) -> None:
        self._program, self._parts, self._graph = program, program.partition, program.partition.graph
        self._transfers, self._joins_vectors = Transfers(program, ahead), joins_vectors
        self._num_places = len(program.programs)
        self.end = _TIMES * self._num_places
        self.buffers: list[Buffer] = []
        self._freed = {value: i.place for i in program.programs for value in i.frees}
        self._stays_until, self._fetched_from = dict[Value, int](), dict[Value, int]()
        self._find_moved_values()
        self._add_loads(ahead)
        self._residuals: dict[int, list[tuple[Any, int]]] = {}
        self._cotangents: dict[int, tuple[int, int]] = {}
        for value in (*self._graph.batch, *self._parts.prelude_outputs):
            self._add_value(value, 0)
        if self._parts.prelude_outputs:
            self._add(_SCALAR_BYTES, _RESULTS, self.end)
        for instruction in program.programs:
            self._add_program(instruction, temporary_bytes)

    def _add(self, num_bytes: int, start: int | tuple[int, int], end: int | tuple[int, int]) -> None:
        starts, ends = (time if isinstance(time, tuple) else (time, time) for time in (start, end))
        self.buffers.append(Buffer(num_bytes, starts, ends))

    def _find_moved_values(self) -> None:
        """Finds when values that wait in host memory leave the device, and when they come back."""
        for instruction in self._program.instructions:
            if instruction.operation is Operation.SAVE:
                until = self._transfers.first_waiter.get(instruction.index, self._num_places)
                self._stays_until |= dict.fromkeys(instruction.values, _TIMES * until + _AWAITED)
            elif instruction.operation is Operation.FETCH:
                first = self._transfers.last_program[instruction.index] + 1
                self._fetched_from |= dict.fromkeys(instruction.values, _TIMES * first + _COPIES)

    def _add_value(self, value: int, place: int) -> None:
        """Adds a value that exists from a program on until its last reader, or until the step ends."""
        num_bytes, start = self._graph.held_bytes(value), _TIMES * place + _RESULTS
        end = _TIMES * self._freed[value] + _FREED if value in self._freed else self.end
        self._add(num_bytes, self._returned(value, num_bytes, start), end)

    def _returned(self, value: Value, num_bytes: int, start: int) -> int:
        """Returns since when a value or residual is where its backward reads it; adds it until it leaves before."""
        if value not in self._fetched_from:
            return start
        self._add(num_bytes, start, (start + 1, max(self._stays_until[value], start + 1)))
        return self._fetched_from[value]

    def _add_loads(self, ahead: Sequence[int]) -> None:
        """Adds copies of parameters: as soon as they may be loaded, or when their first reader needs them."""
        first_use: dict[int, int] = {}
        for instruction in self._program.programs:
            for load in instruction.copies:
                if load is not None:
                    first_use.setdefault(load, instruction.place)
        for load, last in self._transfers.last_use.items():
            group = self._program.instructions[load].group
            layer = self._parts.layers[group]
            if group in self._program.reserved:
                for leaf in layer.leaves:
                    self._add(leaf.size * leaf.dtype.itemsize, 0, self.end)
                continue
            first, use = self._transfers.last_program[load] + 1, first_use[load]
            if load in ahead:
                first = self._transfers.ahead_from[load] - self._num_places
            needed = _TIMES * use + _COPIES
            start = (_TIMES * first + _COPIES, needed)
            if self._joins_vectors:
                for vector in layer.vectors:
                    self._add(vector.size * vector.dtype.itemsize, start, needed + 1)
                start = (needed, needed)
            for leaf in layer.leaves:
                self._add(leaf.size * leaf.dtype.itemsize, start, _TIMES * last + _FREED)

    def _add_program(self, instruction: Instruction, temporary_bytes: Mapping[ProgramKey, int]) -> None:
        key, place, segment = instruction.key, instruction.place, self._parts.segments[instruction.segment]
        assert key is not None
        start, end = _TIMES * place + _RESULTS, _TIMES * place + _FREED
        derivative = self._program.derivatives[segment.program]
        for group, target in zip(segment.groups, key.writes, strict=True):
            if key.kind is not ProgramKind.FORWARD and target is Target.DEVICE:
                self._add_gradient(instruction, group, derivative)
        if key.kind is not ProgramKind.BACKWARD:
            for value in (*segment.outputs, *segment.nondiff_outputs):
                self._add_value(value, place)
        if key.kind is ProgramKind.FORWARD:
            self._residuals[instruction.segment] = [
                (aval, self._returned(residual, self._graph.device_bytes(aval), start))
                for residual, aval in zip(instruction.residuals, derivative.saved, strict=True)
            ]
        else:
            self._add_cotangents(instruction)
        self._add(_SCALAR_BYTES, start, self.end)
        self._add(temporary_bytes.get(key, 0), start, end)

    def _add_cotangents(self, instruction: Instruction) -> None:
        """Adds the cotangents that a program makes, in the memory of donated arrays where shapes are the same."""
        segment, place = self._parts.segments[instruction.segment], instruction.place
        start, end = _TIMES * place + _RESULTS, _TIMES * place + _FREED
        avals = self._graph.avals
        donated = self._residuals.pop(instruction.segment, [])
        taken = {v: self._cotangents.pop(v) for v in segment.outputs if v in self._cotangents}
        donated = [*donated, *((avals[v], since) for v, (_, since) in taken.items())]
        for value in segment.inputs:
            shape = (avals[value].shape, avals[value].dtype)
            place_of = next((i for i, (aval, _) in enumerate(donated) if (aval.shape, aval.dtype) == shape), None)
            since = start if place_of is None else donated.pop(place_of)[1]
            if value in self._cotangents:
                # The sum of both takes their place.
                num_bytes, earlier = self._cotangents[value]
                self._add(num_bytes, earlier, end)
                self._add(num_bytes, since, end)
                since = end - 1
            self._cotangents[value] = (self._graph.held_bytes(value), since)
        for aval, since in donated:
            self._add(self._graph.device_bytes(aval), since, end)
        if place == self._num_places - 1:
            for num_bytes, since in self._cotangents.values():
                self._add(num_bytes, since, self.end)

    def _add_gradient(self, instruction: Instruction, group: int, derivative: Derivative) -> None:
        """Adds the gradient of a group until its offload has ended, or its update."""
        start, layer = _TIMES * instruction.place + _RESULTS, self._parts.layers[group]
        stop = self._transfers.gradient_stops.get((instruction.segment, group), self._num_places)
        end = (start + 1, max(_TIMES * stop + _AWAITED, start + 1))
        if derivative.row_gradient_bytes:
            for aval in derivative.row_gradients:
                self._add(self._graph.device_bytes(aval), start, end)
            return
        num_shares = self._graph.num_shares(layer.is_whole)
        leaves = layer.trained.leaves
        for transfer in layer.trained.transfers:
            num_bytes = sum(leaves[i].size * leaves[i].dtype.itemsize for i in transfer.leaves)
            self._add(-(-num_bytes // num_shares), start, (start + 1, start + 1) if self._joins_vectors else end)
        for vector in layer.trained.vectors if self._joins_vectors else ():
            self._add(-(-vector.size * vector.dtype.itemsize // num_shares), start, end)
