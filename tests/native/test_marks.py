"""Marks of the CPU's library: the times of tasks that are only issued, without a GPU."""

import itertools
import time

import jax
import numpy as np
import pytest

from jaxferry.native import library
from native.native_operations import Operations
from native.operations_suite import MarkSuite

NUM_BYTES = 1 << 20
SECONDS = 0.02  # on the emulated link's own clock, which runs ahead of what it has to wait for


@pytest.fixture(scope="module")
def operations():
    library("cpu")  # registers what the operations call
    return Operations(jax.devices("cpu")[0], "jaxferry_", {})


class TestMarks(MarkSuite):
    @pytest.fixture
    def marks(self, cpu):
        return cpu

    @pytest.mark.parametrize("num_parts", [1, 16])
    def test_loads_take_the_time_that_the_emulated_link_takes(self, operations, marks, tokens, num_parts):
        marks.set_bandwidth("load", NUM_BYTES / SECONDS)
        size = NUM_BYTES // 4 // num_parts
        vector = operations.host(np.ones(size, np.float32))
        arrays, made = [operations.device(np.zeros(size, np.float32)) for _ in range(num_parts)], []
        for array in arrays:
            made.append((tokens(), operations.load([vector], [array], vectors=[0], offsets=[0])))
            jax.block_until_ready(operations.mark(made[-1][0], *made[-1][1], queue=1))
        jax.block_until_ready([operations.wait(*loaded) for _, loaded in made])
        now_s, spans = time.perf_counter(), self.read(marks, *((token, 0) for token, _ in made))
        assert spans[-1][1] <= now_s
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
        assert sum(end_s - start_s for start_s, end_s in spans) == pytest.approx(SECONDS)
