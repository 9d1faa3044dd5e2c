"""Chrome traces: open the file in Perfetto (ui.perfetto.dev) or chrome://tracing; one row per lane."""

from typing import Any

from jaxferry.schedule import Kind, Lane
from jaxferry.simulate.machine import Run, device_bytes

_MICROSECONDS = 1e6
_PROCESS = 1
_STATE = (Kind.STATE_UP, Kind.STATE_DOWN)


def chrome_trace(of: Run) -> dict[str, Any]:
    """The run as a document of the Chrome trace event format: complete events, times in microseconds.

    Each lane is a named thread, in the order of `Lane`; device memory is a counter.
    """
    rows = {lane: number for number, lane in enumerate(Lane, start=1)}
    events: list[dict[str, Any]] = [_metadata("process_name", 0, {"name": "jaxferry simulate"})]
    for lane, row in rows.items():
        events.append(_metadata("thread_name", row, {"name": lane.value}))
        events.append(_metadata("thread_sort_index", row, {"sort_index": row}))
    for task, start, end in zip(of.schedule.tasks, of.starts_s, of.ends_s, strict=True):
        events.append(
            {
                "name": task.name,
                "cat": task.kind.value,
                "ph": "X",
                "ts": start * _MICROSECONDS,
                "dur": (end - start) * _MICROSECONDS,
                "pid": _PROCESS,
                "tid": rows[task.lane],
                "args": {
                    "layer": task.segment,
                    "step": task.step,
                    "duration_key": task.duration_key,
                    **({"bytes": task.start_bytes + task.end_bytes} if task.kind in _STATE else {}),
                },
            }
        )
    for time, held in device_bytes(of):
        counter = {"ph": "C", "name": "device memory", "ts": time * _MICROSECONDS, "pid": _PROCESS}
        events.append({**counter, "args": {"bytes": held}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _metadata(name: str, row: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": _PROCESS, "tid": row, "args": args}
