"""Counts the costs of a partition's segments: operations, bytes, and temporaries.

Estimates the device memory that a compiled program needs besides its arguments and results.

XLA fuses element-wise operations into the operation that reads them, so that only some values exist in memory: what
heavy operations write (products, lookups, reductions and the like) and what products read. Such a value exists until
the last operation has read it, or has read what is computed from it. The estimate is the most that exists at once, in
the order of the jaxpr. A value may take the memory of one of the same size that is read for the last time.

For GPT-2 and Llama with XLA's attention this is 0.74 to 1.16 times what XLA reports for an H200
(`benchmarks/compiled_for_gpu.py`). With cuDNN's, whose calls leave little else, it was 0.5 to 2.1 times for blocks of
GPT-2, Llama and BERT, without the workspace that cuDNN asks for on the device.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from jaxferry.costs.counts import (
    ATTENTION,
    VIEWS,
    Costs,
    HostRead,
    atom_bytes,
    host_reads,
    inner_jaxprs,
    is_heavy,
    jaxpr_costs,
    touched_bytes,
)
from jaxferry.costs.estimate import LayerCosts, Recomputation
from jaxferry.costs.layer_records import backward_variant, forward_variant
from jaxferry.modes import Remat
from jaxferry.partition import AUTO, Graph, Partition, Segment, differentiate, numbers_of_operands, once_for_graph, ones

_READ_FROM_MEMORY = ATTENTION | {
    "conv_general_dilated",
    "dot_general",
    "fft",
    "ffi_call",
    "ragged_dot",
    "sort",
    "top_k",
}
"""Operations whose operands are not computed while they are read."""

_PRODUCTS = frozenset({"conv_general_dilated", "dot_general"})
_CONVERT = "convert_element_type"
_LOOPS = frozenset({"scan", "while", "cond"})


def temporary_bytes(closed_jaxpr: core.ClosedJaxpr, num_donated: int = 0) -> int:
    """Estimates the bytes of a program's temporaries; its last `num_donated` arguments are donated."""
    return _peak_bytes(closed_jaxpr.jaxpr, is_body=False, num_donated=num_donated)


@dataclasses.dataclass
class _Value:
    """A value in memory, with the times of its writing and last reading, and the values that it is computed from."""

    num_bytes: int
    written: int
    read: int
    sources: frozenset[int] = frozenset()


@dataclasses.dataclass
class _Operand:
    """Where a variable is read from.

    Attributes:
      values: the values in memory that it is, or is computed from.
      is_stored: whether it is in memory itself.
    """

    values: frozenset[int]
    is_stored: bool


_ARGUMENT = _Operand(frozenset(), True)
_DONATED = _Operand(frozenset(), True)
"""An argument whose memory a loop may take for what it carries."""


def _peak_bytes(jaxpr: core.Jaxpr, is_body: bool = True, num_stored: int = 0, num_donated: int = 0) -> int:
    """The temporaries; the first `num_stored` results are among them, since they leave for the host at the end."""
    memory = _Memory(is_body)
    arguments = [_ARGUMENT] * (len(jaxpr.invars) - num_donated) + [_DONATED] * num_donated
    results = memory.run(jaxpr, arguments, is_whole=True)
    for result in results:
        memory.read(result)
    stay = results[num_stored:]
    return memory.peak_bytes({value for result in stay if result.is_stored for value in result.values})


