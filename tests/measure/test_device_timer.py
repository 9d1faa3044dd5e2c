"""What tasks of an accelerator take: what they occupy their lane for, whatever the calls around them take."""

import time

import jax.numpy as jnp
import numpy as np
import pytest

from accelerator import emulate
from jaxferry.engine import ProgramKey, ProgramKind, Programs, derivatives_of, make_placement
from jaxferry.engine.transport.ferry import Ferry
from jaxferry.measure.cold_caches import cold_caches
from jaxferry.measure.device_timer import device_timer
from jaxferry.measure.microbenchmarks import host_sum_subject, load_subject, offload_subject, program_subject
from jaxferry.measure.samples import made_on_device, sample
from jaxferry.native import library
from jaxferry.partition import partition
from jaxferry.profiling.timers import Effort
from jaxferry.settings import own_settings

CALL_S = 0.08
LINK_S = 0.02
FEW = Effort(min_repetitions=3, max_repetitions=3)
WIDTH = 64


def slow(function):
    """The function, which returns much later."""

    def call(*arguments):
        made = function(*arguments)
        time.sleep(CALL_S)
        return made

    return call


@pytest.fixture
def timed(monkeypatch):
    """A partition on an emulated accelerator, whose caches take some 10 ms to empty."""
    monkeypatch.setattr("jaxferry.measure.cold_caches.host_cache_bytes", lambda: 2**24)
    accelerator = emulate(monkeypatch)
    params = {name: {"kernel": np.zeros((WIDTH, WIDTH), np.float32)} for name in "ab"}

    def loss_fn(params, x):
        for name in params:
            x = jnp.tanh(x @ params[name]["kernel"])
        return jnp.mean(x**2)

    with own_settings():
        yield accelerator.placement, partition(loss_fn, params, (np.zeros((4, WIDTH), np.float32),))
    device_timer.cache_clear()
    cold_caches.cache_clear()


def test_copies_take_what_the_link_takes_and_not_what_their_calls_take(timed, monkeypatch):
    placement, made = timed
    layer, cpu = made.layers[0], library("cpu")
    for name in ("load", "store", "gather"):
        monkeypatch.setattr(Ferry, name, slow(getattr(Ferry, name)))
    try:
        for direction in ("load", "store"):
            cpu.set_bandwidth(direction, layer.num_bytes / LINK_S)
        gradients = [jnp.zeros((WIDTH, WIDTH), jnp.float32)]
        seconds = {
            "load": load_subject("ferry", placement, layer).time(FEW),
            "offload": offload_subject("ferry", placement, layer, gradients, False).time(FEW),
        }
    finally:
        for direction in ("load", "store"):
            cpu.set_bandwidth(direction, 0)
    for what, found in seconds.items():
        assert 0.95 * LINK_S <= found < CALL_S, what
    assert host_sum_subject("ferry", placement, layer, gradients, True).time(FEW) >= CALL_S


def test_a_program_takes_what_the_device_takes_and_not_what_its_call_takes(timed, monkeypatch):
    monkeypatch.setattr("jaxferry.measure.device_timer.MOST_LEAD_S", 4 * CALL_S)
    placement, made = timed
    programs = Programs(made, derivatives_of(made, "none"), placement, native=True)
    key = ProgramKey(ProgramKind.FORWARD, made.segments[0].program)
    programs.require([key])

    class Slow:
        lowered = programs.lowered

        def __getitem__(self, key):
            return slow(programs[key])

    assert 0 < program_subject(Slow(), key, placement, "forward").time(FEW) < CALL_S


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((65_521,), jnp.float32), ((2, 3, 30_011), jnp.bfloat16), ((3, 70_001), jnp.int32), ((), jnp.bfloat16)],
)
def test_numbers_that_a_device_makes_are_those_of_the_host(shape, dtype):
    where = make_placement().device
    expected = np.asarray(sample(jnp.zeros(shape, dtype), where))

    made = made_on_device(shape, np.dtype(dtype), where)()
    assert made.dtype == dtype and np.array_equal(np.asarray(made), expected)
