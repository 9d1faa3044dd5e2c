"""`jaxferry tune`."""

import dataclasses
import decimal
import itertools
import json
import re

import pytest

from jaxferry.cli.figures import sweep_figure
from jaxferry.cli.plan import read_range
from jaxferry.costs.records import Profile
from jaxferry.errors import BudgetError, InputError
from jaxferry.planner.base import Request
from jaxferry.planner.planning import SweepPoint, knee, make_plan, sweep
from jaxferry.planner.preference import EQUAL_WITHIN
from jaxferry.step.records import LayerPlan, Plan, Predicted, Updates
from jaxferry.step.schedule import needed_bytes
from profiles import transformer


def point(memory, time):
    predicted = Predicted(time, time, time, memory)
    return SweepPoint(1.0, None, Plan("exact", 1.0, (LayerPlan("a", "DHA"),), predicted=predicted))


def test_reserve_factors_are_swept_as_decimals(jaxferry, profile):
    document = json.loads(jaxferry("tune", profile, "--reserve-factor", "0:1:0.25", "--json").out)
    assert [row["reserve_factor"] for row in document["points"]] == [0, 0.25, 0.5, 0.75, 1]
    assert document["policy"] == "exact"
    assert document["knee"] in document["points"]


def never_rises(times):
    """By no more than what counts as equal."""
    least = list(itertools.accumulate(times, min))
    return all(time <= before * (1 + EQUAL_WITHIN) for time, before in zip(times, least, strict=True))


def test_budgets_are_swept_with_auto_and_more_memory_is_never_slower(jaxferry, profile):
    arguments = ("--reserve-factor", "1", "--memory-budget", "50MB:550MB:100MB", "--json")
    document = json.loads(jaxferry("tune", profile, *arguments).out)
    assert document["policy"] == "auto"
    fits = [row["fits"] for row in document["points"]]
    assert fits == sorted(fits) and fits[-1] and not fits[0]
    assert never_rises([row["steady_step_s"] for row in document["points"] if row["fits"]])


@pytest.mark.parametrize("seed", [1, 4, 7])
def test_the_time_never_rises_with_a_reserve_factor_below_1(seed):
    """Also where the policy's own plan for a larger factor is slower; what stays satisfies the point's factor."""
    alone = transformer(13, seed)
    layers = [dataclasses.replace(each, backward_write_s=0.9 * each.offload_s) for each in alone.layers]
    profile, factors = Profile({}, tuple(layers)), [number / 10 for number in range(10)]
    points = sweep(profile, "go-memferry", factors, None, Request())
    times = [point.plan.predicted.steady_step_s for point in points]
    assert never_rises(times) and times[-1] < times[0]
    own = [make_plan(profile, "go-memferry", reserve_factor=factor).predicted.steady_step_s for factor in factors]
    assert all(time <= time_of_own for time, time_of_own in zip(times, own, strict=True))
    total = sum(each.grad_bytes for each in layers)
    for point, factor in zip(points, factors, strict=True):
        pairs = zip(layers, point.plan.gradients, strict=True)
        assert sum(each.grad_bytes for each, place in pairs if place == "device") <= factor * total
        assert point.plan.reserve_factor == factor


def test_the_default_budget_is_that_of_the_profile_s_machine(jaxferry, tmp_path):
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


def test_the_knee_s_plan_and_a_plot_are_written(jaxferry, profile, tmp_path):
    plot, output = tmp_path / "p.png", tmp_path / "plan.json"
    result = jaxferry("tune", profile, "--reserve-factor", "0:1:0.5", "--plot", plot, "-o", output)
    assert result.status == 0
    assert "knee: reserve factor" in result.out
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert Plan.load(output).predicted is not None


def test_the_knee_s_plan_states_when_updates_run(jaxferry, tmp_path):
    path, output = tmp_path / "profile.json", tmp_path / "plan.json"
    dataclasses.replace(transformer(6), updates_after_all=True).save(path)
    assert jaxferry("tune", path, "--policy", "memferry", "--reserve-factor", "1", "-o", output).status == 0
    assert Plan.load(output) == make_plan(Profile.load(path), "memferry", reserve_factor=1.0)
    assert Plan.load(output).updates is Updates.AFTER_ALL


def test_the_knee_is_where_more_memory_stops_paying():
    bend = point(20, 2.0)
    assert knee([point(10, 10.0), point(90, 1.2), bend, point(100, 1.0), point(50, 5.0)]) is bend
    assert knee([]) is None
    fastest = point(100, 1.0)
    assert knee([point(10, 10.0), point(60, 9.5), fastest]) is fastest
    assert knee([SweepPoint(1.0, 1, None)]) is None
    assert knee([bend]) is bend


