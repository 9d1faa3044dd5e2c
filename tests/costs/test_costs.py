"""Counts on jaxprs against counts by hand, and against those of XLA."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxferry.costs import Costs, host_reads, jaxpr_costs, touched_bytes
from jaxferry.settings import for_planned_gpu


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def costs(function: Any, *arguments: Any) -> Costs:
    return jaxpr_costs(jax.make_jaxpr(function)(*arguments))


def touched(function: Any, *arguments: Any, of: int = 0) -> float:
    return touched_bytes(host_reads(jax.make_jaxpr(function)(*arguments), [of]))


def test_a_product_by_hand() -> None:
    counted = costs(jnp.dot, shape(3, 5), shape(5, 7))
    assert counted == Costs(2 * 3 * 5 * 7, 4 * (15 + 35), 4 * 21, 1)


def test_a_batch_of_products_by_hand() -> None:
    counted = costs(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), shape(4, 3, 5), shape(4, 5, 7))
    assert counted.flops == 2 * 4 * 3 * 5 * 7


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_by_hand(groups: int) -> None:
    def convolve(image: Any, kernel: Any) -> Any:
        return jax.lax.conv(image, kernel, (1, 1), "SAME") if groups == 1 else _grouped(image, kernel)

    def _grouped(image: Any, kernel: Any) -> Any:
        return jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", feature_group_count=groups)

    counted = costs(convolve, shape(2, 4, 8, 8), shape(6, 4 // groups, 3, 3))
    assert counted.flops == 2 * (2 * 6 * 8 * 8) * (4 // groups * 3 * 3)


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


def test_elementwise_operations_cost_one_each_and_move_arguments_and_result_once() -> None:
    counted = costs(lambda x, y: jnp.tanh(x * y) + x, shape(10), shape(10))
    assert counted == Costs(30, 4 * 20, 4 * 10, 1)


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


def test_a_scan_counts_its_body_as_often_as_it_runs() -> None:
    def repeated(x: Any, weights: Any) -> Any:
        return jax.lax.scan(lambda carry, weight: (carry @ weight, None), x, weights)[0]

    assert costs(repeated, shape(4, 8), shape(6, 8, 8)).flops == 6 * 2 * 4 * 8 * 8


def test_a_cond_counts_its_dearest_branch() -> None:
    def either(flag: Any, x: Any) -> Any:
        return jax.lax.cond(flag, lambda x: x @ x, lambda x: x + 1, x)

    assert costs(either, shape(dtype=jnp.bool_), shape(8, 8)).flops == 2 * 8**3


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_nested_programs_are_entered(wrap: Any) -> None:
    assert costs(wrap(jnp.dot), shape(8, 8), shape(8, 8)).flops == 2 * 8**3


def test_only_the_program_of_a_custom_derivative_is_counted() -> None:
    @jax.custom_vjp
    def product(a: Any, b: Any) -> Any:
        return a @ b

    product.defvjp(lambda a, b: (a @ b, (a, b)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
    assert costs(product, shape(8, 8), shape(8, 8)).flops == 2 * 8**3
    assert costs(jax.nn.relu, shape(10)).flops <= 20


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


@pytest.mark.parametrize("rows", [1, 129, 4096])
def test_a_product_by_dha_reads_each_byte_of_its_weights_once(rows: int) -> None:
    assert touched(lambda w, x: x @ w, shape(8, 16), shape(rows, 8)) == 8 * 16 * 4


def test_a_lookup_by_dha_touches_the_rows_used() -> None:
    ids = shape(3, 2, dtype=jnp.int32)
    assert touched(lambda table, ids: table[ids], shape(1000, 16), ids) == 6 * 16 * 4


def test_a_lookup_in_a_table_that_is_cast_first_touches_the_rows_as_they_are_stored() -> None:
    ids = shape(6, dtype=jnp.int32)
    assert touched(lambda table, ids: table.astype(jnp.bfloat16)[ids], shape(1000, 16), ids) == 6 * 16 * 4


def test_a_vector_by_dha_is_read_once() -> None:
    assert touched(lambda scale, x: x * scale, shape(16), shape(100, 16)) == 16 * 4


def test_views_and_nested_programs_lead_to_the_same_bytes() -> None:
    assert touched(jax.jit(lambda w, x: x @ w.T), shape(16, 8), shape(4, 8)) == 16 * 8 * 4
    assert touched(lambda w, x: x @ w.reshape(8, 16), shape(128), shape(4, 8)) == 128 * 4


def test_a_barrier_passes_each_operand_on() -> None:
    def function(x: Any, w: Any) -> Any:
        x, w = jax.lax.optimization_barrier((x, w))
        return x @ w

    assert touched(function, shape(3, 8), shape(8, 5), of=1) == 4 * 8 * 5
    assert touched(function, shape(3, 8), shape(8, 5), of=0) == 4 * 3 * 8


def test_weights_in_a_scan_are_read_in_every_turn() -> None:
    def repeated(weight: Any, x: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (carry @ weight, None), x, length=6)[0]

    assert touched(repeated, shape(8, 8), shape(4, 8)) == 6 * 8 * 8 * 4


def test_what_is_not_read_is_not_touched() -> None:
    assert touched(lambda w, x: x + 1, shape(16), shape(16)) == 0
