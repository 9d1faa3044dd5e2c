"""Properties of recorded steps."""

from jaxferry.step import Lane, dispatch_order


def check_times(run):
    """Checks that each task follows the tasks that it waits for, and that device lanes keep their order."""
    last = {}
    for index in dispatch_order(run.schedule.tasks):
        task, start, end = run.schedule.tasks[index], run.starts_s[index], run.ends_s[index]
        assert 0 <= start <= end, task
        assert all(run.ends_s[earlier] <= start for earlier in task.after), task
        if task.lane is not Lane.HOST:
            assert start >= last.get(task.lane, 0.0), task
            last[task.lane] = end
