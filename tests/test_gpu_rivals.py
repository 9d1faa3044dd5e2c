"""The stages of the rivals: which Python runs them, when they are left out, and what stands beside our results."""

import argparse
import json
import os
import pathlib
import stat
import subprocess
import sys

import jax
import numpy as np
import pytest

import model
from benchmarks.gpu import rival_stages, rivals, settings, stages, steps

ROOT = pathlib.Path(__file__).parents[1]
DRIVER_RESULT = {"losses": [2.0, 1.0], "machine": {"cpu": "a", "device": "b", "torch": "9.9"}}
STUB_PYTHON = """#!/bin/sh
# {name}: packages in a folder of its own; a contender is answered, everything else is run.
case "$*" in
  *torch_contenders.py*) {answer} ;;
  *CPUAdamBuilder*) {build} ;;
  *) PYTHONPATH={site} exec {python} "$@" ;;
esac
"""


@pytest.fixture
def python_with(tmp_path):
    """Makes a Python that has packages of some versions, and does as told when it is to time a contender."""

    def make(*packages, answer="exit 0", build="exit 0"):
        site = tmp_path / "site"
        site.mkdir()
        for name in packages:
            (site / name).mkdir()
            (site / name / "__init__.py").write_text("raise RuntimeError('a probe imports nothing')\n")
            (site / f"{name}-9.9.dist-info").mkdir()
            (site / f"{name}-9.9.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 9.9\n")
        path = tmp_path / "stub-python"
        path.write_text(
            STUB_PYTHON.format(name=path, answer=answer, build=build, site=site, python=f"{sys.executable} -S")
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return make


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """Runs the stages of the rivals by a Python; returns the check and each stage's outcome and last words."""
    monkeypatch.setattr(stages, "LEAST_S", 0.01)

    def run(python, seconds=600.0, only=(), device="cpu"):
        out = tmp_path / "out"
        made = stages.Check(out, seconds, {"PYTHONPATH": str(ROOT)}, only)
        rival_stages.run_rivals(made, device, out, python, tmp_path / "extensions")
        journal = out / "check.jsonl"
        rows = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
        return made, {row["stage"]: (row["outcome"], " ".join(row["last"])) for row in rows if "outcome" in row}

    return run


def answer(**result):
    return f"echo '{json.dumps(DRIVER_RESULT | result)}'"


def test_without_packages_every_size_is_left_out_with_the_reason_and_nothing_fails(python_with, checked):
    python = python_with()
    made, found = checked(python, device="gpu")
    assert set(found) == {"rivals_124m", "rivals_medium", "rivals_xl"}
    for outcome, why in found.values():
        assert outcome == stages.LEFT_OUT
        assert why == f"no torch in {python}; --rivals-python names another Python"
    made.run(stages.Stage("other", ("true",), 5.0))
    assert made.has_passed


def test_a_second_python_runs_the_rivals_whose_packages_it_has(python_with, checked, tmp_path):
    python = python_with("torch", answer=answer(step_s=2.0, tokens_per_s=4.0, peak_device_bytes=None))
    _, found = checked(python)
    assert found == {"rivals_tiny": (stages.PASSED, "")}
    written = json.loads((tmp_path / "out" / "steps" / "rivals_tiny.json").read_text())
    assert [(row["contender"], row["outcome"]) for row in written["rows"]] == [("torch-fsdp2", "measured")]
    assert written["machine"]["torch"] == "9.9"


@pytest.mark.parametrize(("build", "contenders"), [("exit 0", list(settings.RIVALS)), ("exit 3", ["torch-fsdp2"])])
def test_deepspeed_is_timed_only_once_its_adam_is_built(python_with, checked, tmp_path, build, contenders):
    left = tmp_path / "extensions" / "cpu_adam" / "lock"
    left.parent.mkdir(parents=True)
    left.touch()
    python = python_with("torch", "deepspeed", answer=answer(), build=build)
    _, found = checked(python)
    assert found["rivals_build"][0] == (stages.PASSED if build == "exit 0" else stages.FAILED)
    assert found["rivals_tiny"][0] == stages.PASSED
    written = json.loads((tmp_path / "out" / "steps" / "rivals_tiny.json").read_text())
    assert [row["contender"] for row in written["rows"]] == contenders
    assert not left.exists()  # a build would wait for it


def driver_arguments(output, python, **options):
    defaults = {"size": "tiny", "device": "cpu", "batch": 1, "seq": 8, "steps": 3, "compile": False, "limit": 100.0}
    return argparse.Namespace(output=output, python=python, only=list(settings.RIVALS), **defaults | options)


def test_a_rival_that_fails_fails_the_stage_and_one_without_memory_or_package_does_not(python_with, tmp_path):
    python = python_with("torch", answer="echo 'no such option' >&2; exit 1")
    rows = rivals.run_all(driver_arguments(tmp_path, python), lambda rows: None)
    outcomes = {row.contender: row.outcome for row in rows}
    assert outcomes["torch-fsdp2"] == "failed (1): no such option"
    assert outcomes["deepspeed-zero2"] == outcomes["deepspeed-zero3"] == f"left out: no deepspeed in {python}"
    assert rivals.status_of(rows) == 1
    scarce = steps.Row("torch-fsdp2", "out of memory: 9 GiB", 1.0, {})
    assert rivals.status_of([scarce, *rows[1:]]) == 0
    late = steps.Row("torch-fsdp2", "timed out after 9 s", 9.0, {})
    assert rivals.status_of([late, *rows[1:]]) == steps.TIMED_OUT


@pytest.fixture
def ours(tmp_path):
    """Writes results of steps.py beside which a rival stands; returns the arguments and the rival's row."""

    def make(**changes):
        found = {
            "machine": {"cpu": "a", "device": "b"},
            "model": {"name": "GPT-2 tiny", "batch": 1, "sequence": 8},
            "rows": [
                {"contender": "exact", "step_s": 0.5, "losses": [2.0, 1.25]},
                {"contender": "auto", "outcome": "left out"},
            ],
        }
        (tmp_path / "steps_tiny.json").write_text(json.dumps(found | changes))
        return driver_arguments(tmp_path, "python"), steps.Row(
            "torch-fsdp2", "measured", 1.0, DRIVER_RESULT | {"step_s": 1}
        )

    return make


def test_results_stand_beside_ours_as_ratios(ours):
    arguments, row = ours()
    found = rivals.document(arguments, [row])
    assert found["ratios"] == {"torch-fsdp2": {"exact": 2.0}}
    assert found["losses_differ_by"] == {"torch-fsdp2": pytest.approx(0.2)}
    compared, off = rivals.ratio_lines(found)
    assert compared == "torch-fsdp2: its step takes 2.00 of exact"
    assert "losses of torch-fsdp2 differ by 20.00%" in off
    assert rivals.ratio_lines(found | {"losses_differ_by": {"torch-fsdp2": 1e-4}}) == [compared]


@pytest.mark.parametrize("size", settings.SHAPES)
def test_rivals_train_models_of_our_sizes(size):
    config = model.SIZES[size]
    found = (config.num_layers, config.num_heads, config.channels, config.max_length, config.vocab_size)
    assert settings.SHAPES[size] == found


IN_TORCH = """
import json, sys
import numpy as np
import torch
from benchmarks.gpu import torch_gpt2
arrays = np.load(sys.argv[1])
module = torch_gpt2.GPT2(*json.loads(sys.argv[2]))
left = set(arrays) - {"tokens"}
def value_of(path, shape):
    assert arrays[path].shape == shape
    left.remove(path)
    return arrays[path]
torch_gpt2.set_parameters(module, value_of)
assert not left, left
loss = module(torch.from_numpy(arrays["tokens"]).long())
loss.backward()
named = torch_gpt2.parameters_as_in_flax(module)
gradients = {path: (leaf.grad.T if is_transposed else leaf.grad).numpy() for path, leaf, is_transposed in named}
np.savez(sys.argv[1], loss=loss.item(), **gradients)
"""


def by_path(tree):
    return {"/".join(part.key for part in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def python_of_rivals(*rivals):
    """The Python that has the packages of some rivals; skips the test where there is none."""
    python = os.environ.get("JAXFERRY_RIVALS_PYTHON") or sys.executable
    why = rival_stages.reasons(python)
    if missing := next(filter(None, (why[rival] for rival in rivals)), None):
        pytest.skip(f"{missing}; JAXFERRY_RIVALS_PYTHON names another Python")
    return python


def test_the_model_in_pytorch_has_the_loss_and_gradients_of_ours(tmp_path):
    python = python_of_rivals(settings.FSDP2)
    shape = (2, 4, 32, 16, 64)
    config = model.Config(*shape)
    generator = np.random.default_rng(0)
    params = jax.tree.map(
        lambda like: generator.standard_normal(like.shape, np.float32) * np.float32(0.2),
        jax.eval_shape(model.make_init(config), jax.random.key(0)),
    )
    tokens = generator.integers(0, config.vocab_size, (2, 9), dtype=np.int32)
    loss, gradients = jax.value_and_grad(model.make_loss(config))(params, {"tokens": tokens})
    path = tmp_path / "arrays.npz"
    np.savez(path, tokens=tokens, **by_path(params))
    command = [python, "-c", IN_TORCH, str(path), json.dumps(shape)]
    # So small a model needs no second thread, and on a busy machine one of OpenMP would wait for the other.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert finished.returncode == 0, finished.stderr
    found = dict(np.load(path))
    assert found.pop("loss") == pytest.approx(float(loss), rel=1e-5)
    wanted = by_path(gradients)
    assert set(found) == set(wanted)
    for name, leaf in wanted.items():
        np.testing.assert_allclose(found[name], leaf, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_rivals_train_as_plain_jax_does(tmp_path):
    python = python_of_rivals(*settings.RIVALS)
    small = ["--size", "tiny", "--device", "cpu", "--batch", "1", "--seq", "8", "--steps", "3"]
    for script, options in (("steps.py", ["--only", "plain"]), ("rivals.py", ["--python", python, "--limit", "500"])):
        command = [sys.executable, str(ROOT / "benchmarks/gpu" / script), str(tmp_path), *small, *options]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=550)
        assert finished.returncode == 0, finished.stdout + finished.stderr
    found = json.loads((tmp_path / "rivals_tiny.json").read_text())
    assert set(found["ratios"]) == set(settings.RIVALS)
    # Six steps of AdamW: with other gradients, other decay or clipping, the losses part.
    assert all(off < rivals.MOST_OFF for off in found["losses_differ_by"].values())
