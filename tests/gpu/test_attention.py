"""cuDNN's attention on a real GPU: values, gradients and memory beside XLA's, and training with it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
import model
from examples.common.layers import attention

CONFIG = model.Config(num_layers=2, num_heads=4, channels=256, max_length=256, vocab_size=1024)
ROUNDING = 2.0**-8
"""bfloat16's."""
NUM_STEPS = 3
UNTUNED = {"xla_gpu_autotune_level": 0}
"""Nothing is timed, and XLA's choice among algorithms takes seconds for each new shape."""


@pytest.fixture(scope="module", autouse=True)
def cudnn():
    like = jax.ShapeDtypeStruct((1, 2, 1, 64), jnp.bfloat16)
    try:
        jax.eval_shape(lambda q: attention(q, q, q, implementation="cudnn"), like)
    except RuntimeError as error:
        pytest.skip(f"JAX has no attention by cuDNN here: {error}")


def distance(found, expected):
    """The norm of a difference beside that of what is expected."""
    found, expected = (np.asarray(array, np.float64) for array in (found, expected))
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def check_near(found, other, exact):
    """Checks that results are as near to exact ones as the other implementation's, within rounding."""
    for one, two, truth in zip(*map(jax.tree.leaves, (found, other, exact)), strict=True):
        assert distance(one, truth) <= 2 * distance(two, truth) + ROUNDING


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "lengths", "is_causal"),
    [
        pytest.param(256, 256, (8, 2), None, True, id="grouped heads"),
        pytest.param(255, 255, (4, 4), None, True, id="odd"),
        pytest.param(197, 197, (4, 4), (197, 77, 1, 0), False, id="padding"),
    ],
)
def test_values_and_gradients_are_those_of_xlas_within_rounding(queries, keys, heads, lengths, is_causal):
    random = np.random.default_rng(0)
    shapes = [(4, length, number, 64) for length, number in zip((queries, keys, keys), (*heads, heads[1]), strict=True)]
    given = [jnp.asarray(random.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    weights = random.standard_normal(shapes[0])
    is_token = None
    if lengths is not None:
        is_token = jnp.arange(keys) < jnp.array(lengths)[:, None]
        weights[np.array(lengths) == 0] = 0  # XLA's attention sees all of a row without tokens, cuDNN's one

    rows = np.flatnonzero(weights.any((1, 2, 3)))

    def results(name, dtype):
        def value(*arrays):
            found = attention(*arrays, is_causal=is_causal, is_token=is_token, implementation=name)
            return (found.astype(jnp.float32) * weights).sum(), found[rows]

        weighted = jax.jit(jax.value_and_grad(value, (0, 1, 2), has_aux=True), compiler_options=UNTUNED)
        (_, found), gradients = weighted(*(array.astype(dtype) for array in given))
        return found, gradients

    with jax.default_matmul_precision("highest"):
        exact = results("xla", jnp.float32)
    found = results("cudnn", jnp.bfloat16)
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(found))
    check_near(found, results("xla", jnp.bfloat16), exact)


def make_batch():
    tokens = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (4, CONFIG.max_length + 1), dtype=np.int32)
    return {"tokens": tokens}


@pytest.fixture(scope="module")
def params():
    return jax.device_get(jax.jit(model.make_init(CONFIG))(jax.random.key(0)))


def with_attention(name):
    return model.make_loss(dataclasses.replace(CONFIG, attention=name))


def test_a_gpt2_has_the_loss_and_gradients_of_xlas_attention_within_rounding(params):
    def results(name, dtype):
        computed = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16).astype(dtype), params)
        run = jax.jit(jax.value_and_grad(with_attention(name)), compiler_options=UNTUNED)
        return run(computed, make_batch())

    with jax.default_matmul_precision("highest"):
        exact = results("xla", jnp.float32)
    check_near(results("cudnn", jnp.bfloat16), results("xla", jnp.bfloat16), exact)


def has_cudnn(compiled):
    return "__cudnn$fmha" in compiled.as_text()


def test_no_scores_are_in_memory():
    """The temporaries of forward and backward, with cuDNN's own workspace, take less than one matrix of scores."""
    like = jax.ShapeDtypeStruct((4, 1024, 16, 64), jnp.bfloat16)
    scores_bytes = 2 * 4 * 16 * 1024 * 1024
    temporary_bytes = {}
    for name in ("xla", "cudnn"):

        def total(*arrays, name=name):
            return attention(*arrays, is_causal=True, implementation=name).astype(jnp.float32).sum()

        compiled = jax.jit(jax.grad(total, (0, 1, 2))).lower(like, like, like).compile(UNTUNED)
        assert has_cudnn(compiled) == (name == "cudnn")
        temporary_bytes[name] = compiled.memory_analysis().temp_size_in_bytes
    print(f"temporaries of attention, bytes: {temporary_bytes}, scores {scores_bytes}")
    assert temporary_bytes["cudnn"] < scores_bytes < temporary_bytes["xla"]


@pytest.fixture(scope="module")
def expected(params):
    """Losses of plain JAX with XLA's attention."""
    optimizer, loss_fn = optax.adamw(1e-3), with_attention("xla")

    @functools.partial(jax.jit, compiler_options=UNTUNED)
    def step(masters, state, batch):
        computed = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), masters)
        loss, gradients = jax.value_and_grad(loss_fn)(computed, batch)
        gradients = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradients)
        updates, state = optimizer.update(gradients, state, masters)
        return optax.apply_updates(masters, updates), state, loss

    state, losses = optimizer.init(params), []
    for _ in range(NUM_STEPS):
        params, state, loss = step(params, state, make_batch())
        losses.append(float(loss))
    return losses


@pytest.fixture(scope="module")
def make_step():
    """Makes training steps of one model, which share its programs while all are kept."""
    loss_fn, kept = with_attention(None), []

    def make(**options):
        step = jaxferry.train_step(
            loss_fn, optax.adamw(1e-3), compute_dtype=jnp.bfloat16, profile="estimate", **options
        )
        kept.append(step)
        return step

    return make


@pytest.mark.parametrize(
    "options",
    [{"policy": "native-overlapped"}, {"policy": "exact"}, {"policy": "native-overlapped", "remat": "full"}],
    ids=["native-overlapped", "exact", "recomputing"],
)
def test_a_step_trains_with_the_devices_own_attention(params, expected, make_step, options):
    step = make_step(**options)
    state, losses = step.init(params), []
    for _ in range(NUM_STEPS):
        state, metrics = step(state, make_batch())
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, expected, rtol=ROUNDING)
    assert losses[-1] < losses[0]
    segments = step.prepare(make_batch()).partition.segments
    attending = [s for s in segments if any("dot_product_attention_fwd" in str(e.params) for e in s.equations)]
    assert len(attending) == CONFIG.num_layers
