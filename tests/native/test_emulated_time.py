"""The emulator under operations on host memory: their time is proportional to their bytes."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxferry.native import HostStep, StepFactors, StepPart, StepRule, library
from native.native_operations import Operations, numbers

ROWS, COLUMNS = 256, 512
NUM_BYTES = ROWS * COLUMNS * 4
SECONDS = 0.2
SILENT = 1.0  # bytes a second: what crosses such a link does not end before the test's limit


@pytest.fixture(scope="module")
def operations():
    library("cpu")  # registers what the operations call
    return Operations(jax.devices("cpu")[0], "jaxferry_", 2.0**-23)


def gather(operations, indices):
    table = operations.host(numbers(0, ROWS * COLUMNS))
    return lambda: operations.gather(table, operations.device(indices), 0, ROWS, COLUMNS)


def read(operations):
    vector = operations.host(numbers(0, ROWS * COLUMNS))
    return lambda: operations.read(vector, [(ROWS, COLUMNS // 2)] * 2, [0, ROWS * COLUMNS // 2])


def matmul(operations):
    x, w = operations.device(numbers(0, (8, ROWS))), operations.host(numbers(1, ROWS * COLUMNS))
    return lambda: operations.matmul(x, w, (ROWS, COLUMNS))


def store(operations):
    gradient = operations.device(numbers(0, ROWS * COLUMNS))
    return lambda: operations.store(operations.host(np.zeros(ROWS * COLUMNS, np.float32)), gradient)


def matmul_gradient(operations):
    x, dy = operations.device(numbers(0, (8, ROWS))), operations.device(numbers(1, (8, COLUMNS)))
    return lambda: operations.matmul_gradient(operations.host(np.zeros(ROWS * COLUMNS, np.float32)), x, dy)


def add_rows(operations):
    indices, rows = operations.device(np.arange(ROWS, dtype=np.int32)), operations.device(numbers(0, (ROWS, COLUMNS)))
    return lambda: operations.add_rows(operations.host(np.zeros(ROWS * COLUMNS, np.float32)), indices, rows, 0, ROWS)


def seconds_of(run):
    """Of a call whose program has run before. Never less than the link takes, however busy the machine."""
    jax.block_until_ready(run())
    start_s = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start_s


@pytest.mark.parametrize(
    ("make", "direction"),
    [
        (lambda operations: gather(operations, np.arange(ROWS, dtype=np.int32)), "load"),
        (read, "load"),
        (matmul, "load"),
        (store, "store"),
        (matmul_gradient, "store"),
        (add_rows, "store"),
    ],
    ids=["gather", "read", "matmul", "store", "matmul_gradient", "add_rows"],
)
def test_an_operation_on_host_memory_takes_as_long_as_its_bytes(cpu, operations, make, direction):
    run = make(operations)
    cpu.set_bandwidth("store" if direction == "load" else "load", SILENT)
    freely_s = seconds_of(run)
    cpu.set_bandwidth(direction, NUM_BYTES / (freely_s + SECONDS))
    assert freely_s + SECONDS <= seconds_of(run)


def test_only_the_rows_that_are_looked_up_cross_the_link(cpu, operations):
    few = [operations.device(np.zeros(1, np.int32)), operations.device(np.zeros(1, np.int32))]
    table = operations.host(numbers(0, 64 * ROWS * COLUMNS))
    # A row takes SECONDS, the table would take an hour.
    cpu.set_bandwidth("load", COLUMNS * 4 / SECONDS)
    assert seconds_of(lambda: operations.gather(table, few.pop(), 0, 64 * ROWS, COLUMNS)) >= SECONDS


def test_a_host_step_takes_as_long_as_its_bytes(cpu):
    size, dtypes = 1 << 14, [np.dtype(jnp.bfloat16)]
    gradient, copy = (np.ones(size, dtypes[0]) for _ in range(2))
    masters, first, second = ([np.ones(size, np.float32)] for _ in range(3))
    rule = StepRule("adam", b1=0.9, b2=0.99, eps=1e-8)
    factors = StepFactors(0)
    step = HostStep(rule, [StepPart(0, 0, False)], masters, [first, second], dtypes, dtypes, [], factors)
    step.gradients[0], step.copies[0] = gradient.ctypes.data, copy.ctypes.data
    cpu.set_bandwidth("load", SILENT)
    cpu.set_bandwidth("store", SILENT)
    cpu.set_bandwidth("host", 28 * size / SECONDS)  # two for the gradient and the copy, eight for each of the others
    assert seconds_of(step.run) >= SECONDS
