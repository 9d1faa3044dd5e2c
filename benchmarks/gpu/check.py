"""Eight minutes on a machine with a GPU: does everything work, how fast, and if not, why?

    benchmarks/gpu/check.sh OUT [--seconds 480] [--only STAGE ...] [--resume] [--rivals-python PATH]

Needs no network. What tells most comes first, so that four minutes are worth having: facts about the machine, the
libraries, three steps of a small GPT-2 in the cases that differ most, steps of GPT-2 medium and of a Llama beside plain
JAX. Then the other cases, the operations' tests, further models, rates of single operations, and last, where their
packages are, other systems on the same models (benchmarks/gpu/rivals.py): DeepSpeed ZeRO-Offload and PyTorch's FSDP2
with CPU offload. A stage is a process with a limit; one that hangs or crashes stops no other. OUT/check.tar.gz holds
what is known so far (benchmarks/gpu/stages.py). Stages that failed run again with CUDA_LAUNCH_BLOCKING=1 if time is
left. At the end a table of all steps is printed: of each its seconds, as a share of plain JAX's, device memory, the
model's operations a second (`models.Model.flops`), and measured over predicted.

Rivals need PyTorch, and DeepSpeed for its own two contenders, in this Python or in the one that --rivals-python or
JAXFERRY_RIVALS_PYTHON names. Without them their stages are left out, which is no failure. Their ratios to our steps are
in OUT/steps/rivals_SIZE.json. A call of their own has time for both: --only steps_124m rivals_build rivals_124m.

XLA is as JAX sets it up, with its autotuning: without that, products of matrices take eight times as long.

    --only smoke steps_124m      the stages whose names begin so, and what they need
    --resume                     leaves out what has passed in OUT before; without it, the journal of an earlier check
                                 in OUT stays as check-TIME.jsonl
    --device cpu                 tries the script itself on a machine without a GPU, with small sizes
"""

import argparse
import ast
import functools
import json
import os
import pathlib
import shutil
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from benchmarks.gpu.build import find_tool
from benchmarks.gpu.rival_stages import run_rivals
from benchmarks.gpu.settings import ALL_MEMORY, PLAIN, POLICIES, PROFILE, RECIPE
from benchmarks.gpu.stages import Check, Stage, main_with

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
AGAIN = {"CUDA_LAUNCH_BLOCKING": "1"}
WITHOUT_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="
SMOKE_AT_ONCE = 6
MACHINE = (
    "nvidia-smi; nvidia-smi topo -m; nvcc --version; numactl -H; free -g; lscpu; ulimit -a; uname -a; "
    "cat /proc/driver/nvidia/version; true"
)
FIRST: tuple[str, ...] = (
    "native-overlapped_ferry_bfloat16",
    "auto_ferry_float32",
    "go-memferry_ferry_float32",
    "l2l_ferry_float32",
)
FIRST += ("mixed_ferry_float32", "exact_device_put_float32")
"""The cases of the small GPT-2 that differ most."""
ORDER = ("native-overlapped", PLAIN, ALL_MEMORY, "exact", "l2l", "auto")
MORE = ("zero-offload", "memferry", "go-memferry", RECIPE)
STEPS = {
    "gpu": (
        ("medium", (PROFILE, *ORDER), 215),
        ("llama-3b", (PLAIN, "auto"), 170),
        ("124m", (PROFILE, *ORDER, *MORE), 110),
        ("xl", (PROFILE, *ORDER), 240),
    ),
    "cpu": (("tiny", (PROFILE, *ORDER, *MORE), 120), ("llama-tiny", (PLAIN, "auto"), 60)),
}
"""What is timed on each device, the most telling first: size, contenders, and the most seconds."""
NUM_FIRST = {"gpu": 2, "cpu": 1}
"""How many of them come before the other cases and the tests."""
NEED_LIBRARIES = ("smoke_", "test_", "steps_", "link_rates", "overlap", "contention", "criteria")
"""Beginnings of the names of stages that run the native libraries."""
UPDATE_PLACES = ("gpu", "resident", "mixed")
FEW = ("native-overlapped", "exact", "zero-offload", PLAIN)


def python(*arguments):
    return (sys.executable, *map(str, arguments))


