"""Updates on the device: what they move, when they run, how much memory they need."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxferry.costs import Profile
from jaxferry.errors import InputError
from jaxferry.modes import GradientPlace, Mode, UpdatePlace
from jaxferry.planner import (
    EQUAL_WITHIN,
    AutoSearch,
    DeviceUpdateSearch,
    Neighbours,
    Objective,
    PlanEvaluator,
    Pool,
    Request,
    any_plan_lower_bound_s,
    as_run,
    make_plan,
    plain_training,
    plan_of,
    refine,
    updatable_groups,
)
from jaxferry.step import RESIDENT, Kind, Lane, LayerPlan, Plan, Updates, needed_bytes, schedule_step, simulate
from profiles import UNLIMITED_BYTES, deterministic, examples, profiles, transformer, with_programs


def with_state(profile):
    """The profile with an update on the device that takes an eighth of that on the host."""
    layers = [
        dataclasses.replace(layer, update_gpu_s=layer.update_s / 8, state_bytes=6 * layer.param_bytes)
        for layer in profile.layers
    ]
    return dataclasses.replace(profile, layers=tuple(layers))


def plan_with(profile, on_device, mode=Mode.GFGB, updates=Updates.OVERLAPPED, gradient=GradientPlace.DEVICE):
    """A plan that updates these groups, by index, on the device."""
    layers = [
        LayerPlan(layer.name, Mode.RESIDENT, update=UpdatePlace.RESIDENT)
        if profile.group_of[index] in on_device
        else LayerPlan(layer.name, mode, gradient)
        for index, layer in enumerate(profile.layers)
    ]
    return Plan("test", 1.0, tuple(layers), updates=updates)


@pytest.mark.parametrize("updates", list(Updates))
def test_with_all_on_the_device_a_step_is_plain_training(updates):
    profile = with_state(transformer(6))
    plan = plan_with(profile, range(len(profile.groups)), updates=updates)
    computing_s = sum(x.forward_s + x.backward_s + x.inter_forward_s + x.inter_backward_s for x in profile.layers)
    updating_s = sum(profile.layers[members[0]].update_gpu_s for members in profile.groups)
    found = simulate(profile, plan)
    assert found.step_s == found.steady_step_s == pytest.approx(computing_s + updating_s)
    assert found.link_bytes == 0
    assert {task.lane for task in schedule_step(profile, plan).tasks} == {Lane.GPU}


@deterministic
@given(st.data())
def test_nothing_of_such_a_group_moves_and_its_update_follows_its_last_backward(data):
    profile = with_state(data.draw(profiles(max_layers=4)))
    on_device = data.draw(st.sets(st.sampled_from(range(len(profile.groups)))))
    updates = data.draw(st.sampled_from(list(Updates)))
    tasks = schedule_step(profile, plan_with(profile, on_device, updates=updates)).tasks
    for group, members in enumerate(profile.groups):
        own = [task for task in tasks if task.segment in members]
        places = {task.kind: task.lane for task in own}
        (update,) = (task for task in own if task.kind is Kind.UPDATE)
        assert (update.lane is Lane.GPU) == (group in on_device)
        assert (places.keys() & {Kind.LOAD, Kind.OFFLOAD, Kind.REFRESH} == set()) == (group in on_device)
        if group in on_device and updates is Updates.OVERLAPPED:
            before = tasks[tasks.index(update) - 1]
            assert (before.kind, before.segment) == (Kind.BACKWARD, members[0])
    assert sum(task.start_bytes - task.end_bytes for task in tasks) == 0


@deterministic
@given(st.data())
def test_the_need_of_memory_is_never_below_what_a_chain_holds(data):
    profile = with_state(data.draw(profiles(max_layers=4)))
    profile = with_programs(profile, lambda: data.draw(st.booleans()))
    on_device = data.draw(st.sets(st.sampled_from(range(len(profile.groups))), min_size=1))
    mode, gradient = data.draw(st.sampled_from(list(Mode))), data.draw(st.sampled_from(list(GradientPlace)))
    updates = data.draw(st.sampled_from(list(Updates)))
    plan = plan_with(profile, on_device, mode, updates, gradient)
    assert simulate(profile, plan).peak_device_bytes <= needed_bytes(profile, plan)


@deterministic
@given(st.data())
def test_the_evaluator_of_many_plans_agrees_with_the_simulator(data):
    profile = with_state(data.draw(profiles(max_layers=4, min_layers=2)))
    profile = with_programs(profile, lambda: data.draw(st.booleans()))
    num_groups = len(profile.groups)
    on_device = data.draw(st.sets(st.sampled_from(range(num_groups)), max_size=num_groups - 1))
    mode, updates = data.draw(st.sampled_from([Mode.GFGB, Mode.DHA, Mode.RELOAD])), data.draw(st.sampled_from(Updates))
    plan = plan_with(profile, on_device, mode, updates)
    found, expected = PlanEvaluator(profile).plan(plan), simulate(profile, plan)
    assert found.needed_bytes[0] == needed_bytes(profile, plan)
    assert found.forward_s[0] == pytest.approx(expected.forward_s)
    assert found.step_s[0] == pytest.approx(expected.step_s)
    assert found.steady_step_s[0] == pytest.approx(expected.steady_step_s)


def test_plans_and_profiles_keep_it_in_their_files():
    profile = with_state(transformer(2))
    plan = plan_with(profile, {1})
    assert Profile.from_json(profile.to_json()) == profile and Plan.from_json(plan.to_json()) == plan
    assert [layer.get("update") for layer in plan.to_json()["layers"]].count("resident") == len(profile.groups[1])


def test_it_needs_a_resident_copy_and_a_gradient_on_the_device():
    for fields in ({"mode": "GFGB"}, {"mode": "RESIDENT", "gradient": "host"}):
        with pytest.raises(InputError, match='update "resident" needs mode "RESIDENT" and gradient "device"'):
            LayerPlan("a", **{"gradient": "device", **fields}, update="resident")
    with pytest.raises(InputError, match="update must be one of host, gpu, resident"):
        LayerPlan("a", Mode.RESIDENT, update="cpu")


def test_layers_of_one_group_agree():
    profile = with_state(transformer(2, tied=True))
    layers = [LayerPlan(layer.name, Mode.RESIDENT) for layer in profile.layers]
    layers[-1] = dataclasses.replace(layers[-1], update=UpdatePlace.RESIDENT)
    with pytest.raises(InputError, match="update must be"):
        schedule_step(profile, Plan("test", 1.0, tuple(layers)))


def without_state(profile):
    layers = [dataclasses.replace(layer, update_gpu_s=None, state_bytes=0) for layer in profile.layers]
    return dataclasses.replace(profile, layers=tuple(layers))


@pytest.mark.parametrize("after_all", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_auto_is_one_knob_from_everything_offloaded_to_plain_training(after_all):
    """Each budget is asked for on its own. The host is the bottleneck: it takes twice the GPU's time."""
    layers = [dataclasses.replace(x, update_s=2.5 * (x.forward_s + x.backward_s)) for x in transformer(6).layers]
    profile = with_state(dataclasses.replace(transformer(6), layers=tuple(layers), updates_after_all=after_all))
    everything = needed_bytes(profile, plan_with(profile, range(len(profile.groups))))
    smallest = AutoSearch(profile, Request()).pool.smallest_needed_bytes()
    before_s, seen = float("inf"), set()
    for budget in [int(smallest + (everything - smallest) * share) for share in (0, 0.5, 1)]:
        plan = make_plan(profile, "auto", memory_budget_bytes=budget)
        host_s = make_plan(without_state(profile), "auto", memory_budget_bytes=budget).predicted.steady_step_s
        step_s = plan.predicted.steady_step_s
        assert plan.predicted.peak_device_bytes <= needed_bytes(profile, plan) <= budget
        bound_s = any_plan_lower_bound_s(profile, budget)
        assert plan.details["lower_bound_s"] == min(bound_s, step_s)
        assert plan.details["gap"] == pytest.approx(step_s / min(bound_s, step_s) - 1)
        assert bound_s * (1 - 1e-9) <= step_s
        assert step_s <= min(host_s, before_s) * (1 + EQUAL_WITHIN)
        before_s = step_s
        seen.add(sum(plan.updates_on_device))
    # If everything fits, the host may still update a layer in time.
    assert min(seen) == 0 and max(seen) >= len(profile.layers) - 1 and len(seen) >= 3
    plain = plan_with(profile, range(len(profile.groups)))
    assert plan.details["binding"] == "GPU" and before_s <= simulate(profile, plain).steady_step_s * (1 + 1e-9)
    assert make_plan(profile, "auto").layers == plan.layers


