"""The memory of steps compiled for an H200: planner, engine and compiled programs agree on a small model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxferry.costs import MACHINES, estimate_profile, partition_costs
from jaxferry.engine import RematVariants, with_program_facts
from jaxferry.errors import BudgetError
from jaxferry.partition import AUTO, partition
from jaxferry.planner import AutoSearch, Request, make_plan
from jaxferry.step import needed_bytes
from native import compiled_steps
from native.compiled_steps import TOLERANCE, CompiledModel, compare_step, peak_bytes
from native.cuda_library import cuda_library
from slowly import slow

ROWS, WIDTH, NARROW, NUM_LAYERS = 3000, 2048, 64, 6
STEPS = np.linspace(0, 1, WIDTH, dtype=np.float32)


def loss_fn(params, batch):
    """Dense layers with a constant, and a value that two layers read."""
    x = batch["x"]
    for number in range(NUM_LAYERS):
        x = jnp.tanh(x @ params[f"layer_{number}"]["kernel"]) + jnp.asarray(STEPS, x.dtype)
    x = x @ params["narrow"]["kernel"]
    heads = [jnp.tanh(x @ params[name]["kernel"]) for name in ("left", "right")]
    return jnp.mean((heads[0] * heads[1]).astype(jnp.float32) ** 2)


@pytest.fixture(scope="module")
def compiled():
    """A model, its profile, and the profile with the temporaries of compiled programs."""
    cuda_library()
    shapes = {f"layer_{number}": (WIDTH, WIDTH) for number in range(NUM_LAYERS)}
    shapes |= {"narrow": (WIDTH, NARROW), "left": (NARROW, NARROW), "right": (NARROW, NARROW)}
    params = {name: {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)} for name, shape in shapes.items()}
    batch = {"x": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)}
    variants = RematVariants(partition(loss_fn, params, (batch,), compute_dtype=jnp.bfloat16), AUTO)
    profile = estimate_profile(partition_costs(variants.base, AUTO, temporaries=True), MACHINES["h200-pcie5"])
    profile = with_program_facts(profile, variants.base, variants.derivatives)
    model = CompiledModel(loss_fn, params, batch)
    return model, profile, model.with_temporaries(profile, variants)


def plan_of(profile, policy):
    """The policy's plan; of `auto` the one that needs the least memory."""
    if policy != "auto":
        return make_plan(profile, policy)
    search = AutoSearch(profile, Request(), places=())
    return search.plan(search.smallest_bytes)


def farthest(rows, part):
    """How far the count of a part is from the compiled programs, where that is most."""
    return max(abs(counted - compiled) / max(compiled, 1) for counted, compiled in (row[part] for row in rows))


@pytest.mark.parametrize("policy", [*slow("zero-offload"), "go-memferry", "auto"])
def test_planner_engine_and_compiled_programs_have_the_same_peak(compiled, policy):
    model, _, profile = compiled
    plan = plan_of(profile, policy)
    prepared, programs = model.step(plan=plan, profile=profile)
    counted, replayed = peak_bytes(compare_step(model, prepared, programs))
    assert prepared.plan.layers == plan.layers
    assert counted == pytest.approx(replayed, rel=1e-3)
    # Buffers that stay for the next step's loads are the engine's choice, where the budget has room for them.
    bare = dataclasses.replace(prepared, program=dataclasses.replace(prepared.program, reserved=frozenset()))
    counted, replayed = peak_bytes(compare_step(model, bare, programs))
    assert counted == pytest.approx(replayed, rel=1e-3)
    assert needed_bytes(profile, plan) == pytest.approx(counted, rel=1e-3)


def test_a_step_within_the_counted_memory_runs_the_plan_as_it_is(compiled):
    model, _, profile = compiled
    plan = plan_of(profile, "auto")
    counted, _ = peak_bytes(compare_step(model, *model.step(plan=plan, profile=profile)))
    prepared, _ = model.step(plan=plan, profile=profile, memory_budget=counted)
    assert prepared.plan.layers == plan.layers
    assert prepared.peak.total == counted
    with pytest.raises(BudgetError):
        model.step(plan=make_plan(profile, "zero-offload"), profile=profile, memory_budget=counted)


@pytest.mark.parametrize("part", ["copies", "gradients", "values", "temporaries"])
def test_a_count_that_is_wrong_by_a_twentieth_is_noticed(compiled, monkeypatch, part):
    model, _, profile = compiled
    prepared, programs = model.step(plan=make_plan(profile, "zero-offload"), profile=profile)
    counted = compiled_steps.footprints

    def wrong(*args, **kwargs):
        found = counted(*args, **kwargs)
        return [dataclasses.replace(each, **{part: round(1.05 * getattr(each, part))}) for each in found]

    assert farthest(compare_step(model, prepared, programs), part) < TOLERANCE
    monkeypatch.setattr(compiled_steps, "footprints", wrong)
    assert farthest(compare_step(model, prepared, programs), part) > TOLERANCE
