"""Builds a native library from scratch, and checks the messages of failed builds."""

import json
import pathlib
import re
import sys

import jax
import pytest

from jaxferry.cli import main
from jaxferry.errors import NativeError
from jaxferry.native import DIRECTORY_VARIABLE, build_library, ffi_version, inspect_library


@pytest.mark.slow  # each installation builds the same sources by CMake
def test_the_command_builds_into_a_clean_directory_and_says_with_what(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "new"))
    with pytest.raises(SystemExit) as caught:
        main(["build-native", "--platform", "cpu", "--json"])
    printed = capsys.readouterr()
    assert caught.value.code == 0, printed.err
    [built] = json.loads(printed.out)["built"]
    found = inspect_library(pathlib.Path(built["path"]), "cpu")
    assert found.is_available
    assert found.path.parent == tmp_path / "new"
    assert (found.build_info["ffi_major"], found.build_info["ffi_minor"]) == ffi_version()
    assert built["headers"] == jax.ffi.include_dir()
    assert built["nvcc"] is None
    assert built["jaxlib"] == found.build_info["jaxlib"]
    assert found.build_info["compiler"] in built["compiler"]
    assert [path.name for path in found.path.parent.iterdir()] == ["libjaxferry_cpu.so"]


def test_a_build_that_fails_ends_with_one_line_and_a_log(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    with pytest.raises(SystemExit) as caught:
        main(["build-native", "--platform", "cpu"])
    printed = capsys.readouterr()
    assert (caught.value.code, printed.out) == (2, "")
    [line] = printed.err.splitlines()
    log = re.fullmatch(r"jaxferry: the cpu library cannot be built: .*; the log is (\S+)", line)[1]
    assert "no-such-compiler" in line
    assert "no-such-compiler" in pathlib.Path(log).read_text()
    assert list(tmp_path.iterdir()) == []
    pathlib.Path(log).unlink()


def test_without_cmake_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(NativeError, match="building the cpu library needs cmake; install it"):
        build_library("cpu", tmp_path)


def test_an_unknown_platform_is_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["build-native", "--platform", "tpu"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "jaxferry: --platform must be one of cpu, cuda, all, got 'tpu'\n"
