"""Estimates the device memory that a compiled program needs besides its arguments and results.

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
import itertools
from collections.abc import Sequence
from typing import Any

from jax.extend import core

from jaxferry.costs.costs import ATTENTION, VIEWS, atom_bytes, inner_jaxprs, is_heavy

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


def temporary_bytes(closed_jaxpr: core.ClosedJaxpr) -> int:
    """Estimates the bytes of a program's temporaries."""
    return _peak_bytes(closed_jaxpr.jaxpr)


@dataclasses.dataclass
class _Value:
    """A value in memory.

    Attributes:
      num_bytes: its size.
      written, read: when it is written, and when it is read last.
      sources: values in memory from which an element-wise operation computes it.
    """

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


def _peak_bytes(jaxpr: core.Jaxpr) -> int:
    memory = _Memory()
    results = memory.run(jaxpr, [_ARGUMENT] * len(jaxpr.invars), is_whole=True)
    for result in results:
        memory.read(result)
    return memory.peak_bytes({value for result in results if result.is_stored for value in result.values})


class _Memory:
    """The values of a program in memory, in the order of its operations."""

    def __init__(self) -> None:
        self._values: list[_Value] = []
        self._inner_bytes: dict[int, int] = {}
        self._time = 0

    def run(self, jaxpr: core.Jaxpr, arguments: Sequence[_Operand], is_whole: bool = False) -> list[_Operand]:
        """Runs a program, or one nested in it (`is_whole` tells them apart); returns its results."""
        known: dict[Any, _Operand] = dict(zip(jaxpr.invars, arguments, strict=True))
        known |= dict.fromkeys(jaxpr.constvars, _ARGUMENT)
        results = set(filter(_is_variable, jaxpr.outvars)) if is_whole else set()
        widened = _widened_bytes(jaxpr)
        for eqn in jaxpr.eqns:
            operands = [known[atom] if _is_variable(atom) else _ARGUMENT for atom in eqn.invars]
            inner = inner_jaxprs(eqn)
            if inner and eqn.primitive.name not in _LOOPS and len(inner[0].invars) == len(operands):
                made = self.run(inner[0], operands)
            elif inner or is_heavy(eqn):
                if eqn.primitive.name in _READ_FROM_MEMORY:
                    self._store_all(eqn.invars, operands)
                made = self._write([widened.get(each, atom_bytes(each)) for each in eqn.outvars], operands)
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
            in_place = next((each for each in value.sources - taken if self._ends_for(each, value)), None)
            taken |= {in_place} if in_place is not None else set()
            changes[value.written + (in_place is not None)] += value.num_bytes
            changes[value.read + 1] -= value.num_bytes
        held = itertools.accumulate(changes)
        return max(num_bytes + self._inner_bytes.get(time, 0) for time, num_bytes in enumerate(held))

    def _ends_for(self, source: int, value: _Value) -> bool:
        """Whether a value may take the memory of one that it is computed from."""
        other = self._values[source]
        return other.read == value.written and other.num_bytes == value.num_bytes

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


def _widened_bytes(jaxpr: core.Jaxpr) -> dict[Any, int]:
    """The bytes of products whose one reader converts them to a wider dtype."""
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
    return found