def smoke_cases():
    """Every policy over the ferry, updates on the device, and what differs with plain copies and 16 bits."""
    cases = [(policy, "ferry", "float32") for policy in (*POLICIES, *UPDATE_PLACES)]
    cases += [(policy, "device_put", "float32") for policy in ("native-overlapped", "exact")]
    return cases + [(policy, "ferry", "bfloat16") for policy in ("native-overlapped", "go-memferry", "auto")]


def test_groups(path):
    """The classes of a file of tests, and all its functions together: names, and arguments of pytest."""
    body = ast.parse(path.read_text()).body
    classes = [node.name for node in body if isinstance(node, ast.ClassDef) and node.name.startswith("Test")]
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    groups = [(name, [f"{path}::{name}"]) for name in classes]
    return [*groups, ("functions", [f"{path}::{name}" for name in functions])] if functions else groups


def run(check, device, out, library_folder, rivals):
    """Runs all stages in order; `rivals(check, device, out)` runs the last ones."""
    env = {} if library_folder is None else {"JAXFERRY_NATIVE_DIR": str(library_folder)}
    check.run(Stage("machine", ("bash", "-c", MACHINE), 20))
    check.run(Stage("facts", python(HERE / "facts.py", 1 if device == "cpu" else 512), 60, env=env))
    built = ()
    if device == "gpu" and "JAXFERRY_NATIVE_DIR" not in os.environ:
        builds = (
            Stage("build_cuda", python(HERE / "build.py", library_folder), 150),
            Stage("build_cpu", python("-m", "jaxferry", "build-native", "--platform", "cpu"), 90, env=env),
        )
        built = check.prepare(builds, NEED_LIBRARIES, workers=2)
    expected = out / "smoke_reference.json"
    command = python(HERE / "smoke.py", "reference", expected)
    reference = Stage("smoke_reference", command, 60, env={"JAX_PLATFORMS": "cpu"})
    needed = (*built, *check.prepare([reference], ["smoke_"]))
    smoke = {
        "_".join(case): Stage(
            f"smoke_{'_'.join(case)}", python(HERE / "smoke.py", *case, expected), 75, needed, env, AGAIN
        )
        for case in smoke_cases()
    }
    check.run(*(smoke[name] for name in FIRST), workers=SMOKE_AT_ONCE)
    first, later = STEPS[device][: NUM_FIRST[device]], STEPS[device][NUM_FIRST[device] :]
    time_steps(check, first, device, out, built, env)
    check.run(*(stage for name, stage in smoke.items() if name not in FIRST), workers=SMOKE_AT_ONCE)
    if device == "gpu":
        library = {**env, "JAXFERRY_CHECK_LIBRARY": str(library_folder / "libjaxferry_cuda.so")}
        for file in ("test_operations.py", "test_recorded.py"):
            for name, tests in test_groups(ROOT / "tests" / "gpu" / file):
                command = python("-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *tests)
                check.run(Stage(f"{pathlib.Path(file).stem}_{name}", command, 60, built, library, AGAIN))
    time_steps(check, later, device, out, built, env)
    if device == "gpu":
        path = library_folder / "libjaxferry_cuda.so"
        contention = python(HERE.parent / "contention.py", "--rounds", 2, "-o", out / "contention.json")
        check.run(
            Stage("link_rates", python(HERE / "link_rates.py", path, out / "link_rates.json"), 90, built, env),
            Stage("overlap", python(HERE / "overlap.py", path, out / "overlap.json"), 45, built, env),
            Stage("contention", contention, 45, built, env),
            Stage("sustained", python(HERE / "sustained.py", out / "sustained.json"), 30),
        )
        if find_tool("nvcc"):
            check.run(Stage("panel_rates", python(HERE / "panel_rates.py", out / "panel_rates.json"), 60))
        command = python("-m", "pytest", "-q", "-p", "no:cacheprovider", ROOT / "tests" / "gpu" / "test_link_rates.py")
        check.run(Stage("criteria", command, 90, built, {**env, "JAXFERRY_CHECK_LIBRARY": str(path)}))
    check.run_failed_again()
    rivals(check, device, out)


def time_steps(check, sizes, device, out, built, env):
    """Times training steps of some sizes."""
    for size, contenders, most_s in sizes:
        # Within the time that is left, so that the end of the whole check cuts off no measurement.
        check.run(steps(out, size, device, min(most_s, check.left_s), contenders, built, env))
        if size == "124m":
            without = {**env, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {WITHOUT_COMMAND_BUFFERS}".strip()}
            check.run(steps(out, size, device, min(50, check.left_s), FEW, built, without, "_no_command_buffers"))


def steps(out, size, device, limit_s, contenders, needs, env, suffix=""):
    """The stage that times training steps of one size."""
    folder = out / f"steps{suffix}"
    command = python(HERE / "steps.py", folder, "--size", size, "--device", device, "--only", *contenders)
    command += ("--limit", str(max(limit_s - 10, 1)), "--each", str(limit_s / 2), "--least", "15")
    if device == "cpu":
        command += ("--batch", "1", "--seq", "8", "--steps", "3")
    return Stage(f"steps_{size}{suffix}", command, limit_s, needs, env)


def summary(out):
    """Returns the lines of the table of all steps that a folder has results of."""
    heads = ("step [ms]", "/ plain JAX", "memory [GiB]", "TFLOP/s", "/ predicted")
    lines = []
    for path in sorted(out.glob("steps*/steps_*.json"), key=lambda path: path.stat().st_mtime):
        found = json.loads(path.read_text())
        rows = [row for row in found["rows"] if row.get("step_s")]
        plain_s = next((row["step_s"] for row in rows if row["contender"] == PLAIN), None)
        note = path.parent.name.removeprefix("steps").strip("_").replace("_", " ")
        model = found["model"]
        title = f"{model['name']}, {model['batch']} x {model['sequence']}{', ' + note if note else ''}"
        lines.append(f"{title:36}" + "".join(f"{head:>14}" for head in heads))
        for row in rows:
            cells = [
                f"{row['step_s'] * 1e3:.1f}",
                f"{row['step_s'] / plain_s:.3f}" if plain_s else "-",
                f"{row['peak_device_bytes'] / 2**30:.1f}" if row.get("peak_device_bytes") else "-",
                f"{row['model_flops_per_s'] / 1e12:.1f}",
                f"{row['measured_over_predicted']:.3f}" if "measured_over_predicted" in row else "-",
            ]
            lines.append(f"  {row['contender']:34}" + "".join(f"{cell:>14}" for cell in cells))
        lines += [f"  {row['contender']:34}  {row['outcome']}" for row in found["rows"] if row["outcome"] != "measured"]
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path, help="folder for the results")
    parser.add_argument("--seconds", type=float, default=480, help="time for all stages")
    parser.add_argument("--only", nargs="+", default=(), help="stages, or beginnings of their names")
    parser.add_argument("--resume", action="store_true", help="leave out stages that have passed")
    parser.add_argument("--device", choices=STEPS, default="gpu")
    known = os.environ.get("JAXFERRY_RIVALS_PYTHON") or sys.executable
    parser.add_argument("--rivals-python", default=known, metavar="PATH", help="a Python with PyTorch and DeepSpeed")
    arguments = parser.parse_args()
    if shutil.which(arguments.rivals_python) is None:
        parser.error(f"--rivals-python: there is no program {arguments.rivals_python}; name a Python with PyTorch")
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    given = os.environ.get("JAXFERRY_NATIVE_DIR")
    # What is built and cached stays out of the results; a resumed check finds it again.
    work = pathlib.Path(tempfile.gettempdir()) / "jaxferry-check"
    library_folder = pathlib.Path(given) if given else work / "native" if arguments.device == "gpu" else None
    paths = [ROOT, ROOT / "tests", ROOT / "tests" / "support", *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {
        "JAX_PLATFORMS": "cpu" if arguments.device == "cpu" else "cuda,cpu",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "JAX_COMPILATION_CACHE_DIR": str(work / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAXFERRY_CACHE_DIR": str(work / "measured"),
    }
    check = Check(out, arguments.seconds, env, arguments.only, arguments.resume)
    compared = functools.partial(run_rivals, python=arguments.rivals_python, folder=work / "torch_extensions")
    run_all = functools.partial(run, device=arguments.device, out=out, library_folder=library_folder, rivals=compared)
    return main_with(check, run_all, lambda: summary(out))


if __name__ == "__main__":
    sys.exit(main())
