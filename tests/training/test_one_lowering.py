"""The plan shown is the plan that runs: one lowering for the command line, the simulator and the engine."""

import dataclasses
import functools
import json

import numpy as np
import optax
import pytest

import jaxferry
import models
from jaxferry.cli import main
from jaxferry.costs import Profile
from jaxferry.errors import BudgetError
from jaxferry.modes import GradientPlace, Mode, Remat
from jaxferry.planner import make_plan, policies
from jaxferry.step import LayerPlan, Plan, Updates, machine, needed_bytes, simulate
from slowly import slow


def frozen_lookup():
    """A model that only looks up its table; freezing the table gives a layer without a backward."""
    generator = np.random.default_rng(0)
    params = {f"l{i}": {"w": generator.normal(size=(16, 16)).astype(np.float32) * 0.1} for i in range(3)}
    params["table"] = {"w": generator.normal(size=(32, 16)).astype(np.float32)}
    return models.Task(models.chain(), params, np.arange(8) % 32)


def perceptron():
    """Residual layers whose activations are large enough to wait in host memory."""
    params = {f"l{i}": {"w": np.full((16, 16), 0.01, np.float32)} for i in range(8)}
    return models.Task(models.chain(residual=True), params, np.ones((64, 16), np.float32))


MODELS = {
    "gpt": (models.mlp, {}),
    "gpt that may recompute": (models.mlp, {"remat": "auto"}),
    "perceptron that offloads activations": (perceptron, {"remat": "full", "offload_activations": True}),
    "gpt that offloads activations": (lambda: models.mlp(depth=4), {"remat": "full", "offload_activations": True}),
    "frozen table": (frozen_lookup, {"trainable": lambda path: "table" not in path}),
    "lookup": (frozen_lookup, {}),
    "lookup that clips": (frozen_lookup, {"clip_norm": 1.0}),
    "lookup that accumulates": (frozen_lookup, {"accumulate": 2}),
}


OFTEN = {
    "lookup that clips": "auto",
    "lookup that accumulates": "memferry",
    "frozen table": "auto",
    "lookup": "auto",
    "perceptron that offloads activations": "memferry",
}
OFTEN_IN_A_BUDGET = {
    "lookup that clips": "exact",
    "lookup that accumulates": "auto",
    "lookup": "exact",
    "perceptron that offloads activations": "exact",
}


def cases(often):
    """Every model with every policy; all but those that `often` names for a model are marked slow."""
    return [
        pytest.param(name, policy, marks=() if policy == often.get(name) else pytest.mark.slow, id=f"{name}-{policy}")
        for name in MODELS
        for policy in policies()
    ]


@functools.cache
def profile_of(model):
    """A model, the options of its step, and its measured profile."""
    make, options = MODELS[model]
    task = make()
    step = jaxferry.train_step(task.loss_fn, optax.adamw(1e-3), **options)
    return task, options, step.measure(task.params, task.batch)


@pytest.fixture
def measured(request, tmp_path):
    """A model, the options of its step, and the file of its measured profile."""
    task, options, profile = profile_of(request.param)
    profile.save(tmp_path / "p.json")
    return task, options, tmp_path / "p.json"


def shown(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments), "--json"])
    assert ended.value.code in (0, None)
    return json.loads(capsys.readouterr().out)


def prepared(task, options, path, **more):
    step = jaxferry.train_step(task.loss_fn, optax.adamw(1e-3), profile=path, **options, **more)
    step.init(task.params)
    return step.prepare(task.batch)


def check(made, plan, path):
    """The plan's prediction is the simulation of the schedule that runs, to the bit."""
    assert made.plan.predicted.to_json() == plan["predicted"]
    run = machine.run(made.schedule)
    predicted = plan["predicted"]
    assert machine.step_s(run) == predicted["step_s"]
    assert machine.forward_s(run) == predicted["forward_s"]
    assert machine.steady_step_s(made.schedule) == predicted["steady_step_s"]
    again = simulate(Profile.load(path), Plan.from_json(plan))
    assert again.run.schedule == made.schedule
    assert max(held for _, held in machine.device_bytes(run)) <= made.peak.total


@pytest.mark.parametrize(("measured", "policy"), cases(OFTEN), indirect=["measured"])
@pytest.mark.parametrize("factor", [None, *slow(0.5)])
def test_what_plan_prints_is_the_simulation_of_the_schedule_that_runs(measured, policy, factor, capsys):
    task, options, path = measured
    flags = [] if factor is None else ["--reserve-factor", factor]
    plan = shown(capsys, "plan", path, "--policy", policy, *flags)
    made = prepared(task, options, path, policy=policy, reserve_factor=factor)
    assert made.plan.to_json()["layers"] == plan["layers"]
    check(made, plan, path)


def budgets(profile, policy):
    """The budget that the policy's free plan needs, and the smallest one within which the policy has a plan."""
    free = needed_bytes(profile, make_plan(profile, policy))
    try:
        make_plan(profile, policy, memory_budget_bytes=0)
    except BudgetError as error:
        return error.smallest_bytes, free
    return free, free


@pytest.mark.parametrize(("measured", "policy"), cases(OFTEN_IN_A_BUDGET), indirect=["measured"])
@pytest.mark.parametrize("share", [0.4, *slow(0.0, 0.1, 0.7, 1.0, 1.3)])
def test_so_it_is_within_a_budget(measured, policy, share, capsys):
    task, options, path = measured
    smallest, free = budgets(Profile.load(path), policy)
    budget = int(smallest + (free - smallest) * share)
    plan = shown(capsys, "plan", path, "--policy", policy, "--memory-budget", budget)
    made = prepared(task, options, path, policy=policy, memory_budget=budget)
    assert made.plan == Plan.from_json(plan)
    assert made.peak.total <= budget
    check(made, plan, path)


DIFFERENT = ("perceptron that offloads activations", "frozen table", "lookup that accumulates")


def any_plan(profile, generator):
    """A plan that no policy would choose."""
    modes = [list(Mode)[number] for number in generator.integers(0, len(Mode), len(profile.layers))]
    share = generator.choice([0, 0.5, 1])
    layers = tuple(
        LayerPlan(
            layer.name,
            mode,
            GradientPlace.HOST if generator.random() < share else GradientPlace.DEVICE,
            layer.levels[int(generator.integers(len(layer.levels)))] if generator.random() < 0.3 else Remat.NONE,
        )
        for layer, mode in zip(profile.layers, modes, strict=True)
    )
    updates = Updates.AFTER_ALL if profile.updates_after_all else Updates.OVERLAPPED
    plan = Plan("any", 1.0, layers, updates=updates)
    return dataclasses.replace(plan, memory_bytes=int(needed_bytes(profile, plan) * generator.choice([0.5, 1.2])))


@pytest.mark.parametrize("seed", [0, *slow(*range(1, 8))])
@pytest.mark.parametrize("model", [pytest.param(x, marks=() if x in DIFFERENT else pytest.mark.slow) for x in MODELS])
def test_any_plan_runs_unchanged_within_the_budget_that_it_needs(model, seed):
    """The engine counts each program's values and temporaries; the profile states them layer by layer."""
    task, options, profile = profile_of(model)
    generator = np.random.default_rng(seed)
    for _ in range(3):
        plan = any_plan(profile, generator)
        needed = needed_bytes(profile, plan)
        budget = max(needed, plan.memory_bytes)
        made = prepared(task, options, profile, plan=plan, memory_budget=budget)
        assert [made.plan.layers, made.plan.memory_bytes] == [plan.layers, plan.memory_bytes]
        assert 0.6 * needed <= made.peak.total <= budget