def test_more_memory_is_never_slower_if_updates_wait_for_all_gradients():
    """An update on the host waits for gradients that stay on the device, too."""
    times = {"load_s": 0.0, "inter_forward_s": 0.0, "inter_backward_s": 0.0, "offload_s": 0.1}
    times |= {f"{way}_dha_s": 3.0 for way in ("forward", "backward")} | {"backward_go_s": 3.0}
    own = [
        {"forward_s": 0.0, "backward_s": 0.8, "update_s": 0.0, "update_gpu_s": 0.0, "state_bytes": 6000},
        {"forward_s": 0.0, "backward_s": 1.2, "update_s": 0.6, "update_gpu_s": 0.15, "state_bytes": 100},
        {"forward_s": 0.2, "backward_s": 0.7, "update_s": 1.5, "update_gpu_s": 0.01, "state_bytes": 60},
    ]
    known = transformer(4).layers[:3]
    layers = tuple(
        dataclasses.replace(layer, param_bytes=size, grad_bytes=size, activation_bytes=10, **times, **more)
        for layer, size, more in zip(known, (1000, 100, 10), own, strict=True)
    )
    profile = Profile({}, layers, updates_after_all=True)
    plain = plain_training("auto", profile)
    search, before_s = AutoSearch(profile, Request()), np.inf
    smallest = search.pool.smallest_needed_bytes()
    for budget in [*np.linspace(smallest, 1.2 * plain.needed_bytes, 24).astype(int).tolist(), None]:
        step_s = simulate(profile, as_run(profile, search.plan(budget))).steady_step_s
        assert step_s <= before_s * (1 + EQUAL_WITHIN)
        before_s = step_s
    assert before_s <= plain.objective_s


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_where_everything_fits_auto_is_plain_training_unless_another_plan_is_faster_by_the_margin(share):
    """The host and the links have nothing to do; so updates there save what those on the device would take."""
    times = {"update_s": 0.0, "load_s": 0.0, "offload_s": 0.0, "forward_s": 1.0, "backward_s": 2.0}
    times |= {"forward_dha_s": 1.0, "backward_dha_s": 2.0, "backward_go_s": 2.0}
    times |= {"update_gpu_s": share * EQUAL_WITHIN * 3.0, "inter_forward_s": 0.0, "inter_backward_s": 0.0}
    layers = tuple(dataclasses.replace(layer, **times) for layer in with_state(transformer(4)).layers)
    profile = dataclasses.replace(transformer(4), layers=layers)
    everything = needed_bytes(profile, plan_with(profile, range(len(profile.groups))))
    for budget in (None, everything):
        assert all(make_plan(profile, "auto", memory_budget_bytes=budget).updates_on_device) == (share < 1)
    assert not all(make_plan(profile, "auto", memory_budget_bytes=everything - 1).updates_on_device)


