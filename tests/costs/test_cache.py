"""The cache of measurements: hits and misses."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxferry.errors import InputError
from jaxferry.native import library, num_cpus
from jaxferry.training import MeasurementCache, cache_directory, surroundings

HERE = {"device": "cpu", "num_threads": 2, "jax": "1.0", "jaxlib": "1.0", "jaxferry": "0.1", "native": {"cpu": None}}


@pytest.fixture
def cache(tmp_path):
    return MeasurementCache(tmp_path, HERE)


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_another_process_finds_what_was_kept(cache, tmp_path):
    cache.put("a program", 0.125)
    assert MeasurementCache(tmp_path, dict(HERE)).get("a program") == 0.125


def test_another_content_is_not_found(cache):
    cache.put("a program", 0.125)
    assert cache.get("a program ") is None


@pytest.mark.parametrize("key", sorted(HERE))
def test_another_device_number_of_threads_or_version_is_not_found(cache, tmp_path, key):
    cache.put("a program", 0.125)
    assert MeasurementCache(tmp_path, HERE | {key: "another"}).get("a program") is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[" * 100_000,
        lambda text: "[1, 2]",
        lambda text: "null",
        lambda text: text.replace("0.125", "NaN"),
        lambda text: text.replace("0.125", "-1"),
        lambda text: text.replace("0.125", "true"),
        lambda text: text.replace("0.125", "1e300"),
        lambda text: text.replace("0.125", '"fast"'),
        lambda text: text.replace("jaxferry.measurement/", "jaxferry.measurement/9"),
        lambda text: json.dumps(json.loads(text) | {"key": "another"}),
        lambda text: "\udcff",
    ],
)
def test_a_damaged_file_is_as_good_as_none_and_is_replaced(cache, tmp_path, damage):
    cache.put("a program", 0.125)
    [file] = files(tmp_path)
    file.write_text(damage(file.read_text()), errors="surrogateescape")
    assert cache.get("a program") is None
    cache.put("a program", 0.5)
    assert cache.get("a program") == 0.5


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full")])
@pytest.mark.parametrize("function", ["replace", "fdopen"])
def test_an_interrupt_leaves_what_was_there_and_nothing_else(cache, tmp_path, monkeypatch, function, error):
    cache.put("a program", 0.125)
    before = files(tmp_path)

    def fail(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail)
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                cache.put("a program", 0.5)
        else:
            cache.put("a program", 0.5)
    assert files(tmp_path) == before
    assert cache.get("a program") == 0.125


def test_many_writers_leave_a_whole_file_at_any_time(cache):
    cache.put("a program", 0.0)

    def write_and_read(number):
        cache.put("a program", float(number))
        return cache.get("a program")

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(write_and_read, range(200)))
    assert set(found) <= {float(number) for number in range(200)}


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path):
    (tmp_path / "file").write_text("no folder")
    cache = MeasurementCache(tmp_path / "file", HERE)
    cache.put("a program", 0.125)
    assert cache.get("a program") is None


def test_without_a_folder_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = MeasurementCache(None, HERE)
    cache.put("a program", 0.125)
    assert cache.get("a program") is None
    assert files(tmp_path) == []


def test_the_environment_names_the_folder_or_none(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("JAXFERRY_CACHE_DIR", raising=False)
    assert cache_directory() == tmp_path / "home" / ".cache" / "jaxferry"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "jaxferry"
    monkeypatch.setenv("JAXFERRY_CACHE_DIR", str(tmp_path / "own"))
    assert cache_directory() == tmp_path / "own"
    monkeypatch.setenv("JAXFERRY_CACHE_DIR", "off")
    assert cache_directory() is None


def test_a_folder_of_a_user_that_does_not_exist_is_named(monkeypatch):
    monkeypatch.setenv("JAXFERRY_CACHE_DIR", "~nosuchuser/x")
    with pytest.raises(InputError, match=r"JAXFERRY_CACHE_DIR must be a folder or .*'~nosuchuser/x'"):
        cache_directory()


def test_surroundings_tell_devices_and_emulated_links_apart():
    cpu = library("cpu")
    usual = surroundings("cpu", "cpu")
    assert usual == surroundings("cpu", "cpu") != surroundings("cpu", "another")
    assert json.loads(json.dumps(usual)) == usual
    assert usual["num_threads"] == num_cpus() >= 1
    try:
        cpu.set_bandwidth("load", 1e9)
        slow = surroundings("cpu", "cpu")
    finally:
        cpu.set_bandwidth("load", 0)
    assert slow != usual == surroundings("cpu", "cpu")
