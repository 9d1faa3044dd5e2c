"""Tasks: their lanes, durations, dependencies and memory; how a list of them grows, and which lane limits it.

Simulator and engine consume the same list of tasks, see `jaxferry.step.schedule`.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxferry.costs import NO_CONTENTION, Contention, Profile
from jaxferry.units import format_bytes, format_seconds


class Lane(enum.StrEnum):
    """The resource that a task occupies."""

    GPU = "GPU"
    H2D = "H2D"
    D2H = "D2H"
    HOST = "host"
    DISK = "disk"
    """The scratch file, with masters and optimizer state that host memory does not hold."""


OF_THREADS = (Lane.HOST, Lane.DISK)
"""The lanes whose threads do the work of their tasks, on any device."""


def used_lanes(lanes: Iterable[Lane]) -> list[Lane]:
    """The lanes to show of a run that has tasks on these: all, but the disk's only if it has some."""
    used = set(lanes)
    return [lane for lane in Lane if lane is not Lane.DISK or lane in used]


class Kind(enum.StrEnum):
    """What a task does."""

    LOAD = "load"
    RELOAD = "reload"
    """The second load of a RELOAD layer."""
    REFRESH = "refresh"
    """The load of a RESIDENT copy after its update."""
    FORWARD = "forward"
    INTER_FORWARD = "inter_forward"
    INTER_BACKWARD = "inter_backward"
    BACKWARD = "backward"
    OFFLOAD = "offload"
    UPDATE = "update"
    SAVE = "save"
    """Moves values that cross segments to host memory."""
    FETCH = "fetch"
    """Moves saved values back for a backward."""
    STATE_UP = "state_up"
    """Moves a subgroup's master parameters and optimizer state to the device for its update."""
    STATE_DOWN = "state_down"
    """Moves them back to host memory, with the new compute copy unless that stays on the device."""
    STATE_READ = "state_read"
    """Reads a group's masters and optimizer state from the scratch file for its update on the host."""
    STATE_WRITE = "state_write"
    """Writes them back after the update."""
    READ = "read"
    """The link's share of a program that reads host memory; in simulations only."""
    WRITE = "write"
    """Likewise of a backward that writes its gradient to host memory."""
    CONTENTION = "contention"
    """What a lane loses in a step to the others that use host memory; in simulations only."""


@dataclasses.dataclass(slots=True)
class Task:
    """One piece of work on one lane. It changes until its list is complete, then no more: a search makes many of them.

    Attributes:
      name: kind and layer, for display.
      segment: index of the segment, which is a layer of the profile; for updates and refreshes, the group's first one.
      kind: what it does.
      lane: what it occupies; tasks of a lane run in the order of the list.
      duration_key: the profile's key of its duration. `backward_dha_go_s` means a backward that reads its parameters
        and writes its gradient in host memory. A key that ends in `_recompute_s` means a backward that runs its forward
        again, `_products_s` one that keeps its large products. A save and a fetch have the key of the transfer with the
        same speed per byte.
      duration_s: seconds.
      after: indices of tasks in the same list that must have ended; all are lower than its own.
      after_previous: indices of tasks of the previous step that must have ended. The first step waits for none.
      before: on its lane it runs before the task with this index in the endless list of all steps, that is, between
        tasks of the next step. None: in the order of the list. Without a next step, it follows all others.
      start_bytes: device memory allocated as it starts.
      end_bytes: device memory freed as it ends.
      workspace_bytes: further device memory that it needs while it runs.
      host_start_bytes: host memory for a gradient, allocated as it starts.
      host_end_bytes: host memory for gradients, freed as it ends.
      copy: for a forward or backward, the load whose parameter copy it reads; None if it reads host memory, a RESIDENT
        copy, or nothing.
      read_s: for a program that reads host memory, seconds of the link up that it takes.
      write_s: for one that writes its gradient there, seconds of the link down.
      subgroup: of an update that streams through the GPU, and its transfers: which part of the group's flat vectors.
      num_subgroups: the number of such parts.
      step: the step in a chain, counted from 0.
    """

    name: str
    segment: int
    kind: Kind
    lane: Lane
    duration_key: str
    duration_s: float
    after: tuple[int, ...] = ()
    after_previous: tuple[int, ...] = ()
    before: int | None = None
    start_bytes: int = 0
    end_bytes: int = 0
    workspace_bytes: int = 0
    host_start_bytes: int = 0
    host_end_bytes: int = 0
    copy: int | None = None
    read_s: float = 0.0
    write_s: float = 0.0
    subgroup: int = 0
    num_subgroups: int = 1
    step: int = 0

    @property
    def need(self) -> tuple[int, int]:
        """For an update: the smaller, the sooner a forward needs its parameters."""
        return self.step, self.segment

    def placed(
        self, after: tuple[int, ...], after_previous: tuple[int, ...], before: int | None, copy: int | None
    ) -> Task:
        """The same task in another list; `dataclasses.replace` takes ten times as long."""
        made = Task(*_fields_of(self))
        made.after, made.after_previous, made.before, made.copy = after, after_previous, before, copy
        return made


