"""Prepares one model's step under several policies without training: the plans that would run, as predicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxferry.cli.compare import SideBySide, own_bound_s, plan_counts, works_s
from jaxferry.costs.progress import Report
from jaxferry.costs.records import Profile
from jaxferry.errors import BudgetError
from jaxferry.step.records import Plan

if TYPE_CHECKING:
    from jaxferry.training.train_step import TrainStep

FORMAT = "jaxferry.dry-run/1"


@dataclasses.dataclass(frozen=True)
class PolicyForecast:
    """The step that a policy would run.

    Attributes:
      policy: its name.
      plan: the plan that would run, with its prediction, or None if no plan fits into the memory budget.
      own_bound_s: the work of the busiest lane under this plan.
      peak_device_bytes: device memory that a step needs, with the temporaries of its compiled programs.
      is_changed: whether the memory budget has changed the modes that the policy chose.
      smallest_bytes: the smallest feasible budget, if no plan fits.
    """

    policy: str
    plan: Plan | None
    own_bound_s: float = 0.0
    peak_device_bytes: int = 0
    is_changed: bool = False
    smallest_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """The forecast as JSON values."""
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


@dataclasses.dataclass(frozen=True)
class DryRun(SideBySide):
    """The steps that several policies would run; `rows` has one for each."""

    rows: tuple[PolicyForecast, ...]

    def to_json(self) -> dict[str, Any]:
        """The dry run as JSON values."""
        rows = [row.to_json() for row in self.rows]
        return {"format": FORMAT, "work_s": dict(self.work_s), "bound_s": self.bound_s, "rows": rows}


def dry_run(
    policies: Sequence[str],
    profile: Profile,
    make_step: Callable[[str], TrainStep],
    params: Any,
    batch: Any,
    *,
    report: Report | None = None,
) -> DryRun:
    """Partitions, plans, lowers and compiles a step under each policy, as training would; runs and allocates nothing.

    Args:
      policies: the policies' names.
      profile: the profile for plans and predictions.
      make_step: makes a policy's training step, which plans with the profile.
      params: the model's tree of parameters; shapes are enough.
      batch: the batch; shapes are enough.
      report: called before each policy.
    """
    rows = []
    for number, policy in enumerate(policies):
        if report is not None:
            report(policy, number, len(policies))
        rows.append(_forecast(policy, make_step(policy), params, batch))
    return DryRun(works_s(profile), tuple(rows))


def _forecast(policy: str, step: TrainStep, params: Any, batch: Any) -> PolicyForecast:
    step.declare(params)
    try:
        prepared = step.prepare(batch)
    except BudgetError as error:
        return PolicyForecast(policy, None, smallest_bytes=error.smallest_bytes)
    bound_s, peak_bytes = own_bound_s(prepared.schedule), prepared.peak.total
    return PolicyForecast(policy, prepared.plan, bound_s, peak_bytes, prepared.is_changed)
