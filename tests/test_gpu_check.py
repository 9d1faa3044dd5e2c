"""The parts of benchmarks/gpu that need no GPU: builds, conclusions, and failure without a GPU."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from benchmarks.gpu import build, link_rates, overlap, steps, summary
from benchmarks.gpu.rates import Overlap, Rate

ROOT = pathlib.Path(__file__).parents[1]


def run_check(tmp_path, **environment):
    command = ["bash", str(ROOT / "benchmarks/gpu/check.sh"), str(tmp_path / "results")]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHON": sys.executable} | environment, timeout=500
    )


def write_program(folder, name, text):
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(text)
    program.chmod(0o755)


def test_the_check_says_in_one_line_that_there_is_no_gpu(tmp_path):
    write_program(tmp_path / "bin", "nvidia-smi", "#!/bin/sh\nexit 9\n")
    finished = run_check(tmp_path, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert finished.returncode == 1
    assert finished.stderr.count("\n") == 1
    assert "there is no NVIDIA GPU here" in finished.stderr


def test_the_check_says_that_a_python_is_missing(tmp_path):
    finished = run_check(tmp_path, PYTHON="no-such-python")
    assert finished.returncode == 1
    assert "there is no no-such-python" in finished.stderr


def test_a_check_whose_stages_fail_still_sums_them_up(tmp_path):
    # A Python that sees a GPU, writes summaries, and fails at everything else.
    stand_in = (
        f'#!/bin/sh\ncase "$1" in -c) ;; *summary.py) exec {sys.executable} "$@" ;; *build.py) ;; *) exit 3 ;; esac\n'
    )
    write_program(tmp_path / "bin", "stand-in", stand_in)
    write_program(tmp_path / "bin", "nvidia-smi", "#!/bin/sh\n")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    finished = run_check(tmp_path, PYTHON=str(tmp_path / "bin" / "stand-in"), PATH=path)
    assert finished.returncode == 1
    assert "NOT all passed" in finished.stdout
    result = json.loads((tmp_path / "results" / "summary.json").read_text())
    assert [stage["outcome"] for stage in result["stages"]] == ["passed"] + ["failed (3)"] * 8


@pytest.mark.parametrize(
    ("lines", "outcomes"),
    [
        (["a\t0\t2\n", "b\t124\t5\n"], ["passed", "timed out"]),
        (["a\t137\t1\n", "b\t1\t1\n"], ["timed out", "failed (1)"]),
        (["a\t0\t1\n", "b\tleft out\t0\n"], ["passed", "left out"]),
    ],
)
def test_outcomes_are_told_apart(lines, outcomes):
    assert [stage["outcome"] for stage in summary.read_stages(lines)] == outcomes


def test_a_result_that_was_cut_short_is_no_obstacle(tmp_path):
    (tmp_path / "good.json").write_text('{"a": 1}')
    (tmp_path / "cut.json").write_text('{"a": ')
    (tmp_path / "of_others.json").write_text("{}")
    assert summary.collect(tmp_path, ["good", "cut", "missing"]) == {"good": {"a": 1}, "cut": {"error": "not complete"}}


def test_what_was_measured_and_is_not_as_expected_is_named():
    expected = {"measured_over_predicted": [0.9, 1.1], "measured_over_bound": 1.15}
    rows = [
        {"contender": "plain", "step_s": 1.0},
        {"contender": "l2l", "measured_over_predicted": 1.0, "measured_over_bound": 1.3},
        {"contender": "auto", "measured_over_predicted": 9.0, "measured_over_bound": 1.2},
    ]
    ratio, bound = summary.surprises({"expected": expected, "rows": rows})
    assert "auto" in ratio and "9.00" in ratio and "1.20" in bound
    rows[2] |= {"measured_over_predicted": 1.05, "measured_over_bound": 1.1}
    assert not summary.surprises({"expected": expected, "rows": rows})
    assert not summary.surprises({"bytes_per_s": 1.0})


def test_a_rate_is_judged_by_the_slower_of_link_and_device():
    assert Rate("of the link", 100, seconds=2.0, plain_s=1.8, compute_s=1.0).share == pytest.approx(0.9)
    assert Rate("of the device", 100, seconds=4.0, plain_s=1.8, compute_s=3.8).share == pytest.approx(0.95)
    assert Rate("plain", 100, seconds=2.0, plain_s=2.0).to_json()["bytes_per_s"] == 50


def test_a_transfer_is_hidden_as_far_as_both_take_no_longer_than_one():
    assert Overlap("all", load_s=1.0, compute_s=2.0, both_s=2.0).hidden == pytest.approx(1.0)
    assert Overlap("none", load_s=1.0, compute_s=2.0, both_s=3.0).hidden == pytest.approx(0.0)


def test_nvcc_alone_builds_the_library_where_there_is_no_cmake(tmp_path):
    found = sorted(pathlib.Path(sys.prefix).glob("gpu-packages/nvidia/cu*/bin/nvcc"))
    nvcc = build.find_tool("nvcc") or (str(found[-1]) if found else None)
    assert nvcc, "there is no nvcc: `make test` puts one beside the environment"
    (command,) = build.nvcc_commands(nvcc, tmp_path, "90")
    named = {pathlib.Path(part).name for part in map(str, command)}
    assert {"direct.cu", "product.cc", "checks.cc"} <= named
    # What nvcc would run, without the minutes that it takes.
    dry = subprocess.run([*map(str, command), "--dryrun"], capture_output=True, text=True)
    assert dry.returncode == 0, dry.stderr
    assert "libjaxferry_cuda.so" in dry.stderr


def test_where_one_way_to_build_fails_the_next_one_is_tried(tmp_path, monkeypatch):
    made = tmp_path / "made"
    monkeypatch.setattr(build, "ways", lambda folder: [[["false"], ["touch", tmp_path / "wrong"]], [["touch", made]]])
    monkeypatch.setattr(sys, "argv", ["build.py", str(tmp_path / "build")])
    build.main()
    assert made.exists()
    assert not (tmp_path / "wrong").exists()


def test_the_benchmarks_of_links_import_without_a_gpu():
    assert link_rates.ROWS[0] == 1
    assert link_rates.ROWS[-1] == 16384
    assert overlap.SIDE % 128 == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ("plain", "l2l", "auto"),
        pytest.param(("plain", "recipe", "native-overlapped", "zero-offload", "l2l", "auto"), marks=pytest.mark.slow),
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
            assert row["recorded"]["GPU"] > 0 and row["recorded"]["host"] > 0
            assert row["mean_of_kind_s"]["update"][0] > 0
    assert "bit-identical" in finished.stdout
    assert [line.split()[0] for line in summary.steps_lines(result)] == [row["contender"] for row in result["rows"]]


def test_a_contender_without_time_is_ended_and_the_rest_left_out(tmp_path):
    row = steps.run_contender("slow", ["sleep", "3600"], dict(os.environ), limit_s=0.2)
    assert row.outcome.startswith("timed out")
    assert steps.status_of([row]) == steps.TIMED_OUT


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


def test_only_failures_of_the_policies_fail_the_stage():
    measured = steps.Row("exact", "measured", 1.0, {"step_s": 1.0, "losses": [1.0], "only_moves_data": True})
    other = steps.Row("l2l", "measured", 1.0, {"step_s": 1.0, "losses": [2.0], "only_moves_data": True})
    assert steps.status_of([measured, steps.Row("plain", "out of memory: no", 1.0, {})]) == 0
    assert steps.status_of([measured, steps.Row("auto", "left out", 0.0, {})]) == 0
    assert steps.status_of([measured, steps.Row("auto", "failed (1): no", 1.0, {})]) == 1
    assert steps.status_of([measured, other]) == 1
