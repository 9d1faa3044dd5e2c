"""Sweeps of reserve factors and budgets, and their knee."""

import dataclasses
import itertools

import pytest

from jaxferry.costs import Profile
from jaxferry.modes import MODULE
from jaxferry.planner import EQUAL_WITHIN, Request, SweepPoint, knee, make_plan, sweep_finest
from jaxferry.step import LayerPlan, Plan, Predicted
from profiles import transformer


def never_rises(times):
    """By no more than what counts as equal."""
    least = list(itertools.accumulate(times, min))
    return all(time <= before * (1 + EQUAL_WITHIN) for time, before in zip(times, least, strict=True))


def point(memory, time):
    predicted = Predicted(time, time, time, memory)
    return SweepPoint(1.0, None, Plan("exact", 1.0, (LayerPlan("a", "DHA"),), predicted=predicted))


@pytest.mark.parametrize("seed", [1, 4, 7])
def test_the_time_never_rises_with_a_reserve_factor_below_1(seed):
    """Also where the policy's own plan for a larger factor is slower; what stays satisfies the point's factor."""
    alone = transformer(13, seed)
    layers = [dataclasses.replace(each, backward_write_s=0.9 * each.offload_s) for each in alone.layers]
    profile, factors = Profile({}, tuple(layers)), [number / 10 for number in range(10)]
    points = sweep_finest(profile, "go-memferry", factors, None, Request(), MODULE)
    times = [point.plan.predicted.steady_step_s for point in points]
    assert never_rises(times) and times[-1] < times[0]
    own = [make_plan(profile, "go-memferry", reserve_factor=factor).predicted.steady_step_s for factor in factors]
    assert all(time <= time_of_own for time, time_of_own in zip(times, own, strict=True))
    total = sum(each.grad_bytes for each in layers)
    for point, factor in zip(points, factors, strict=True):
        pairs = zip(layers, point.plan.gradients, strict=True)
        assert sum(each.grad_bytes for each, place in pairs if place == "device") <= factor * total
        assert point.plan.reserve_factor == factor


def test_the_knee_is_where_more_memory_stops_paying():
    bend = point(20, 2.0)
    assert knee([point(10, 10.0), point(90, 1.2), bend, point(100, 1.0), point(50, 5.0)]) is bend
    assert knee([]) is None
    fastest = point(100, 1.0)
    assert knee([point(10, 10.0), point(60, 9.5), fastest]) is fastest
    assert knee([SweepPoint(1.0, 1, None)]) is None
    assert knee([bend]) is bend
