"""Prints what the machine is: versions, memories, pinned addresses, and rates of copies. A stage of check.py."""

import ctypes
import os
import sys
import time

import jax
import jaxlib
import numpy as np

from benchmarks.gpu.stages import emit
from jaxferry.transport import make_placement, pinned

MIB = (1, 64, 512)


class PointerAttributes(ctypes.Structure):
    """`cudaPointerAttributes` of the CUDA runtime; the type is 0 unregistered, 1 host, 2 device, 3 managed."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("device_address", ctypes.c_void_p),
        ("host_address", ctypes.c_void_p),
        ("reserved", ctypes.c_long * 8),
    )


def attributes_of(addresses):
    """The attributes of addresses by name, from the CUDA runtime that JAX has loaded; None without one."""
    with open("/proc/self/maps") as maps:
        paths = sorted({line.split()[-1] for line in maps if "libcudart" in line})
    if not paths:
        return None
    runtime, found = ctypes.CDLL(paths[0]), {}
    for name, address in addresses.items():
        attributes = PointerAttributes()
        status = runtime.cudaPointerGetAttributes(ctypes.byref(attributes), ctypes.c_void_p(address))
        keys = ("type", "device", "device_address", "host_address")
        found[name] = {"status": status, "address": address} | {key: getattr(attributes, key) for key in keys}
    return found


def best_bytes_per_s(num_bytes, put):
    """The rate of a copy: the best of three after one that is not timed."""
    jax.block_until_ready(put())
    seconds = []
    for _ in range(3):
        start_s = time.perf_counter()
        made = jax.block_until_ready(put())
        seconds.append(time.perf_counter() - start_s)
        for array in jax.tree.leaves(made):
            if isinstance(array, jax.Array):
                array.delete()
    return num_bytes / min(seconds)


def rates(placement, mib):
    """Rates between NumPy, pinned memory, the device and the CPU's client, in bytes per second."""
    array = np.ones(mib << 18, np.float32)
    on_host = jax.device_put(array, placement.pinned)
    on_device = jax.device_put(array, placement.device)
    allocate = jax.jit(lambda: jax.numpy.zeros(array.shape), out_shardings=placement.pinned)
    ways = {
        "numpy_to_pinned": lambda: jax.device_put(array, placement.pinned),
        "pinned_to_device": lambda: jax.device_put(on_host, placement.device),
        "device_to_pinned": lambda: jax.device_put(on_device, placement.pinned),
        "pinned_to_cpu_client": lambda: jax.device_put(on_host, placement.host, may_alias=False),
        "new_pinned_zeros": allocate,
    }
    if pinned.can_view(placement):
        copy = np.empty_like(array)
        ways["view_of_pinned_to_numpy"] = lambda: np.copyto(copy, pinned.as_numpy(on_host))
        ways["numpy_to_view_of_pinned"] = lambda: np.copyto(pinned.as_numpy(on_host), array)
    return {name: best_bytes_per_s(array.nbytes, put) for name, put in ways.items()}


def main():
    most_mib = int(sys.argv[1]) if len(sys.argv) > 1 else MIB[-1]
    device, placement = jax.devices()[0], make_placement()
    emit(
        jax=jax.__version__,
        jaxlib=jaxlib.__version__,
        python=sys.version.split()[0],
        device=device.device_kind,
        memories=[memory.kind for memory in device.addressable_memories()],
        memory_stats=device.memory_stats(),
        num_cpus=os.cpu_count(),
        environment={name: os.environ.get(name) for name in ("XLA_FLAGS", "JAX_PLATFORMS", "JAXFERRY_NATIVE_DIR")},
    )
    vector = jax.block_until_ready(jax.device_put(np.ones(1 << 20, np.float32), placement.pinned))
    [view] = pinned.on_cpu([vector], placement)
    emit(
        can_view=pinned.can_view(placement),
        is_the_same_memory=view.unsafe_buffer_pointer() == vector.unsafe_buffer_pointer(),
        alignment=(vector.unsafe_buffer_pointer() & -vector.unsafe_buffer_pointer()),
    )
    plain = np.ones(1 << 20, np.float32)
    on_device = jax.block_until_ready(jax.device_put(plain, placement.device))
    addresses = {"pinned": vector.unsafe_buffer_pointer(), "numpy": plain.ctypes.data}
    emit(pointer_attributes=attributes_of(addresses | {"device": on_device.unsafe_buffer_pointer()}))
    for mib in MIB:
        if mib <= most_mib:
            emit(mib=mib, bytes_per_s=rates(placement, mib))


if __name__ == "__main__":
    main()
