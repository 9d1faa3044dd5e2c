"""Updates that stream through the GPU: their tasks, their waits, their memory."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxferry.costs import LayerProfile, Profile
from jaxferry.errors import InputError
from jaxferry.modes import GradientPlace, Mode, UpdatePlace
from jaxferry.step import (
    Kind,
    Lane,
    LayerPlan,
    Plan,
    Updates,
    device_bytes,
    needed_bytes,
    repeat,
    run,
    schedule_step,
    simulate,
    streaming,
)
from profiles import UNLIMITED_BYTES, deterministic, profiles, transformer

STREAMED = (Mode.GFGB, Mode.DHA, Mode.DFGB, Mode.RELOAD, Mode.RESIDENT)


@pytest.fixture(autouse=True, scope="module")
def _small_subgroups():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "SUBGROUP_BYTES", 100)
        yield


def model(num_layers):
    """A transformer with a millionth of its bytes."""
    keys = ("param_bytes", "grad_bytes", "activation_bytes")
    layers = [
        dataclasses.replace(layer, **{key: getattr(layer, key) // 10**6 + 1 for key in keys})
        for layer in transformer(num_layers).layers
    ]
    return Profile({}, tuple(layers))


def with_state(profile, up_s=None, down_s=None):
    """The profile with masters and state of 6 bytes a byte of parameters, and updates on the device."""
    more = {"state_up_s": up_s, "state_down_s": down_s}
    layers = [dataclasses.replace(x, update_gpu_s=1 / 8, state_bytes=6 * x.param_bytes, **more) for x in profile.layers]
    return dataclasses.replace(profile, layers=tuple(layers))


def plan_with(profile, places, modes, updates=Updates.OVERLAPPED, memory_bytes=None):
    """A plan with these places of update by group; one on the device implies RESIDENT.

    A streamed group has a RESIDENT copy if its first layer has.
    """
    layers = []
    for index, layer in enumerate(profile.layers):
        group = profile.group_of[index]
        place, first = places[group], modes[profile.groups[group][0]]
        mode = Mode.RESIDENT if place is UpdatePlace.RESIDENT else modes[index]
        mode = first if place is UpdatePlace.GPU and Mode.RESIDENT in (mode, first) else mode
        layers.append(LayerPlan(layer.name, mode, GradientPlace.DEVICE, update=place))
    return Plan("test", 1.0, tuple(layers), updates=updates, memory_bytes=memory_bytes)


@st.composite
def planned(draw):
    profile = draw(profiles(max_layers=4))
    times = st.integers(0, 24).map(lambda eighths: eighths / 8)
    profile = with_state(profile, draw(st.none() | times), draw(st.none() | times))
    places = [draw(st.sampled_from(UpdatePlace)) for _ in profile.groups]
    modes = [draw(st.sampled_from(STREAMED)) for _ in profile.layers]
    memory_bytes = draw(st.sampled_from([None, 200, UNLIMITED_BYTES]))
    return profile, plan_with(profile, places, modes, draw(st.sampled_from(Updates)), memory_bytes)


def subgroup_tasks(tasks, kind, segment):
    return [index for index, task in enumerate(tasks) if task.kind is kind and task.segment == segment]


@deterministic
@given(planned())
def test_each_subgroup_goes_up_is_updated_and_comes_down_and_the_gradient_never_leaves(case):
    profile, plan = case
    tasks = schedule_step(profile, plan).tasks
    for group, members in enumerate(profile.groups):
        place, first = plan.layers[members[0]].update, members[0]
        ups, downs = (subgroup_tasks(tasks, kind, first) for kind in (Kind.STATE_UP, Kind.STATE_DOWN))
        if place is not UpdatePlace.GPU:
            assert not ups and not downs
            continue
        layer, updates = profile.layers[first], subgroup_tasks(tasks, Kind.UPDATE, first)
        assert len(ups) == len(updates) == len(downs) == -(-layer.state_bytes // 100)
        assert {tasks[update].lane for update in updates} == {Lane.GPU}
        stays = plan.layers[first].mode is Mode.RESIDENT
        assert sum(tasks[up].start_bytes for up in ups) == layer.state_bytes <= 100 * len(ups)
        assert sum(tasks[down].end_bytes for down in downs) == layer.state_bytes + layer.param_bytes * (not stays)
        assert sum(tasks[update].start_bytes for update in updates) == layer.param_bytes * (not stays)
        [gradient] = subgroup_tasks(tasks, Kind.BACKWARD, first)
        for up, update, down in zip(ups, updates, downs, strict=True):
            assert gradient in tasks[up].after or plan.updates is Updates.AFTER_ALL
            assert up in tasks[update].after and update in tasks[down].after
        assert not [task for task in tasks if task.kind is Kind.OFFLOAD and task.segment in members]
        readers = [
            x for x in tasks if x.kind in (Kind.LOAD, Kind.FORWARD) and x.after_previous and x.segment in members
        ]
        end = updates[-1] if stays else downs[-1]
        assert readers and all(task.after_previous == (end,) for task in readers), group
        if stays:
            moves = (Kind.LOAD, Kind.RELOAD, Kind.REFRESH)
            assert not [task for task in tasks if task.kind in moves and task.segment in members]
    assert sum(task.start_bytes - task.end_bytes for task in tasks) == 0


@deterministic
@given(planned())
def test_a_chain_never_holds_more_than_the_need_and_no_more_subgroups_than_slots(case):
    profile, plan = case
    assert simulate(profile, plan).peak_device_bytes <= max(needed_bytes(profile, plan), plan.memory_bytes or 0)
    ran = run(schedule_step(profile, plan))
    tasks = ran.schedule.tasks
    starts = sorted(ran.starts_s[i] for i, task in enumerate(tasks) if task.kind is Kind.STATE_UP)
    ends = sorted(ran.ends_s[i] for i, task in enumerate(tasks) if task.kind is Kind.STATE_DOWN)
    late = zip(starts[streaming.SLOTS :], ends, strict=False)
    assert all(start >= end for start, end in late)


@deterministic
@given(planned(), st.integers(0, 99))
def test_a_subgroup_goes_up_again_once_it_is_down_and_a_slot_is_free_however_long_tasks_take(case, seed):
    """A forward on a copy that stays does not wait for the previous step's transfers down."""
    profile, plan = case
    step, random = schedule_step(profile, plan), np.random.default_rng(seed)
    factors = np.exp(random.normal(size=len(step.tasks)))
    tasks = tuple(dataclasses.replace(x, duration_s=x.duration_s * y) for x, y in zip(step.tasks, factors, strict=True))
    ran = run(repeat(dataclasses.replace(step, tasks=tasks), 3))
    assert max(held for _, held in device_bytes(ran)) <= max(needed_bytes(profile, plan), plan.memory_bytes or 0)
    spans = {kind: [] for kind in (Kind.STATE_UP, Kind.STATE_DOWN)}
    for index, task in enumerate(ran.schedule.tasks):
        if task.kind in spans:
            spans[task.kind].append((task.segment, task.subgroup, ran.starts_s[index], ran.ends_s[index]))
    up, down = (sorted(each, key=lambda span: span[2:]) for each in spans.values())
    assert all(start >= end for (*_, start, _), (*_, end) in zip(up[streaming.SLOTS :], down, strict=False))
    for segment, subgroup in {span[:2] for span in up}:
        ups, downs = ([span[2:] for span in each if span[:2] == (segment, subgroup)] for each in (up, down))
        assert all(start >= end for (start, _), (_, end) in zip(ups[1:], downs, strict=False))


