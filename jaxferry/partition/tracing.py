"""Traces a function on its parameters in the compute dtype, and compares programs by content.

params, args -> shapes -> jaxpr -> graph -> scans over layers unrolled

Two segments are the same program if their equations are equal up to the numbers of their values, which are renumbered
in order of appearance. A callable among the parameters of a primitive (the rule of a `custom_vjp`) cannot be compared
by content: `Canonical.is_opaque` reports it, and the caller compares the differentiated programs instead, where such
rules are resolved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxferry.errors import InputError, PartitionError, call_users, is_internal
from jaxferry.partition.graph import Builder, Equation, Graph, bits_of, graph_of, type_of_aval
from jaxferry.partition.groups import Path, leaf_paths, module_paths
from jaxferry.partition.layout import Layer
from jaxferry.partition.packed import (
    Stack,
    Stored,
    check_storable,
    reading_stored,
    stored_in,
    stored_leaves,
    stored_struct,
)
from jaxferry.partition.scans import find_scans, unroll
from jaxferry.partition.users_traces import check_meshes, known_jaxpr
from jaxferry.processes import is_key
from jaxferry.settings import users_settings


def check_byte_order(leaf: Any, name: str) -> None:
    """Raises InputError if a leaf is a NumPy array whose bytes are swapped."""
    dtype = getattr(leaf, "dtype", None)
    if isinstance(dtype, np.dtype) and not dtype.isnative:
        raise InputError(
            f"{name} has byte-swapped elements ({dtype.str}): pass array.astype(array.dtype.newbyteorder('='))"
        )


def bytes_of(array: Any) -> bytes:
    """Returns the bytes of a constant; for PRNG keys, those of their key data."""
    return np.asarray(jax.random.key_data(array) if is_key(array) else array).tobytes()


class Canonical:
    """Describes a program as nested tuples without names or addresses.

    Args:
      is_derived: whether the program is already differentiated, or never will be. Its remaining derivative rules
        then have no effect and are ignored.

    Attributes:
      is_opaque: whether some part could be compared only by identity.
    """

    def __init__(self, is_derived: bool = False) -> None:
        self.is_opaque = False
        self._is_derived = is_derived

    def digest(self, content: Any) -> str:
        """Returns a short hash of the content."""
        return hashlib.sha256(repr(content).encode()).hexdigest()[:16]

    def equations(
        self,
        equations: Iterable[Equation],
        inputs: Sequence[int],
        outputs: Sequence[Any],
        avals: Sequence[type_of_aval],
    ) -> Any:
        """Returns the content of a list of equations with numbered values."""
        names = {value: index for index, value in enumerate(inputs)}

        def read(atom: Any) -> Any:
            return names[atom] if isinstance(atom, int) else self._literal(atom)

        body = []
        for equation in equations:
            operands = [read(atom) for atom in equation.inputs]
            names |= {value: len(names) + i for i, value in enumerate(equation.outputs)}
            kinds = [str(avals[value]) for value in equation.outputs]
            body.append((equation.primitive.name, self._params(equation), operands, kinds, str(equation.context)))
        return [str(avals[value]) for value in inputs], body, [read(atom) for atom in outputs]

    def jaxpr(self, jaxpr: core.Jaxpr, constants: Sequence[Any] = ()) -> Any:
        """Returns the content of a jaxpr."""
        names: dict[Any, int] = {}
        for variable in (*jaxpr.constvars, *jaxpr.invars):
            names[variable] = len(names)

        def read(atom: Any) -> Any:
            return self._literal(atom) if isinstance(atom, core.Literal) else names[atom]

        body = []
        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            names |= {variable: len(names) + i for i, variable in enumerate(eqn.outvars)}
            kinds = [str(variable.aval) for variable in eqn.outvars]
            body.append((eqn.primitive.name, self._params(eqn), operands, kinds))
        kinds = [str(variable.aval) for variable in (*jaxpr.constvars, *jaxpr.invars)]
        return kinds, body, [read(atom) for atom in jaxpr.outvars], [self._value(value) for value in constants]

    def _literal(self, literal: core.Literal) -> Any:
        return str(literal.aval), self._value(literal.val)

    def _params(self, equation: Any) -> Any:
        params = sorted(equation.params.items())
        if self._is_derived and equation.primitive.name.startswith(("custom_jvp_call", "custom_vjp_call")):
            params = [(name, value) for name, value in params if hasattr(value, "jaxpr") or hasattr(value, "eqns")]
        if "callback" in equation.primitive.name:
            return [
                (name, self._callback(value) if name == "callback" else self._value(value)) for name, value in params
            ]
        return [(name, self._value(value)) for name, value in params]

    def _callback(self, value: Any) -> Any:
        """A callback is compared by identity: objects that print alike may differ."""
        self.is_opaque = True
        return id(getattr(value, "callback_func", value))

    def _value(self, value: Any) -> Any:
        if hasattr(value, "eqns"):
            return self.jaxpr(value, getattr(value, "consts", ()))
        if hasattr(value, "jaxpr") and hasattr(value, "consts"):
            return self.jaxpr(value.jaxpr, value.consts)
        if isinstance(value, (tuple, list)):
            return type(value).__name__, [self._value(item) for item in value]
        if isinstance(value, dict):
            return [(repr(key), self._value(item)) for key, item in value.items()]
        if hasattr(value, "__array__") and hasattr(value, "shape"):
            return str(value.dtype), value.shape, hashlib.sha256(bytes_of(value)).hexdigest()
        text = repr(value)
        is_function = hasattr(value, "call_wrapped") or inspect.isroutine(value) or isinstance(value, functools.partial)
        if is_function or " at 0x" in text:
            self.is_opaque = True
            return text, id(value)
        return text


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function traced on parameters in the compute dtype, its scans over layers unrolled."""

    graph: Graph
    stored: list[Stored]
    master_dtypes: list[np.dtype]
    frozen: frozenset[int]
    notes: tuple[str, ...]