@examples(10)
@given(st.data())
def test_a_plan_in_place_of_plain_training_is_faster_by_more_than_the_margin(data):
    profile = with_state(data.draw(profiles(max_layers=3)))
    plan, plain = make_plan(profile, "auto"), plan_with(profile, range(len(profile.groups)))
    if not all(plan.updates_on_device):
        assert plan.predicted.steady_step_s * (1 + EQUAL_WITHIN) < simulate(profile, plain).steady_step_s
    else:
        assert set(plan.modes) == {Mode.RESIDENT}


def test_with_frozen_layers_too_everything_stays():
    layers = with_state(transformer(4)).layers
    frozen = dataclasses.replace(layers[1], has_gradient=False, update_gpu_s=None, state_bytes=0, update_s=0.0)
    profile = dataclasses.replace(transformer(4), layers=(layers[0], frozen, *layers[2:]))
    plan, plain = make_plan(profile, "auto"), plain_training("auto", profile)
    assert set(plain.plan.modes) == {Mode.RESIDENT}
    assert {task.lane for task in schedule_step(profile, plain.plan).tasks} == {Lane.GPU}
    if plan.layers != plain.plan.layers:
        assert plan.predicted.steady_step_s * (1 + EQUAL_WITHIN) < plain.objective_s


def test_one_update_of_all_groups_has_one_place():
    profile = dataclasses.replace(with_state(transformer(4)), updates_after_all=True, updates_together=True)
    everything = make_plan(profile, "auto")
    assert all(everything.updates_on_device)
    needed = needed_bytes(profile, everything)
    assert make_plan(profile, "auto", memory_budget_bytes=needed).layers == everything.layers
    assert not any(make_plan(profile, "auto", memory_budget_bytes=needed - 1).updates_on_device)
    assert not any(make_plan(profile, "twin-flow", memory_budget_bytes=needed).updates_on_device)


def test_a_reserve_factor_below_one_keeps_updates_on_the_host():
    plan = make_plan(with_state(transformer(3)), "auto", reserve_factor=0.5)
    assert not any(plan.updates_on_device)


@examples(20)
@given(st.data())
def test_no_plan_within_a_budget_is_below_the_bound(data):
    profile = with_state(data.draw(profiles(max_layers=4)))
    on_device = data.draw(st.sets(st.sampled_from(range(len(profile.groups)))))
    mode, gradient = data.draw(st.sampled_from(list(Mode))), data.draw(st.sampled_from(list(GradientPlace)))
    plan = plan_with(profile, on_device, mode, gradient=gradient)
    bound_s = any_plan_lower_bound_s(profile, needed_bytes(profile, plan))
    assert bound_s <= simulate(profile, plan).steady_step_s * (1 + 1e-9)


