"""`jaxferry plan`, `simulate` and `tune`: what they print and write, against the planner and the simulator."""

import dataclasses
import decimal
import itertools
import json
import os
import re
import subprocess
import sys

import pytest

from jaxferry.cli.figures import sweep_figure
from jaxferry.cli.plan import read_range
from jaxferry.costs import Profile
from jaxferry.errors import InputError
from jaxferry.planner import EQUAL_WITHIN, SweepPoint, make_plan, policies
from jaxferry.step import LayerPlan, Plan, Predicted, Updates, needed_bytes, simulate
from jaxferry.units import format_bytes
from profiles import transformer
from slowly import slow_cases


@pytest.fixture
def plan(jaxferry, profile, tmp_path):
    path = tmp_path / "plan.json"
    jaxferry("plan", profile, "-o", path)
    return path


def on_a_machine(path, **facts):
    known = Profile.load(path)
    dataclasses.replace(known, machine={"name": "a card", **facts}).save(path)
    return known


@pytest.mark.parametrize("policy", policies())
def test_json_is_the_plan_itself_and_nothing_else(jaxferry, profile, tmp_path, policy):
    path = tmp_path / "plan.json"
    result = jaxferry("plan", profile, "--policy", policy, "--reserve-factor", "0.29", "-o", path, "--json")
    assert (result.status, result.err) == (0, "")
    assert json.loads(result.out) == json.loads(path.read_text())
    assert Plan.load(path) == make_plan(Profile.load(profile), policy, reserve_factor=0.29)


def test_the_table_names_modes_prediction_gap_and_host_memory(jaxferry, profile):
    on_a_machine(profile, host_bytes={"master parameters": 3 * 2**30, "gradients": 2**29})
    shown = jaxferry("plan", profile, "--objective", "step").out
    for text in ("table0", "DHA", "GFGB", "predicted: forward", "objective step", "above the proven lower bound"):
        assert text in shown
    assert "host memory 3.50 GiB: master parameters 3.00 GiB, gradients 512.0 MiB" in shown
    auto = jaxferry("plan", profile, "--policy", "auto", "--memory-budget", "65MB").out
    assert "binding constraint: memory" in auto


def test_the_machines_memory_is_the_default_budget(jaxferry, refused, profile):
    known = on_a_machine(profile, memory_bytes=100_000_000)
    shown = jaxferry("plan", profile, "--policy", "exact")
    assert "memory budget 71.5 MiB: 75% of the device memory of a card (JAX's own limit" in shown.out
    by_json = jaxferry("plan", profile, "--policy", "exact", "--json")
    assert "--memory-budget overrides it" in by_json.err
    assert Plan.from_json(json.loads(by_json.out)) == make_plan(known, "exact", memory_budget_bytes=75_000_000)
    assert "memory budget 71.5 MiB" in refused("plan", profile, "--policy", "zero-offload")
    free = jaxferry("plan", profile, "--policy", "exact", "--memory-budget", "none", "--json")
    assert (Plan.from_json(json.loads(free.out)), free.err) == (make_plan(known, "exact"), "")


def test_a_plan_whose_transfers_could_be_late_says_which_budget_it_needs(jaxferry, refused, tmp_path):
    path = tmp_path / "profile.json"
    transformer(4, seed=1).save(path)
    given = ("plan", path, "--policy", "memferry", "--reserve-factor", "0.6")
    [needed] = map(int, re.findall(r"needs a memory budget of .* \((\d+) bytes\)", jaxferry(*given).out))
    plan = Plan.from_json(json.loads(jaxferry(*given, "--json").out))
    assert plan.predicted.peak_device_bytes < needed
    within = json.loads(jaxferry(*given, "--memory-budget", needed, "--json").out)
    assert Plan.from_json(within).modes == plan.modes
    assert "smallest feasible" in refused(*given, "--memory-budget", needed - 1)
    assert "needs a memory budget" not in jaxferry("plan", path, "--policy", "zero-offload").out


def test_compare_prints_every_policy_with_its_gap_to_one_bound(jaxferry, profile):
    shown = jaxferry("plan", profile, "--compare").out
    assert all(name in shown for name in policies()) and "a lower bound" in shown
    document = json.loads(jaxferry("plan", profile, "--compare", "--json", "--memory-budget", "90MB").out)
    rows = document["policies"]
    assert [row["policy"] for row in rows] == list(policies())
    assert {row["fits"] for row in rows} == {False, True}
    for row in rows:
        if row["fits"]:
            assert {"forward_s", "step_s", "steady_step_s", "peak_device_bytes", "link_bytes", "gap"} < row.keys()
            assert row["peak_device_bytes"] <= 90e6
            assert row["gap"] == pytest.approx(row["steady_step_s"] / document["lower_bound_s"] - 1, abs=1e-12)
            assert row["gap"] >= 0
        else:
            assert row["smallest_budget_bytes"] > 90e6