class _Memory:
    """The values of a program in memory, in the order of its operations."""

    def __init__(self, is_body: bool) -> None:
        self._is_body = is_body
        self._values: list[_Value] = []
        self._inner_bytes: dict[int, int] = {}
        self._time = 0

    def run(self, jaxpr: core.Jaxpr, arguments: Sequence[_Operand], is_whole: bool = False) -> list[_Operand]:
        """Runs a program, or one nested in it (`is_whole` tells them apart); returns its results."""
        known: dict[Any, _Operand] = dict(zip(jaxpr.invars, arguments, strict=True))
        known |= dict.fromkeys(jaxpr.constvars, _ARGUMENT)
        results = set(filter(_is_variable, jaxpr.outvars)) if is_whole else set()
        widened = _products_bytes(jaxpr, self._is_body)
        for eqn in jaxpr.eqns:
            operands = [known[atom] if _is_variable(atom) else _ARGUMENT for atom in eqn.invars]
            inner = inner_jaxprs(eqn)
            is_call = (
                bool(inner) and len(inner[0].invars) == len(operands) and len(inner[0].outvars) == len(eqn.outvars)
            )
            if is_call and eqn.primitive.name not in _LOOPS:
                made = self.run(inner[0], operands)
            elif inner or is_heavy(eqn):
                if eqn.primitive.name in _READ_FROM_MEMORY:
                    self._store_all(eqn.invars, operands)
                sizes = [widened.get(each, atom_bytes(each)) for each in eqn.outvars]
                if eqn.primitive.name == "scan":
                    first, num_carry = numbers_of_operands(eqn.params)
                    carried = operands[first : first + num_carry]
                    sizes[: len(carried)] = [0 if a is _DONATED else n for a, n in zip(carried, sizes, strict=False)]
                made = self._write(sizes, operands)
                self._inner_bytes[self._time] = max(map(_peak_bytes, inner), default=0)
            elif eqn.primitive.name in VIEWS:
                made = operands[: len(eqn.outvars)]  # a barrier has several
            else:
                values = frozenset[int]().union(*(operand.values for operand in operands))
                made = [_Operand(values, False) for _ in eqn.outvars]
            stored = [pair for pair in zip(eqn.outvars, made, strict=True) if pair[0] in results]
            self._store_all([variable for variable, _ in stored], [operand for _, operand in stored])
            known |= dict(zip(eqn.outvars, made, strict=True))
        return [known[atom] if _is_variable(atom) else _ARGUMENT for atom in jaxpr.outvars]

    def read(self, operand: _Operand) -> None:
        """Notes that the current operation reads an operand."""
        for value in operand.values:
            self._values[value].read = self._time

    def peak_bytes(self, results: set[int]) -> int:
        """The most bytes in memory at once, without the values that are results."""
        changes = [0] * (self._time + 2)
        taken = set(results)
        for number, value in enumerate(self._values):
            if number in results:
                continue
            # A value may take the memory of one that it is computed from.
            ended = (value.written, value.num_bytes)
            free = (n for n in value.sources - taken if (self._values[n].read, self._values[n].num_bytes) == ended)
            in_place = next(free, None)
            taken |= {in_place} if in_place is not None else set()
            changes[value.written + (in_place is not None)] += value.num_bytes
            changes[value.read + 1] -= value.num_bytes
        held = itertools.accumulate(changes)
        return max(num_bytes + self._inner_bytes.get(time, 0) for time, num_bytes in enumerate(held))

    def _store_all(self, atoms: Sequence[Any], operands: Sequence[_Operand]) -> None:
        """Writes the values that are not in memory yet."""
        for atom, operand in zip(atoms, operands, strict=True):
            if not operand.is_stored:
                self._time += 1
                self.read(operand)
                self._values.append(_Value(atom_bytes(atom), self._time, self._time, operand.values))
                operand.values, operand.is_stored = frozenset({len(self._values) - 1}), True

    def _write(self, sizes: Sequence[int], operands: Sequence[_Operand]) -> list[_Operand]:
        self._time += 1
        for operand in operands:
            self.read(operand)
        first = len(self._values)
        self._values += [_Value(num_bytes, self._time, self._time) for num_bytes in sizes]
        return [_Operand(frozenset({number}), True) for number in range(first, len(self._values))]


def _is_variable(atom: Any) -> bool:
    return not isinstance(atom, core.Literal)


