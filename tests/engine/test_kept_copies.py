"""Copies of parameters that stay on the device from one micro-batch to the next."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

import jaxferry
from jaxferry.engine import peak_bytes
from jaxferry.modes import Mode
from planned import assert_same_bits, plan_of, prepared, taken
from slowly import slow
from steps import transport_of

N = 3
ADAMW = optax.adamw(1e-3)


def count_loads(transport, monkeypatch):
    """The groups that are loaded from now on, in their order."""
    loaded, load = [], transport.load

    def counted(group, *args):
        loaded.append(group)
        return load(group, *args)

    monkeypatch.setattr(transport, "load", counted)
    return loaded


def test_no_group_is_loaded_again_before_its_update(gpt, monkeypatch):
    step = jaxferry.train_step(gpt.loss_fn, ADAMW, accumulate=N)
    state, _ = step(step.init(gpt.params), gpt.batch)
    groups = sorted(step.prepare(gpt.batch).program.loaded)
    loaded = count_loads(transport_of(step, gpt.batch), monkeypatch)
    for number in range(1, 3 * N):
        state, _ = step(state, gpt.batch)
        state.block_until_ready()
        # The next group of micro-batches may have begun to load.
        assert number // N * len(groups) - len(groups) <= len(loaded) <= (number + 1) // N * len(groups)
    expected = jaxferry.train_step(gpt.loss_fn, ADAMW, accumulate=N, plan=plan_of(gpt, [Mode.GFGB]))
    other = expected.init(gpt.params)
    other = taken(expected, other, gpt.batch, 3 * N)
    assert_same_bits(state.params, other.params)


@pytest.mark.cpu_device  # temporaries of another device may leave room for all of them
@pytest.mark.parametrize("excess", [0.0, *slow(0.3), 1.0])
def test_as_many_stay_as_fit_into_the_budget(gpt, excess):
    with pytest.raises(jaxferry.BudgetError) as error:
        prepared(gpt, ADAMW, accumulate=N, memory_budget=1)
    least, most = error.value.smallest_bytes, prepared(gpt, ADAMW, accumulate=N).peak.total
    budget = round(least + excess * (most - least))
    found = prepared(gpt, ADAMW, accumulate=N, memory_budget=budget)
    assert found.peak.total <= budget
    kept, loaded = found.program.kept, found.program.loaded.keys()
    assert kept <= loaded and (excess == 0.3 or (kept == loaded) == (excess == 1.0))
    for group in loaded - kept:  # none of the others fits beside them
        more = dataclasses.replace(found.program, kept=kept | {group})
        known = found.runner.runnable.programs.temporary_bytes
        assert (
            peak_bytes(more, known, found.peak.array_bytes - peak_bytes(found.program, {}).array_bytes).total > budget
        )


def test_copies_in_use_are_within_the_count_and_evaluation_frees_what_stays(gpt):
    step = jaxferry.train_step(gpt.loss_fn, ADAMW, accumulate=N)
    state, prepared = step.init(gpt.params), step.prepare(gpt.batch)
    held = transport_of(step, gpt.batch).loaded_bytes
    whole = sum(layer.num_bytes for layer in prepared.partition.layers)
    for number in range(2 * N):
        state, metrics = step(state, gpt.batch)
        assert metrics["device_param_bytes_peak"] <= prepared.peak.parameters
        if number % N == 0:
            assert held.now == whole
            before = float(step.evaluate(state, gpt.batch))
            assert held.now == 0 and np.isfinite(before)
    state.block_until_ready()


def test_a_failed_micro_batch_frees_what_stays_and_costs_no_bit(gpt, monkeypatch):
    def train(fails):
        step = jaxferry.train_step(gpt.loss_fn, ADAMW, accumulate=N)
        state, _ = step(step.init(gpt.params), gpt.batch)
        transport = transport_of(step, gpt.batch)
        if fails:
            with monkeypatch.context() as patch:
                patch.setattr(transport, "destinations", lambda *args: 1 / 0)
                patch.setattr(transport, "store", lambda *args: 1 / 0)
                patch.setattr("jaxferry.engine.gradients._add_onto", lambda *args: 1 / 0)
                with pytest.raises(jaxferry.TaskError, match="division by zero"):
                    step(state, gpt.batch)
            assert transport.loaded_bytes.now == 0
        while state.updated_step < 2 * N:
            state, _ = step(state, gpt.batch)
        return state.params

    assert_same_bits(train(True), train(False))


def test_a_batch_of_another_shape_takes_over_what_stays(gpt, monkeypatch):
    step = jaxferry.train_step(gpt.loss_fn, ADAMW, accumulate=N)
    half = jax.tree.map(lambda leaf: leaf[: max(len(leaf) // 2, 1)], gpt.batch)
    state, _ = step(step.init(gpt.params), gpt.batch)
    step.prepare(half)
    loaded = count_loads(transport_of(step, half), monkeypatch)
    state, _ = step(state, half)
    assert loaded == []


@pytest.mark.parametrize("policy", ["zero-offload", "native-offload", "native-overlapped"])
def test_copies_stay_under_any_policy(gpt, policy):
    program = prepared(gpt, ADAMW, accumulate=N, policy=policy, profile="estimate").program
    assert program.kept == program.loaded.keys() and program.loaded


def test_given_plans_and_l2l_load_as_they_say(gpt):
    for options in ({"plan": plan_of(gpt, [Mode.RELOAD])}, {"policy": "l2l"}):
        assert prepared(gpt, ADAMW, accumulate=N, **options).program.kept == frozenset()
