"""Row gradients of lookups, and which primitives treat every element alike.

Row gradients of lookups: the touched rows instead of a table of mostly zeros.

The derivative of a lookup scatters a few rows into a table of zeros. That table need not exist on the device nor cross
the link: only indices and rows are sent, and the host scatters them into its gradient (MemFerry, section III: an
embedding touches little of its table). If the table is tied, its head has sent a dense gradient before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.partition.graph import Equation, Graph, are_zeros, evaluate, live_equations, trace
from jaxferry.partition.layout import Span

ELEMENTWISE = frozenset(
    [
        *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt"),
        *("ceil", "clamp", "convert_element_type", "copy", "copy_p", "cos", "cosh", "div", "eq", "erf"),
        *("erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le"),
        *("log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or"),
        *("pow", "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left"),
        *("shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square"),
        *("stop_gradient", "sub", "tan", "tanh", "xor"),
    ]
)
"""Names of primitives. Each operand has the result's shape or is a scalar."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowGradient:
    """A gradient that is zero outside some rows.

    Attributes:
      indices: the rows' indices, as the scatter takes them: [.., 1].
      rows: the values that are added to these rows: [.., columns].
      scatter: the equation that adds them to a table.
      shape: the table's shape.
      dtype: the table's dtype.
      span: the elements of the table that are wanted; None for all.
    """

    indices: Any
    rows: Any
    scatter: Equation = dataclasses.field(metadata={"static": True})
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    span: Span | None = dataclasses.field(default=None, metadata={"static": True})

    def onto(self, table: jax.Array) -> jax.Array:
        """Returns the table, of any dtype, with the rows added in its dtype; repeated rows accumulate.

        Args:
          table: the table, or its elements of `span`, flat.
        """
        if self.span is None:
            return self._added(table, self.indices, self.scatter.params["mode"])
        if not self.span.size:
            return table
        # Only the table's rows that hold these elements exist. The others' indices lie outside, so they are dropped.
        num_columns = max(self.shape[1], 1)
        first, last = self.span.start // num_columns, -(-self.span.stop // num_columns)
        before, after = self.span.start - first * num_columns, last * num_columns - self.span.stop
        rows = jnp.pad(table, (before, after)).reshape(last - first, self.shape[1])
        indices = self.indices.astype(np.int32)
        if self.is_clipped:
            indices = jnp.clip(indices, 0, self.shape[0] - 1)
        made = self._added(rows, indices - first, jax.lax.GatherScatterMode.FILL_OR_DROP)
        return made.reshape(-1)[before : before + self.span.size]

    def _added(self, table: jax.Array, indices: Any, mode: Any) -> jax.Array:
        params = self.scatter.params
        options = {name: params[name] for name in ("indices_are_sorted", "unique_indices")}
        rows = self.rows.astype(table.dtype)
        return jax.lax.scatter_add(table, indices, rows, params["dimension_numbers"], mode=mode, **options)

    @property
    def is_clipped(self) -> bool:
        """Whether an index outside the table means its first or last row; else it is ignored."""
        return bool(self.scatter.params["mode"] == jax.lax.GatherScatterMode.CLIP)

    def dense(self) -> jax.Array:
        """Returns the gradient as a dense table."""
        return self.onto(jnp.zeros(self.shape, self.dtype))


Gradient = jax.Array | RowGradient


def keep_rows(
    backward: Callable[..., Any], arguments: Sequence[Any], num_gradients: int
) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """Returns the same backward with `RowGradient`s for lookups, and their arrays' avals; None without lookups.

    Args:
      backward: `(weights, *others) -> (weight gradients, input cotangents)`.
      arguments: shape structs of its arguments.
      num_gradients: number of weight gradients.
    """
    graph = trace(backward, arguments[0], tuple(arguments[1:]), {})
    scatters = {i: found for i in range(num_gradients) if (found := _scatter_of_zeros(graph, i)) is not None}
    if not scatters:
        return None
    atoms = [
        atom
        for i, output in enumerate(graph.outputs)
        for atom in (scatters[i].inputs[1:] if i in scatters else [output])
    ]
    equations = live_equations(graph.equations, atoms)
    avals = list(map(graph.aval_of, atoms))
    num_cotangents = len(graph.outputs) - num_gradients

    def sparse(*given: Any) -> tuple[list[Any], list[Any]]:
        values = dict(graph.constants)
        values |= zip((*graph.parameters, *graph.batch), jax.tree.leaves(given), strict=True)
        evaluate(equations, values)
        results = [values[atom] if isinstance(atom, int) else atom.val for atom in atoms]
        gradients: list[Any] = []
        for i in range(num_gradients):
            scatter = scatters.get(i)
            if scatter is None:
                gradients.append(results.pop(0))
            else:
                aval = graph.avals[scatter.outputs[0]]
                gradients.append(
                    RowGradient(results.pop(0), results.pop(0), scatter, tuple(aval.shape), np.dtype(aval.dtype))
                )
        return gradients, results

    return sparse, tuple(avals[: len(avals) - num_cotangents])


def _scatter_of_zeros(graph: Graph, output: int) -> Equation | None:
    """Returns the equation that defines an output, if it adds whole rows to zeros, of fewer elements than the table."""
    atom = graph.outputs[output]
    made_by = {value: equation for equation in graph.equations for value in equation.outputs}
    equation = made_by.get(atom) if isinstance(atom, int) else None
    if equation is None or equation.primitive.name != "scatter-add" or len(equation.inputs) != 3:
        return None
    table, _, rows = equation.inputs
    if not isinstance(rows, int) or not are_zeros(table, made_by):
        return None
    made, added, dims = graph.avals[equation.outputs[0]], graph.avals[rows], equation.params["dimension_numbers"]
    if made.ndim != 2 or added.size >= made.size or added.shape[-1:] != made.shape[1:] or dims.operand_batching_dims:
        return None
    are_rows = (dims.update_window_dims, dims.inserted_window_dims, dims.scatter_dims_to_operand_dims) == (
        (added.ndim - 1,),
        (0,),
        (0,),
    )
    return equation if are_rows else None