_fields_of = operator.attrgetter(*(field.name for field in dataclasses.fields(Task)))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The tasks of one step, or of a chain of steps.

    Attributes:
      tasks: in dispatch order, but for `Task.before`: each task comes after everything that it waits for.
      resident_bytes: device memory that RESIDENT copies hold all the time.
      steps: the number of steps in `tasks`.
      updates_by_need: whether the host picks, of the updates that could start, the one whose parameters the next
        forward needs first. Otherwise updates follow the order of the list.
      contention: what the lanes take of each other's time; in simulations only.
    """

    tasks: tuple[Task, ...]
    resident_bytes: int
    steps: int = 1
    updates_by_need: bool = False
    contention: Contention = NO_CONTENTION


@dataclasses.dataclass(frozen=True)
class Run:
    """When each task of a schedule started and ended, predicted or measured, in seconds from the first step's start.

    Attributes:
      schedule: the tasks that ran.
      starts_s: start of each task.
      ends_s: end of each task.
    """

    schedule: Schedule
    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]


def repeat(step: Schedule, steps: int) -> Schedule:
    """Chains copies of one step's tasks; `after_previous` becomes a plain wait."""
    size = len(step.tasks)
    tasks = list(step.tasks)
    for number in range(1, steps):
        offset = number * size
        for task in step.tasks:
            after = [index + offset for index in task.after] + [index + offset - size for index in task.after_previous]
            before = None if task.before is None else task.before + offset
            copy = None if task.copy is None else task.copy + offset
            tasks.append(task.placed(tuple(after), task.after_previous, before, copy))
            tasks[-1].step = number
    return dataclasses.replace(step, tasks=tuple(tasks), steps=steps)


def dispatch_order(tasks: Sequence[Task], ahead: int = 0) -> list[int]:
    """Indices of the tasks in the order in which lanes run them.

    Args:
      tasks: of one step, or of a chain of steps.
      ahead: subtracted from `Task.before`: the number of tasks, if those of the previous step run among these.
    """

    def place(index: int) -> tuple[int, bool]:
        before = tasks[index].before
        return (index, True) if before is None else (before - ahead, False)

    return sorted(range(len(tasks)), key=place)


