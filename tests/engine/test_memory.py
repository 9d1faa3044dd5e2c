"""What lies on the device during a step, counted from JAX's own list of live arrays."""

import itertools

import numpy as np
import optax
import pytest

import jaxferry
import models
from jaxferry.modes import Mode
from jaxferry.native.library import library
from planned import assert_same_bits, plan_of, train
from watched import device_arrays, watched_steps


@pytest.fixture(scope="module")
def gpt():
    return models.gpt()


def test_with_reload_no_more_than_two_layers_are_on_the_device(gpt, monkeypatch):
    watch, metrics, prepared, _ = watched_steps(gpt, monkeypatch, plan=plan_of(gpt, [Mode.RELOAD]))
    sizes = [prepared.partition.layers[s.layer].num_bytes for s in prepared.partition.segments]
    assert 0 < watch.most_parameters <= max(a + b for a, b in itertools.pairwise(sizes))
    assert metrics["device_param_bytes_peak"] == watch.most_parameters


def test_all_gfgb_holds_the_whole_model_at_the_end_of_the_forward(gpt, monkeypatch):
    watch, metrics, prepared, _ = watched_steps(gpt, monkeypatch)
    whole = sum(layer.num_bytes for layer in prepared.partition.layers)
    assert watch.most_parameters == whole == metrics["device_param_bytes_peak"] == prepared.peak.parameters


@pytest.mark.parametrize(
    "modes", [[Mode.GFGB], [Mode.RELOAD], [Mode.RESIDENT], [Mode.RESIDENT, Mode.GFGB, Mode.RELOAD]]
)
def test_live_bytes_stay_under_the_predicted_peak_and_come_near_it(gpt, monkeypatch, modes):
    emulator = library("cpu")
    emulator.set_bandwidth("store", 1e7)  # so slow that gradients wait on the device for as long as they may
    try:
        watch, metrics, prepared, _ = watched_steps(gpt, monkeypatch, plan=plan_of(gpt, modes))
    finally:
        emulator.set_bandwidth("store", 0)
    assert 0.7 * prepared.peak.held <= watch.most <= prepared.peak.held <= prepared.peak.total
    assert metrics["device_param_bytes_peak"] == prepared.peak.parameters


def test_a_memory_budget_is_kept_by_reloading_and_changes_no_bit(gpt, monkeypatch):
    free_state, _ = train(jaxferry.train_step(gpt.loss_fn, optax.adamw(1e-3)), gpt, 3)
    free = jaxferry.train_step(gpt.loss_fn, optax.adamw(1e-3))
    free.init(gpt.params)
    largest = free.prepare(gpt.batch).peak.total
    least = jaxferry.train_step(gpt.loss_fn, optax.adamw(1e-3), plan=plan_of(gpt, [Mode.RELOAD]))
    least.init(gpt.params)
    smallest = least.prepare(gpt.batch).peak.total
    for budget in np.linspace(smallest, largest, 4).astype(int).tolist():
        watch, _, prepared, state = watched_steps(gpt, monkeypatch, memory_budget=budget)
        assert watch.most <= prepared.peak.total <= budget
        assert (Mode.RELOAD in prepared.modes) == (budget < largest)
        assert_same_bits(state.params, free_state.params)


def test_nothing_is_left_on_the_device_after_a_step(gpt):
    step = jaxferry.train_step(gpt.loss_fn, optax.adamw(1e-3))
    state = step.init(gpt.params)
    state, metrics = step(state, gpt.batch)
    state.block_until_ready()
    del metrics
    before = sum(a.nbytes for a in device_arrays())
    for _ in range(3):
        state, metrics = step(state, gpt.batch)
        state.block_until_ready()
        del metrics
    assert sum(a.nbytes for a in device_arrays()) <= before
    assert {u.sharding.memory_kind for unit in state.units for u in (*unit.masters, *unit.state)} == {"unpinned_host"}
    assert {v.sharding.memory_kind for vectors in state.vectors for v in vectors} == {"pinned_host"}
