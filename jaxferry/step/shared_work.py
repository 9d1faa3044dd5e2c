"""What programs and lanes share, as tasks of their own.

    H2D   load 1   read 2   load 3            GPU   forward 1   forward 2 (DHA)   forward 3
    D2H   offload 3   write 2   offload 1     GPU   ... backward 3   backward 2 (GO)   backward 1
    host  ...   update 2   update 1   contention: lost to loads, reads, offloads and writes

**Links**: what a program reads or writes in host memory crosses the link, and transfers cannot have that time of it.
Programs go first: copies are queued long before they are needed, and a program that waited for all of them would gain
nothing. So a transfer that follows a program in the list ends as much later as the program takes of the link.

- A **read** has its place before its program and waits for nothing. It may thus count before its program starts: exact
  while loads follow each other without a pause, which is when they matter.
- A **write** has its place after its backward, and starts with it or once earlier transfers have ended. A gradient in
  flight as the backward starts is not delayed.

**Host memory**: what a lane loses to the others in a step (`Contention`) follows its last task of the step, and waits
for nothing else. It delays the lane's next step as far as the lane is not idle between them: exact for the lane that
sets the pace, which is when it matters. The first step is delayed by nothing.

Nothing but the lane waits for these tasks. So no lane ever does more work than it can, and all other tasks end no
earlier than without sharing: a bound that is proven without it holds with it.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxferry.costs import NO_CONTENTION, SHARING
from jaxferry.step.tasks import Kind, Lane, Schedule, Task


def with_shared_work(step: Schedule) -> Schedule:
    """The schedule with READ, WRITE and CONTENTION tasks; the same one if nothing is shared."""
    shares_links = any(task.read_s or task.write_s for task in step.tasks)
    if not step.contention and not shares_links:
        return step
    tasks: list[Task] = []
    new_index: list[int] = []
    places: list[int] = []
    moved: list[tuple[int, Task]] = []
    on_gpu: tuple[int, ...] = ()
    begin = 0
    for index, task in enumerate(step.tasks):
        if task.step != step.tasks[index - 1].step and index:
            tasks += _lost(step, step.tasks[begin:index])
            begin = index
        places.append(len(tasks))
        if task.read_s:
            tasks.append(_link_task(task, Kind.READ, Lane.H2D, ("read_s", task.read_s), ()))
        new_index.append(len(tasks))
        if shares_links or begin or task.before is not None:  # otherwise tasks are added after all others
            moved.append((len(tasks), task))
        tasks.append(task)
        if task.write_s:
            waits = tuple([new_index[other] for other in dict.fromkeys((*task.after, *on_gpu))])
            tasks.append(_link_task(task, Kind.WRITE, Lane.D2H, ("write_s", task.write_s), waits))
        on_gpu = (index,) if task.lane is Lane.GPU else on_gpu
    tasks += _lost(step, step.tasks[begin:])
    for place, task in moved:  # waits for tasks of other steps have their new indices only now
        after = tuple([new_index[other] for other in task.after])
        earlier = tuple([new_index[other] for other in task.after_previous])
        before, copy = task.before, None if task.copy is None else new_index[task.copy]
        if before is not None:
            steps, following = divmod(before, len(places))
            before = steps * len(tasks) + places[following]
        tasks[place] = task.placed(after, earlier, before, copy)
        tasks[place].read_s = tasks[place].write_s = 0.0
    return dataclasses.replace(step, tasks=tuple(tasks), contention=NO_CONTENTION)


def _link_task(of: Task, kind: Kind, lane: Lane, duration: tuple[str, float], after: tuple[int, ...]) -> Task:
    name = f"{kind.value} {of.name.split(' ', 1)[1]}"
    return Task(name, of.segment, kind, lane, *duration, after, step=of.step)


def _lost(schedule: Schedule, tasks: Sequence[Task]) -> list[Task]:
    """What the lanes lose to each other in a step with these tasks."""
    if not schedule.contention:
        return []
    work_s: dict[Lane, list[float]] = {lane: [] for lane in Lane}
    for task in tasks:
        work_s[task.lane].append(task.duration_s)
        work_s[Lane.H2D].append(task.read_s)
        work_s[Lane.D2H].append(task.write_s)
    lost_s = schedule.contention.lost_s(np.array([math.fsum(work_s[Lane(lane)]) for lane in SHARING])).tolist()
    first = tasks[0]
    return [
        Task(Kind.CONTENTION.value, first.segment, Kind.CONTENTION, Lane(lane), "contention", seconds, step=first.step)
        for lane, seconds in zip(SHARING, lost_s, strict=True)
        if seconds > 0
    ]
