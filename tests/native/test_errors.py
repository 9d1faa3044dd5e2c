"""Invalid calls of native operations: one line with operation, argument and shapes, and no side effects."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from native_calls import call, ferry_load, ferry_store, ferry_wait, scratch

F32, BF16 = jnp.float32, jnp.bfloat16


def zeros(shape, dtype=F32):
    return jnp.zeros(shape, dtype)


def gather(
    table=(20,),
    indices=(3,),
    result=(3, 4),
    dtype=F32,
    index_dtype=jnp.int32,
    result_dtype=None,
    scratch_bytes=20,
    **attributes,
):
    attributes = {"offset": 0, "rows": 5, "columns": 4} | attributes
    result = jax.ShapeDtypeStruct(result, result_dtype or dtype)
    return call(
        "dha_gather", [zeros(table, dtype), zeros(indices, index_dtype), scratch(scratch_bytes)], [result], **attributes
    )


def matmul(x=(2, 3), w=(12,), y=(2, 4), dtype=F32, w_dtype=F32, y_dtype=None, scratch_dtype=jnp.uint8, **attributes):
    attributes = {"offset": 0, "k": 3, "n": 4, "transpose": 0} | attributes
    arguments = [zeros(x, dtype), zeros(w, w_dtype), zeros((64,), scratch_dtype)]
    return call("dha_matmul", arguments, [jax.ShapeDtypeStruct(y, y_dtype or dtype)], **attributes)


def matmul_gradient(
    destination=(12,), x=(2, 3), dy=(2, 4), dtype=F32, x_dtype=F32, dy_dtype=F32, is_aliased=True, **attributes
):
    attributes = {"offset": 0, "k": 3, "n": 4, "transpose": 0, "accumulate": 0, "round_to": 0} | attributes
    destination = zeros(destination, dtype)
    arguments = [destination, zeros(x, x_dtype), zeros(dy, dy_dtype), scratch(64)]
    return call("dha_matmul_gradient", arguments, [destination], {0: 0} if is_aliased else None, **attributes)


def read(vector=(10,), results=((2,), (3,)), dtype=F32, result_dtype=None, offsets=(0, 2)):
    shapes = [jax.ShapeDtypeStruct(shape, result_dtype or dtype) for shape in results]
    return call("dha_read", [zeros(vector, dtype)], shapes, offsets=list(offsets))


def gradient_store(destination=(10,), gradient=(4,), dtype=F32, gradient_dtype=F32, is_aliased=True, **attributes):
    attributes = {"offset": 0, "accumulate": 0} | attributes
    arguments = [zeros(destination, dtype), zeros(gradient, gradient_dtype)]
    return call("gradient_store", arguments, arguments[:1], {0: 0} if is_aliased else None, **attributes)


def load_unaliased():
    arguments = [zeros((4,)), zeros((4,))]
    return call("ferry_load", arguments, arguments[1:], vectors=[0], offsets=[0], vacant=0)


def store_unaliased():
    arguments = [zeros((4,)), zeros((4,))]
    return call("ferry_store", arguments, arguments[1:], offsets=[0], accumulate=0)


def loads(**arguments):
    return ferry_load([zeros((4,)), zeros((4,), BF16)], [zeros((4,))], **arguments)


REFUSED: dict[str, list[tuple[Any, dict[str, Any], str]]] = {
    "dha_gather": [
        (gather, {"dtype": jnp.int32}, "table must be float32, bfloat16 or float16, got int32[20]"),
        (gather, {"rows": 6}, "6 x 4 elements from offset 0 on do not lie inside table, float32[20]"),
        (gather, {"offset": 1}, "5 x 4 elements from offset 1 on do not lie inside table, float32[20]"),
        (gather, {"offset": -1}, "5 x 4 elements from offset -1 on do not lie inside table"),
        (gather, {"rows": 2**62, "columns": 4}, f"{2**62} x 4 elements from offset 0 on do not lie inside"),
        (gather, {"index_dtype": jnp.uint8}, "indices must be int32, got uint8[3]"),
        (gather, {"result_dtype": BF16}, "the result must have the dtype of table, got bfloat16[3,4]"),
        (gather, {"result": (3, 5)}, "the result must have columns = 4 as its last dimension, got float32[3,5]"),
        (gather, {"result": (4, 4)}, "the result must have a row for each index, got float32[4,4]"),
        (gather, {"scratch_bytes": 19}, "scratch must have four bytes for each of 5 rows, got uint8[19]"),
    ],
    "dha_matmul": [
        (matmul, {"x": (2, 7)}, "x must have k = 3 as its last dimension, got float32[2,7]"),
        (matmul, {"dtype": jnp.int8}, "x must be float32, bfloat16 or float16, got int8[2,3]"),
        (matmul, {"w_dtype": jnp.int8}, "w must be float32, bfloat16 or float16, got int8[12]"),
        (matmul, {"y_dtype": BF16}, "the result must be float32 or have the dtype of x, got bfloat16[2,4]"),
        (matmul, {"scratch_dtype": F32}, "scratch must be uint8, got float32[64]"),
        (matmul, {"offset": 1}, "3 x 4 elements from offset 1 on do not lie inside w, float32[12]"),
        (matmul, {"k": 2}, "x must have k = 2 as its last dimension, got float32[2,3]"),
        (matmul, {"n": 2}, "the result must have n = 2 as its last dimension, got float32[2,4]"),
        (matmul, {"y": (3, 4)}, "x and the result must have as many rows, got float32[2,3] and float32[3,4]"),
        (matmul, {"transpose": 2}, "transpose must be 0 or 1, got 2"),
    ],
    "dha_matmul_gradient": [
        (matmul_gradient, {"dtype": jnp.int32}, "destination must be float32, bfloat16 or float16"),
        (matmul_gradient, {"dy_dtype": BF16}, "dy must have the dtype of x, got bfloat16[2,4]"),
        (matmul_gradient, {"offset": 5}, "3 x 4 elements from offset 5 on do not lie inside"),
        (matmul_gradient, {"x": (3, 3)}, "x and dy must have as many rows, got float32[3,3]"),
        (matmul_gradient, {"accumulate": -1}, "accumulate must be 0 or 1, got -1"),
        (matmul_gradient, {"round_to": 3}, "round_to must be 0, 1 or 2, got 3"),
        (matmul_gradient, {"is_aliased": False}, "the result for destination, float32[12], must alias"),
    ],
    "dha_read": [
        (read, {"dtype": jnp.int32}, "the host vector must be float32, bfloat16 or float16, got int32[10]"),
        (read, {"result_dtype": BF16}, "array 0 must have the dtype of the host vector, got bfloat16[2]"),
        (read, {"offsets": (0, 8)}, "3 x 1 elements from offset 8 on do not lie inside the host vector of array 1"),
        (read, {"offsets": (0,)}, "offsets must have one number for each of the 2 arrays, got 1"),
    ],
    "gradient_store": [
        (gradient_store, {"dtype": jnp.int32}, "destination must be float32, bfloat16 or float16, got int32"),
        (gradient_store, {"gradient_dtype": jnp.int32}, "gradient must be float32, bfloat16 or float16"),
        (gradient_store, {"offset": 7}, "4 x 1 elements from offset 7 on do not lie inside destination"),
        (gradient_store, {"is_aliased": False}, "the result for destination, float32[10], must alias it"),
    ],
    "ferry_load": [
        (loads, {"where": [2]}, "vectors[0] must lie in [0, 2), got 2"),
        (loads, {"where": [1]}, "array 0 must have the dtype of the host vector, got float32[4] and bfloat16[4]"),
        (loads, {"where": []}, "vectors must have one number for each of the 1 arrays, got 0"),
        (loads, {"offsets": [1]}, "4 x 1 elements from offset 1 on do not lie inside the host vector of array 0"),
        (load_unaliased, {}, "the result for array 0, float32[4], must alias it: pass input_output_aliases"),
    ],
    "ferry_store": [
        (lambda: ferry_store([zeros(5)], zeros(4)), {}, "5 x 1 elements from offset 0 on do not lie inside"),
        (lambda: ferry_store([zeros(4)], zeros(4, BF16)), {}, "array 0 must have the dtype of the host vector"),
        (store_unaliased, {}, "the result for the host vector, float32[4], must alias it"),
    ],
    "ferry_wait": [
        (lambda: call("ferry_wait", [zeros(4)], [zeros(4)]), {}, "the result for array 0, float32[4], must alias"),
        (lambda: call("ferry_wait", [zeros(4)], []), {}, "there must be a result for each argument, got 0 for 1"),
    ],
}


@pytest.mark.parametrize(
    ("name", "operation", "arguments", "message"),
    [(name, *row) for name, rows in REFUSED.items() for row in rows],
)
def test_what_does_not_fit_is_refused_in_one_line(cpu, name, operation, arguments, message):
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(jax.jit(functools.partial(operation, **arguments))())
    [line, *_] = [line for line in str(caught.value).splitlines() if name in line]
    assert f"{name}: {message}" in line


@pytest.mark.parametrize(
    "operation",
    [
        gather,
        matmul,
        matmul_gradient,
        read,
        gradient_store,
        lambda: ferry_wait(loads()),
        lambda: ferry_wait([zeros(4)]),
        lambda: scratch(0),
    ],
)
def test_what_the_refused_calls_are_changed_from_is_accepted(cpu, operation):
    results = jax.jit(operation)()
    cpu.synchronize()
    jax.block_until_ready(results)


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        (gather, {"indices": (0,), "result": (0, 4)}),
        (gather, {"rows": 0, "table": (0,)}),
        (gather, {"columns": 0, "result": (3, 0)}),
        (matmul, {"x": (0, 3), "y": (0, 4)}),
        (matmul, {"x": (2, 0), "w": (0,), "k": 0}),
        (matmul, {"n": 0, "y": (2, 0)}),
        (matmul_gradient, {"x": (0, 3), "dy": (0, 4)}),
        (matmul_gradient, {"k": 0, "x": (2, 0)}),
        (read, {"results": (), "offsets": ()}),
        (read, {"vector": (0,), "results": ((0,),), "offsets": (0,)}),
        (gradient_store, {"gradient": (0,), "offset": 10}),
        (gradient_store, {"destination": (0,), "gradient": (0,)}),
    ],
)
def test_empty_arrays_are_no_error(cpu, operation, arguments):
    for result in jax.jit(functools.partial(operation, **arguments))():
        np.testing.assert_array_equal(np.nan_to_num(np.asarray(result)), 0)
