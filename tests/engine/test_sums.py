"""Sums of gradients over micro-batches, in more bits than the gradients have."""

import functools
import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
import models
from accelerator import emulate
from jaxferry.modes import BLOCK, MODULE, GradientPlace, Mode
from jaxferry.optimizer import pinned_bytes
from jaxferry.partition import partition
from jaxferry.step import LayerPlan, Plan
from planned import assert_same_bits, segment_names, take_steps, taken
from slowly import slow
from steps import with_sums_in_host_memory
from watched import becomes, live_pinned_bytes, settled

N = 300
COLUMNS = 512
ROWS = np.arange(3)
PLACES = {"a": GradientPlace.DEVICE, "b": GradientPlace.HOST, "c": GradientPlace.DEVICE, "d": GradientPlace.HOST}
PARAMS = {name: {"w": np.zeros((COLUMNS, 2), np.float32)} for name in PLACES}
XS = [np.random.default_rng(i).uniform(0.5, 1.5, (1, COLUMNS)).astype(jnp.bfloat16) for i in range(4)]


def loss_fn(params, x):
    """Reads `c` by a lookup and `d` twice; every column of the other gradients is x."""
    a, b, c, d = (params[name]["w"] for name in "abcd")
    y = x @ d
    y = y + x @ a
    y = y + c[ROWS].sum(0)
    y = y + x @ b
    return jnp.sum((y + x @ d).astype(jnp.float32))


@pytest.fixture(params=[*slow("cpu"), "accelerator"])
def _device(request, monkeypatch):
    if request.param == "accelerator":
        emulate(monkeypatch)


def summed(gradients):
    total = np.float32(0)
    for gradient in gradients:
        total = total + np.float32(gradient).ravel()
    return total


@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize("transport", ["ferry", *slow("device_put")])
@pytest.mark.parametrize("is_on_host", [False, *slow(True)])
def test_sums_of_bfloat16_gradients_have_the_bits_of_sums_in_fp32_wherever_they_are(transport, is_on_host):
    """Sums in bfloat16 would end at 256, where the next number is larger by two."""
    names = segment_names(models.Task(loss_fn, PARAMS, XS[0]))
    plan = Plan("any", 1.0, tuple(LayerPlan(name, Mode.GFGB, PLACES[name[0]]) for name in names))
    options = {"accumulate": N, "compute_dtype": jnp.bfloat16, "plan": plan, "transport": transport}
    step = jaxferry.train_step(loss_fn, jaxferry.sgd(1.0), **options)
    state = step.init(PARAMS)
    prepared = step.prepare(XS[0])
    assert len(prepared.program.summed) == 1
    if is_on_host:
        with_sums_in_host_memory(prepared)
    batches = list(itertools.islice(itertools.cycle(XS), N))
    for x in batches:
        state, _ = step(state, x)
    once, touched = summed(batches), N * np.isin(np.arange(COLUMNS), ROWS)
    twice = summed(itertools.chain(*zip(batches, batches, strict=True)))
    for name, expected in {"a": once, "b": once, "c": np.float32(touched), "d": twice}.items():
        mean = expected * (np.float32(1) / np.float32(N))
        np.testing.assert_array_equal(state.params[name]["w"], -np.stack([mean, mean], 1), name)


NUM_USES = 12
SPREAD = np.geomspace(1, 250, NUM_USES)[:, None, None] * np.random.default_rng(6).uniform(0.5, 1.5, (NUM_USES, 1, 64))
BATCHES = [SPREAD.astype(jnp.bfloat16), SPREAD[::-1].astype(jnp.bfloat16)]
UNUSED = {name: {"w": np.zeros((64, 2), np.float32)} for name in "abc"}
GFGB = (Mode.GFGB, GradientPlace.DEVICE)
WAYS = {
    "offloads": [GFGB],
    "both": [GFGB, (Mode.GFGB, GradientPlace.HOST)],
    "reads in place": [(Mode.RELOAD, GradientPlace.DEVICE), (Mode.DHA, GradientPlace.HOST)],
    "loads for the backward": [(Mode.DFGB, GradientPlace.DEVICE), (Mode.DFGB, GradientPlace.HOST)],
    "resident": [(Mode.RESIDENT, GradientPlace.DEVICE), (Mode.RESIDENT, GradientPlace.HOST)],
}
"""Modes and gradient places of a layer's uses in turn."""


