"""A loss function as a flat list of equations over numbered values.

A jaxpr identifies values by variable objects, and two calls of the same jaxpr share them. Here calls are inlined, every
value has a number of its own, and each equation keeps what it needs to bind its primitive again. A segment is then a
slice of the list and runs without jaxpr surgery.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxferry.errors import InputError, PartitionError, call_users
from jaxferry.processes import is_raw_key

type_of_aval = Any  # jax.core.ShapedArray; its public alias has moved between JAX releases

Atom = int | core.Literal
"""An operand: the number of a value, or a literal."""

_INLINED = frozenset({"jit", "pjit", "closed_call", "core_call"})
_DERIVED = _INLINED | {"checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"}
"""Also inlined in a differentiated program, where derivative rules have no effect any more."""


@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    """One primitive applied to values.

    Attributes:
      primitive: the JAX primitive.
      params: its parameters, as in the jaxpr.
      inputs: operands in order.
      outputs: numbers of the values that it defines.
      context: the trace context of the equation; its manager is active when the equation is bound again.
      has_effects: whether it must run even if its outputs are unused.
      is_ordered: whether it must run in program order with others like it, as a callback with `ordered=True`.
    """

    primitive: core.Primitive
    params: Mapping[str, Any]
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    context: Any
    has_effects: bool
    is_ordered: bool = False

    @property
    def reads(self) -> tuple[int, ...]:
        """The operands that are values, not literals."""
        return tuple(atom for atom in self.inputs if isinstance(atom, int))


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """A traced loss function.

    Attributes:
      equations: in program order, without dead code.
      avals: shape and dtype of each value, by number.
      parameters: numbers of the parameter leaves, in the order of the flattened tree.
      batch: numbers of the leaves of the other arguments.
      constants: arrays that the function closed over, by number.
      outputs: the flattened outputs.
      out_tree: the tree of the outputs.
      num_devices: the number of devices that share a batch.
      num_processes: the number of processes that they belong to; see `Ownership`.
      kept: what was computed from slices of the equations, for later calls with the same slice.
    """

    equations: tuple[Equation, ...]
    avals: Sequence[type_of_aval]
    parameters: tuple[int, ...]
    batch: tuple[int, ...]
    constants: Mapping[int, Any]
    outputs: tuple[Atom, ...]
    out_tree: jax.tree_util.PyTreeDef
    num_devices: int = 1
    num_processes: int = 1
    kept: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def aval_of(self, atom: Atom) -> type_of_aval:
        """Shape and dtype of a value or a literal."""
        return self.avals[atom] if isinstance(atom, int) else atom.aval

    def num_bytes(self, value: int) -> int:
        """Bytes of one value."""
        return aval_bytes(self.avals[value])

    def num_shares(self, is_whole: bool = False) -> int:
        """The number of devices that share a layer's vectors; those of one process if each holds it whole."""
        return self.num_devices // self.num_processes if is_whole else self.num_devices

    @functools.cached_property
    def batch_size(self) -> int:
        """The size of the axis that devices share; 0 if there is one device, or they do not divide it."""
        return self.num_rows if self.num_devices > 1 and self.num_rows % self.num_devices == 0 else 0

    @functools.cached_property
    def num_rows(self) -> int:
        """The most frequent first axis of the arguments; of several, that of the most elements; 0 if none has axes.

        Running statistics, averages and other arguments shaped like a parameter, or used like one, do not count, nor do
        raw PRNG keys and what nothing reads, unless there is nothing else.
        """
        arrays = [value for value in self.batch if self.avals[value].shape]
        other, read = {self.avals[value].shape for value in self.parameters}, _used_as_rows(self)
        own = [value for value in arrays if self.avals[value].shape not in other and value in read]
        own = [value for value in own if not is_raw_key(self.avals[value].shape, self.avals[value].dtype)]
        rows, elements = collections.Counter[int](), collections.Counter[int]()
        for array in (self.avals[value] for value in own or arrays):
            rows[array.shape[0]] += 1
            elements[array.shape[0]] += array.size
        return max(rows, key=lambda size: (rows[size], elements[size]), default=0)

    def split_axis(self, aval: type_of_aval) -> int | None:
        """The axis along which an array of the step is split over the devices; None if each device has all of it.

        It is the first of the batch's size, or else the first axis of all if that is a multiple, as where batch and
        positions are one axis. Programs compute the same whatever is split, if XLA makes no mistake: along the axes of
        an image it does (gradients of strided convolutions on CPUs, JAX 0.10 and 0.12), which a batch's size avoids.
        """
        size = self.batch_size
        if not size or not aval.shape or not aval.size:
            return None
        if size in aval.shape:
            return int(aval.shape.index(size))
        return 0 if aval.shape[0] % size == 0 else None

    def device_bytes(self, *avals: type_of_aval) -> int:
        """The bytes that these arrays take on each device."""
        return sum(aval_bytes(aval) // (1 if self.split_axis(aval) is None else self.num_devices) for aval in avals)

    def held_bytes(self, *values: int) -> int:
        """The bytes that these values take on each device."""
        return self.device_bytes(*(self.avals[value] for value in values))


def aval_bytes(aval: type_of_aval) -> int:
    """Bytes of an array of this shape and dtype on a device; for typed PRNG keys, of their key data."""
    dtype = aval.dtype
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return int(aval.size) * int(dtype.itemsize)
    return -(-int(aval.size) * bits_of(dtype) // 8)


@functools.cache
def bits_of(dtype: Any) -> int:
    """Bits of an element of a dtype in a buffer of XLA, which packs elements of fewer than 8 bits."""
    dtype = np.dtype(dtype)
    if dtype.itemsize > 1 or dtype == np.bool_:
        return 8 * dtype.itemsize
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return int(info(dtype).bits)


def is_inexact(aval: type_of_aval) -> bool:
    """Whether a value of this type can carry a derivative."""
    return bool(jax.dtypes.issubdtype(aval.dtype, np.inexact))


def evaluate(equations: Iterable[Equation], values: dict[int, Any]) -> None:
    """Runs the equations on `values`, a map from numbers to arrays or tracers, and adds the results to it."""
    for equation in equations:
        operands = [values[atom] if isinstance(atom, int) else atom.val for atom in equation.inputs]
        values.update(zip(equation.outputs, bind(equation, operands, equation.params), strict=True))


def bind(equation: Equation, operands: Sequence[Any], params: Mapping[str, Any]) -> Sequence[Any]:
    """Applies an equation's primitive to arrays or tracers, with these parameters; returns its results."""
    with equation.context.manager:
        made = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(params))
    return made if equation.primitive.multiple_results else [made]


class Builder:
    """Collects equations and numbers values while jaxprs are inlined; arguments as for `trace`."""

    def __init__(self, keep_single: bool = False, is_derived: bool = False) -> None:
        self._keep_single, self._is_derived = keep_single, is_derived
        self.equations: list[Equation] = []
        self.avals: list[type_of_aval] = []
        self.constants: dict[int, Any] = {}
        self._constant_numbers: dict[int, int] = {}

    @classmethod
    def onto(cls, graph: Graph) -> Builder:
        """Returns a builder with the values of a graph under their numbers, but without its equations."""
        builder = cls()
        builder.avals, builder.constants = list(graph.avals), dict(graph.constants)
        builder._constant_numbers = {id(array): number for number, array in graph.constants.items()}
        return builder

    def value(self, aval: type_of_aval) -> int:
        """Adds a value and returns its number."""
        self.avals.append(aval)
        return len(self.avals) - 1

    def constant(self, variable: core.Var, array: Any) -> int:
        """Returns the number of an array that a jaxpr closes over; the same array always has the same number."""
        number = self._constant_numbers.get(id(array))
        if number is None:
            number = self._constant_numbers[id(array)] = self.value(variable.aval)
            self.constants[number] = array
        return number

    def inline(self, closed: core.ClosedJaxpr, operands: Sequence[Atom]) -> list[Atom]:
        """Adds a jaxpr's equations with new value numbers; returns its outputs."""
        jaxpr = closed.jaxpr
        names: dict[core.Var, Atom] = dict(zip(jaxpr.invars, operands, strict=True))
        names |= {v: self.constant(v, c) for v, c in zip(jaxpr.constvars, closed.consts, strict=True)}

        def read(atom: Any) -> Atom:
            return atom if isinstance(atom, core.Literal) else names[atom]

        for eqn in jaxpr.eqns:
            inputs = tuple(read(v) for v in eqn.invars)
            inner = None if self._keep_single and len(eqn.outvars) == 1 else _inlined_jaxpr(eqn, self._is_derived)
            if inner is not None:
                if eqn.params.get("prevent_cse"):
                    inputs = tuple(map(self._behind_barrier, inputs))
                results: Sequence[Atom] = self.inline(inner, inputs)
            elif self._is_derived and eqn.primitive.name == "optimization_barrier":
                results = list(map(self._behind_barrier, inputs))
            else:
                results = tuple(self.value(v.aval) for v in eqn.outvars)
                is_ordered = any("Ordered" in type(effect).__name__ for effect in eqn.effects)
                self.equations.append(
                    Equation(eqn.primitive, eqn.params, inputs, results, eqn.ctx, bool(eqn.effects), is_ordered)  # type: ignore[arg-type]
                )
            names |= dict(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _behind_barrier(self, atom: Atom) -> Atom:
        """Adds a barrier of one value, over which XLA merges no equal operations."""
        if not isinstance(atom, int):
            return atom
        aval = self.avals[atom]
        [eqn] = jax.make_jaxpr(jax.lax.optimization_barrier)(jax.ShapeDtypeStruct(aval.shape, aval.dtype)).eqns
        made = self.value(aval)
        self.equations.append(Equation(eqn.primitive, eqn.params, (atom,), (made,), eqn.ctx, has_effects=False))
        return made


def _inlined_jaxpr(eqn: core.JaxprEqn, is_derived: bool) -> core.ClosedJaxpr | None:
    if eqn.primitive.name not in (_DERIVED if is_derived else _INLINED):
        return None
    inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
    return inner if inner is None or hasattr(inner, "consts") else core.ClosedJaxpr(inner, ())


def trace(
    function: Callable[..., Any],
    params: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    keep_single: bool = False,
    is_derived: bool = False,
) -> Graph:
    """Traces `function(params, *args, **kwargs)` without computing anything.

    Args:
      function: the function, usually a loss.
      params: the tree of parameters: arrays or `jax.ShapeDtypeStruct`s.
      args: further arguments, likewise.
      kwargs: keyword arguments, likewise.
      keep_single: whether to keep calls of jitted functions that have one result, instead of inlining them.
      is_derived: whether the function will not be differentiated: calls of custom derivatives and `jax.checkpoint` are
        then inlined, and each barrier holds one value.
    """
    leaves, params_tree = jax.tree.flatten(params)
    rest, rest_tree = jax.tree.flatten((args, dict(kwargs)))
    call = flat_call(lambda: function, params_tree, rest_tree)
    closed, out_shape = jax.make_jaxpr(call, return_shape=True)(leaves, rest)
    return graph_of(closed, len(leaves), jax.tree.structure(out_shape), keep_single, is_derived)


def _used_as_rows(graph: Graph) -> set[int]:
    """Arguments that are read, but not as frozen parameters and statistics are.

    A kernel's first axis is summed over by a product, a table's is looked up in, and a scale's is the last of what it
    multiplies.
    """
    source = {value: value for value in graph.batch}
    read = {atom for equation in graph.equations for atom in equation.reads}
    read |= {atom for atom in graph.outputs if isinstance(atom, int)}
    found, rows = set[int](), set[int]()
    for equation in graph.equations:
        name, params = equation.primitive.name, equation.params
        sources = [source.get(atom, -1) if isinstance(atom, int) else -1 for atom in equation.inputs]
        if name == "convert_element_type":
            source |= dict.fromkeys(equation.outputs, sources[0])
        elif name == "dot_general" and sources[0] != sources[1]:
            found |= {own for own, axes in zip(sources, params["dimension_numbers"][0], strict=True) if 0 in axes}
        elif name == "conv_general_dilated":
            found.add(sources[1])
        elif name == "gather":
            found |= {sources[0]} if 0 in params["dimension_numbers"].start_index_map else set()
        elif name in ("broadcast_in_dim", "reshape"):
            before, after = (graph.aval_of(atom).shape for atom in (equation.inputs[0], equation.outputs[0]))
            stays = before[:1] == after[:1] and params.get("broadcast_dimensions", (0,))[:1] == (0,)
            (rows if stays else found).add(sources[0])
    return {value for value in graph.batch if value in read and (value in rows or value not in found)}


def are_zeros(atom: Atom, made_by: Mapping[int, Equation]) -> bool:
    """Whether an atom is a constant 0, or an array that it fills; `made_by` has the equation of each value."""
    if not isinstance(atom, int):
        return not any(np.asarray(atom.val).tobytes())
    equation = made_by.get(atom)
    if equation is None or equation.primitive.name not in ("broadcast_in_dim", "convert_element_type"):
        return False
    return are_zeros(equation.inputs[0], made_by)


def zeros_of(graph: Graph) -> list[int]:
    """The numbers of the outputs that are arrays of zeros, whatever the inputs."""
    made_by = {value: equation for equation in graph.equations for value in equation.outputs}
    return [number for number, atom in enumerate(graph.outputs) if are_zeros(atom, made_by)]


def result_shapes(function: Callable[..., Any], *args: Any) -> Any:
    """As `jax.eval_shape`, whose every call JAX would keep as long as the function lives."""
    return jax.eval_shape(lambda *args: call_users(function, *args), *args)


def flat_call(function: Callable[[], Callable[..., Any]], params_tree: Any, rest_tree: Any) -> Callable[..., Any]:
    """`call(leaves, rest)` for the function that `function` returns, with its arguments flattened."""

    def call(leaves: list[Any], rest: list[Any]) -> Any:
        more_args, more_kwargs = jax.tree.unflatten(rest_tree, rest)
        made = call_users(function(), jax.tree.unflatten(params_tree, leaves), *more_args, **more_kwargs)
        if found := no_arrays(made):
            raise PartitionError(f"the function must return arrays, it returns {found}")
        return made

    return call


def refuse_leaks(closed: core.ClosedJaxpr, num_inputs: int) -> None:
    """Raises InputError if the trace of a function of the user's, of so many arrays, reads a tracer of another trace.

    JAX itself raises UnexpectedTracerError, but only when a program runs.
    """
    # `jax.jit` puts these before the inputs; to `jax.make_jaxpr` they are constants.
    found = [v.aval for v in closed.jaxpr.invars[: len(closed.jaxpr.invars) - num_inputs]]
    found += [constant.aval for constant in closed.consts if isinstance(constant, jax.core.Tracer)]
    if found:
        raise InputError(
            f"the function reads a leaked tracer, {found[0].str_short()}: a value that a traced function has stored "
            "outside; return it as a result there, or compute it anew (JAX_CHECK_TRACER_LEAKS=1 shows where it leaks)"
        )


def no_arrays(tree: Any) -> str:
    """Describes the first leaf of a tree that is neither an array nor a number; empty if there is none."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not (hasattr(leaf, "dtype") or isinstance(leaf, int | float | complex)):
            return f"a {type(leaf).__name__}" + (f" at {jax.tree_util.keystr(path)}" if path else "")
    return ""


def graph_of(
    closed: core.ClosedJaxpr,
    num_params: int,
    out_tree: jax.tree_util.PyTreeDef,
    keep_single: bool = False,
    is_derived: bool = False,
) -> Graph:
    """The graph of a jaxpr whose first inputs are parameters; `keep_single`, `is_derived` as for `trace`."""
    builder = Builder(keep_single, is_derived)
    numbers = [builder.value(v.aval) for v in closed.jaxpr.invars]
    outputs = tuple(builder.inline(closed, numbers))
    return Graph(
        equations=live_equations(builder.equations, outputs),
        avals=builder.avals,
        parameters=tuple(numbers[:num_params]),
        batch=tuple(numbers[num_params:]),
        constants=builder.constants,
        outputs=outputs,
        out_tree=out_tree,
    )


def live_equations(equations: Sequence[Equation], outputs: Iterable[Atom]) -> tuple[Equation, ...]:
    """Returns the equations that an output or an effect depends on."""
    needed = {atom for atom in outputs if isinstance(atom, int)}
    kept = []
    for equation in reversed(equations):
        if equation.has_effects or needed.intersection(equation.outputs):
            needed.update(equation.reads)
            kept.append(equation)
    return tuple(reversed(kept))
