"""The parts of benchmarks/gpu that need no GPU: builds, conclusions, and failure without a GPU."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from benchmarks.gpu import build, check, models, steps
from jaxferry.planner import policies
from slowly import slow

ROOT = pathlib.Path(__file__).parents[1]
HANGS = "import time, threading\ndef waits_for_ever():\n    time.sleep(3600)\nwaits_for_ever()"


def rows_of(out):
    return [json.loads(line) for line in (out / "check.jsonl").read_text().splitlines()]


def nvcc():
    """The compiler of this machine, or that of gpu-packages."""
    found = sorted(pathlib.Path(sys.prefix).glob("gpu-packages/nvidia/cu*/bin/nvcc"))
    path = build.find_tool("nvcc") or (str(found[-1]) if found else None)
    assert path, "there is no nvcc: `make test` puts one beside the environment"
    return path


def run_check(out, *arguments, **environment):
    command = ["bash", str(ROOT / "benchmarks/gpu/check.sh"), str(out), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHON": sys.executable} | environment, timeout=500
    )


def test_the_check_says_in_one_line_that_there_is_no_gpu(tmp_path):
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    finished = run_check(tmp_path / "out", PATH=f"{program.parent}:{os.environ['PATH']}")
    assert finished.returncode == 1
    assert finished.stderr.count("\n") == 1
    assert "there is no NVIDIA GPU here" in finished.stderr


@pytest.mark.slow
def test_the_check_itself_runs_without_a_gpu(tmp_path):
    some = (
        "facts",
        "smoke_reference",
        "smoke_exact",
        "smoke_native-overlapped_device_put",
        "smoke_gpu",
        "smoke_resident",
        "smoke_mixed",
    )
    some = ("--only", *some)
    finished = run_check(tmp_path, "--device", "cpu", *some)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    rows = rows_of(tmp_path)
    smoke = [row["result"] for row in rows if "result" in row and "smoke" in row["stage"]]
    assert {row["case"] for row in smoke} == {
        "exact/ferry/float32",
        "exact/device_put/float32",
        "native-overlapped/device_put/float32",
        "gpu/ferry/float32",
        "resident/ferry/float32",
        "mixed/ferry/float32",
    }
    assert all(row["off"] < 1e-4 for row in smoke)
    assert {row["case"] for row in smoke if row["subgroups"] > 1} == {"gpu/ferry/float32", "mixed/ferry/float32"}
    assert any("bytes_per_s" in row.get("result", ()) for row in rows)


def test_every_policy_and_every_class_of_tests_has_a_stage():
    assert {policy for policy, _, _ in check.smoke_cases()} == {*policies(), *check.UPDATE_PLACES}
    names = [name for name, _ in check.test_groups(ROOT / "tests/gpu/test_operations.py")]
    assert names == ["TestCopies", "TestProducts", "TestFerry", "TestMarks", "functions"]


def test_model_operations_are_those_of_the_products_and_of_causal_attention():
    # GPT-2: 12 C^2 and 13 C a block, the head's table, the last norm; attention of 3 * 2 * T * C a token and layer.
    made, width, layers, length = models.of_size("124m"), 768, 12, 1024
    num = layers * (12 * width**2 + 13 * width) + 50257 * width + 2 * width
    assert made.flops(2, length) == 2 * length * (6 * num + 6 * layers * width * length)
    llama = models.of_size("llama-tiny")
    assert llama.flops(1, 1) == 6 * (sum(leaf.size for leaf in jax.tree.leaves(llama.shapes)) - 256 * 64 + 2 * 64)


def test_what_was_measured_and_is_not_as_expected_is_named():
    expected = {"measured_over_predicted": [0.9, 1.1], "measured_over_bound": 1.15, "all_memory_over_plain": 1.03}
    rows = [
        {"contender": "plain", "step_s": 1.0},
        {"contender": "l2l", "measured_over_predicted": 1.0, "measured_over_bound": 1.3},
        {"contender": "auto", "measured_over_predicted": 9.0, "measured_over_bound": 1.2},
    ]
    ratio, bound = steps.surprises({"expected": expected, "rows": rows})
    assert "auto" in ratio and "9.00" in ratio and "1.20" in bound
    rows[2] |= {"measured_over_predicted": 1.05, "measured_over_bound": 1.1}
    assert not steps.surprises({"expected": expected, "rows": rows})
    rows.append(rows[2] | {"contender": "auto-all-memory", "step_s": 1.02})
    assert not steps.surprises({"expected": expected, "rows": rows})
    rows[-1]["step_s"] = 1.04
    (slower,) = steps.surprises({"expected": expected, "rows": rows})
    assert "auto-all-memory / plain is 1.04" in slower
    assert not steps.surprises({"bytes_per_s": 1.0})


def test_losses_that_differ_by_more_than_rounding_are_a_failure():
    def status(*losses):
        rows = [steps.Row(str(i), "measured", 1.0, {"losses": own, "step_s": 1.0}) for i, own in enumerate(losses)]
        return steps.status_of([*rows, steps.Row("plain", "measured", 1.0, {"losses": [2.0, 1.0], "step_s": 1.0})])

    assert status([2.0, 1.0], [2.0, 1.003, 0.9]) == 0
    assert status([2.0, 1.0], [2.0, 1.02]) == 1
    assert status([2.0, 0.9]) == 1


def test_nvcc_alone_builds_the_library_where_there_is_no_cmake(tmp_path):
    (command,) = build.nvcc_commands(nvcc(), tmp_path, "90")
    named = {pathlib.Path(part).name for part in map(str, command)}
    assert {"rows.cu", "product.cc", "checks.cc"} <= named
    # What nvcc would run, without the minutes that it takes.
    dry = subprocess.run([*map(str, command), "--dryrun"], capture_output=True, text=True)
    assert dry.returncode == 0, dry.stderr
    assert "libjaxferry_cuda.so" in dry.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ("plain", "native-overlapped", "l2l", "auto"),
        *slow(("plain", "recipe", "native-overlapped", "zero-offload", "l2l", "auto", "auto-all-memory", "streamed")),
    ],
    ids=len,
)
def test_training_steps_are_timed_and_policies_that_move_data_agree(tmp_path, names):
    # Small, but all that a GPU runs: a process for each contender, and what they share.
    command = [sys.executable, str(ROOT / "benchmarks/gpu/steps.py"), str(tmp_path), "--size", "tiny"]
    command += ["--device", "cpu", "--batch", "1", "--seq", "8", "--steps", "3", "--only", *names]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    result = json.loads((tmp_path / "steps_tiny.json").read_text())
    rows = {row["contender"]: row for row in result["rows"]}
    assert set(rows) == set(names)
    assert all(row["outcome"] == "measured" and len(row["losses"]) == 6 for row in rows.values())
    assert result["losses_bit_identical"]
    assert rows["auto"]["memory_budget_bytes"] == rows["l2l"]["counted_bytes"] >= rows["auto"]["counted_bytes"]
    for row in rows.values():
        # bfloat16 has 8 bits: the programs differ, the training does not.
        assert row["losses"] == pytest.approx(rows["plain"]["losses"], rel=2.0**-8)
        assert row["losses"][-1] < row["losses"][0]
        if row["contender"] not in ("plain", "recipe"):
            # A plan without loads, or without gradients that are sent, leaves that direction alone.
            assert all((0 < share <= 1) == (row["busy"][lane] > 0) for lane, share in row["recorded"].items())
            assert row["recorded"]["GPU"] > 0 and (row["recorded"]["host"] > 0) != (row["contender"] == "streamed")
            assert row["mean_of_kind_s"]["update"][0] > 0
    assert "bit-identical" in finished.stdout


def test_a_contender_that_hangs_leaves_its_stack(capfd):
    code = f"import sys; print('XLA waits', file=sys.stderr)\n{HANGS}"
    steps.run_contender("hangs", [sys.executable, "-c", code], dict(os.environ), limit_s=3.0)
    told = capfd.readouterr().err
    assert "XLA waits" in told and "waits_for_ever" in told


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys; sys.exit('jax: RESOURCE_EXHAUSTED: 9 GiB')", "out of memory: jax: RESOURCE_EXHAUSTED: 9 GiB"),
        ("import sys; sys.exit('no such thing')", "failed (1): no such thing"),
        ("import os; os.kill(os.getpid(), 9)", "killed, most likely for host memory"),
    ],
)
def test_a_contender_that_fails_says_why_in_one_line(program, said):
    row = steps.run_contender("failing", [sys.executable, "-c", program], dict(os.environ), limit_s=60)
    assert row.outcome == said
