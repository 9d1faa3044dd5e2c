"""Calls the native operations by their targets, without the package's wrappers, and computes reference results.

A platform is the real one, on a GPU, or the CUDA library on an emulated device (`emulated_cuda.py`): both run the same
tests, `OperationsSuite`.
"""

import jax
import ml_dtypes
import numpy as np
from jax.sharding import SingleDeviceSharding

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
ROUND_TO = {None: 0, "bfloat16": 1, "float16": 2}

# How far a number of a dtype may lie from the real one it stands for, relatively.
ROUNDING = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-10}


class Operations:
    """The targets of one platform.

    Attributes:
      prefix: what stands before the names of the contract.
      product_epsilon: by dtype, how far off a product's factors may be rounded, relatively: TF32 keeps ten bits.
      is_in_place: whether stores write where the destination is.
    """

    is_in_place = True

    def __init__(self, device, prefix, product_epsilon):
        self.prefix = prefix
        self.product_epsilon = product_epsilon
        self.memories = {kind: SingleDeviceSharding(device, memory_kind=kind) for kind in ("device", "pinned_host")}

    # By way of the other memory, which copies: NumPy's own memory cannot be donated.
    def host(self, values):
        return jax.device_put(jax.device_put(values, self.memories["device"]), self.memories["pinned_host"])

    def device(self, values):
        return jax.device_put(jax.device_put(values, self.memories["pinned_host"]), self.memories["device"])

    def compile(self, name, results, where="device", aliases=None, **attributes):
        """A jitted function of the operation's operands; `results` are like arrays, `where` their memory."""
        aliases = aliases or {}
        numbers = {
            key: np.asarray(value, np.int64) if isinstance(value, list) else np.int64(value)
            for key, value in attributes.items()
        }
        types = jax.tree.map(lambda like: jax.ShapeDtypeStruct(like.shape, like.dtype), results)
        call = jax.ffi.ffi_call(self.prefix + name, types, input_output_aliases=aliases, has_side_effect=True)
        if isinstance(where, tuple):
            shardings = tuple(self.memories[kind] for kind in where)
        else:
            shardings = jax.tree.map(lambda _: self.memories[where], results)
        return jax.jit(
            lambda *operands: call(*operands, **numbers), out_shardings=shardings, donate_argnums=tuple(aliases)
        )

    def scratch(self, num_bytes):
        return self.device(np.zeros(num_bytes, np.uint8))

    def gather(self, table, indices, offset, rows, columns):
        result = jax.ShapeDtypeStruct((*indices.shape, columns), table.dtype)
        return self.compile("dha_gather", result, offset=offset, rows=rows, columns=columns)(
            table, indices, self.scratch(4 * rows)
        )

    def matmul(
        self, x, w, shape, *, offset=0, transpose=False, result=None, scratch_bytes=1 << 16, scratch=None, width=None
    ):
        k, n = shape
        scratch = self.scratch(scratch_bytes) if scratch is None else scratch
        result = jax.ShapeDtypeStruct((*x.shape[:-1], width or n), DTYPES[result] if result else x.dtype)
        attributes = {"offset": offset, "k": k, "n": n, "transpose": int(transpose)}
        return self.compile("dha_matmul", result, **attributes)(x, w, scratch)

    def read(self, vector, shapes, offsets):
        results = tuple(jax.ShapeDtypeStruct(shape, vector.dtype) for shape in shapes)
        return self.compile("dha_read", results, offsets=offsets)(vector)

    def store(self, destination, gradient, offset=0, accumulate=False):
        attributes = {"offset": offset, "accumulate": int(accumulate)}
        run = self.compile("gradient_store", destination, "pinned_host", {0: 0}, **attributes)
        return run(destination, gradient)

    def add_rows(self, destination, indices, rows, offset, num_rows):
        attributes = {"offset": offset, "rows": num_rows, "columns": rows.shape[-1]}
        return self.compile("row_store", destination, "pinned_host", {0: 0}, **attributes)(destination, indices, rows)

    def matmul_gradient(
        self,
        destination,
        x,
        dy,
        shape=None,
        *,
        offset=0,
        transpose=False,
        accumulate=False,
        round_to=None,
        scratch_bytes=1 << 16,
    ):
        k, n = shape or (x.shape[-1], dy.shape[-1])
        attributes = {"offset": offset, "k": k, "n": n, "transpose": int(transpose)}
        attributes |= {"accumulate": int(accumulate), "round_to": ROUND_TO[round_to]}
        run = self.compile("dha_matmul_gradient", destination, "pinned_host", {0: 0}, **attributes)
        return run(destination, x, dy, self.scratch(scratch_bytes))

    def load(self, host_vectors, arrays, vectors, offsets, is_vacant=False):
        aliases = {len(host_vectors) + i: i for i in range(len(arrays))}
        places = {"vectors": vectors, "offsets": offsets, "vacant": int(is_vacant)}
        run = self.compile("ferry_load", tuple(arrays), aliases=aliases, **places)
        return run(*host_vectors, *arrays)

    def ferry_store(self, arrays, vector, offsets, accumulate=False):
        attributes = {"offsets": offsets, "accumulate": int(accumulate)}
        run = self.compile("ferry_store", vector, "pinned_host", {len(arrays): 0}, **attributes)
        return run(*arrays, vector)

    def wait(self, *arrays):
        where = tuple(array.sharding.memory_kind for array in arrays)
        return self.compile("ferry_wait", tuple(arrays), where, {i: i for i in range(len(arrays))})(*arrays)

    def vacate(self, *arrays):
        return self.compile("ferry_vacate", tuple(arrays), aliases={i: i for i in range(len(arrays))})(*arrays)

    def mark(self, token, *after, queue=0):
        result = jax.ShapeDtypeStruct((1,), np.uint8)
        return self.compile("mark", result, queue=queue)(token, *after)

    def token(self):
        return self.device(np.zeros(1, np.uint8))


def numbers(seed, shape, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(DTYPES[dtype])


def exact(values):
    """In double precision, which holds every product of two numbers of our dtypes."""
    return np.asarray(values).astype(np.float64)


def check_product(found, left, right, dtype, epsilon):
    """`found` is left @ right within what its own dtype and the factors' rounding (`epsilon`) allow."""
    expected = exact(left) @ exact(right)
    bound = epsilon * (np.abs(exact(left)) @ np.abs(exact(right))) + ROUNDING[dtype] * np.abs(expected) + 2.0**-24
    error = np.abs(exact(found) - expected)
    assert found.shape == expected.shape
    assert (error <= bound).all(), f"off by {np.max(error / bound)} times what rounding allows"


def check_same(found, expected):
    """Bit for bit, NaN being NaN."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))
