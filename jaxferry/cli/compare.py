"""Policies side by side on one model: trained in turn and measured beside the prediction, or prepared and predicted."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from rich.table import Table

from jaxferry.cli.common import make_table, plan_counts
from jaxferry.cli.recording import Recording
from jaxferry.costs import Profile, Report
from jaxferry.errors import BudgetError, InputError
from jaxferry.records import Reader, check_bytes, check_format, check_list, check_seconds, check_text, required
from jaxferry.step import Lane, Plan, Run, Schedule, machine, used_lanes
from jaxferry.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from jaxferry.engine import TrainState
    from jaxferry.training import Prepared, TrainStep


BENCH_FORMAT = "jaxferry.bench/1"
_SHOWN_STEPS = 2

Bars = Mapping[Lane, Sequence[tuple[float, float]]]  # start and end of each lane's tasks, in seconds
Record = Callable[["TrainStep", "TrainState", "Prepared"], Recording]


@dataclasses.dataclass(frozen=True)
class PolicyRun:
    """The results of training under a policy.

    `step_s` has the seconds of each step, from the end of the previous step's last program to the end of its own, and
    `losses` those of all steps, including the warm-up. `predicted_s` is the simulated steady step of the same tasks,
    with the profile's times; `own_bound_s` the work of the busiest lane. `measured` and `predicted` are the lanes in
    two steps in the middle of the run, from the program before them; `recording` has the last round's steps.
    """

    policy: str
    step_s: tuple[float, ...]
    predicted_s: float
    own_bound_s: float
    peak_device_bytes: int
    losses: tuple[float, ...]
    measured: Bars
    predicted: Bars
    recording: Recording | None = None

    FORMAT: ClassVar[str] = BENCH_FORMAT
    TITLE: ClassVar[str] = "policies, trained"
    HEADS: ClassVar[str] = "measured | predicted | / predicted | own bound | / own bound | / bound | peak device"

    @property
    def measured_s(self) -> float:
        """The median step."""
        return statistics.median(self.step_s)

    def to_json(self, bound_s: float) -> dict[str, Any]:
        """Returns the results and their ratios as JSON values."""
        document = vars(self) | {
            "measured_s": self.measured_s,
            "step_s": list(self.step_s),
            "losses": list(self.losses),
        }
        for name, by_s in (("predicted", self.predicted_s), ("bound", bound_s), ("own_bound", self.own_bound_s)):
            document[f"measured_over_{name}"] = ratio(self.measured_s, by_s)
        if (recording := document.pop("recording")) is not None:
            document["recording"] = recording.to_json()
        return document

    def cells(self, bound_s: float) -> list[str]:
        """Returns the measured step beside its prediction and its bounds."""
        ratios = [ratio(self.measured_s, by) for by in (self.predicted_s, self.own_bound_s, bound_s)]
        shown = ["-" if value is None else f"{value:.3f}" for value in ratios]
        measured, predicted, own = map(format_seconds, (self.measured_s, self.predicted_s, self.own_bound_s))
        return [measured, predicted, shown[0], own, shown[1], shown[2], format_bytes(self.peak_device_bytes)]

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> PolicyRun:
        """Reads an element of `rows`; raises `InputError` or an error of the value's type."""
        seconds = check_list(fields["step_s"], "step_s", "time")
        checks: dict[str, Reader] = {"policy": check_text, "peak_device_bytes": check_bytes}
        checks |= dict.fromkeys(("predicted_s", "own_bound_s"), check_seconds)
        return cls(
            **{key: check(fields[key], key, "bench") for key, check in checks.items()},
            step_s=tuple(check_seconds(each, "step_s", "bench") for each in seconds),
            losses=tuple(map(float, fields["losses"])),
            measured=_bars_from_json(fields["measured"]),
            predicted=_bars_from_json(fields["predicted"]),
            recording=Recording.from_json(fields["recording"]) if "recording" in fields else None,
        )


