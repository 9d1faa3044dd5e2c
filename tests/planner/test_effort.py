"""Searches for long models: work that grows with the layers, and gaps to bounds that hold."""

import dataclasses

import numpy as np
import pytest

from jaxferry.planner import PlanEvaluator, effort, exact, frontier, make_plan, planning
from jaxferry.step import machine as steady
from jaxferry.step import simulate
from profiles import recomputing, transformer, with_modes


@pytest.fixture
def short_is_long(monkeypatch):
    """Models count as long from few layers on."""
    monkeypatch.setattr(effort, "FULL_LAYERS", 12)
    monkeypatch.setattr(effort, "FULL_EXACT_LAYERS", 12)
    monkeypatch.setattr(effort, "MOST_SEARCHED", 20)
    monkeypatch.setattr(planning, "FULL_LAYERS", 12)


def work_of(policy, profile, monkeypatch, **request):
    """The number of layers of all plans that the policy evaluates."""
    evaluate, work = PlanEvaluator.__call__, []

    def counted(self, modes, *args, **kwargs):
        work.append(np.asarray(modes).size)
        return evaluate(self, modes, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(PlanEvaluator, "__call__", counted)
        make_plan(profile, policy, **request)
    return sum(work)


@pytest.mark.parametrize("policy", ["exact", "auto"])
def test_a_search_evaluates_no_more_plans_of_a_longer_model(policy, short_is_long, monkeypatch):
    once, twice = (work_of(policy, transformer(n), monkeypatch) for n in (40, 80))
    assert 0 < twice <= 2.2 * once


@pytest.mark.slow
def test_recomputation_is_searched_with_as_few_plans(short_is_long, monkeypatch):
    once, twice = (work_of("auto", recomputing(transformer(n)), monkeypatch) for n in (40, 80))
    assert 0 < twice <= 2.2 * once


def test_a_plan_for_a_long_model_states_a_gap_to_a_bound_that_holds(short_is_long, monkeypatch):
    profile = transformer(22, seed=1)
    found = [make_plan(profile, policy) for policy in ("memferry", "exact", "auto")]
    monkeypatch.undo()
    best_s = make_plan(profile, "auto").predicted.steady_step_s
    for plan in found:
        bound_s, gap = plan.details["lower_bound_s"], plan.details["gap"]
        assert plan.predicted.steady_step_s == pytest.approx(bound_s * (1 + gap), rel=1e-12)
        assert bound_s <= best_s * (1 + 1e-12)


def with_slow_offloads(profile):
    """Offloads that take longer than all else, and gradients that the backward writes to the host for nothing."""
    each_s = 1.2 * sum(layer.forward_s + layer.backward_s for layer in profile.layers) / len(profile.layers)
    layers = [dataclasses.replace(x, offload_s=each_s, backward_go_s=x.backward_s) for x in profile.layers]
    return dataclasses.replace(profile, layers=tuple(layers))


@pytest.mark.parametrize("profile", [transformer(24, seed=0), with_slow_offloads(transformer(24, seed=0))])
def test_a_reserve_factor_that_saves_little_is_left_out_and_the_gap_still_holds(profile, short_is_long, monkeypatch):
    close = 0.5
    monkeypatch.setattr(exact, "_CLOSE", 0.0)
    best, all_work = make_plan(profile, "exact"), work_of("exact", profile, monkeypatch)
    monkeypatch.setattr(exact, "_CLOSE", close)
    plan, work = make_plan(profile, "exact"), work_of("exact", profile, monkeypatch)
    assert work < 0.7 * all_work
    best_s, found_s = (each.predicted.steady_step_s for each in (best, plan))
    assert plan.details["lower_bound_s"] <= best_s and best_s <= found_s <= best_s * (1 + close)
    assert found_s == pytest.approx(plan.details["lower_bound_s"] * (1 + plan.details["gap"]), rel=1e-12)


def test_a_long_model_s_budget_holds(short_is_long):
    profile = transformer(40)
    whole = make_plan(profile, "auto").predicted
    budget = whole.peak_device_bytes * 3 // 4
    tight = make_plan(profile, "auto", memory_budget_bytes=budget).predicted
    assert tight.peak_device_bytes <= budget
    assert tight.steady_step_s >= whole.steady_step_s * (1 - 1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_a_forward_with_few_kept_states_is_near_the_optimum_and_its_bound_holds(seed, monkeypatch):
    profile = transformer(48, seed)
    best = frontier.optimal_forward(profile)
    assert best.bound_s == best.forward_s
    monkeypatch.setattr(frontier, "BUCKETS", 4)
    monkeypatch.setattr(frontier, "_LEAST_KEPT", 8)
    monkeypatch.setattr(frontier, "_MOST_IN_ALL", 1)
    few = frontier.optimal_forward(profile)
    assert few.bound_s <= best.forward_s * (1 + 1e-12)
    assert best.forward_s <= few.forward_s <= best.forward_s * 1.05
    assert few.bound_s >= best.forward_s * 0.5


@pytest.mark.parametrize("order", ["backward", "need"])
def test_a_period_takes_few_passes_through_the_tasks(order, monkeypatch):
    passes, ways, steps = [], steady._Search._longer_ways, steady.Chain.run_step
    monkeypatch.setattr(steady._Search, "_longer_ways", lambda *args: passes.append(1) or ways(*args))
    monkeypatch.setattr(steady.Chain, "run_step", lambda *args: passes.append(1) or steps(*args))
    profile = transformer(64)
    simulate(profile, with_modes(profile, ["RELOAD", "GFGB", "DHA", "RESIDENT"] * 16, update_order=order))
    assert 3 < len(passes) <= 3 + 24
