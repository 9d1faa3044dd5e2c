"""The kernels and queues of the CPU's library under the sanitizers, as `make sanitize` runs them."""

import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_kernels_and_queues_hold_under(sanitizer):
    command = [str(ROOT / "tools" / "sanitize"), sanitizer]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout == f"== {sanitizer}\nall hold\n"
