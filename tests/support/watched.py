"""Counts device memory during steps, from JAX's own list of live arrays, and the programs that are compiled."""

import collections
import contextlib
import gc
import itertools
import math
import threading
import time
from unittest import mock

import jax
import optax

import jaxferry
from accelerator import COUNTING, is_ready
from jaxferry.engine import StepGradients, StreamingStep
from jaxferry.transport import DeviceLayer
from steps import transport_of

SCALARS_BYTES = 256
"""What losses, norms and flags take, which live for a moment longer or shorter from run to run."""


def live_arrays():
    """The arrays of all platforms; by itself, JAX lists those of the default one."""
    platforms = {"cpu", jax.default_backend()}
    return [array for platform in sorted(platforms) for array in jax.live_arrays(platform)]


def device_arrays():
    return [a for a in live_arrays() if a.sharding.memory_kind == "device" and not a.is_deleted()]


def live_pinned_bytes():
    """The bytes of arrays in pinned memory, of which some are views of others; of one device each.

    Other tests may have left arrays of several devices.
    """
    there = [array for array in live_arrays() if array.sharding.memory_kind == "pinned_host"]
    there = [array for array in there if not array.is_deleted() and len(array.sharding.device_set) == 1]
    return sum({array.unsafe_buffer_pointer(): array.nbytes for array in there}.values())


def _buffer(array):
    """What tells the array's memory from that of others; None if another thread has deleted it meanwhile.

    While `jax.device_put` copies to another kind of memory, two arrays have the same buffer. JAX waits for an array
    before it tells the address, and a count must not wait for the step.
    """
    if len(array.sharding.device_set) > 1:
        return id(array)
    try:
        return array.unsafe_buffer_pointer() if is_ready(array) else id(array)
    except RuntimeError:
        return None


def device_bytes(known, size=lambda array: array.nbytes):
    """Bytes of the arrays on the device whose identities are not known.

    Threads that count take turns: the list of one would keep alive what the step has dropped, and another would see it.
    """
    with COUNTING:
        found = {_buffer(array): size(array) for array in device_arrays() if id(array) not in known}
    return sum(found[buffer] for buffer in found if buffer is not None)


def most_on_one_device(train):
    """Calls a function; returns the most bytes that new arrays take on one device after any program of its steps."""
    held, run = [0], jax.stages.Compiled.__call__
    # These arrays stay alive here, so that no new one has the identity of one that an earlier test has left.
    before = {id(array): array for array in device_arrays()}

    def called(program, *arguments):
        made = run(program, *arguments)
        held.append(device_bytes(before, lambda x: math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize))
        return made

    with mock.patch.object(jax.stages.Compiled, "__call__", called):
        train()
    return max(held)


def settled(count):
    """What a function returns once it stays the same: threads that see copies end hold some arrays for longer."""
    counts = [None]
    while len(counts) < 4 or len(set(counts[-3:])) > 1:
        time.sleep(0.02)
        gc.collect()
        counts.append(count())
    return counts[-1]


def becomes(condition, within_s=30):
    """Whether a condition holds, now or before long: on a busy machine a thread may hold its last array for a while."""
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
        gc.collect()
    return True


class Watch:
    """Counts device bytes whenever a load or a program has been issued, on whichever lane's thread issued it.

    Attributes:
      most: the most bytes of arrays that were not there before the step, or belong to RESIDENT copies or to those that
        have been loaded for it ahead.
      most_parameters: the most bytes among them of parameters.
    """

    def __init__(self, step, batch, monkeypatch):
        transport, self._known = transport_of(step, batch), dict[int, jax.Array]()
        self.most = self.most_parameters = 0
        moves = [(transport, "load"), (transport, "store"), (StepGradients, "receive")]
        for owner, name in (*moves, (StreamingStep, "load"), (StreamingStep, "update")):
            monkeypatch.setattr(owner, name, self._watched(getattr(owner, name)))
        self._held, self._lock = {}, threading.Lock()

    def start(self, state):
        arrays = [a for held in state.resident.values() for a in held.arrays]
        arrays += [] if state.prefetch is None else state.prefetch.copies.arrays
        own = {id(a) for a in arrays}
        self._known = {id(a): a for a in device_arrays() if id(a) not in own}
        self.most = self.most_parameters = 0

    def _watched(self, function):
        def call(*args):
            self.count()
            result = function(*args)
            if isinstance(result, DeviceLayer):
                with self._lock:
                    self._held[id(result)] = result
            self.count()
            return result

        return call

    def count(self):
        with self._lock:
            self.most = max(self.most, device_bytes(self._known))
            arrays = itertools.chain.from_iterable(held.arrays for held in self._held.values())
            self.most_parameters = max(self.most_parameters, sum(a.nbytes for a in arrays if not a.is_deleted()))


def watched_steps(task, monkeypatch, num_steps=2, made=None, **options):
    step = jaxferry.train_step(task.loss_fn, optax.adamw(1e-3), **options)
    state = step.init(task.params)
    watch = Watch(step, task.batch, monkeypatch)
    if made is not None:
        made(watch)
    state, _ = step(state, task.batch)
    for _ in range(num_steps):
        state.block_until_ready()
        watch.start(state)
        state, metrics = step(state, task.batch)
    return watch, metrics, step.prepare(task.batch), state


@contextlib.contextmanager
def compiled(caplog):
    """The names of the functions that the body compiles, in all threads, each as often as it is compiled."""

    def control(x):
        return x + 7

    found = collections.Counter()
    caplog.clear()
    jax.config.update("jax_log_compiles", True)
    try:
        jax.jit(control)(1.0)
        yield found
    finally:
        jax.config.update("jax_log_compiles", False)
    found.update(str(record.args[0])[4:-1] for record in caplog.records if record.msg.startswith("Compiling"))
    assert found.pop("control", 0), "compilation is not logged"