@dataclasses.dataclass(frozen=True)
class PolicyForecast:
    """The step that a policy would run; `plan` is None if no plan fits into the memory budget.

    `own_bound_s` is the work of the busiest lane. `peak_device_bytes` counts the temporaries of compiled programs.
    `is_changed`: the budget has changed the modes that the policy chose. `smallest_bytes` is the smallest feasible
    budget.
    """

    policy: str
    plan: Plan | None
    own_bound_s: float = 0.0
    peak_device_bytes: int = 0
    is_changed: bool = False
    smallest_bytes: int = 0

    FORMAT: ClassVar[str] = "jaxferry.dry-run/1"
    TITLE: ClassVar[str] = "policies, not trained"
    HEADS: ClassVar[str] = "forward | step | steady step | own bound | peak device | modes"

    def to_json(self, bound_s: float) -> dict[str, Any]:
        """Returns the forecast as JSON values."""
        if self.plan is None:
            return {"policy": self.policy, "fits": False, "smallest_budget_bytes": self.smallest_bytes}
        return {
            "policy": self.policy,
            "fits": True,
            "own_bound_s": self.own_bound_s,
            "peak_device_bytes": self.peak_device_bytes,
            "changed_by_budget": self.is_changed,
            "modes": plan_counts(self.plan),
            "plan": self.plan.to_json(),
        }

    def cells(self, bound_s: float) -> list[str]:
        """Returns the predicted step."""
        if self.plan is None or self.plan.predicted is None:
            return ["-", "-", "-", "-", f"needs {format_bytes(self.smallest_bytes)}", "-"]
        predicted = self.plan.predicted
        times_s = (predicted.forward_s, predicted.step_s, predicted.steady_step_s, self.own_bound_s)
        modes = ", ".join(f"{count} {mode}" for mode, count in plan_counts(self.plan).items())
        modes += " (changed to fit)" if self.is_changed else ""
        return [*map(format_seconds, times_s), format_bytes(self.peak_device_bytes), modes]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Policies side by side, all trained or all predicted; `work_s` is each lane's work a step, whatever the plan."""

    work_s: Mapping[str, float]
    rows: tuple[Any, ...]

    @property
    def bound_s(self) -> float:
        """The longest of `work_s`: a bound for plans that move and update every layer once."""
        return max(self.work_s.values())

    def to_json(self) -> dict[str, Any]:
        """Returns the policies as JSON values."""
        rows = [row.to_json(self.bound_s) for row in self.rows]
        return {"format": self.rows[0].FORMAT, "work_s": dict(self.work_s), "bound_s": self.bound_s, "rows": rows}

    @classmethod
    def from_json(cls, document: Any) -> Comparison:
        """Reads `jaxferry.bench/1`; raises `InputError` if the document is something else."""
        fields = check_format(document, BENCH_FORMAT)
        try:
            rows = tuple(PolicyRun.from_json(row) for row in required(fields, "rows", "bench"))
            works = required(fields, "work_s", "bench").items()
            work_s = {name: check_seconds(seconds, name, "work_s") for name, seconds in works}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"rows or work_s do not come from a bench: {type(error).__name__} at {error}") from error
        if not rows or not work_s:
            raise InputError("a bench must have rows and work_s")
        return cls(work_s, rows)

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Returns the heads and the rows of the table."""
        return ["policy", *self.rows[0].HEADS.split(" | ")], [
            [row.policy, *row.cells(self.bound_s)] for row in self.rows
        ]

    def table(self) -> Table:
        """Returns the policies as a table."""
        return make_table(*self.cells(), title=self.rows[0].TITLE)

    def lines(self) -> list[str]:
        """Explains the bounds, which come from the profile's times, and what a measured step below a bound means."""
        works = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in self.work_s.items())
        own = "own bound: the busiest lane under the policy's plan, which may load twice or read host memory in place"
        lines = [f"work per step: {works}; the longest is the bound", own]
        impossible, lighter = [], []
        for row in self.rows:
            measured_s = row.measured_s if isinstance(row, PolicyRun) else math.inf
            if measured_s < row.own_bound_s:
                impossible.append(f"{row.policy} {measured_s / row.own_bound_s:.3f}")
            elif row.own_bound_s and measured_s < self.bound_s:
                lighter.append(row.policy)
        if impossible:
            lines.append(
                f"below the own bound: {', '.join(impossible)}. No step can be: the machine was busier while the "
                "profile was measured than during the bench; on an idle machine, measure again (JAXFERRY_CACHE_DIR=off)"
            )
        if lighter:
            lines.append(f"below the bound: {', '.join(lighter)}, whose plan does not move every layer both ways")
        return lines


def dry_run(
    policies: Sequence[str],
    profile: Profile,
    make_step: Callable[[str], TrainStep],
    params: Any,
    batch: Any,
    *,
    report: Report = lambda part, done, total: None,
) -> Comparison:
    """Partitions, plans, lowers and compiles a step under each policy, as training would; runs and allocates nothing.

    Arguments are as for `compare_policies`. Shapes are enough for `params` and `batch`.
    """
    rows = []
    for number, policy in enumerate(policies):
        report(policy, number, len(policies))
        step = make_step(policy)
        step.declare(params)
        try:
            prepared = step.prepare(batch)
        except BudgetError as error:
            rows.append(PolicyForecast(policy, None, smallest_bytes=error.smallest_bytes))
            continue
        bound_s, peak_bytes = own_bound_s(prepared.schedule), prepared.peak.total
        rows.append(PolicyForecast(policy, prepared.plan, bound_s, peak_bytes, prepared.is_changed))
    return Comparison(works_s(profile), tuple(rows))


def compare_policies(
    policies: Sequence[str],
    profile: Profile,
    make_step: Callable[[str], TrainStep],
    new_state: Callable[[TrainStep], TrainState],
    batch: Any,
    *,
    num_steps: int = 8,
    num_rounds: int = 3,
    one_at_a_time: bool = False,
    record: Record | None = None,
    report: Report = lambda part, done, total: None,
) -> Comparison:
    """Trains under each policy, in rounds of at least 4 steps of which the first is not timed, after a warm-up round.

    Policies take turns, so that other work on the machine affects all alike; host memory holds a state for each. With
    `one_at_a_time` each finishes all its rounds and frees its state before the next one starts. `make_step` makes a
    policy's training step, which plans with the profile and records at least `num_steps` steps. `record` makes the
    recording of the last steps. Raises `InputError` if there are too few steps or rounds.
    """
    if num_steps < 4 or num_rounds < 1:
        raise InputError(f"there must be at least 4 steps and 1 round, got {num_steps} and {num_rounds}")
    count = itertools.count()
    total = len(policies) * (num_rounds + 1)

    def begin(policy: str) -> _Trained:
        report(policy, next(count), total)
        trained = _Trained(policy, make_step(policy), new_state, batch)
        trained.run_steps(num_steps)
        trained.step_s.clear()
        return trained

    def in_turns(policies: Sequence[str]) -> list[PolicyRun]:
        every = [begin(policy) for policy in policies]
        for _, trained in itertools.product(range(num_rounds), every):
            report(trained.policy, next(count), total)
            trained.run_steps(num_steps)
        return [trained.row(record) for trained in every]

    together = [[policy] for policy in policies] if one_at_a_time else [policies]
    return Comparison(works_s(profile), tuple(row for each in together for row in in_turns(each)))


class _Trained:
    """Training under one policy; `step_s` has the duration of each timed step."""

    def __init__(self, policy: str, step: TrainStep, new_state: Callable[[TrainStep], TrainState], batch: Any) -> None:
        self.policy, self._step, self._batch = policy, step, batch
        self._state = new_state(step)
        self._prepared = step.prepare(batch)
        step.compile_updates(self._state, batch)
        self.step_s: list[float] = []
        self._losses: list[float] = []
        self._run: Run | None = None

    def run_steps(self, num_steps: int) -> None:
        """Runs steps and stores the duration of each except the first."""
        # The first step of all updates after all gradients: it has other tasks and is not recorded with the rest.
        num_recorded = num_steps - (self._run is None)
        for _ in range(num_steps):
            self._state, metrics = self._step(self._state, self._batch)
            self._losses.append(float(metrics["loss"]))
        self._state.block_until_ready()
        self._run = self._step.recorded()
        if self._run is None or self._run.schedule.steps < num_recorded:
            raise InputError(f"the step must record at least {num_steps} steps: record_steps={num_steps}")
        ends = ends_of_steps(self._run)[-num_steps:]
        self.step_s += [after - before for before, after in itertools.pairwise(ends)]

    def row(self, record: Record | None) -> PolicyRun:
        assert self._run is not None
        schedule = self._prepared.schedule
        return PolicyRun(
            policy=self.policy,
            step_s=tuple(self.step_s),
            predicted_s=machine.steady_step_s(schedule),
            own_bound_s=own_bound_s(schedule),
            peak_device_bytes=self._prepared.peak.total,
            losses=tuple(self._losses),
            measured=steps_in_the_middle(self._run),
            predicted=steps_in_the_middle(machine.run(self._run.schedule)),
            recording=None if record is None else record(self._step, self._state, self._prepared),
        )


def own_bound_s(step: Schedule) -> float:
    """Returns the work of the busiest lane in one step, in seconds."""
    return max(sum(task.duration_s for task in step.tasks if task.lane is lane) for lane in Lane)


def works_s(profile: Profile) -> dict[str, float]:
    """Returns each lane's seconds of work per step, independent of the plan: compute, upload, download, host update."""
    layers = profile.layers
    return {
        "compute": sum(layer.forward_s + layer.backward_s for layer in layers),
        "upload": sum(layers[group[0]].load_s for group in profile.groups),
        "download": sum(layer.offload_s for layer in layers),
        "update": sum(profile.group_update_s),
    }


def ends_of_steps(of: Run) -> list[float]:
    """Returns the end of each step's last program, in seconds."""
    ends = [0.0] * of.schedule.steps
    for task, end in zip(of.schedule.tasks, of.ends_s, strict=True):
        if task.lane is Lane.GPU:
            ends[task.step] = max(ends[task.step], end)
    return ends


def steps_in_the_middle(of: Run) -> Bars:
    """Returns the bars of the two steps before the last one, in seconds from the end of the program before them."""
    ends = ends_of_steps(of)
    first, last = ends[-_SHOWN_STEPS - 2], ends[-2]
    lanes = used_lanes(task.lane for task in of.schedule.tasks)
    bars: dict[Lane, list[tuple[float, float]]] = {lane: [] for lane in lanes}
    for task, start, end in zip(of.schedule.tasks, of.starts_s, of.ends_s, strict=True):
        if end > first and start < last:
            bars[task.lane].append((start - first, end - first))
    return bars


def ratio(numerator: float, denominator: float) -> float | None:
    """Returns the quotient, or None if the denominator is 0."""
    return numerator / denominator if denominator > 0 else None


def _bars_from_json(fields: Mapping[str, Any]) -> Bars:
    return {Lane(lane): [(float(start), float(end)) for start, end in bars] for lane, bars in fields.items()}
