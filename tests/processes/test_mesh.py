"""Several devices that share each batch: `train_step(mesh=...)`.

Here they are two CPU devices (`conftest.py`); more of them are those of another process.
"""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxferry
from jaxferry.costs import MACHINES, estimate_profile, partition_costs
from jaxferry.engine import Programs, device_updates, lower_traced
from jaxferry.errors import InputError
from jaxferry.modes import GradientPlace, Mode, UpdatePlace
from jaxferry.partition import partition, shared, trace
from jaxferry.step import LayerPlan, Plan, ProgramKind, Source, Target
from jaxferry.transport import make_placement
from native.compile_for_gpu import compile_lowered
from native.compile_for_gpu import text as compiled_text
from python_runs import run_python
from slowly import slow
from watched import SCALARS_BYTES, most_on_one_device

pytestmark = pytest.mark.cpu_device  # one accelerator is no mesh

NUM_STEPS, BATCH, WIDTH, WORDS = 5, 4, 6, 7
NAMES = ("table", "first", "second", "head")  # of sizes that two devices do not divide


def params():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"table": (WORDS, WIDTH), "first": (WIDTH, 9), "second": (9, WIDTH), "head": (WIDTH, WORDS)}
    drawn = {name: 0.3 * jax.random.normal(key, shapes[name]) for name, key in zip(NAMES, keys, strict=True)}
    return {name: {"w": w, **({} if name == "table" else {"b": jnp.zeros(w.shape[-1])})} for name, w in drawn.items()}


def loss_fn(params, batch, key):
    """Dropout, a norm over the whole batch as in BatchNorm, and auxiliary results."""
    x = params["table"]["w"][batch["x"]]
    x = jnp.tanh(x @ params["first"]["w"] + params["first"]["b"])
    x = x * jax.random.bernoulli(key, 0.8, x.shape)
    x = x @ params["second"]["w"]
    mean = x.mean((0, 1))
    x = (x - mean) * jax.lax.rsqrt(x.var((0, 1)) + 1e-3) + params["second"]["b"]
    logits = jax.nn.log_softmax(x @ params["head"]["w"] + params["head"]["b"])
    aux = {"mean": mean, "logits": logits, "num_even": (batch["x"] % 2 == 0).sum()}
    return -jnp.take_along_axis(logits, batch["y"][..., None], -1).mean(), aux


def batches(num=NUM_STEPS, size=BATCH):
    generator = np.random.default_rng(0)
    return [
        ({name: generator.integers(0, WORDS, (size, 3)) for name in ("x", "y")}, jax.random.key(number))
        for number in range(num)
    ]


def loss_alone(params, batch, key):
    return loss_fn(params, batch, key)[0]


def mesh(axis_type=AxisType.Auto, num=2):
    return jax.make_mesh((num,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:num])


def train(step, state, batches):
    metrics = []
    for batch in batches:
        state, found = step(state, *batch)
        metrics.append(jax.device_get(found))
    return state, metrics


def trained(given=None, **options):
    step = jaxferry.train_step(loss_fn, options.pop("optimizer", optax.adamw(1e-2)), **options)
    state, metrics = train(step, step.init(params()), given or batches())
    return step, state, metrics


def assert_same(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


@pytest.fixture(scope="module")
def alone():
    """A step on one device, its state and metrics."""
    return trained(transport="device_put")


MODES = (Mode.RELOAD, Mode.RESIDENT, Mode.GFGB, Mode.GFGB)
IN_HOST_MEMORY = (Mode.DFGB, Mode.DHA, Mode.GFGB, Mode.DHA)


def plan(modes=MODES, **changes):
    layers = (LayerPlan(name, mode, **changes) for name, mode in zip(NAMES, modes, strict=True))
    return Plan("any", 1.0, tuple(layers))


ON_DEVICES = plan([Mode.RESIDENT] * 4, update=UpdatePlace.RESIDENT)
JOINT = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))


