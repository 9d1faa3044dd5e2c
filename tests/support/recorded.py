"""What must hold of recorded steps."""

from jaxferry.schedule import Lane


def check_times(run):
    """Everything follows what it waits for, and the lanes of the device their order."""
    last = {}
    for task, start, end in zip(run.schedule.tasks, run.starts_s, run.ends_s, strict=True):
        assert 0 <= start <= end, task
        assert all(run.ends_s[earlier] <= start for earlier in task.after), task
        if task.lane is not Lane.HOST:
            assert start >= last.get(task.lane, 0.0), task
            last[task.lane] = end
