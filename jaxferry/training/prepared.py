"""A step prepared for batches of one structure."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxferry.costs.records import Profile
from jaxferry.engine import Peak, StepProgram, StepRunner
from jaxferry.modes import Mode
from jaxferry.partition import AUTO, Partition
from jaxferry.step.records import Plan
from jaxferry.step.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A step prepared for batches of one structure: see `TrainStep.prepare`.

    Attributes:
      program: the step program that runs.
      profile: what it was planned with, and the facts of its programs.
      peak: the most device memory that a step needs.
      is_changed: whether the memory budget has changed the modes of the policy's or the user's plan.
      num_executables: number of programs compiled for the device.
      runner: runs the step program.
    """

    program: StepProgram
    profile: Profile
    peak: Peak
    is_changed: bool
    num_executables: int
    runner: StepRunner = dataclasses.field(repr=False)

    @property
    def partition(self) -> Partition:
        """The segments."""
        return self.program.partition

    @property
    def plan(self) -> Plan:
        """The plan that runs: the policy's, as changed by the memory budget and the options."""
        return self.program.plan

    @property
    def schedule(self) -> Schedule:
        """The tasks of a step as they run. Durations are known only with a profile."""
        return self.program.schedule

    @property
    def saved_bytes(self) -> int:
        """The host memory of this process in which activations wait for their backward (`offload_activations`)."""
        return self.profile.saved_bytes

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The mode of each segment."""
        return self.plan.modes

    @property
    def remat(self) -> tuple[Any, ...]:
        """What each segment keeps between forward and backward: `"none"`, `"full"`, or a policy."""
        return tuple("none" if segment.remat == AUTO else segment.remat for segment in self.partition.segments)
