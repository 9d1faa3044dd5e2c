"""`jaxferry profile`: measured, and estimated for a machine."""

import json

import jax
import pytest

from jaxferry.costs import Profile

H200 = ("--machine", "h200-pcie5")
NUM_LAYERS, LAYER_BYTES = 4, 4 * 32 * 32


@pytest.fixture
def profiled(jaxferry, user_model):
    """Profiles the model of shapes; returns the command's JSON document."""

    def run(*options):
        result = jaxferry("profile", "--model", user_model("shapes"), *options, "--json")
        assert result.status == 0, result.err
        return json.loads(result.out)

    return run


def test_an_estimate_is_marked_states_host_memory_and_round_trips(profiled, user_model, tmp_path):
    path = tmp_path / "profile.json"
    printed = profiled("--estimate", *H200, "-o", path)
    written = Profile.load(path)
    assert Profile.from_json(printed) == written
    assert written.machine["estimated"] is True
    assert written.machine["model"] == user_model("shapes")
    masters = NUM_LAYERS * LAYER_BYTES
    sizes = {"master parameters": masters, "optimizer state": 2 * masters + 4, "compute copy": masters}
    assert written.machine["host_bytes"] == sizes | {"gradients": masters}
    assert [layer.param_bytes for layer in written.layers] == [LAYER_BYTES] * NUM_LAYERS
    assert profiled(*H200) == printed  # --machine alone
    halves = profiled(*H200, "--compute-dtype", "bfloat16")["layers"]
    assert [layer["param_bytes"] for layer in halves] == [LAYER_BYTES // 2] * NUM_LAYERS


def test_devices_and_processes_share_the_work(profiled):
    alone, shared = profiled(*H200), profiled(*H200, "--devices", 4, "--processes", 2)
    assert (shared["num_devices"], shared["num_processes"]) == (4, 2)
    for name, size in alone["machine"]["host_bytes"].items():
        assert shared["machine"]["host_bytes"][name] == -(-size // 2)


def test_the_table_says_that_nothing_was_measured(jaxferry, user_model):
    shown = jaxferry("profile", "--estimate", *H200, "--model", user_model("shapes")).out
    assert all(text in shown for text in ("Estimated for h200-pcie5, not measured", "layer_0", "fwd DHA"))


def test_a_machine_of_ones_own(profiled, tmp_path):
    speeds = ("flops_per_s", "float32_flops_per_s", "memory_bytes_per_s", "host_bytes_per_s")
    figures = {"format": "jaxferry.machine/1", "name": "my box", "memory_bytes": 1e9, "link_bytes_per_s": 1e3}
    (tmp_path / "box.json").write_text(json.dumps(figures | dict.fromkeys(speeds, 1e11)))
    made = Profile.from_json(profiled("--machine", tmp_path / "box.json"))
    assert made.machine["name"] == "my box"
    assert made.layers[0].load_s == pytest.approx(LAYER_BYTES / 1e3, rel=1e-4)


def test_an_estimate_is_of_the_optimizer_s_bytes(jaxferry, user_model):
    """Gradient and copy, masters as they are stored, and state, which updates read and write."""
    options = ("profile", "--model", user_model("shapes"), "--machine", "a100-pcie4", "--compute-dtype", "bfloat16")
    found = {}
    for optimizer in ("adamw", "sgd", "adamw-int8-bf16"):
        made = Profile.from_json(json.loads(jaxferry(*options, "--optimizer", optimizer, "--json").out))
        assert made.machine["optimizer"] == optimizer
        found[optimizer] = made
    layers = {optimizer: made.layers[0] for optimizer, made in found.items()}
    split, of_int8 = 2 + 2 * 17 / 8, 2 + 2 * 4 / 256
    moved = {"adamw": 4 + split + 16, "sgd": 4 + split, "adamw-int8-bf16": 4 + 2 + 2 * of_int8}
    for optimizer, layer in layers.items():
        assert layer.update_s / layers["sgd"].update_s == pytest.approx(moved[optimizer] / moved["sgd"], rel=1e-3)
    held = [found[optimizer].machine["host_bytes"]["optimizer state"] for optimizer in layers]
    assert held[0] > held[2] > held[1]
    assert layers["adamw"].state_bytes > layers["adamw-int8-bf16"].state_bytes > layers["sgd"].state_bytes


def test_a_measured_profile_is_kept_for_the_next_time_unless_the_cache_is_off(
    jaxferry, profiled, user_model, tmp_path, monkeypatch
):
    path, cache = tmp_path / "profile.json", tmp_path / "cache"
    monkeypatch.setenv("JAXFERRY_CACHE_DIR", str(cache))
    measured = profiled("-o", path)
    written = Profile.load(path)
    assert Profile.from_json(measured) == written
    assert written.machine["measured"] is True
    assert written.machine["device"] == jax.devices()[0].device_kind
    assert (written.machine["model"], written.machine["optimizer"]) == (user_model("shapes"), "adamw")
    assert [layer.param_bytes for layer in written.layers] == [LAYER_BYTES] * NUM_LAYERS
    assert all(layer.load_s > 0 and layer.update_s > 0 and layer.forward_s > 0 for layer in written.layers)
    assert profiled() == measured and list(cache.rglob("*.json"))
    assert "Measured on" in jaxferry("profile", "--model", user_model("shapes")).out
    assert profiled("--optimizer", "sgd") != measured
    monkeypatch.setenv("JAXFERRY_CACHE_DIR", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    profiled()
    assert not (tmp_path / "other").exists()
