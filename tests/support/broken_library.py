"""Native operations that are broken: they do nothing, or fail."""

import ctypes
import functools
import os
import subprocess

import jax

from built import built_once
from jaxferry.native import TARGETS

FAULTS = ("silent", "failing")

SOURCE = """
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;

static ffi::Error DoNothing(ffi::RemainingArgs, ffi::RemainingRets) { return ffi::Error::Success(); }
static ffi::Error Fail(ffi::RemainingArgs, ffi::RemainingRets) { return ffi::Error::Internal("it is broken"); }

XLA_FFI_DEFINE_HANDLER_SYMBOL(silent, DoNothing, ffi::Ffi::Bind().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(failing, Fail, ffi::Ffi::Bind().RemainingArgs().RemainingRets());
"""


def build(folder):
    """Compiles the handlers into `folder`."""
    source = folder / "broken.cc"
    source.write_text(SOURCE)
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-w", "-shared", "-fPIC", "-isystem", jax.ffi.include_dir()]
    subprocess.run([*command, str(source), "-o", str(folder / "libbroken.so")], check=True)


@functools.cache
def _register():
    library = ctypes.CDLL(str(built_once("broken", build) / "libbroken.so"))
    for fault in FAULTS:
        jax.ffi.register_ffi_target(f"test_{fault}", jax.ffi.pycapsule(getattr(library, fault)), platform="cpu")


def break_operations(monkeypatch, fault, *operations):
    """Makes programs call a broken operation in place of these, named as "ferry_load"; of all without names."""
    _register()
    broken = {f"jaxferry_{name}" for name in operations} or set(TARGETS)
    ffi_call = jax.ffi.ffi_call

    def call(name, *args, **kwargs):
        return ffi_call(f"test_{fault}" if name in broken else name, *args, **kwargs)

    monkeypatch.setattr(jax.ffi, "ffi_call", call)
