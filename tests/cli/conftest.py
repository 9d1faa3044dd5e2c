"""Runs the command line in this process; makes its input files."""

import dataclasses
import shutil
import sys
from pathlib import Path

import pytest

from jaxferry.cli import main
from profiles import transformer


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a command."""

    status: int
    out: str
    err: str


@pytest.fixture
def jaxferry(capsys):
    """Runs a command: `jaxferry("plan", path, "--json")`."""

    def run(*arguments):
        with pytest.raises(SystemExit) as exit_info:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(exit_info.value.code, captured.out, captured.err)

    return run


@pytest.fixture
def refused(jaxferry):
    """Runs a command that must fail: status 2, nothing on standard output, one line on standard error."""

    def run(*arguments):
        result = jaxferry(*arguments)
        assert (result.status, result.out) == (2, "")
        assert result.err.count("\n") == 1 and result.err.endswith("\n")
        assert "Traceback" not in result.err
        return result.err

    return run


@pytest.fixture
def profile(tmp_path):
    """A file with a profile of eight layers."""
    path = tmp_path / "profile.json"
    transformer(8).save(path)
    return path


@pytest.fixture
def user_model(tmp_path, monkeypatch):
    """Names a function of `user_model.py`, as a module of the current directory: `user_model("arrays")`."""
    name = "model_on_the_command_line"
    shutil.copy(Path(__file__).parent / "user_model.py", tmp_path / f"{name}.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return lambda function: f"{name}:{function}"
