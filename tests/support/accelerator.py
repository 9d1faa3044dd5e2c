"""An emulated accelerator, as strict as a real one.

It is a second CPU device with memories of its own, for which one thread issues the work. Arrays of two devices do not
mix in one program, as those of an accelerator's client and of the CPU backend do not. Beside that:

- Copies between its client and the CPU backend are synchronous and slow (`CLIENT_BYTES_PER_S`).
- It lags behind the thread that issues for it: each batch arrives late (`_late`), and programs wait in a queue. The
  queue is that of JAX's CPU client, which holds 32 programs: one more blocks the thread.
- Pinned memory is free as soon as its array is deleted or dropped, whatever the queue still does with it. A deleted
  array is overwritten first, so a program that still reads it computes with NaN. An array that a queued program still
  writes must not be deleted, and one that a queued program reads must not be dropped: both raise.
- The native library waits for copies only at addresses that lie in live pinned arrays.
"""

import contextlib
import ctypes
import dataclasses
import functools
import os
import pathlib
import threading
import time
import traceback
import weakref

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.array import ArrayImpl

from jaxferry.native import NativeLibrary
from jaxferry.training import entry
from jaxferry.transport import Placement, make_placement

CLIENT_BYTES_PER_S = 2.5e9
"""The rate of a copy between two clients: DESIGN.md, section 5.3, measured 2 to 3 GB/s."""

_WIDTH, _PRODUCTS = 128, 16
_ISSUING = "jaxferry H2D+"
_FOR_COPIES_OF_THE_RUNTIME = {("copies.py", "wait"), ("device_put.py", "arrive")}
"""Where `device_put` waits until copies of the runtime have ended, so that memory which they read is free at once."""
IS_DEFAULT = os.environ.get("JAXFERRY_TESTS_DEVICE") == "accelerator"
"""Whether the tests of the engine train on the emulated accelerator."""
_PUT, _JIT, _BLOCK = jax.device_put, jax.jit, jax.block_until_ready
_DELETE, _BLOCK_ONE, _CALL = ArrayImpl.delete, ArrayImpl.block_until_ready, jax.stages.Compiled.__call__
COUNTING = threading.Lock()
"""Held by whoever lists all arrays: the list keeps them alive, and another one who counts would see them."""
_DELETING = threading.RLock()
_WAIT_FOR, _SYNCHRONIZE = NativeLibrary.wait_for, NativeLibrary.synchronize


def is_ready(array):
    """`Array.is_ready`, also of an array that another thread deletes meanwhile: such a one is ready.

    JAX 0.10.2 reads freed memory then, and the process ends by a signal.
    """
    with _DELETING:
        return array.is_deleted() or array.is_ready()


def _delete(array):
    with _DELETING:
        _DELETE(array)


ArrayImpl.delete = _delete  # type: ignore[method-assign]


class Misuse(AssertionError):
    """Something that would be a race on a real accelerator."""


