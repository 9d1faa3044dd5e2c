"""`jaxferry doctor`: its JSON document, and a line for each thing in it."""

import importlib.metadata
import json
import os
import resource

import jax
import pytest

from broken_library import break_operations
from jaxferry.errors import NativeError
from jaxferry.native import cpus
from jaxferry.native import self_tests as self_test
from jaxferry.optimizer import host_memory


@pytest.fixture
def examined(jaxferry):
    """Runs the doctor with small transfers; returns its document and its lines."""

    def run(size="1KiB"):
        result = jaxferry("doctor", "--json", "--link-size", size)
        assert (result.status, result.err) == (0, "")
        return json.loads(result.out), jaxferry("doctor", "--link-size", size).out.splitlines()

    return run


def test_a_folder_for_optimizer_state_is_measured(jaxferry, tmp_path):
    command = "doctor", "--link-size", "1KiB", "--scratch", str(tmp_path)
    found = json.loads(jaxferry(*command, "--json").out)["scratch"]
    assert found["folder"] == str(tmp_path)
    assert 1e6 < found["read_bytes_per_s"] < 1e12 and 1e6 < found["write_bytes_per_s"] < 1e12
    [line] = [line for line in jaxferry(*command).out.splitlines() if line.startswith("scratch")]
    assert line.endswith(f"({tmp_path})")


def self_test_lines(lines):
    return [line.removeprefix("self-test  ") for line in lines if line.startswith("self-test")]


def test_the_document_says_what_there_is_and_the_report_has_a_line_for_each(examined, monkeypatch):
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", raising=False)
    found, lines = examined("1MiB")
    assert found["versions"]["jax"] == jax.__version__
    assert found["versions"]["optax"] == importlib.metadata.version("optax")
    [device] = [device for device in found["devices"] if device["id"] == 0]
    assert device["platform"] == jax.devices()[0].platform
    assert {"device", "pinned_host"} <= set(device["memory_kinds"])
    assert found["pinned_limit"] == {"bytes": 64 * 2**30, "source": "default"}
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert found["locked_limit_bytes"] == (None if soft == resource.RLIM_INFINITY else soft)
    cpu, cuda = found["libraries"]
    assert (cpu["platform"], cuda["platform"], cpu["is_available"]) == ("cpu", "CUDA", True)
    assert cpu["path"].endswith("libjaxferry_cpu.so") and cpu["message"] and cuda["message"]
    assert {"compiler", "jaxlib", "ffi_major", "ffi_minor"} <= set(cpu["build_info"])
    assert found["link"]["bytes"] == 2**20
    assert found["link"]["load_bytes_per_s"] > 0 and found["link"]["store_bytes_per_s"] > 0
    assert [each["source"] for each in found["host_memory"]] == [limit.source for limit in host_memory.limits()]
    assert all(each["num_bytes"] > 0 for each in found["host_memory"])

    kinds = ["versions", "library", "library", "link", *["self-test"] * 5, "pinned"]
    kinds += ["cpus"] * (3 + len(found["cpus"]["pools"])) + ["host"] * len(host_memory.limits())
    assert [line.split()[0] for line in lines if not line.startswith("device")] == kinds
    assert sum(line.startswith("device") for line in lines) == len(jax.devices())

    tested = found["self_test"]
    assert (tested["device"], tested["bytes"], tested["message"]) == (0, 2**20, None)
    assert [check["name"] for check in tested["checks"]] == ["load", "store", "product", "gradient", "mark"]
    assert all(check["passed"] and check["message"] is None for check in tested["checks"])
    assert all(check["bytes_per_s"] > 0 for check in tested["checks"][:4])
    assert tested["checks"][4]["bytes_per_s"] is None
    shown = self_test_lines(lines)
    assert [line.split(" GB/s")[1:] for line in shown] == [[" (1.00 MiB, device 0)"]] * 4 + [[]]
    assert shown[0].startswith("load: passed, ") and shown[4] == "mark: passed (device 0)"


def test_cpus_threads_and_nodes_are_told_with_their_sources(examined, monkeypatch):
    allowed = {min(os.sched_getaffinity(0))}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed)
    monkeypatch.delenv(cpus.VARIABLE, raising=False)
    found = examined()[0]["cpus"]
    assert found["num_cpus"] == found["limits"][0]["num_cpus"] == found["host_threads"]["num_threads"] == 1
    assert "affinity" in found["host_threads"]["source"] or os.cpu_count() == 1
    assert sum(node["num_cpus"] for node in found["numa_nodes"]) in (0, 1)
    assert {pool["name"].split()[0] for pool in found["pools"]} == {"XLA's", "OpenBLAS"}
    monkeypatch.setenv(cpus.VARIABLE, "3")
    lines = "\n".join(examined()[1])
    assert "cpus       1 may be used (1: " in lines
    assert "cpus       3 threads of host steps (JAXFERRY_HOST_THREADS;" in lines


@pytest.mark.parametrize("value", ["much", "-1"])
def test_the_limit_of_pinned_memory_is_that_of_the_environment(examined, monkeypatch, refused, value):
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "100")
    limit = {"bytes": 100 * 2**30, "source": "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"}
    assert examined()[0]["pinned_limit"] == limit
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", value)
    assert f"must be a whole number of GiB, got {value!r}" in refused("doctor")


@pytest.mark.parametrize("fault", ["silent", "failing"])
def test_a_check_that_fails_is_shown_with_its_reason(examined, monkeypatch, fault):
    break_operations(monkeypatch, fault, "ferry_store")
    found, lines = examined()
    checks = {check["name"]: check for check in found["self_test"]["checks"]}
    assert [name for name, check in checks.items() if not check["passed"]] == ["store"]
    assert ("bytes differ" if fault == "silent" else "it is broken") in checks["store"]["message"]
    assert checks["store"]["bytes_per_s"] is None and checks["load"]["bytes_per_s"] > 0
    shown = self_test_lines(lines)
    assert [line.split(": ")[0] for line in shown if ": failed: " in line] == ["store"] and len(shown) == 5


def test_without_a_library_the_report_says_why_there_is_no_self_test(examined, monkeypatch):
    def missing(platform):
        raise NativeError("there is no libjaxferry_cpu.so")

    monkeypatch.setattr(self_test, "library", missing)
    found, lines = examined()
    assert (found["self_test"]["message"], found["self_test"]["checks"]) == ("there is no libjaxferry_cpu.so", [])
    assert self_test_lines(lines) == ["not run: there is no libjaxferry_cpu.so"]
