"""Finds scans over layers and unrolls them, so that each iteration has its own equations and parameters.

Finds scans over layers and the stacked parameters that they read one slice per iteration.

A stacked parameter is cut into parts if every equation that reads it works part by part: it is scanned over, changed
element-wise on its way to a scan (a cast), transposed, or summed (a penalty). Every scan over such a parameter is
unrolled.

A scan whose iterations share more parameter bytes than each has of its own is not a scan over layers, for instance a
recurrence over time with a table of positions. It stays a scan.

Unrolls scans over layers: each iteration gets its own equations and parameters.

The result equals the graph of a model written as a Python loop over layers, so the cutter need not know about scans.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jaxferry.partition.cuts import PRELUDE_BYTES, dependences
from jaxferry.partition.graph import Atom, Builder, Equation, Graph, aval_bytes, live_equations
from jaxferry.partition.packed import Stack
from jaxferry.partition.rows import ELEMENTWISE


class Scan:
    """A scan equation with names for its operands and parameters."""

    def __init__(self, equation: Equation) -> None:
        params, inputs = equation.params, equation.inputs
        self.equation = equation
        self.length, self.is_reverse = int(params["length"]), bool(params["reverse"])
        self.jaxpr: core.ClosedJaxpr = params["jaxpr"]
        first, self.num_carry = numbers_of_operands(params)
        self.consts, self.carry = inputs[:first], inputs[first : first + self.num_carry]
        self.xs = inputs[first + self.num_carry :]


@dataclasses.dataclass(frozen=True)
class Scans:
    """The leaves, values and scans that can be split by layer.

    Attributes:
      stacks: leaf index -> how the leaf is cut.
      axes: value computed from such leaves part by part -> the axis along which its parts lie.
      unrolled: first output of a scan over such values -> the scan.
      notes: pairs of a reason and the scanned leaves that stay whole for it.
    """

    stacks: Mapping[int, Stack]
    axes: Mapping[int, int]
    unrolled: Mapping[int, Scan]
    notes: tuple[tuple[str, tuple[int, ...]], ...]


def find_scans(graph: Graph, known: Mapping[int, Stack] | None = None) -> Scans:
    """Finds the leaves to cut; with `known`, only leaves that are already cut, and in the same way."""
    search = _Search(graph, known)
    while not search.run():
        pass
    return search.result()


class _Search:
    """Searches for leaves to cut; the search restarts after each pass that had to refuse a leaf."""

    def __init__(self, graph: Graph, known: Mapping[int, Stack] | None) -> None:
        self._graph, self._known = graph, known
        self._batch, self._active = dependences(graph)
        self._leaf_of = {value: leaf for leaf, value in enumerate(graph.parameters)}
        self._made_by = {value: equation for equation in graph.equations for value in equation.outputs}
        self._readers: dict[int, list[Equation]] = {}
        for equation in graph.equations:
            for value in set(equation.reads):
                self._readers.setdefault(value, []).append(equation)
        scans = [Scan(e) for e in graph.equations if e.primitive.name == "scan" and e.outputs]
        self._scans = {id(scan.equation): scan for scan in scans if scan.length > 1 and self._is_over_layers(scan)}
        self._other_scans = [scan for scan in scans if scan.length > 1 and id(scan.equation) not in self._scans]
        self._refused: dict[int, str | None] = {}
        if known is not None:
            self._refused = {leaf: None for leaf in self._leaf_of.values() if leaf not in known}

    def run(self) -> bool:
        """Follows parameters from the scans; returns whether no leaf had to be refused."""
        self._roots: dict[int, frozenset[int]] = {}
        self._axes: dict[int, int] = {}
        self._pending: list[int] = []
        before = len(self._refused)
        for scan in self._scans.values():
            for operand in scan.xs:
                self._assign(operand, 0)
        while self._pending:
            value = self._pending.pop()
            for equation in self._readers.get(value, ()):
                self._follow(value, equation)
            if value in self._graph.outputs:
                self._refuse(value, "it is returned")
        for leaf, stack in (self._known or {}).items():
            axis = self._axes.get(self._graph.parameters[leaf])
            if axis is not None and (self._length(leaf, axis), axis) != (stack.length, stack.axis):
                self._refused[leaf] = None
        return len(self._refused) == before

    def result(self) -> Scans:
        """Returns the findings, after `run` returned True."""
        unrolled = {
            scan.equation.outputs[0]: scan
            for scan in self._scans.values()
            if any(isinstance(operand, int) and operand in self._axes for operand in scan.xs)
        }
        together = [frozenset().union(*(self._roots_of(x) for x in scan.xs)) for scan in unrolled.values()]
        together += [self._roots_of(value) for value in self._axes]
        axes = {leaf: self._axes[value] for value, leaf in self._leaf_of.items() if value in self._axes}
        family = _components(axes, together)
        stacks = {leaf: Stack(self._length(leaf, axis), axis, family[leaf]) for leaf, axis in axes.items()}
        reasons: dict[str, list[int]] = {}
        for leaf, reason in sorted({**self._scanned_elsewhere(), **self._refused}.items()):
            if reason is not None and leaf not in stacks:
                reasons.setdefault(reason, []).append(leaf)
        notes = tuple((reason, tuple(leaves)) for reason, leaves in reasons.items())
        return Scans(stacks, self._axes, unrolled, notes)

    def _length(self, leaf: int, axis: int) -> int:
        return int(self._graph.avals[self._graph.parameters[leaf]].shape[axis])

    def _is_over_layers(self, scan: Scan) -> bool:
        own = sum(self._bytes(operand) for operand in scan.xs) / scan.length
        return 0 < own >= sum(self._bytes(operand) for operand in scan.consts)

    def _bytes(self, atom: Atom) -> int:
        """Returns the bytes of a value computed from parameters alone; 0 for other values."""
        is_of_parameters = isinstance(atom, int) and atom in self._active and atom not in self._batch
        return self._graph.num_bytes(atom) if is_of_parameters and isinstance(atom, int) else 0

    def _shape(self, atom: Atom) -> tuple[int, ...]:
        aval: Any = self._graph.aval_of(atom)
        return tuple(aval.shape)

    def _roots_of(self, atom: Atom) -> frozenset[int]:
        """Returns the leaves that a value is computed from, if it can be computed part by part; otherwise none."""
        if not isinstance(atom, int) or atom not in self._active:
            return frozenset()
        if atom not in self._roots:
            self._roots[atom] = self._find_roots(atom)
        return self._roots[atom]

    def _find_roots(self, value: int) -> frozenset[int]:
        leaf = self._leaf_of.get(value)
        if leaf is not None:
            return frozenset() if leaf in self._refused else frozenset([leaf])
        equation = self._made_by[value]
        if not _is_by_part(equation):
            return frozenset()
        found = frozenset[int]()
        for operand in equation.inputs:
            roots = self._roots_of(operand) if self._shape(operand) else frozenset()
            if not roots and isinstance(operand, int) and operand in self._active:
                return frozenset()
            found |= roots
        return found

    def _assign(self, atom: Atom, axis: int) -> None:
        """Sets the axis along which a value's parts lie, and those of the values that it is computed from."""
        if not isinstance(atom, int) or not self._roots_of(atom):
            return
        if atom in self._axes:
            if self._axes[atom] != axis:
                self._refuse(atom, "it is cut along two axes")
            return
        self._axes[atom] = axis
        self._pending.append(atom)
        equation = self._made_by.get(atom)
        for operand in () if equation is None else equation.inputs:
            if equation is not None and self._shape(operand):
                self._assign(operand, axis_before(equation, axis))

    def _follow(self, value: int, equation: Equation) -> None:
        """Examines one reader of a value that has parts."""
        axis, scan = self._axes[value], self._scans.get(id(equation))
        if scan is not None:
            if value in (*scan.consts, *scan.carry):
                self._refuse(value, "each iteration reads all of it")
        elif _is_by_part(equation):
            if self._roots_of(equation.outputs[0]):
                self._assign(equation.outputs[0], axis_after(equation, axis))
            else:
                self._refuse(value, f"{equation.primitive.name!r} combines it with values that have no such parts")
        elif not (equation.primitive.name == "reduce_sum" and axis in equation.params["axes"]):
            self._refuse(value, f"{equation.primitive.name!r} reads all of it")

    def _refuse(self, value: int, reason: str) -> None:
        for leaf in self._roots_of(value):
            self._refused.setdefault(leaf, reason)

    def _scanned_elsewhere(self) -> dict[int, str]:
        """Returns the leaves read by scans that are not unrolled, and why."""
        found: dict[int, str] = {}
        for scan in self._other_scans:
            for operand in scan.xs:
                reason = "the scan's iterations share more parameters than each has of its own"
                found |= dict.fromkeys(self._roots_of(operand), reason)
        for equation in self._graph.equations:
            for jaxpr in () if id(equation) in self._scans else jaxprs_in(equation):
                scanned = _scanned_over(jaxpr)
                for variable, operand in zip(reversed(jaxpr.invars), reversed(equation.inputs), strict=False):
                    if variable in scanned:
                        reason = f"the scan lies inside {equation.primitive.name!r}"
                        found |= dict.fromkeys(self._roots_of(operand), reason)
        return found