def random_plans(profile, generator, num_plans):
    """Modes and flags of gradients, recomputation and updates of random plans, (plans, layers) each."""
    shape = (num_plans, len(profile.layers))
    can_recompute = np.array([layer.can_recompute for layer in profile.layers])
    modes, on_host = generator.integers(0, 5, shape).astype(np.int8), generator.integers(0, 2, shape).astype(bool)
    again = generator.integers(0, 2, shape).astype(bool) & can_recompute
    may_update = np.isin(np.arange(len(profile.groups)), updatable_groups(profile))
    there = generator.integers(0, 2, (num_plans, len(profile.groups))).astype(bool) & may_update
    on_device = there[:, list(profile.group_of)]
    return np.where(on_device, np.int8(RESIDENT), modes), on_host & ~on_device, again, on_device


def drawn_plans(data, num_plans):
    """A profile and random plans for it."""
    profile = with_state(data.draw(profiles(max_layers=5)))
    profile = dataclasses.replace(profile, updates_after_all=data.draw(st.booleans()))
    return profile, random_plans(profile, np.random.default_rng(data.draw(st.integers(0, 99))), num_plans)


@examples(20)
@given(st.data())
def test_the_bound_of_a_plan_holds_in_both_orders_of_updates(data):
    profile, plans = drawn_plans(data, 8)
    evaluate = PlanEvaluator(profile)
    bound_s, needed = evaluate.bounds(plans)
    for by_need in (False, True):
        found = evaluate(*plans, by_need=by_need)
        inside = found.in_window
        assert (bound_s[inside] <= found.steady_step_s[inside] * (1 + 1e-9)).all()
        assert (needed == found.needed_bytes).all()


@examples(20)
@given(st.data())
def test_plans_with_different_places_are_evaluated_as_if_each_were_alone(data):
    profile, plans = drawn_plans(data, 6)
    by_need, memory_bytes = data.draw(st.booleans()), data.draw(st.sampled_from([None, 1 << 16, UNLIMITED_BYTES]))
    together = PlanEvaluator(profile)(*plans, by_need=by_need, memory_bytes=memory_bytes)
    for number, plan in enumerate(zip(*plans, strict=True)):
        alone = PlanEvaluator(profile)(*plan, by_need=by_need, memory_bytes=memory_bytes)
        for field in dataclasses.fields(alone):
            assert getattr(together, field.name)[number] == pytest.approx(getattr(alone, field.name)[0], rel=1e-12)


@examples(4)
@given(st.data())
def test_the_plans_that_the_search_leaves_out_are_no_better(data):
    profile = with_state(data.draw(profiles(max_layers=4, min_layers=2)))
    profile = dataclasses.replace(profile, updates_after_all=data.draw(st.booleans()))
    pool, everything = Pool(profile), Pool(profile, by_need_on_frontier=True)
    size = len(profile.layers)
    for mode in range(5):
        pool.add(np.full(size, mode), np.arange(size) % 2 == 0)
    pool.run()
    search = DeviceUpdateSearch("auto", profile, pool.frontier())
    for groups in search.choices:
        modes, grad_on_host, recomputes, on_device = search._plans(groups)
        everything.add(modes, grad_on_host, recomputes=recomputes, on_device=on_device)
    everything.run()
    for budget in (None, *(best.needed_bytes for best in everything.frontier())):
        known_s = min((x.objective_s for x in pool.frontier() if x.needed_bytes <= (budget or np.inf)), default=np.inf)
        best, found = everything.best(Objective.STEADY, budget, leanest=True), search.best(budget, known_s)
        least_s = known_s if found is None else found.objective_s
        assert least_s <= min(known_s, best.objective_s) * (1 + 1e-9)
        assert found is None or search.best(budget, found.objective_s) is None


def test_neighbours_are_plans_and_some_are_better_for_their_memory():
    profile = with_state(transformer(5))
    pool, size = Pool(profile), len(profile.layers)
    for count in (0, 2, 5):
        on_device = np.isin(list(profile.group_of), updatable_groups(profile)[:count])
        modes = np.where(on_device, np.int8(RESIDENT), np.int8(0))
        pool.add(modes, np.zeros(size, dtype=bool), on_device=on_device)
    pool.run()
    before = pool.frontier()

    def run(modes, grad_on_host, recomputes, on_device):
        pool.add(modes, grad_on_host, recomputes=recomputes, on_device=on_device)
        pool.run()

    refine(pool.frontier, Neighbours(profile, np.zeros(size, dtype=bool), updatable_groups(profile)), run)
    pool.join()
    (part,) = pool.evaluated
    found = [pool.best(Objective.STEADY, best.needed_bytes) for best in before]
    assert all(new.objective_s <= old.objective_s for new, old in zip(found, before, strict=True))
    assert any(new.objective_s < 0.99 * old.objective_s for new, old in zip(found, before, strict=True))
    assert len(part.plans) > 10 * size
    for best in pool.frontier():
        plan_of("auto", 1.0, profile, best).check_profile(profile)
