"""Stages of the check on a GPU (benchmarks/gpu/stages.py): outcomes, limits, archives, and what survives an end."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tarfile
import time

import pytest

from benchmarks.gpu import stages

ROOT = pathlib.Path(__file__).parents[1]


def rows_of(out):
    return [json.loads(line) for line in (out / "check.jsonl").read_text().splitlines()]


def outcomes_of(out):
    return {row["stage"]: row["outcome"] for row in rows_of(out) if "outcome" in row}


def archived(out):
    with tarfile.open(out / "check.tar.gz") as archive:
        return {entry.name: archive.extractfile(entry).read().decode() for entry in archive.getmembers()}


def stub(name, code, limit_s=60.0, **options):
    return stages.Stage(name, (sys.executable, "-c", code), limit_s, **options)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(stages, "LEAST_S", 0.01)


HANGS = "import time, threading\ndef waits_for_ever():\n    time.sleep(3600)\nwaits_for_ever()"


def test_each_stage_leaves_its_outcome_its_results_and_its_last_words(tmp_path, short):
    made = stages.Check(tmp_path, 60, {})
    made.run(
        stub("good", "from benchmarks.gpu.stages import emit; emit(a=1); emit(b=[2]); print('said')", env=ROOT_PATH),
        stub("bad", "import sys; print('RESULT {\"c\": 3}'); sys.exit('no such thing')"),
        stub("crash", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
        stages.Stage("missing", ("no-such-program",), 5.0),
        stub("dependent", "print('never')", needs=("good", "bad")),
    )
    expected = {"good": "passed", "bad": "failed", "crash": "crashed", "missing": "failed", "dependent": "left out"}
    assert made.outcomes == outcomes_of(tmp_path) == expected
    rows = rows_of(tmp_path)
    assert [row["result"] for row in rows if "result" in row] == [{"a": 1}, {"b": [2]}, {"c": 3}]
    summaries = {row["stage"]: row for row in rows if "outcome" in row}
    assert summaries["bad"]["last"] == ["no such thing"] and summaries["bad"]["status"] == 1
    assert any("Segmentation fault" in line for line in summaries["crash"]["last"])
    assert summaries["dependent"]["last"] == ["needs bad"]
    assert not made.has_passed
    kept = archived(tmp_path)
    assert kept["check.jsonl"] == (tmp_path / "check.jsonl").read_text()
    assert "said" in kept["logs/good.log"]


ROOT_PATH = {"PYTHONPATH": str(ROOT)}


def test_a_stage_that_hangs_is_ended_with_its_stack_and_the_next_one_runs(tmp_path, short):
    made = stages.Check(tmp_path, 60, {})
    made.run(stub("hangs", HANGS, 5.0), stub("next", "pass"))
    assert made.outcomes == {"hangs": "timed out", "next": "passed"}
    log = archived(tmp_path)["logs/hangs.log"]
    assert "Fatal Python error: Aborted" in log and "waits_for_ever" in log


def test_a_resumed_check_leaves_out_what_has_passed_and_only_chooses(tmp_path, short):
    first = stages.Check(tmp_path, 60, {})
    first.run(stub("one", "pass"), stub("two", "raise SystemExit(3)"))
    again = stages.Check(tmp_path, 60, {}, resume=True)
    again.run(stub("one", "raise SystemExit(4)"), stub("two", "pass"), stub("three", "pass"))
    assert outcomes_of(tmp_path) == {"one": "passed", "two": "passed", "three": "passed"}
    assert again.has_passed
    some = stages.Check(tmp_path, 60, {}, only=["t"])
    some.run(stub("one", "pass"), stub("two", "pass"), stub("three", "pass"))
    assert some.outcomes == {"two": "passed", "three": "passed"}
    # What the earlier check found stays.
    [earlier] = tmp_path.glob("check-*.jsonl")
    assert '"stage": "one"' in earlier.read_text()


def test_what_chosen_stages_need_runs_too(tmp_path, short):
    made = stages.Check(tmp_path, 60, {}, only=["steps_b"])
    assert made.prepare([stub("build", "pass")], ["steps_"]) == ("build",)
    assert made.prepare([stub("reference", "pass")], ["smoke_"]) == ("reference",)
    made.run(stub("steps_a", "pass", needs=("build",)), stub("steps_b", "pass", needs=("build",)))
    assert made.outcomes == {"build": "passed", "steps_b": "passed"}


def test_a_check_whose_output_nobody_reads_goes_on(tmp_path):
    program = f"""
import pathlib, sys
from benchmarks.gpu import stages
stages.LEAST_S = 0.01
made = stages.Check(pathlib.Path({str(tmp_path)!r}), 60, {{}})
def run(check):
    for name in "abc":
        check.run(stages.Stage(name, (sys.executable, "-c", "pass"), 60))
status = stages.main_with(made, run)
sys.stdout = None
sys.exit(status)
"""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        finished = subprocess.run([sys.executable, "-c", program], env=os.environ | ROOT_PATH, stdout=closed)
    assert finished.returncode == 0
    assert outcomes_of(tmp_path) == dict.fromkeys("abc", "passed")
    assert '"stage": "c"' in archived(tmp_path)["check.jsonl"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_a_check_that_is_ended_loses_nothing(tmp_path, number):
    program = f"""
import pathlib, sys
from benchmarks.gpu import stages
stages.LEAST_S = 0.01
made = stages.Check(pathlib.Path({str(tmp_path)!r}), 600, {{}})
def run(check):
    check.run(stages.Stage("first", (sys.executable, "-c", "print('done')"), 60))
    check.run(stages.Stage("second", (sys.executable, "-c", "print('begun', flush=True); input()"), 600))
    check.run(stages.Stage("third", (sys.executable, "-c", "pass"), 60))
sys.exit(stages.main_with(made, run))
"""
    process = subprocess.Popen([sys.executable, "-c", program], env=os.environ | ROOT_PATH, stdin=subprocess.PIPE)
    log = tmp_path / "logs" / "second.log"
    while not (log.exists() and "begun" in log.read_text()):
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait() == 128 + number
    assert outcomes_of(tmp_path)["first"] == "passed" and outcomes_of(tmp_path)["second"] == "cut off"
    kept = archived(tmp_path)
    assert "begun" in kept["logs/second.log"] and '"cut off"' in kept["check.jsonl"]
