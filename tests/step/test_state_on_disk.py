"""Steps with masters and optimizer state in a scratch file, and updates that are deferred beside the next forward."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxferry.costs import LayerProfile, Profile
from jaxferry.errors import InputError
from jaxferry.modes import Mode
from jaxferry.planner import make_plan
from jaxferry.step import DISK_SLOTS, Kind, Lane, LayerPlan, Plan, Updates, schedule_step, simulate
from profiles import deterministic, planned, seconds


@st.composite
def on_disk(draw):
    """A profile with state of some groups in a scratch file, and a plan that may defer updates."""
    profile, plan = draw(planned(plain=True, programs=True))
    times = {}
    for layer in profile.layers:
        known = times.setdefault(layer.parameters, draw(st.one_of(st.none(), st.tuples(seconds, seconds))))
        times[layer.parameters] = known
    changes = (
        {} if times[layer.parameters] is None else dict(zip(KEYS, times[layer.parameters], strict=True))
        for layer in profile.layers
    )
    return profile.with_layers(changes), dataclasses.replace(plan, deferred_updates=draw(st.integers(0, 8)))


KEYS = ("state_read_s", "state_write_s")


@deterministic
@hypothesis.given(on_disk())
def test_each_update_has_its_state_and_deferred_ones_come_last_in_the_order_of_need(case):
    profile, plan = case
    tasks = schedule_step(profile, plan).tasks
    assert all(other < index for index, task in enumerate(tasks) for other in task.after)
    updates = [task.segment for task in tasks if task.kind is Kind.UPDATE and task.lane is Lane.HOST]
    assert len(set(updates)) == len(updates)
    ahead = [segment for segment in updates if profile.layers[segment].state_read_s is not None]
    for kind in (Kind.STATE_READ, Kind.STATE_WRITE):
        assert [task.segment for task in tasks if task.kind is kind] == ahead
    held = 0
    for task in tasks:
        held += {Kind.STATE_READ: 1, Kind.STATE_WRITE: -1}.get(task.kind, 0)
        assert held <= DISK_SLOTS
    backwards = [index for index, task in enumerate(tasks) if task.kind is Kind.BACKWARD]
    last = max(backwards, default=0)
    in_time = [task.segment for task in tasks[: last + 1] if task.kind is Kind.UPDATE and task.lane is Lane.HOST]
    num = plan.deferred_updates if ahead and plan.updates is Updates.OVERLAPPED else 0
    # The last group's own update follows the last backward too, in its place.
    deferred = updates[len(updates) - min(num, max(len(updates) - 2, 0)) :] if num else []
    rest = updates[: len(updates) - len(deferred)]
    assert rest == sorted(rest, reverse=True) and deferred == sorted(deferred)
    assert not set(deferred) & set(in_time) and not (updates and {min(updates), max(updates)} & set(deferred))


def chain(num, disk_s, **facts):
    times = {"load_s": 0.25, "offload_s": 0.25, "forward_s": 1, "backward_s": 2, "update_s": 0.5}
    slow = {"forward_dha_s": 9, "backward_dha_s": 9, "backward_go_s": 9}
    sizes = {"param_bytes": 100, "grad_bytes": 100, "activation_bytes": 10}
    layers = (
        LayerProfile(name=f"l{i}", **sizes, **times, **slow, state_read_s=disk_s, state_write_s=disk_s)
        for i in range(num)
    )
    return Profile({}, tuple(layers), **facts)


@pytest.mark.parametrize(("num", "disk_s", "before", "after"), [(16, 1.5, 1.2, 1.03), (32, 2.5, 1.12, 1.001)])
def test_the_disk_works_beside_the_next_forward_too(num, disk_s, before, after):
    """A step takes what its busiest lane takes; without deferred updates, the disk is idle during the forward."""
    profile = chain(num, disk_s)
    plan = make_plan(profile, "native-overlapped")
    least_s = max(3 * num, 2 * disk_s * num)
    in_order = simulate(profile, dataclasses.replace(plan, deferred_updates=0)).predicted.steady_step_s
    assert plan.deferred_updates and in_order > before * least_s
    assert least_s <= plan.predicted.steady_step_s < after * least_s


def test_nothing_is_deferred_where_a_step_waits_for_its_updates_or_the_disk_does_not_bind():
    plan = Plan("any", 1.0, tuple(LayerPlan(f"l{i}", Mode.GFGB) for i in range(8)), deferred_updates=4)
    none = dataclasses.replace(plan, deferred_updates=0)
    for profile, own in (
        (chain(8, None), plan),
        (chain(8, 2, updates_after_all=True), plan),
        (chain(8, 2, gradient_buffers=3), plan),
        (chain(8, 2), dataclasses.replace(plan, gradient_buffers=3)),
        (chain(8, 2), dataclasses.replace(plan, updates=Updates.AFTER_ALL)),
    ):
        bare = dataclasses.replace(own, deferred_updates=0)
        assert schedule_step(profile, own) == schedule_step(profile, bare)
    assert schedule_step(chain(8, 2), plan) != schedule_step(chain(8, 2), none)
    assert make_plan(chain(16, 0.5), "native-overlapped").deferred_updates == 0


def test_plans_state_them():
    plan = Plan("any", 1.0, (LayerPlan("l0", Mode.GFGB),), deferred_updates=3)
    assert plan.to_json()["deferred_updates"] == 3 and Plan.from_json(plan.to_json()) == plan
    assert "deferred_updates" not in dataclasses.replace(plan, deferred_updates=0).to_json()
    with pytest.raises(InputError, match="plan: deferred_updates must be a whole number, 1 or more, got -1"):
        dataclasses.replace(plan, deferred_updates=-1)
