"""The last stages of check.py: other systems that offload, in a Python that has them. Without them nothing is run.

The CUDA libraries of JAX and PyTorch may not fit into one environment, so this Python may be another one. It is asked
for its packages without importing them.
"""

import json
import pathlib
import subprocess
import sys

from benchmarks.gpu.settings import RIVALS
from benchmarks.gpu.stages import PASSED, Stage

DRIVER = pathlib.Path(__file__).resolve().parent / "rivals.py"
LIMITS_S = {"gpu": {"124m": 110, "medium": 150, "xl": 240}, "cpu": {"tiny": 200}}
"""Sizes, with the most seconds for each."""
TORCH_DEVICES = {"gpu": "cuda", "cpu": "cpu"}
LEAST_S = 45.0
"""With less time left, no size is begun."""
BUILD, BUILD_S = "rivals_build", 300.0
"""DeepSpeed compiles its Adam for this machine's processor, which shall not count as the time of a contender."""
BUILD_CODE = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
PROBE = """
import importlib.metadata, importlib.util, json, sys
found = {name: importlib.util.find_spec(name) and importlib.metadata.version(name) for name in sys.argv[1:]}
print(json.dumps(found))
"""


def versions(python):
    """Returns the version of each package that a rival needs, or None, as a Python says.

    Raises:
      OSError, subprocess.SubprocessError, ValueError: if `python` is no program that runs Python code.
    """
    names = sorted({name for needed in RIVALS.values() for name in needed})
    probe = subprocess.run([python, "-c", PROBE, *names], capture_output=True, text=True, timeout=30, check=True)
    return json.loads(probe.stdout)


def reasons(python):
    """Returns for each rival why this Python cannot run it, or None if it can."""
    try:
        found = versions(python)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return dict.fromkeys(RIVALS, f"{python} does not say which packages it has: {error}")
    missing = {rival: [name for name in needed if found[name] is None] for rival, needed in RIVALS.items()}
    return {rival: f"no {' and no '.join(names)} in {python}" if names else None for rival, names in missing.items()}


def run_rivals(check, device, out, python, folder):
    """Runs the rivals, or says why not.

    Args:
      check: the run of stages.
      device: "gpu" or "cpu".
      out: the output folder; `out/steps` has the results to compare with.
      python: the Python that may have the rivals' packages.
      folder: where DeepSpeed's compiled extensions are kept.
    """
    sizes = {size: name for size in LIMITS_S[device] if check.wants(name := f"rivals_{size}")}
    if not sizes:
        return
    why = reasons(python)
    able = [rival for rival in RIVALS if why[rival] is None]
    if not able:
        reason = f"{min(why.values(), key=len)}; --rivals-python names another Python"
        for name in sizes.values():
            check.leave_out(name, reason)
        return
    env = {"TORCH_EXTENSIONS_DIR": str(folder), "DS_ACCELERATOR": TORCH_DEVICES[device]}
    if any("deepspeed" in RIVALS[rival] for rival in able):
        build(check, python, folder, env)
        if check.outcomes.get(BUILD, PASSED) != PASSED:
            able = [rival for rival in able if "deepspeed" not in RIVALS[rival]]
    for size, name in sizes.items():
        run_size(check, Stage(name, driver(out, size, device, python, able), LIMITS_S[device][size], env=env))


def build(check, python, folder, env):
    """Builds what DeepSpeed would else build within the first step."""
    # A build that was ended leaves its lock, for which every later one would wait.
    for lock in folder.glob("*/lock"):
        lock.unlink()
    check.run(Stage(BUILD, (python, "-c", BUILD_CODE), BUILD_S, env=env | {"PYTHONPATH": ""}))


def driver(out, size, device, python, names):
    """The command that times rivals of one size, but for its limit."""
    command = [sys.executable, DRIVER, out / "steps", "--size", size, "--device", device, "--python", python]
    command += ["--batch", "1", "--seq", "8", "--steps", "3"] if device == "cpu" else []
    return tuple(map(str, [*command, "--only", *names]))


def run_size(check, stage):
    """Times one size within the time that is left, so that the end of the whole check fails no rival."""
    limit_s = min(stage.limit_s, check.left_s)
    if limit_s < LEAST_S:
        check.leave_out(stage.name, "no time")
        return
    command = (*stage.command, "--limit", str(limit_s - 10))
    check.run(Stage(stage.name, command, limit_s, env=stage.env))
