"""Properties of recorded steps."""

from jaxferry.step import Lane


def check_times(run):
    """Checks that each task follows the tasks that it waits for, and that device lanes keep their order."""
    last = {}
    for task, start, end in zip(run.schedule.tasks, run.starts_s, run.ends_s, strict=True):
        assert 0 <= start <= end, task
        assert all(run.ends_s[earlier] <= start for earlier in task.after), task
        if task.lane is not Lane.HOST:
            assert start >= last.get(task.lane, 0.0), task
            last[task.lane] = end
