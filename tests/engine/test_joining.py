"""Processes that wait for one that never comes (`distributed.start`)."""

import os
import re
import subprocess
import sys

import pytest

from jaxferry.errors import InputError
from jaxferry.processes import distributed
from process_runs import free_address
from slowly import slow_cases

START = ["-c", "from jaxferry.processes import distributed; distributed.start(join_timeout_s=2)"]
TRAIN = ["-m", "jaxferry", "train", "--model", "gpt2:tiny", "--distributed", "--join-timeout", "2"]


def ended(arguments, *present):
    """Status and errors of the processes that come, of three."""
    common = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_ADDRESS": free_address(), "JAX_NUM_PROCESSES": "3"}
    running = [
        subprocess.Popen(
            [sys.executable, *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**common, "JAX_PROCESS_ID": str(number)},
        )
        for number in present
    ]
    try:
        errors = [process.communicate(timeout=90)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, error) for process, error in zip(running, errors, strict=True)]


@pytest.mark.parametrize(("present", "missing"), [((0,), ["1", "2"]), *slow_cases(((0, 2), ["1"]))], ids=str)
def test_processes_name_those_that_do_not_come(present, missing):
    for status, error in ended(START, *present):
        assert status != 0
        assert f"# of tasks that reached the barrier: {len(present)}/3." in error
        names = re.search(r"Some timed out task names:\n((\d+\n)+)", error)
        assert names is not None and sorted(names[1].split()) == missing


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [START, TRAIN], ids=["start", "train"])
def test_jax_ends_processes_if_the_first_one_does_not_come(arguments):
    for status, error in ended(arguments, 1, 2):
        assert status != 0
        assert "DEADLINE_EXCEEDED" in error and "RegisterTask" in error


def test_they_wait_for_a_second_at_least():
    with pytest.raises(InputError, match="join_timeout_s must be 1 or more seconds, got 0"):
        distributed.start(join_timeout_s=0)
