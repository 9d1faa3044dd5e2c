"""Choices that are worth more than the model's error, and the plans that are taken where they are not."""

import dataclasses
import functools
import itertools
import pathlib
import types

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxferry.costs import Profile
from jaxferry.errors import BudgetError
from jaxferry.modes import GradientPlace, Mode, Remat, UpdatePlace
from jaxferry.planner import (
    EQUAL_WITHIN,
    AutoSearch,
    Request,
    longest_equal_s,
    preferred,
    score_of,
    with_update_order,
)
from jaxferry.step import LayerPlan, Plan, needed_bytes, simulate
from profiles import examples, profiles, transformer

RESULTS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "gpu" / "h200"
BETTER = {
    Mode.DHA: (Mode.GFGB, Mode.RESIDENT, Mode.RELOAD),
    Mode.DFGB: (Mode.GFGB, Mode.RESIDENT, Mode.RELOAD),
    Mode.RELOAD: (Mode.GFGB, Mode.RESIDENT),
}


@functools.cache
def llama():
    """The Llama of 3 G parameters that ran on an H200, estimated: 28 blocks, batch 32 x 1024, all recomputed."""
    return Profile.load(RESULTS / "profile_llama_3g_estimated.json")


def test_no_block_of_the_llama_is_read_in_host_memory_for_a_gain_of_two_percent():
    search, budget = AutoSearch(llama(), Request()), 24 << 30
    fastest, plan = search.fastest(budget), search.plan(budget)
    assert fastest.plan.modes.count(Mode.DHA) > 0
    assert set(plan.modes) <= {Mode.GFGB, Mode.RESIDENT} and set(plan.gradients) == {GradientPlace.DEVICE}
    assert needed_bytes(llama(), plan) <= budget
    assert simulate(llama(), plan).steady_step_s < fastest.objective_s * (1 + EQUAL_WITHIN)


def replacements(plan):
    """The plans in which one layer has a preferred mode, or its gradient on the device."""
    for index, layer in enumerate(plan.layers):
        others = [layer.with_mode(mode) for mode in BETTER.get(layer.mode, ())]
        if layer.gradient is GradientPlace.HOST:
            others.append(dataclasses.replace(layer, gradient=GradientPlace.DEVICE))
        for other in others:
            yield dataclasses.replace(plan, layers=(*plan.layers[:index], other, *plan.layers[index + 1 :]))


@examples(12)
@given(profiles(max_layers=5), st.sampled_from([25, 60, 120, 250, None]))
def test_a_plan_is_equal_to_the_fastest_and_no_choice_in_it_can_be_replaced_by_a_preferred_one(profile, budget):
    search = AutoSearch(profile, Request())
    fastest = search.fastest(budget)
    if fastest is None:
        with pytest.raises(BudgetError):
            search.plan(budget)
        return
    plan, longest_s = search.plan(budget), longest_equal_s(fastest.objective_s)
    assert simulate(profile, plan).steady_step_s <= longest_s * (1 + 1e-9)
    assert budget is None or needed_bytes(profile, plan) <= budget
    assert score_of(profile, plan) <= score_of(profile, fastest.plan)
    for other in replacements(plan):
        made = with_update_order(profile, dataclasses.replace(other, memory_bytes=budget))
        fits = budget is None or needed_bytes(profile, made) <= budget
        # A flag without effect, such as that of a missing gradient, is no choice.
        is_preferred = score_of(profile, made) < score_of(profile, plan)
        assert not (fits and is_preferred and simulate(profile, made).steady_step_s <= longest_s * (1 - 1e-9))


def plan_of(profile, modes, gradient=GradientPlace.DEVICE, remat=Remat.NONE, update=UpdatePlace.HOST):
    """A plan with these modes, and the same other choices for all layers; a gradient alone for the first one."""
    gradients = [gradient, *[GradientPlace.DEVICE] * (len(modes) - 1)]
    layers = zip(profile.layers, modes, gradients, strict=True)
    return Plan("any", 1.0, tuple(LayerPlan(layer.name, mode, place, remat, update) for layer, mode, place in layers))


def test_scores_follow_the_order_of_preference():
    gfgb, dha, dfgb, reload, resident = (Mode[name] for name in ("GFGB", "DHA", "DFGB", "RELOAD", "RESIDENT"))
    profile = transformer(3)
    layers = (dataclasses.replace(x, recompute_s=0.0, recompute_activation_bytes=0) for x in profile.layers)
    profile = dataclasses.replace(profile, layers=tuple(layers))
    plans = [
        plan_of(profile, [resident] * 3, update=UpdatePlace.RESIDENT),
        plan_of(profile, [gfgb, resident, gfgb]),
        plan_of(profile, [gfgb] * 3, remat=Remat.FULL),
        plan_of(profile, [reload, gfgb, gfgb]),
        plan_of(profile, [reload] * 3, remat=Remat.FULL),
        plan_of(profile, [gfgb, dha, gfgb]),
        plan_of(profile, [dha, dfgb, gfgb]),
        plan_of(profile, [dha, dfgb, gfgb], gradient=GradientPlace.HOST),
    ]
    found = [score_of(profile, plan) for plan in plans]
    assert found == sorted(set(found))
    alike = [plan_of(profile, [mode, gfgb, gfgb]) for mode in (dha, dfgb)]
    alike.append(plan_of(profile, [gfgb] * 3, gradient=GradientPlace.HOST))
    assert len({score_of(profile, plan) for plan in alike}) == 1


def test_only_plans_that_differ_by_less_than_the_share_are_equal():
    def plan(seconds, score, size=1):
        return types.SimpleNamespace(objective_s=seconds, score=score, needed_bytes=size)

    def taken(*plans):
        return plans.index(preferred(plans, lambda each: each.score))

    assert taken(plan(1.0, 5), plan(1.0 + 0.99 * EQUAL_WITHIN, 0)) == 1
    assert taken(plan(1.0, 5), plan(1.0 + EQUAL_WITHIN, 0)) == 0
    assert taken(plan(1.0, 5, 3), plan(1.01, 5, 2), plan(1.015, 5, 2)) == 1
    assert taken(plan(0.0, 5), plan(0.0, 4)) == 1
    for first, second in itertools.permutations((plan(1.0, 3, 9), plan(1.01, 2, 99))):
        assert preferred([first, second], lambda each: each.score).score == 2
