"""Which native libraries load, and the messages for the others."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from jaxferry.errors import InputError, NativeError
from jaxferry.native import (
    ABI,
    CPU_FUNCTIONS,
    DIRECTORY_VARIABLE,
    FILE_NAMES,
    TARGETS,
    ffi_version,
    find_library,
    inspect_library,
    library,
    status,
)

INFO = r"{\"platform\": \"%s\", \"compiler\": \"a test\", \"jaxlib\": \"9.8.7\", \"ffi_major\": %d, \"ffi_minor\": %d}"
ALL_TARGETS = (*TARGETS, *CPU_FUNCTIONS)


@pytest.fixture
def fake(tmp_path):
    """Makes a library with given answers; its operations do nothing."""

    def make(name="cpu", folder="", platform=None, abi=ABI, major=None, minor=None, info=None, targets=ALL_TARGETS):
        installed = ffi_version()
        major, minor = installed[0] if major is None else major, installed[1] if minor is None else minor
        text = INFO % (platform or name, major, minor) if info is None else info
        code = [f"int jaxferry_abi() {{ return {abi}; }}", f'const char* jaxferry_build_info() {{ return "{text}"; }}']
        code += [f"void* {target}(void* frame) {{ return frame; }}" for target in targets]
        directory = tmp_path / folder
        directory.mkdir(exist_ok=True)
        source, path = directory / "fake.cc", directory / FILE_NAMES[name]
        source.write_text("\n".join(f'extern "C" {line}' for line in code))
        compiler = os.environ.get("CXX", "c++")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(path), str(source)], check=True)
        return path

    return make


def refusal(path, platform="cpu"):
    found = inspect_library(path, platform)
    assert not found.is_available
    assert found.message.endswith("; build it with `jaxferry build-native`")
    assert "\n" not in found.message
    return found.message


def test_a_library_for_this_jaxlib_is_taken(fake):
    found = inspect_library(fake(), "cpu")
    assert (found.platform, found.is_available) == ("cpu", True)
    assert found.message == "libjaxferry_cpu.so built by a test for jaxlib 9.8.7"
    assert found.build_info["compiler"] == "a test"


@pytest.mark.parametrize("share", [0.002, 0.02, 0.3, 0.9, 0.999])
def test_a_truncated_library_is_refused_before_it_is_loaded(fake, share):
    path = fake()
    size = path.stat().st_size
    os.truncate(path, int(size * share))
    assert re.search(rf"ends after {int(size * share)} bytes|has {int(size * share)} of {size} bytes", refusal(path))


def test_the_host_step_is_asked_of_the_cpu_s_library_alone(fake):
    assert "lacks jaxferry_host_update" in refusal(fake(targets=TARGETS))
    assert inspect_library(fake("CUDA", targets=TARGETS), "CUDA").is_available


def test_settings_of_the_host_step_are_checked():
    native = library("cpu")
    with pytest.raises(InputError, match="count must be 0"):
        native.set_host_threads(-1)
    with pytest.raises(InputError, match="simd must be one of portable, avx2, avx512, avx512-bf16, got 'neon'"):
        native.set_host_simd("neon")


MAJOR, MINOR = ffi_version()
REFUSED = {
    "a newer minor version": (
        {"minor": MINOR + 1},
        f"was built for version {MAJOR}.{MINOR + 1} of XLA's FFI (jaxlib 9.8.7), jaxlib ",
    ),
    "another major version": ({"major": MAJOR + 1, "minor": 0}, f"has {MAJOR}.{MINOR}"),
    "another interface": (
        {"abi": ABI + 1},
        f"has version {ABI + 1} of the native interface, but this package needs version {ABI}",
    ),
    "another platform": ({"platform": "CUDA"}, "is for platform 'CUDA', not 'cpu'"),
    "missing operations": ({"targets": TARGETS[:-2]}, f"lacks {TARGETS[-2]}, {TARGETS[-1]}"),
    "no JSON": ({"info": "no JSON"}, "is not a native library (Expecting value"),
    "a list": ({"info": "[]"}, "is for platform None, not 'cpu'"),
    "nested JSON": ({"info": "[" * 100_000}, "nested JSON"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_library_that_does_not_fit_or_say_what_it_is_is_refused(fake, what):
    answers, message = REFUSED[what]
    assert message in refusal(fake(**answers))


def test_a_file_that_is_no_library_is_refused(tmp_path):
    path = tmp_path / "libjaxferry_cpu.so"
    path.write_text("not a library")
    assert "is not a native library" in refusal(path)


def test_the_newest_library_that_fits_is_found(fake, monkeypatch):
    paths = [fake(folder="oldest", minor=0), fake(folder="newer"), fake(folder="newest", minor=ffi_version()[1] + 1)]
    for age, path in zip((30, 20, 10), paths, strict=True):
        os.utime(path, (1e9 - age, 1e9 - age))
    module = sys.modules[find_library.__module__]
    monkeypatch.setattr(module, "library_directories", lambda: [path.parent for path in paths])
    assert find_library("cpu").path == paths[1]


@pytest.mark.parametrize("has_compiler", [True, False])
def test_without_a_library_the_message_names_the_places_the_cost_and_the_remedy(has_compiler, tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if has_compiler:
        (tmp_path / "g++").touch(mode=0o755)
    found = find_library("CUDA")
    assert (found.path, found.is_available) == (None, False)
    assert found.message.startswith(f"there is no libjaxferry_cuda.so in {tmp_path}, so plain JAX copies move layers")
    remedy = "build it with `jaxferry build-native`"
    assert found.message.endswith(f"; {remedy}" if has_compiler else f"; install a C++ compiler, then {remedy}")


def test_another_platform_is_an_input_error():
    with pytest.raises(InputError, match=r'platform must be "cpu", "gpu" or "cuda", got \'tpu\''):
        status("tpu")


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("set_bandwidth", ("up", 1e9), 'direction must be "load", "store" or "host", got \'up\''),
        ("set_bandwidth", ("load", -1), r"bytes_per_s must be 0 \(no limit\) or more, got -1"),
        ("set_bandwidth", ("load", float("nan")), r"bytes_per_s must be 0 \(no limit\) or more, got nan"),
        ("set_delay", (-0.5,), r"seconds must be 0 \(no delays\) or more, got -0.5"),
    ],
)
def test_settings_of_the_link_are_checked(cpu, function, arguments, message):
    with pytest.raises(InputError, match=message):
        getattr(cpu, function)(*arguments)


def run(script, directory):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), DIRECTORY_VARIABLE: str(directory)}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result


def test_a_process_without_a_library_is_told_once_and_goes_on(tmp_path):
    script = """
