"""Device memory during a step, counted from JAX's own list of live arrays."""

import itertools

import numpy as np
import optax
import pytest

import jaxferry
import models
from jaxferry.engine import Peak, fit
from jaxferry.modes import Mode, Remat
from jaxferry.native import library
from jaxferry.partition import partition
from jaxferry.step import LayerPlan, Loads, Plan
from planned import assert_same_bits, plan_of, train
from watched import becomes, device_bytes, settled, watched_steps


@pytest.fixture(scope="module")
def gpt():
    return models.mlp()


def test_with_reload_no_more_than_two_layers_are_on_the_device(gpt, monkeypatch):
    watch, metrics, prepared, _ = watched_steps(gpt, monkeypatch, plan=plan_of(gpt, [Mode.RELOAD]))
    sizes = [prepared.partition.layers[s.group].num_bytes for s in prepared.partition.segments]
    assert 0 < watch.most_parameters <= max(a + b for a, b in itertools.pairwise(sizes))
    assert metrics["device_param_bytes_peak"] == watch.most_parameters


def test_all_gfgb_holds_the_whole_model_at_the_end_of_the_forward(gpt, monkeypatch):
    watch, metrics, prepared, _ = watched_steps(gpt, monkeypatch)
    whole = sum(layer.num_bytes for layer in prepared.partition.layers)
    assert watch.most_parameters == whole == metrics["device_param_bytes_peak"] == prepared.peak.parameters


@pytest.mark.parametrize(
    "modes",
    [
        [Mode.RESIDENT, Mode.GFGB, Mode.RELOAD],
        *(pytest.param([mode], marks=pytest.mark.slow) for mode in (Mode.GFGB, Mode.RELOAD, Mode.RESIDENT)),
    ],
)
def test_live_bytes_stay_under_the_predicted_peak_and_come_near_it(gpt, monkeypatch, modes):
    emulator = library("cpu")
    emulator.set_bandwidth("store", 1e7)  # slow, so that gradients stay on the device as long as they may
    try:
        watch, metrics, prepared, _ = watched_steps(gpt, monkeypatch, plan=plan_of(gpt, modes))
    finally:
        emulator.set_bandwidth("store", 0)
    assert 0.7 * prepared.peak.held <= watch.most <= prepared.peak.held <= prepared.peak.total
    assert metrics["device_param_bytes_peak"] == prepared.peak.parameters


@pytest.mark.slow
def test_a_memory_budget_is_kept_by_reloading_and_changes_no_bit(gpt, monkeypatch):
    free_state, _ = train(jaxferry.train_step(gpt.loss_fn, optax.adamw(1e-3)), gpt, 3)
    free = jaxferry.train_step(gpt.loss_fn, optax.adamw(1e-3))
    free.init(gpt.params)
    largest = free.prepare(gpt.batch).peak.total
    least = jaxferry.train_step(gpt.loss_fn, optax.adamw(1e-3), plan=plan_of(gpt, [Mode.RELOAD]))
    least.init(gpt.params)
    smallest = least.prepare(gpt.batch).peak.total
    for budget in np.linspace(smallest, largest, 3).astype(int).tolist():
        watch, _, prepared, state = watched_steps(gpt, monkeypatch, memory_budget=budget)
        assert watch.most <= prepared.peak.total <= budget
        assert (Mode.RELOAD in prepared.modes) == (budget < largest)
        assert_same_bits(state.params, free_state.params)


def test_nothing_is_left_on_the_device_after_a_step(gpt):
    step = jaxferry.train_step(gpt.loss_fn, optax.adamw(1e-3))
    state = step.init(gpt.params)
    for _ in range(2):  # the first step prefetches nothing
        state, metrics = step(state, gpt.batch)
    state.block_until_ready()
    del metrics
    before = settled(lambda: device_bytes(()))
    for _ in range(3):
        state, metrics = step(state, gpt.batch)
        state.block_until_ready()
        del metrics
    assert becomes(lambda: device_bytes(()) <= before)
    assert {u.sharding.memory_kind for unit in state.host.units for u in (*unit.masters, *unit.state)} == {
        "unpinned_host"
    }
    assert {v.sharding.memory_kind for vectors in state.host.vectors for v in vectors} == {"pinned_host"}


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (100, [Mode.DHA, Mode.GFGB, Mode.GFGB]),
        (60, [Mode.DHA, Mode.RELOAD, Mode.GFGB]),
        (50, [Mode.DHA, Mode.RELOAD, Mode.RELOAD]),
        (40, [Mode.RELOAD, Mode.RELOAD, Mode.GFGB]),
        (30, [Mode.RELOAD, Mode.RELOAD, Mode.RELOAD]),
    ],
)
def test_direct_host_access_is_given_up_where_only_its_temporaries_do_not_fit(gpt, budget, expected):
    """Fake byte counts in which a DHA segment needs more memory than one that is loaded twice."""
    cost = {Mode.DHA: 30, Mode.GFGB: 20, Mode.RELOAD: 10}

    def peak_of(plan):
        return Peak(0, 0, sum(cost[mode] for mode in plan.modes))

    layers = partition(gpt.loss_fn, gpt.params, (gpt.batch,)).layers
    modes = [Mode.DHA, Mode.GFGB, Mode.GFGB]
    plan = Plan("any", 1.0, tuple(LayerPlan(f"l{i}", mode) for i, mode in enumerate(modes)))
    assert list(fit(plan, budget, peak_of, [], layers).modes) == expected
    with pytest.raises(jaxferry.BudgetError) as caught:
        fit(plan, 29, peak_of, [], layers)
    assert caught.value.smallest_bytes == 30


def test_segments_recompute_only_where_reloading_alone_does_not_fit(gpt):
    def peak_of(plan):
        kept = sum(10 * (layer.remat is Remat.NONE) for layer in plan.layers)
        return Peak(0, 0, kept + sum(10 if mode is Mode.GFGB else 4 for mode in plan.modes))

    layers = partition(gpt.loss_fn, gpt.params, (gpt.batch,)).layers
    plan = Plan("any", 1.0, tuple(LayerPlan(f"l{i}", Mode.GFGB) for i in range(3)))
    found = {budget: fit(plan, budget, peak_of, [2, 0], layers) for budget in (60, 54, 42, 41, 32)}
    assert {budget: sum(fitted.recomputes) for budget, fitted in found.items()} == {60: 0, 54: 0, 42: 0, 41: 1, 32: 1}
    assert found[32].recomputes == (False, False, True)
    assert [fitted.modes.count(Mode.RELOAD) for fitted in found.values()] == [0, 1, 3, 2, 3]
    with pytest.raises(jaxferry.BudgetError, match="with 2 segments that recompute") as caught:
        fit(plan, 21, peak_of, [2, 0], layers)
    assert caught.value.smallest_bytes == 22


def test_bulk_loads_end_where_a_layer_has_to_be_loaded_twice(gpt):
    layers = partition(gpt.loss_fn, gpt.params, (gpt.batch,)).layers
    plan = Plan("zero-offload", 1.0, tuple(LayerPlan(f"l{i}", Mode.GFGB) for i in range(3)), loads=Loads.BULK)
    fitted = fit(plan, 2, lambda plan: Peak(0, 0, plan.modes.count(Mode.GFGB)), [], layers)
    assert (fitted.modes.count(Mode.RELOAD), fitted.loads) == (1, Loads.LAYERWISE)
