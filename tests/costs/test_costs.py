"""Counts on jaxprs against counts by hand, and against those of XLA."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from jaxferry.costs import Costs, host_reads, jaxpr_costs, partition_costs, touched_bytes
from jaxferry.partition import differentiate, partition, with_remat
from jaxferry.settings import for_planned_gpu


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def costs(function: Any, *arguments: Any) -> Costs:
    return jaxpr_costs(jax.make_jaxpr(function)(*arguments))


@jax.custom_vjp
def product(a: Any, b: Any) -> Any:
    return a @ b


product.defvjp(lambda a, b: (a @ b, (a, b)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
SQUARE = shape(8, 8)


def convolved(image: Any, kernel: Any, groups: int = 1) -> Any:
    return jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", feature_group_count=groups)


def turns(x: Any, weights: Any) -> Any:
    return jax.lax.scan(lambda carry, weight: (carry @ weight, None), x, weights)[0]


def either(flag: Any, x: Any) -> Any:
    return jax.lax.cond(flag, lambda x: x @ x, lambda x: x + 1, x)


FLOPS: dict[str, tuple[Any, ...]] = {
    "a batch of products": (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), 4 * 210, shape(4, 3, 5), shape(4, 5, 7)),
    "a convolution": (convolved, 2 * 768 * 4 * 9, shape(2, 4, 8, 8), shape(6, 4, 3, 3)),
    "one in groups": (functools.partial(convolved, groups=2), 2 * 768 * 2 * 9, shape(2, 4, 8, 8), shape(6, 2, 3, 3)),
    "the body of a scan, as often as it runs": (turns, 6 * 2 * 4 * 8 * 8, shape(4, 8), shape(6, 8, 8)),
    "the dearest branch of a cond": (either, 2 * 8**3, shape(dtype=jnp.bool_), SQUARE),
    "a nested program": (jax.jit(jnp.dot), 2 * 8**3, SQUARE, SQUARE),
    "a checkpoint": (jax.checkpoint(jnp.dot), 2 * 8**3, SQUARE, SQUARE),
    "the program of a custom derivative alone": (product, 2 * 8**3, SQUARE, SQUARE),
}


@pytest.mark.parametrize("name", FLOPS)
def test_operations_by_hand(name: str) -> None:
    function, flops, *arguments = FLOPS[name]
    assert costs(function, *arguments).flops == flops


def test_a_product_and_elementwise_operations_by_hand() -> None:
    """A product reads its factors and writes its result; element-wise operations are fused and cost one each."""
    assert costs(jnp.dot, shape(3, 5), shape(5, 7)) == Costs(2 * 3 * 5 * 7, 4 * (15 + 35), 4 * 21, 1)
    assert costs(lambda x, y: jnp.tanh(x * y) + x, shape(10), shape(10)) == Costs(30, 4 * 20, 4 * 10, 1)
    assert costs(jax.nn.relu, shape(10)).flops <= 20


B, N, K, T, S, D = 2, 6, 3, 8, 10, 16


def attend(**options: Any) -> Any:
    """cuDNN's attention, for the plan of a GPU."""
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options)


def attention_costs(function: Any, keys: int) -> Costs:
    shapes = shape(B, T, N, D, dtype=jnp.bfloat16), *[shape(B, keys, K, D, dtype=jnp.bfloat16)] * 2
    return for_planned_gpu(lambda: costs(function, *shapes))


@pytest.mark.parametrize(
    ("keys", "pairs", "options"),
    [
        (S, T * S, {}),
        (T, T * T / 2, {"is_causal": True}),
        (S, T * S / 2, {"is_causal": True, "key_value_seq_lengths": np.full(B, S, np.int32)}),
        (T, T * 2, {"is_causal": True, "local_window_size": (1, 0)}),
    ],
)
def test_attention_by_cudnn_is_two_products_of_the_pairs_that_see_each_other_and_five_backwards(
    keys: int, pairs: float, options: Any
) -> None:
    forward = attend(**options)
    product = 2 * B * N * pairs * D
    alone = attention_costs(forward, keys)
    assert alone.flops == 2 * product
    assert alone.kernels == 1
    # Queries, keys and values are read, a result like the queries is written; no scores.
    assert alone.bytes == 2 * B * D * (2 * T * N + 2 * keys * K) + 4 * B * bool("key_value_seq_lengths" in options) * 2

    def backward(q: Any, k: Any, v: Any) -> Any:
        out, pullback = jax.vjp(forward, q, k, v)
        return pullback(out)

    assert attention_costs(backward, keys).flops == 7 * product


