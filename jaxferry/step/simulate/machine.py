"""The machine: runs a list of tasks on four lanes, exactly and without fitted constants.

A task starts once its lane is free and all its dependencies have ended. Lanes follow the order of the list, except the
host with updates by need (`Schedule.updates_by_need`).
"""

from collections.abc import Sequence

import numpy as np

from jaxferry.step.simulate.chain import Chain
from jaxferry.step.simulate.shared_work import with_shared_work
from jaxferry.step.simulate.steady import STEPS_BY_NEED, SteadyStep, steady_step_s
from jaxferry.step.tasks import Kind, Lane, Run, Schedule

__all__ = [
    "STEPS_BY_NEED",
    "SteadyStep",
    "critical_path",
    "device_bytes",
    "device_bytes_of_steps",
    "forward_s",
    "run",
    "steady_step_s",
    "step_s",
]

_UPDATES = (Kind.UPDATE, Kind.STATE_DOWN)


def run(schedule: Schedule) -> Run:
    """Runs all tasks, and those that `shared_work` adds."""
    schedule = with_shared_work(schedule)
    chain = Chain(schedule)
    starts, ends = chain.run_step()
    chain.finish()
    return Run(schedule, tuple(starts), tuple(ends))


def forward_s(of: Run) -> float:
    """Seconds to the end of the first step's last forward or inter_forward."""
    return max(_ends(of, (Kind.FORWARD, Kind.INTER_FORWARD)))


def step_s(of: Run) -> float:
    """Seconds to the end of the first step's last update; one that streams ends with the state in host memory."""
    return max(_ends(of, _UPDATES))


def _ends(of: Run, kinds: tuple[Kind, ...]) -> list[float]:
    return [
        end for task, end in zip(of.schedule.tasks, of.ends_s, strict=True) if task.kind in kinds and task.step == 0
    ]


def device_bytes(of: Run) -> list[tuple[float, int]]:
    """Device memory over time: (seconds, bytes from then on), one entry for each change.

    Memory that is freed at an instant serves an allocation at the same instant.
    """
    return device_bytes_of_steps(of.schedule, [(of.starts_s, of.ends_s)])


def device_bytes_of_steps(
    schedule: Schedule, steps: Sequence[tuple[Sequence[float], Sequence[float]]]
) -> list[tuple[float, int]]:
    """Likewise, for tasks that run several times.

    Args:
      schedule: the tasks of one step, or of a chain of steps.
      steps: when the tasks start and end, for each time that they run.
    """
    own = [task.start_bytes + task.workspace_bytes for task in schedule.tasks]
    back = [task.end_bytes + task.workspace_bytes for task in schedule.tasks]
    moments = np.concatenate([np.concatenate(step) for step in steps])
    changes = np.tile(np.array([*own, *(-num_bytes for num_bytes in back)], dtype=np.int64), len(steps))
    moments, changes = moments[changes != 0], changes[changes != 0]
    times, number = np.unique(moments, return_inverse=True)
    total = np.zeros(len(times), dtype=np.int64)
    np.add.at(total, number, changes)
    held = (schedule.resident_bytes + np.cumsum(total)).tolist()
    return [(0.0, schedule.resident_bytes), *zip(times.tolist(), held, strict=True)]


def critical_path(of: Run) -> list[int]:
    """Indices of the tasks, first to last, that determine the end of the first step's last update.

    Each one starts when its predecessor ends; the first starts at 0.
    """
    tasks = of.schedule.tasks
    before: dict[int, int | None] = {}
    last: dict[Lane, int] = {}
    # Follow the order in which a lane ran its tasks. With updates by need it can differ from that of the list.
    for index in sorted(range(len(tasks)), key=lambda index: (of.starts_s[index], of.ends_s[index], index)):
        before[index] = last.get(tasks[index].lane)
        last[tasks[index].lane] = index
    updates = [index for index, task in enumerate(tasks) if task.kind in _UPDATES and task.step == 0]
    current = max(updates, key=lambda index: of.ends_s[index])
    path = [current]
    while of.starts_s[current] > 0:
        lane_before = before[current]
        candidates = (*tasks[current].after, *(() if lane_before is None else (lane_before,)))
        current = next(index for index in candidates if of.ends_s[index] == of.starts_s[current])
        path.append(current)
    return path[::-1]