@pytest.mark.parametrize(
    "options",
    [
        {"plan": plan(), "remat": "full", "offload_activations": True, "record_steps": 2},
        {"plan": plan(IN_HOST_MEMORY, gradient=GradientPlace.HOST), "accumulate": 2},
        *slow({"policy": "auto", "profile": "estimate", "remat": "auto"}),
        pytest.param({"optimizer": optax.adafactor(1e-2)}, marks=pytest.mark.slow, id="adafactor"),
        *slow({"plan": ON_DEVICES, "optimizer": optax.adafactor(1e-2)}, {"plan": ON_DEVICES, "optimizer": JOINT}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:the optimizer looks at all parameters at once")
def test_losses_results_and_parameters_are_those_of_one_device(options):
    given = batches(4)
    _, expected, expected_metrics = trained(given, transport="device_put", **options)
    step, state, metrics = trained(given, mesh=mesh(), **options)
    assert_same([m["loss"] for m in metrics], [m["loss"] for m in expected_metrics])
    assert_same([m["aux"] for m in metrics], [m["aux"] for m in expected_metrics])
    assert_same(state.params, expected.params)
    assert (step.recorded() is None) == ("record_steps" not in options)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_batches_and_parameters_may_be_global_arrays_under_a_mesh_that_is_set(alone, axis_type):
    _, _, expected = alone
    own = mesh(axis_type)
    spread = [jax.device_put(batch, NamedSharding(own, PartitionSpec("data"))) for batch, _ in batches()]
    given = [(batch, key) for batch, (_, key) in zip(spread, batches(), strict=True)]
    with jax.set_mesh(own):
        step = jaxferry.train_step(loss_fn, optax.adamw(1e-2), mesh=own)
        whole = jax.device_put(params(), NamedSharding(own, PartitionSpec()))
        state, metrics = train(step, step.init(whole), given)
        assert_same([m["loss"] for m in metrics], [m["loss"] for m in expected])
        step.evaluate(state, *given[0])
        state.params, state.opt_state = state.params, state.copy().opt_state
        train(step, state, given[:1])


def test_a_model_may_name_the_axis_of_an_automatic_mesh(alone):
    own = mesh()

    def constrained(params, batch, key):
        table = jax.lax.with_sharding_constraint(params["table"]["w"], PartitionSpec("data"))
        mean = jax.shard_map(lambda x: x, mesh=own, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"))
        x = {name: mean(value) for name, value in batch.items()}
        return loss_fn({**params, "table": {"w": table}}, x, key)

    with jax.set_mesh(own):
        step = jaxferry.train_step(constrained, optax.adamw(1e-2), mesh=own)
        _, metrics = train(step, step.init(params()), batches())
    assert_same([m["loss"] for m in metrics], [m["loss"] for m in alone[2]])


def with_shard_map(x, **options):
    own_rows = PartitionSpec("data")
    return jax.shard_map(jnp.sin, in_specs=own_rows, out_specs=own_rows, **options)(x)


NAMING = {
    "shard_map": with_shard_map,
    "shard_map with a mesh": lambda x: with_shard_map(x, mesh=mesh()),
    "shard_map in a scan": lambda x: jax.lax.scan(lambda x, _: (jax.jit(with_shard_map)(x), None), x, length=2)[0],
    "constraint": lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh(), PartitionSpec("data"))),
}


@pytest.mark.parametrize("naming", NAMING.values(), ids=NAMING)
def test_a_model_that_names_a_mesh_of_other_devices_than_the_step_s_is_an_error_that_names_the_argument(naming):
    def loss(params, x):
        return jnp.mean(naming(x @ params["a"]) @ params["b"])

    given = {name: np.eye(4, dtype=np.float32) for name in "ab"}, np.ones((8, 4), np.float32)
    with jax.set_mesh(mesh()):
        step = jaxferry.train_step(loss, optax.sgd(0.1), mesh=mesh())
        _, metrics = step(step.init(given[0]), given[1])
        assert_same(metrics["loss"], jax.jit(loss)(*given))
        step = jaxferry.train_step(loss, optax.sgd(0.1))
        state = step.init(given[0])
        for call in (step, step.evaluate, lambda state, x: step.apply(state, loss, x)):
            with pytest.raises(
                InputError, match=r"over the mesh \{'data': 2\}, and the step trains on 1 device: .* mesh="
            ):
                call(state, given[1])


def test_a_function_of_the_parameters_may_have_a_batch_that_devices_cannot_share(alone):
    step, state, _ = trained(mesh=mesh())
    assert_same(step.evaluate(state, *batches(1, 3)[0])[0], alone[0].evaluate(alone[1], *batches(1, 3)[0])[0])


def test_a_checkpoint_goes_on_with_another_number_of_devices(tmp_path):
    _, _, expected = trained(batches(6), transport="device_put")
    step, state, _ = trained(batches(6)[:3], mesh=mesh())
    step.save(state, tmp_path / "saved")
    alone = jaxferry.train_step(loss_fn, optax.adamw(1e-2), transport="device_put")
    _, metrics = train(alone, alone.restore(tmp_path / "saved", params()), batches(6)[3:])
    assert_same([m["loss"] for m in metrics], [m["loss"] for m in expected[3:]])
    alone.save(state := alone.restore(tmp_path / "saved", params()), tmp_path / "again")
    _, metrics = train(step, step.restore(tmp_path / "again"), batches(6)[3:])
    assert_same([m["loss"] for m in metrics], [m["loss"] for m in expected[3:]])
    assert state.step == 3


def test_each_device_holds_no_more_than_predicted_and_less_than_one_alone():
    """The bytes of all arrays on the first device while programs run."""

    def most(**options):
        step = jaxferry.train_step(loss_alone, optax.sgd(0.1), plan=plan((Mode.RELOAD,) * 4), **options)
        state, given = step.init(params()), batches(2, 64)
        train(step, state, given)
        held = most_on_one_device(lambda: train(step, state, given))
        return held, step.prepare(*given[0]).peak.array_bytes

    (alone, predicted_alone), (found, predicted) = most(transport="device_put"), most(mesh=mesh())
    assert 0 < found <= predicted + SCALARS_BYTES
    assert found < 0.75 * alone and predicted < 0.75 * predicted_alone


def test_arrays_that_take_the_place_of_freed_ones_are_counted():
    """As garbage of earlier tests is freed: an identity does not tell an array that is gone from a new one."""
    old = [jnp.zeros(32) + number for number in range(500)]
    given, made = jnp.zeros(32), []
    program = jax.jit(lambda x: x + 1).lower(given).compile()

    def replaced():
        while old:
            old.pop()
            made.append(program(given))

    assert most_on_one_device(replaced) == 500 * 128


def test_only_programs_of_the_gpu_lane_exchange_anything():
    """Shares leave and arrive without a word between devices, in whatever order tasks become ready."""
    step, _, _ = trained(mesh=mesh())
    prepared = step.prepare(*batches(1)[0])
    resources = prepared.runner.runnable.resources
    transport, groups = resources.transport, prepared.partition.layers
    own = make_placement(mesh=mesh())
    for number, group in enumerate(groups):
        layer = shared(group.trained, 2)
        sizes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in layer.leaves]
        joined = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own.shares_of(layer))
            for x in jax.eval_shape(layer.join_small, sizes)
        ]
        assert not collectives(transport.program("pack", number).lower(joined).compile().as_text())
        vectors = [jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=own.shares_of(layer)) for v in layer.vectors]
        text = transport.program("unpack", number).lower(vectors).compile().as_text()
        assert set(collectives(text)) == {"all-gather"}


