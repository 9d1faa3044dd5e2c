"""Every pair of options trains as plain Optax does, to the bit where only data moves."""

import jax
import numpy as np
import pytest

import matrix
from accelerator import emulate
from jaxferry.step import Kind
from planned import assert_same_bits
from tolerances import LOSS_RTOL, PARAMS_RTOL

CASES = matrix.covering(matrix.MOVES)
CASES += matrix.covering(matrix.AXES, CASES)
HALF_RTOL, NORM_HALF_RTOL = 2e-2, 2e-2


def test_the_cases_cover_every_pair_of_values_that_is_possible():
    assert matrix.pairs_of(CASES) == matrix.all_pairs(matrix.AXES)
    assert matrix.pairs_of(filter(matrix.only_moves, CASES)) == matrix.all_pairs(matrix.MOVES)
    assert all(tuple(dict(case)) == tuple(matrix.AXES) for case in CASES)


@pytest.mark.cpu_device
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(value for _, value in case))
def test_losses_and_parameters_are_those_of_plain_optax(case, monkeypatch):
    is_exact, case = matrix.only_moves(case), dict(case)
    expected, expected_norms, expected_params = matrix.plain_optax(*(case[name] for name in matrix.PLAIN))
    known = matrix.reference(case) if is_exact else None
    if case["device"] == "emulated":
        emulate(monkeypatch)
    found = matrix.train_as(case)
    is_half = case["dtype"] == "bfloat16"
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
    if case["device"] == "emulated":
        assert {v.sharding.memory_kind for vectors in found.state.host.vectors for v in vectors} == {"pinned_host"}
    if known is not None:
        assert (found.losses, found.norms) == (known.losses, known.norms)
        assert_same_bits(found.params, known.params)
