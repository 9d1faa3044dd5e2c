"""Gradients of a few programs at a time in host memory: `gradient_buffers`. Bits: tests/test_bits.py."""

import collections
import contextlib
import dataclasses
import random
import time

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
from faults import Fault, identity_that_calls
from jaxferry.engine import executor, groups_backward, groups_with_buffers
from jaxferry.errors import InputError
from jaxferry.modes import GradientPlace, Mode
from jaxferry.partition import partition
from jaxferry.step import Lane, LayerPlan, Operation, Plan, Updates, run, schedule_chain
from jaxferry.transport import base
from models import chain
from planned import assert_same_bits, take_steps
from profiles import deterministic, plans, profiles
from slowly import slow_cases

DEPTH, WIDTH, STEPS = 8, 32, 3
BATCH = np.linspace(-1, 1, 4 * WIDTH, dtype=np.float32).reshape(4, WIDTH)
PLACES = [*GradientPlace]


def parameters(depth=DEPTH):
    generator = np.random.default_rng(0)
    return {f"l{i}": {"w": generator.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8} for i in range(depth)}


def made(gradient=GradientPlace.DEVICE, loss_fn=None, optimizer=None, **options):
    plan = Plan("any", 1.0, tuple(LayerPlan(f"l{i}", Mode.GFGB, gradient) for i in range(DEPTH)))
    options = {"plan": plan} | options
    return jaxferry.train_step(loss_fn or chain(), optimizer or jaxferry.adamw(1e-2), **options)


@deterministic
@hypothesis.given(st.data())
def test_no_more_gradients_exist_in_host_memory_than_of_so_many_programs(data):
    profile = data.draw(profiles(max_layers=6, programs=True))
    num = data.draw(st.integers(1, 4))
    plan = dataclasses.replace(data.draw(plans(profile)), updates=Updates.OVERLAPPED, gradient_buffers=num)
    hypothesis.assume(not profile.updates_after_all)
    found = run(schedule_chain(profile, plan, 3))
    program_of = {layer: number for number, members in enumerate(profile.programs) for layer in members}
    groups = profile.groups
    alone = {g for g, members in enumerate(groups) if len({program_of[layer] for layer in members}) == 1}
    events = []
    for task, start_s, end_s in zip(found.schedule.tasks, found.starts_s, found.ends_s, strict=True):
        where = program_of[task.segment], task.step
        if profile.group_of[task.segment] in alone:
            events += [(start_s, 1, *where)] if task.host_start_bytes else []
            num_layers = sum(profile.layers[layer].has_gradient for layer in groups[profile.group_of[task.segment]])
            events += [(end_s, 0, *where)] * num_layers if task.host_end_bytes else []
    alive, most = collections.Counter(), 0
    for _, is_start, program, step in sorted(events):
        alive[step, program] += 1 if is_start else -1
        most = max(most, sum(count > 0 for count in alive.values()))
    assert most <= num


@pytest.mark.parametrize("seed", range(20))
def test_buffers_are_those_of_an_allocator_that_reuses_what_is_free(seed):
    """As many groups of a kind have buffers as hold one at some time, and whoever takes one finds it."""
    generator, num = random.Random(seed), 1 + seed % 4
    layers = partition(chain(), parameters(), (BATCH,)).layers
    wide = partition(chain(), {"l0": {"w": np.ones((WIDTH, WIDTH), np.float64)}}, (BATCH,)).layers
    kinds = [generator.choice([layers[0], wide[0]]) for _ in range(10)]
    programs = [[group] for group in generator.sample(range(9), 9)]
    programs[generator.randrange(9)] += [programs[generator.randrange(9)][0]]  # one of several uses, perhaps
    owners = groups_with_buffers(kinds, programs, num)
    dtypes = [kind.trained.vectors[0].dtype for kind in kinds]
    alive = [
        {
            group
            for group in range(9)
            if any(group in own for own in programs[: at + 1])
            and any(group in own for own in programs[max(at - num + 1, 0) :])
        }
        for at in range(9)
    ]
    for dtype in set(dtypes):
        most = max(sum(dtypes[group] == dtype for group in groups) for groups in alive)
        assert sum(dtypes[group] == dtype for group in owners - {9}) == most
    for at, groups in enumerate(alive):  # each takes its own, or what nobody else holds
        made_by_now = [group for group in owners if any(group in own for own in programs[: at + 1])]
        assert not collections.Counter(dtypes[group] for group in groups) - collections.Counter(
            dtypes[group] for group in made_by_now
        )
    assert groups_with_buffers(kinds, programs, None) == frozenset(range(10)) >= owners


