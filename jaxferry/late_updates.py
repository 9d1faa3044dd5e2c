"""Streamed updates that a step leaves to the next one: their places between its loads and forwards.

    H2D   ... state_up 1 | load 1   state_up 5   load 2   state_up 6   load 3 ...
    GPU   ... backward 1 |  update 1   forward 1   update 5   forward 2   update 6   forward 3 ...
                         next step

A group's update need only be done before the group's next load or read. So the stream goes on while the next step's
forwards run, the group that they need first in front. The places follow from the tasks of the forwards, run once more
after the step as if nothing but the stream delayed them:

- A transfer up precedes a load if that load still arrives before its forward could start.
- An update precedes a forward if its state has arrived by the time at which that forward could start.
- A group's updates precede its own load or read.
- A gradient stays until its update. Updates precede a forward that would not fit into device memory beside the
  gradients which are left.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from jaxferry.profiling.records import Profile
from jaxferry.step_tasks import StepTasks
from jaxferry.streaming import StateStreams
from jaxferry.tasks import Kind, Lane, Task


@dataclasses.dataclass(frozen=True)
class Forwards:
    """The tasks of a step up to its last forward, as the next step has them.

    Attributes:
      num_tasks: how many these are; they lead the list.
      reads: the tasks that wait for the previous step's updates of groups, with these groups.
      left_bytes: by layer, what its forward leaves of device memory for gradients of the previous step.
    """

    num_tasks: int
    reads: Mapping[int, Sequence[int]]
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

    def list(self, forwards: Forwards) -> None:
        """Lists all tasks that are left, with their places."""
        self.streams.begin_late()
        following = self.tasks.tasks[: forwards.num_tasks]
        users = {task.copy: index for index, task in reversed([*enumerate(following)]) if task.copy is not None}
        for index, task in enumerate(following):
            if not self.streams.left_groups:
                return
            self.streams.run_before(index)
            for group in forwards.reads.get(index, ()):
                self.streams.finish_group(group)
            if task.lane is Lane.GPU:
                self._before_program(task, forwards.left_bytes)
            self._go_up(following, index, users)
            self._run(index, task)
        self.streams.run_before(forwards.num_tasks)
        self.streams.finish()

    def _before_program(self, task: Task, left_bytes: Sequence[int]) -> None:
        """Lists the updates that run before a program of the next step."""
        if task.kind is Kind.FORWARD:
            left = self.streams.left_groups
            sizes = [self.gradient_bytes.get(group, 0) for group in left]
            while left and sum(sizes) > left_bytes[task.segment]:
                self.streams.finish_group(left.pop(0))
                sizes.pop(0)
        self.streams.update_arrived(self._could_start_s(task))

    def _go_up(self, following: Sequence[Task], index: int, users: Mapping[int | None, int]) -> None:
        """Lists transfers up as long as the next load arrives in time."""
        load = next((i for i in range(index, len(following)) if following[i].lane is Lane.H2D), None)
        if load is None or load not in users:
            self.streams.fill_slots()
            return
        programs = (task.duration_s for task in following[index : users[load]] if task.lane is Lane.GPU)
        latest_s = self.tasks.free_s[Lane.GPU] + sum(programs) - following[load].duration_s
        self.streams.fill_slots(lambda: self.tasks.free_s[Lane.H2D] + self.streams.next_up_s <= latest_s)

    def _could_start_s(self, task: Task) -> float:
        return max([self.tasks.free_s[task.lane], *(self.ends_s[other] for other in task.after)])

    def _run(self, index: int, task: Task) -> None:
        self.ends_s[index] = self.tasks.free_s[task.lane] = self._could_start_s(task) + task.duration_s