def _products_bytes(jaxpr: core.Jaxpr, is_body: bool) -> dict[Any, int]:
    """The bytes of products whose one reader converts them to a wider dtype, or adds them to a body's argument (0)."""
    readers: dict[Any, list[core.JaxprEqn]] = {}
    for eqn in jaxpr.eqns:
        for atom in filter(_is_variable, eqn.invars):
            readers.setdefault(atom, []).append(eqn)
    found = {}
    for eqn in jaxpr.eqns:
        made = eqn.outvars[0] if eqn.primitive.name in _PRODUCTS else None
        reader = made
        while len(readers.get(reader, ())) == 1 and readers[reader][0].primitive.name in VIEWS:
            view = readers[reader][0]
            reader = view.outvars[[atom is reader for atom in view.invars].index(True)]
        if made is not None and len(readers.get(reader, ())) == 1 and readers[reader][0].primitive.name == _CONVERT:
            found[made] = max(atom_bytes(made), atom_bytes(readers[reader][0].outvars[0]))
        adds = [each for each in readers.get(made, ()) if each.primitive.name == "add"]
        is_sum = len(adds) == len(readers.get(made, ())) == 1 and adds[0].outvars[0] in jaxpr.outvars
        if (
            is_body
            and made is not None
            and is_sum
            and any(atom in jaxpr.invars for atom in filter(_is_variable, adds[0].invars))
        ):
            found[made] = 0
    return found


def partition_costs(partition: Partition, remat: Any = None, temporaries: bool = False) -> tuple[LayerCosts, ...]:
    """Counts forward and backward of each segment's uses; segments that share programs are counted once.

    The work of a segment that reads several groups is split among them by the bytes that its forward reads of each,
    which for products is how their operations are split. What it keeps, and its temporaries, count with the first.

    Also counts recomputation, of everything or of all but large products, where a plan may choose it (`AUTO`) and it
    would keep fewer bytes. The last segment is exempt: its forward and backward are one program and keep nothing in
    between.

    Args:
      partition: the model.
      remat: what all segments keep between forward and backward, as in `jaxferry.partition.differentiate`; None for
        each segment's own choice.
      temporaries: whether to estimate `temporary_bytes` as well. The last segment then keeps nothing for its backward,
        which is part of the same program.
    """
    counted: dict[tuple[int, str], _ProgramCosts] = {}

    def program_costs(segment: Segment, remat: Any, kind: str) -> _ProgramCosts:
        if (segment.program, kind) not in counted:
            counted[segment.program, kind] = once_for_graph(_ProgramCosts, partition.graph, segment, remat)
        return counted[segment.program, kind]

    graph, held = partition.graph, set[int]()
    result = []
    for number, segment in enumerate(partition.segments):
        program = program_costs(segment, remat, "own")
        # A value that several backwards read is kept once and counted with the first segment that keeps it.
        before, own = set(held), program.kept_values(segment)
        held |= own
        kept_bytes = graph.device_bytes(*program.derivative.saved) + graph.held_bytes(*own - before)
        is_last = number == len(partition.segments) - 1
        of_first: dict[str, Any] = {"activation_bytes": kept_bytes}
        # A segment in tiles copies all weights that it reads in host memory; others copy them panel by panel.
        whole_bytes = 0 if segment.tiling is None else sum(map(graph.num_bytes, segment.weights))
        if temporaries:
            sizes = _by_variant(program.temporary_bytes(is_last), whole_bytes)
            of_first = {"activation_bytes": 0 if is_last else kept_bytes, "temporary_bytes": sizes}
        if (segment.remat if remat is None else remat) == AUTO and not is_last:
            # Later segments may recompute too; they then need this segment's outputs, which it keeps for them.
            shared = {v for later in partition.segments[number + 1 :] for v in later.inputs}
            more, least_bytes = dict[Remat, Recomputation](), -1
            for level in (Remat.FULL, Remat.PRODUCTS):
                again = program_costs(segment, level.value, level)
                kept = again.kept_values(segment) | (own & shared)
                again_bytes = graph.device_bytes(*again.derivative.saved) + graph.held_bytes(*kept - before)
                is_worth_it = level is Remat.FULL or again.derivative.is_worth_it(program.derivative)
                if is_worth_it and least_bytes < again_bytes < kept_bytes:
                    least_bytes, more[level] = again_bytes, program.recomputation(again, again_bytes)
                    if temporaries:
                        of_first["temporary_bytes"] |= _by_variant(again.temporary_bytes(is_last), whole_bytes, level)
            of_first["recomputation"] = more
        result += program.split(partition, segment, partition.uses_of[number], of_first)
    return tuple(result)


