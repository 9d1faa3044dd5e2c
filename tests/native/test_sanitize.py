"""The kernels and queues of the CPU's library under the sanitizers, as `make sanitize` runs them."""

import os
import pathlib
import subprocess
import sys

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_kernels_and_queues_hold_under(sanitizer):
    command = [str(ROOT / "tools" / "sanitize"), sanitizer]
    environment = {**os.environ, "PYTHON": sys.executable}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout == f"== {sanitizer}\nall hold\n"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_whole_steps_hold_under_the_thread_sanitizer():
    """The stress test of the executor, with the library built for the sanitizer; see the tool for what it can see."""
    environment = {**os.environ, "PYTHON": sys.executable}
    command = [str(ROOT / "tools" / "sanitize_steps")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith("all hold\n")


@pytest.mark.slow
def test_the_checks_of_the_operations_let_nothing_pass_that_leaves_its_buffers(tmp_path):
    """Without sanitizers, and so within every run; see `tests/native/stress_checks.cc`."""
    sources = [ROOT / "tests" / "native" / "stress_checks.cc", *sorted((ROOT / "xla_ffi" / "common").glob("*.cc"))]
    includes = ["-isystem", jax.ffi.include_dir(), "-I", str(ROOT / "xla_ffi")]
    command = [
        os.environ.get("CXX", "c++"),
        "-std=c++17",
        *includes,
        *map(str, sources),
        "-o",
        str(tmp_path / "checks"),
    ]
    subprocess.run(command, check=True)
    result = subprocess.run([str(tmp_path / "checks")], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
