"""What benchmarks share: the machine's facts, interleaved timing, and the JSON that they leave."""

import json
import os
import platform
import statistics
import time
from pathlib import Path

import jax

RESULTS = Path(__file__).parent / "results"


def machine():
    """Facts that a figure means nothing without."""
    model = "unknown"
    if Path("/proc/cpuinfo").exists():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    return {
        "cpu": model,
        "num_cpus": os.cpu_count(),
        "device": str(jax.devices()[0].device_kind),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def interleaved(functions, repetitions, warm_up=2):
    """Runs the functions in turn and returns the seconds of each by name; a shared machine's mood hits all alike."""
    seconds = {name: [] for name in functions}
    for repetition in range(warm_up + repetitions):
        for name, function in functions.items():
            start_s = time.perf_counter()
            function()
            if repetition >= warm_up:
                seconds[name].append(time.perf_counter() - start_s)
    return seconds


def median_ratio(numerators, denominators):
    """The median of the ratios of neighbours in time."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def write(name, result):
    """Writes `results/name.json`."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {path.relative_to(RESULTS.parent.parent)}")
