"""Traces functions of the user's, once for the same shapes, and takes meshes with explicit axes out of the traces."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend import core, linear_util
from jax.sharding import AxisType, NamedSharding

from jaxferry.errors import InputError, call_users
from jaxferry.partition.graph import Graph, evaluate, flat_call, graph_of, refuse_leaks
from jaxferry.partition.scans import jaxprs_in
from jaxferry.processes import is_key
from jaxferry.settings import outside_mesh, users_settings


def known_jaxpr(
    function: Callable[..., Any], params: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[core.ClosedJaxpr, jax.tree_util.PyTreeDef]:
    """Traces a function of the user's, as `jax.jit` does: once, as long as the function lives.

    The same function, shapes and settings of JAX give the same jaxpr object. Arguments as for `trace`.

    Returns:
      The jaxpr, and the tree of the outputs.
    """
    leaves, params_tree = jax.tree.flatten(params)
    rest, rest_tree = jax.tree.flatten((args, dict(kwargs)))
    call = _known_call(function, params_tree, rest_tree)

    def trace_under(mesh: Any) -> Any:
        own = [_shape_of(leaf, mesh) if isinstance(leaf, jax.Array) else leaf for leaf in rest]
        # JAX checks what the function returns.
        traced = call_users(call.trace, leaves, own)
        refuse_leaks(traced.jaxpr, len(leaves) + len(own))
        return traced

    with users_settings():
        mesh = jax.sharding.get_abstract_mesh()
        if AxisType.Explicit not in mesh.axis_types:
            traced = trace_under(_NO_MESH)
            return traced.jaxpr, jax.tree.structure(traced.out_info)
        # Explicit axes are a part of all types. What cannot be traced with them, or not be taken out, may do without.
        try:
            traced = trace_under(mesh)
            if traced.jaxpr not in _OUTSIDE_MESH:
                _OUTSIDE_MESH[traced.jaxpr] = _without_shardings(traced.jaxpr)
            return _OUTSIDE_MESH[traced.jaxpr], jax.tree.structure(traced.out_info)
        except Exception:
            with contextlib.suppress(Exception), outside_mesh():
                traced = trace_under(_NO_MESH)
                return traced.jaxpr, jax.tree.structure(traced.out_info)
            raise


def _shape_of(array: Any, mesh: Any = None) -> jax.ShapeDtypeStruct:
    """The shape of an array; with its sharding if that is over the mesh, whose explicit axes are a part of types."""
    where: Any = getattr(array, "sharding", None)
    is_over_mesh = isinstance(where, NamedSharding) and where.mesh.abstract_mesh == mesh
    weak_type = getattr(array, "weak_type", False)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=weak_type, sharding=where if is_over_mesh else None)


def check_meshes(graph: Graph) -> None:
    """Raises InputError if an equation, at any depth, is bound to a mesh of another size than the step's."""
    for name, mesh in _meshes(graph.equations):
        if mesh.size != graph.num_devices:
            raise InputError(
                f"the function has a {name} over the mesh {dict(mesh.shape)}, and the step trains on "
                f"{graph.num_devices} device{'s' * (graph.num_devices > 1)}: pass this mesh to train_step as mesh= "
                "(of one axis, 'data'), or take a mesh of the step's devices"
            )


