"""Device memory over time by kind: parameters, activations, gradients, temporaries, optimizer state."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator

from jaxferry.costs.records import Profile
from jaxferry.step.holdings import updated_on_device
from jaxferry.step.records import Plan
from jaxferry.step.tasks import Kind, Run, Schedule

PARAMETERS, ACTIVATIONS, GRADIENTS = "parameters", "activations", "gradients"
TEMPORARIES, STATE = "temporaries", "optimizer state"

_STARTS = {
    Kind.LOAD: PARAMETERS,
    Kind.RELOAD: PARAMETERS,
    Kind.FORWARD: ACTIVATIONS,
    Kind.FETCH: ACTIVATIONS,
    Kind.BACKWARD: GRADIENTS,
    Kind.STATE_UP: STATE,
    Kind.UPDATE: STATE,  # the new compute copy, on its way down with the state
}
"""What a task's `start_bytes` are."""

_ENDS = {
    Kind.BACKWARD: ACTIVATIONS,
    Kind.SAVE: ACTIVATIONS,
    Kind.OFFLOAD: GRADIENTS,
    Kind.UPDATE: GRADIENTS,
    Kind.STATE_DOWN: STATE,
}
"""What a task's `end_bytes` are, besides the copies of parameters that it is the last to use."""


def device_bytes_by_kind(run: Run, profile: Profile, plan: Plan) -> dict[str, tuple[tuple[float, int], ...]]:
    """Device memory over time by kind: (seconds, bytes from then on), one entry for each change.

    The sum over kinds is `simulate.machine.device_bytes`. Kinds that take no memory are left out.

    Args:
      run: the tasks and their times.
      profile: the plan's profile.
      plan: the plan of `run`.
    """
    on_device = updated_on_device(profile, plan)
    state_bytes = sum(profile.layers[profile.groups[group][0]].state_bytes for group in on_device)
    held = {PARAMETERS: run.schedule.resident_bytes - state_bytes, STATE: state_bytes}
    changes: dict[str, list[tuple[float, int]]] = collections.defaultdict(list)
    for index, kind, at_start, at_end in _amounts(run.schedule):
        changes[kind] += [(run.starts_s[index], at_start), (run.ends_s[index], -at_end)]
    kinds = (PARAMETERS, STATE, ACTIVATIONS, GRADIENTS, TEMPORARIES)
    return {
        kind: _held(held.get(kind, 0), changes[kind])
        for kind in kinds
        if held.get(kind) or any(size for _, size in changes[kind])
    }


def _amounts(schedule: Schedule) -> Iterator[tuple[int, str, int, int]]:
    """Index of a task, kind of memory, bytes allocated as it starts, bytes freed as it ends."""
    last_use = {task.copy: index for index, task in enumerate(schedule.tasks) if task.copy is not None}
    freed = collections.Counter[int]()
    for load, index in last_use.items():
        freed[index] += schedule.tasks[load].start_bytes
    for index, task in enumerate(schedule.tasks):
        yield index, PARAMETERS, 0, freed[index]
        yield index, _STARTS.get(task.kind, PARAMETERS), task.start_bytes, 0
        yield index, _ENDS.get(task.kind, PARAMETERS), 0, task.end_bytes - freed[index]
        yield index, TEMPORARIES, task.workspace_bytes, task.workspace_bytes


def _held(first: int, changes: list[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """Adds changes up; memory that is freed at an instant serves an allocation at the same instant."""
    found, now = [(0.0, first)], first
    in_order = sorted(change for change in changes if change[1])
    for time, group in itertools.groupby(in_order, key=lambda change: change[0]):
        now += sum(num_bytes for _, num_bytes in group)
        found.append((time, now))
    return tuple(found)