def used_often(params, xs):
    """Reads `a` and `b` in turn, once for each row of the batch, and `c` once; their gradients are these rows."""
    y = jnp.zeros((1, 2), xs.dtype)
    for x in xs:
        y = y + x @ params["a"]["w"]
        y = y + x @ params["b"]["w"]
    return jnp.sum((y + xs[0] @ params["c"]["w"]).astype(jnp.float32))


def plan_of_uses(way):
    names = segment_names(models.Task(used_often, UNUSED, BATCHES[0]))
    of_ways = {name: itertools.cycle(WAYS[way]) for name in "ab"} | {"c": itertools.repeat(GFGB)}
    return Plan("any", 1.0, tuple(LayerPlan(name, *next(of_ways[name[0]])) for name in names))


@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize("transport", ["ferry", *slow("device_put")])
@pytest.mark.parametrize(
    ("way", "options"),
    [*((way, {}) for way in WAYS), ("both", {"accumulate": 2}), ("both", {"clip_norm": 1e9})],
    ids=[*WAYS, "mean of two", "clipped"],
)
def test_gradients_of_a_layers_uses_are_summed_in_fp32(transport, way, options):
    """A sum in bfloat16, rounded after each addition, differs in most elements."""
    rounded = functools.reduce(operator.add, BATCHES[0])
    assert np.mean(np.float32(rounded[0]) != summed(BATCHES[0])) > 0.5
    given = {"compute_dtype": jnp.bfloat16, "plan": plan_of_uses(way), "transport": transport, **options}
    step = jaxferry.train_step(used_often, jaxferry.sgd(1.0), **given)
    state, batches = step.init(UNUSED), BATCHES[: options.get("accumulate", 1)]
    for batch in batches:
        state, metrics = step(state, batch)
    mean = sum(summed(reversed(batch)) for batch in batches) / np.float32(len(batches))
    once = sum(np.float32(batch[0, 0]) for batch in batches) / np.float32(len(batches))
    for name, expected in {"a": mean, "b": mean, "c": once}.items():
        np.testing.assert_array_equal(state.params[name]["w"], -np.stack([expected, expected], 1), name)
    norm = np.sqrt(2 * np.sum(np.float64([mean, mean, once]) ** 2))
    np.testing.assert_allclose(float(metrics["grad_norm"]), norm, rtol=1e-6)


@pytest.mark.parametrize("transport", ["ferry", "device_put"])
def test_what_is_pinned_for_the_uses_of_a_layer_is_counted(monkeypatch, transport):
    def pinned():
        state.block_until_ready()
        return live_pinned_bytes()

    emulate(monkeypatch)
    step = jaxferry.train_step(used_often, jaxferry.sgd(1.0), compute_dtype=jnp.bfloat16, transport=transport)
    state = step.init(UNUSED)
    before = settled(pinned)
    state = taken(step, state, BATCHES[0], 3)
    made = step.prepare(BATCHES[0])
    counted = step.compiler.model.host_bytes(made.partition.layers, widened=made.program.widened)
    assert counted["sums of gradients"] == 2 * 4 * 128
    assert counted["gradients"] == (2 * NUM_USES + 1) * 2 * 128
    assert becomes(lambda: pinned() - before <= pinned_bytes(counted))