def test_a_comparison_writes_the_policy_s_plan_or_says_why_not(jaxferry, refused, profile, tmp_path):
    path = tmp_path / "plan.json"
    transformer(6).save(profile)
    budget = make_plan(Profile.load(profile), "zero-offload").predicted.peak_device_bytes - 1
    some = ("plan", profile, "--compare", "--memory-budget", budget, "-o", path)
    error = refused(*some, "--policy", "zero-offload")
    assert "smallest feasible for policy zero-offload" in error and "profile.json" in error
    assert not path.exists()
    assert jaxferry(*some, "--policy", "auto").status == 0
    assert Plan.load(path).policy == "auto"


def test_the_program_prints_letters_and_brackets_on_any_terminal_and_ends_with_a_status(tmp_path):
    path = tmp_path / "profile.json"
    layers = [
        dataclasses.replace(x, name=f"schicht_ä[{i}]", parameters="") for i, x in enumerate(transformer(4).layers)
    ]
    Profile({}, tuple(layers)).save(path)
    command = [sys.executable, "-m", "jaxferry", "plan", str(path), "--policy", "memferry"]
    run = {"capture_output": True, "text": True, "check": False, "env": os.environ | {"PYTHONIOENCODING": "ascii"}}
    done = subprocess.run(command, **run)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"schicht_\xe4[0]" in done.stdout
    done = subprocess.run([*command, "--nonsense"], **run)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_a_simulation_says_times_memory_lanes_and_the_critical_path(jaxferry, profile, plan):
    result = jaxferry("simulate", profile, plan, "--json")
    assert (result.status, result.err) == (0, "")
    document = json.loads(result.out)
    assert document == json.loads(json.dumps(simulate(Profile.load(profile), Plan.load(plan)).to_json()))
    assert set(document["lanes"]) == {"GPU", "H2D", "D2H", "host"}
    assert {"forward_s", "step_s", "steady_step_s", "peak_device_bytes"} < document.keys()
    written = json.loads(plan.read_text())["predicted"]
    assert all(document[key] == value for key, value in written.items())
    shown = jaxferry("simulate", profile, plan).out
    assert all(text in shown for text in ("GPU", "H2D", "D2H", "host", "critical path:", "update "))
    one_step = max(held for _, held in document["device_bytes"])
    assert one_step <= document["peak_device_bytes"]
    assert f"{format_bytes(document['peak_device_bytes'])} over a chain of 3 steps" in shown
    assert f"{format_bytes(one_step)} in a single step" in shown


@pytest.mark.parametrize("steps", [1, 3])
def test_a_trace_of_some_steps_is_written(jaxferry, profile, plan, tmp_path, steps):
    assert jaxferry("simulate", profile, plan, "--trace", tmp_path / "t.json", "--steps", steps).status == 0
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == set(range(steps))


def test_a_plan_for_blocks_is_simulated_with_its_profile_of_modules(jaxferry, user_model, tmp_path):
    profile, plan = tmp_path / "modules.json", tmp_path / "plan.json"
    options = ("--machine", "h100-pcie5", "--granularity", "module")
    assert jaxferry("profile", "--model", user_model("modules"), *options, "-o", profile).status == 0
    for granularity in ("block", "module"):
        assert jaxferry("plan", profile, "--granularity", granularity, "-o", plan).status == 0
        result = jaxferry("simulate", profile, plan, "--json")
        assert (result.status, result.err) == (0, "")
        written = json.loads(plan.read_text())["predicted"]
        assert {key: json.loads(result.out)[key] for key in written} == written


@pytest.mark.parametrize(
    ("update", "mode", "missing"),
    [
        ("gpu", "GFGB", "update_gpu_s"),
        ("resident", "RESIDENT", "state_bytes"),
        *slow_cases(("gpu", "GFGB", "state_bytes"), ("resident", "RESIDENT", "update_gpu_s")),
    ],
)
def test_updates_on_the_device_are_not_free_where_the_profile_does_not_state_their_cost(
    jaxferry, refused, profile, plan, update, mode, missing
):
    stated = {"update_gpu_s": 0.001, "state_bytes": 4096}
    for path, changed in ((profile, stated), (plan, {"update": update, "mode": mode, "gradient": "device"})):
        document = json.loads(path.read_text())
        document["layers"][1] |= changed
        path.write_text(json.dumps(document))
    assert jaxferry("simulate", profile, plan).status == 0
    document = json.loads(profile.read_text())
    del document["layers"][1][missing]
    profile.write_text(json.dumps(document))
    assert f"the profile does not state its {missing!r}" in refused("simulate", profile, plan)