def _meshes(equations: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yields the meshes that equations cannot do without, each with the primitive's name."""
    for equation in equations:
        if equation.primitive.name == "shard_map":
            yield "shard_map", equation.params["mesh"]
        # A constraint that names axes alone has no effect on one device.
        elif isinstance(getattr(sharding := equation.params.get("sharding"), "mesh", None), jax.sharding.Mesh):
            yield equation.primitive.name, sharding.mesh
        for jaxpr in jaxprs_in(equation):
            yield from _meshes(jaxpr.eqns)


_OUTSIDE_MESH: weakref.WeakKeyDictionary[core.ClosedJaxpr, core.ClosedJaxpr] = weakref.WeakKeyDictionary()
_NO_MESH = jax.sharding.AbstractMesh((), ())
_PLACING = frozenset({"reshard", "sharding_constraint", "mesh_cast"})
_BOUND = frozenset({"shard_map", "custom_vjp_call", "custom_vjp_call_jaxpr"})
"""Primitives with functions that have the types of the mesh for good."""


def _without_shardings(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same computation without shardings, which a mesh with explicit axes puts into types: a step places arrays.

    Raises:
      InputError: if a part of it cannot be without them.
    """
    graph = graph_of(closed, 0, jax.tree.structure(()))

    def run(*args: Any) -> list[Any]:
        values = dict(zip(graph.batch, args, strict=True))
        values |= {n: array if is_key(array) else np.asarray(array) for n, array in graph.constants.items()}
        for equation in graph.equations:
            if equation.primitive.name in _PLACING:
                for number, atom in zip(equation.outputs, equation.inputs, strict=True):
                    dtype = graph.aval_of(atom).dtype
                    values[number] = values[atom] if isinstance(atom, int) else np.asarray(atom.val, dtype)
                continue
            context = types.SimpleNamespace(manager=_leaving_mesh(equation.context))
            if equation.primitive.name in _BOUND:
                raise InputError(
                    f"the loss function names explicit axes of the mesh that jax.set_mesh has set, and has a "
                    f"{equation.primitive.name}: make the mesh with axis_types=(jax.sharding.AxisType.Auto,)"
                )
            params = {name: _outside(name, value, equation.context) for name, value in equation.params.items()}
            evaluate([dataclasses.replace(equation, params=params, context=context)], values)
        return [values[atom] if isinstance(atom, int) else atom.val for atom in graph.outputs]

    with jax.sharding.use_abstract_mesh(_NO_MESH):
        return jax.make_jaxpr(run)(*map(_shape_of, closed.in_avals))


@contextlib.contextmanager
def _leaving_mesh(context: Any) -> Iterator[None]:
    with context.manager, jax.sharding.use_abstract_mesh(_NO_MESH):
        yield


def _outside(name: str, value: Any, context: Any) -> Any:
    """A parameter of an equation in this context, without shardings."""
    if name == "jvp_jaxpr_fun":

        def derived(*zeros: Any) -> Any:
            with context.manager:
                jaxpr, constants, *more = value.call_wrapped(*zeros)
            outside = _without_shardings(core.ClosedJaxpr(jaxpr, constants))
            return outside.jaxpr, outside.consts, *more

        return linear_util.wrap_init(derived, debug_info=value.debug_info)
    if name in ("sharding", "out_sharding"):
        return None
    if isinstance(value, core.ClosedJaxpr):
        return _without_shardings(value)
    if isinstance(value, core.Jaxpr):
        return _without_shardings(core.ClosedJaxpr(value, ())).jaxpr
    return tuple(_outside("", each, context) for each in value) if type(value) is tuple else value


class _Flagged(functools.partial):
    """A function of the user's with keyword arguments that are not traced."""


def with_flags(function: Callable[..., Any], flags: Mapping[str, Any]) -> Callable[..., Any]:
    """The function with these static keyword arguments: booleans, strings and None."""
    return _Flagged(function, **flags) if flags else function


_CALLS: weakref.WeakKeyDictionary[Callable[..., Any], dict[Any, Any]] = weakref.WeakKeyDictionary()
"""For each function: its jitted calls by flags and trees of arguments. JAX keeps the traces with the calls."""


def _known_call(function: Callable[..., Any], params_tree: Any, rest_tree: Any) -> Any:
    """A jitted `call(leaves, rest)` of the function; the same one as long as the function lives, if it can be a key."""
    owner, flags = function, {}
    if isinstance(function, _Flagged):
        owner, flags = function.func, function.keywords
    try:
        calls, reference = _CALLS.setdefault(owner, {}), weakref.ref(owner)
    except TypeError:
        return jax.jit(flat_call(lambda: function, params_tree, rest_tree))

    def living() -> Callable[..., Any]:
        found = reference()
        assert found is not None, "a function is traced while it lives"
        return with_flags(found, flags)

    key = (tuple(flags.items()), params_tree, rest_tree)
    if key not in calls:
        calls[key] = jax.jit(flat_call(living, params_tree, rest_tree))
    return calls[key]
