"""Which packages a command imports: planning starts without those that take seconds. Each command has its help."""

import json
import subprocess
import sys

import pytest

from jaxferry.cli import COMMANDS
from profiles import transformer
from slowly import slow_cases

HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "scipy", "matplotlib", "jinja2")
LIGHT = (
    ("--help",),
    ("--version",),
    ("plan", "profile.json", "--policy", "memferry", "-o", "plan.json"),
    ("simulate", "profile.json", "plan.json"),
    ("tune", "profile.json", "--policy", "memferry"),
    ("weights", "profile.json", "--memory-budget", "1GiB"),
    ("report", "--help"),
)
RUN = f"""
import json, sys
from jaxferry.cli import main

for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit as end:
        assert not end.code, arguments
    print(*sorted(set({HEAVY}) & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("commands", "heavy"),
    [
        (LIGHT, [""] * len(LIGHT)),
        ([("plan", "profile.json", "--policy", "auto")], ["scipy"]),
        *slow_cases(([("plan", "profile.json", "--compare")], ["scipy"])),
    ],
    ids=["planning", "search", "comparison"],
)
def test_planning_imports_nothing_heavy_and_a_search_or_comparison_scipy_for_its_bound(tmp_path, commands, heavy):
    transformer(3).save(tmp_path / "profile.json")
    command = [sys.executable, "-c", RUN, json.dumps(commands)]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [line for line in found.stderr.split("\n")[:-1] if "memory budget" not in line] == heavy


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_is_listed_and_loads(jaxferry, command):
    assert command in jaxferry("--help").out
    assert jaxferry(command, "--help").status == 0
    assert jaxferry(command, "-h").out == jaxferry(command, "--help").out
