"""Copies that run while XLA computes: the CPU's queues and their link emulator."""

import ctypes
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from native_calls import add, ferry_load, load, store, wait

# What is queued is kept alive until it has been copied: a result that nobody holds is memory that XLA gives to others.

NUM_BYTES = 1 << 24
SECONDS = 0.3


@pytest.fixture
def vector():
    return jnp.asarray(np.random.default_rng(0).normal(size=NUM_BYTES // 4).astype(np.float32))


@pytest.fixture
def slow(cpu):
    """A link that takes SECONDS for NUM_BYTES, each way."""
    cpu.set_bandwidth("load", NUM_BYTES / SECONDS)
    cpu.set_bandwidth("store", NUM_BYTES / SECONDS)
    return cpu


def fresh(vector):
    return jax.block_until_ready(jnp.zeros_like(vector) - 1)


def last_number(array):
    """The last number of an array where it lies: a NumPy view would keep XLA from handing the memory on."""
    return ctypes.c_float.from_address(array.unsafe_buffer_pointer() + array.nbytes - 4).value


def load_and_wait(vector):
    array = fresh(vector)
    start = time.perf_counter()
    [array] = load([vector], [array])
    [array], _ = wait([array])
    array.block_until_ready()
    return array, time.perf_counter() - start


def test_a_load_takes_the_time_that_the_link_needs(slow, vector):
    array, _ = load_and_wait(vector)
    times_s = [load_and_wait(vector)[1] for _ in range(3)]
    assert min(abs(seconds - SECONDS) for seconds in times_s) <= 0.1 * SECONDS
    np.testing.assert_array_equal(array, vector)


def test_a_store_takes_the_time_that_the_link_needs(slow, vector):
    host = [fresh(vector)]

    def run():
        start = time.perf_counter()
        host[0] = store([vector], host[0])
        slow.synchronize()
        return time.perf_counter() - start

    run()
    assert min(abs(run() - SECONDS) for _ in range(3)) <= 0.1 * SECONDS
    np.testing.assert_array_equal(host[0], vector)


def test_many_small_loads_take_as_long_as_a_large_one(slow, vector):
    parts = [jax.block_until_ready(part) for part in jnp.split(vector, 64)]

    def run():
        arrays = [fresh(part) for part in parts]
        start = time.perf_counter()
        arrays = [load([part], [array]) for part, array in zip(parts, arrays, strict=True)]
        slow.synchronize()
        return time.perf_counter() - start

    run()
    assert min(abs(run() - SECONDS) for _ in range(3)) <= 0.1 * SECONDS


def test_loads_and_stores_have_links_of_their_own(slow, vector):
    def run():
        array, host = fresh(vector), fresh(vector)
        start = time.perf_counter()
        arrays = load([vector], [array]), store([vector], host)
        slow.synchronize()
        return time.perf_counter() - start, arrays

    assert min(run()[0] for _ in range(3)) < 1.5 * SECONDS


def test_a_load_returns_while_the_copy_is_under_way_and_a_wait_ends_when_it_has(slow, vector):
    load_and_wait(vector)
    array = fresh(vector)
    start = time.perf_counter()
    [array] = load([vector], [array])
    array.block_until_ready()
    loaded_s = time.perf_counter() - start
    early = last_number(array)
    [array], _ = wait([array])
    waiting_s = time.perf_counter() - start - loaded_s
    array.block_until_ready()
    assert loaded_s < 0.5 * SECONDS
    assert waiting_s < 0.5 * SECONDS
    assert early == -1.0
    assert last_number(array) == last_number(vector)


def test_what_is_computed_before_the_wait_overlaps_the_copy(slow, vector):
    compute = jax.jit(lambda x: jax.lax.fori_loop(0, 100, lambda _, y: jnp.tanh(y @ x), x))
    x = jnp.ones((128, 128))
    load_and_wait(vector)
    compute(x).block_until_ready()

    def run():
        array = fresh(vector)
        start = time.perf_counter()
        [array] = load([vector], [array])
        num_computed = 0
        while time.perf_counter() - start < 0.8 * SECONDS:
            compute(x).block_until_ready()
            num_computed += 1
        [array], _ = wait([array])
        array.block_until_ready()
        return num_computed, time.perf_counter() - start

    results = [run() for _ in range(3)]
    assert max(num_computed for num_computed, _ in results) >= 3
    assert min(seconds for _, seconds in results) < 1.3 * SECONDS


def test_a_wait_for_other_arrays_does_not_wait(slow, vector):
    jax.block_until_ready(wait([fresh(vector)]))

    def run():
        array, mine = load([vector], [fresh(vector)]), fresh(vector)
        start = time.perf_counter()
        jax.block_until_ready(wait([mine]))
        seconds = time.perf_counter() - start
        slow.synchronize()
        return seconds, array

    assert min(run()[0] for _ in range(3)) < 0.5 * SECONDS


def test_a_source_is_waited_for_as_well(slow, vector):
    load_and_wait(vector)

    def run():
        array, source = fresh(vector), fresh(vector)
        start = time.perf_counter()
        array = load([source], [array])
        jax.block_until_ready(wait([source]))
        return time.perf_counter() - start, array

    assert min(abs(run()[0] - SECONDS) for _ in range(3)) <= 0.1 * SECONDS


def test_parts_of_several_vectors_go_where_they_belong(cpu):
    vectors = [jnp.arange(10, dtype=jnp.float32), 100 + jnp.arange(20, dtype=jnp.float32)]
    arrays = [jnp.zeros((2, 3)), jnp.zeros(()), jnp.zeros((0, 4)), jnp.zeros(10)]
    gather = jax.jit(lambda v, a: ferry_load(v, a, where=[1, 0, 1, 0], offsets=[14, 9, 20, 0]), donate_argnums=1)
    arrays, _ = wait(gather(vectors, arrays))
    np.testing.assert_array_equal(arrays[0], 100 + np.arange(14, 20).reshape(2, 3))
    np.testing.assert_array_equal(arrays[1], 9)
    np.testing.assert_array_equal(arrays[3], np.arange(10))


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


def test_random_delays_change_no_result(cpu):
    cpu.set_delay(1e-3, seed=7)
    rng = np.random.default_rng(7)
    layers = [rng.normal(size=int(size)).astype(np.float32) for size in rng.integers(1, 5000, 8)]
    hosts = [jnp.asarray(layer) for layer in layers]
    gradients = [jnp.zeros_like(host) for host in hosts]
    expected = [np.zeros_like(layer) for layer in layers]
    use = jax.jit(lambda array: 2 * array + 1)
    for _ in range(8):
        order = rng.permutation(len(layers))
        loaded = {i: load([hosts[i]], [jnp.zeros_like(hosts[i])]) for i in order}
        stored = []
        for i in order:
            [array], _ = wait(loaded[i])
            stored.append(use(array))
            gradients[i] = add([stored[-1]], gradients[i])
            expected[i] += 2 * layers[i] + 1
        gradients = wait([*gradients, *stored])[0][: len(layers)]
    for gradient, numbers in zip(gradients, expected, strict=True):
        np.testing.assert_array_equal(gradient, numbers)


def test_a_process_ends_at_once_with_copies_queued(cpu):
    start_s, end_s = run_script("print(time.time(), flush=True)")
    assert end_s - start_s < 5


def test_a_forked_process_has_queues_of_its_own(cpu):
    # The child must not use XLA, whose threads it does not have.
    run_script("""
child = os.fork()
if child == 0:
    native.synchronize()
    os._exit(0)
print(time.time() + os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
""")


def run_script(body):
    """Runs Python in a process that has 100 s of copies queued; the time that it printed, and that of its end."""
    script = f"""
import os, time, jax, jax.numpy as jnp
from jaxferry.native import library
from native_calls import load
native = library("cpu")
native.set_bandwidth("load", 1e5)
source = jnp.ones(2_500_000)
array = load([source], [jnp.zeros(2_500_000)])
{body}
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return float(result.stdout), time.time()