@dataclasses.dataclass
class Accelerator:
    """The emulated device.

    Attributes:
      placement: where arrays live.
      waits: the stack of each call by which the issuing thread waited for the device or the host.
    """

    placement: Placement
    waits: list = dataclasses.field(default_factory=list)
    _misuses: list = dataclasses.field(default_factory=list)
    _readers: dict = dataclasses.field(default_factory=dict)

    @property
    def device(self):
        (device,) = self.placement.device.device_set
        return device

    def check(self):
        """Raises the first misuse that was found where nothing could be raised."""
        if self._misuses:
            raise Misuse(self._misuses[0])

    def is_pinned(self, array):
        return array.sharding.memory_kind == "pinned_host" and array.sharding.device_set == {self.device}

    def launch(self, call, arguments, kept=None):
        """Runs a program; remembers what in pinned memory it reads until it has ended.

        Args:
          call: the program.
          arguments: what it is given.
          kept: the numbers of the leaves that it reads; None for all.
        """
        self.check()
        leaves = [leaf for i, leaf in enumerate(jax.tree.leaves(arguments)) if kept is None or i in kept]
        read = [leaf for leaf in leaves if _is_concrete(leaf) and self.is_pinned(leaf)]
        with _given(filter(self.is_pinned, filter(_is_concrete, jax.tree.leaves(arguments)))):
            made = call(*arguments)
        outputs = [weakref.ref(leaf) for leaf in jax.tree.leaves(made) if _is_concrete(leaf)]
        for array in read:
            if not array.is_deleted():
                self._note(array, outputs)
            else:  # a donated one lives on in a result
                self._hand_over(array, [leaf for leaf in jax.tree.leaves(made) if _is_concrete(leaf)])
        return made

    def _hand_over(self, array, results):
        """What still reads a donated array now reads its memory as that of a result."""
        earlier = self._readers.pop(id(array), [])
        for result in filter(self.is_pinned, results):
            for outputs in earlier:
                self._note(result, outputs)

    def put(self, value, device=None, **options):
        """`jax.device_put`, with the cost of a copy between clients, and late for batches."""
        arrays = [leaf for leaf in jax.tree.leaves(value) if _is_concrete(leaf)]
        devices = {device} if isinstance(device, jax.Device) else getattr(device, "device_set", None)
        crossing = [array for array in arrays if devices is not None and array.sharding.device_set != devices]
        if crossing:
            self.note_wait("a copy between clients")
            _BLOCK(crossing)
            time.sleep(sum(array.nbytes for array in crossing) / CLIENT_BYTES_PER_S)
        made = self.launch(functools.partial(_PUT, device=device, **options), (value,))
        is_given = not arrays or crossing
        if is_given and device == self.placement.device and not any(map(_is_traced, jax.tree.leaves(value))):
            return jax.tree.map(lambda leaf: _late(leaf)[0] if leaf.size else leaf, made)
        return made

    def delete(self, array):
        """`Array.delete`: pinned memory is anybody's from now on."""
        if not array.is_deleted() and self.is_pinned(array) and array.nbytes:
            if not is_ready(array):
                raise Misuse("pinned memory is deleted while the device still writes it")
            ctypes.memset(array.unsafe_buffer_pointer(), 0xFF, array.nbytes)
        _delete(array)

    def wait_for(self, library, addresses, sizes):
        """`NativeLibrary.wait_for`, only for memory that has been given to the library."""
        self.note_wait("the native library's copies")
        known = list(_pinned_memory())
        for address, size in zip(addresses, sizes, strict=True):
            if not any(start <= address and address + size <= end for start, end in known):
                raise Misuse(f"no pinned array has the {size} bytes at {address:#x}")
        _WAIT_FOR(library, addresses, sizes)

    def note_wait(self, what):
        """Notes a wait, if the calling thread is the one that issues, but for those of `device_put` for its copies."""
        if not threading.current_thread().name.startswith(_ISSUING):
            return
        frames = {(pathlib.PurePath(frame.filename).name, frame.name) for frame in traceback.extract_stack(limit=12)}
        if not frames & _FOR_COPIES_OF_THE_RUNTIME:
            self.waits.append(f"{what}\n{''.join(traceback.format_stack(limit=12))}")

    def _note(self, array, outputs):
        if id(array) not in self._readers:
            self._readers[id(array)] = []
            weakref.finalize(array, self._dropped, id(array)).atexit = False
        readers = self._readers[id(array)]
        readers[:] = [earlier for earlier in readers if _is_pending(earlier)]
        readers.append(outputs)

    def _dropped(self, key):
        if any(map(_is_pending, self._readers.pop(key, ()))):
            self._misuses.append("pinned memory is dropped while the device still reads it")


class _Program:
    """A function of `jax.jit` whose calls the accelerator sees, while there is one.

    Training steps keep them from one test to the next, and the package those that it makes once in a process.
    """

    accelerator = None

    def __init__(self, function):
        self._function = function

    def __call__(self, *arguments, **options):
        if self.accelerator is None:
            return self._function(*arguments, **options)
        return self.accelerator.launch(functools.partial(self._function, **options), arguments)

    def __getattr__(self, name):
        return getattr(self._function, name)


