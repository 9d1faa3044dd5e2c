"""Streamed updates that a step leaves to the next one: their places between its loads and forwards.

    H2D   ... state_up 1 | load 1   state_up 5   load 2   state_up 6   load 3 ...
    GPU   ... backward 1 |  update 1   forward 1   update 5   forward 2   update 6   forward 3 ...
                         next step

A group's update need only be done before the group's next load or read, or the forward on its RESIDENT copy. So the
stream goes on while the next step's forwards run, the group that they need first in front. The places follow from the
tasks of the forwards, run once more after the step as if nothing but the stream and the host's updates, in the order of
need, delayed them:

- A transfer up precedes a load that still arrives before its forward could start, or that waits for its update anyway.
- An update precedes a forward if its state has arrived by the time at which that forward could start.
- A group's updates precede its own load or read, or that forward.
- A gradient stays until its update. Updates precede a forward that would not fit into device memory beside the
  gradients which are left.
"""

import dataclasses
import heapq
from collections.abc import Mapping, Sequence

from jaxferry.costs.records import Profile
from jaxferry.step.step_tasks import StepTasks
from jaxferry.step.streaming import StateStreams
from jaxferry.step.tasks import Kind, Lane, Task


@dataclasses.dataclass(frozen=True)
class Forwards:
    """The tasks of a step up to its last forward, as the next step has them.

    Attributes:
      num_tasks: how many these are; they lead the list.
      reads: the tasks that wait for the previous step's updates of groups, with these groups.
      updates: by group, its update on the host or on the device.
      left_bytes: by layer, what its forward leaves of device memory for gradients of the previous step.
    """

    num_tasks: int
    reads: Mapping[int, Sequence[int]]
    updates: Mapping[int, int]
    left_bytes: Sequence[int]


class LateUpdates:
    """Lists what a step leaves to the next one.

    Args:
      profile: the layers.
      tasks: all other tasks of the step.
      streams: what is left.
      gradient_bytes: by group, the gradients that stay on the device until the group's update.
    """

    def __init__(
        self, profile: Profile, tasks: StepTasks, streams: StateStreams, gradient_bytes: Mapping[int, int]
    ) -> None:
        self.profile, self.tasks, self.streams, self.gradient_bytes = profile, tasks, streams, gradient_bytes
        self.ends_s: dict[int, float] = {}
        self.ready_s: dict[int, float] = {}

    def list(self, forwards: Forwards) -> None:
        """Lists all tasks that are left, with their places."""
        self.streams.begin_late()
        on_host = _ends_by_need_s(self.tasks)
        for index, groups in forwards.reads.items():
            updates = {forwards.updates.get(group) for group in groups}
            self.ready_s[index] = max((on_host[each] for each in updates if each in on_host), default=0.0)
        following = self.tasks.tasks[: forwards.num_tasks]
        users = {task.copy: index for index, task in reversed([*enumerate(following)]) if task.copy is not None}
        for index, task in enumerate(following):
            if not self.streams.left_groups:
                return
            self.streams.run_before(index)
            for group in forwards.reads.get(index, ()):
                self.streams.finish_group(group)
                if group in self.streams.ends:
                    self.ready_s[index] = max(self.ready_s[index], self.tasks.ends_s[self.streams.ends[group]])
            num_listed = -1
            while num_listed < len(self.tasks.tasks):  # an update frees a slot, in time for another one or not
                num_listed = len(self.tasks.tasks)
                if task.lane is Lane.GPU:
                    self._before_program(index, task, forwards.left_bytes)
                self._go_up(following, index, users)
            self._run(index, task)
        self.streams.run_before(forwards.num_tasks)
        self.streams.finish()

    def _before_program(self, index: int, task: Task, left_bytes: Sequence[int]) -> None:
        """Lists the updates that run before a program of the next step."""
        if task.kind is Kind.FORWARD:
            left = self.streams.left_groups
            sizes = [self.gradient_bytes.get(group, 0) for group in left]
            while left and sum(sizes) > left_bytes[task.segment]:
                self.streams.finish_group(left.pop(0))
                sizes.pop(0)
        self.streams.update_arrived(self._could_start_s(index, task))

    def _go_up(self, following: Sequence[Task], index: int, users: Mapping[int, int]) -> None:
        """Lists transfers up as long as the next load arrives in time."""
        load = next((i for i in range(index, len(following)) if following[i].lane is Lane.H2D), None)
        if load is None or load not in users:
            self.streams.fill_slots()
            return
        programs_s = sum(task.duration_s for task in following[index : users[load]] if task.lane is Lane.GPU)
        free_s, load_s, ready_s = self.tasks.free_s, following[load].duration_s, self.ready_s.get(load, 0.0)
        latest_s = max(free_s[Lane.GPU] + programs_s - load_s, ready_s)
        self.streams.fill_slots(lambda: free_s[Lane.H2D] + self.streams.next_up_s <= latest_s)
        if not programs_s:  # the GPU waits for this load
            self.streams.update_arrived(max(free_s[Lane.H2D], ready_s) + load_s)

    def _could_start_s(self, index: int, task: Task) -> float:
        waits_s = (self.ends_s[other] for other in task.after)
        return max([self.tasks.free_s[task.lane], self.ready_s.get(index, 0.0), *waits_s])

    def _run(self, index: int, task: Task) -> None:
        self.ends_s[index] = self.tasks.free_s[task.lane] = self._could_start_s(index, task) + task.duration_s


def _ends_by_need_s(tasks: StepTasks) -> dict[int, float]:
    """When the host's updates of a step alone end if those that are needed first go first."""
    on_host = [index for index, task in enumerate(tasks.tasks) if task.lane is Lane.HOST]
    due_s = {index: max((tasks.ends_s[other] for other in tasks.tasks[index].after), default=0.0) for index in on_host}
    by_time, could_start = sorted(on_host, key=due_s.__getitem__, reverse=True), list[tuple[tuple[int, int], int]]()
    ends_s, now_s = dict[int, float](), 0.0
    while by_time or could_start:
        if not could_start:
            now_s = max(now_s, due_s[by_time[-1]])
        while by_time and due_s[by_time[-1]] <= now_s:
            heapq.heappush(could_start, (tasks.tasks[by_time[-1]].need, by_time.pop()))
        index = heapq.heappop(could_start)[1]
        ends_s[index] = now_s = now_s + tasks.tasks[index].duration_s
    return ends_s