def trace(
    function: Callable[..., Any],
    params: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    dtype: Any,
    layers: Sequence[Layer] | None,
    frozen: Collection[int],
    num_devices: int,
    num_processes: int,
) -> Traced:
    """Traces a function on shapes; args as for `partition`, of which `dtype` is the `compute_dtype`.

    Raises:
      InputError: as in `partition`, of the parameters.
    """
    keys = module_paths(params)
    abstract, dtypes = abstract_params(params, ["/".join(path) for path in keys], dtype, frozen)
    closed, out_tree = known_jaxpr(function, abstract, args, kwargs or {})
    graph, stored, notes = _unroll_scans(graph_of(closed, len(keys), out_tree), keys, layers)
    frozen = frozenset(index for index, leaf in enumerate(stored) if leaf.source in frozen)
    graph = reading_stored(graph, stored, frozen)
    graph = dataclasses.replace(graph, num_devices=num_devices, num_processes=num_processes)
    check_meshes(graph)
    return Traced(graph, stored, [dtypes[leaf.source] for leaf in stored], frozen, notes)


def traced_jaxpr(
    function: Callable[..., Any], params: Any, args: Any, kwargs: Any, dtype: Any, frozen: Collection[int]
) -> core.ClosedJaxpr:
    """The jaxpr that `partition` cuts: the same object as long as the function, all shapes and JAX's settings are.

    Args as for `partition`; `dtype` is its `compute_dtype`.
    """
    paths = ["/".join(path) for path in leaf_paths(params)]
    abstract, _ = abstract_params(params, paths, dtype, frozen)
    return known_jaxpr(function, abstract, args, kwargs)[0]


@contextlib.contextmanager
def refused_by_jax(
    loss_fn: Callable[..., Any], params: Any, args: Any, kwargs: Any, dtype: Any, frozen: Collection[int] = ()
) -> Iterator[None]:
    """Raises what JAX itself raises for a loss function's gradient in place of an internal error of the body.

    Segments are differentiated after the trace, so an operation without a derivative fails in our functions. Args as
    for `partition`; `dtype` is its `compute_dtype`.
    """
    try:
        yield
    except Exception as error:
        if is_internal(error):
            paths = ["/".join(path) for path in leaf_paths(params)]
            leaves, tree = jax.tree.flatten(abstract_params(params, paths, dtype, frozen)[0])
            trained = {index: leaf for index, leaf in enumerate(leaves) if index not in frozen}
            others = {index: leaf for index, leaf in enumerate(leaves) if index in frozen}

            def loss(trained: dict[int, Any], others: dict[int, Any], args: Any, kwargs: Any) -> Any:
                own = trained | others
                made = loss_fn(jax.tree.unflatten(tree, [own[index] for index in range(len(own))]), *args, **kwargs)
                return jax.tree.leaves(made)[0]

            with users_settings():
                call_users(jax.jit(jax.grad(loss)).lower, trained, others, args, dict(kwargs or {}))
        raise