@pytest.mark.parametrize("gradient", [PLACES[0], *slow_cases(PLACES[1:])])
@pytest.mark.parametrize("num", [1, *slow_cases([3])])
def test_a_slow_host_makes_backwards_wait_in_place_of_more_memory(gradient, num, monkeypatch):
    made_vectors, update = [], executor.OPERATIONS[Operation.UPDATE]

    def noted(*args):
        made_vectors.append(args)
        return empty(*args)

    def slow_update(*args):
        time.sleep(0.02)  # longer than any backward
        return update(*args)

    empty = base.empty
    monkeypatch.setattr(base, "empty", noted)
    monkeypatch.setitem(executor.OPERATIONS, Operation.UPDATE, slow_update)
    found = {}
    for buffers in ("all", num):
        made_vectors.clear()
        step = made(gradient, gradient_buffers=buffers, transport="ferry")
        state, losses = take_steps(step, step.init(parameters()), [BATCH] * STEPS)
        state.block_until_ready()
        found[buffers] = len(made_vectors), losses, state.params
    assert found["all"][0] == DEPTH
    assert found[num][0] == num
    assert found[num][1] == found["all"][1]
    assert_same_bits(found[num][2], found["all"][2])


def test_a_step_whose_loss_is_nan_takes_no_more_memory(monkeypatch):
    made_vectors, empty = [], base.empty
    monkeypatch.setattr(base, "empty", lambda *args: made_vectors.append(args) or empty(*args))
    step = made(gradient_buffers=2, transport="ferry")
    state, expected = take_steps(step, step.init(parameters()), [BATCH] * STEPS)
    state = step.init(parameters())
    for _ in range(2):
        with pytest.raises(jaxferry.NonFiniteError):
            step(state, BATCH * np.nan)
    assert take_steps(step, state, [BATCH] * STEPS)[1] == expected
    assert len(made_vectors) <= 2


@pytest.mark.cpu_device  # where no pool of pinned memory counts
def test_host_memory_counts_the_buffers_and_decides_their_number_where_nobody_else_does(monkeypatch):
    def bytes_of(buffers):
        step = made(gradient_buffers=buffers)
        step.init(parameters())
        return step.compiler.model.host_bytes_of(step.prepare(BATCH))

    every, few = bytes_of("all"), bytes_of(2)
    assert every["gradients"] == DEPTH * WIDTH**2 * 4
    assert few["gradients"] == 2 * WIDTH**2 * 4
    assert {name: size for name, size in every.items() if name != "gradients"} == {
        name: size for name, size in few.items() if name != "gradients"
    }
    for limit, expected in ((sum(every.values()), None), (sum(every.values()) - 1, 4), (sum(few.values()), 2)):
        monkeypatch.setenv("JAXFERRY_HOST_MEMORY", str(limit))
        step = made(plan=None)
        warns = pytest.warns(UserWarning, match=f"{expected} programs at a time .*may take longer")
        with warns if expected else contextlib.nullcontext():
            state = step.init(parameters())
        take_steps(step, state, [BATCH] * STEPS)
        assert step.prepare(BATCH).plan.gradient_buffers == expected
        assert step.compiler.model.gradient_buffers == expected
    monkeypatch.setenv("JAXFERRY_HOST_MEMORY", str(sum(few.values()) - 1))
    with pytest.raises(jaxferry.HostMemoryError, match=rf"gradients {few['gradients'] / 2**10:.2f} KiB"):
        made(plan=None).init(parameters())
    # Updates that wait for all gradients need all.
    monkeypatch.setenv("JAXFERRY_HOST_MEMORY", str(sum(every.values()) - 1))
    with pytest.raises(jaxferry.HostMemoryError, match=rf"gradients {every['gradients'] / 2**10:.1f} KiB"):
        made(plan=None, clip_norm=1.0).init(parameters())