def waits_in_one_period(step: Schedule) -> tuple[list[int], list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The order in which the tasks of one step run in a period, and what each waits for there and in the previous one.

    Waits are places in that order.
    """
    tasks = step.tasks
    if all(task.before is None for task in tasks):
        return list(range(len(tasks))), [task.after for task in tasks], [task.after_previous for task in tasks]
    order = dispatch_order(tasks, len(tasks))
    place, is_late = [0] * len(order), [task.before is not None for task in tasks]
    for number, index in enumerate(order):
        place[index] = number
    after, earlier = list[tuple[int, ...]](), list[tuple[int, ...]]()
    for index in order:
        waits = [(other, is_late[index] - is_late[other]) for other in tasks[index].after]
        waits += [(other, 1 + is_late[index] - is_late[other]) for other in tasks[index].after_previous]
        after.append(tuple([place[other] for other, periods in waits if periods == 0]))
        earlier.append(tuple([place[other] for other, periods in waits if periods == 1]))
        assert len(after[-1]) + len(earlier[-1]) == len(waits)
        assert all(other < place[index] for other in after[-1])
    return order, after, earlier


def in_one_period(step: Schedule) -> Schedule:
    """What runs in one period of an endless chain: tasks that the step leaves to the next one are those of the last.

    Times of the chain, and so its period, are the same, but for its beginning.
    """
    if all(task.before is None for task in step.tasks):
        return step
    place, tasks = dict[int, int](), list[Task]()
    for number, (index, after, earlier) in enumerate(zip(*waits_in_one_period(step), strict=True)):
        place[index] = number
        task = step.tasks[index]
        copy = None if task.copy is None else place[task.copy]
        tasks.append(task.placed(after, earlier, None, copy))
    return dataclasses.replace(step, tasks=tuple(tasks))


def leading_loads(step: Schedule) -> tuple[int, ...]:
    """The first tasks of the link up that wait, within their own step, only for each other.

    They can run before their step is called, unless they wait for or follow what the previous step leaves to it.
    """
    leading: list[int] = []
    left = [task.before - len(step.tasks) for task in step.tasks if task.before is not None and task.lane is Lane.H2D]
    for index, task in enumerate(step.tasks[: min(left, default=None)]):
        if task.lane is Lane.H2D:
            if task.kind not in (Kind.LOAD, Kind.RELOAD) or not set(task.after) <= set(leading):
                break
            if any(step.tasks[other].before is not None for other in task.after_previous):
                break
            leading.append(index)
    return tuple(leading)


_NAMES = {kind: kind.value for kind in Kind}


class StepTasks:
    """The tasks so far, in dispatch order.

    Attributes:
      layers: of the profile.
      tasks: the list.
      ends_s: when each task would end in a step without a previous one.
      free_s: when each lane would be free after its last task.
    """

    def __init__(self, profile: Profile):
        self.layers, self.tasks = profile.layers, list[Task]()
        self.ends_s, self.free_s = list[float](), dict.fromkeys(Lane, 0.0)

    def __getitem__(self, task: int) -> Task:
        return self.tasks[task]

    def emit(self, kind: Kind, lane: Lane, layer: int, duration: tuple[str, float], after: tuple[int, ...] = ()) -> int:
        """Appends a task and returns its index."""
        key, seconds = duration
        self.tasks.append(Task(f"{_NAMES[kind]} {self.layers[layer].name}", layer, kind, lane, key, seconds, after))
        start_s = self.free_s[lane]
        for other in after:
            if self.ends_s[other] > start_s:
                start_s = self.ends_s[other]
        self.free_s[lane] = start_s + seconds
        self.ends_s.append(self.free_s[lane])
        return len(self.tasks) - 1


_LIMITS = {
    Lane.GPU: ("GPU", "the GPU computes"),
    Lane.H2D: ("link", "the link to the device is busy"),
    Lane.D2H: ("link", "the link from the device is busy"),
    Lane.HOST: ("host", "the host updates parameters"),
    Lane.DISK: ("disk", "the disk reads and writes optimizer state"),
}
_LEAST_GAIN = 0.05


@dataclasses.dataclass(frozen=True)
class Bottleneck:
    """What limits the speed.

    Attributes:
      limit: `GPU`, `link`, `host`, `disk` or `device memory`.
      reason: the same in a clause, with figures.
    """

    limit: str
    reason: str

    @property
    def noun(self) -> str:
        """The limit in a sentence, after "the"."""
        return self.limit if self.limit != "host" else "host's updates"


def find_bottleneck(busy_share: Mapping[Lane, float], details: Mapping[str, Any], step_s: float) -> Bottleneck:
    """Names the lane that works for the largest share of a step, or device memory if that makes the plan slower.

    Args:
      busy_share: the share of a step in which each lane works.
      details: the plan's `details`; `binding` says whether a budget binds it.
      step_s: the plan's predicted seconds a step.
    """
    lane = max(busy_share, key=lambda each: busy_share[each])
    name, does = _LIMITS[lane]
    most = f"{does} {min(busy_share[lane], 1.0):.0%} of the time"
    if details.get("binding") != "memory":
        return Bottleneck(name, most)
    free_s, free = details["unlimited_steady_step_s"], format_bytes(details["unlimited_needed_bytes"])
    shown, own = format_seconds(free_s), format_seconds(step_s)
    if free_s >= step_s or shown == own:
        return Bottleneck(name, most)
    faster = f"with {free} of device memory a step would take {shown}, not {own}"
    is_slower = free_s < (1 - _LEAST_GAIN) * step_s
    return Bottleneck("device memory" if is_slower else name, f"{most}; {faster}")
