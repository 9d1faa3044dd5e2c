"""Chrome traces: open the file in Perfetto (ui.perfetto.dev) or chrome://tracing; one row per lane."""

from typing import Any

from jaxferry.step.schedule import Kind, Lane
from jaxferry.step.simulate.machine import Run, device_bytes

_MICROSECONDS = 1e6
_PROCESS = 1
_ROWS = {lane: number for number, lane in enumerate(Lane, start=1)}
_STATE = (Kind.STATE_UP, Kind.STATE_DOWN)


def chrome_trace(*runs: Run) -> dict[str, Any]:
    """Runs as a document of the Chrome trace event format: complete events, times in microseconds.

    Each lane is a named thread, in the order of `Lane`; device memory is a counter.

    Args:
      *runs: one, or one of each process that trained together.
    """
    events: list[dict[str, Any]] = []
    for number, of in enumerate(runs, start=_PROCESS):
        name = "jaxferry simulate" if len(runs) == 1 else f"process {number - _PROCESS}"
        events += _metadata_of(number, name) + _events(number, of)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _metadata_of(process: int, name: str) -> list[dict[str, Any]]:
    events = [_metadata("process_name", process, 0, {"name": name})]
    for lane, row in _ROWS.items():
        events.append(_metadata("thread_name", process, row, {"name": lane.value}))
        events.append(_metadata("thread_sort_index", process, row, {"sort_index": row}))
    return events


def _events(process: int, of: Run) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [
        {
            "name": task.name,
            "cat": task.kind.value,
            "ph": "X",
            "ts": start * _MICROSECONDS,
            "dur": (end - start) * _MICROSECONDS,
            "pid": process,
            "tid": _ROWS[task.lane],
            "args": {
                "layer": task.segment,
                "step": task.step,
                "duration_key": task.duration_key,
                **({"bytes": task.start_bytes + task.end_bytes} if task.kind in _STATE else {}),
            },
        }
        for task, start, end in zip(of.schedule.tasks, of.starts_s, of.ends_s, strict=True)
    ]
    for time, held in device_bytes(of):
        counter = {"ph": "C", "name": "device memory", "ts": time * _MICROSECONDS, "pid": process}
        events.append({**counter, "args": {"bytes": held}})
    return events


def _metadata(name: str, process: int, row: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": row, "args": args}
