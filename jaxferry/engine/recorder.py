"""Remembers when the tasks of the last steps started and ended."""

from __future__ import annotations

import collections

from jaxferry.engine.lanes import Work
from jaxferry.schedule import Run, repeat


class Recorder:
    """Keeps the last steps that were taken.

    A task's start and end are two readings of the host's clock. On an accelerator they say when the task was issued;
    an update's, on all machines, when it was done.

    Args:
      num_steps: how many; 0 keeps none.
    """

    def __init__(self, num_steps: int) -> None:
        self._works: collections.deque[Work] = collections.deque(maxlen=num_steps)

    def add(self, work: Work) -> None:
        """Remembers a step; steps of another task list are forgotten."""
        if self._works and self._works[-1].list is not work.list:
            self._works.clear()
        self._works.append(work)

    def run(self) -> Run | None:
        """The steps as one chain, in seconds from the start of the first; None if there are none.

        Steps that are still under way are left out.
        """
        done = [work for work in self._works if work.is_over() and work.failure is None and not work.is_stopped]
        if not done:
            return None
        begin_s = done[0].begin_s
        starts = [start - begin_s for work in done for start in work.starts_s]
        ends = [end - begin_s for work in done for end in work.ends_s]
        return Run(repeat(done[0].list.schedule, len(done)), tuple(starts), tuple(ends))
