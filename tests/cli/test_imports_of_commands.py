"""Which packages a command imports: planning starts without those that take seconds."""

import importlib
import json
import subprocess
import sys
from unittest import mock

import pytest

from jaxferry.cli import COMMANDS, main
from profiles import transformer

HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "scipy", "matplotlib", "jinja2")


def imported(folder, code):
    """The heavy packages that are imported once the code has run in a new process."""
    told = f"\nimport json, sys; print(json.dumps(sorted(set({HEAVY}) & set(sys.modules))), file=sys.stderr)"
    command = [sys.executable, "-c", code + told]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(found.stderr.splitlines()[-1])


def run(*arguments):
    """Code that runs a command, which must succeed."""
    return f"""
from jaxferry.cli import main
try:
    main({list(arguments)})
except SystemExit as end:
    assert not end.code
"""


@pytest.fixture
def files(tmp_path):
    profile = tmp_path / "profile.json"
    transformer(3).save(profile)
    for arguments in (["plan", profile, "-o", tmp_path / "plan.json"],):
        with pytest.raises(SystemExit):
            main([str(argument) for argument in arguments])
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        ("plan", "profile.json", "--policy", "auto"),
        ("simulate", "profile.json", "plan.json"),
        ("tune", "profile.json", "--policy", "memferry"),
        ("weights", "profile.json", "--memory-budget", "1GiB"),
        ("report", "--help"),
    ],
)
def test_planning_imports_neither_jax_nor_scipy(files, arguments):
    assert imported(files, run(*arguments)) == []


def test_a_comparison_imports_scipy_alone_for_its_bound(files):
    assert imported(files, run("plan", "profile.json", "--compare")) == ["scipy"]


def test_train_step_is_the_function_though_the_module_of_that_name_was_imported(tmp_path):
    light = "import jaxferry; jaxferry.Mode.DHA, jaxferry.InputError, jaxferry.__version__"
    assert imported(tmp_path, light) == []
    code = "import jaxferry.train_step\nassert callable(jaxferry.train_step)\n"
    code += "from jaxferry import *\nassert train_step is jaxferry.train_step and callable(list_checkpoints)"
    assert "jax" in imported(tmp_path, code)


def test_modules_are_attributes_without_an_import_of_their_own(tmp_path):
    assert imported(tmp_path, "import jaxferry; jaxferry.units.parse_bytes, jaxferry.modes.Mode") == []


def test_modules_of_rooms_have_other_names_in_the_package():
    import jaxferry
    from jaxferry.processes import distributed

    other = importlib.import_module("jaxferry.distributed")
    assert other is distributed is jaxferry.distributed and other.__spec__.name == other.__name__
    assert importlib.import_module("jaxferry.train_step").TrainStep is jaxferry.TrainStep
    assert importlib.import_module("jaxferry.pretrained").open_safetensors is jaxferry.pretrained.open_safetensors
    with mock.patch("jaxferry.distributed.is_first", return_value="patched"):
        assert jaxferry.distributed.is_first() == distributed.is_first() == "patched"


def test_all_public_names_are_there():
    import jaxferry

    assert set(jaxferry.__all__) <= set(dir(jaxferry))
    assert all(getattr(jaxferry, name) is not None for name in jaxferry.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trainstep'"):
        jaxferry.trainstep  # noqa: B018


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_is_listed_and_loads(jaxferry, command):
    assert command in jaxferry("--help").out
    assert jaxferry(command, "--help").status == 0
    assert jaxferry(command, "-h").out == jaxferry(command, "--help").out
