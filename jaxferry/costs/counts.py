"""Counts a program's floating-point operations and bytes on its jaxpr.

XLA fuses element-wise operations into their neighbours, so these cost operations but no bytes. Products, convolutions,
reductions, lookups and similar operations read operands from memory and write results to memory. Program arguments and
results that only element-wise operations touch count once.

    bytes:  argument --> [light] --> [heavy] --> [light] --> [heavy] --> [light] --> result
            read where light         read write              read write              written where light
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core


@dataclasses.dataclass(frozen=True)
class Costs:
    """Totals of a program; a multiply-add counts as two operations, `kernels` those that are not fused into others."""

    flops: float = 0.0
    bytes_read: float = 0.0
    bytes_written: float = 0.0
    kernels: float = 0.0

    def __add__(self, other: "Costs") -> "Costs":
        return Costs(*map(operator.add, self._values, other._values))

    def __mul__(self, times: float) -> "Costs":
        return Costs(*(times * value for value in self._values))

    @property
    def _values(self) -> tuple[float, ...]:
        return self.flops, self.bytes_read, self.bytes_written, self.kernels

    @property
    def bytes(self) -> float:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written


@dataclasses.dataclass(frozen=True)
class HostRead:
    """An operation that reads `num_bytes` of an argument in host memory, as often as `times` says.

    `flops` are its floating-point operations if it is a product with the argument, which it reads panel by panel; else
    0.
    """

    num_bytes: float
    flops: float = 0.0
    times: int = 1


def jaxpr_costs(closed_jaxpr: core.ClosedJaxpr) -> Costs:
    """Counts a program, including nested programs.

    A scan counts its body once per iteration, a cond its most expensive branch. A while loop counts its body once,
    since its number of iterations is unknown.
    """
    jaxpr = closed_jaxpr.jaxpr
    total = _body_costs(jaxpr)
    heavy_reads = {id(atom) for eqn in _heavy(jaxpr) for atom in eqn.invars}
    heavy_writes = {id(variable) for eqn in _heavy(jaxpr) for variable in eqn.outvars}
    light_reads = {id(atom) for eqn in jaxpr.eqns for atom in eqn.invars} - heavy_reads
    arguments = [variable for variable in (*jaxpr.invars, *jaxpr.constvars) if id(variable) in light_reads]
    made = {id(variable) for eqn in jaxpr.eqns for variable in eqn.outvars}
    results = [v for v in jaxpr.outvars if id(v) in made and id(v) not in heavy_writes]
    light = Costs(0.0, sum(map(atom_bytes, arguments)), sum(map(atom_bytes, results)), float(bool(results)))
    return total + light


def touched_bytes(reads: Iterable[HostRead]) -> float:
    """Returns the bytes that a program reads from host memory."""
    return sum(read.num_bytes * read.times for read in reads)


def host_reads(closed_jaxpr: core.ClosedJaxpr, arguments: Collection[int]) -> tuple[HostRead, ...]:
    """Returns the operations of a program that read `arguments` in host memory, by their positions, in order.

    A lookup reads the rows that it returns. Any other operation reads its operand once: a product stages its weights by
    panels, each of which crosses the link once however many rows the other operand has (`xla_ffi/README.md`). Every
    operation that reads an argument counts: a forward that is run again reads again.
    """
    jaxpr = closed_jaxpr.jaxpr
    return tuple(_host_reads(jaxpr, {id(jaxpr.invars[position]): 1.0 for position in arguments}))


def _host_reads(jaxpr: core.Jaxpr, sources: dict[int, float]) -> list[HostRead]:
    """`sources` maps ids of host arrays and their views to the host bytes per byte of the view."""
    sources = dict(sources)
    found: list[HostRead] = []
    for eqn in jaxpr.eqns:
        read = [position for position, atom in enumerate(eqn.invars) if id(atom) in sources]
        if not read:
            continue
        name = eqn.primitive.name
        if name in VIEWS or name == "convert_element_type":
            # A barrier has several operands and as many results.
            for atom, result in [(eqn.invars[p], eqn.outvars[p]) for p in read]:
                before, after = atom_bytes(atom), atom_bytes(result)
                sources[id(result)] = sources[id(atom)] * (before / after if after else 1.0)
        elif name in ("gather", "dynamic_slice", "slice") and read == [0]:
            found.append(HostRead(sources[id(eqn.invars[read[0]])] * atom_bytes(eqn.outvars[0])))
        elif inner_jaxprs(eqn) and name != "while":
            found += _host_reads_inside(eqn, sources, read)
        else:
            num_bytes = sum(sources[id(eqn.invars[p])] * atom_bytes(eqn.invars[p]) for p in read)
            found.append(HostRead(num_bytes, _dot_flops(eqn) if name == "dot_general" and len(read) == 1 else 0.0))
    return found


def _host_reads_inside(eqn: core.JaxprEqn, sources: dict[int, float], read: list[int]) -> list[HostRead]:
    per_jaxpr = []
    for jaxpr in inner_jaxprs(eqn):
        # Operands that the nested program does not receive (the index of a cond) come first.
        shift = len(eqn.invars) - len(jaxpr.invars)
        inside = {id(jaxpr.invars[p - shift]): sources[id(eqn.invars[p])] for p in read if p >= shift}
        per_jaxpr.append(_host_reads(jaxpr, inside))
    if eqn.primitive.name == "cond":
        return max(per_jaxpr, key=touched_bytes)
    times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    return [dataclasses.replace(found, times=found.times * times) for found in itertools.chain(*per_jaxpr)]


def _body_costs(jaxpr: core.Jaxpr) -> Costs:
    return sum(map(_equation_costs, jaxpr.eqns), start=Costs())


def _equation_costs(eqn: core.JaxprEqn) -> Costs:
    name = eqn.primitive.name
    inner = inner_jaxprs(eqn)
    if name == "cond":
        return max((_body_costs(jaxpr) for jaxpr in inner), key=lambda costs: (costs.flops, costs.bytes))
    if inner and name not in _REDUCERS:
        return sum(map(_body_costs, inner), start=Costs()) * (eqn.params["length"] if name == "scan" else 1)
    flops = _FLOPS[name](eqn) if name in _FLOPS else float(sum(map(_size, eqn.outvars)))
    if name not in _HEAVY:
        return Costs(flops)
    read, written = _traffic(eqn)
    return Costs(flops, read, written, 1.0)


def _traffic(eqn: core.JaxprEqn) -> tuple[float, float]:
    """Returns the bytes that a heavy operation reads and writes."""
    name, made = eqn.primitive.name, sum(map(atom_bytes, eqn.outvars))
    if name in ("gather", "dynamic_slice"):
        return made + sum(map(atom_bytes, eqn.invars[1:])), made
    if name == "dynamic_update_slice":
        update = atom_bytes(eqn.invars[1])
        return update, update
    if name.startswith("scatter"):
        return sum(map(atom_bytes, eqn.invars[1:])), made
    return sum(map(atom_bytes, eqn.invars)), made


def inner_jaxprs(eqn: core.JaxprEqn) -> list[core.Jaxpr]:
    """Returns the nested programs that an equation runs."""
    if eqn.primitive.name in _REDUCERS:
        return []
    # The program itself does not run the rules of a custom derivative.
    rules = ("fwd", "bwd", "jvp")
    return list(_jaxprs_in([value for key, value in eqn.params.items() if not any(rule in key for rule in rules)]))


def _jaxprs_in(value: Any) -> Iterator[core.Jaxpr]:
    if isinstance(value, core.ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, core.Jaxpr):
        yield value
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _jaxprs_in(element)


def is_heavy(eqn: core.JaxprEqn) -> bool:
    """Whether an operation reads operands from memory and writes results to memory."""
    return eqn.primitive.name in _HEAVY


def _heavy(jaxpr: core.Jaxpr) -> list[core.JaxprEqn]:
    return [eqn for eqn in jaxpr.eqns if is_heavy(eqn) or inner_jaxprs(eqn)]


def atom_bytes(atom: Any) -> int:
    """Returns the bytes of a variable or literal of a jaxpr."""
    aval = atom.aval
    if not hasattr(aval, "shape"):
        return 0
    extended = jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)
    return _size(atom) * int(aval.dtype.itemsize if extended else np.dtype(aval.dtype).itemsize)


def _size(atom: Any) -> int:
    return math.prod(_shape(atom))


def _shape(atom: Any) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())


def _dot_flops(eqn: core.JaxprEqn) -> float:
    (contracting, _), _ = eqn.params["dimension_numbers"]
    depth = math.prod(_shape(eqn.invars[0])[axis] for axis in contracting)
    return 2.0 * _size(eqn.outvars[0]) * depth


def _conv_flops(eqn: core.JaxprEqn) -> float:
    """Counts each result as a sum over the kernel's window and its group's input channels."""
    kernel, spec = eqn.invars[1], eqn.params["dimension_numbers"]
    out_channels = _shape(kernel)[spec.rhs_spec[0]]
    return 2.0 * _size(eqn.outvars[0]) * _size(kernel) / max(1, out_channels)


def _attention_flops(eqn: core.JaxprEqn) -> float:
    """Counts cuDNN's attention: two products of all pairs of query and key, or five in the backward.

    A causal mask halves the pairs, and a window limits those of each query: cuDNN computes no other scores.
    """
    query, key, value = map(_shape, eqn.invars[:3])
    heads, length = (2, 1) if eqn.params["layout"] == 0 else (1, 2)
    pairs = float(query[length] * key[length])
    if eqn.params.get("use_causal_mask") or "CAUSAL" in str(eqn.params.get("mask_type")):
        pairs /= 2
    if window := eqn.params.get("sliding_window_length"):
        pairs = min(pairs, float(query[length] * window))
    forward = 2.0 * query[0] * query[heads] * pairs * (query[-1] + value[-1])
    return forward * (2.5 if "_bwd" in eqn.primitive.name else 1.0)


def _sort_flops(eqn: core.JaxprEqn) -> float:
    return _size(eqn.invars[0]) * max(1.0, math.log2(max(2, _shape(eqn.invars[0])[eqn.params["dimension"]])))


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


VIEWS = _names("reshape squeeze expand_dims transpose copy optimization_barrier stop_gradient layout_constraint")
_FREE = VIEWS | _names(
    "bitcast_convert_type broadcast_in_dim concatenate convert_element_type dynamic_slice dynamic_update_slice gather "
    "iota pad rev scatter slice split"
)
"""Operations that only move data."""
_REDUCTIONS = _names(
    "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor cumsum cumprod cummax "
    "cummin cumlogsumexp reduce reduce_window reduce_window_sum reduce_window_max reduce_window_min "
    "select_and_scatter_add select_and_gather_add"
)
_SCATTERS = _names("scatter-add scatter-sub scatter-mul scatter-min scatter-max")
_REDUCERS = _REDUCTIONS | _SCATTERS | {"scatter", "sort", "custom_lin"}
"""Operations whose nested program combines two elements; it counts as part of the operation."""
ATTENTION = frozenset(f"dot_product_attention_{kind}{way}_wrapper" for kind in ("", "fp8_") for way in ("fwd", "bwd"))
"""cuDNN's calls of `jax.nn.dot_product_attention`, which keep no scores in memory."""
_HEAVY = _names(
    "conv_general_dilated dot_general dynamic_slice dynamic_update_slice ffi_call fft gather ragged_dot scatter sort "
    "top_k"
).union(_REDUCTIONS, _SCATTERS, ATTENTION)
_FLOPS: dict[str, Callable[[core.JaxprEqn], float]] = {
    "conv_general_dilated": _conv_flops,
    "dot_general": _dot_flops,
    "sort": _sort_flops,
    **dict.fromkeys(ATTENTION, _attention_flops),
    **dict.fromkeys(_REDUCTIONS, lambda eqn: float(_size(eqn.invars[0]))),  # one for each operand
    **dict.fromkeys(_SCATTERS, lambda eqn: float(_size(eqn.invars[2]))),  # one for each update
    **dict.fromkeys(_FREE, lambda eqn: 0.0),
}
"""The floating-point operations of primitives; others take one for each element of their results."""
