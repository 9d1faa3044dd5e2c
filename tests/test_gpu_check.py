"""What of benchmarks/gpu needs no GPU: how it builds, what it concludes, and how it fails without one."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from benchmarks.gpu import build, link_rates, overlap, summary
from benchmarks.gpu.rates import Overlap, Rate

ROOT = pathlib.Path(__file__).parents[1]


def run_check(tmp_path, **environment):
    command = ["bash", str(ROOT / "benchmarks/gpu/check.sh"), str(tmp_path / "results")]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHON": sys.executable} | environment, timeout=120
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
    assert [stage["outcome"] for stage in result["stages"]] == ["passed"] + ["failed (3)"] * 4


@pytest.mark.parametrize(
    ("lines", "outcomes"),
    [
        (["a\t0\t2\n", "b\t124\t5\n"], ["passed", "timed out"]),
        (["a\t137\t1\n", "b\t1\t1\n"], ["timed out", "failed (1)"]),
    ],
)
def test_outcomes_are_told_apart(lines, outcomes):
    assert [stage["outcome"] for stage in summary.read_stages(lines)] == outcomes


def test_a_result_that_was_cut_short_is_no_obstacle(tmp_path):
    (tmp_path / "good.json").write_text('{"a": 1}')
    (tmp_path / "cut.json").write_text('{"a": ')
    (tmp_path / "of_others.json").write_text("{}")
    assert summary.collect(tmp_path, ["good", "cut", "missing"]) == {"good": {"a": 1}, "cut": {"error": "not complete"}}


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
