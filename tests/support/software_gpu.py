"""A CUDA device in software, on which JAX's own CUDA backend and our CUDA library run without a GPU.

It is no part of this repository: tests use the one in the folder that JAXFERRY_SOFTWARE_GPU names, by default
`shared/softgpu` beside the repository, and are skipped where there is none. It takes a JAX that needs no cuDNN.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import pytest

from built import built_once
from jaxferry.native import status
from native import cuda_build, cuda_library

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = pathlib.Path(os.environ.get("JAXFERRY_SOFTWARE_GPU", ROOT.parent / "shared" / "softgpu"))
_GPU_PACKAGES = pathlib.Path(sys.prefix) / "gpu-packages"


def reason_to_skip():
    """Why there is no software device for this Python; None if there is one."""
    if not (FOLDER / "Makefile").is_file():
        return f"there is no software CUDA device in {FOLDER}"
    if jax.__version_info__ < (0, 12):
        return "the software CUDA device has no cuDNN, which this JAX needs"
    missing = [tool for tool in ("make", "g++", "nvcc") if shutil.which(tool) is None]
    return f"the software CUDA device is built with {missing[0]}, which is missing" if missing else None


needed = pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip()))


def _build(folder):
    """Builds the device, and the CUDA library and its kernels for it, in a folder; the CPU library is the package's."""
    device, native = folder / "device", folder / "native"
    shutil.copytree(FOLDER, device, ignore=shutil.ignore_patterns("build"), copy_function=shutil.copyfile)
    for tool in (*device.glob("tools/*"), *device.glob("toolkit/bin/*")):
        tool.chmod(0o755)
    cuda_build.run("make", "-C", device)
    cuda_library.build(native, f"-DJAXFERRY_CUDART={device}/build/libcudart_static.a")
    shutil.copy(status("cpu").path, native)
    kernels = device / "build" / "jfptx"  # where the device's env.sh looks
    kernels.mkdir()
    for source in (cuda_build.SOURCES / "cuda").glob("*.cu"):
        to_ptx = ["nvcc", "-ptx", "-arch=compute_90", "-std=c++17", "-O3", "-DNDEBUG", f"-I{cuda_build.SOURCES}"]
        cuda_build.run(*to_ptx, source, "-o", kernels / f"{source.stem}.ptx")


def run(script, *arguments, timeout_s=300, **environment):
    """Runs a script of `tests/support` on the software device and returns what it prints.

    Args:
      script: its name.
      *arguments: passed on.
      timeout_s: seconds.
      **environment: further variables.
    """
    path = str(ROOT / "tests" / "support" / script)
    return _execute([path, *map(str, arguments)], timeout_s, {"JAX_COMPILATION_CACHE_DIR": "", **environment})


def run_tests(*arguments, timeout_s=800):
    """Runs tests with the software device as JAX's default device; returns how many have passed.

    Args:
      *arguments: those of pytest.
      timeout_s: seconds.
    """
    options = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow"]
    printed = _execute([*options, *arguments], timeout_s, {"JAXFERRY_TESTS_DEVICE": "", "PYTEST_ADDOPTS": ""})
    return int(re.search(r"(\d+) passed", printed)[1])


def _execute(arguments, timeout_s, environment):
    """Runs Python on the software device and returns what it prints."""
    folder = built_once("software-gpu", _build)
    native = folder / "native"
    settings = {
        "JAXFERRY_NATIVE_DIR": str(native),
        "JAXFERRY_CHECK_LIBRARY": str(native / "libjaxferry_cuda.so"),
        "JAXFERRY_CACHE_DIR": "off",
        "XLA_FLAGS": "",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **environment,
    }
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support", _GPU_PACKAGES)))
    command = f'source {folder}/device/env.sh; export PYTHONPATH="$PYTHONPATH:{path}"; exec "$@"'
    # The environment of env.sh comes first, but for what is stated here.
    exports = "".join(f"export {name}='{value}'; " for name, value in environment.items())
    command = command.replace("exec", f"{exports}exec")
    done = subprocess.run(
        ["bash", "-c", command, "bash", sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=ROOT,
        env={**os.environ, **settings},
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout
