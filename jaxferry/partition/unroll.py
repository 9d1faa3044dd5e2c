"""Unrolls scans over layers: each iteration gets its own equations and parameters.

The result equals the graph of a model written as a Python loop over layers, so the cutter need not know about scans.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxferry.partition.dataflow import PRELUDE_BYTES, dependences
from jaxferry.partition.graph import Atom, Builder, Equation, Graph, aval_bytes, live_equations
from jaxferry.partition.scans import Scan, Scans
from jaxferry.partition.stacking import Stack


def unroll(graph: Graph, scans: Scans, stacks: Mapping[int, Stack]) -> Graph:
    """Returns the graph with the parts of stacked leaves as parameters and the scans over them unrolled.

    Args:
      graph: the traced loss function.
      scans: its scans over layers.
      stacks: the leaves to cut, a superset of `scans.stacks`; the others are stacked again where they are read.
    """
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
                    traced = self._traced(functools.partial(_bind, equation, params), operands)
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


def _bind(equation: Equation, params: Mapping[str, Any], *operands: Any) -> Any:
    return equation.primitive.bind(*operands, **equation.primitive.get_bind_params(params))
