"""Memory during a step and after many, counted from JAX's own list of live arrays."""

import gc
import itertools
import threading
import time

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
import models
from accelerator import emulate
from jaxferry.costs import Profile
from jaxferry.modes import GradientPlace, Mode, Remat
from jaxferry.planner import Peak, fit
from jaxferry.step import LayerPlan, Loads, Plan
from models import chain
from planned import plan_of, prepared, taken
from profiles import unit_layer, with_modes
from slowly import slow, slow_but, slow_cases
from steps import after_each_program, link, transport_of, with_sums_in_host_memory
from watched import becomes, device_arrays, device_bytes, live_arrays, settled, watched_steps

ADAMW = optax.adamw(1e-3)
LAYERS_OF_10 = Profile({}, tuple(unit_layer(f"l{i}") for i in range(3)))
KINDS = ("device", "pinned_host", "unpinned_host")


@pytest.fixture(scope="module")
def gpt():
    return models.mlp()


@pytest.mark.parametrize("modes", [[Mode.RELOAD], [Mode.GFGB], [Mode.RESIDENT, Mode.GFGB, Mode.RELOAD]])
def test_live_bytes_stay_under_the_predicted_peak_and_come_near_it(gpt, monkeypatch, modes):
    """Layers that are loaded twice are two at a time; those that stay for the backward are the whole model."""
    with link(store=1e7):  # slow, so that gradients stay on the device as long as they may
        watch, metrics, prepared, _ = watched_steps(gpt, monkeypatch, plan=plan_of(gpt, modes))
    assert 0.7 * prepared.peak.array_bytes <= watch.most <= prepared.peak.array_bytes <= prepared.peak.total
    assert metrics["device_param_bytes_peak"] == prepared.peak.parameters
    parts = prepared.partition
    if len(modes) == 1:
        sizes = [parts.layers[segment.group].num_bytes for segment in parts.segments]
        bound = max(a + b for a, b in itertools.pairwise(sizes))
        whole = sum(layer.num_bytes for layer in parts.layers)
        assert 0 < watch.most_parameters == prepared.peak.parameters
        assert watch.most_parameters <= bound if modes[0] is Mode.RELOAD else watch.most_parameters == whole


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (100, [Mode.DHA, Mode.GFGB, Mode.GFGB]),
        (60, [Mode.DHA, Mode.RELOAD, Mode.GFGB]),
        (50, [Mode.DHA, Mode.RELOAD, Mode.RELOAD]),
        (40, [Mode.RELOAD, Mode.RELOAD, Mode.GFGB]),
        (30, [Mode.RELOAD, Mode.RELOAD, Mode.RELOAD]),
    ],
)
def test_direct_host_access_is_given_up_where_only_its_temporaries_do_not_fit(budget, expected):
    """Fake byte counts in which a DHA segment needs more memory than one that is loaded twice."""
    cost = {Mode.DHA: 30, Mode.GFGB: 20, Mode.RELOAD: 10}

    def peak_of(plan):
        return Peak(0, 0, sum(cost[mode] for mode in plan.modes))

    plan = with_modes(LAYERS_OF_10, [Mode.DHA, Mode.GFGB, Mode.GFGB])
    assert list(fit(plan, budget, peak_of, LAYERS_OF_10).modes) == expected
    with pytest.raises(jaxferry.BudgetError) as caught:
        fit(plan, 29, peak_of, LAYERS_OF_10)
    assert caught.value.smallest_bytes == 30


def test_segments_recompute_only_where_reloading_alone_does_not_fit():
    def peak_of(plan):
        kept = sum(10 * (layer.remat is Remat.NONE) for layer in plan.layers)
        return Peak(0, 0, kept + sum(10 if mode is Mode.GFGB else 4 for mode in plan.modes))

    plan = with_modes(LAYERS_OF_10, [Mode.GFGB] * 3)
    found = {budget: fit(plan, budget, peak_of, LAYERS_OF_10, [2, 0]) for budget in (60, 54, 42, 41, 32)}
    assert {budget: sum(fitted.recomputes) for budget, fitted in found.items()} == {60: 0, 54: 0, 42: 0, 41: 1, 32: 1}
    assert found[32].recomputes == (False, False, True)
    assert [fitted.modes.count(Mode.RELOAD) for fitted in found.values()] == [0, 1, 3, 2, 3]
    with pytest.raises(jaxferry.BudgetError, match="with 2 segments that recompute") as caught:
        fit(plan, 21, peak_of, LAYERS_OF_10, [2, 0])
    assert caught.value.smallest_bytes == 22


