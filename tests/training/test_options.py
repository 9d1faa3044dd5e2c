"""Invalid arguments of `train_step`: errors are one line with the argument and its value."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry

NOTHING: dict[str, int] = {}


def train(optimizer=None, **options):
    step = jaxferry.train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), optimizer or optax.sgd(0.1), **options)
    return step(step.init({"w": np.eye(4, dtype=np.float32)}), jnp.ones((2, 4)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("compute_dtype", value) for value in ("int32", "foo", 3, "float8_e4m3fn", "float64")),
        *(("reserve_factor", value) for value in ("0.5", -0.1, 1.1, float("nan"), True)),
        *(("clip_norm", value) for value in ("1", 0, -1.0, float("inf"), True)),
        *((name, value) for name in ("plan", "profile") for value in (NOTHING, 1)),
        *(("remat", value) for value in ("some", 3)),
        *((name, value) for name in ("skip_nonfinite", "offload_activations") for value in (1, "yes")),
        *(("record_steps", value) for value in (-1, 1.5, True)),
        *(("memory_budget", value) for value in (1.5, "8 apples", -1)),
        *((name, value) for name in ("accumulate", "cached_shapes") for value in (0, -1, 1.5, True, "8")),
        *(("loss_scale", value) for value in ("1", "static", True, 0, -1.0, float("inf"), 1e300, 1e-300, 1e-40)),
        *(("extra_args", value) for value in (3, "value", {"value": print})),
        *(("weight", value) for value in ("", 1.0)),
        ("policy", "best"),
        ("device", "cpu"),
        ("transport", "bus"),
    ],
)
def test_an_argument_that_is_not_acceptable_is_named_with_its_value(name, value):
    with pytest.raises(jaxferry.InputError) as caught:
        train(**{name: value})
    message = str(caught.value)
    assert name in message and str(value) in message and len(message.splitlines()) == 1


def test_a_step_under_a_transformation_is_refused():
    step = jaxferry.train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), optax.sgd(0.1))
    state = step.init({"w": np.eye(4, dtype=np.float32)})
    with pytest.raises(jaxferry.InputError, match=r"cannot be called under jax\.jit"):
        jax.jit(lambda x: step(state, x)[1]["loss"])(jnp.ones((2, 4)))
    assert step(state, jnp.ones((2, 4)))[0].step == 1


@pytest.mark.parametrize("arguments", [("x",), (0.1, "x"), (0.1, {})])
def test_an_optimizers_argument_that_is_no_number_is_refused(arguments):
    with pytest.raises(jaxferry.InputError, match="takes numbers and functions"):
        jaxferry.adamw(*arguments)


def test_a_loss_scale_that_overflows_by_the_number_of_micro_batches_is_refused():
    train(loss_scale=2.0**127, check_gradients=False)  # its gradient overflows
    with pytest.raises(jaxferry.InputError, match="loss_scale must lie in the range of fp32"):
        train(loss_scale=2.0**127, accumulate=2)


def test_an_optimizer_that_calls_the_loss_function_is_refused_with_what_it_needs():
    with pytest.raises(jaxferry.InputError, match=r"needs more than .* the loss \(value=\): .*'grad' and 'value_fn'"):
        train(optax.lbfgs())


@pytest.mark.parametrize(
    "optimizer", [optax.sgd(0.1), jaxferry.sgd(0.1), optax.GradientTransformation(*optax.sgd(0.1))]
)
def test_an_extra_argument_that_the_optimizer_does_not_read_is_refused_by_name(optimizer):
    with pytest.raises(jaxferry.InputError, match="extra_args names 'temperature', which the optimizer does not read"):
        train(optimizer, extra_args={"temperature": 1.0})
