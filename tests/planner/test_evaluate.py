"""The recurrences of the searches agree with the simulator to the last bit."""

import dataclasses
import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from jaxferry.costs import LayerProfile, Profile
from jaxferry.modes import Mode
from jaxferry.planner import PlanEvaluator
from jaxferry.step import CODES, Loads, Updates, gradient_flags, mode_codes, needed_bytes, simulate
from oracle import Oracle
from profiles import (
    deterministic,
    drawn,
    planned,
    recomputing,
    smallest_peak_bytes,
    transformer,
    unit_layer,
    with_modes,
)

PAPER_MODES = (Mode.GFGB, Mode.DHA, Mode.DFGB)


@deterministic
@given(st.booleans().flatmap(lambda more: planned(recomputing=more, programs=more)))
def test_one_plan_evaluates_as_it_simulates(case):
    profile, plan = case
    outcome, simulation = PlanEvaluator(profile).plan(plan), simulate(profile, plan)
    assert outcome.forward_s[0] == simulation.forward_s
    assert outcome.step_s[0] == simulation.step_s
    assert outcome.needed_bytes[0] == needed_bytes(profile, plan)
    if plan.update_order == "need":
        assert outcome.steady_step_s[0] == pytest.approx(simulation.steady_step_s, rel=1e-12)
    elif outcome.in_window[0]:
        assert outcome.steady_step_s[0] >= simulation.steady_step_s * (1 - 1e-12)


@pytest.mark.parametrize(
    "modes",
    [
        tuple(Mode),
        *(pytest.param((Mode.GFGB, other), marks=pytest.mark.slow) for other in (Mode.RELOAD, Mode.DHA)),
    ],
)
@pytest.mark.parametrize("updates", Updates)
@pytest.mark.parametrize("loads", Loads)
def test_plans_of_every_kind_evaluate_as_they_simulate(loads, updates, modes):
    cases = {"loads": [loads], "updates": [updates], "modes": modes}
    for profile, plan in itertools.chain(drawn(60, seed=1, **cases), drawn(60, seed=6, together=True, **cases)):
        outcome, simulation = PlanEvaluator(profile).plan(plan), simulate(profile, plan)
        assert outcome.forward_s[0] == simulation.forward_s
        assert outcome.step_s[0] == simulation.step_s
        assert outcome.needed_bytes[0] == needed_bytes(profile, plan)


def test_without_loads_bulk_loads_change_nothing():
    """A forward does not wait for refreshes of layers that others read."""
    layers = [dataclasses.replace(x, load_s=3.0, update_s=1.0) for x in transformer(4).layers]
    profile = dataclasses.replace(transformer(4), layers=tuple(layers))
    plans = [with_modes(profile, [Mode.DHA, *[Mode.RESIDENT] * 3], loads=loads) for loads in Loads]
    layerwise, bulk = (PlanEvaluator(profile).plan(plan).steady_step_s[0] for plan in plans)
    assert bulk == layerwise == pytest.approx(simulate(profile, plans[1]).steady_step_s, rel=1e-12)


@pytest.mark.parametrize("modes", [(Mode.GFGB,), (Mode.RELOAD,), (Mode.RESIDENT, Mode.DHA)])
def test_a_profile_s_updates_after_all_are_those_of_a_plan_that_asks_for_them(modes):
    """Steps that clip gradients, for instance, update nothing before all gradients are on the host."""
    differ = 0
    for profile, plan in drawn(10, seed=2, modes=modes, updates=[Updates.OVERLAPPED]):
        clipping = dataclasses.replace(profile, updates_after_all=True)
        after_all = simulate(profile, dataclasses.replace(plan, updates=Updates.AFTER_ALL)).predicted
        assert simulate(clipping, plan).predicted == after_all
        assert PlanEvaluator(clipping).plan(plan).step_s[0] == after_all.step_s
        differ += simulate(profile, plan).step_s < after_all.step_s
    assert differ > 0


@deterministic
@given(st.booleans().flatmap(lambda again: planned(PAPER_MODES, plain=True, recomputing=again)))
def test_the_window_is_the_model_s_and_within_it_the_period_is_exact(case):
    profile, plan = case
    outcome, oracle = PlanEvaluator(profile).plan(plan), Oracle(profile, plan)
    assert outcome.in_window[0] == oracle.keeps_window()
    if outcome.in_window[0]:
        assert outcome.steady_step_s[0] == pytest.approx(oracle.steady_step_s(), rel=1e-12)


def test_a_last_layer_by_dfgb_is_never_within_the_window():
    profile = Profile({}, (unit_layer("a"), unit_layer("b")))
    for modes, is_within in (([Mode.DFGB, Mode.GFGB], True), ([Mode.GFGB, Mode.DFGB], False)):
        assert PlanEvaluator(profile).plan(with_modes(profile, modes)).in_window[0] == is_within


def test_many_plans_at_once_evaluate_as_one_by_one():
    profile = transformer(10, tied=True)
    modes = np.random.default_rng(0).integers(0, 5, (700, 10))
    grad_on_host = np.random.default_rng(1).integers(0, 2, (700, 10)).astype(bool)
    evaluate = PlanEvaluator(profile)
    together = evaluate(modes, grad_on_host)
    for row in (0, 1, 511, 512, 699):
        alone = evaluate(modes[row], grad_on_host[row])
        for field in ("forward_s", "step_s", "needed_bytes", "in_window"):
            assert getattr(alone, field)[0] == getattr(together, field)[row]
        assert alone.steady_step_s[0] == pytest.approx(together.steady_step_s[row], rel=1e-9)


