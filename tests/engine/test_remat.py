"""Steps whose segments recompute: memory, bits, and the effect of a memory budget."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
import models
from planned import prepared

POLICY = jax.checkpoint_policies.dots_saveable
SGD, ADAMW = optax.sgd(0.1), optax.adamw(1e-3)


@pytest.fixture(scope="module")
def gpt():
    """A model whose activations are large relative to its layers."""
    return with_large_batch(models.mlp())


def with_large_batch(task):
    return dataclasses.replace(task, batch=jax.random.randint(jax.random.key(1), (8, 33), 0, 128))


def smallest_of(task, **options):
    with pytest.raises(jaxferry.BudgetError) as caught:
        prepared(task, ADAMW, memory_budget=1, **options)
    return caught.value.smallest_bytes


def test_full_recomputation_keeps_what_crosses_segments_alone(gpt):
    made = prepared(gpt, ADAMW, remat="full")
    derivatives = made.program.derivatives
    assert all(derivatives[segment.program].saved == () for segment in made.partition.segments)


def test_segments_that_are_not_left_to_the_plan_stay_as_they_are(gpt):
    choices = {"h_0": "auto", "h_1": "auto", "h_2": POLICY}
    made = prepared(gpt, ADAMW, memory_budget=smallest_of(gpt, remat=choices), remat=choices)
    chosen = {segment.name: kept for segment, kept in zip(made.partition.segments, made.remat, strict=True)}
    assert (chosen["h_0"], chosen["h_1"], chosen["h_2"], chosen["h_3"]) == ("full", "full", POLICY, "none")


def activated(first):
    """Layers whose plain backward reads no parameters where it needs no cotangent, as that of the first one."""
    generator = np.random.default_rng(0)
    params = {f"l{i}": {"w": generator.normal(size=(8, 8), scale=0.5).astype(np.float32)} for i in range(4)}

    def loss_fn(params, x):
        for i in range(4):
            x = (jax.nn.gelu if i == 0 or not first else jnp.tanh)(x @ params[f"l{i}"]["w"])
        return jnp.mean((x - 1) ** 2)

    return loss_fn, params, generator.normal(size=(16, 8)).astype(np.float32)


@pytest.mark.parametrize(
    ("policy", "first"),
    [
        ("memferry", False),
        *(
            pytest.param(policy, first, marks=pytest.mark.slow)
            for policy in ("native-overlapped", "auto", "memferry")
            for first in (True, False)
            if (policy, first) != ("memferry", False)
        ),
    ],
)
def test_every_budget_from_the_smallest_trains(policy, first):
    loss_fn, params, batch = activated(first)
    options = {"profile": jaxferry.train_step(loss_fn, optax.sgd(0.1), remat="auto").measure(params, batch)}
    options |= {"remat": "auto", "policy": policy}
    tiny = jaxferry.train_step(loss_fn, optax.sgd(0.1), memory_budget=1, **options)
    tiny.init(params)
    with pytest.raises(jaxferry.BudgetError) as error:
        tiny.prepare(batch)
    for budget in (error.value.smallest_bytes, int(error.value.smallest_bytes * 1.1)):
        step = jaxferry.train_step(loss_fn, optax.sgd(0.1), memory_budget=budget, **options)
        _, metrics = step(step.init(params), batch)
        assert float(metrics["loss"]) == pytest.approx(float(loss_fn(params, batch)), rel=1e-5)
        assert step.prepare(batch).peak.total <= budget


@pytest.mark.parametrize("remat", ["auto", {"l1": "auto"}])
def test_values_that_leave_the_device_need_a_fixed_remat(remat):
    loss_fn, params, batch = activated(first=False)
    step = jaxferry.train_step(loss_fn, optax.sgd(0.1), remat=remat, offload_activations=True)
    step.init(params)
    with pytest.raises(jaxferry.InputError, match=r"offload_activations=True needs a remat= that no plan changes"):
        step.prepare(batch)
