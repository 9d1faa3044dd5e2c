"""Estimated temporaries by hand, and beside those of programs that XLA has compiled for a GPU."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

import model as gpt2
import models
from examples.llama import model as llama
from jaxferry.costs import backward_variant, forward_variant, partition_costs, temporary_bytes
from jaxferry.engine import RematVariants
from jaxferry.partition import partition

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks/results/compiled_for_gpu.json"
MIB = 2**20


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def read_again(a, b, c, d):
    y = a @ b
    return (jnp.tanh(y) @ c) * (y @ d)


def summed(x, y):
    return jax.lax.scan(lambda total, each: (total + each[0].T @ each[1], None), jnp.zeros((30, 50)), (x, y))[0]


def behind_a_barrier(a, b, c):
    first, second = jax.lax.optimization_barrier((a @ b, a @ b + 1))
    return first @ c, second @ c


def turns(x, w):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w) @ w.T, None), x, length=3)[0]


THREE, HALF = [(3, 4), (4, 5), (5, 2)], [shape(3, 4, dtype=jnp.bfloat16), shape(4, 5, dtype=jnp.bfloat16)]
CASES = {
    "element-wise operations": (lambda x, y: jnp.tanh(x * y) + x, [(100,), (100,)], 0),
    "a result": (lambda a, b: a @ b, THREE[:2], 0),
    "a product between two": (lambda a, b, c: (a @ b) @ c, THREE, 15),
    "a product in a nested program": (lambda a, b, c: jax.jit(jnp.dot)(a, b) @ c, THREE, 15),
    "what takes the place of its source": (lambda a, b, c: jnp.tanh(a @ b) @ c, THREE, 15),
    "a source that is read again": (read_again, [*THREE, (5, 2)], 15 + 15 + 6),
    "16 bits that are read in 32": (lambda a, b, c: jnp.tanh((a @ b).astype(jnp.float32)) @ c, [*HALF, (5, 2)], 15),
    "products that a loop adds up": (summed, [(8, 2, 30), (8, 2, 50)], 0),
    "such a sum that is read": (lambda x, y, z: summed(x, y) @ z, [(8, 2, 30), (8, 2, 50), (50, 1)], 30 * 50),
    "each operand of a barrier": (behind_a_barrier, THREE, 2 * 15),
    "a loop's body": (turns, THREE[:2], 15),
}


@pytest.mark.parametrize("name", CASES)
def test_temporaries_by_hand(name):
    function, shapes, num_elements = CASES[name]
    given = [each if isinstance(each, jax.ShapeDtypeStruct) else shape(*each) for each in shapes]
    assert temporary_bytes(jax.make_jaxpr(function)(*given)) == 4 * num_elements


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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_of_tiles_that_leave_for_the_host_count_as_the_sums_that_they_are(dtype):
    task = models.gpt(vocab=4096, depth=1)
    parts = partition(task.loss_fn, task.params, (shape(8, 33, dtype=jnp.int32),), compute_dtype=dtype)
    head = partition_costs(RematVariants(parts, "none", 4).base, "none", temporaries=True)[-1]
    whole, stored = (head.temporary_bytes[backward_variant(False, is_go)] for is_go in (False, True))
    # In 16 bits the program has the fp32 sums beside its results; in fp32 they are its results.
    assert stored - whole == (head.grad_bytes if dtype == jnp.float32 else 0)
