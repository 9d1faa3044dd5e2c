"""Shared by the benchmarks: facts about the machine, interleaved timing, and JSON output."""

import contextlib
import ctypes
import json
import os
import statistics
import threading
import time
from pathlib import Path

import jax

from benchmarks.machine import facts

RESULTS = Path(__file__).parent / "results"
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # of malloc.h


def machine():
    """Returns the facts about the machine that results depend on."""
    return facts(jax.devices()[0].device_kind, jax=jax.__version__)


def keep_freed_memory():
    """Makes the C library keep freed memory.

    XLA's CPU client takes each result from it; memory that Linux gives back page by page costs up to a tenth of a step.
    On a GPU, memory stays in JAX's pool. JaxFerry leaves thresholds alone that the environment sets.
    """
    os.environ["MALLOC_TRIM_THRESHOLD_"] = str(2**31 - 1)
    with contextlib.suppress(AttributeError):  # only GNU's has mallopt
        for option, num_bytes in ((M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**28), (M_MMAP_THRESHOLD, 2**25)):
            ctypes.CDLL(None).mallopt(option, num_bytes)


def thread_cpu_s(prefix):
    """CPU seconds so far of this process's threads whose names begin so."""
    return cpu_s(thread for thread in threading.enumerate() if thread.name.startswith(prefix))


def cpu_s(threads):
    """CPU seconds so far of some threads."""
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in threads)


def interleaved(functions, repetitions, warm_up=2):
    """Runs the functions in turn and returns each one's seconds by name; other load then affects all alike."""
    seconds = {name: [] for name in functions}
    for repetition in range(warm_up + repetitions):
        for name, function in functions.items():
            start_s = time.perf_counter()
            function()
            if repetition >= warm_up:
                seconds[name].append(time.perf_counter() - start_s)
    return seconds


def median_ratio(numerators, denominators):
    """Returns the median ratio of measurements that are adjacent in time."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def status_bytes(name):
    """A size of this process, by its name in /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def reset_peak():
    """Lets `VmHWM` start again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def write(name, result):
    """Writes `results/name.json`."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {path.relative_to(RESULTS.parent.parent)}")