def test_codes_and_flags_are_those_of_the_plan():
    profile = transformer(5)
    plan = with_modes(profile, list(Mode))
    assert [int(code) for code in mode_codes(plan)] == [CODES[mode] for mode in Mode]
    assert not gradient_flags(plan).any()


def test_no_plan_goes_below_the_activations():
    profile = transformer(4)
    codes = np.array(np.meshgrid(*[range(5)] * 4)).reshape(4, -1).T
    for grad_on_host in (False, True):
        peaks = PlanEvaluator(profile)(codes, np.full(4, grad_on_host)).needed_bytes
        assert peaks.min() >= smallest_peak_bytes(profile)
    assert peaks.min() == smallest_peak_bytes(profile)
    bare = dataclasses.replace(
        profile, layers=tuple(dataclasses.replace(x, activation_bytes=0) for x in profile.layers)
    )
    assert smallest_peak_bytes(bare) == 0


def test_recomputation_lowers_what_no_plan_goes_below():
    profile = recomputing(transformer(4), share=0.25)
    everything = np.array([layer.can_recompute for layer in profile.layers])
    (peak,) = PlanEvaluator(profile)(np.full(4, CODES[Mode.DHA]), True, everything).needed_bytes
    assert peak == smallest_peak_bytes(profile) == 3 * 2_000_000 + 8_000_000


SHARES = {"parameters": "shared", "param_bytes": 50, "load_s": 20.0}
FROZEN = {"has_gradient": False, "has_backward": False}


@pytest.mark.parametrize(
    ("modes", "facts"),
    [
        pytest.param(
            (Mode.GFGB, Mode.RELOAD, Mode.DHA),
            ({**SHARES, **FROZEN}, {**SHARES, **FROZEN, "forward_workspace_bytes": 900}, {}),
            id="forwards alone",
        ),
        pytest.param(
            (Mode.GFGB, Mode.DHA, Mode.RELOAD, Mode.DHA),
            ({**SHARES, **FROZEN}, FROZEN, {**SHARES, "has_gradient": False, "backward_workspace_bytes": 900}, {}),
            id="a backward of a later layer",
        ),
        pytest.param(
            (Mode.DFGB, Mode.RELOAD, Mode.RELOAD),
            (SHARES, {}, {**SHARES, "fused_backward": True}),
            id="one program with a copy of its own",
        ),
    ],
)
def test_reload_layers_use_the_copy_that_another_layer_holds(modes, facts):
    """The simulator and `jaxferry.step.gradient_room` find the last use of a copy independently."""
    like = dataclasses.replace(transformer(3).layers[1], param_bytes=1, grad_bytes=1, activation_bytes=1)
    layers = (dataclasses.replace(like, **{"name": f"l{i}", "parameters": f"l{i}", **x}) for i, x in enumerate(facts))
    profile = dataclasses.replace(transformer(3), layers=tuple(layers))
    plan = with_modes(profile, modes)
    outcome, simulation = PlanEvaluator(profile).plan(plan), simulate(profile, plan)
    assert simulation.peak_device_bytes <= outcome.needed_bytes[0] == needed_bytes(profile, plan)
    assert outcome.step_s[0] == simulation.step_s
    assert outcome.steady_step_s[0] == pytest.approx(simulation.steady_step_s, rel=1e-12)


@pytest.mark.parametrize("by_need", [False, True])
@pytest.mark.parametrize("memory_bytes", [None, 2**40])
def test_no_plans_have_no_outcomes(by_need, memory_bytes):
    profile = transformer(3)
    nothing = np.zeros((0, len(profile.layers)), dtype=np.int8)
    found = PlanEvaluator(profile)(nothing, nothing, by_need=by_need, memory_bytes=memory_bytes)
    assert all(len(getattr(found, field.name)) == 0 for field in dataclasses.fields(found))


def test_updates_by_need_take_the_same_time_whatever_plans_are_evaluated_together():
    """Equal layers let rounding decide between updates, so that a chain may leave a period that it has reached."""
    rng = np.random.default_rng(0)
    forward_s, backward_s, load_s, offload_s = (seconds / 16 for seconds in (1 / 3, 2 / 3, 0.9, 0.7))
    times = {"forward_s": forward_s, "forward_dha_s": load_s, "load_s": load_s, "update_s": load_s}
    times |= {"backward_s": backward_s, "backward_dha_s": load_s, "backward_go_s": offload_s, "offload_s": offload_s}
    layer = LayerProfile(name="layer", param_bytes=1000, grad_bytes=1000, **times)
    layers = (dataclasses.replace(layer, name=f"layer {index}", parameters=f"layer {index}") for index in range(16))
    evaluate = PlanEvaluator(Profile({}, tuple(layers)))
    modes = rng.integers(0, 5, (400, 16)).astype(np.int8)
    modes[:, -1] = 0
    grad_on_host = rng.integers(0, 2, modes.shape).astype(bool)
    together = evaluate(modes, grad_on_host, by_need=True, memory=False).steady_step_s
    alone = [
        evaluate(*plan, by_need=True, memory=False).steady_step_s[0] for plan in zip(modes, grad_on_host, strict=True)
    ]
    assert together == pytest.approx(alone, rel=1e-12)