WIDTH = 8
SHARED = {"a": ("p", "q"), "b": ("p",), "c": ("p",)}
"""Modules of blocks; block `a` runs three times."""
DTYPES = {"p": jnp.bfloat16, "q": np.float32}
NARROW = [np.random.default_rng(i).normal(size=(4, WIDTH)).astype(np.float32) for i in range(6)]


def shared_blocks(params, x):
    for block in "abaca":
        for module in SHARED[block]:
            x = jnp.tanh(x @ params[block][module]["w"])
    return jnp.mean(x**2)


def shared_params():
    draw = np.random.default_rng(0)
    return {
        block: {module: {"w": (0.3 * draw.normal(size=(WIDTH, WIDTH))).astype(DTYPES[module])} for module in modules}
        for block, modules in SHARED.items()
    }


def trained_with(places, granularity, options):
    """Losses and parameters under a plan that gives the uses of block `a` these gradient places in turn."""
    params = shared_params()
    names = [use.name for use in partition(shared_blocks, params, (NARROW[0],), granularity=granularity).uses]
    of_use = iter(places)
    gradients = [next(of_use) if name[0] == "a" else GradientPlace.DEVICE for name in names]
    layers = [LayerPlan(name, Mode.GFGB, place) for name, place in zip(names, gradients, strict=True)]
    step = jaxferry.train_step(
        shared_blocks, jaxferry.sgd(0.5), plan=Plan("any", 1.0, tuple(layers)), granularity=granularity, **options
    )
    state, losses = take_steps(step, step.init(params), NARROW)
    return losses, state.params


@pytest.mark.parametrize(
    ("device", "accumulate", "granularity"),
    [
        pytest.param("mesh", 1, BLOCK, marks=pytest.mark.cpu_device),
        pytest.param("mesh", 3, MODULE, marks=[pytest.mark.cpu_device, pytest.mark.slow]),
        ("device_put", 3, BLOCK),
        ("ferry", 1, MODULE),
    ],
)
def test_the_uses_of_a_layer_may_differ_in_gradient_place(monkeypatch, device, accumulate, granularity):
    """Gradients of one layer are offloaded and written by programs, in any order; all plans give the same bits."""
    if device == "mesh":
        options = {"mesh": jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])}
    else:
        emulate(monkeypatch)
        options = {"transport": device}
    options["accumulate"] = accumulate
    num = 3 if granularity == BLOCK else 6
    places = tuple(GradientPlace)
    assert places == (GradientPlace.DEVICE, GradientPlace.HOST)
    turns = [[*itertools.islice(itertools.cycle(turn), num)] for turn in (places, places[::-1], (*places, places[1]))]
    chosen = [places[:1] * num, places[1:] * num, *turns]
    found = [trained_with(places, granularity, options) for places in chosen]
    for losses, params in found[1:]:
        assert losses == found[0][0]
        assert_same_bits(params, found[0][1])


@pytest.mark.parametrize("transport", ["ferry", "device_put"])
@pytest.mark.parametrize("tokens", [np.full(2000, 3), np.full((3, 257), 3)], ids=["at once", "by several lookups"])
def test_of_a_token_that_is_looked_up_often_no_row_is_lost(transport, tokens):
    def loss_fn(params, tokens):
        looked_up = [params["table"]["w"][row] @ params["head"]["w"] for row in jnp.atleast_2d(tokens)]
        return jnp.sum(sum(looked_up).astype(jnp.float32))

    step = jaxferry.train_step(loss_fn, optax.sgd(1.0), compute_dtype=jnp.bfloat16, transport=transport)
    params = {"table": {"w": np.zeros((4096, 4), np.float32)}, "head": {"w": np.eye(4, dtype=np.float32)}}
    state, _ = step(step.init(params), tokens)
    # Added one by one in bfloat16, ones come no further than 256, and 257 is no bfloat16.
    expected = np.where(np.arange(4096)[:, None] == 3, -tokens.size, 0) * np.ones(4)
    np.testing.assert_array_equal(state.params["table"]["w"], expected)
