"""Streamed updates that a step leaves to the next one: where they run, and that memory, times and bounds hold."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxferry.modes import GradientPlace, Mode, UpdatePlace
from jaxferry.step import (
    Chain,
    Kind,
    Lane,
    LayerPlan,
    Plan,
    Updates,
    in_one_period,
    machine,
    needed_bytes,
    repeat,
    schedule_step,
    streaming,
)
from profiles import transformer

MOST_S = 1e-3
"""The longest transfer or update, so that no one layer sets the pace."""


def case(num_streamed, mode=Mode.GFGB, updates=Updates.OVERLAPPED, num_layers=6, slowness=4.0):
    """A profile with a slow link, and a plan that streams the first groups."""
    layers = [
        dataclasses.replace(
            layer,
            state_bytes=3 * layer.param_bytes,
            update_s=min(layer.update_s, MOST_S),
            update_gpu_s=layer.update_s / 20,
            state_up_s=slowness * min(layer.load_s, MOST_S),
            state_down_s=slowness * min(layer.offload_s, MOST_S),
        )
        for layer in transformer(num_layers).layers
    ]
    profile = dataclasses.replace(transformer(num_layers), layers=tuple(layers))
    places = [UpdatePlace.GPU] * num_streamed + [UpdatePlace.HOST] * (len(layers) - num_streamed)
    chosen = [
        LayerPlan(layer.name, mode, GradientPlace.DEVICE, update=place)
        for layer, place in zip(layers, places, strict=True)
    ]
    return profile, Plan("late", 1.0, tuple(chosen), updates=updates)


@pytest.fixture(autouse=True)
def _in_parts(monkeypatch):
    monkeypatch.setattr(streaming, "SUBGROUP_BYTES", 2 << 20)


CASES = [(mode, updates) for mode in (Mode.GFGB, Mode.RELOAD, Mode.DHA, Mode.RESIDENT) for updates in Updates]


@pytest.mark.parametrize(("mode", "updates"), CASES)
def test_late_updates_end_before_their_group_is_read_and_a_chain_keeps_each_lane_busy_with_one_task(mode, updates):
    profile, plan = case(4, mode, updates)
    step = schedule_step(profile, plan)
    late = [task for task in step.tasks if task.before is not None]
    assert {Kind.UPDATE, Kind.STATE_DOWN} <= {task.kind for task in late}
    chain = repeat(step, 4)
    run = machine.run(chain)
    for lane in Lane:
        spans = sorted((run.starts_s[i], run.ends_s[i]) for i, task in enumerate(chain.tasks) if task.lane is lane)
        assert all(end <= start * (1 + 1e-12) for (_, end), (start, _) in itertools.pairwise(spans))
    for index, task in enumerate(chain.tasks):
        assert all(run.ends_s[other] <= run.starts_s[index] for other in task.after)


@pytest.mark.parametrize(("mode", "updates"), CASES)
def test_the_period_is_the_growth_of_a_long_chain(mode, updates):
    step = schedule_step(*case(4, mode, updates))
    chain = Chain(step)
    gpu = max(i for i, task in enumerate(step.tasks) if task.lane is Lane.GPU and task.before is None)
    ends = [chain.run_step()[1][gpu] for _ in range(60)]
    assert (ends[-1] - ends[29]) / 30 == pytest.approx(machine.steady_step_s(step), rel=1e-9)
    assert not any(task.before for task in in_one_period(step).tasks)


def test_streams_beside_the_next_forwards_are_faster_than_before_them():
    profile, plan = case(8, Mode.GFGB, Updates.AFTER_ALL, num_layers=8)
    alike = {"load_s": 1e-3, "forward_s": 4e-3, "backward_s": 8e-3, "offload_s": 1e-3, "state_bytes": 6 << 20}
    alike |= {"param_bytes": 2 << 20, "grad_bytes": 2 << 20, "state_up_s": 3e-3, "state_down_s": 4e-3}
    layers = tuple(dataclasses.replace(layer, **alike) for layer in profile.layers)
    step = schedule_step(dataclasses.replace(profile, layers=layers), plan)
    before = tuple(dataclasses.replace(task, before=None) for task in step.tasks)
    # 96 ms of programs; in front of the next step's forwards the streams take 29 ms more, of which about half remain.
    assert machine.steady_step_s(dataclasses.replace(step, tasks=before)) > 0.12
    assert machine.steady_step_s(step) < 0.112


@pytest.mark.parametrize(("mode", "updates"), CASES)
def test_memory_stays_within_the_budget_for_any_times(mode, updates):
    profile, plan = case(5, mode, updates)
    random = np.random.default_rng(0)
    needed = needed_bytes(profile, plan)
    step = schedule_step(profile, plan)
    for _ in range(20):
        factors = np.exp(random.normal(size=len(step.tasks)))
        tasks = tuple(
            dataclasses.replace(task, duration_s=task.duration_s * factor)
            for task, factor in zip(step.tasks, factors, strict=True)
        )
        run = machine.run(repeat(dataclasses.replace(step, tasks=tasks), 4))
        assert max(held for _, held in machine.device_bytes(run)) <= needed
