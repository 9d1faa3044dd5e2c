"""The CUDA library's own code, kernels and orders of streams, on an emulated device."""

import ctypes

import numpy as np
import pytest
from native import emulated_cuda
from native.native_operations import check_product, numbers
from native.operations_suite import CopySuite, FerrySuite, ProductSuite


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    library = emulated_cuda.build(tmp_path_factory.mktemp("emulated"))
    library.emulation_num_queued.restype = ctypes.c_long
    return library


@pytest.fixture(scope="module")
def operations(library):
    return emulated_cuda.register(library)


class TestCopies(CopySuite):
    pass


class TestProducts(ProductSuite):
    @pytest.mark.parametrize("seed", range(20))
    def test_no_order_that_the_events_allow_mixes_panels(self, operations, library, seed):
        library.emulation_seed(seed)
        k, n = 16, 200
        x, vector = numbers(1, (20, k), "bfloat16"), numbers(2, k * n)
        found = operations.matmul(
            operations.device(x), operations.host(vector), (k, n), transpose=bool(seed % 2), scratch_bytes=3000
        )
        w = vector.astype(x.dtype).reshape((n, k)).T if seed % 2 else vector.astype(x.dtype).reshape((k, n))
        check_product(found, x, w, "bfloat16", 2.0**-18)
        dy, before = numbers(3, (20, n), "bfloat16"), np.zeros(k * n, np.float32)
        gradient = operations.matmul_gradient(
            operations.host(before), operations.device(x), operations.device(dy), transpose=True, scratch_bytes=1500
        )
        check_product(np.asarray(gradient).reshape(n, k), dy.T, x, "float32", 2.0**-18)


class TestFerry(FerrySuite):
    def test_copies_are_queued_and_return_at_once(self, operations, library):
        library.emulation_seed(3)
        vector = operations.host(numbers(4, 1000))
        late = 0
        for _ in range(20):
            array = operations.device(np.zeros(1000, np.float32))
            (array,) = operations.load([vector], [array], vectors=[0], offsets=[0])
            array.block_until_ready()
            late += library.emulation_num_queued() > 0
            (array,) = operations.wait(array)
            np.testing.assert_array_equal(array, vector)
        assert late > 0
        library.emulation_synchronize()
        assert library.emulation_num_queued() == 0
