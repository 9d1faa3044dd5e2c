"""Replays a step program with the sizes of its compiled programs: which buffers are on the device while each runs.

It walks through the instructions as the executor does, with transfers at their worst: a load has ended as soon as it
may, a gradient leaves the device only when something waits for that. It shares no code with `jaxferry.engine.memory`:
all sizes are those of compiled results, never those of the partition.
"""

import collections
import dataclasses

from jaxferry.step import Lane, Operation, ProgramKind
from native.compiled_programs import device_bytes


@dataclasses.dataclass(frozen=True)
class Moment:
    """Device memory in use while a program runs, in bytes.

    Attributes:
      copies: parameters.
      gradients: gradients, the program's own included.
      values: batch, constants, values between segments, residuals, cotangents, and scalars; results in the memory of
        donated arguments count once.
      total: all of these and temporaries, by XLA's own sums.
    """

    copies: int
    gradients: int
    values: int
    total: int


def replay(program, compiled, load_programs, given_bytes):
    """Returns the moment of each program of a step, in order.

    Args:
      program: the step program, without activations that wait in host memory.
      compiled: `CompiledProgram` by program key.
      load_programs: by group, the compiled program that loads it.
      given_bytes: by value, the bytes that are on the device before the first program: batch, constants, prelude.
    """
    return _Replay(program, compiled, load_programs, given_bytes).run()


class _Replay:
    def __init__(self, program, compiled, load_programs, given_bytes):
        self._program, self._compiled = program, compiled
        self._copy_bytes = {group: device_bytes(load.results) for group, load in load_programs.items()}
        self._layouts = {group: layer.layout for group, layer in enumerate(program.partition.layers)}
        self._live = {("values", value): size for value, size in given_bytes.items()}
        self._live |= {("copies", "resident", group): self._copy_bytes[group] for group in program.resident}
        self._live |= {("copies", "reserved", group): self._copy_bytes[group] for group in program.reserved}
        self._free = collections.defaultdict(list)
        self._ended = set()
        self._queues = {lane: collections.deque() for lane in Lane}
        for instruction in program.instructions:
            self._queues[instruction.task.lane].append(instruction.index)

    def run(self):
        moments = []
        self._load_early()
        for instruction in (i for i in self._program.instructions if i.task.lane is Lane.GPU):
            for earlier in instruction.task.after:
                self._end(earlier)
            if instruction.key is not None:
                moments.append(self._run_program(instruction))
            self._queues[Lane.GPU].popleft()
            self._ended.add(instruction.index)
            self._load_early()
        return moments

    def _end(self, index):
        """Ends a task, with all that it waits for and all earlier ones of its lane."""
        lane = self._program.instructions[index].task.lane
        while index not in self._ended:
            assert lane is not Lane.GPU, "a program waits for a later one"
            following = self._queues[lane].popleft()
            for earlier in self._program.instructions[following].task.after:
                self._end(earlier)
            self._transfer(self._program.instructions[following])
            self._ended.add(following)

    def _load_early(self):
        """Runs every load that does not wait for a gradient to leave, nor for a later program."""
        queue = self._queues[Lane.H2D]
        while queue and all(earlier in self._ended for earlier in self._program.instructions[queue[0]].task.after):
            self._end(queue[0])

    def _transfer(self, instruction):
        if instruction.operation is Operation.LOAD:
            free, reserved = self._free[self._layouts[instruction.group]], ("copies", "reserved", instruction.group)
            if reserved in self._live:
                del self._live[reserved]
            elif not free:
                for buffers in self._free.values():
                    buffers.clear()
                self._live = {name: size for name, size in self._live.items() if name[1] != "free"}
            else:
                del self._live[free.pop()]
            self._live["copies", "load", instruction.index] = self._copy_bytes[instruction.group]
        elif instruction.operation is Operation.OFFLOAD:
            del self._live["gradients", instruction.segment]
        else:
            assert instruction.operation in (Operation.UPDATE, Operation.REFRESH), instruction.operation

    def _run_program(self, instruction):
        compiled, results = self._compiled[instruction.key], self._results(instruction)
        copy, returned_bytes = instruction.task.copy, 0
        if instruction.key.arrives:
            returned_bytes = device_bytes(compiled.results[0])
            assert returned_bytes == self._copy_bytes[instruction.group], "not all parameters are returned"
        assert copy is None or ("copies", "load", copy) in self._live, "a program reads a copy that is not there"
        during = self._live | results
        parts = {part: sum(n for name, n in during.items() if name[0] == part) for part in PARTS}
        stats = compiled.stats
        parts["values"] -= stats.alias_size_in_bytes - returned_bytes
        assert compiled.argument_bytes <= sum(self._live.values()), "a program reads what is not there"
        made = stats.output_size_in_bytes - stats.alias_size_in_bytes
        # A value's further cotangent is added to the others once the program, and so its temporaries, are gone.
        sums = sum(size for name, size in results.items() if name[1] == "sum")
        moment = Moment(**parts, total=sum(self._live.values()) + made + max(stats.temp_size_in_bytes, sums))
        self._live = {name: size for name, size in during.items() if name[1] not in ("added", "sum")}
        self._free_after(instruction)
        return moment

    def _results(self, instruction):
        """The buffers that a program makes on the device, by name."""
        key, number = instruction.key, instruction.segment
        segment, results = self._program.partition.segments[number], self._compiled[instruction.key].results
        made = {}
        if key.arrives:
            _, results = results
        if key.kind is ProgramKind.FORWARD:
            outputs, others, saved, scalars = results
            made["values", "saved", number] = device_bytes(saved)
        elif key.kind is ProgramKind.LOSS:
            gradients, (outputs, others, finite, inputs), norm = results
            scalars = (finite, norm)
        else:
            gradients, inputs, scalars = results
        made["values", "scalars", instruction.place] = device_bytes(scalars)
        if key.kind is not ProgramKind.BACKWARD:
            numbers = (*segment.outputs, *segment.nondiff_outputs)
            made |= {("values", v): device_bytes(a) for v, a in zip(numbers, (*outputs, *others), strict=True)}
        if key.kind is not ProgramKind.FORWARD:
            for value, cotangent in zip(segment.inputs, inputs, strict=True):
                is_further = ("values", "cotangent", value) in self._live
                names = ("added", "sum") if is_further else ("cotangent",)
                made |= {("values", name, value): device_bytes(cotangent) for name in names}
            if segment.trained and not key.writes_host:
                made["gradients", number] = device_bytes(gradients)
        return made

    def _free_after(self, instruction):
        number = instruction.segment
        gone = {("values", v) for v in instruction.frees}
        if instruction.key.kind is ProgramKind.BACKWARD:
            outputs = self._program.partition.segments[number].outputs
            gone |= {("values", "saved", number), *(("values", "cotangent", v) for v in outputs)}
        self._live = {name: size for name, size in self._live.items() if name not in gone}
        for drop in instruction.drops:
            size = self._live.pop(("copies", "load", drop.load))
            if self._program.instructions[drop.load].group in self._program.reserved:
                self._live["copies", "reserved", self._program.instructions[drop.load].group] = size
            elif drop.is_reused:
                free = ("copies", "free", drop.load)
                self._live[free] = size
                self._free[self._layouts[self._program.instructions[drop.load].group]].append(free)


PARTS = ("copies", "gradients", "values")