def emulate(monkeypatch):
    """Makes training steps train on an emulated accelerator; returns it."""
    host, device = jax.devices("cpu")[:2]
    on_host = make_placement(host)
    placement = dataclasses.replace(make_placement(device), host=on_host.host, host_compute=on_host.host_compute)
    accelerator = Accelerator(placement)

    def called(program, *arguments):
        kept = program._executable._kept_var_idx
        return accelerator.launch(functools.partial(_CALL, program), arguments, kept)

    monkeypatch.setattr(Placement, "is_cpu", property(lambda self: False))
    monkeypatch.setattr(entry, "make_placement", lambda *given: placement)
    monkeypatch.setattr(jax, "device_put", accelerator.put)
    monkeypatch.setattr(_Program, "accelerator", accelerator)
    monkeypatch.setattr(jax, "jit", lambda function, **options: _Program(_JIT(function, **options)))
    monkeypatch.setattr(jax.stages.Compiled, "__call__", called)
    monkeypatch.setattr(ArrayImpl, "delete", lambda array: accelerator.delete(array))
    monkeypatch.setattr(NativeLibrary, "wait_for", lambda self, *args: accelerator.wait_for(self, *args))
    for owner, name, function in (
        (jax, "block_until_ready", _BLOCK),
        (ArrayImpl, "block_until_ready", _BLOCK_ONE),
        (NativeLibrary, "synchronize", _SYNCHRONIZE),
    ):
        monkeypatch.setattr(owner, name, _noted(accelerator, name, function))
    for owner, name in ((np, "asarray"), (np, "array"), (jax, "device_get"), (ArrayImpl, "unsafe_buffer_pointer")):
        monkeypatch.setattr(owner, name, _noted_if_pending(accelerator, name, getattr(owner, name)))
    value = ArrayImpl._value.fget
    monkeypatch.setattr(ArrayImpl, "_value", property(_noted_if_pending(accelerator, "its value", value)))
    return accelerator


def _noted_if_pending(accelerator, name, function):
    """A function of arrays as the first argument, which waits for those that are not ready."""

    def waits(given, *args, **options):
        arrays = [given] if isinstance(given, ArrayImpl) else jax.tree.leaves(given) if name == "device_get" else ()
        if any(_is_concrete(each) and not is_ready(each) for each in arrays):
            accelerator.note_wait(name)
        return function(given, *args, **options)

    return waits


def _noted(accelerator, name, function):
    def waits(*args):
        accelerator.note_wait(name)
        return function(*args)

    return waits


@jax.jit
def _late(value, seed=0.01):
    """Returns the value once a program of some milliseconds has run: a program's results are ready at its end."""
    matrix = jnp.full((_WIDTH, _WIDTH), seed, jnp.float32)
    return value, jnp.sum(jax.lax.fori_loop(0, _PRODUCTS, lambda _, x: jnp.tanh(x @ x), matrix))


_ASKING = threading.Lock()
_GIVEN: dict[int, tuple[int, int]] = {}
"""Start and end of arrays that programs are given at the moment, by identity."""


def _memory_of(array):
    start = array.unsafe_buffer_pointer()
    return start, start + array.nbytes


@contextlib.contextmanager
def _given(arrays):
    """Notes the memory of arrays while they are given to a program, which may take it."""
    arrays = [array for array in arrays if not array.is_deleted() and is_ready(array)]
    with _ASKING:
        own = {id(array): _memory_of(array) for array in arrays}
        _GIVEN.update(own)
    try:
        yield
    finally:
        with _ASKING:
            for key in own:
                _GIVEN.pop(key, None)


def _pinned_memory():
    """Start and end of each live array in pinned memory that programs have made.

    JAX waits for an array before it tells the address, until no program is just taking its memory, and holds the lock
    that the callback of a program may need. A list of all arrays would keep alive what the step drops meanwhile.
    """
    with COUNTING:
        references = [weakref.ref(array) for array in jax.live_arrays("cpu")]
    for reference in references:
        array = reference()
        with contextlib.suppress(RuntimeError):  # another thread has deleted it
            if array is None or array.sharding.memory_kind != "pinned_host":
                continue
            with _ASKING:
                memory = _GIVEN.get(id(array)) or (_memory_of(array) if is_ready(array) else None)
            if memory is not None:
                yield memory


def _is_pending(outputs):
    """Whether a program has not ended, judged by those of its results that are still there."""
    arrays = [array for reference in outputs if (array := reference()) is not None]
    return not all(map(is_ready, arrays))


def _is_traced(leaf):
    return isinstance(leaf, jax.core.Tracer)


def _is_concrete(leaf):
    return isinstance(leaf, jax.Array) and not _is_traced(leaf)