def copying_parameters(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that it returns copies of parameters, never the parameters themselves."""

    def copied(params: Any, *args: Any, **kwargs: Any) -> Any:
        given = {id(leaf) for leaf in jax.tree.leaves(params)}
        results = function(params, *args, **kwargs)
        return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True) if id(leaf) in given else leaf, results)

    return copied


def _unroll_scans(
    graph: Graph, keys: Sequence[Path], layers: Sequence[Layer] | None
) -> tuple[Graph, list[Stored], tuple[str, ...]]:
    """Unrolls scans over layers. Returns the new graph, its parameters, and notes on scans that stay.

    Given layers determine which leaves are cut and how.
    """
    if layers is None:
        scans = find_scans(graph)
        stored = stored_leaves(keys, scans.stacks)
        stacks = scans.stacks
    else:
        stored = stored_in(layers)
        stacks = {
            leaf.source: Stack(leaf.part.length, leaf.part.axis, leaf.source)
            for leaf in stored
            if leaf.part is not None
        }
        scans = find_scans(graph, stacks)
    notes = tuple(
        f"not cut by layer though scanned over: {', '.join(repr('/'.join(keys[leaf])) for leaf in leaves)}: {reason}"
        for reason, leaves in scans.notes
    )
    return unroll(graph, scans, stacks), stored, notes


def abstract_params(
    params: Any, paths: Sequence[str], compute_dtype: Any, frozen: Collection[int]
) -> tuple[Any, list[np.dtype]]:
    """Returns shape structs in the compute dtype, and the dtypes of the master parameters."""
    leaves, tree = jax.tree.flatten(params)
    if not leaves:
        raise InputError("params holds no parameter: pass a tree with at least one array")
    dtypes = []
    for index, (leaf, path) in enumerate(zip(leaves, paths, strict=True)):
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
            hint = ": pass what model.init returns" if hasattr(leaf, "init") and hasattr(leaf, "apply") else ""
            raise InputError(f"parameter {path!r} is a {type(leaf).__name__}, not an array{hint}")
        check_byte_order(leaf, f"parameter {path!r}")
        if index in frozen:
            check_storable(leaf.dtype, f"parameter {path!r}")
            dtypes.append(np.dtype(stored_struct(leaf).dtype))
            continue
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise InputError(
                f"parameter {path!r} has dtype {leaf.dtype}; only real floating-point parameters can be trained: "
                "freeze it by trainable=, or pass it outside params, for instance in the batch "
                "(NNX: nnx.split(model, nnx.Param, ...) takes the parameters alone)"
            )
        if bits_of(leaf.dtype) < 8 or np.asarray(-1, leaf.dtype) != -1:
            raise InputError(
                f"parameter {path!r} has dtype {leaf.dtype}, which cannot hold gradients: freeze it by trainable=, or "
                "pass it in a floating-point dtype of 8 bits or more with a sign"
            )
        # Updates need fp32 precision even if the model is stored in 16 bits.
        dtypes.append(np.dtype(np.float32 if leaf.dtype.itemsize < 4 else leaf.dtype))
    computed = [jax.ShapeDtypeStruct(leaf.shape, _computed_dtype(leaf.dtype, compute_dtype)) for leaf in leaves]
    return jax.tree.unflatten(tree, computed), dtypes


def _computed_dtype(dtype: Any, compute_dtype: Any) -> Any:
    """Returns the dtype that the loss function sees; quantised parameters keep theirs, since the model scales them."""
    is_plain = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize > 1
    return compute_dtype if compute_dtype is not None and is_plain else dtype


def check_outputs(graph: Graph) -> tuple[int, jax.tree_util.PyTreeDef | None]:
    """Returns the number of the loss and the tree of the auxiliary outputs (None without any)."""
    shape = jax.tree.unflatten(graph.out_tree, range(graph.out_tree.num_leaves))
    has_aux = isinstance(shape, tuple) and len(shape) == 2
    loss = shape[0] if has_aux else shape
    if not isinstance(loss, int):
        kind = type(loss).__name__ + (f" of {len(loss)}" if isinstance(loss, tuple | list) else "")
        found = "None: is a `return` missing?" if shape is None else f"a {kind}" + " and aux" * has_aux
        raise PartitionError(f"loss_fn must return a scalar, or (scalar, aux); it returns {found}")
    atom = graph.outputs[loss]
    aval: Any = graph.aval_of(atom)
    if aval.shape != () or not jnp.issubdtype(aval.dtype, jnp.floating):
        raise PartitionError(
            f"loss_fn must return a real floating-point scalar, or (scalar, aux); its loss is "
            f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
        )
    if not isinstance(atom, int) or atom in graph.parameters:
        raise PartitionError("the loss is computed from no parameter: does loss_fn use its first argument?")
    held = [path for path in graph.outputs[1:] if isinstance(path, int) and path in graph.parameters]
    if held:
        raise PartitionError("loss_fn returns a parameter as an auxiliary output: read it from state.params instead")
    return atom, jax.tree.structure(shape[1]) if has_aux else None


def ending_with_loss(traced: Traced, loss: int) -> tuple[Traced, int]:
    """Ends the trace with a copy of the loss, which is then made by the last segment; returns the copy's number."""
    graph, builder = traced.graph, Builder.onto(traced.graph)
    aval = graph.avals[loss]
    copy = jax.make_jaxpr(jnp.copy)(jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type))
    [last] = builder.inline(copy, [loss])
    assert isinstance(last, int)
    ended = dataclasses.replace(
        graph,
        equations=(*graph.equations, *builder.equations),
        avals=builder.avals,
        outputs=(last, *graph.outputs[1:]),
    )
    return dataclasses.replace(traced, graph=ended), last
