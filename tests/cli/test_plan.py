"""`jaxferry plan`."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest

from jaxferry.cli import main
from jaxferry.costs.records import Profile
from jaxferry.planner.planning import make_plan
from jaxferry.planner.registry import policies
from jaxferry.step.records import Plan
from profiles import recomputing, smallest_peak_bytes, transformer


@pytest.mark.parametrize("policy", policies())
def test_json_is_the_plan_itself_and_nothing_else(jaxferry, profile, policy):
    result = jaxferry("plan", profile, "--policy", policy, "--reserve-factor", "0.29", "--json")
    assert (result.status, result.err) == (0, "")
    plan = Plan.from_json(json.loads(result.out))
    assert plan == make_plan(Profile.load(profile), policy, reserve_factor=0.29)


def test_output_writes_what_json_prints(jaxferry, profile, tmp_path):
    result = jaxferry("plan", profile, "-o", tmp_path / "plan.json", "--json")
    assert json.loads(result.out) == json.loads((tmp_path / "plan.json").read_text())


def test_the_table_names_modes_prediction_and_gap(jaxferry, profile):
    result = jaxferry("plan", profile, "--objective", "step")
    assert result.status == 0
    for text in ("table0", "DHA", "GFGB", "predicted: forward", "objective step", "above the proven lower bound"):
        assert text in result.out


def _on_a_machine(path, **facts):
    known = Profile.load(path)
    dataclasses.replace(known, machine={"name": "a card", **facts}).save(path)
    return known


def test_the_machines_memory_is_the_default_budget(jaxferry, refused, profile):
    known = _on_a_machine(profile, memory_bytes=160_000_000)
    shown = jaxferry("plan", profile, "--policy", "exact")
    assert "memory budget 114.4 MiB: 75% of the device memory of a card (JAX's own limit" in shown.out
    by_json = jaxferry("plan", profile, "--policy", "exact", "--json")
    assert "--memory-budget overrides it" in by_json.err
    assert Plan.from_json(json.loads(by_json.out)) == make_plan(known, "exact", memory_budget_bytes=120_000_000)
    assert "memory budget 114.4 MiB" in refused("plan", profile, "--policy", "zero-offload")
    free = jaxferry("plan", profile, "--policy", "exact", "--memory-budget", "none", "--json")
    assert (Plan.from_json(json.loads(free.out)), free.err) == (make_plan(known, "exact"), "")


def test_the_plan_states_the_host_memory_that_training_needs(jaxferry, profile):
    _on_a_machine(profile, host_bytes={"master parameters": 3 * 2**30, "gradients": 2**29})
    assert "host memory 3.50 GiB: master parameters 3.00 GiB, gradients 512.0 MiB" in jaxferry("plan", profile).out


def test_auto_says_what_binds(jaxferry, profile):
    result = jaxferry("plan", profile, "--policy", "auto", "--memory-budget", "113MB")
    assert "binding constraint: memory" in result.out


def test_a_plan_whose_transfers_could_be_late_says_which_budget_it_needs(jaxferry, refused, tmp_path):
    path = tmp_path / "profile.json"
    transformer(4, seed=1).save(path)
    given = ("plan", path, "--policy", "memferry", "--reserve-factor", "0.6")
    shown = jaxferry(*given).out
    [needed_bytes] = map(int, re.findall(r"needs a memory budget of .* \((\d+) bytes\)", shown))
    plan = Plan.from_json(json.loads(jaxferry(*given, "--json").out))
    assert plan.predicted.peak_device_bytes < needed_bytes
    within = json.loads(jaxferry(*given, "--memory-budget", needed_bytes, "--json").out)
    assert Plan.from_json(within).modes == plan.modes
    assert "smallest feasible" in refused(*given, "--memory-budget", needed_bytes - 1)
    assert "needs a memory budget" not in jaxferry("plan", path, "--policy", "zero-offload").out


def test_compare_prints_every_policy(jaxferry, profile):
    result = jaxferry("plan", profile, "--compare")
    assert all(name in result.out for name in policies())
    rows = json.loads(jaxferry("plan", profile, "--compare", "--json", "--memory-budget", "150MB").out)["policies"]
    assert [row["policy"] for row in rows] == list(policies())
    assert {row["fits"] for row in rows} == {False, True}
    for row in rows:
        if row["fits"]:
            assert {"forward_s", "step_s", "steady_step_s", "peak_device_bytes", "link_bytes", "gap"} < row.keys()
            assert row["peak_device_bytes"] <= 150e6
        else:
            assert row["smallest_budget_bytes"] > 150e6


def test_gaps_are_to_one_bound_that_holds_for_every_row(jaxferry, tmp_path):
    profile = tmp_path / "profile.json"
    transformer(6, seed=1).save(profile)
    document = json.loads(jaxferry("plan", profile, "--compare", "--json").out)
    for row in document["policies"]:
        assert row["gap"] == pytest.approx(row["steady_step_s"] / document["lower_bound_s"] - 1, abs=1e-12)
        assert row["gap"] >= 0
    assert "a lower bound" in jaxferry("plan", profile, "--compare").out


def test_a_comparison_writes_the_policy_s_plan_or_says_why_not(jaxferry, refused, profile, tmp_path):
    path = tmp_path / "plan.json"
    transformer(6).save(profile)
    budget = make_plan(Profile.load(profile), "zero-offload").predicted.peak_device_bytes - 1
    some = ("plan", profile, "--compare", "--memory-budget", budget, "-o", path)
    err = refused(*some, "--policy", "zero-offload")
    assert "smallest feasible for policy zero-offload" in err and "profile.json" in err
    assert not path.exists()
    assert jaxferry(*some, "--policy", "auto").status == 0
    assert Plan.load(path).policy == "auto"


@pytest.mark.parametrize("more", [(), ("--json",), ("-o", "x.json")])
def test_a_comparison_in_which_nothing_fits_names_the_smallest_feasible_budget(refused, profile, more, monkeypatch):
    transformer(6).save(profile)
    monkeypatch.chdir(profile.parent)
    err = refused("plan", profile, "--compare", "--memory-budget", "1", *more)
    assert f"({smallest_peak_bytes(Profile.load(profile))} bytes)" in err
    assert not (profile.parent / "x.json").exists()


def test_bad_input_is_one_line_and_status_2(refused, profile, tmp_path):
    assert "unknown policy 'best'" in refused("plan", profile, "--policy", "best")
    assert "objective must be one of forward, step, steady" in refused("plan", profile, "--objective", "speed")
    assert "reserve_factor must lie in [0, 1]" in refused("plan", profile, "--reserve-factor", "1.5")
    assert "reserve_factor must lie in [0, 1]" in refused("plan", profile, "--reserve-factor", "nan")
    assert "--reserve-factor" in refused("plan", profile, "--reserve-factor", "half")
    assert "memory budget must be" in refused("plan", profile, "--memory-budget", "8 parsecs")
    err = refused("plan", profile, "--policy", "auto", "--memory-budget", "1KB")
    assert "smallest feasible" in err and "profile.json: memory budget" in err
    err = refused("plan", profile, "--memory-budget", "999999999999TiB")
    assert "memory budget" in err and "999999999999TiB" in err and "8 PiB" in err
    assert "smallest feasible" in refused("plan", profile, "--policy", "memferry", "--memory-budget", "1KB")
    assert "No such option" in refused("plan", profile, "--fast")
    assert "PROFILE.json" in refused("plan")
    assert "cannot read" in refused("plan", tmp_path / "none.json")
    assert "cannot write" in refused("plan", profile, "-o", tmp_path / "no" / "plan.json")
    assert "lunch" in refused("lunch")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1, column 2"),
        ('{"format": "jaxferry.profile/1", "layers": []}', "at least one layer"),
        ('{"format": "jaxferry.profile/1", "layers": [{"name": "a"}]}', 'layer "a": key "param_bytes" is missing'),
        ("[]", "JSON object"),
        ('{"format": "jaxferry.profile/2"}', "format"),
    ],
)
def test_a_profile_that_is_none_is_one_line_and_status_2(refused, tmp_path, text, message):
    path = tmp_path / "bad.json"
    path.write_text(text)
    err = refused("plan", path)
    assert "bad.json" in err and message in err


def test_help_of_every_command(jaxferry):
    for arguments in ((), ("--help",), ("plan", "--help"), ("simulate", "--help"), ("tune", "--help")):
        result = jaxferry(*arguments)
        assert result.status == 0
        assert "Usage" in result.out


@pytest.mark.parametrize("module", ["jaxferry"])
def test_modules_run_as_programs(module, profile):
    command = [sys.executable, "-m", module, "plan", str(profile), "--policy", "memferry", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["policy"] == "memferry"
    done = subprocess.run([*command, "--nonsense"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_letters_that_the_terminal_does_not_know_are_escaped(tmp_path):
    path = tmp_path / "profile.json"
    layers = [dataclasses.replace(x, name=f"schicht_ä{i}", parameters="") for i, x in enumerate(transformer(4).layers)]
    Profile({}, tuple(layers)).save(path)
    command = [sys.executable, "-m", "jaxferry", "plan", str(path), "--policy", "memferry"]
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ascii_only)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"schicht_\xe40" in done.stdout


def test_names_in_brackets_are_printed_as_they_are(tmp_path, capsys):
    layers = tuple(dataclasses.replace(layer, name=f"h[{i}]") for i, layer in enumerate(transformer(4).layers))
    path = tmp_path / "profile.json"
    Profile({}, tuple(dataclasses.replace(layer, parameters=layer.name) for layer in layers)).save(path)
    with pytest.raises(SystemExit) as caught:
        main(["plan", str(path), "--policy", "memferry"])
    assert caught.value.code == 0
    assert "h[0]" in capsys.readouterr().out


def test_a_plan_that_recomputes_says_where_and_simulates_as_predicted(jaxferry, profile, tmp_path):
    made, path = recomputing(transformer(6)), tmp_path / "plan.json"
    made.save(profile)
    budget = smallest_peak_bytes(made)
    told = jaxferry("plan", profile, "--policy", "auto", "--memory-budget", str(budget), "-o", path).out
    assert "remat" in told and "full" in told
    plan = Plan.load(path)
    assert plan.recomputes == (True,) * 5 + (False,)
    simulated = json.loads(jaxferry("simulate", profile, path, "--json").out)
    assert simulated["peak_device_bytes"] == plan.predicted.peak_device_bytes == budget
