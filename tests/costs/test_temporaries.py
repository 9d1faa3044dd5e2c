"""Estimated temporaries by hand, and beside those of programs that XLA has compiled for a GPU."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

import model as gpt2
from examples.llama import model as llama
from jaxferry.costs import backward_variant, forward_variant, partition_costs, temporary_bytes
from jaxferry.partition import partition

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks/results/compiled_for_gpu.json"
MIB = 2**20


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def estimate(function, *arguments):
    return temporary_bytes(jax.make_jaxpr(function)(*arguments))


def test_element_wise_operations_need_no_memory():
    assert estimate(lambda x, y: jnp.tanh(x * y) + x, shape(100), shape(100)) == 0


def test_a_result_is_no_temporary():
    assert estimate(lambda a, b: a @ b, shape(3, 4), shape(4, 5)) == 0


def test_a_product_between_two_products_is_one():
    assert estimate(lambda a, b, c: (a @ b) @ c, shape(3, 4), shape(4, 5), shape(5, 2)) == 4 * 15


def test_what_is_computed_element_wise_takes_the_place_of_its_source():
    assert estimate(lambda a, b, c: jnp.tanh(a @ b) @ c, shape(3, 4), shape(4, 5), shape(5, 2)) == 4 * 15


def test_a_source_that_is_read_again_keeps_its_place():
    def function(a, b, c, d):
        y = a @ b
        return (jnp.tanh(y) @ c) * (y @ d)

    found = estimate(function, shape(3, 4), shape(4, 5), shape(5, 2), shape(5, 2))
    assert found == 4 * (15 + 15 + 6)


def test_a_product_in_16_bits_that_is_read_in_32_is_written_in_32():
    half = [shape(3, 4, dtype=jnp.bfloat16), shape(4, 5, dtype=jnp.bfloat16)]
    assert estimate(lambda a, b, c: jnp.tanh((a @ b).astype(jnp.float32)) @ c, *half, shape(5, 2)) == 4 * 15


def test_products_that_a_loop_adds_up_are_not_whole_beside_their_sum():
    def summed(x, y):
        return jax.lax.scan(lambda total, each: (total + each[0].T @ each[1], None), jnp.zeros((30, 50)), (x, y))[0]

    assert estimate(summed, shape(8, 2, 30), shape(8, 2, 50)) == 0
    read = lambda x, y, z: summed(x, y) @ z  # noqa: E731
    assert estimate(read, shape(8, 2, 30), shape(8, 2, 50), shape(50, 1)) == 4 * 30 * 50


def test_a_nested_program_counts_as_if_it_were_written_out():
    def inner(a, b):
        return a @ b

    shapes = shape(3, 4), shape(4, 5), shape(5, 2)
    nested = estimate(lambda a, b, c: jax.jit(inner)(a, b) @ c, *shapes)
    assert nested == estimate(lambda a, b, c: inner(a, b) @ c, *shapes) > 0


def test_a_barrier_passes_each_operand_on():
    def function(a, b, c):
        first, second = jax.lax.optimization_barrier((a @ b, a @ b + 1))
        return first @ c, second @ c

    assert estimate(function, shape(3, 4), shape(4, 5), shape(5, 2)) == 4 * 2 * 15


def test_a_loops_body_has_temporaries():
    def function(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w) @ w.T, None), x, length=3)[0]

    assert estimate(function, shape(3, 4), shape(4, 5)) == 4 * 15


@pytest.mark.parametrize(("name", "module"), [("GPT-2 medium", gpt2), ("Llama 8B", llama)])
def test_estimates_are_near_what_xla_needs_on_a_gpu(name, module):
    compiled = next(each for each in json.loads(RESULTS.read_text())["models"] if each["model"] == name)
    config = dataclasses.replace(module.SIZES[compiled["size"]], num_layers=2)
    params = jax.eval_shape(module.make_init(config), jax.random.key(0))
    batch = {"tokens": shape(compiled["batch"], compiled["length"] + 1, dtype=jnp.int32)}
    parts = partition(module.make_loss(config), params, (batch,), compute_dtype=jnp.bfloat16)
    costs = {each.name: each.temporary_bytes for each in partition_costs(parts, "auto", temporaries=True)}
    blocks = next(each for each in costs if each.startswith(("h_", "layers/")))
    ratios = []
    for program in compiled["programs"]:
        segment = program["segment"] if program["segment"] in costs else blocks
        name_of = forward_variant(False) if program["kind"] == "forward" else backward_variant(False, False)
        name_of += "_recompute" * program["recomputes"]
        if program["temporary_bytes"] > 128 * MIB:
            ratios.append(costs[segment][name_of] / program["temporary_bytes"])
    assert len(ratios) > 8
    assert min(ratios) > 0.7 and max(ratios) < 1.2
