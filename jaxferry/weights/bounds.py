"""A lower bound on every schedule: the MILP of "Weight Offloading Strategies", section 6, solved by HiGHS.

A cycle is 2 L intervals, each from the start of an operation to the start of the next. For each layer i and interval j
the variables are the bytes of w_i offloaded (O), prefetched (P) and deleted (D) in it; binaries state whether a weight
is deleted after its forward, deleted after its backward, and offloaded at all. Memory is checked only at the start of
each operation, so the result is a bound, not a schedule.

Two misprints are corrected: in (4), M_k already includes an operation's own weight, so the sum must not count it again;
the first inequality of (6) should read `<= 0` (no more can be prefetched than was deleted). The running sums of (4) and
(6) are separate variables here, which keeps the matrix sparse: m, the bytes of w_i on the device at the start of an
operation, and h, the bytes of w_i offloaded beyond those deleted. HiGHS's tolerances are absolute, so the unit of bytes
is the largest weight and the unit of time is its transfer.
"""

import dataclasses
import math
from typing import Any

import numpy as np
import scipy.optimize
import scipy.sparse

from jaxferry.errors import JaxFerryError
from jaxferry.weights.instance import Choice, Instance, Outcome

TIME_LIMIT_S = 120.0


def bound(instance: Instance, time_limit_s: float = TIME_LIMIT_S) -> Outcome:
    """Returns a lower bound on the duration of any schedule.

    `time_limit_s` limits HiGHS's search, and the relaxation after it. If it is reached, the result is the best bound
    proven by then, and the note says so.

    Raises:
      BudgetError: if no schedule exists.
      JaxFerryError: if HiGHS fails.
    """
    instance.check_feasible()
    if not any(instance.weights):
        return Outcome("bound", instance.compute_s, instance.compute_s, (), None)
    problem = _Problem.of(instance)
    result = scipy.optimize.milp(
        problem.cost,
        integrality=problem.integrality,
        bounds=scipy.optimize.Bounds(problem.lower, problem.upper),
        constraints=scipy.optimize.LinearConstraint(problem.matrix, problem.row_lower, problem.row_upper),
        options={"time_limit": time_limit_s},
    )
    if result.status not in (0, 1):
        raise JaxFerryError(f"HiGHS could not solve the lower bound: {result.message}")
    idle, note = _at_least_zero(result.mip_dual_bound), ""
    if result.status == 1:
        idle = max(idle, problem.relaxed(time_limit_s))
        note = f"stopped after {time_limit_s:g} s: proven, but perhaps not tight"
    choices = () if result.x is None else problem.choices(result.x)
    duration_s = instance.compute_s + idle * max(instance.weights) / instance.bandwidth_bytes_per_s
    duration_s = max(duration_s, transfer_bound_s(instance))
    return Outcome("bound", duration_s, instance.compute_s, choices, None, note)


def transfer_bound_s(instance: Instance) -> float:
    """Returns a lower bound from the prefetches alone: much faster than `bound`, but weaker.

    At the start of the first backward and at the start of the first forward, memory holds only some of the weights. The
    others are absent and must return for their next use, which comes before the other of these two instants. So a cycle
    prefetches at least the sum of the absent bytes at both. Raises `BudgetError` if no schedule exists.
    """
    instance.check_feasible()
    last = instance.num_layers - 1
    absent = 0.0
    for own, own_bytes in ((last, instance.backward_bytes(last)), (0, instance.forward_bytes(0))):
        others = sum(instance.weights) - instance.weights[own]
        absent += max(0.0, others - (instance.memory_bytes - own_bytes))
    return max(instance.compute_s, absent / instance.bandwidth_bytes_per_s)


def _at_least_zero(value: float | None) -> float:
    return max(0.0, value) if value is not None and math.isfinite(value) else 0.0


