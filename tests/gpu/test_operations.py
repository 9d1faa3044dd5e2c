"""The operations on a real GPU: the emulated device's tests, also at larger sizes; our declarations of cuBLASLt."""

import ctypes
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxferry.native import NativeLibrary, library
from jaxferry.transport import pinned
from native import cuda_build
from native.native_operations import check_product, check_same, numbers
from native.operations_suite import CopySuite, FerrySuite, MarkSuite, PanelSuite

SOURCES = cuda_build.SOURCES


class TestCopies(CopySuite):
    def test_a_large_gather_returns_its_rows(self, operations):
        table = numbers(0, (50_000, 768), "bfloat16")
        indices = np.random.default_rng(1).integers(0, 50_000, (8, 512)).astype(np.int32)
        vector = operations.host(table.reshape(-1))
        check_same(operations.gather(vector, operations.device(indices), 0, 50_000, 768), table[indices])

    def test_a_large_store_adds_every_number_once(self, operations):
        before, gradient = numbers(2, 5_000_001, "bfloat16"), numbers(3, 4_999_990)
        found = operations.store(operations.host(before), operations.device(gradient), 5, accumulate=True)
        expected = before.copy()
        expected[5:-6] = (before[5:-6].astype(np.float32) + gradient).astype(before.dtype)
        check_same(found, expected)


class TestProducts(PanelSuite):
    @pytest.mark.parametrize("transpose", [False, True])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("m", [1, 4, 5, 16, 17, 128, 1000])
    def test_a_large_product_is_right_for_any_number_of_rows(self, operations, transpose, dtype, m):
        k, n = 1024, 3072
        x, w = numbers(4, (m, k), dtype), numbers(5, (n, k) if transpose else (k, n), dtype)
        vector = operations.host(w.reshape(-1))
        options = {"transpose": transpose, "scratch_bytes": 4 << 20}
        found = operations.matmul(operations.device(x), vector, (k, n), **options)
        again = operations.matmul(operations.device(x), vector, (k, n), **options)
        check_product(found, x, w.T if transpose else w, dtype, operations.product_epsilon[dtype])
        check_same(found, again)

    @pytest.mark.parametrize("transpose", [False, True])
    def test_a_large_gradient_is_right(self, operations, transpose):
        m, k, n = 2048, 768, 3072
        x, dy = numbers(6, (m, k), "bfloat16"), numbers(7, (m, n), "bfloat16")
        destination = operations.host(np.zeros(k * n, np.float32))
        found = operations.matmul_gradient(
            destination, operations.device(x), operations.device(dy), transpose=transpose, scratch_bytes=4 << 20
        )
        left, right = (dy, x) if transpose else (x, dy)
        shape = (n, k) if transpose else (k, n)
        check_product(np.asarray(found).reshape(shape), left.T, right, "float32", 2.0**-14)


class TestFerry(FerrySuite):
    def test_a_thread_that_has_waited_finds_what_was_stored(self, operations):
        array, before = operations.device(numbers(5, 10_000_000)), operations.host(np.zeros(10_000_000, np.float32))
        vector = jax.block_until_ready(operations.ferry_store([array], before, [0]))
        library("cuda").wait_for([vector.unsafe_buffer_pointer()], [vector.nbytes])
        check_same(pinned.as_numpy(vector), numbers(5, 10_000_000))

    def test_many_loads_on_the_way_all_arrive(self, operations):
        values = [numbers(seed, 1_000_000) for seed in range(8)]
        vectors = [operations.host(value) for value in values]
        for _ in range(5):
            arrays = []
            for vector in vectors:
                array = operations.device(np.zeros(1_000_000, np.float32))
                arrays += operations.load([vector], [array], vectors=[0], offsets=[0])
            for array, value in zip(operations.wait(*arrays), values):
                check_same(array, value)

    def test_a_store_holds_what_a_product_before_it_computed(self, operations):
        # The product is still on its way when the store is queued.
        x = operations.device(numbers(9, (4096, 4096)))
        product = jax.jit(lambda x: x @ x @ x)(x)
        vector = operations.host(np.zeros(4096 * 4096, np.float32))
        stored = operations.ferry_store([product], vector, [0])
        (found,) = operations.wait(stored)
        check_same(np.asarray(found).reshape(4096, 4096), product)


class TestMarks(MarkSuite):
    @pytest.fixture
    def marks(self, library):
        return NativeLibrary("CUDA", ctypes.CDLL(str(library)))

    def test_a_program_lasts_as_long_as_the_device_takes(self, operations, marks, tokens):
        x, token = operations.device(numbers(10, (8192, 8192))), tokens()
        product = jax.jit(lambda x: x @ x @ x @ x)
        jax.block_until_ready((product(x), operations.mark(token)))
        begin_s = time.perf_counter()
        jax.block_until_ready(operations.mark(token, product(x)))
        took_s = time.perf_counter() - begin_s
        (start_s, end_s) = self.read(marks, (token, 1))[0]
        # The stream has been empty for a while, so that only the host knows when it was given this program.
        assert end_s - max(start_s, begin_s) == pytest.approx(took_s, abs=1e-3)


def test_vectors_of_more_than_two_to_the_31_numbers_are_addressed_rightly(operations):
    columns, rows = 1 << 10, (1 << 21) + 3
    zeros = jax.jit(lambda: jnp.zeros(rows * columns, jnp.bfloat16), out_shardings=operations.memories["pinned_host"])
    row, offset = numbers(8, columns, "bfloat16"), (rows - 1) * columns
    vector = operations.store(zeros(), operations.device(row), offset)
    found = operations.gather(vector, operations.device(np.array([rows - 1, 0], np.int32)), 0, rows, columns)
    check_same(found, np.stack([row, np.zeros_like(row)]))
    (again,) = operations.read(vector, [(columns,)], [offset])
    check_same(again, row)


def test_our_declarations_of_cublaslt_are_those_of_its_header(tmp_path):
    cuda_build.configure(tmp_path)
    cache = dict(
        line.split("=", 1) for line in (tmp_path / "CMakeCache.txt").read_text().splitlines() if "=" in line[1:]
    )
    nvcc = next(value for key, value in cache.items() if key.startswith("JAXFERRY_NVCC:"))
    headers = [pathlib.Path(nvcc).resolve().parents[1] / "include", pathlib.Path("/usr/local/cuda/include")]
    headers += [parent / "nvidia" / "cu13" / "include" for parent in pathlib.Path(jax.__file__).parents]
    includes = [f"-I{header}" for header in headers if header.is_dir()]
    source = pathlib.Path(__file__).parent / "cublaslt_header.cc"
    cuda_build.run("g++", "-std=c++17", "-fsyntax-only", f"-I{SOURCES}", *includes, source)
