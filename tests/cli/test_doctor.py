"""`jaxferry doctor` from outside."""

import importlib.metadata
import json
import os

import jax
import pytest

from broken_library import break_operations
from jaxferry.errors import NativeError
from jaxferry.native import cpus, self_test
from jaxferry.optimizer import host_memory


def test_the_document_says_what_there_is(jaxferry, monkeypatch):
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", raising=False)
    result = jaxferry("doctor", "--json", "--link-size", "1MiB")
    assert (result.status, result.err) == (0, "")
    found = json.loads(result.out)
    assert found["versions"]["jax"] == jax.__version__
    assert found["versions"]["optax"] == importlib.metadata.version("optax")
    [device] = [device for device in found["devices"] if device["id"] == 0]
    assert device["platform"] == jax.devices()[0].platform
    assert {"device", "pinned_host"} <= set(device["memory_kinds"])
    assert found["pinned_limit"] == {"bytes": 64 * 2**30, "source": "default"}
    assert [library["platform"] for library in found["libraries"]] == ["cpu", "CUDA"]
    assert all(library["message"] for library in found["libraries"])
    assert found["link"]["bytes"] == 2**20
    assert found["link"]["load_bytes_per_s"] > 0
    assert found["link"]["store_bytes_per_s"] > 0
    assert [each["source"] for each in found["host_memory"]] == [limit.source for limit in host_memory.limits()]
    assert all(each["num_bytes"] > 0 for each in found["host_memory"])


def test_cpus_threads_and_nodes_are_told_with_their_sources(jaxferry, monkeypatch):
    allowed = {min(os.sched_getaffinity(0))}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed)
    monkeypatch.delenv(cpus.VARIABLE, raising=False)
    found = json.loads(jaxferry("doctor", "--json", "--link-size", "1KiB").out)["cpus"]
    assert found["num_cpus"] == 1
    assert found["limits"][0]["num_cpus"] == 1
    assert found["host_threads"]["num_threads"] == 1
    assert "affinity" in found["host_threads"]["source"] or os.cpu_count() == 1
    assert sum(node["num_cpus"] for node in found["numa_nodes"]) in (0, 1)
    assert {pool["name"].split()[0] for pool in found["pools"]} == {"XLA's", "OpenBLAS"}
    monkeypatch.setenv(cpus.VARIABLE, "3")
    lines = jaxferry("doctor", "--link-size", "1KiB").out
    assert "cpus       1 may be used (1: " in lines
    assert "cpus       3 threads of host steps (JAXFERRY_HOST_THREADS;" in lines


def test_a_library_is_named_with_what_it_was_built_with(jaxferry):
    [cpu, _] = json.loads(jaxferry("doctor", "--json", "--link-size", "1KiB").out)["libraries"]
    assert cpu["is_available"] is True
    assert cpu["path"].endswith("libjaxferry_cpu.so")
    assert {"compiler", "jaxlib", "ffi_major", "ffi_minor"} <= set(cpu["build_info"])


def test_the_limit_of_pinned_memory_is_that_of_the_environment(jaxferry, monkeypatch, refused):
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "100")
    limit = json.loads(jaxferry("doctor", "--json", "--link-size", "1KiB").out)["pinned_limit"]
    assert limit == {"bytes": 100 * 2**30, "source": "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"}
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "much")
    assert "must be a whole number of GiB, got 'much'" in refused("doctor")
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "-1")
    assert "must be a whole number of GiB, got '-1'" in refused("doctor")


def test_the_report_has_a_line_for_each_thing(jaxferry):
    pools = json.loads(jaxferry("doctor", "--json", "--link-size", "1KiB").out)["cpus"]["pools"]
    lines = jaxferry("doctor", "--link-size", "1KiB").out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith("device")] == [
        "versions",
        "library",
        "library",
        "link",
        *["self-test"] * 5,
        "pinned",
        *["cpus"] * (3 + len(pools)),
        *["host"] * len(host_memory.limits()),
    ]
    assert sum(line.startswith("device") for line in lines) == len(jax.devices())


def self_test_lines(result):
    return [line.removeprefix("self-test  ") for line in result.out.splitlines() if line.startswith("self-test")]


def test_each_check_of_the_self_test_is_shown_with_its_rate(jaxferry):
    found = json.loads(jaxferry("doctor", "--json", "--link-size", "1MiB").out)["self_test"]
    assert (found["device"], found["bytes"], found["message"]) == (0, 2**20, None)
    assert [check["name"] for check in found["checks"]] == ["load", "store", "product", "gradient", "mark"]
    assert all(check["passed"] and check["message"] is None for check in found["checks"])
    assert all(check["bytes_per_s"] > 0 for check in found["checks"][:4])
    assert found["checks"][4]["bytes_per_s"] is None
    lines = self_test_lines(jaxferry("doctor", "--link-size", "1MiB"))
    assert [line.split(" GB/s")[1:] for line in lines] == [[" (1.00 MiB, device 0)"]] * 4 + [[]]
    assert lines[0].startswith("load: passed, ")
    assert lines[4] == "mark: passed (device 0)"


@pytest.mark.parametrize("fault", ["silent", "failing"])
def test_a_check_that_fails_is_shown_with_its_reason(jaxferry, monkeypatch, fault):
    break_operations(monkeypatch, fault, "ferry_store")
    result = jaxferry("doctor", "--json", "--link-size", "1KiB")
    checks = {check["name"]: check for check in json.loads(result.out)["self_test"]["checks"]}
    assert [name for name, check in checks.items() if not check["passed"]] == ["store"]
    assert ("bytes differ" if fault == "silent" else "it is broken") in checks["store"]["message"]
    assert checks["store"]["bytes_per_s"] is None and checks["load"]["bytes_per_s"] > 0
    lines = self_test_lines(jaxferry("doctor", "--link-size", "1KiB"))
    assert [line.split(": ")[0] for line in lines if ": failed: " in line] == ["store"]
    assert len(lines) == 5


def test_without_a_library_the_report_says_why_there_is_no_self_test(jaxferry, monkeypatch):
    def missing(platform):
        raise NativeError("there is no libjaxferry_cpu.so")

    monkeypatch.setattr(self_test, "library", missing)
    found = json.loads(jaxferry("doctor", "--json", "--link-size", "1KiB").out)["self_test"]
    assert (found["message"], found["checks"]) == ("there is no libjaxferry_cpu.so", [])
    lines = self_test_lines(jaxferry("doctor", "--link-size", "1KiB"))
    assert lines == ["not run: there is no libjaxferry_cpu.so"]


def test_the_version_is_printed(jaxferry):
    assert jaxferry("--version").out == f"jaxferry {importlib.metadata.version('jaxferry')}\n"