def _live(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The operations that XLA keeps: a backward that runs its forward again needs no outputs of that, for example."""
    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return core.ClosedJaxpr(jaxpr, closed.consts)


class _ProgramCosts:
    """The costs of a segment's forward and backward programs."""

    def __init__(self, graph: Graph, segment: Segment, remat: Any):
        self.derivative = derivative = differentiate(graph, segment, remat)
        self._temporary_bytes: tuple[int, int, int] | None = None
        read = (segment.weights, segment.inputs, segment.nondiff_inputs)
        avals = [[graph.avals[value] for value in values] for values in read]
        self._arguments = [[jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in each] for each in avals]
        forward = _live(jax.make_jaxpr(derivative.forward)(*self._arguments))
        backward = _live(jax.make_jaxpr(derivative.backward)(*derivative.backward_arguments(graph)))
        self._jaxprs, self._num_devices = (forward, backward), graph.num_devices
        weights = segment.by_group(range(len(segment.weights)))
        self.forward: Costs = jaxpr_costs(forward)
        self.backward: Costs = jaxpr_costs(backward)
        reads = host_reads if segment.tiling is None else _reads_before_loops
        self.reads_forward = [reads(forward, own) for own in weights]
        self.reads_backward = [reads(backward, own) for own in weights]
        self.touched_forward = [touched_bytes(own) for own in self.reads_forward]
        self.touched_backward = [touched_bytes(own) for own in self.reads_backward]

    def temporary_bytes(self, is_last: bool) -> tuple[int, int, int]:
        """Returns the temporaries of forward and backward, and of a backward that writes its gradient to the host.

        Of the last segment, those of its one program for both.
        """
        if self._temporary_bytes is None:
            forward, backward = self._jaxprs
            if is_last:  # one program: the forward and, for cotangents of 1, the backward
                both = functools.partial(self.derivative.both, ones)
                forward = backward = _live(jax.make_jaxpr(both)(*self._arguments))
            segment, num_donated = self.derivative.segment, 0
            if segment.tiling is not None and not is_last:
                num_donated = len(self.derivative.saved) + len(segment.outputs)
            sizes, by_go = (temporary_bytes(forward), temporary_bytes(backward, num_donated)), 0
            if segment.tiling is not None:
                by_go = _storing_bytes(backward, len(segment.trained), self._num_devices, num_donated)
            self._temporary_bytes = *sizes, max(sizes[1], by_go)
        return self._temporary_bytes

    def kept_values(self, segment: Segment) -> set[int]:
        """Returns the segment's inputs and outputs that its backward reads."""
        read = {segment.inputs[index] for index in self.derivative.inputs_read}
        return read | {segment.outputs[index] for index in self.derivative.outputs_read}

    def split(
        self, partition: Partition, segment: Segment, uses: Sequence[int], of_first: Mapping[str, Any]
    ) -> list[LayerCosts]:
        """Splits the costs of the segment among its uses; the first one's also have `of_first`."""
        total = sum(self.touched_forward)
        shares = [size / total if total else 1 / len(uses) for size in self.touched_forward]
        leaves = [leaf for group in segment.groups for leaf in partition.layers[group].leaves]
        made = []
        for place, (use, share) in enumerate(zip((partition.uses[number] for number in uses), shares, strict=True)):
            layer = partition.layers[use.group]
            scale = share if len(uses) > 1 else 1
            costs = LayerCosts(
                name=use.name,
                parameters=layer.name,
                block=layer.block,
                num_parameters=layer.trained.num_parameters,
                param_bytes=layer.num_bytes,
                grad_bytes=layer.trained.num_bytes,
                forward_flops=self.forward.flops * scale,
                forward_bytes=self.forward.bytes * scale,
                backward_flops=self.backward.flops * scale,
                backward_bytes=self.backward.bytes * scale,
                forward_kernels=self.forward.kernels * scale,
                backward_kernels=self.backward.kernels * scale,
                dha_bytes_forward=self.touched_forward[place],
                dha_bytes_backward=self.touched_backward[place],
                dha_products_forward=_products(self.reads_forward[place]),
                dha_products_backward=_products(self.reads_backward[place]),
                itemsize=max(np.dtype(leaf.dtype).itemsize for leaf in leaves),
                is_whole=layer.is_whole,
                shares_program=place > 0,
                **(of_first if place == 0 else {}),
            )
            made.append(costs)
        return made

    def recomputation(self, again: _ProgramCosts, activation_bytes: int) -> Recomputation:
        """Returns the additional costs of running the forward again, as in the programs `again`."""
        return Recomputation(
            activation_bytes=activation_bytes,
            flops=again.backward.flops - self.backward.flops,
            bytes=again.backward.bytes - self.backward.bytes,
            kernels=again.backward.kernels - self.backward.kernels,
        )


def _products(reads: Sequence[HostRead]) -> tuple[HostRead, ...]:
    return tuple(read for read in reads if read.flops)


def _reads_before_loops(closed_jaxpr: core.ClosedJaxpr, arguments: Sequence[int]) -> tuple[HostRead, ...]:
    """What a program in tiles reads of arguments in host memory: it copies them whole before its loops."""
    jaxpr = closed_jaxpr.jaxpr
    read = {id(atom) for eqn in jaxpr.eqns for atom in eqn.invars}
    sizes = [atom_bytes(jaxpr.invars[place]) for place in arguments if id(jaxpr.invars[place]) in read]
    return (HostRead(sum(sizes)),) if sizes else ()


def _storing_bytes(closed_jaxpr: core.ClosedJaxpr, num_gradients: int, num_devices: int, num_donated: int) -> int:
    """The temporaries of a program in tiles that writes its gradients to the host, which exist whole on the device.

    They leave as the fp32 sums that they are, but from several devices: those exchange them in their own dtype.
    """
    jaxpr = closed_jaxpr.jaxpr
    casts = {e.outvars[0]: e.invars[0] for e in jaxpr.eqns if e.primitive.name == _CONVERT}
    gradients = list(jaxpr.outvars[:num_gradients])
    if num_devices == 1:
        gradients = [casts.get(atom, atom) if _is_variable(atom) else atom for atom in gradients]
    stored = jaxpr.replace(outvars=[*gradients, *jaxpr.outvars[num_gradients:]])
    return _peak_bytes(stored, is_body=False, num_stored=num_gradients, num_donated=num_donated)


def _by_variant(num_bytes: tuple[int, int, int], whole_bytes: int, remat: Remat = Remat.NONE) -> dict[str, int]:
    """The temporaries as those of all variants; one that reads the host has `whole_bytes` of weights on the device."""
    forward_bytes, *backward_bytes = num_bytes
    forwards = {forward_variant(by_dha, remat): forward_bytes + by_dha * whole_bytes for by_dha in (False, True)}
    flags = itertools.product((False, True), repeat=2)
    return forwards | {
        backward_variant(dha, host, remat): backward_bytes[host] + dha * whole_bytes for dha, host in flags
    }