def numbers_of_operands(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how many operands of a scan are constants and how many are carried; the rest are scanned over."""
    if "num_consts" in params:
        return int(params["num_consts"]), int(params["num_carry"])
    consts, carry, _ = params["ft_in"].unpack()  # JAX 0.12 stores the three trees instead of counts
    return len(consts), len(carry)


def axis_before(equation: Equation, axis: int) -> int:
    """Maps an axis of the result of a part-by-part equation to its operands."""
    return int(equation.params["permutation"][axis]) if equation.primitive.name == "transpose" else axis


def axis_after(equation: Equation, axis: int) -> int:
    """Maps an axis of the operands of a part-by-part equation to its result."""
    return list(equation.params["permutation"]).index(axis) if equation.primitive.name == "transpose" else axis


def _is_by_part(equation: Equation) -> bool:
    """Whether the result can be computed part by part."""
    return equation.primitive.name in ELEMENTWISE or equation.primitive.name == "transpose"


def _components(leaves: Collection[int], together: Collection[frozenset[int]]) -> dict[int, int]:
    """Returns equal numbers for leaves that share a group, directly or through others."""
    number = {leaf: leaf for leaf in leaves}
    for group in together:
        numbers = {number[leaf] for leaf in group}
        number = {leaf: min(numbers) if known in numbers else known for leaf, known in number.items()}
    return number


def jaxprs_in(equation: Any) -> Iterator[core.Jaxpr]:
    """Yields the jaxprs among an equation's parameters."""
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            jaxpr: Any = getattr(item, "jaxpr", item)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def _scanned_over(jaxpr: core.Jaxpr) -> set[Any]:
    """Returns the arguments of a jaxpr that a scan inside it, at any depth, slices per iteration."""
    found: set[Any] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan" and int(eqn.params["length"]) > 1:
            found.update(eqn.invars[sum(numbers_of_operands(eqn.params)) :])
        for inner in jaxprs_in(eqn):
            scanned = _scanned_over(inner)
            pairs = zip(reversed(inner.invars), reversed(eqn.invars), strict=False)
            found.update(operand for variable, operand in pairs if variable in scanned)
    return {variable for variable in jaxpr.invars if variable in found}


def unroll(graph: Graph, scans: Scans, stacks: Mapping[int, Stack]) -> Graph:
    """Returns the graph with the parts of stacked leaves as parameters and the scans over them unrolled."""
    return _Unrolling(graph, scans).run(stacks) if stacks else graph


class _Unrolling:
    """Rewrites one graph.

    Attributes:
      parts: value of the old graph -> its parts.
      now: value of the old graph -> the value or literal that replaces it.
    """

    def __init__(self, graph: Graph, scans: Scans) -> None:
        self._graph, self._scans = graph, scans
        self._active = dependences(graph)[1]
        self._used = {value for e in graph.equations for value in e.reads}
        self._used |= {atom for atom in graph.outputs if isinstance(atom, int)}
        self._builder = Builder.onto(graph)
        self._indices: dict[int, list[Atom]] = {}
        self.parts: dict[int, list[Atom]] = {}
        self.now: dict[int, Atom] = {}

    def run(self, stacks: Mapping[int, Stack]) -> Graph:
        graph, builder = self._graph, self._builder
        parameters: list[int] = []
        for leaf, value in enumerate(graph.parameters):
            stack = stacks.get(leaf)
            parameters += [value] if stack is None else self._cut(value, stack, leaf not in self._scans.stacks)
        for equation in graph.equations:
            self._add(equation)
        outputs = tuple(self._current(atom) for atom in graph.outputs)
        return dataclasses.replace(
            graph,
            equations=live_equations(builder.equations, outputs),
            avals=builder.avals,
            parameters=tuple(parameters),
            constants=builder.constants,
            outputs=outputs,
        )

    def _cut(self, value: int, stack: Stack, is_read_whole: bool) -> list[int]:
        aval = self._graph.avals[value]
        shape = (*aval.shape[: stack.axis], *aval.shape[stack.axis + 1 :])
        [made] = jax.make_jaxpr(lambda x: x)(jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)).in_avals
        parts = [self._builder.value(made) for _ in range(stack.length)]
        if is_read_whole:
            [self.now[value]] = self._emit(lambda *arrays: jnp.stack(arrays, stack.axis), parts)
        else:
            self.parts[value] = list(parts)
        return parts

    def _current(self, atom: Atom) -> Atom:
        return self.now.get(atom, atom) if isinstance(atom, int) else atom

    def _aval(self, atom: Atom) -> Any:
        return self._builder.avals[atom] if isinstance(atom, int) else atom.aval

    def _emit(self, function: Callable[..., Any], operands: Sequence[Atom]) -> list[Atom]:
        """Adds the equations of a function of arrays and returns its results."""
        return self._builder.inline(self._traced(function, operands), operands)

    def _traced(self, function: Callable[..., Any], operands: Sequence[Atom]) -> Any:
        avals = [self._aval(atom) for atom in operands]
        return jax.make_jaxpr(function)(
            *(jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in avals)
        )

    def _add(self, equation: Equation) -> None:
        axes = [self._scans.axes.get(value) for value in equation.reads if value in self.parts]
        if equation.outputs and equation.outputs[0] in self._scans.unrolled:
            self._unroll(self._scans.unrolled[equation.outputs[0]])
        elif axes and axes[0] is not None:
            self._by_part(equation, axes[0])
        else:
            inputs = tuple(self._current(atom) for atom in equation.inputs)
            self._builder.equations.append(dataclasses.replace(equation, inputs=inputs))

    def _by_part(self, equation: Equation, axis: int) -> None:
        """Applies an equation to each part."""
        is_sum = equation.primitive.name == "reduce_sum"
        params = dict(equation.params)
        if is_sum:
            params["axes"] = tuple(a - (a > axis) for a in params["axes"] if a != axis)
        elif equation.primitive.name == "transpose":
            params["permutation"] = tuple(a - (a > axis) for a in params["permutation"] if a != axis)
        length = len(next(self.parts[value] for value in equation.reads if value in self.parts))
        columns = [
            self._slices(atom, axis, length) if self._aval(atom).shape else [self._current(atom)] * length
            for atom in equation.inputs
        ]
        made: list[Atom] = []
        traced = None
        for operands in zip(*columns, strict=True):
            if traced is None:
                with equation.context.manager:
                    own = equation.primitive.get_bind_params(params)
                    traced = self._traced(functools.partial(equation.primitive.bind, **own), operands)
            made += self._builder.inline(traced, operands)
        if is_sum:
            [self.now[equation.outputs[0]]] = self._emit(lambda *sums: functools.reduce(lax.add, sums), made)
        else:
            self.parts[equation.outputs[0]] = made

    def _unroll(self, scan: Scan) -> None:
        """Inlines the iterations of a scan one after another."""
        columns = [self._slices(atom, 0, scan.length) for atom in scan.xs]
        consts, carry = ([self._current(atom) for atom in atoms] for atoms in (scan.consts, scan.carry))
        ys: list[list[Atom]] = [[] for _ in range(scan.length)]
        for number in reversed(range(scan.length)) if scan.is_reverse else range(scan.length):
            made = self._builder.inline(scan.jaxpr, [*consts, *carry, *(column[number] for column in columns)])
            carry, ys[number] = made[: scan.num_carry], made[scan.num_carry :]
        outputs = scan.equation.outputs
        self.now |= zip(outputs, carry, strict=False)
        for value, parts in zip(outputs[scan.num_carry :], zip(*ys, strict=True), strict=True):
            if value in self._used:
                self.parts[value] = list(parts)
                [self.now[value]] = self._emit(lambda *arrays: jnp.stack(arrays), parts)

    def _slices(self, atom: Atom, axis: int, length: int) -> list[Atom]:
        """Returns the slices of an array along an axis.

        Each iteration receives a large non-differentiable array whole, with its own number, and slices it itself.
        So all iterations are the same program and no slice is saved.
        """
        if isinstance(atom, int) and atom in self.parts:
            return self.parts[atom]
        array = self._current(atom)
        is_active = isinstance(atom, int) and atom in self._active
        if is_active or aval_bytes(self._aval(array)) <= PRELUDE_BYTES:
            takes = [functools.partial(lax.index_in_dim, index=i, axis=axis, keepdims=False) for i in range(length)]
            return [self._emit(take, [array])[0] for take in takes]
        take = functools.partial(lax.dynamic_index_in_dim, axis=axis, keepdims=False)
        return [self._emit(take, [array, number])[0] for number in self._numbers(length)]

    def _numbers(self, length: int) -> list[Atom]:
        """Returns the iterations' numbers as values: slices of a constant (see `dataflow`)."""
        if length not in self._indices:
            [numbers] = self._emit(lambda: lax.iota(jnp.uint32, length), [])
            self._indices[length] = self._slices(numbers, 0, length)
        return self._indices[length]