class _Columns:
    """The index of each variable in the vector of unknowns; layers without weights have no variables."""

    def __init__(self, instance: Instance):
        self.layers = [k for k, weight in enumerate(instance.weights) if weight]
        self.num_intervals = 2 * instance.num_layers
        shape = (len(self.layers), self.num_intervals)
        names = ("offloaded", "prefetched", "deleted", "on_device", "on_host")
        blocks = np.arange(len(names) * shape[0] * shape[1]).reshape(len(names), *shape)
        self.offloaded, self.prefetched, self.deleted, self.on_device, self.on_host = blocks
        self.idle = blocks.size + np.arange(self.num_intervals)
        first = blocks.size + self.num_intervals
        self.leaves_after_forward, self.leaves_after_backward, self.leaves = first + np.arange(3 * shape[0]).reshape(
            3, shape[0]
        )
        self.num_columns = first + 3 * shape[0]


class _Rows:
    """Constraints `lower <= A x <= upper`, collected row by row."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, float]] = []
        self.lower: list[float] = []
        self.upper: list[float] = []

    def add(self, terms: list[tuple[int, float]], lower: float, upper: float) -> None:
        row = len(self.lower)
        self.entries += [(row, int(column), value) for column, value in terms]
        self.lower.append(lower)
        self.upper.append(upper)

    def matrix(self, num_columns: int) -> scipy.sparse.csr_array:
        rows, columns, values = zip(*self.entries, strict=True)
        return scipy.sparse.csr_array((values, (rows, columns)), shape=(len(self.lower), num_columns))


@dataclasses.dataclass(frozen=True)
class _Problem:
    columns: _Columns
    cost: np.ndarray
    integrality: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    matrix: scipy.sparse.csr_array
    row_lower: np.ndarray
    row_upper: np.ndarray

    @classmethod
    def of(cls, instance: Instance) -> "_Problem":
        columns = _Columns(instance)
        unit_bytes = max(instance.weights)
        weights = np.array([instance.weights[k] for k in columns.layers]) / unit_bytes
        cost = np.zeros(columns.num_columns)
        cost[columns.idle] = 1.0
        integrality = np.zeros(columns.num_columns)
        lower, upper = np.zeros(columns.num_columns), np.full(columns.num_columns, np.inf)
        upper[columns.on_device] = weights[:, None]
        for row, layer in enumerate(columns.layers):
            backward, forward = _intervals_of(instance, layer)
            lower[columns.on_device[row, [backward, forward]]] = weights[row]
            upper[columns.on_host[row, backward]] = 0.0
        binaries = np.concatenate([columns.leaves_after_forward, columns.leaves_after_backward, columns.leaves])
        integrality[binaries] = 1
        upper[binaries] = 1.0
        rows = _Rows()
        _add_times(rows, columns, instance, unit_bytes)
        _add_memory(rows, columns, instance, unit_bytes)
        for row, layer in enumerate(columns.layers):
            _add_running_sums(rows, columns, instance, row, layer)
            _add_choices(rows, columns, instance, row, layer, weights[row])
        matrix = rows.matrix(columns.num_columns)
        return cls(columns, cost, integrality, lower, upper, matrix, np.array(rows.lower), np.array(rows.upper))

    def relaxed(self, time_limit_s: float) -> float:
        """Solves the problem without integrality, which also gives a bound; returns 0 if time runs out.

        Uses the interior point method: on slow links, the search's simplex method can spend minutes on its first
        relaxation.
        """
        matrix, lower, upper = self.matrix, self.row_lower, self.row_upper
        # SciPy's stubs do not accept sparse matrices here.
        linprog: Any = scipy.optimize.linprog
        equal = lower == upper
        below, above = np.isfinite(upper) & ~equal, np.isfinite(lower) & ~equal
        result = linprog(
            self.cost,
            scipy.sparse.vstack([matrix[below], -matrix[above]]),
            np.concatenate([upper[below], -lower[above]]),
            matrix[equal],
            upper[equal],
            np.stack([self.lower, self.upper], axis=1),
            method="highs-ipm",
            options={"time_limit": time_limit_s},
        )
        return _at_least_zero(result.fun) if result.status == 0 else 0.0

    def choices(self, solution: np.ndarray) -> tuple[Choice, ...]:
        pairs = ((self.columns.leaves_after_forward, True), (self.columns.leaves_after_backward, False))
        return tuple(
            sorted(
                Choice(layer, before_backward)
                for binaries, before_backward in pairs
                for layer, value in zip(self.columns.layers, solution[binaries], strict=True)
                if value > 0.5
            )
        )


def _intervals_of(instance: Instance, layer: int) -> tuple[int, int]:
    """Returns the intervals that start with a layer's backward and forward; 0 starts with the last layer's backward."""
    return instance.num_layers - 1 - layer, instance.num_layers + layer


def _add_times(rows: _Rows, columns: _Columns, instance: Instance, unit_bytes: float) -> None:
    """Adds (2): transfers end before the next operation; and (3): w_i does not leave during its own backward."""
    unit_s = unit_bytes / instance.bandwidth_bytes_per_s
    lengths_s = [*reversed(instance.backward_s), *instance.forward_s]
    for interval, length_s in enumerate(lengths_s):
        for moved in (columns.offloaded, columns.prefetched):
            terms = [(column, -1.0) for column in moved[:, interval]]
            rows.add([(columns.idle[interval], 1.0), *terms], -length_s / unit_s, np.inf)
    for row, layer in enumerate(columns.layers):
        backward, _ = _intervals_of(instance, layer)
        rows.add([(columns.idle[backward], 1.0), (columns.offloaded[row, backward], -1.0)], 0.0, np.inf)


def _add_memory(rows: _Rows, columns: _Columns, instance: Instance, unit_bytes: float) -> None:
    """Adds (4), counting an operation's own weight once."""
    layers = list(range(instance.num_layers))
    operations = [(k, instance.backward_bytes(k)) for k in reversed(layers)]
    operations += [(k, instance.forward_bytes(k)) for k in layers]
    for interval, (own, own_bytes) in enumerate(operations):
        terms = [(columns.on_device[row, interval], 1.0) for row, k in enumerate(columns.layers) if k != own]
        if terms:
            rows.add(terms, -np.inf, (instance.memory_bytes - own_bytes) / unit_bytes)


