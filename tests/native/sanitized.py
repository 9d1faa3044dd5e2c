"""A pytest plugin for runs under the thread sanitizer, with a native library built for it (tools/sanitize_steps).

The sanitizer sees neither XLA's synchronisation nor its computations. So before a task a thread makes a release, which
the native library's handlers acquire. After a wait for XLA, a thread acquires everything that handlers have released
so far (xla_ffi/common/sanitizer.h). Everything else that orders copies, products in host memory and updates is the
engine's own locks, which the sanitizer sees.

JAXFERRY_TEST_CARELESS=1 disables waits for XLA: there must be reports.
"""

import ctypes
import os

import jax

from jaxferry.engine import OPERATIONS, DeviceCopies
from jaxferry.native import find_library

_library = ctypes.CDLL(str(find_library("cpu").path))
_begun, _ended = (ctypes.cast(f, ctypes.c_void_p) for f in (_library.jaxferry_build_info, _library.jaxferry_abi))
_acquire, _release = (getattr(ctypes.CDLL(None), f"__tsan_{name}") for name in ("acquire", "release"))
_wait = jax.block_until_ready


def _wait_and_acquire(arrays):
    ready = _wait(arrays)
    _acquire(_ended)
    return ready


def _release_first(function):
    def call(*args):
        _release(_begun)
        return function(*args)

    return call


for _operation, _function in OPERATIONS.items():
    OPERATIONS[_operation] = _release_first(_function)
setattr(DeviceCopies, "load", _release_first(DeviceCopies.load))  # noqa: B010 - a type checker refuses to assign methods
jax.block_until_ready = _wait_and_acquire
if os.environ.get("JAXFERRY_TEST_CARELESS") == "1":
    jax.block_until_ready = lambda arrays: arrays