def collectives(text):
    """The collectives of a compiled program, each with its results."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf" = (.*) ({kinds})(?:-start)?\(", text)
    return {kind: results for results, kind in found}


def test_gpus_add_up_gradients_where_their_shares_are():
    """As XLA compiles backwards for two H200: each receives its share of the sums."""
    step = jaxferry.train_step(loss_alone, optax.sgd(0.1), mesh=mesh())
    step.declare(params())
    program = step.prepare(*batches(1)[0]).program
    programs = Programs(program.partition, program.derivatives, make_placement(mesh=mesh()))
    summed = [x for x in program.programs if x.key.kind is not ProgramKind.FORWARD]
    for instruction in summed[:-1]:  # the table's gradient is rows, of which each has all
        found = compile_lowered(lower_traced(programs.traced(instruction.key), "cuda"), 2)
        assert "reduce-scatter" in collectives(compiled_text(found)), instruction.task.name
    assert len(summed) == len(NAMES)
    written = dataclasses.replace(summed[0].key, reads=(Source.HOST,), writes=(Target.HOST,))
    text = compiled_text(compile_lowered(lower_traced(programs.traced(written), "cuda"), 2))
    assert "reduce-scatter" in collectives(text)
    read, stored = (re.findall(rf"copy-start{part}", text) for part in (r"\(%param", r"\(%bitcast"))
    assert len(read) == len(stored) == 1, "a share arrives, and a share leaves"


def test_gpus_update_their_shares_and_gather_the_compute_copy_alone(monkeypatch):
    """As XLA compiles updates on devices for two H200."""
    traced = []
    lowered = device_updates.lower_traced
    monkeypatch.setattr(device_updates, "lower_traced", lambda each: traced.append(each) or lowered(each))
    options = {"plan": ON_DEVICES, "compute_dtype": jnp.bfloat16}
    step = jaxferry.train_step(loss_alone, optax.adamw(1e-2), mesh=mesh(), **options)
    step.declare(params())
    step.prepare(*batches(1)[0])
    updates = [each for each in traced if each.fun_name == "update"]
    assert len(updates) == len(NAMES)
    for each in updates:
        text = compiled_text(compile_lowered(lower_traced(each, "cuda"), 2))
        found = collectives(text)
        assert set(found) == {"all-gather"}
        assert "bf16" in found["all-gather"] and "f32" not in found["all-gather"]


def test_updates_on_devices_hold_a_share_of_the_state_on_each():
    step, state, _ = trained(mesh=mesh(), plan=ON_DEVICES)
    assert state.host.on_device == frozenset(range(4))
    shares = [x for unit in state.host.units for x in (*unit.masters, *unit.state) if x.ndim]
    assert shares and all(x.addressable_shards[0].data.size == x.size // 2 for x in shares)
    whole = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
    filled_up = 4 * 3 * len(jax.tree.leaves(state.params))
    assert whole / 2 <= state.host.device_bytes <= whole / 2 + filled_up + 4 * len(NAMES)
    held = most_on_one_device(lambda: train(step, state, batches(2)))
    assert held <= step.prepare(*batches(1)[0]).peak.array_bytes + SCALARS_BYTES


def test_auto_updates_on_several_devices_as_far_as_the_memory_goes():
    given = batches(3)
    parts = partition(loss_alone, params(), given[0], num_devices=2)
    slow_host = dataclasses.replace(MACHINES["h100-pcie5"], host_bytes_per_s=1e6)
    profile = estimate_profile(partition_costs(parts), slow_host, num_devices=2)
    assert all(layer.update_gpu_s and layer.state_up_s is None for layer in profile.layers)
    _, expected, _ = trained(given, mesh=mesh())
    options = {"mesh": mesh(), "policy": "auto", "profile": profile}
    step, state, _ = trained(given, **options)
    assert all(step.prepare(*given[0]).plan.updates_on_device)
    assert_same(state.params, expected.params)
    budget = step.prepare(*given[0]).peak.total - 1
    step, state, _ = trained(given, memory_budget=budget, **options)
    prepared = step.prepare(*given[0])
    assert {True, False} == {*prepared.plan.updates_on_device} and not any(prepared.plan.updates_streamed)
    assert prepared.peak.total <= budget
    assert_same(state.params, expected.params)


def test_a_state_moves_between_host_and_devices(tmp_path):
    given = batches(6)
    _, _, expected = trained(given, mesh=mesh())
    step, state, metrics = trained(given[:2], mesh=mesh(), plan=ON_DEVICES)
    step.save(state, tmp_path / "saved")
    elsewhere = jaxferry.train_step(loss_fn, optax.adamw(1e-2), mesh=mesh(), plan=plan())
    other, more = train(elsewhere, elsewhere.restore(tmp_path / "saved", params()), given[2:4])
    elsewhere.save(other, tmp_path / "again")
    _, last = train(step, step.restore(tmp_path / "again", params()), given[4:])
    assert_same([m["loss"] for m in (*metrics, *more, *last)], [m["loss"] for m in expected])
    state.opt_state = state.opt_state
    state.params = state.params
    _, again = train(step, state, given[2:4])
    assert_same([m["loss"] for m in again], [m["loss"] for m in expected[2:4]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda: {"mesh": "all"}, "mesh must be a jax.sharding.Mesh"),
        (lambda: {"mesh": jax.make_mesh((2, 1), ("data", "model"))}, "have one axis, 'data', got 'data', 'model'"),
        (lambda: {"mesh": Mesh(np.array([]), ("data",))}, "mesh must have devices, each once, got none"),
        (lambda: {"mesh": Mesh(np.array(jax.devices()[:1] * 2), ("data",))}, "mesh must have devices, each once, got"),
        (lambda: {"mesh": mesh(AxisType.Manual)}, "must be automatic or explicit"),
        (lambda: {"mesh": mesh(), "device": jax.devices()[0]}, "device and mesh are given both"),
        (lambda: {"mesh": mesh(), "transport": "ferry"}, "moves the layers of one device"),
    ],
)
def test_other_meshes_are_errors(options, message):
    with pytest.raises(InputError, match=message):
        jaxferry.train_step(loss_fn, optax.sgd(0.1), **options())


def test_batches_that_the_devices_cannot_share_and_plans_that_stream_updates_are_errors():
    streamed = plan([Mode.GFGB] * 4, update=UpdatePlace.GPU)
    for options, size, message in (({}, 3, "a multiple of 2 devices: got 3"), ({"plan": streamed}, 4, "do not")):
        step = jaxferry.train_step(loss_fn, optax.sgd(0.1), mesh=mesh(), **options)
        step.declare(params())
        with pytest.raises(InputError, match=message):
            step.prepare(*batches(1, size)[0])


def test_a_mesh_of_one_device_is_that_device(alone):
    _, _, metrics = trained(mesh=mesh(num=1), transport="device_put")
    assert [m["loss"] for m in metrics] == [m["loss"] for m in alone[2]]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("place", [UpdatePlace.HOST, UpdatePlace.RESIDENT])
@pytest.mark.parametrize("num_devices", [2, 8])
def test_any_model_trains_on_several_devices_as_plain_optax_does(num_devices, place):
    flags = f"--xla_force_host_platform_device_count={num_devices} --xla_backend_optimization_level=0"
    script = Path(__file__).parents[1] / "support" / "mesh_losses.py"
    options = {"timeout_s": 3600, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    found = json.loads(run_python(script, num_devices, place.value, **options).splitlines()[-1])
    assert len(found) > 25
    for name, by_number in found.items():
        plain = by_number.pop("plain")
        assert by_number
        for number, losses in by_number.items():
            np.testing.assert_allclose(losses, plain, rtol=1e-5, err_msg=f"{name} on {number} devices")


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        ({"x": (4, 8, 8, 3), "y": (4,)}, 4),
        ({"x": (4, 16), "y": (4,), "means": [(8,)] * 3, "variances": [(8,)] * 3}, 4),
        ({"x": (6, 9), "mask": (9, 9), "y": (6, 9)}, 6),
        ({"key": (2,), "x": (16, 9)}, 16),
        ({"x": (8,)}, 8),
        ({"scale": ()}, 0),
    ],
)
def test_the_axis_that_is_split_is_that_of_most_arguments_that_are_not_state(arguments, rows):
    """Never an axis of an image: XLA computes wrong gradients of convolutions split so."""

    def struct(shape):
        return jax.ShapeDtypeStruct(shape, np.uint32 if shape == (2,) else np.float32)

    def loss(params, batch):
        return params["scale"].sum() + sum(x.sum() for x in jax.tree.leaves(batch))

    batch = jax.tree.map(struct, arguments, is_leaf=lambda x: isinstance(x, tuple))
    params = {"scale": struct((8,)), "kernel": struct((3, 3, 8, 8))}
    assert trace(loss, params, (batch,), {}).num_rows == rows


WEIGHTS = {
    "kernels": lambda x, w: jnp.tanh(jnp.tanh(x @ w["in"]) @ w["one"] @ w["two"]),
    "kernels in 16 bits": lambda x, w: jnp.tanh(x @ w["in"]).astype(jnp.bfloat16) @ w["one"].astype(jnp.bfloat16),
    "a table": lambda x, w: w["one"][x[:, 0].astype(int)] + w["two"][x[:, 1].astype(int)],
    "scales": lambda x, w: jnp.tanh(x @ w["in"]) * w["mean"] + w["bias"],
    "statistics": lambda x, w: ((x @ w["in"]) - w["mean"].reshape(1, -1)) / w["bias"].reshape(1, -1),
    "convolutions": lambda x, w: jax.lax.conv_general_dilated(
        x[:, :, None], w["conv"], (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
    ),
}


@pytest.mark.parametrize("used", WEIGHTS)
def test_arguments_that_are_used_as_frozen_parameters_are_do_not_count(used):
    shape = jax.ShapeDtypeStruct
    weights = {"in": (16, 64), "one": (64, 64), "two": (64, 64), "mean": (64,), "bias": (64,), "conv": (64, 1, 2)}
    batch = {"x": shape((6, 16), np.float32), "w": {name: shape(own, np.float32) for name, own in weights.items()}}

    def loss(params, batch):
        return (WEIGHTS[used](batch["x"], batch["w"]) * params["scale"]).sum()

    graph = trace(loss, {"scale": shape((), np.float32)}, (batch,), {})
    assert graph.num_rows == 6
