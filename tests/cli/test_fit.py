"""`jaxferry fit` from outside."""

import json

import jax
import pytest

from jaxferry.cli.fit import _Workload as Workload
from jaxferry.step import Plan
from jaxferry.units import format_bytes
from slowly import slow_cases

A100 = ("--machine", "a100-pcie4")

SIZED = """

def sized(batch_size=8):
    import jax
    return loss_fn, init, jax.tree.map(lambda leaf: leaf[:1].repeat(batch_size, 0), batch(0))

def with_rates():
    def loss(params, batch):
        return loss_fn(params, batch) + (batch["x"][:, :3] * batch["rates"]).mean()
    return loss, init, lambda number: {**batch(number), "rates": jnp.ones(3)}
"""


WORDS = """
import jax
import jax.numpy as jnp

def make(batch_size=8, length=16):
    params = {"embed": jax.ShapeDtypeStruct((50, 8), jnp.float32), "head": jax.ShapeDtypeStruct((8, 50), jnp.float32)}
    ids = jax.ShapeDtypeStruct((batch_size, length), jnp.int32)
    return (lambda p, ids: jnp.mean((jnp.tanh(p["embed"][ids]) @ p["head"]) ** 2)), params, ids
"""


def fit(jaxferry, *arguments):
    result = jaxferry("fit", *arguments, "--json")
    assert result.status == 0
    return json.loads(result.out)


def test_the_document_answers(jaxferry, tmp_path):
    (tmp_path / "words.py").write_text(WORDS)
    limits = ("--host-memory", "64GiB", "--memory-budget", "4MiB")
    found = fit(jaxferry, f"{tmp_path / 'words.py'}:make", *A100, *limits, "--seq", 20)
    assert (found["format"], found["fits"], found["problem"]) == ("jaxferry.fit/1", True, "")
    assert found["budget_bytes"] == 2**22 and found["host_memory_bytes"] == 2**36
    own, largest = found["rows"]
    assert own["batch_size"] == 8 < largest["batch_size"] == found["largest_batch_size"]
    assert own["tokens_per_s"] == pytest.approx(8 * 20 / own["step_s"])
    assert sum(largest["device_bytes"].values()) <= 2**22
    assert Plan.from_json(own["plan"]).policy == "auto"
    masters = found["host_bytes"]["master parameters"]
    assert found["host_bytes"]["compute copy"] == masters / 2
    assert 2 * masters <= found["host_bytes"]["optimizer state"] <= 2 * masters + 8


@pytest.mark.slow
def test_less_device_memory_is_needed_in_tiles(jaxferry, tmp_path):
    (tmp_path / "words.py").write_text(WORDS.replace("(50, 8)", "(5000, 8)").replace("(8, 50)", "(8, 5000)"))
    own = (f"{tmp_path / 'words.py'}:make", *A100, "--batch", 16)
    tilings = ((), ("--tiles", 8), ("--tiles", "head=8"))
    whole, tiled, of_head = (fit(jaxferry, *own, *more, "--memory-budget", "16MiB") for more in tilings)
    assert max(of_head["smallest_bytes"], tiled["smallest_bytes"]) < whole["smallest_bytes"] / 3
    least = 1.1 * tiled["smallest_bytes"]
    chosen = fit(jaxferry, *own, "--tiles", "auto", "--memory-budget", int(least))
    assert chosen["fits"] and chosen["smallest_bytes"] <= tiled["smallest_bytes"]
    assert all(row["plan"]["layers"][-1]["tiles"] > 1 for row in chosen["rows"])
    assert all(sum(row["device_bytes"].values()) <= least for row in chosen["rows"])
    refused = jaxferry("fit", *own, "--tiles", "tail=8")
    assert refused.status == 2 and "tiles names 'tail', which is not a segment" in refused.err


@pytest.mark.slow
def test_one_row_of_131072_tokens_trains_llama_8b_in_24_gb_in_tiles(jaxferry):
    row = ("llama:8b", "--machine", "rtx4090-pcie4", "--batch", 1, "--seq", 131_072, "--offload-activations")
    whole, tiled = (fit(jaxferry, *row, *more) for more in ((), ("--tiles", 64)))
    assert tiled["fits"] and not whole["fits"]
    assert tiled["smallest_bytes"] < 0.6 * whole["smallest_bytes"]


