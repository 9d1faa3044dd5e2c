"""Measured profiles: which time belongs to which layer, caching, and memory left in use."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
import jaxferry.training.microbenchmarks
import models
from accelerator import emulate
from jaxferry.costs import Profile
from jaxferry.engine import Programs, derivatives_of
from jaxferry.optimizer import HostOptimizer
from jaxferry.partition import partition
from jaxferry.settings import own_settings
from jaxferry.step import ProgramKey, ProgramKind, Source, Target
from jaxferry.training import MeasurementCache, Work, measure_profile, surroundings
from jaxferry.transport import make_placement
from planned import assert_same_bits, train
from slowly import slow

BACKWARDS = ("backward_s", "backward_dha_s", "backward_go_s")
TIMES = ("load_s", "offload_s", "update_s", "forward_s", "forward_dha_s", *BACKWARDS)


class Setting:
    """A partition and everything needed to measure it."""

    def __init__(self, loss_fn, params, batch, optimizer=None, kind="ferry", compute_dtype=None):
        leaves, tree = jax.tree.flatten(params)
        self.placement, self.kind = make_placement(), kind
        self.partition = partition(loss_fn, params, (batch,), compute_dtype=compute_dtype)
        self.derivatives = derivatives_of(self.partition, "none")
        self.programs = Programs(self.partition, self.derivatives, self.placement, native=kind == "ferry")
        dtypes = {leaf.index: leaf.master_dtype for layer in self.partition.layers for leaf in layer.leaves}
        avals = [jax.ShapeDtypeStruct(leaf.shape, dtypes[index]) for index, leaf in enumerate(leaves)]
        self.optimizer = HostOptimizer(optimizer or optax.adamw(1e-3), tree, avals, self.placement, None)
        self.optimizer.check_parts(self.partition.layers)

    def measure(self, cache=None, **options):
        cache = cache or MeasurementCache(None, {})
        with own_settings():
            return measure_profile(self.work(), self.kind, cache=cache, **options)

    def work(self):
        return Work(self.partition, {}, self.programs, self.optimizer, self.placement)

    def text(self, segment, kind, reads=Source.DEVICE, writes=Target.DEVICE):
        program = self.partition.segments[segment].program
        with own_settings():
            return "program\n" + self.programs.lowered(ProgramKey(kind, program, (reads,), (writes,))).as_text()


class Table(MeasurementCache):
    """A cache that answers every content, with the same seconds unless told otherwise."""

    def __init__(self, seconds=None):
        super().__init__(None, {})
        self.seconds = dict(seconds or {})

    def get(self, content):
        return self.seconds.setdefault(content, 1.0 + len(self.seconds) / 64)


def stack(params, x):
    for name in sorted(params):
        for _ in range(4 if name.startswith("slow") else 1):
            x = jnp.tanh(x @ params[name]["kernel"])
    return jnp.mean(x**2)


def tied(params, ids):
    x = jnp.tanh(params["table"]["rows"][ids])
    for name in ("a", "b"):
        x = jnp.tanh(x @ params[name]["kernel"])
    return jnp.mean((x @ params["table"]["rows"].T) ** 2)


SHAPES = {"table": {"rows": (12, 8)}, "a": {"kernel": (8, 8)}, "b": {"kernel": (8, 8)}}
TIED = jax.tree.map(lambda shape: np.full(shape, 0.5, np.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple))
IDS = np.arange(8)


def stack_of(names, width=128, rows=64, **options):
    kernel = jax.ShapeDtypeStruct((width, width), jnp.float32)
    batch = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    return Setting(stack, {name: {"kernel": kernel} for name in names}, batch, **options)


@pytest.fixture
def count(monkeypatch):
    """What was timed: one entry for each median."""
    timed = []
    module = jaxferry.training.microbenchmarks

    def counting(run, *args, original=module.median_s, **kwargs):
        timed.append(run)
        return original(run, *args, **kwargs)

    monkeypatch.setattr(module, "median_s", counting)
    return timed


@pytest.fixture(scope="module")
def table():
    """A model whose last segment uses the table that the first looks up."""
    return Setting(tied, TIED, IDS)


@pytest.fixture(scope="module", params=["ferry", *slow("device_put")])
def measured(request):
    setting = stack_of(["a", "fast1", "fast2", "slow1", "slow2", "zlast"], kind=request.param)
    return setting, setting.measure(budget_s=0)


def test_a_measured_profile_is_a_profile_and_is_marked_as_measured(measured):
    _, profile = measured
    assert Profile.from_json(profile.to_json()) == profile
    assert profile.machine["measured"] is True
    assert "estimated" not in profile.machine
    assert {"device", "num_threads", "jax", "jaxlib", "jaxferry", "native"} <= set(profile.machine)
    assert all(getattr(layer, name) > 0 for layer in profile.layers[:-1] for name in TIMES)


def test_temporaries_are_those_of_the_compiled_programs(measured):
    setting, profile = measured
    *others, last = profile.layers
    assert all(layer.temporary_bytes for layer in others)
    assert last.temporary_bytes["backward"] > 0 and not any(name.startswith("forward") for name in last.temporary_bytes)
    for layer, segment in zip(profile.layers, setting.partition.segments, strict=True):
        kind = ProgramKind.LOSS if layer is last else ProgramKind.BACKWARD
        plain = ProgramKey(kind, segment.program)
        both = ProgramKey(kind, segment.program, (Source.HOST,), (Target.HOST,))
        with own_settings():
            known = setting.programs.temporary_bytes_of([plain, both])
        assert layer.temporary_bytes.get("backward", 0) == known[plain]
        assert layer.temporary_bytes.get("backward_dha_go", 0) == known[both]


def test_a_layer_that_computes_more_measures_as_slower():
    """A machine where a product takes a second and everything else no time."""

    class Products(Table):
        def get(self, content):
            return float(content.count("stablehlo.dot_general")) if content.startswith("program") else 1.0

    _, fast, slow, _ = stack_of(["a", "fast", "slow", "zlast"]).measure(Products()).layers
    assert (fast.forward_s, slow.forward_s) == (1, 4)
    assert slow.backward_s >= 4 > fast.backward_s


@pytest.mark.parametrize("forward_s", [0.5, 8.0])
def test_the_last_segment_s_forward_and_backward_add_up_to_its_one_program(table, forward_s):
    last = len(table.partition.segments) - 1
    seconds = {
        table.text(last, ProgramKind.FORWARD): forward_s,
        table.text(last, ProgramKind.FORWARD, Source.HOST): forward_s,
        table.text(last, ProgramKind.LOSS): 2.0,
        table.text(last, ProgramKind.LOSS, Source.HOST): 3.0,
        table.text(last, ProgramKind.LOSS, writes=Target.HOST): 4.0,
    }
    layer = table.measure(Table(seconds)).layers[-1]
    assert layer.forward_s + layer.backward_s == 2.0
    assert layer.forward_dha_s + layer.backward_dha_s == 3.0
    assert layer.forward_s + layer.backward_go_s == 4.0
    assert min(getattr(layer, name) for name in BACKWARDS) >= 0
    assert layer.forward_s == min(forward_s, 2.0)


def test_a_lookup_s_backward_reads_no_table_and_its_rows_are_not_written_by_it(table):
    lookup = table.measure(Table()).layers[0]
    assert lookup.backward_s == lookup.backward_dha_s == lookup.backward_go_s


def test_segments_of_one_table_share_its_update_and_its_load_but_not_their_gradients(table):
    profile = table.measure(Table())
    lookup, head = profile.layers[0], profile.layers[-1]
    assert lookup.parameters == head.parameters
    assert (lookup.update_s, lookup.load_s) == (head.update_s, head.load_s)
    assert lookup.offload_s != head.offload_s
    assert profile.group_update_s[0] == head.update_s


@pytest.mark.filterwarnings("ignore:the optimizer looks at all parameters")
def test_layers_share_the_update_of_a_joint_optimizer_by_their_bytes():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    known = Table()
    profile = Setting(tied, TIED, IDS, optimizer).measure(known)
    [update_s] = [seconds for content, seconds in known.seconds.items() if content.startswith("update")]
    assert sum(profile.group_update_s) == pytest.approx(update_s)
    first = profile.layers[0]
    for layer in profile.layers:
        assert layer.update_s * first.param_bytes == pytest.approx(first.update_s * layer.param_bytes)


def test_what_is_known_is_neither_measured_nor_compiled(tmp_path, count):
    cache = MeasurementCache(tmp_path, surroundings("cpu", "cpu"))
    first = stack_of(["a", "b"], width=8).measure(cache, budget_s=0)
    assert len(count) > 10
    count.clear()
    again = stack_of(["a", "b"], width=8)
    assert again.measure(cache) == first
    assert count == []
    assert again.programs.num_executables == 0
    again.measure(MeasurementCache(tmp_path, surroundings("cpu", "cpu") | {"jax": "another"}), budget_s=0)
    assert len(count) > 10


def test_each_program_layout_and_update_is_measured_once_however_many_layers_share_it(count):
    stack_of([f"layer{number}" for number in range(3)], width=8).measure(budget_s=0)
    few = len(count)
    stack_of([f"layer{number}" for number in range(9)], width=8).measure(budget_s=0)
    assert len(count) == 2 * few


@pytest.mark.parametrize("kind", ["ferry", *slow("device_put")])
def test_the_way_of_accelerators_measures_as_well(kind, monkeypatch):
    """It works on a CPU, with more copies."""
    emulate(monkeypatch)
    profile = Setting(tied, TIED, IDS, kind=kind).measure(budget_s=0)
    assert all(getattr(layer, name) > 0 for layer in profile.layers[:-1] for name in TIMES)
    lookup, *others, _ = profile.layers
    a_byte = sum(layer.load_s for layer in profile.layers) / sum(layer.param_bytes for layer in profile.layers)
    rows_s = min(IDS.size * lookup.param_bytes / len(TIED["table"]["rows"]) * a_byte, lookup.forward_dha_s)
    assert lookup.forward_read_s == pytest.approx(rows_s) and lookup.backward_read_s == 0
    for layer in others:
        assert layer.forward_read_s == pytest.approx(min(layer.param_bytes * a_byte, layer.forward_dha_s))
        assert layer.backward_write_s > 0


def test_keys_and_16_bit_numbers_are_made_by_shape():
    def loss_fn(params, batch):
        x, key, scale = batch
        x = jnp.tanh(x @ params["a"]["kernel"]) * jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.mean((x @ params["b"]["kernel"]) ** 2).astype(jnp.float32) * scale

    params = {name: {"kernel": jnp.ones((8, 8), jnp.bfloat16)} for name in "ab"}
    batch = (jnp.ones((4, 8), jnp.bfloat16), jax.random.key(0), 2.0)
    assert len(Setting(loss_fn, params, batch).measure(budget_s=0).layers) == 2


@contextlib.contextmanager
def cached_in(path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("JAXFERRY_CACHE_DIR", str(path))
        yield


def test_a_policy_that_plans_with_times_measures_them_once(tmp_path, monkeypatch, count, capfd):
    task = models.Task(tied, TIED, IDS)
    options = {"policy": "memferry", "reserve_factor": 1.0, "transport": "device_put"}
    with cached_in(tmp_path, monkeypatch):
        estimated = train(jaxferry.train_step(task.loss_fn, optax.adamw(1e-3), profile="estimate", **options), task, 2)
        assert count == []
        step = jaxferry.train_step(task.loss_fn, optax.adamw(1e-3), **options)
        state, losses = train(step, task, 2)
        assert len(count) > 10
        num_executables = step.prepare(task.batch).num_executables
        count.clear()
        again = jaxferry.train_step(task.loss_fn, optax.adamw(1e-3), **options)
        train(again, task, 1)
        assert again.prepare(task.batch).plan == step.prepare(task.batch).plan
        assert again.prepare(task.batch).num_executables == num_executables
        measured = again.measure(task.params, task.batch)
        assert count == []
    assert losses == estimated[1]
    assert_same_bits(state.params, estimated[0].params)
    assert measured.machine["measured"] is True
    assert capfd.readouterr().err == ""  # no terminal, no bar


@pytest.mark.parametrize("policy", [None, *slow("zero-offload", "native-offload", "l2l"), "native-overlapped"])
def test_policies_that_plan_without_times_measure_nothing_unless_told_to(tmp_path, monkeypatch, count, policy):
    setting = {"a": {"kernel": np.ones((8, 8), np.float32)}, "b": {"kernel": np.ones((8, 8), np.float32)}}
    batch = np.ones((4, 8), np.float32)
    with cached_in(tmp_path, monkeypatch):
        step = jaxferry.train_step(stack, optax.sgd(0.1), policy=policy)
        step.init(setting)
        step.prepare(batch)
        assert count == []
        if policy in (None, "l2l"):
            forced = jaxferry.train_step(stack, optax.sgd(0.1), policy=policy, profile="measure")
            forced.init(setting)
            forced.prepare(batch)
            assert len(count) > 10


@pytest.mark.parametrize("profile", [None, "measure"])
def test_lengths_up_to_half_and_twice_a_measured_one_are_not_measured(tmp_path, monkeypatch, count, profile):
    setting = {name: {"kernel": np.ones((8, 8), np.float32)} for name in ("a", "b")}
    with cached_in(tmp_path, monkeypatch):
        step = jaxferry.train_step(stack, optax.sgd(0.1), policy="exact", profile=profile)
        step.init(setting)
        measured = []
        for rows in (8, 5, 15, 12, 32, 20, 80):
            step.prepare(np.ones((rows, 8), np.float32))
            measured.append(bool(count))
            count.clear()
    assert measured == [True, False, False, False, True, False, True]