def test_if_updates_wait_for_all_gradients_those_of_streamed_groups_stay_until_then():
    profile = with_state(model(4), 0.0, 0.0)
    place = [UpdatePlace.GPU] * len(profile.groups)
    one, other = (plan_with(profile, place, [Mode.GFGB] * 4, updates) for updates in Updates)
    tasks = schedule_step(profile, other).tasks
    last = max(index for index, task in enumerate(tasks) if task.kind is Kind.BACKWARD)
    assert all(index > last for index, task in enumerate(tasks) if task.kind is Kind.STATE_UP)
    more = sum(layer.grad_bytes for layer in profile.layers) - max(layer.grad_bytes for layer in profile.layers)
    assert needed_bytes(profile, other) - needed_bytes(profile, one) >= more


def test_less_room_makes_a_backward_wait_for_updates_whose_gradients_would_not_fit():
    """The link is slow, so no update is due before the last backward."""
    profile = with_state(model(4), 1.0, 1.0)
    places = [UpdatePlace.GPU] * len(profile.groups)

    def updates_before_the_last_backward(memory_bytes):
        tasks = schedule_step(profile, plan_with(profile, places, [Mode.DHA] * 4, memory_bytes=memory_bytes)).tasks
        kinds = [task.kind for task in tasks if task.kind is Kind.BACKWARD or task.kind is Kind.UPDATE]
        return kinds[: kinds[::-1].index(Kind.BACKWARD) * -1].count(Kind.UPDATE)

    assert updates_before_the_last_backward(UNLIMITED_BYTES) == 0
    assert updates_before_the_last_backward(None) > 0


