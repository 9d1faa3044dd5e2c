"""Traces are documents that Perfetto opens: one named row a lane, nothing overlapping in a row."""

import itertools
import json

from hypothesis import given

from jaxferry.step import Lane, chrome_trace, run, schedule_chain
from profiles import deterministic, planned


@deterministic
@given(planned())
def test_every_task_is_an_event_on_its_lane_s_row_and_rows_do_not_overlap(case):
    of = run(schedule_chain(*case, 2))
    document = json.loads(json.dumps(chrome_trace(of)))
    events = document["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(rows.values()) == sorted(lane.value for lane in Lane)
    spans = [event for event in events if event["ph"] == "X"]
    assert [(event["name"], rows[event["tid"]]) for event in spans] == [
        (task.name, task.lane.value) for task in of.schedule.tasks
    ]
    for row in rows:
        mine = [(event["ts"], event["ts"] + event["dur"]) for event in spans if event["tid"] == row]
        assert all(before[1] <= after[0] + 1e-6 for before, after in itertools.pairwise(sorted(mine)))