def test_bulk_loads_end_where_a_layer_has_to_be_loaded_twice():
    plan = with_modes(LAYERS_OF_10, [Mode.GFGB] * 3, loads=Loads.BULK)
    fitted = fit(plan, 2, lambda plan: Peak(0, 0, plan.modes.count(Mode.GFGB)), LAYERS_OF_10)
    assert (fitted.modes.count(Mode.RELOAD), fitted.loads) == (1, Loads.LAYERWISE)


@pytest.mark.parametrize("seed", range(40))
def test_what_fit_loads_again_is_the_least_where_sizes_divide_each_other_and_next_to_it_elsewhere(seed):
    """Compared with every choice of RELOAD layers. Layers of some sizes free nothing, and some load nothing again."""
    random = np.random.default_rng(seed)
    divides = seed % 2 == 0
    sizes = random.choice([1, 2, 4, 8] if divides else [1, 3, 4, 7, 9], size=7).tolist()
    (reads, frees) = (dict(zip(set(sizes), random.random(5) < 0.8, strict=False)) for _ in range(2))
    layers = [unit_layer(f"l{i}", param_bytes=n, backward_reads=bool(reads[n])) for i, n in enumerate(sizes)]
    profile = Profile({}, tuple(layers))

    def needed(modes):
        return sum(n for mode, n in zip(modes, sizes, strict=True) if mode is Mode.GFGB or not frees[n])

    def again(modes):
        return sum(n * bool(reads[n]) for mode, n in zip(modes, sizes, strict=True) if mode is Mode.RELOAD)

    plan, every = with_modes(profile, [Mode.GFGB] * 7), [*itertools.product((Mode.GFGB, Mode.RELOAD), repeat=7)]
    for budget in range(min(map(needed, every)), sum(sizes) + 1):
        counted = list[Plan]()

        def peak_of(plan, counted=counted):
            counted.append(plan)
            return Peak(0, 0, needed(plan.modes))

        found = again(fit(plan, budget, peak_of, profile).modes)
        least = min(again(modes) for modes in every if needed(modes) <= budget)
        assert found == least if divides else found < least + max(sizes)
        assert len(counted) <= 3 + 4 * len(set(sizes) | {0})


def test_the_peaks_that_fit_counts_grow_with_the_logarithm_of_the_layers():
    profile, counted = Profile({}, tuple(unit_layer(f"l{i}") for i in range(1000))), list[Plan]()

    def peak_of(plan):
        counted.append(plan)
        return Peak(0, 0, plan.modes.count(Mode.GFGB) + sum(layer.remat is Remat.NONE for layer in plan.layers))

    plan = with_modes(profile, [Mode.GFGB] * 1000)
    fitted = fit(plan, 700, peak_of, profile, range(1000))
    assert (sum(fitted.recomputes), fitted.modes.count(Mode.GFGB)) == (300, 0) and len(counted) < 40
    assert fit(plan, 1700, peak_of, profile, range(1000)).modes == (Mode.RELOAD,) * 300 + (Mode.GFGB,) * 700


LAYERS = {
    f"l{i}": {"w": np.random.default_rng(i).normal(0, 0.1, (64, 64)).astype(np.float32), "b": np.zeros(64, np.float32)}
    for i in range(6)
}


ROWS = np.ones((4, 64), np.float32)


deep_loss = chain()


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize(("accumulate", "num_frozen"), [(1, 3), (2, 0), *slow_cases((1, 0), (2, 3))])
def test_steps_in_a_row_need_no_more_memory_than_one(accumulate, num_frozen, monkeypatch):
    plan = Plan("any", 1.0, tuple(LayerPlan(name, Mode.RELOAD, GradientPlace.DEVICE) for name in LAYERS))
    trainable = {name: index >= num_frozen for index, name in enumerate(LAYERS)}
    options = {"plan": plan, "transport": "ferry", "trainable": trainable}
    held = prepared(models.Task(deep_loss, LAYERS, ROWS), ADAMW, **options).peak.array_bytes
    step = jaxferry.train_step(deep_loss, ADAMW, accumulate=accumulate, **options)
    state = step.init(LAYERS)
    with_sums_in_host_memory(step.prepare(ROWS))
    # Arrays of earlier tests may be freed meanwhile.
    before, most = device_arrays(), []
    known = set(map(id, before))

    def count(number):
        most.append(device_bytes(known))

    after_each_program(monkeypatch, count)
    with link(store=1e6):
        state = taken(step, state, ROWS, 6)
    state.block_until_ready()
    # Losses and norms of the previous step are a few bytes more.
    assert 0.7 * held < max(most) <= held + 64


