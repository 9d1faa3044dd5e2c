"""The answer to "does it fit?": the largest batch, the speed, the memory by kind, what limits it, the plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxferry.step.records import Plan

FORMAT = "jaxferry.fit/1"


@dataclasses.dataclass(frozen=True)
class BatchForecast:
    """Training with batches of one size, as predicted.

    Attributes:
      batch_size: samples a batch.
      step_s: seconds a step in the steady state.
      samples_per_s: samples a second.
      tokens_per_s: integers of the batch's largest integer array a second; None if no such array has rows of several.
      device_bytes: device memory by kind at the step's peak.
      busy_share: the share of a step in which each lane works: `gpu`, `h2d`, `d2h`, `host`.
      limit: what limits the speed: `GPU`, `link`, `host` or `device memory`.
      reason: the same in a sentence.
      plan: the plan, with its prediction.
    """

    batch_size: int
    step_s: float
    samples_per_s: float
    tokens_per_s: float | None
    device_bytes: Mapping[str, int]
    busy_share: Mapping[str, float]
    limit: str
    reason: str
    plan: Plan

    def to_json(self) -> dict[str, Any]:
        """The forecast as JSON values."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        mappings = {"device_bytes": dict(self.device_bytes), "busy_share": dict(self.busy_share)}
        return {**fields, **mappings, "plan": self.plan.to_json()}


@dataclasses.dataclass(frozen=True)
class Fit:
    """Whether and how a model trains on a machine, as predicted.

    Attributes:
      model: its name.
      machine: the machine's name.
      budget_bytes: device memory that training may take.
      host_bytes: host memory that training keeps, by what it is for.
      host_memory_bytes: host memory that training may take; None if it is not known.
      smallest_bytes: the smallest feasible budget for batches of `smallest_batch_size`.
      smallest_batch_size: the workload's own batch size, or 1 if that does not fit.
      largest_batch_size: the largest batch for which a plan that loads all layers fits into the budget; or, if no batch
        of `smallest_batch_size` does, for which any plan fits; 0 if none does.
      pinned_bytes: the part of it that is pinned, with masters and optimizer state that stream through the GPU.
      rows: for the workload's own batch size, if it fits, and for the largest one.
      problem: why it does not fit, with the remedy; empty if it fits.
    """

    model: str
    machine: str
    budget_bytes: int
    host_bytes: Mapping[str, int]
    host_memory_bytes: int | None
    pinned_bytes: int
    smallest_bytes: int
    smallest_batch_size: int
    largest_batch_size: int
    rows: tuple[BatchForecast, ...]
    problem: str = ""

    @property
    def fits(self) -> bool:
        """Whether batches of any size fit into device and host memory."""
        return not self.problem

    def to_json(self) -> dict[str, Any]:
        """The answer as `jaxferry.fit/1`."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        rows = [row.to_json() for row in self.rows]
        return {"format": FORMAT, "fits": self.fits, **fields, "host_bytes": dict(self.host_bytes), "rows": rows}
