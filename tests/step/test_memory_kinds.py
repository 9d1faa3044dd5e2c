"""Device memory by kind: together it is the memory of the schedule; each kind is what its tasks hold."""

import bisect

from hypothesis import given

from jaxferry.modes import Mode
from jaxferry.step import LayerPlan, Plan, device_bytes, device_bytes_by_kind, run, schedule_chain
from profiles import examples, planned, transformer


def held_at(changes, time):
    return changes[bisect.bisect_right([moment for moment, _ in changes], time) - 1][1]


@examples(25)
@given(planned(recomputing=True, programs=True))
def test_the_kinds_add_up_to_the_memory_of_the_schedule(case):
    profile, plan = case
    of = run(schedule_chain(profile, plan, 2))
    kinds = device_bytes_by_kind(of, profile, plan).values()
    for time, held in device_bytes(of)[1:]:
        assert sum(held_at(changes, time) for changes in kinds) == held


def test_every_kind_is_empty_after_the_step_but_resident_parameters():
    profile = transformer(6)
    layers = [LayerPlan(layer.name, Mode.GFGB) for layer in profile.layers]
    layers[1] = LayerPlan(profile.layers[1].name, Mode.RESIDENT)
    plan = Plan("auto", 1.0, tuple(layers))
    kinds = device_bytes_by_kind(run(schedule_chain(profile, plan, 1)), profile, plan)
    left = {kind: changes[-1][1] for kind, changes in kinds.items()}
    assert left.pop("parameters") == profile.layers[1].param_bytes and not any(left.values())
    assert all(held >= 0 for changes in kinds.values() for _, held in changes)
    gradients = max(held for _, held in kinds["gradients"])
    assert 0 < gradients <= sum(layer.grad_bytes for layer in profile.layers)
