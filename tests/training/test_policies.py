"""Training under every policy."""

import numpy as np
import optax
import pytest

import jaxferry
import models
from jaxferry.modes import Mode
from jaxferry.planner import policies
from planned import assert_same_bits, train, trained
from slowly import slow_but
from tolerances import LOSS_RTOL

FEW = ("go-memferry",)
WITHOUT_MOST = slow_but(FEW, sorted(policies()))
SGD, ADAMW_SLOW = optax.sgd(0.1), optax.adamw(1e-3)


@pytest.fixture(scope="module")
def whole_gpt():
    """The same model with more blocks, for tests that depend on their number."""
    return models.mlp()


@pytest.mark.parametrize("policy", WITHOUT_MOST)
def test_every_policy_trains_with_the_same_bits_but_for_products_in_host_memory(whole_gpt, policy):
    params, expected = trained(whole_gpt, ADAMW_SLOW, 3)
    options = {"policy": policy, "reserve_factor": 0.5, "profile": "estimate"}
    step = jaxferry.train_step(whole_gpt.loss_fn, ADAMW_SLOW, **options)
    state, losses = train(step, whole_gpt, 3)
    prepared = step.prepare(whole_gpt.batch)
    assert prepared.plan.policy == policy
    np.testing.assert_allclose(losses, expected, rtol=LOSS_RTOL)
    if not {Mode.DHA, Mode.DFGB} & set(prepared.modes):
        assert losses == expected
        assert_same_bits(state.params, params)
