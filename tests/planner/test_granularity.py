"""How fine layers are: profiles of modules and of blocks, and the choice between them."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import jaxferry
import models
from jaxferry.cli import main
from jaxferry.costs import MACHINES, Profile, estimate_profile, partition_costs
from jaxferry.errors import InputError
from jaxferry.modes import BLOCK, FASTER, MODULE, Mode
from jaxferry.partition import partition
from jaxferry.planner import Request, coarser, finer, longest_equal_s, plan_finest, plan_for, step_s
from jaxferry.step import LayerPlan, Plan
from profiles import transformer, unit_layer

MACHINE = MACHINES["a100-pcie3"]


def profile_of(granularity, machine=MACHINE, depth=3):
    task = models.mlp(depth=depth, width=64)
    parts = partition(task.loss_fn, task.params, (task.batch,), granularity=granularity)
    return estimate_profile(partition_costs(parts), machine)


@pytest.fixture(scope="module")
def modules():
    return profile_of(MODULE)


def test_the_modules_of_a_profile_add_up_to_its_blocks():
    """On a machine without fixed times; the latency of a copy and of a kernel counts once for those of a block."""
    machine = dataclasses.replace(MACHINE, launch_s=0.0, link_latency_s=0.0)
    blocks, found = profile_of(BLOCK, machine), coarser(profile_of(MODULE, machine))
    assert [layer.name for layer in found.layers] == [layer.name for layer in blocks.layers]
    assert [layer.parameters for layer in found.layers] == [layer.parameters for layer in blocks.layers]
    for own, expected in zip(found.layers, blocks.layers, strict=True):
        for field in dataclasses.fields(own):
            known, wanted = getattr(own, field.name), getattr(expected, field.name)
            if isinstance(wanted, float):
                assert known == pytest.approx(wanted, rel=1e-6), field.name
            else:
                assert known == wanted, field.name
    for own, expected in zip(coarser(profile_of(MODULE)).layers, profile_of(BLOCK).layers, strict=True):
        for field in ("load_s", "offload_s", "state_up_s", "state_down_s"):
            assert getattr(own, field) == pytest.approx(getattr(expected, field), rel=1e-6), field
        assert own.update_gpu_s == pytest.approx(expected.update_gpu_s, rel=5e-3)


def test_a_profile_of_blocks_is_as_coarse_as_can_be():
    profile = transformer(6, tied=True)
    assert coarser(profile) == profile


def test_programs_that_share_some_of_their_parameters_keep_their_layers():
    layers = [unit_layer(name) for name in "abcd"]
    layers[1] = dataclasses.replace(layers[1], shares_program=True)
    layers[2] = dataclasses.replace(layers[2], parameters="a")
    assert coarser(Profile({}, tuple(layers))).layers == tuple(layers)


def test_the_faster_is_chosen_and_issuing_counts(modules):
    request = Request(memory_budget_bytes=None)
    chosen, plan = plan_finest(modules, "memferry", request, FASTER)
    pairs = {name: plan_finest(modules, "memferry", request, name) for name in (BLOCK, MODULE)}
    assert step_s(chosen, plan) <= min(step_s(*pair) for pair in pairs.values()) / 0.99
    slow = dataclasses.replace(modules, machine={**modules.machine, "issue_s": 1.0})
    assert plan_finest(slow, "zero-offload", request, FASTER)[0] == coarser(slow)
    assert step_s(*plan_finest(slow, "zero-offload", request, MODULE)) > len(slow.programs)


def test_layers_of_modules_are_chosen_where_blocks_do_not_fit(modules):
    """A plan of RELOAD layers holds two of them at a time."""
    blocks = coarser(modules)
    with pytest.raises(jaxferry.BudgetError) as of_blocks:
        plan_finest(modules, "l2l", Request(memory_budget_bytes=1), BLOCK)
    with pytest.raises(jaxferry.BudgetError) as of_either:
        plan_finest(modules, "l2l", Request(memory_budget_bytes=1), FASTER)
    request = Request(memory_budget_bytes=of_either.value.smallest_bytes)
    assert request.memory_budget_bytes <= of_blocks.value.smallest_bytes
    chosen, plan = plan_finest(modules, "auto", Request(memory_budget_bytes=None), FASTER)
    assert chosen in (modules, blocks) and len(plan.layers) == len(chosen.layers)


def test_a_plan_of_blocks_is_one_of_their_modules(modules):
    blocks, plan = plan_finest(modules, "auto", Request(), BLOCK)
    same = finer(modules, plan)
    assert [layer.name for layer in same.layers] == [layer.name for layer in modules.layers]
    assert same.predicted.steady_step_s == pytest.approx(plan.predicted.steady_step_s, rel=0.1)
    assert step_s(*plan_finest(modules, "auto", Request(), MODULE)) <= step_s(modules, same)
    assert blocks == coarser(modules)


def test_an_unknown_granularity_is_refused(modules):
    with pytest.raises(InputError, match="granularity must be one of block, module, auto, got 'tensor'"):
        plan_finest(modules, "auto", Request(), "tensor")
    with pytest.raises(InputError, match="granularity must be one of block, module, auto, got 'tensor'"):
        jaxferry.train_step(lambda params: 0.0, optax.sgd(0.1), granularity="tensor")


def test_a_training_step_takes_the_layers_that_a_plan_names_or_that_are_faster(modules):
    task = models.mlp(depth=2)
    found = {}
    for granularity in (BLOCK, MODULE):
        parts = partition(task.loss_fn, task.params, (task.batch,), granularity=granularity)
        names = [use.name for use in parts.uses]
        plan = Plan("any", 1.0, tuple(LayerPlan(name, Mode.GFGB) for name in names))
        step = jaxferry.train_step(task.loss_fn, optax.sgd(0.1), plan=plan, granularity=FASTER)
        step.declare(task.params)
        found[granularity] = [layer.name for layer in step.prepare(task.batch).plan.layers]
        assert found[granularity] == names
    step = jaxferry.train_step(task.loss_fn, optax.sgd(0.1), policy="auto", profile="estimate", granularity=FASTER)
    step.declare(task.params)
    assert [layer.name for layer in step.prepare(task.batch).plan.layers] in found.values()


@pytest.mark.parametrize("of", [BLOCK, MODULE])
def test_a_plan_of_another_granularity_is_refused_with_a_hint(of):
    task = models.mlp(depth=2)
    parts = partition(task.loss_fn, task.params, (task.batch,), granularity=of)
    plan = Plan("any", 1.0, tuple(LayerPlan(use.name, Mode.GFGB) for use in parts.uses))
    other = MODULE if of == BLOCK else BLOCK
    step = jaxferry.train_step(task.loss_fn, optax.sgd(0.1), plan=plan, granularity=other)
    step.declare(task.params)
    with pytest.raises(InputError, match=f'use granularity="{of}"'):
        step.prepare(task.batch)


def test_the_command_line_plans_a_profile_of_modules_for_either(modules, tmp_path, capsys):
    modules.save(tmp_path / "profile.json")
    names = {}
    for granularity in (BLOCK, MODULE, FASTER):
        command = ["plan", str(tmp_path / "profile.json"), "--policy", "memferry", "--memory-budget", "none", "--json"]
        with pytest.raises(SystemExit, match="0"):
            main([*command, "--granularity", granularity])
        names[granularity] = [layer["name"] for layer in json.loads(capsys.readouterr().out)["layers"]]
    assert names[MODULE] == [layer.name for layer in modules.layers]
    assert names[BLOCK] == [layer.name for layer in coarser(modules).layers]
    assert names[FASTER] in (names[MODULE], names[BLOCK])


@pytest.mark.cpu_device  # temporaries of another device decide which layers need least
def test_modules_are_taken_where_blocks_do_not_fit_also_without_a_policy():
    task = models.mlp(depth=2)

    def prepared(budget, granularity):
        step = jaxferry.train_step(task.loss_fn, optax.sgd(0.1), memory_budget=budget, granularity=granularity)
        step.declare(task.params)
        return step.prepare(task.batch)

    least = {}
    for granularity in (BLOCK, MODULE, FASTER):
        with pytest.raises(jaxferry.BudgetError) as error:
            prepared(1, granularity)
        least[granularity] = error.value.smallest_bytes
    assert least[FASTER] == min(least.values()) <= least[MODULE] < least[BLOCK]
    found = prepared(least[MODULE], FASTER)
    assert found.peak.total <= least[MODULE] and len(found.plan.layers) > len(prepared(None, FASTER).plan.layers)


class Nested(linen.Module):
    """Blocks whose only submodule has all the matrices: without biases, their layers share a longer prefix."""

    @linen.compact
    def __call__(self, x):
        for number in range(2):
            x = x + Feed(name=f"h_{number}")(x)
        return linen.Dense(4, use_bias=False, name="head")(x)


class Feed(linen.Module):
    @linen.compact
    def __call__(self, x):
        return Inner(name="mlp")(x)


class Inner(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(8, use_bias=False, name="down")(linen.gelu(linen.Dense(16, use_bias=False, name="up")(x)))


class Twice(linen.Module):
    """Runs such a block twice."""

    @linen.compact
    def __call__(self, x):
        first, second = Feed(name="h_0"), Feed(name="h_1")
        for block in (first, second, first):
            x = x + block(x)
        return linen.Dense(4, use_bias=False, name="head")(x)


@pytest.mark.parametrize("module", [Nested(), Twice()], ids=["nested", "twice"])
def test_a_plan_for_the_blocks_of_a_profile_of_modules_names_the_blocks_of_the_model(module, tmp_path, capsys):
    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    params = module.init(jax.random.key(0), x)

    def loss_fn(params, x):
        return jnp.mean(module.apply(params, x) ** 2)

    def profile_at(granularity):
        return estimate_profile(partition_costs(partition(loss_fn, params, (x,), granularity=granularity)), MACHINE)

    profile_at(MODULE).save(tmp_path / "profile.json")
    modules = Profile.load(tmp_path / "profile.json")
    assert modules == profile_at(MODULE) and any(layer.block for layer in modules.layers)
    found, expected = coarser(modules), profile_at(BLOCK)
    for key in ("name", "parameters", "block"):
        assert [getattr(layer, key) for layer in found.layers] == [getattr(layer, key) for layer in expected.layers]
    with pytest.raises(SystemExit, match="0"):
        main(["plan", str(tmp_path / "profile.json"), "--granularity", BLOCK, "-o", str(tmp_path / "plan.json")])
    step = jaxferry.train_step(loss_fn, optax.sgd(0.1), plan=tmp_path / "plan.json", granularity=BLOCK)
    step.declare(params)
    assert len(step.prepare(x).plan.layers) == len(expected.layers)


def test_a_profile_of_modules_that_states_no_blocks_is_read_as_before(modules):
    document = modules.to_json()
    for layer in document["layers"]:
        layer.pop("block", None)
    found = coarser(Profile.from_json(document))
    assert [layer.name for layer in found.layers] == [layer.name for layer in coarser(modules).layers]


@pytest.mark.parametrize("in_turn", [(("up",),), (("up", "down"), ("left", "right"))], ids=["unread", "apart"])
def test_blocks_of_unread_parameters_keep_their_names_and_those_in_several_parts_their_layers(in_turn):
    """The programs of a block may read some of its parameters only, or others each."""
    draw = np.random.default_rng(0)
    names = ("up", "down", "left", "right")
    params = {
        block: {"mlp": {name: {"w": draw.normal(size=(8, 8)).astype(np.float32)} for name in names}}
        for block in ("h_0", "h_1")
    }

    def loss_fn(params, x):
        for part in in_turn:
            for block in params.values():
                for name in part:
                    x = jnp.tanh(x @ block["mlp"][name]["w"])
        return jnp.mean(x**2)

    x = np.ones((4, 8), np.float32)
    parts = partition(loss_fn, params, (x,), granularity=MODULE)
    found = coarser(estimate_profile(partition_costs(parts), MACHINE))
    assert [layer.name for layer in found.layers] == (
        ["h_0", "h_1"] if len(in_turn) == 1 else [use.name for use in parts.uses]
    )


@pytest.mark.slow
def test_all_commands_plan_a_profile_of_modules_alike(tmp_path, capsys):
    """So many modules that their own search may miss one of their blocks' plans; launches count as well."""
    modules = profile_of(MODULE, MACHINES["v100-pcie3"], depth=24)
    path, budget = tmp_path / "profile.json", sum(layer.param_bytes for layer in modules.layers)
    modules.save(path)

    def answer(command, *options):
        with pytest.raises(SystemExit, match="0"):
            main([command, str(path), "--memory-budget", str(budget), *options, "--json"])
        return json.loads(capsys.readouterr().out)

    planned = answer("plan", "--policy", "auto", "--reserve-factor", "1")["predicted"]["steady_step_s"]
    compared = {row["policy"]: row for row in answer("plan", "--compare", "--reserve-factor", "1")["policies"]}
    assert compared["auto"]["steady_step_s"] == planned
    assert answer("tune", "--policy", "auto", "--reserve-factor", "1")["knee"]["steady_step_s"] == planned
    request = Request(1.0, budget)
    profile, plan = plan_finest(modules, "auto", request, MODULE)
    assert plan.predicted is not None and plan.predicted.steady_step_s == planned
    assert step_s(profile, plan) <= longest_equal_s(step_s(modules, plan_for(modules, "auto", request)))


def test_tune_sweeps_a_profile_of_modules_at_any_granularity(modules, tmp_path, capsys):
    path, output = tmp_path / "profile.json", tmp_path / "plan.json"
    modules.save(path)
    layers = {BLOCK: [coarser(modules)], MODULE: [modules], FASTER: [coarser(modules), modules]}
    for granularity, profiles in layers.items():
        options = ["--granularity", granularity, "--policy", "memferry", "--reserve-factor", "1", "--json"]
        found = {}
        for command, more in (("tune", ["-o", str(output)]), ("plan", [])):
            with pytest.raises(SystemExit, match="0"):
                main([command, str(path), *options, *more])
            found[command] = json.loads(capsys.readouterr().out)
        names = [layer.name for layer in Plan.load(output).layers]
        assert names in [[layer.name for layer in each.layers] for each in profiles]
        assert found["tune"]["knee"]["steady_step_s"] == found["plan"]["predicted"]["steady_step_s"]