def test_what_a_product_has_written_is_fused_and_not_counted_again() -> None:
    plain = costs(lambda a, b: a @ b, shape(8, 8), shape(8, 8))
    fused = costs(lambda a, b: jnp.sin(a @ b) @ a, shape(8, 8), shape(8, 8))
    assert fused.bytes == 2 * plain.bytes
    assert fused.flops == 2 * plain.flops + 64


def test_a_lookup_moves_the_rows_that_it_returns() -> None:
    counted = costs(lambda table, ids: table[ids], shape(1000, 16), shape(5, dtype=jnp.int32))
    assert counted.bytes < 2 * (5 * 16 * 4) + 5 * 64
    assert counted.bytes_written >= 5 * 16 * 4


def test_the_gradient_of_a_lookup_writes_the_table() -> None:
    gradient = jax.grad(lambda table, ids: jnp.sum(table[ids] ** 2))
    counted = costs(gradient, shape(1000, 16), shape(5, dtype=jnp.int32))
    assert counted.bytes_written >= 1000 * 16 * 4


def test_a_step_of_a_small_network_agrees_with_xla() -> None:
    """Independent: XLA's own cost analysis of the compiled step, which counts a few operations differently."""

    def loss(params: Any, x: Any) -> Any:
        for weight in params:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    arguments = [shape(64, 64) for _ in range(3)], shape(32, 64)
    compiled = jax.jit(jax.grad(loss)).lower(*arguments).compile()
    counted = costs(jax.grad(loss), *arguments)
    analysis: Any = compiled.cost_analysis()
    assert counted.flops == pytest.approx(analysis["flops"], rel=0.02)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_operations_of_a_block_agree_with_xla(remat: str) -> None:
    """A backward that runs its forward again leaves out the last product, which only its result needs."""
    task = models.gpt(width=64)
    batch = jax.random.randint(jax.random.key(1), (8, 33), 0, 128)
    parts = partition(task.loss_fn, task.params, (batch,))
    parts = with_remat(parts, [remat] * len(parts.segments))
    graph, segment = parts.graph, parts.segments[2]
    avals = [[graph.avals[v] for v in own] for own in (segment.weights, segment.inputs, segment.nondiff_inputs)]
    arguments = [[shape(*aval.shape, dtype=aval.dtype) for aval in own] for own in avals]
    derivative, counted = differentiate(graph, segment), partition_costs(parts)[2]
    forward = jax.jit(derivative.forward).lower(*arguments).compile()
    backward = jax.jit(derivative.backward).lower(*derivative.backward_arguments(graph)).compile()
    for compiled, flops in ((forward, counted.forward_flops), (backward, counted.backward_flops)):
        analysis: Any = compiled.cost_analysis()
        assert flops == pytest.approx(analysis["flops"], rel=0.02)


def turned(weight: Any, x: Any) -> Any:
    return jax.lax.scan(lambda carry, _: (carry @ weight, None), x, length=6)[0]


def behind_a_barrier(x: Any, w: Any) -> Any:
    x, w = jax.lax.optimization_barrier((x, w))
    return x @ w


IDS = shape(3, 2, dtype=jnp.int32)
TOUCHED: dict[str, tuple[Any, ...]] = {
    "a product with one row": (lambda w, x: x @ w, 8 * 16, shape(8, 16), shape(1, 8)),
    "a product with many rows": (lambda w, x: x @ w, 8 * 16, shape(8, 16), shape(4096, 8)),
    "the rows of a lookup": (lambda table, ids: table[ids], 6 * 16, shape(1000, 16), IDS),
    "the same of a table that is cast": (lambda w, ids: w.astype(jnp.bfloat16)[ids], 6 * 16, shape(1000, 16), IDS),
    "a vector once": (lambda scale, x: x * scale, 16, shape(16), shape(100, 16)),
    "a view in a nested program": (jax.jit(lambda w, x: x @ w.T), 16 * 8, shape(16, 8), shape(4, 8)),
    "another view": (lambda w, x: x @ w.reshape(8, 16), 128, shape(128), shape(4, 8)),
    "the first operand of a barrier": (behind_a_barrier, 3 * 8, shape(3, 8), shape(8, 5)),
    "the second one": (lambda w, x: behind_a_barrier(x, w), 8 * 5, shape(8, 5), shape(3, 8)),
    "in every turn of a scan": (turned, 6 * 8 * 8, SQUARE, shape(4, 8)),
    "nothing": (lambda w, x: x + 1, 0, shape(16), shape(16)),
}
"""A function, the elements of its first argument that it reads, and its arguments."""


@pytest.mark.parametrize("name", TOUCHED)
def test_each_byte_in_host_memory_is_read_as_often_as_it_is_used(name: str) -> None:
    function, num_elements, *arguments = TOUCHED[name]
    assert touched_bytes(host_reads(jax.make_jaxpr(function)(*arguments), [0])) == 4 * num_elements
