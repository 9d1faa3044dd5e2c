"""The tasks of one step while they are listed, with the times at which they would run alone."""

from typing import Any

from jaxferry.costs.records import Profile
from jaxferry.step.tasks import Kind, Lane, Task


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

    def emit(self, kind: Kind, lane: Lane, layer: int, duration: tuple[str, float], after: tuple[int, ...] = ()) -> int:
        """Appends a task and returns its index."""
        name = f"{kind.value} {self.layers[layer].name}"
        self.tasks.append(Task(name, layer, kind, lane, *duration, after))
        start_s = max([self.free_s[lane], *(self.ends_s[other] for other in after)])
        self.free_s[lane] = start_s + duration[1]
        self.ends_s.append(self.free_s[lane])
        return len(self.tasks) - 1

    def add_bytes(self, task: int, **more: int) -> None:
        """Adds to attributes of a task."""
        known = self.tasks[task]
        for key, amount in more.items():
            object.__setattr__(known, key, getattr(known, key) + amount)

    def set(self, task: int, **values: Any) -> None:
        """Replaces attributes of a task."""
        # In place: until the list is complete nobody else has its tasks, and new ones took a sixth of all planning.
        for key, value in values.items():
            object.__setattr__(self.tasks[task], key, value)
