"""Device memory by kind: together it is the memory of the schedule; each kind is what its tasks hold."""

import bisect

from hypothesis import given

from jaxferry.step import device_bytes, device_bytes_by_kind, run, schedule_chain
from profiles import examples, planned


def held_at(changes, time):
    return changes[bisect.bisect_right([moment for moment, _ in changes], time) - 1][1]


@examples(25)
@given(planned(recomputing=True, programs=True, offloading=True))
def test_the_kinds_add_up_to_the_memory_of_the_schedule(case):
    profile, plan = case
    of = run(schedule_chain(profile, plan, 2))
    kinds = device_bytes_by_kind(of, profile, plan).values()
    for time, held in device_bytes(of)[1:]:
        assert sum(held_at(changes, time) for changes in kinds) == held
