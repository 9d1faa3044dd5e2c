"""What lanes take of each other's time, measured on calls with known speeds, and for a placement's own work."""

import threading
import time

import jax
import jax.numpy as jnp
import pytest

import jaxferry.training.contention
from accelerator import emulate
from jaxferry.costs import DOWN, HOST, UP, Contention
from jaxferry.settings import own_settings
from jaxferry.training import LEAST_S, MeasurementCache, measure_contention, speeds_in_pairs
from training.test_profile import Setting, Table, stack


class Resource:
    """Serves callers in turn; each takes some seconds of it, and some alone."""

    def __init__(self):
        self.lock = threading.Lock()

    def user(self, own_s, shared_s):
        def call():
            with self.lock:
                time.sleep(shared_s)
            time.sleep(own_s)

        return call


def assert_measured(work, are_right):
    """A busy machine may measure wrong several times, but a wrong measure is never right."""
    for _ in range(12):
        speeds = speeds_in_pairs(work)
        assert set(speeds) == {(one, other) for one in work for other in work if one != other}
        if are_right(speeds):
            return
    raise AssertionError(f"speeds beside each other: {speeds}")


def test_lanes_that_use_the_same_resource_take_each_other_s_time():
    resource = Resource()
    work = {HOST: resource.user(0, 0.02), UP: resource.user(0, 0.02), DOWN: lambda: time.sleep(0.02)}

    def are_right(speeds):
        shares = Contention.between(speeds).shares
        are_shared = 0.75 < speeds[HOST, UP] + speeds[UP, HOST] < 1.15  # together the speed of one
        are_free = all(speeds[pair] > 0.7 for pair in speeds if DOWN in pair)
        return are_shared and are_free and shares[HOST][UP] > 0.7 < shares[UP][HOST]

    assert_measured(work, are_right)


def test_a_lane_that_works_longer_than_the_window_has_its_speed():
    work = {HOST: lambda: time.sleep(2 * LEAST_S), UP: lambda: time.sleep(0.01)}
    assert_measured(work, lambda speeds: all(0.7 < speed < 1.3 for speed in speeds.values()))


def test_what_fails_in_a_lane_is_raised():
    def fails():
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        speeds_in_pairs({HOST: lambda: None, UP: fails})


def setting(width=1024):
    """Layers of `width` squared parameters; 1024 are just enough to be measured."""
    kernel = jax.ShapeDtypeStruct((width, width), jnp.float32)
    return Setting(stack, {"a": {"kernel": kernel}}, jax.ShapeDtypeStruct((8, width), jnp.float32))


@pytest.mark.parametrize("is_emulated", [False, True])
def test_transfers_and_updates_of_a_model_are_measured_once(is_emulated, monkeypatch, tmp_path):
    if is_emulated:
        emulate(monkeypatch)
    given = setting()
    arguments = given.optimizer, given.placement, given.partition.layers, MeasurementCache(tmp_path, {})
    with own_settings():
        found = measure_contention(*arguments)
    assert len(list(tmp_path.rglob("*.json"))) == 6
    monkeypatch.setattr(jaxferry.training.contention, "speeds_in_pairs", None)
    with own_settings():
        assert measure_contention(*arguments) == found


def test_layers_that_take_longer_to_issue_than_to_update_are_not_measured():
    given = setting(width=512)
    cache = MeasurementCache(None, {})
    assert not measure_contention(given.optimizer, given.placement, given.partition.layers, cache)


def test_a_profile_measured_on_an_accelerator_states_it(monkeypatch):
    """By speeds that are known: all others are answered by the table."""
    assert not setting().measure(cache=Table()).contention
    emulate(monkeypatch)
    speeds = {("host", "H2D"): 0.8, ("H2D", "host"): 0.5}

    class Speeds(Table):
        def get(self, content):
            if not content.startswith("speed of"):
                return super().get(content)
            lane, other = content.split(",")[0].removeprefix("speed of ").split(" beside ")
            return speeds.get((lane, other), 1.0)

    profile = setting().measure(cache=Speeds())
    assert profile.contention.shares == {"host": {"H2D": pytest.approx(0.4)}, "H2D": {"host": pytest.approx(0.625)}}