def test_ranges_hold_both_ends():
    assert read_range("0:1:0.1", decimal.Decimal)[-1] == 1
    assert len(read_range("0:1:0.1", decimal.Decimal)) == 11
    assert read_range("5", int) == [5]
    assert read_range("1:6:2", int) == [1, 3, 5]
    for text in ("1:2", "1:2:0", "2:1:1", "0:1:0.0001"):
        with pytest.raises(InputError, match="range"):
            read_range(text, decimal.Decimal)


@pytest.mark.parametrize(
    ("policy", "more"),
    [("auto", ()), ("exact", ("--json",)), ("memferry", ("-o", "plan.json")), ("memferry", ("--plot", "p.png"))],
)
def test_budgets_that_nothing_fits_into_name_the_smallest_feasible_one(refused, tmp_path, policy, more, monkeypatch):
    profile = tmp_path / "profile.json"
    transformer(6).save(profile)
    monkeypatch.chdir(tmp_path)
    budgets = ("--memory-budget", "1KB:3KB:1KB", "--reserve-factor", "0:1:1", "--policy", policy, *more)
    err = refused("tune", profile, *budgets)
    smallest = int(re.search(r"smallest feasible for policy \S+ is .* \((\d+) bytes\)", err)[1])
    known, least = Profile.load(profile), []
    for factor in (0.0, 1.0):
        with pytest.raises(BudgetError) as caught:
            make_plan(known, policy, reserve_factor=factor, memory_budget_bytes=3000)
        least.append(caught.value.smallest_bytes)
    assert smallest == min(least)
    assert "profile.json" in err and "3000 bytes" in err
    assert not list(profile.parent.glob("p*.png")) and not (profile.parent / "plan.json").exists()


def test_bad_input_is_one_line_and_status_2(refused, profile, tmp_path):
    assert "unknown policy" in refused("tune", profile, "--policy", "best")
    assert "range" in refused("tune", profile, "--reserve-factor", "0:1")
    assert "reserve factor must" in refused("tune", profile, "--reserve-factor", "0:2:1")
    assert "reserve factor must" in refused("tune", profile, "--reserve-factor", "inf")
    assert "budget must be" in refused("tune", profile, "--memory-budget", "1:x:1")
    assert "cannot write" in refused("tune", profile, "--reserve-factor", "1", "--plot", tmp_path / "no" / "p.png")
    for name in ("p.foo", "p"):
        assert ".png, .pdf, .svg" in refused("tune", profile, "--reserve-factor", "1", "--plot", tmp_path / name)
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize(("name", "start"), [("p.PNG", b"\x89PNG"), ("p.pdf", b"%PDF"), ("p.svg", b"<?xml")])
def test_a_plot_has_the_format_that_its_name_says(jaxferry, profile, tmp_path, name, start):
    assert jaxferry("tune", profile, "--reserve-factor", "1", "--plot", tmp_path / name).status == 0
    assert (tmp_path / name).read_bytes().startswith(start)


def test_nothing_is_written_over_the_points_of_a_plot():
    points = [point(10, 10.0), point(20, 2.0), point(90, 1.2)]
    figure = sweep_figure(points, points[1])
    (axes,) = figure.axes
    legend = axes.get_legend()
    figure.canvas.draw()
    assert not axes.texts
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())
    assert [text.get_text() for text in legend.get_texts()] == ["Pareto front", "reserve factor 1", "knee"]


def test_a_plot_joins_only_the_points_that_no_other_beats():
    front, beaten = [point(10, 10.0), point(20, 2.0), point(90, 1.2)], [point(20, 3.0), point(95, 1.2)]
    points = [dataclasses.replace(p, reserve_factor=i / 10) for i, p in enumerate([*beaten, *front])]
    (axes,) = sweep_figure(points, points[3]).axes
    joined = [line for line in axes.lines if line.get_linestyle() != "None"]
    assert len(joined) == 1 and joined[0].get_drawstyle() == "steps-post"
    assert list(joined[0].get_ydata()) == [10.0, 2.0, 1.2, 1.2]
    assert [bytes * 2**30 for bytes in joined[0].get_xdata()] == [10, 20, 90, 95]
    dots = [line for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata())]
    faint = [(line.get_ydata()[0], line.get_alpha()) for line in dots if line.get_alpha() != 1]
    assert len(dots) == 5 and faint == [(3.0, 0.3), (1.2, 0.3)]
