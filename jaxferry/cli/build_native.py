"""`jaxferry build-native`: builds the native libraries for the installed jaxlib."""

import dataclasses
from typing import Annotated, Any

import typer

from jaxferry.cli import COMMANDS
from jaxferry.cli.common import AsJson, print_json, print_report, progress
from jaxferry.errors import InputError, NativeError
from jaxferry.native.build import Build, build_library

_PLATFORMS = {"cpu": ("cpu",), "cuda": ("cuda",), "all": ("cpu", "cuda")}


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("build-native", help=COMMANDS["build-native"])(build_native)


def build_native(
    platform: Annotated[
        str, typer.Option(metavar="|".join(_PLATFORMS), help="Platform to build for; all builds what it can.")
    ] = "all",
    as_json: AsJson = False,
) -> None:
    """Builds the libraries and prints the tools used; fails if no library can be built."""
    if platform not in _PLATFORMS:
        raise InputError(f"--platform must be one of {', '.join(_PLATFORMS)}, got {platform!r}")
    builds: list[Build] = []
    failures: dict[str, NativeError] = {}
    with progress("building") as report:
        for name in _PLATFORMS[platform]:
            report(name)
            try:
                builds.append(build_library(name))
            except NativeError as error:
                failures[name] = error
    if not builds:
        raise NativeError("; ".join(str(failure) for failure in failures.values()))
    if as_json:
        failed = [{"platform": name, "message": str(failure)} for name, failure in failures.items()]
        print_json({"built": [_to_json(build) for build in builds], "failed": failed})
    else:
        print_report(
            *(line for build in builds for line in _lines(build)), *(str(error) for error in failures.values())
        )


def _to_json(build: Build) -> dict[str, Any]:
    return dataclasses.asdict(build) | {"path": str(build.path)}


def _lines(build: Build) -> list[str]:
    nvcc = [] if build.nvcc is None else [f"  nvcc      {build.nvcc}"]
    return [
        f"{build.platform}: {build.path}",
        f"  compiler  {build.compiler}",
        *nvcc,
        f"  headers   {build.headers} (jaxlib {build.jaxlib})",
    ]