def test_a_second_load_goes_up_before_state_that_waits_for_the_backward_in_front_of_it():
    """A transfer up takes a second, so each one fits beside a backward of three; in the other order none would."""
    times = {"load_s": 1.0, "forward_s": 3.0, "backward_s": 3.0, "update_s": 0.0, "inter_forward_s": 0.0}
    times |= {"inter_backward_s": 0.0, "update_gpu_s": 0.0}
    profile = with_state(model(6), 1.0, 1.0)
    profile = Profile({}, tuple(dataclasses.replace(layer, **times) for layer in profile.layers))
    plan = plan_with(profile, [UpdatePlace.GPU] * len(profile.groups), [Mode.RELOAD] * len(profile.layers))
    plan = dataclasses.replace(plan, memory_bytes=UNLIMITED_BYTES)
    ran = run(schedule_step(profile, plan))
    spans = [
        (ran.starts_s[index], ran.ends_s[index])
        for index, task in enumerate(ran.schedule.tasks)
        if task.kind is Kind.BACKWARD
    ]
    assert all(start == end for (_, end), (start, _) in itertools.pairwise(spans[1:]))


def test_a_forward_on_a_copy_that_stays_runs_beside_gradients_that_still_leave():
    """It does not wait for the link down, and it needs far more memory than the backward before it."""
    times = dict.fromkeys(("forward_s", "forward_dha_s", "backward_s", "backward_dha_s", "backward_go_s"), 1.0)
    times |= dict.fromkeys(("load_s", "update_s", "update_gpu_s", "state_up_s", "state_down_s"), 0.0)
    times |= {"param_bytes": 1, "state_bytes": 6}
    first = LayerProfile(name="first", grad_bytes=1, offload_s=0.0, forward_workspace_bytes=1000, **times)
    others = (LayerProfile(name=name, grad_bytes=200, offload_s=50.0, **times) for name in ("second", "third"))
    profile, places = Profile({}, (first, *others)), [UpdatePlace.GPU, UpdatePlace.HOST, UpdatePlace.HOST]
    plan = plan_with(profile, places, [Mode.RESIDENT, Mode.GFGB, Mode.GFGB])
    peak_bytes = simulate(profile, plan).peak_device_bytes
    assert 1200 < peak_bytes <= needed_bytes(profile, plan) < 1400


@pytest.mark.parametrize(("mode", "down_s", "down"), [(Mode.GFGB, 3.5, 7), (Mode.RESIDENT, 3.0, 6)])
def test_times_of_the_stream_default_to_the_speed_of_the_links(mode, down_s, down):
    """A transfer down without the compute copy takes its share of the time with it."""
    given, unsaid = with_state(model(3), 2.0, 3.5), with_state(model(3))
    plan = plan_with(given, [UpdatePlace.GPU] * 3, [mode] * 3)
    layer = unsaid.layers[0]
    for kind, own_s, moved in ((Kind.STATE_UP, 2.0, 6), (Kind.STATE_DOWN, down_s, down)):
        total_s = [
            sum(x.duration_s for x in schedule_step(profile, plan).tasks if x.kind is kind and x.segment == 0)
            for profile in (given, unsaid)
        ]
        assert total_s[0] == pytest.approx(own_s)
        assert total_s[1] == pytest.approx(moved * layer.load_s, rel=0.1)


