"""What lies on the device during a step, counted from JAX's own list of live arrays."""

import itertools

import jax
import numpy as np
import optax
import pytest

import jaxferry
import jaxferry.engine.transfers
import models
from jaxferry.modes import Mode
from jaxferry.native.library import library
from planned import assert_same_bits, plan_of, train


def device_arrays():
    return [a for a in jax.live_arrays() if a.sharding.memory_kind == "device" and not a.is_deleted()]


class Watch:
    """Counts device bytes whenever a load or a program has been issued.

    Attributes:
      most: the most bytes of arrays that were not there before the step, or belong to RESIDENT copies.
      most_parameters: the most bytes among them of parameters.
    """

    def __init__(self, step, batch, monkeypatch):
        executor = step.prepare(batch)._executor
        self._transfers, self._known = executor._transfers, set()
        self.most = self.most_parameters = 0
        for owner, name in ((self._transfers, "load"), (self._transfers, "store"), (executor, "_receive")):
            monkeypatch.setattr(owner, name, self._watched(getattr(owner, name)))
        self._held = {}

    def start(self, state):
        resident = {id(a) for held in state.resident.values() for a in held.arrays}
        self._known = {id(a) for a in device_arrays()} - resident
        self.most = self.most_parameters = 0

    def _watched(self, function):
        def call(*args):
            self.count()
            result = function(*args)
            if isinstance(result, jaxferry.engine.transfers.DeviceLayer):
                self._held[id(result)] = result
            self.count()
            return result

        return call

    def count(self):
        self.most = max(self.most, sum(a.nbytes for a in device_arrays() if id(a) not in self._known))
        arrays = itertools.chain.from_iterable(held.arrays for held in self._held.values())
        self.most_parameters = max(self.most_parameters, sum(a.nbytes for a in arrays if not a.is_deleted()))


@pytest.fixture(scope="module")
def gpt():
    return models.gpt()


def watched_steps(task, monkeypatch, num_steps=2, **options):
    step = jaxferry.train_step(task.loss_fn, optax.adamw(1e-3), **options)
    state = step.init(task.params)
    watch = Watch(step, task.batch, monkeypatch)
    state, _ = step(state, task.batch)
    for _ in range(num_steps):
        state.block_until_ready()
        watch.start(state)
        state, metrics = step(state, task.batch)
    return watch, metrics, step.prepare(task.batch), state


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