@pytest.mark.usefixtures("accelerator")
def test_dropped_sums_leave_nothing_behind():
    step = jaxferry.train_step(deep_loss, ADAMW, transport="ferry", accumulate=2)
    state = step.init(LAYERS)
    with_sums_in_host_memory(step.prepare(ROWS))
    transport, counts = transport_of(step, ROWS), []
    for _ in range(8):
        with pytest.raises(jaxferry.NonFiniteError):  # in the first of two micro-batches
            step(state, np.full_like(ROWS, np.nan))
        counts.append(len(transport.in_flight))
    assert max(counts) <= 4 * len(LAYERS)


def tied(first):
    """A table that is read densely before its lookup, or behind it."""

    def loss_fn(params, batch):
        tokens, x = batch
        dense, rows = jnp.tanh(x @ params["table"]), params["table"][tokens]
        h = jnp.tanh((dense if first else rows) @ params["w"]) + (rows if first else dense)
        return jnp.mean(h**2)

    params = {"table": np.full((64, 64), 0.01, np.float32), "w": np.full((64, 64), 0.02, np.float32)}
    return models.Task(loss_fn, params, (np.arange(4, dtype=np.int32), ROWS))


PLACES = [GradientPlace.DEVICE, GradientPlace.HOST, GradientPlace.HOST]
HALF = {"compute_dtype": jnp.bfloat16}
FLAT = {
    "loads": ("cpu", models.mlp, {}),
    "saved values": ("cpu", models.mlp, {"remat": "full", "offload_activations": True}),
    "in host memory": ("emulated", lambda: models.mlp(depth=2), {"modes": [Mode.GFGB, Mode.DHA, Mode.DFGB], **HALF}),
    "a table read densely behind its lookup": ("emulated", lambda: tied(False), {}),
    "a table read densely before its lookup": ("emulated", lambda: tied(True), {}),
    "sums in host memory": (
        *("emulated", lambda: models.mlp(depth=2)),
        {"accumulate": 2, "clip_norm": 1.0, "record_steps": 3, "compute_dtype": jnp.float32},
    ),
}


def num_own_threads():
    """Without those that wait for copies, which start on demand, up to a limit."""
    return sum(not thread.name.startswith("jaxferry marks") for thread in threading.enumerate())


TRANSPORTS = ("ferry", "device_put")
OFTEN = zip((name for name in FLAT if "before" not in name), itertools.cycle(TRANSPORTS), strict=False)


@pytest.mark.parametrize(("name", "transport"), slow_but(OFTEN, list(itertools.product(FLAT, TRANSPORTS))))
def test_no_step_leaves_anything_behind(name, transport, monkeypatch):
    device, make, options = FLAT[name]
    if device == "emulated":
        emulate(monkeypatch)
    task, others = make(), live_arrays()  # of earlier tests, which may be freed meanwhile
    known, options = set(map(id, others)), dict(options)
    if modes := options.pop("modes", None):
        options["plan"] = plan_of(task, modes, PLACES)
    step = jaxferry.train_step(task.loss_fn, ADAMW, transport=transport, **options)
    state = step.init(task.params)

    if name == "sums in host memory":
        with_sums_in_host_memory(step.prepare(task.batch))

    def live():
        state.block_until_ready()
        own = [a for a in live_arrays() if id(a) not in known and not a.is_deleted() and a.nbytes > 8]
        return tuple(sum(a.nbytes for a in own if a.sharding.memory_kind == kind) for kind in KINDS)

    state = taken(step, state, task.batch, 4)
    before = []
    for _ in range(3):  # the next step's first loads may have ended or not
        state, _ = step(state, task.batch)
        before.append(settled(live))
    most = [max(sizes) for sizes in zip(*before, strict=True)]
    num_threads = num_own_threads()
    state = taken(step, state, task.batch, 8)
    assert num_own_threads() <= num_threads  # threads of other tests may end meanwhile
    assert becomes(lambda: all(now <= known for now, known in zip(live(), most, strict=True)))
    assert {u.sharding.memory_kind for unit in state.host.units for u in (*unit.masters, *unit.state)} == {KINDS[2]}
    assert {v.sharding.memory_kind for vectors in state.host.vectors for v in vectors} == {KINDS[1]}


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("transport", ["ferry", *slow("device_put")])
def test_rows_of_many_micro_batches_are_added_as_they_come(transport):
    def loss_fn(params, tokens):
        return jnp.mean(jnp.tanh(params["table"][tokens] @ params["w"]) ** 2)

    params = {"table": np.full((64, 8), 0.1, np.float32), "w": np.full((8, 8), 0.2, np.float32)}
    step = jaxferry.train_step(loss_fn, ADAMW, transport=transport, accumulate=1000)
    state, counts, tokens = step.init(params), [], np.arange(4, dtype=np.int32)
    for _ in range(24):
        state, _ = step(state, tokens)
        time.sleep(0.01)
        gc.collect()
        counts.append(len(live_arrays()))
    assert min(counts[-4:]) <= max(counts[4:8]) + 8
