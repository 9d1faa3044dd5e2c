"""Copies that run while XLA computes: the CPU's queues and their link emulator."""

import ctypes
import itertools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxferry.native import library
from native.native_operations import Operations
from native.operations_suite import MarkSuite
from native_calls import add, load, store, wait
from python_runs import run_python

# Tests keep arrays alive until their copies have ended: XLA reuses the memory of unreferenced results.

NUM_BYTES = 1 << 20


@pytest.fixture
def vector():
    return jnp.asarray(np.random.default_rng(0).normal(size=NUM_BYTES // 4).astype(np.float32))


@pytest.fixture
def stopped(cpu):
    """A link that carries a piece and then nothing for hours, each way, until the test opens it."""
    cpu.set_bandwidth("load", 1.0)
    cpu.set_bandwidth("store", 1.0)
    return cpu


def open_link(native, *directions):
    for direction in directions or ("load", "store"):
        native.set_bandwidth(direction, 0)


def fresh(vector):
    return jax.block_until_ready(jnp.zeros_like(vector) - 1)


def last_number(array):
    """The last number of an array where it lies: a NumPy view would keep XLA from handing the memory on."""
    return ctypes.c_float.from_address(array.unsafe_buffer_pointer() + array.nbytes - 4).value


def test_a_load_and_a_wait_return_while_the_copy_is_under_way(stopped, vector):
    [array] = jax.block_until_ready(load([vector], [fresh(vector)]))
    [array], _ = wait([array])
    assert last_number(array) == -1.0
    assert not array.is_ready()
    open_link(stopped)
    np.testing.assert_array_equal(array, vector)


@pytest.mark.parametrize("opened", ["load", "store"])
def test_loads_and_stores_have_links_of_their_own(stopped, vector, opened):
    [array], host = load([vector], [fresh(vector)]), store([vector], fresh(vector))
    moved, other = (array, host) if opened == "load" else (host, array)
    open_link(stopped, opened)
    [moved], _ = wait([moved])
    np.testing.assert_array_equal(moved, vector)
    assert last_number(other) == -1.0
    open_link(stopped)
    stopped.synchronize()


def test_a_link_that_is_opened_carries_the_next_copy_at_once(stopped):
    """It forgets for how long the slow link would have been busy, also after a copy of one piece."""
    small = jnp.arange(1024, dtype=jnp.float32)
    for _ in range(2):
        stopped.set_bandwidth("store", 1.0)
        host = store([small], fresh(small))
        while last_number(host) == -1.0:
            pass
        open_link(stopped)
        host, *_ = wait([host])[0]
        np.testing.assert_array_equal(host, small)


def test_a_source_is_waited_for_as_well(stopped, vector):
    source = fresh(vector) + vector
    array = load([source], [fresh(vector)])
    [waited], _ = wait([source])
    assert not waited.is_ready()
    open_link(stopped)
    waited.block_until_ready()
    assert last_number(array[0]) == last_number(waited)


def test_a_thread_waits_for_copies_of_its_arrays_alone(stopped, vector):
    host, other = jax.block_until_ready((store([vector], fresh(vector)), fresh(vector)))
    seen = []

    def look():
        stopped.wait_for([host.unsafe_buffer_pointer()], [host.nbytes])
        seen.append(last_number(host))

    waiting = threading.Thread(target=look)
    waiting.start()
    stopped.wait_for([other.unsafe_buffer_pointer()], [other.nbytes])
    stopped.wait_for([], [])
    assert not seen
    open_link(stopped)
    waiting.join()
    assert seen == [float(vector[-1])]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_copies_of_one_direction_run_in_the_order_of_their_calls(cpu, dtype):
    cpu.set_delay(1e-3, seed=1)
    host = jnp.zeros(1000, dtype)
    numbers = [jnp.full(1000, number, dtype) for number in range(40)]
    for number in numbers:
        host = store([number], host)
    host = add([numbers[3]], host)
    [host], _ = wait([host])
    np.testing.assert_array_equal(host, jnp.full(1000, 42, dtype))


def test_a_process_ends_with_copies_queued(cpu):
    run_script("")


def test_a_forked_process_has_queues_of_its_own(cpu):
    # The child must not use XLA, whose threads it does not have.
    run_script("""
child = os.fork()
if child == 0:
    native.synchronize()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""")


def run_script(body):
    """Runs Python in a process that has copies queued which would take months."""
    script = f"""
import os, jax, jax.numpy as jnp
from jaxferry.native import library
from native_calls import load
native = library("cpu")
native.set_bandwidth("load", 1.0)
source = jnp.ones(2_500_000)
array = load([source], [jnp.zeros(2_500_000)])
{body}
"""
    run_python("-c", script)


MARKED_BYTES = 1 << 20
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
        marks.set_bandwidth("load", MARKED_BYTES / SECONDS)
        size = MARKED_BYTES // 4 // num_parts
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
