"""Training under every policy."""

import numpy as np
import optax
import pytest

import jaxferry
import models
from jaxferry.costs import LayerProfile, Profile
from jaxferry.modes import Mode
from jaxferry.planner import policies
from planned import assert_same_bits, step_of, train, trained
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


def test_a_policy_plans_with_the_given_profile_and_checks_that_it_fits_the_model(gpt, tmp_path):
    task = models.mlp(depth=3)
    step = step_of(gpt, SGD)
    step.init(gpt.params)
    parts = step.prepare(gpt.batch).partition
    times = dict.fromkeys(("forward_s", "backward_s", "backward_go_s", "offload_s", "update_s"), 1.0)
    layers = tuple(
        LayerProfile(
            name=segment.name,
            param_bytes=parts.layers[segment.group].num_bytes,
            grad_bytes=parts.layers[segment.group].num_bytes,
            load_s=9.0,
            forward_dha_s=1.0 if segment.name == "h_0" else 99.0,
            backward_dha_s=99.0,
            parameters=parts.layers[segment.group].name,
            **times,
        )
        for segment in parts.segments
    )
    path = str(tmp_path / "profile.json")
    Profile({"name": "made up"}, layers).save(path)
    planned = jaxferry.train_step(gpt.loss_fn, optax.sgd(0.1), policy="memferry", profile=path)
    train(planned, gpt, 1)
    chosen = {layer.name for layer in planned.prepare(gpt.batch).plan.layers if layer.mode is not Mode.GFGB}
    assert chosen == {"h_0"}
    other = jaxferry.train_step(task.loss_fn, optax.sgd(0.1), policy="memferry", profile=path)
    with pytest.raises(jaxferry.InputError, match="the profile is for another model"):
        train(other, task, 1)
