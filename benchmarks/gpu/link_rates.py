"""Compares the operations' link rates with plain copies. Usage: link_rates.py LIBRARY OUTPUT.json [MIB]"""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp

from benchmarks.gpu.rates import Rate, median_seconds
from benchmarks.measure import machine
from jaxferry.native import ALIGNED_NUMBERS
from native import gpu_library
from native.native_operations import DTYPES

ROWS = (1, 16, 64, 512, 4096, 16384)
STORES = (("bfloat16", "bfloat16"), ("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32"))
DEFAULT_MIB = 512
SCRATCH_BYTES = 64 << 20
HEAD = (1024, 50_257)
"""Columns and rows of GPT-2 medium's table: rows of logits that start at no multiple of sixteen bytes."""


def aligned(size):
    """Returns a row's length in a product that is padded as `jaxferry.native.targets` pads it on a GPU."""
    return -(-size // ALIGNED_NUMBERS) * ALIGNED_NUMBERS


class Bench:
    """Arrays of a few hundred MiB in both memories, and the measurements on them."""

    def __init__(self, operations, mib=DEFAULT_MIB, k=8192):
        self.operations = operations
        self.k = k
        self.n = mib * (1 << 20) // 2 // self.k
        self.num_bytes = 2 * self.k * self.n
        self.weight = self.make((self.k * self.n,), "pinned_host")
        self.scratch = operations.scratch(SCRATCH_BYTES)
        self.loaded = [self.make((self.k * self.n,), "device")]
        self._stored = self.make((self.k * self.n,), "pinned_host")
        self._load = self._plain_load()
        self._store = self._plain_store()

    def make(self, shape, kind, dtype=jnp.bfloat16):
        return jax.jit(lambda: jnp.ones(shape, dtype), out_shardings=self.operations.memories[kind])()

    def _plain_load(self):
        load = self.operations.compile(
            "ferry_load", tuple(self.loaded), aliases={1: 0}, vectors=[0], offsets=[0], vacant=0
        )
        wait = self.operations.compile("ferry_wait", tuple(self.loaded), aliases={0: 0})
        return lambda array: wait(*load(self.weight, array))

    def _plain_store(self):
        like = self._stored
        store = self.operations.compile("ferry_store", like, "pinned_host", {1: 0}, offsets=[0], accumulate=0)
        wait = self.operations.compile("ferry_wait", (like,), ("pinned_host",), {0: 0})
        return lambda array, vector: wait(store(array, vector))[0]

    def run_load(self):
        """Copies the weight to the device: one cudaMemcpyAsync on a stream."""
        self.loaded = list(self._load(*self.loaded))
        jax.block_until_ready(self.loaded)

    def run_store(self):
        """Copies the same number of bytes to the host."""
        self._stored = self._store(self.loaded[0], self._stored)
        jax.block_until_ready(self._stored)

    def matmul(self, rows, transpose, shape=None, is_padded=False):
        """Measures x @ w, or x @ w.T, with a weight of `shape` (k, n) at the start of the host vector.

        What is possible is the slower of a plain copy and XLA's product of operands on the device, padded alike. The
        panels of few rows by a deep weight are no measure of the link: their products take longer than their copies.
        """
        k, n = shape or (self.k, self.n)
        depth, width = (aligned(k), aligned(n)) if is_padded else (k, n)
        like = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
        attributes = {"offset": 0, "k": k, "n": n, "transpose": int(transpose)}
        run = self.operations.compile("dha_matmul", like, **attributes)
        x = jnp.pad(self.make((rows, k), "device"), [(0, 0), (0, depth - k)])
        on_device = self.make((width, depth) if transpose else (depth, width), "device")
        product = jax.jit(lambda x, w: x @ (w.T if transpose else w))
        seconds = median_seconds(
            {
                "operation": lambda: run(x, self.weight, self.scratch).block_until_ready(),
                "compute": lambda: product(x, on_device).block_until_ready(),
                "plain": self.run_load,
            }
        )
        name = f"dha_matmul rows={rows} transpose={int(transpose)}"
        name += f" k={k} n={n} padded={int(is_padded)}" if shape else ""
        return self._rate(name, 2 * k * n, seconds)

    def _rate(self, name, num_bytes, seconds):
        plain_s = seconds["plain"] * num_bytes / self.num_bytes
        return Rate(name, num_bytes, seconds["operation"], plain_s, seconds.get("compute", 0.0))

    def store(self, dtype, destination_dtype, accumulate=False):
        """Measures storing a gradient in a host vector of another dtype.

        The destination's bytes cross the link: once, or to accumulate in both directions, of which one counts.
        """
        item_size = jnp.dtype(DTYPES[destination_dtype]).itemsize
        shape = (self.num_bytes // item_size,)
        destination = self.make(shape, "pinned_host", DTYPES[destination_dtype])
        gradient = self.make(shape, "device", DTYPES[dtype])
        attributes = {"offset": 0, "accumulate": int(accumulate)}
        run = self.operations.compile("gradient_store", destination, "pinned_host", {0: 0}, **attributes)
        held = [destination]
        del destination

        def operate():
            held[0] = run(held[0], gradient)
            held[0].block_until_ready()

        seconds = median_seconds({"operation": operate, "plain": self.run_store})
        name = f"gradient_store {dtype} to {destination_dtype} accumulate={int(accumulate)}"
        return Rate(name, self.num_bytes, seconds["operation"], seconds["plain"])

    def matmul_gradient(self, rows, shape=None, is_padded=False, accumulate=False):
        """Measures x.T @ dy, or dy.T @ x of a `shape` (k, n), into a bfloat16 host vector."""
        k, n = shape or (self.k, self.n)
        attributes = {"offset": 0, "k": k, "n": n, "transpose": int(shape is not None)}
        attributes |= {"accumulate": int(accumulate), "round_to": 1}
        run = self.operations.compile("dha_matmul_gradient", self.weight, "pinned_host", {0: 0}, **attributes)
        sizes = (aligned(k), aligned(n)) if is_padded else (k, n)
        x, dy = (self.make((rows, size), "device") for size in sizes)
        product = jax.jit(lambda x, dy: dy.T @ x if shape else x.T @ dy)
        held = [self.make((self.k * self.n,), "pinned_host")]

        def operate():
            held[0] = run(held[0], x, dy, self.scratch)
            held[0].block_until_ready()

        functions = {"operation": operate, "compute": lambda: product(x, dy).block_until_ready()}
        seconds = median_seconds(functions | {"plain": self.run_store})
        name = f"dha_matmul_gradient rows={rows} accumulate={int(accumulate)}"
        name += f" k={k} n={n} padded={int(is_padded)}" if shape else ""
        return self._rate(name, 2 * k * n, seconds)

    def device_put(self):
        """Measures JAX's eager copy of the weight to the device."""
        to_device = self.operations.memories["device"]
        functions = {
            "operation": lambda: jax.device_put(self.weight, to_device).block_until_ready(),
            "plain": self.run_load,
        }
        seconds = median_seconds(functions)
        return Rate("eager device_put to the device", self.num_bytes, seconds["operation"], seconds["plain"])

    def gather(self, distinct=None, repeats=1):
        """Measures a lookup in the weight, treated as a table with `k` columns, that names rows `repeats` times each.

        By default, it names all rows, because a short lookup would measure the call.
        """
        distinct = distinct or self.n
        rows = distinct * repeats
        indices = self.operations.device(jnp.arange(rows, dtype=jnp.int32) % distinct * 7919 % self.n)
        like = jax.ShapeDtypeStruct((rows, self.k), jnp.bfloat16)
        run = self.operations.compile("dha_gather", like, offset=0, rows=self.n, columns=self.k)
        scratch = self.operations.scratch(4 * self.n)
        functions = {
            "operation": lambda: run(self.weight, indices, scratch).block_until_ready(),
            "plain": self.run_load,
        }
        seconds = median_seconds(functions)
        return self._rate(f"dha_gather rows={rows} repeats={repeats}", 2 * distinct * self.k, seconds)


def measure_all(bench):
    yield bench.device_put()
    yield bench.gather()
    yield bench.gather(bench.n // 2, repeats=8)
    # A head's forward and both halves of its backward; unpadded is what cost 1.1 s on an H200.
    for is_padded in (True, False):
        yield bench.matmul(16_384, True, HEAD, is_padded=is_padded)
        yield bench.matmul(16_384, False, HEAD[::-1], is_padded=is_padded)
        yield bench.matmul_gradient(16_384, HEAD, is_padded=is_padded)
    for rows in ROWS:
        for transpose in (False, True):
            yield bench.matmul(rows, transpose)
    for dtype, destination in STORES:
        for accumulate in (False, True):
            yield bench.store(dtype, destination, accumulate)
    for rows in ROWS:
        yield bench.matmul_gradient(rows)
    yield bench.matmul_gradient(4096, accumulate=True)


def main():
    library, output = map(pathlib.Path, sys.argv[1:3])
    mib = int(sys.argv[3]) if len(sys.argv) > 3 else DEFAULT_MIB
    rates = []
    for rate in measure_all(Bench(gpu_library.register(library), mib)):
        rates.append(rate.to_json())
        print(f"{rate.name:60} {rate.bytes_per_s / 1e9:8.2f} GB/s  {rate.share:5.2f} of what is possible", flush=True)
        # Written after each rate, so that results survive a timeout.
        output.write_text(json.dumps({"machine": machine(), "rates": rates}, indent=2) + "\n")


if __name__ == "__main__":
    main()
