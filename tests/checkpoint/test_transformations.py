"""A checkpoint of an optimizer with other transformations names the transformations of both."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry

PARAMS = {"inner": {"mu": np.ones((4, 4), np.float32)}, "w": np.ones((4, 4), np.float32)}


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] @ params["inner"]["mu"]) ** 2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("transformations") / "adamw"
    step = jaxferry.train_step(loss_fn, optax.adamw(1e-3))
    step.save(step.init(PARAMS), path)
    return path


SAVED = r"saved with scale_by_adam.* \(count, mu, nu\) at \[0\], and this optimizer has "


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (optax.sgd(0.1, momentum=0.9), SAVED + r"trace \(trace\) at \[0\]"),
        (optax.lion(1e-3), SAVED + r"scale_by_lion \(count, mu\) at \[0\]"),
        (optax.sgd(0.1), SAVED + r"nothing at \[0\]"),
        (optax.chain(optax.clip(1.0), optax.adam(1e-3)), SAVED + r"scale_by_adam.* \(count, mu, nu\) at \[1\]\[0\]"),
        (optax.adam(optax.linear_schedule(1, 0, 9)), r"nothing at \[1\], .* scale_by_schedule \(count\) at \[1\]"),
    ],
    ids=["sgd", "lion", "without state", "chain", "schedule"],
)  # fmt: skip
def test_the_transformations_of_both_are_named(saved, optimizer, expected):
    with pytest.raises(jaxferry.CheckpointError, match=expected) as caught:
        jaxferry.train_step(loss_fn, optimizer).restore(saved)
    assert "the checkpoint does not match the optimizer" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("optimizer", [optax.adam(1e-3), optax.adamw(0.1), jaxferry.adamw(1e-3)])
def test_the_same_transformations_are_restored(saved, optimizer):
    assert jaxferry.train_step(loss_fn, optimizer).restore(saved).step == 0
