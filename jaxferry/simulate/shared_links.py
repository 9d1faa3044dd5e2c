"""Links that programs share with transfers: a step's tasks with the link's work of programs as tasks of their own.

    H2D   load 1   read 2   load 3            GPU   forward 1   forward 2 (DHA)   forward 3
    D2H   offload 3   write 2                 GPU   ... backward 3   backward 2 (GO)   backward 1

A program by Direct Host Access takes bytes of the link that a load then cannot have, and the total is what the link can
carry. Copies are queued long before the programs that need them, so a read does not queue behind them: the program goes
first, and the loads behind it in the list end as much later. So a **read** has its place before its program, waits for
nothing, and nothing waits for it but the link. It may thus count before its program starts: exact where loads follow
each other without a pause, which is where they matter.

A gradient that a backward writes itself finds the earlier layers' gradients on the link down, which it needs no later
than they. So a **write** starts with its backward and once the earlier transfers have ended; all that waits for the
backward waits for it, too. Two transfers never have the bandwidth of one.

Both only add work and waits to the other tasks. So a bound that is proven without them holds with them.
"""

import dataclasses

from jaxferry.tasks import Kind, Lane, Schedule, Task


def with_link_work(step: Schedule) -> Schedule:
    """The tasks with READ and WRITE tasks; the same schedule if no program takes time of a link."""
    if not any(task.read_s or task.write_s for task in step.tasks):
        return step
    return dataclasses.replace(step, tasks=tuple(_Expansion(step).tasks))


class _Expansion:
    """Copies a list of tasks and adds the links' own.

    Attributes:
      tasks: the new list.
    """

    def __init__(self, step: Schedule):
        self.tasks: list[Task] = []
        self._at: list[int] = []
        self._write_of: dict[int, int] = {}
        self._on_gpu: tuple[int, ...] = ()
        for task in step.tasks:
            self._copy(task)
        first = next(index for index, task in enumerate(self.tasks) if task.lane is Lane.GPU)
        for index, task in enumerate(self.tasks):  # the previous step's tasks have their new indices only now
            before = (*task.after_previous, *(self._on_gpu if index == first else ()))
            if before:
                self.tasks[index] = dataclasses.replace(task, after_previous=self._moved(before))

    def _copy(self, task: Task) -> None:
        if task.read_s:
            self._add(task, Kind.READ, Lane.H2D, ("read_s", task.read_s), ())
        after = self._moved(task.after)
        if task.lane is Lane.GPU:
            after = tuple(dict.fromkeys((*after, *(self._write_of[i] for i in self._on_gpu if i in self._write_of))))
        self._at.append(len(self.tasks))
        copy = None if task.copy is None else self._at[task.copy]
        self.tasks.append(dataclasses.replace(task, after=after, copy=copy, read_s=0.0, write_s=0.0))
        if task.write_s:
            waits = tuple(dict.fromkeys((*after, *(self._at[i] for i in self._on_gpu))))
            self._write_of[len(self._at) - 1] = len(self.tasks)
            self._add(task, Kind.WRITE, Lane.D2H, ("write_s", task.write_s), waits)
        if task.lane is Lane.GPU:
            self._on_gpu = (len(self._at) - 1,)

    def _add(self, of: Task, kind: Kind, lane: Lane, duration: tuple[str, float], after: tuple[int, ...]) -> None:
        name = f"{kind.value} {of.name.split(' ', 1)[1]}"
        self.tasks.append(Task(name, of.segment, kind, lane, *duration, after, step=of.step))

    def _moved(self, indices: tuple[int, ...]) -> tuple[int, ...]:
        """The new indices of tasks, and of their writes."""
        writes = (self._write_of[index] for index in indices if index in self._write_of)
        return (*(self._at[index] for index in indices), *writes)
