"""What tasks of an accelerator take: what they occupy their lane for, whatever the calls around them take."""

import time
import types

import jax.numpy as jnp
import numpy as np
import pytest

from accelerator import emulate
from jaxferry.costs.timers import Effort, median_s
from jaxferry.engine import make_placement
from jaxferry.native import library
from jaxferry.partition import RowGradient, partition
from jaxferry.settings import own_settings
from jaxferry.training.measure.cold_caches import cold_caches
from jaxferry.training.measure.device_timer import DeviceTimer, device_timer
from jaxferry.training.measure.microbenchmarks import host_sum_subject, load_subject, offload_subject
from jaxferry.training.measure.samples import made_on_device, sample, sample_gradient
from jaxferry.transport.ferry import Ferry

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
    monkeypatch.setattr("jaxferry.training.measure.cold_caches.host_cache_bytes", lambda: 2**24)
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


class Device:
    """A device that runs what is issued in order, and a host whose calls take time; both have one clock."""

    def __init__(self, calls_s, emptying_s):
        self.now = self.free = 0.0
        self.calls_s, self.emptying_s = calls_s, emptying_s

    def issue(self, seconds, call_s):
        self.now += call_s
        self.free = max(self.free, self.now) + seconds
        return [np.zeros(1)]

    def empty_caches(self):
        return self.issue(self.emptying_s, 1e-5)[0]

    def begin(self):
        return Marked(self)


class Marked:
    def __init__(self, device):
        self.device, self.ends = device, {}

    def after(self, index, results):
        self.device.issue(0.0, 2e-5)
        self.ends[index] = self.device.free

    def times(self):
        self.device.now = max(self.device.now, self.device.free) + self.device.calls_s
        return {index: (float("nan"), end) for index, end in self.ends.items()}


@pytest.mark.parametrize("emptying_s", [1e-4, 3e-3])
@pytest.mark.parametrize("call_s", [1e-5, 1e-3, 1e-2])
@pytest.mark.parametrize("seconds", [2e-6, 5e-4, 0.5])
def test_a_program_takes_what_the_device_takes_and_not_what_its_call_takes(seconds, call_s, emptying_s, monkeypatch):
    device, module = Device(8e-4, emptying_s), "jaxferry.training.measure.device_timer"
    monkeypatch.setattr(f"{module}.MOST_RETRIES", 8)

    def clock():
        return device.now

    monkeypatch.setattr(f"{module}.Marks", lambda *_: device)
    monkeypatch.setattr(f"{module}.cold_caches", lambda where: device.empty_caches)
    monkeypatch.setattr(f"{module}.status", lambda platform: types.SimpleNamespace(is_available=False))
    timer = DeviceTimer(types.SimpleNamespace(platform="gpu", device=None, host_compute=None), clock)
    once = timer.program(lambda: device.issue(seconds, call_s), lambda: ())
    assert median_s(once, Effort().at_most(15), clock) == pytest.approx(seconds, rel=0.02)
    assert once() == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((65_521,), jnp.float32), ((2, 3, 30_011), jnp.bfloat16), ((3, 70_001), jnp.int32), ((), jnp.bfloat16)],
)
def test_numbers_that_a_device_makes_are_those_of_the_host(shape, dtype):
    where = make_placement().device
    expected = np.asarray(sample(jnp.zeros(shape, dtype), where))

    made = made_on_device(shape, np.dtype(dtype), where)()
    assert made.dtype == dtype and np.array_equal(np.asarray(made), expected)


@pytest.mark.parametrize("is_sorted", [False, True])
def test_rows_of_lookups_belong_to_rows_all_over_the_table(is_sorted):
    scatter, num_rows = types.SimpleNamespace(params={"indices_are_sorted": is_sorted}), 50
    shapes = [jnp.zeros((2, 10, 1), jnp.int32), jnp.zeros((2, 10, 3), jnp.float32)]
    made = sample_gradient(RowGradient(*shapes, scatter, (num_rows, 3), np.dtype("f4")), make_placement().device)
    indices = np.asarray(made.indices).reshape(-1)
    assert made.indices.dtype == jnp.int32 and made.rows.shape == (2, 10, 3)
    assert len(set(indices.tolist())) == len(indices) and 0 <= indices.min() < 10 and 40 <= indices.max() < num_rows
    assert (sorted(indices) == indices.tolist()) == is_sorted