import jax, jaxferry.errors, jaxferry.native as native
print(native.status("cpu").is_available)
print(native.is_available("cpu"), native.is_available("cpu"), jax.numpy.ones(3).sum())
try:
    native.library("cpu")
except jaxferry.errors.NativeError as error:
    print(error)
"""
    result = run(script, tmp_path)
    *printed, message = result.stdout.splitlines()
    assert printed == ["False", "False False 3.0"]
    assert message.startswith(f"there is no libjaxferry_cpu.so in {tmp_path}, so plain JAX copies move layers")
    assert message.endswith("build it with `jaxferry build-native`")
    assert result.stderr.count(message) == 1


def test_importing_the_package_loads_no_library(tmp_path):
    script = "import jaxferry, jaxferry.native\nprint('libjaxferry' in open('/proc/self/maps').read())"
    assert run(script, tmp_path).stdout == "False\n"


def test_the_package_and_its_library_speak_of_the_same_interface():
    header = pathlib.Path(__file__).parents[2] / "xla_ffi" / "common" / "exports.h"
    text = header.read_text()
    assert re.search(r"#define JAXFERRY_ABI (\d+)", text)[1] == str(ABI)
    assert set(re.findall(r"XLA_FFI_Error\* (jaxferry_\w+)", text)) == set(TARGETS)
    assert set(CPU_FUNCTIONS) <= set(re.findall(r"\b(jaxferry_\w+)\(", text))


def test_asking_for_a_library_that_is_not_there_is_an_error(tmp_path, monkeypatch, fake):
    if status("cuda").is_available:
        assert library("cuda").platform == "CUDA"
    else:
        with pytest.raises(NativeError, match="libjaxferry_cuda"):
            library("cuda")