def test_the_report_states_the_answer_memory_speed_and_plan(jaxferry, user_model, tmp_path):
    path, name = tmp_path / "plan.json", user_model("shapes")
    shown = jaxferry("fit", name, *A100, "--batch", 2, "-o", path).out
    assert "memory budget 55.9 GiB: 75% of the device memory of a100-pcie4" in shown
    assert f"{name} on a100-pcie4: fits, with batches of at least 16777215" in shown
    rows = ("samples a second", "limited by", "recomputed operations")
    for text in ("host memory", "(of an unknown size: --host-memory)", *rows):
        assert text in shown
    assert "batches of 2 are limited by the" in shown
    assert Plan.load(path).layers[0].name == "layer_0"


@pytest.mark.parametrize(
    ("optimizer", "of_moments", "buffers", "num_gradients"),
    [
        ("adamw", 8, "all", 4),
        *slow_cases(("adamw-bf16", 4, "auto", 2), ("adamw-int8", 2 + 2 * 4 / 256, "all", 4)),
        ("adamw-int8-bf16", 2 + 2 * 4 / 256 - 2.125, "auto", 2),
    ],
)
def test_a_machine_states_its_memory(jaxferry, user_model, tmp_path, optimizer, of_moments, buffers, num_gradients):
    machine = {
        "format": "jaxferry.machine/1",
        "name": "small box",
        "host_memory_bytes": 16384,
        "memory_bytes": 1e6,
    }
    speeds = ("flops_per_s", "float32_flops_per_s", "memory_bytes_per_s", "link_bytes_per_s", "host_bytes_per_s")
    (tmp_path / "box.json").write_text(json.dumps(machine | dict.fromkeys(speeds, 1e10)))
    options = "--machine", tmp_path / "box.json", "--optimizer", optimizer, "--gradient-buffers", buffers
    result = jaxferry("fit", user_model("shapes"), *options)
    one = 32 * 32
    # Both moments, compute copy, the 17 bits of each master that the copy lacks, and gradients.
    needed = format_bytes((of_moments + 2 + 17 / 8) * 4 * one + 2 * num_gradients * one + 4)
    assert f"does not fit: training needs {needed} of host memory, and there are 16.0 KiB: add memory" in result.out
    assert "keep optimizer state on a disk (--scratch)" in result.out


def test_a_disk_keeps_what_host_memory_does_not_hold(jaxferry, user_model):
    """Four layers of 1,024 parameters: 2 bytes of each for the copy; masters, moments and gradients elsewhere."""
    of_layer = 2**10 * (8 + 17 / 8)
    options = (*A100, "--gradient-buffers", "all", "--host-memory")
    every = sum(fit(jaxferry, user_model("shapes"), *options, "1GiB")["host_bytes"].values())
    for num in (0, 4):
        limit = every - max(num - 3, 0) * of_layer  # three of them are in slots
        found = fit(jaxferry, user_model("shapes"), *options, str(int(limit)), "--scratch", "1MB")
        assert found["fits"]
        assert found["disk_bytes"] == pytest.approx(num * of_layer, abs=16)
        assert sum(found["host_bytes"].values()) == pytest.approx(limit, abs=16)
        busy = found["rows"][0]["busy_share"].get("disk", 0)
        # Each byte is read and written once in a step.
        assert busy * found["rows"][0]["step_s"] == pytest.approx(2 * num * of_layer / 1e6, rel=1e-2)
    shown = jaxferry("fit", user_model("shapes"), *options, str(int(limit)), "--scratch", "1MB").out
    assert f"; {format_bytes(round(4 * of_layer))} on disk (--scratch)" in shown
    assert "limited by the disk" in shown
    full = jaxferry("fit", user_model("shapes"), *options, "1KiB", "--scratch", "1MB").out
    assert "add memory, freeze parameters, or take an optimizer with less" in full


def test_arrays_of_a_batch_change_their_leading_axis(user_model, tmp_path):
    name = user_model("functions").split(":")[0]
    with (tmp_path / f"{name}.py").open("a") as file:
        file.write(SIZED)
    by_axis, by_parameter, with_rates = (
        jax.tree.map(lambda leaf: leaf.shape, Workload(f"{name}:{function}", None, None).of(5)[1])
        for function in ("functions", "sized", "with_rates")
    )
    assert by_axis == by_parameter == {"x": (5, 32), "y": (5, 32)}
    assert with_rates == {**by_axis, "rates": (3,)}  # whose axis is not one of samples


def test_a_batch_without_rows_is_refused(refused, user_model, tmp_path):
    name = user_model("functions").split(":")[0]
    with (tmp_path / f"{name}.py").open("a") as file:
        file.write("\n\ndef empty():\n    return loss_fn, init, jax.tree.map(lambda leaf: leaf[:0], batch(0))\n")
    assert "returns a batch of 0 rows: give arrays of one row or more" in refused("fit", f"{name}:empty", *A100)
