"""examples/common: attention, by cuDNN on a GPU in 16 bits and by XLA elsewhere, in every model that uses it."""

import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.common.layers import attention
from jaxferry.cli.traced import trace
from jaxferry.costs import find_machine, partition_costs
from jaxferry.errors import InputError
from jaxferry.modes import MODULE
from jaxferry.partition import differentiate, partition
from jaxferry.settings import for_planned_gpu, for_platform
from slowly import slow_cases

FORWARD = "dot_product_attention_fwd"


def heads(length, number=4, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((2, length, number, 16), dtype)


def traced(q, kv, **options):
    return str(jax.make_jaxpr(lambda q, k, v: attention(q, k, v, **options))(q, kv, kv))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bits_on_a_gpu_are_cudnns_and_all_else_is_xlas(dtype):
    narrow, wide = heads(8, dtype=dtype), heads(8, dtype=jnp.float32)
    assert FORWARD not in traced(narrow, narrow)

    def on_gpu():
        with jax.default_device(jax.devices("cpu")[0]):
            on_cpu = traced(narrow, narrow), traced(narrow, narrow, implementation="cudnn")
        own = traced(narrow, narrow), traced(narrow, narrow, implementation="xla"), traced(wide, wide)
        return [FORWARD in each for each in (*own, traced(wide, wide, implementation="cudnn"), *on_cpu)]

    assert for_planned_gpu(on_gpu) == [True, False, False, False, False, True]


def test_a_gpu_without_cudnn_is_told_and_uses_xlas():
    with for_platform("gpu"), pytest.warns(UserWarning, match="attention by XLA, .*: cuDNN"):
        assert FORWARD not in traced(heads(8), heads(8))


def test_heads_too_wide_for_cudnn_are_told_and_use_xlas():
    wide = jax.ShapeDtypeStruct((1, 8, 1, 512), jnp.bfloat16)
    with pytest.warns(UserWarning, match="attention by XLA, .*: The head dim must be"):
        assert FORWARD not in for_planned_gpu(lambda: traced(wide, wide))


def test_an_unknown_implementation_is_refused():
    with pytest.raises(InputError, match=r"attention must be .*, got 'flash'"):
        traced(heads(8), heads(8), implementation="flash")


def by_numpy(q, k, v, is_causal, lengths):
    """Softmax of the products of each query with the keys that it sees."""
    out = np.zeros(q.shape)
    for b, t, n in np.ndindex(q.shape[:3]):
        kept = slice(0, min(lengths[b], t + 1) if is_causal else lengths[b])
        head = n * k.shape[2] // q.shape[2]
        weights = np.exp(k[b, kept, head] @ q[b, t, n] / q.shape[3] ** 0.5)
        out[b, t, n] = weights @ v[b, kept, head] / weights.sum()
    return out


@pytest.mark.parametrize(("T", "S", "is_causal", "lengths"), [(7, 5, False, (1, 4)), (7, 7, True, None)])
def test_padding_for_cudnn_changes_no_value(monkeypatch, T, S, is_causal, lengths):
    """XLA's attention gets what cuDNN's would."""
    plain, seen = jax.nn.dot_product_attention, []

    def by_xla(q, k, v, *, implementation, **options):
        seen.append((implementation, q.shape[1] % 2, k.shape[1] % 2))
        return plain(q, k, v, **options, implementation="xla")

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(like.shape) for like in (heads(T), heads(S, 2), heads(S, 2))]
    narrow = [array.astype(jnp.bfloat16) for array in arrays]
    options = {"is_causal": is_causal, "is_token": lengths and jnp.arange(S) < jnp.array(lengths)[:, None]}
    found = jax.jit(lambda *given: attention(*given, **options, implementation="cudnn"))(*narrow)
    assert seen == [("cudnn", 0, 0)]
    expected = by_numpy(*(array.astype(np.float64) for array in narrow), is_causal, lengths or (S, S))
    np.testing.assert_allclose(np.float64(found), expected, atol=2.0**-6)


def example(name):
    """Loss function and shapes of parameters and batch of an example's smallest model."""
    loss_fn, init_fn, batch_of = importlib.import_module(f"examples.{name}.workload").make("tiny", 4)
    return loss_fn, jax.eval_shape(init_fn, jax.random.key(0)), jax.eval_shape(lambda: batch_of(0))


def with_calls(parts):
    """The segments with an attention of cuDNN's."""
    return [s for s in parts.segments if any(FORWARD in str(equation.params) for equation in s.equations)]


@pytest.mark.parametrize(
    ("name", "scores", "options"),
    [
        ("gpt2", 4 * 4 * 256 * 256, {"granularity": MODULE}),
        ("llama", 4 * 4 * 256 * 256, {}),
        ("vit", 4 * 4 * 18 * 18, {}),
        *slow_cases(("gpt2", 4 * 4 * 256 * 256, {}), ("bert", 4 * 4 * 256 * 256, {})),
    ],
)
def test_every_layer_calls_cudnn_in_one_program_and_keeps_no_scores(name, scores, options):
    loss_fn, params, batch = example(name)
    given = (loss_fn, params, (batch,))
    parts = for_planned_gpu(lambda: partition(*given, compute_dtype=jnp.bfloat16, **options))
    found = with_calls(parts)
    assert len(found) == 4 and len({segment.program for segment in found}) <= 2
    kept = [aval.shape for aval in differentiate(parts.graph, found[1]).saved]
    assert any(len(shape) == 3 and shape[:2] == (4, 4) for shape in kept), "a number for each head and query"
    assert not [shape for shape in kept if shape[-1:] == shape[-2:-1] and math.prod(shape) >= scores]
    assert not differentiate(parts.graph, found[1], "full").saved


def test_a_plan_for_a_gpu_made_without_one_has_its_attention():
    loss_fn, params, batch = example("gpt2")
    planned = trace(4, loss_fn, params, batch, find_machine("h200-pcie5"), jnp.bfloat16)
    assert len(with_calls(planned.variants.base)) == 4
    for_cpu = partition(loss_fn, params, (batch,), compute_dtype=jnp.bfloat16)
    assert not with_calls(for_cpu)
    by_xla = partition_costs(for_cpu, "auto", temporaries=True)[2]
    layer = planned.profile.layers[2]
    scores_bytes = 2 * 4 * 4 * 256 * 256
    assert by_xla.activation_bytes - layer.activation_bytes >= scores_bytes
    assert by_xla.temporary_bytes["forward"] - layer.temporary_bytes["forward"] >= scores_bytes