def test_it_needs_a_gradient_on_the_device():
    for mode in Mode:
        with pytest.raises(InputError, match='update "gpu" needs gradient "device"'):
            LayerPlan("a", mode, "host", update="gpu")


def test_another_mode_keeps_it():
    for mode, other in itertools.product(Mode, Mode):
        assert LayerPlan("a", mode, "device", update="gpu").with_mode(other).update is UpdatePlace.GPU
        known = LayerPlan("a", Mode.RESIDENT, "device", update="resident").with_mode(other).update
        assert known is (UpdatePlace.RESIDENT if other is Mode.RESIDENT else UpdatePlace.HOST)


@pytest.mark.parametrize("modes", [(Mode.RESIDENT, Mode.DHA), (Mode.GFGB, Mode.RESIDENT)])
def test_a_copy_stays_for_all_layers_that_share_it_or_for_none(modes):
    """A layer that reads host memory would find the old parameters there."""
    layers = [dataclasses.replace(layer, parameters="tied", param_bytes=4) for layer in with_state(model(2)).layers]
    plan = [LayerPlan(layer.name, mode, update=UpdatePlace.GPU) for layer, mode in zip(layers, modes, strict=True)]
    with pytest.raises(InputError, match="must be RESIDENT if and only if that of layer"):
        schedule_step(Profile({}, tuple(layers)), Plan("test", 1.0, tuple(plan)))


def test_a_copy_that_stays_saves_the_load_the_transfer_down_of_the_copy_and_the_wait_for_both():
    """Links are slow: a step with a load takes the transfers up of copy and state in turn."""
    times = {"load_s": 1.0, "offload_s": 1.0, "forward_s": 0.1, "backward_s": 0.1, "update_gpu_s": 0.0}
    times |= {"inter_forward_s": 0.0, "inter_backward_s": 0.0}
    profile = with_state(model(4), 6.0, 7.0)
    profile = Profile({}, tuple(dataclasses.replace(layer, **times) for layer in profile.layers))
    found = [
        simulate(profile, plan_with(profile, [UpdatePlace.GPU] * 4, [mode] * 4)) for mode in (Mode.GFGB, Mode.RESIDENT)
    ]
    up_s, down_s = 4 * 6.0, 4 * 6.0
    assert found[1].steady_step_s == pytest.approx(max(up_s, down_s), rel=0.3)
    assert found[0].steady_step_s >= up_s + 4 * 1.0
    copies_bytes = sum(layer.param_bytes for layer in profile.layers)
    assert found[0].link_bytes - found[1].link_bytes == 2 * copies_bytes


def test_plans_and_profiles_keep_it_in_their_files():
    profile = with_state(model(2), 0.5, 0.75)
    plan = plan_with(profile, [UpdatePlace.GPU, UpdatePlace.HOST], [Mode.GFGB] * 2)
    assert Profile.from_json(profile.to_json()) == profile and Plan.from_json(plan.to_json()) == plan
    assert plan.to_json()["layers"][0]["update"] == "gpu"


def test_without_times_the_state_of_a_layer_goes_up_beside_the_next_backward():
    layers = [
        LayerProfile(
            **{key: getattr(layer, key) for key in ("name", "parameters", "param_bytes", "grad_bytes")},
            **dict.fromkeys(("load_s", "forward_s", "forward_dha_s", "backward_s", "backward_dha_s"), 0.0),
            **dict.fromkeys(("backward_go_s", "offload_s", "update_s", "update_gpu_s"), 0.0),
            activation_bytes=1,
            state_bytes=50,
        )
        for layer in model(4).layers
    ]
    profile = Profile({}, tuple(layers))
    assert not profile.has_times
    plan = plan_with(profile, [UpdatePlace.GPU] * len(profile.groups), [Mode.GFGB] * len(layers))
    kinds = [task.kind for task in schedule_step(profile, plan).tasks if task.lane is Lane.GPU]
    backwards = [kind for kind in kinds if kind in (Kind.BACKWARD, Kind.UPDATE)][: 2 * len(layers)]
    assert backwards[:4] == [Kind.BACKWARD, Kind.BACKWARD, Kind.UPDATE, Kind.BACKWARD]