def test_norms_that_a_thread_computes_are_those_of_the_gradients_before_their_memory_is_used_again():
    """A table of two uses: its norm is computed in host memory, which other gradients take at once."""

    def loss_fn(params, batch):
        x = batch
        for name in ("a", "b", "c", "d", "a"):
            x = jnp.tanh(x @ params[name])
        return jnp.mean(x**2)

    params = {name: leaf["w"] for name, leaf in zip("abcd", parameters(4).values(), strict=True)}
    norms = {}
    for buffers in ("all", 1):
        step = jaxferry.train_step(loss_fn, optax.sgd(0.1), gradient_buffers=buffers)
        state, norms[buffers] = step.init(params), []
        for _ in range(STEPS):
            state, metrics = step(state, BATCH)
            norms[buffers].append(float(metrics["grad_norm"]))
    assert norms[1] == norms["all"]
    gradients = jax.grad(loss_fn)(params, BATCH)
    np.testing.assert_allclose(norms[1][0], optax.tree.norm(gradients), rtol=1e-5)


def test_a_first_step_that_fails_after_an_update_damages_the_state():
    fault = Fault()
    faulty = identity_that_calls(fault)

    def loss_fn(params, x):
        for i in range(DEPTH):
            x = x + faulty(jnp.tanh(x @ params[f"l{i}"]["w"]))
        return jnp.mean((x - 1) ** 2)

    for buffers, outcome in (("all", "the state is that before the step"), (1, "the state lies between two steps")):
        step = made(loss_fn=loss_fn, gradient_buffers=buffers)
        state = step.init(parameters())
        fault.arm(2 * DEPTH)  # the last backward
        with pytest.raises(jaxferry.JaxFerryError, match=outcome):
            step(state, BATCH)


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "some", None])
def test_what_is_no_number_of_buffers_is_refused(value):
    with pytest.raises(InputError, match="gradient_buffers must be a whole number, 1 or more, 'auto' or 'all', got"):
        made(gradient_buffers=value)


@pytest.mark.parametrize(
    "options", [{"clip_norm": 1.0}, {"accumulate": 2}, {"skip_nonfinite": True}, {"check_gradients": True}]
)
def test_updates_that_wait_for_all_gradients_exclude_a_number_of_buffers(options):
    with pytest.raises(InputError, match=f"gradient_buffers=4 needs updates that wait.*{next(iter(options))}"):
        made(gradient_buffers=4, **options)
    plan = dataclasses.replace(made().options.planning.plan, gradient_buffers=4)
    with pytest.raises(InputError, match="gradient_buffers=4 needs"):
        made(plan=plan, **options)


def test_an_optimizer_that_looks_at_all_gradients_excludes_a_number_of_buffers():
    joint = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    with (
        pytest.raises(InputError, match=r"gradient_buffers=4 needs an optimizer that updates each layer alone"),
        pytest.warns(UserWarning, match="all parameters at once"),
    ):
        made(optimizer=joint, plan=None, gradient_buffers=4).init(parameters())


def test_a_plan_says_the_number_and_the_argument_says_another(tmp_path):
    plan = dataclasses.replace(made().options.planning.plan, gradient_buffers=3)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    for options, expected in (({}, 3), ({"gradient_buffers": 2}, 2), ({"gradient_buffers": "all"}, None)):
        step = made(plan=tmp_path / "plan.json", **options)
        step.init(parameters())
        assert step.prepare(BATCH).plan.gradient_buffers == expected
    with pytest.raises(InputError, match='gradient_buffers=3 needs updates "overlapped", got "after-all"'):
        dataclasses.replace(plan, updates=Updates.AFTER_ALL)
    with pytest.raises(InputError, match="gradient_buffers must be a whole number, 1 or more, got 0"):
        dataclasses.replace(plan, gradient_buffers=0)


def test_only_backwards_wait_for_the_updates_before_them():
    step = made(gradient_buffers=2)
    step.init(parameters())
    program = step.prepare(BATCH).program
    tasks = program.schedule.tasks
    waits = {
        task.segment: [tasks[i].segment for i in task.after if tasks[i].lane is Lane.HOST]
        for task in tasks
        if any(tasks[i].lane is Lane.HOST for i in task.after)
    }
    assert waits == {layer: [layer + 2] for layer in range(DEPTH - 2)}
    assert groups_backward(program.partition) == [[group] for group in reversed(range(DEPTH))]
