"""What tasks of an accelerator take: what they occupy their lane for, whatever the calls around them take."""

import dataclasses
import time
import types

import jax.numpy as jnp
import numpy as np
import pytest

from accelerator import emulate
from jaxferry.native import library
from jaxferry.partition import partition
from jaxferry.settings import own_settings
from jaxferry.training import (
    UNKNOWN_BYTES,
    Copy,
    DeviceTimer,
    Effort,
    GradientStore,
    cold_caches,
    device_timer,
    host_cache_bytes,
    load_subject,
    made_on_device,
    median_s,
    sample,
)
from jaxferry.transport import Ferry, make_placement
from models import chain

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
    monkeypatch.setattr("jaxferry.training.timers.host_cache_bytes", lambda: 2**24)
    accelerator = emulate(monkeypatch)
    params = {name: {"kernel": np.zeros((WIDTH, WIDTH), np.float32)} for name in "ab"}

    loss_fn = chain()

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
            "offload": GradientStore("ferry", placement, layer, gradients, False).offload().time(FEW),
        }
    finally:
        for direction in ("load", "store"):
            cpu.set_bandwidth(direction, 0)
    for what, found in seconds.items():
        assert 0.95 * LINK_S <= found < CALL_S, what
    assert GradientStore("ferry", placement, layer, gradients, True).on_host().time(FEW) >= CALL_S


class Device:
    """A device that runs what is issued in order, and a host whose calls take time; both have one clock.

    The device runs faster for the first tenth of a second after a pause.
    """

    def __init__(self, calls_s, emptying_s):
        self.now = self.free = self.since = self.products_s = 0.0
        self.calls_s, self.emptying_s = calls_s, emptying_s

    def issue(self, seconds, call_s):
        self.now += call_s
        if self.now > self.free:
            self.since = self.free = self.now
        self.free += seconds * (0.86 if self.free - self.since < 0.1 else 1.0)
        return [np.zeros(1)]

    def arguments(self, call_s):
        """Made by the device, behind what was issued before."""
        self.issue(1e-5, call_s)
        return [Argument(self, self.free)]

    def empty_caches(self):
        return self.issue(self.emptying_s, 1e-5)[0]

    def multiply(self):
        self.products_s += PRODUCTS_S
        return self.issue(PRODUCTS_S, 1e-5)[0]

    def begin(self):
        return Marked(self)


PRODUCTS_S = 8e-4


@dataclasses.dataclass
class Argument:
    device: Device
    ready: float

    def block_until_ready(self):
        self.device.now = max(self.device.now, self.ready) + 2e-5
        return self


class Marked:
    def __init__(self, device):
        self.device, self.spans = device, {}

    def of(self, index):
        return self, index

    def after(self, index, results):
        self.device.issue(0.0, 2e-5)
        self.spans[index] = float("nan"), self.device.free

    def times(self):
        self.device.now = max(self.device.now, *(end for _, end in self.spans.values())) + self.device.calls_s
        return self.spans


@pytest.fixture
def timer_of(monkeypatch):
    """Makes the timer of a `Device`."""
    module = "jaxferry.training.timers"

    def make(device):
        monkeypatch.setattr(f"{module}.MOST_RETRIES", 8)
        monkeypatch.setattr(f"{module}.Marks", lambda *_: device)
        monkeypatch.setattr(f"{module}.cold_caches", lambda where: device.empty_caches if where else list)
        monkeypatch.setattr(f"{module}.products", lambda where: device.multiply, raising=False)
        monkeypatch.setattr(f"{module}.status", lambda platform: types.SimpleNamespace(is_available=False))
        placement = types.SimpleNamespace(platform="gpu", device="gpu", host_compute=None)
        return DeviceTimer(placement, lambda: device.now)

    return make


@pytest.mark.parametrize("emptying_s", [1e-4, 3e-3])
@pytest.mark.parametrize("call_s", [1e-5, 1e-3, 1e-2])
@pytest.mark.parametrize("seconds", [2e-6, 5e-4, 0.5])
def test_a_program_takes_what_it_takes_of_a_busy_device_and_not_what_its_call_takes(
    seconds, call_s, emptying_s, timer_of
):
    device = Device(8e-4, emptying_s)
    once = timer_of(device).program(lambda _: device.issue(seconds, call_s), lambda: device.arguments(3e-3))
    assert median_s(once, Effort().at_most(15), lambda: device.now) == pytest.approx(seconds, rel=0.02)
    assert once() == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize("num_pieces", [1, 4])
@pytest.mark.parametrize("call_s", [1e-4, 5e-3])
def test_a_copy_takes_what_its_link_takes_and_not_what_its_pieces_take_to_be_issued(num_pieces, call_s, timer_of):
    """A copy waits for the device's work so far, or only for that before its buffers were freed."""
    device, freed = Device(8e-4, 1e-4), []
    piece_s, issue_s = 4e-6, 1e-5

    def begin(source, mark):
        marked, index = mark
        device.now += call_s
        waits = freed.pop() if freed else device.free
        start = end = max(device.now, waits)
        for _ in range(num_pieces):
            device.now += issue_s
            end = max(end, device.now) + piece_s
        marked.spans[index] = start, end

    copy = Copy(lambda: np.zeros(1), begin, lambda begun: np.zeros(1), lambda begun: freed.append(device.free))
    once = timer_of(device).copy(copy)
    assert median_s(once, Effort().at_most(15), lambda: device.now) == pytest.approx(num_pieces * piece_s, rel=0.02)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((65_521,), jnp.float32), ((2, 3, 30_011), jnp.bfloat16), ((3, 70_001), jnp.int32), ((), jnp.bfloat16)],
)
def test_numbers_that_a_device_makes_are_those_of_the_host(shape, dtype):
    where = make_placement().device
    expected = np.asarray(sample(jnp.zeros(shape, dtype), where))

    made = made_on_device(shape, np.dtype(dtype), where)()
    assert made.dtype == dtype and np.array_equal(np.asarray(made), expected)


def described(folder, caches):
    """Linux's description of caches: (cpu, index, level, type, cpus that share it, size)."""
    for cpu, index, level, kind, shared, size in caches:
        cache = folder / f"cpu{cpu}" / "cache" / f"index{index}"
        cache.mkdir(parents=True)
        for name, text in (("level", level), ("type", kind), ("shared_cpu_list", shared), ("size", size)):
            (cache / name).write_text(f"{text}\n")
    return folder


def test_a_cache_that_processors_share_counts_once(tmp_path):
    own = [(cpu, 0, 1, kind, str(cpu), "32K") for cpu in (0, 1) for kind in ("Data",)]
    own += [(cpu, 1, 1, "Instruction", str(cpu), "64K") for cpu in (0, 1)]
    shared = [(cpu, 2, 3, "Unified", "0-1", "16M") for cpu in (0, 1)]
    assert host_cache_bytes(described(tmp_path, own + shared)) == 2 * 96 * 2**10 + 16 * 2**20


@pytest.mark.parametrize("size", ["", "many", "K"])
def test_caches_that_are_not_described_have_a_size_all_the_same(tmp_path, size):
    assert host_cache_bytes(described(tmp_path, [(0, 0, 1, "Data", "0", size)])) == UNKNOWN_BYTES
