"""Facts about the machine that need no library."""

import os
import platform
from pathlib import Path


def facts(device, **versions):
    """Returns the facts that results depend on; `device` is the accelerator's name."""
    return {
        "cpu": cpu_name(),
        "num_cpus": os.cpu_count(),
        "device": str(device),
        "python": platform.python_version(),
        **versions,
    }


def cpu_name():
    """Returns the CPU's name, or "unknown"."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else ()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"
