"""What stays on the device for later loads, and which loads run early: as much as the memory budget has room for."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxferry.engine.memory import Peak, Transfers, footprints
from jaxferry.step.instruction import StepProgram
from jaxferry.step.program_keys import ProgramKey
from jaxferry.step.schedule import Lane, leading_loads


def loads_ahead(
    program: StepProgram, peak_of: Callable[[Sequence[int]], Peak], budget_bytes: int | None = None
) -> tuple[int, ...]:
    """The loads that may run before their step is called, as soon as the previous step's updates allow it.

    These are as many leading loads as fit: they never raise the peak of parameters within one step, and keep the total
    within the budget.

    Args:
      program: the instructions of a step.
      peak_of: the most device memory that a step needs if these loads run in the previous step.
      budget_bytes: device memory; None for no limit.
    """
    leading, within = leading_loads(program.schedule), peak_of(())

    def takes_more(count: int) -> bool:
        peak = peak_of(leading[:count])
        return peak.parameters > within.parameters or not peak.fits(budget_bytes)

    counts = range(1, len(leading) + 1)
    return leading[: bisect.bisect_right(counts, False, key=takes_more)]


def groups_to_reserve(
    program: StepProgram,
    ahead: Sequence[int],
    peak_of: Callable[[StepProgram], Peak],
    budget_bytes: int | None = None,
) -> frozenset[int]:
    """Groups whose device buffers may stay allocated until their load for the next step.

    In new memory, a load would wait for all programs issued before, which may use it. The layer's own buffers are free:
    the load waits for the group's update on the host, the update for the gradient, and the gradient for the last
    program that reads the copy. Groups that are loaded first are taken, as long as the peak of parameters does not rise
    and the total is within the budget. Buffers that another load of the step takes over are left to it.

    Args:
      program: the instructions of a step.
      ahead: its loads that may run in the previous step.
      peak_of: the most device memory that a step needs.
      budget_bytes: device memory; None for no limit.
    """
    tasks, left = program.schedule.tasks, {d.load for i in program.programs for d in i.drops if not d.is_reused}
    untrained = {use.group for use in program.partition.uses if not use.is_trained}
    groups = [
        program.instructions[load].group
        for load in ahead
        if load in left and any(tasks[other].lane is Lane.HOST for other in tasks[load].after_previous)
    ]
    groups = [g for g in groups if program.loaded[g] == 1 and g not in untrained and g not in program.kept]
    within = peak_of(program)

    def takes_more(count: int) -> bool:
        peak = peak_of(dataclasses.replace(program, reserved=frozenset(groups[:count])))
        return peak.parameters > within.parameters or not peak.fits(budget_bytes)

    counts = range(1, len(groups) + 1)
    return frozenset(groups[: bisect.bisect_right(counts, False, key=takes_more)])


def groups_to_keep(
    program: StepProgram,
    temporary_bytes: Mapping[ProgramKey, int],
    other_bytes: int = 0,
    budget_bytes: int | None = None,
) -> frozenset[int]:
    """Groups whose loaded copies may stay on the device between micro-batches.

    Each that fits beside the others is taken: first those that are loaded twice, then those that are needed first.

    Args:
      program: the instructions of a step.
      temporary_bytes: as for `footprints`.
      other_bytes: likewise.
      budget_bytes: device memory; None for no limit.
    """
    groups = sorted(program.loaded, key=lambda group: -program.loaded[group])
    if budget_bytes is None:
        return frozenset(groups)
    totals = np.array([found.total for found in footprints(program, temporary_bytes, other_bytes)])
    counted, kept = Transfers(program, ()).copies_of, set()
    for group in groups:
        more = program.partition.layers[group].num_bytes - counted[group]
        if (totals + more).max() <= budget_bytes:
            totals += more
            kept.add(group)
    return frozenset(kept)
