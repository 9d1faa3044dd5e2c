"""Marks of the CPU's library: what the engine knows of tasks that are only issued, where there is no GPU."""

import time

import jax
import numpy as np
import pytest

from native.native_operations import Operations
from native.operations_suite import MarkSuite

NUM_BYTES = 1 << 20
SECONDS = 0.02


@pytest.fixture(scope="module")
def operations():
    return Operations(jax.devices("cpu")[0], "jaxferry_", {})


class TestMarks(MarkSuite):
    @pytest.fixture
    def marks(self, cpu):
        return cpu

    def test_a_copy_takes_the_time_that_the_emulated_link_takes(self, operations, marks, tokens):
        marks.set_bandwidth("load", NUM_BYTES / SECONDS)
        size = NUM_BYTES // 4
        vector, array = operations.host(np.ones(size, np.float32)), operations.device(np.zeros(size, np.float32))
        token = tokens()
        for number in range(3):
            [array] = operations.load([vector], [array], vectors=[0], offsets=[0])
            jax.block_until_ready(operations.mark(token, array, queue=1))
            [array] = operations.wait(array)
            array.block_until_ready()
            now_s = time.perf_counter()
            [(start_s, end_s)] = self.read(marks, (token, number))
            assert end_s <= now_s
            assert end_s - start_s == pytest.approx(SECONDS)
