"""Every pair of options trains as plain Optax does, to the bit where only data moves.

Of the cases that cover all pairs, runs without slow tests take those that cover most. With
JAXFERRY_TESTS_DEVICE=accelerator they take as few as have all values, on the emulated accelerator.
"""

import jax
import numpy as np
import pytest

import matrix
from accelerator import IS_DEFAULT, emulate
from jaxferry.native import library
from jaxferry.step import Kind, chrome_trace
from jaxferry.transport import pinned
from planned import assert_same_bits
from recorded import check_times
from tolerances import LOSS_RTOL, PARAMS_RTOL
from watched import SCALARS_BYTES, Watch

CASES = matrix.covering(matrix.MOVES)
CASES += matrix.covering(matrix.AXES, CASES)
EMULATED = [case for case in CASES if dict(case)["device"] in matrix.EMULATED]
OFTEN = matrix.few_with_all_values(EMULATED) if IS_DEFAULT else matrix.with_most_pairs(CASES, 15)
HALF_RTOL, NORM_HALF_RTOL = 2e-2, 2e-2


def slow_but_often(cases, often):
    """Cases as dictionaries; all but the ones that run often are slow."""
    ids = ("-".join(value for _, value in case) for case in cases)
    marks = ([] if case in often else [pytest.mark.slow] for case in cases)
    return [pytest.param(dict(case), id=own, marks=mark) for case, own, mark in zip(cases, ids, marks, strict=True)]


def test_the_cases_cover_every_pair_of_values_that_is_possible():
    assert matrix.pairs_of(CASES) == matrix.all_pairs(matrix.AXES)
    assert matrix.pairs_of(filter(matrix.only_moves, CASES)) == matrix.all_pairs(matrix.MOVES)
    assert all(tuple(dict(case)) == tuple(matrix.AXES) for case in CASES)
    assert set().union(*matrix.few_with_all_values(EMULATED)) == set().union(*EMULATED)
    assert len(matrix.pairs_of(matrix.with_most_pairs(CASES, 15))) > 0.9 * len(matrix.pairs_of(CASES))


@pytest.mark.cpu_device
@pytest.mark.parametrize("case", slow_but_often(EMULATED if IS_DEFAULT else CASES, OFTEN))
def test_losses_and_parameters_are_those_of_plain_optax(case, monkeypatch):
    expected, expected_norms, expected_params = matrix.plain_optax(*(case[name] for name in matrix.PLAIN))
    known, accelerator = matrix.reference(case), None
    if case["device"] in matrix.EMULATED:
        accelerator = emulate(monkeypatch)
        library("cpu").set_delay(5e-4, 7)
    if case["device"] == "out of reach":
        monkeypatch.setattr(pinned, "_reaches", lambda placement: False)
    pinned.can_view.cache_clear()
    try:
        found = matrix.train_as(case)
        found.state.block_until_ready()
    finally:
        library("cpu").set_delay(0.0, 0)
        pinned.can_view.cache_clear()
    is_half = case["dtype"] == "bfloat16" or case["optimizer"] == "rounded"
    np.testing.assert_allclose(found.losses, expected, rtol=HALF_RTOL if is_half else LOSS_RTOL)
    np.testing.assert_allclose(found.norms, expected_norms, rtol=NORM_HALF_RTOL if is_half else PARAMS_RTOL)
    for ours, theirs in zip(found.params, expected_params, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=PARAMS_RTOL, atol=5e-2 if is_half else 1e-5)
    assert len(set(found.losses)) > 1
    assert jax.tree.structure(found.state.params) == jax.tree.structure(matrix.task_of(case["model"]).params)
    saved = any(task.kind is Kind.SAVE for task in found.prepared.schedule.tasks)
    assert saved == (case["offload"] == "offloaded")
    assert bool(found.state.host.on_device) == (case["update"] == "resident")
    assert bool(found.state.host.streamed) == (case["update"] == "gpu")
    on_disk = {unit.is_on_disk for unit in found.state.host.units if unit.is_on_host or unit.is_on_disk}
    assert on_disk <= {case["state"] == "on disk"}
    assert found.most_bytes <= found.prepared.peak.parameters
    assert (found.most_bytes == 0) == (case["mode"] == "DHA" and case["update"] != "resident")
    if accelerator is not None:
        assert {v.sharding.memory_kind for vectors in found.state.host.vectors for v in vectors} == {"pinned_host"}
        # Only where the CPU cannot reach pinned memory, pieces pass through NumPy, which waits for them.
        waits = [stack for stack in accelerator.waits if case["device"] == "emulated" or "_put_into" not in stack]
        assert not waits, waits[0]
        accelerator.check()
    if known is not None:
        assert found.losses == known.losses
        # Where no update depends on it, a norm is the sum of the program that computes the gradient, in some order.
        np.testing.assert_allclose(found.norms, known.norms, rtol=0 if case["clip"] == "clipped" else 1e-6)
        assert_same_bits((found.params, found.opt_state), (known.params, known.opt_state))
    if case["record"] == "recorded" and not (case["update"] == "gpu" and case["mode"] in ("DHA", "DFGB")):
        check_times(found.recorded)
        assert found.recorded.schedule.steps == 2 or "another" in case["between"]
        names = {event["name"] for event in chrome_trace(found.recorded)["traceEvents"]}
        assert {task.name for task in found.recorded.schedule.tasks} < names
    assert case["record"] == "recorded" or found.recorded is None


WATCHED = [case for case in CASES if dict(case)["device"] == "cpu" or dict(case)["update"] == "gpu"]
WATCHED_OFTEN = [case for case in WATCHED if case in OFTEN][::2]


@pytest.mark.cpu_device
@pytest.mark.parametrize("case", slow_but_often(WATCHED, WATCHED_OFTEN))
def test_live_bytes_stay_under_the_predicted_peak(case, monkeypatch):
    with matrix.small_sizes():
        options = matrix.all_options_of(case) | {"transport": "ferry", "record_steps": 0}
        step, most = matrix.made(case, **options), []
        state, batches = step.init(matrix.task_of(case["model"]).params), matrix.batches_of(case["model"])
        watch = Watch(step, batches[0], monkeypatch)
        for batch in batches:
            state.block_until_ready()
            watch.start(state)
            state, _ = step(state, batch)
            most.append(watch.most)
    assert 0 < max(most) <= step.prepare(batches[0]).peak.array_bytes + SCALARS_BYTES
