"""`jaxferry doctor` from outside."""

import importlib.metadata
import json

import jax


def test_the_document_says_what_there_is(jaxferry):
    result = jaxferry("doctor", "--json", "--link-size", "1MiB")
    assert (result.status, result.err) == (0, "")
    found = json.loads(result.out)
    assert found["versions"]["jax"] == jax.__version__
    assert found["versions"]["optax"] == importlib.metadata.version("optax")
    [device] = [device for device in found["devices"] if device["id"] == 0]
    assert device["platform"] == jax.devices()[0].platform
    assert {"device", "pinned_host"} <= set(device["memory_kinds"])
    assert [library["platform"] for library in found["libraries"]] == ["cpu", "CUDA"]
    assert all(library["message"] for library in found["libraries"])
    assert found["link"]["bytes"] == 2**20
    assert found["link"]["load_bytes_per_s"] > 0
    assert found["link"]["store_bytes_per_s"] > 0


def test_a_library_is_named_with_what_it_was_built_with(jaxferry):
    [cpu, _] = json.loads(jaxferry("doctor", "--json", "--link-size", "1KiB").out)["libraries"]
    assert cpu["is_available"] is True
    assert cpu["path"].endswith("libjaxferry_cpu.so")
    assert {"compiler", "jaxlib", "ffi_major", "ffi_minor"} <= set(cpu["build_info"])


def test_the_limit_of_pinned_memory_is_that_of_the_environment(jaxferry, monkeypatch, refused):
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", raising=False)
    limit = json.loads(jaxferry("doctor", "--json", "--link-size", "1KiB").out)["pinned_limit"]
    assert limit == {"bytes": 64 * 2**30, "source": "default"}
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "100")
    limit = json.loads(jaxferry("doctor", "--json", "--link-size", "1KiB").out)["pinned_limit"]
    assert limit == {"bytes": 100 * 2**30, "source": "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"}
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "much")
    assert "must be a whole number of GiB, got 'much'" in refused("doctor")


def test_the_report_has_a_line_for_each_thing(jaxferry):
    lines = jaxferry("doctor", "--link-size", "1KiB").out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith("device")] == [
        "versions",
        "library",
        "library",
        "link",
        "pinned",
    ]
    assert sum(line.startswith("device") for line in lines) == len(jax.devices())


def test_nothing_cannot_be_moved(refused):
    assert "--link-size must be positive, got 0" in refused("doctor", "--link-size", "0")