def _add_running_sums(rows: _Rows, columns: _Columns, instance: Instance, row: int, layer: int) -> None:
    """Adds (5) and (6): m is cyclic, h starts at 0 with each backward; the variables' bounds do the rest."""
    backward, _ = _intervals_of(instance, layer)
    for now in range(columns.num_intervals):
        then = (now + 1) % columns.num_intervals
        moves = [(columns.prefetched[row, now], -1.0), (columns.deleted[row, now], 1.0)]
        rows.add([(columns.on_device[row, then], 1.0), (columns.on_device[row, now], -1.0), *moves], 0.0, 0.0)
        if then != backward:
            known = [(columns.on_host[row, then], 1.0), (columns.on_host[row, now], -1.0)]
            rows.add([*known, (columns.offloaded[row, now], -1.0), *moves], 0.0, 0.0)


def _add_choices(rows: _Rows, columns: _Columns, instance: Instance, row: int, layer: int, weight: float) -> None:
    """Adds (7) and (8): a weight is offloaded, and deleted in each half of the cycle, entirely or not at all."""
    backward, forward = _intervals_of(instance, layer)
    until_forward = range(backward, forward)
    until_backward = [j for j in range(columns.num_intervals) if j not in until_forward]
    offloads = [(column, 1.0) for column in columns.offloaded[row]]
    rows.add([*offloads, (columns.leaves[row], -weight)], 0.0, 0.0)
    for intervals, binary in (
        (until_backward, columns.leaves_after_forward[row]),
        (until_forward, columns.leaves_after_backward[row]),
    ):
        deletions = [(columns.deleted[row, j], 1.0) for j in intervals]
        rows.add([*deletions, (binary, -weight)], 0.0, 0.0)