def test_reserve_factors_are_swept_as_decimals(jaxferry, profile):
    document = json.loads(jaxferry("tune", profile, "--reserve-factor", "0:1:0.25", "--json").out)
    assert [row["reserve_factor"] for row in document["points"]] == [0, 0.25, 0.5, 0.75, 1]
    assert document["policy"] == "exact"
    assert document["knee"] in document["points"]


def test_budgets_are_swept_with_auto_and_more_memory_is_never_slower(jaxferry, profile):
    arguments = ("--reserve-factor", "1", "--memory-budget", "50MB:550MB:100MB", "--json")
    document = json.loads(jaxferry("tune", profile, *arguments).out)
    assert document["policy"] == "auto"
    fits = [row["fits"] for row in document["points"]]
    assert fits == sorted(fits) and fits[-1] and not fits[0]
    times = [row["steady_step_s"] for row in document["points"] if row["fits"]]
    assert all(after <= before * (1 + EQUAL_WITHIN) for before, after in itertools.combinations(times, 2))


def test_the_default_budget_of_a_sweep_is_that_of_the_profile_s_machine(jaxferry, tmp_path):
    path, known = tmp_path / "profile.json", transformer(6)
    plan = make_plan(known, "exact", reserve_factor=1.0)
    budget = needed_bytes(known, plan) - 1
    machine = {**known.machine, "name": "small", "memory_limit_bytes": budget}
    dataclasses.replace(known, machine=machine).save(path)
    result = jaxferry("tune", path, "--reserve-factor", "1", "--json")
    [row] = json.loads(result.out)["points"]
    assert row["memory_budget_bytes"] == budget and "the device memory of small" in result.err
    free = jaxferry("tune", path, "--reserve-factor", "1", "--memory-budget", "none", "--json")
    [row] = json.loads(free.out)["points"]
    assert row["memory_budget_bytes"] is None and free.err == ""
    assert row["steady_step_s"] == plan.predicted.steady_step_s


@pytest.mark.parametrize(("name", "start"), [("p.PNG", b"\x89PNG"), ("p.pdf", b"%PDF"), ("p.svg", b"<?xml")])
def test_the_knee_s_plan_and_a_plot_of_the_format_that_its_name_says_are_written(jaxferry, tmp_path, name, start):
    path, output = tmp_path / "profile.json", tmp_path / "plan.json"
    dataclasses.replace(transformer(6), updates_after_all=True).save(path)
    options = ("--policy", "memferry", "--reserve-factor", "1", "--plot", tmp_path / name, "-o", output)
    assert "knee: reserve factor" in jaxferry("tune", path, *options).out
    assert (tmp_path / name).read_bytes().startswith(start)
    assert Plan.load(output) == make_plan(Profile.load(path), "memferry", reserve_factor=1.0)
    assert Plan.load(output).updates is Updates.AFTER_ALL


def point(memory, time, factor=1.0):
    predicted = Predicted(time, time, time, memory)
    return SweepPoint(factor, None, Plan("exact", 1.0, (LayerPlan("a", "DHA"),), predicted=predicted))


def test_ranges_hold_both_ends():
    assert read_range("0:1:0.1", decimal.Decimal)[-1] == 1
    assert len(read_range("0:1:0.1", decimal.Decimal)) == 11
    assert read_range("5", int) == [5]
    assert read_range("1:6:2", int) == [1, 3, 5]
    for text in ("1:2", "1:2:0", "2:1:1", "0:1:0.0001"):
        with pytest.raises(InputError, match="range"):
            read_range(text, decimal.Decimal)


def test_nothing_is_written_over_the_points_of_a_plot():
    points = [point(10, 10.0), point(20, 2.0), point(90, 1.2)]
    figure = sweep_figure(points, points[1])
    (axes,) = figure.axes
    legend = axes.get_legend()
    figure.canvas.draw()
    assert not axes.texts
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())
    assert [text.get_text() for text in legend.get_texts()] == ["Pareto front", "reserve factor 1", "knee"]
