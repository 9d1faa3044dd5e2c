"""Masters that are stored as their bf16 compute copy and what it lacks: as arrays, in training, in host memory."""

import contextlib
import itertools
import os
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jaxferry
import scanned
from jaxferry.modes import GradientPlace, Mode
from jaxferry.native import library, rest_size
from jaxferry.optimizer import SplitMaster, host_memory, split_masters
from jaxferry.partition import Ownership
from jaxferry.step import Arrival, LayerPlan, Plan
from jaxferry.transport import Transport
from models import chain
from pairwise import pairwise
from planned import assert_same_bits, take_steps

WIDTH, DEPTH = 63, 4  # two devices have shares of 1,985 and 1,984 elements of a weight
OPTIMIZERS = {
    "adamw": jaxferry.adamw(1e-2),
    "lion": jaxferry.lion(1e-2),
    "sgd": jaxferry.sgd(1e-2),
    "copy": jaxferry.adamw(1e-2, masters="bfloat16"),
    "copy int8": jaxferry.adamw(1e-2, moments="int8", masters="bfloat16"),
    "optax": optax.adamw(1e-2),
}
FORMS = pytest.mark.parametrize("form", ["adamw", "copy", "optax"])
DEVICES = pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.cpu_device)])
BATCH = np.ones((4, WIDTH), np.float32)
SHAPES = [(), (1,), (17,), (3, 5), (1, 40), (2, 1, 33), (4, 0, 3), (5, 4, 3, 2)]


def split_master(shape, offset=3):
    size = int(np.prod(shape))
    master = np.random.default_rng(size).normal(size=size).astype(np.float32)
    copy = np.zeros(offset + size + 2, ml_dtypes.bfloat16)
    copy[offset : offset + size] = master.astype(copy.dtype)
    own = copy[offset : offset + size].view(np.uint16)
    made = SplitMaster(np.zeros(rest_size(size), np.uint16), [own], shape)
    assert library("cpu").split(master, own, made.rest)
    return made, master.reshape(shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numpy_reads_the_array(shape):
    split, master = split_master(shape)
    assert (split.shape, split.dtype, split.ndim, split.size, split.nbytes) == (
        *(master.shape, master.dtype, master.ndim, master.size, master.nbytes),
    )
    assert_same_bits(np.asarray(split), master)
    assert_same_bits(np.asarray(split, np.float16), master.astype(np.float16))


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_any_index_of_numpy_reads_the_same_elements(shape):
    split, master = split_master(shape)
    cuts = [slice(None), slice(0, 1), slice(1, 3), slice(-2, None), slice(3, 1), slice(None, None, 2), 0, -1, ...]
    indices = [*cuts, *itertools.product(cuts[:7], repeat=2)] if len(shape) > 1 else cuts
    for index in indices:
        try:
            expected = master[index]
        except IndexError:
            continue
        assert_same_bits(np.asarray(split[index]), np.asarray(expected))


def test_rows_are_joined_without_the_others(monkeypatch):
    split, master = split_master((2, 100, 7))
    joined, read = [], SplitMaster.elements
    monkeypatch.setattr(SplitMaster, "elements", lambda own, *cut: (joined.append(cut[1]), read(own, *cut))[1])
    assert_same_bits(split[1:2, 10:13, 2:4], master[1:2, 10:13, 2:4])
    assert_same_bits(split[:1], master[:1])
    assert joined == [3 * 7, 700]


loss_fn = chain()


def parameters():
    generator = np.random.default_rng(0)
    params = {f"l{i}": {"w": generator.normal(size=(WIDTH, WIDTH)).astype(np.float32) * 0.1} for i in range(DEPTH)}
    params["l1"]["w"][:3] = np.array([0, np.float32(1 + 2**-8), -np.float32(1 + 3 * 2**-8)])[:, None]  # ties
    params["l2"]["w"][0] = np.finfo(np.float32).smallest_subnormal
    return params


def declared_in_little_memory(step, params):
    """The step, declared where whole masters do not fit."""
    with mock.patch.dict(os.environ, {host_memory.VARIABLE: "1"}):
        step.declare(params)
    return step


def step_of(optimizer, modes=(Mode.GFGB, Mode.DHA, Mode.RELOAD, Mode.GFGB), num_devices=1, **options):
    if num_devices > 1:
        options["mesh"] = jax.make_mesh((num_devices,), ("data",), devices=jax.devices()[:num_devices])
    places = [GradientPlace.DEVICE] * (DEPTH - 1) + [GradientPlace.HOST]
    layers = tuple(LayerPlan(f"l{i}", mode, place) for i, (mode, place) in enumerate(zip(modes, places, strict=True)))
    options = {"plan": Plan("any", 1.0, layers), "compute_dtype": jnp.bfloat16, **options}
    step = jaxferry.train_step(loss_fn, optimizer, **options)
    return declared_in_little_memory(step, parameters()) if optimizer is OPTIMIZERS["optax"] else step


def masters_of(state):
    return [master for unit in state.host.units for master in unit.masters]


def kinds(state):
    return set(map(type, masters_of(state)))


def stored_bytes(state):
    return sum(own.rest.nbytes if isinstance(own, SplitMaster) else own.nbytes for own in masters_of(state))


def train(step, state, num_steps):
    losses = []
    for _ in range(num_steps):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    state.block_until_ready()
    return state, losses


@pytest.fixture
def whole(monkeypatch):
    """Keeps masters whole from when it is called."""
    return lambda: monkeypatch.setattr(split_masters, "_LEAST_SIZE", 1 << 60)


OPTIONS = {"plain": {}, "clipped": {"clip_norm": 1e-3}, "sums": {"accumulate": 2}}


@pytest.mark.cpu_device
@pytest.mark.parametrize(("kind", "option", "num_devices"), pairwise(OPTIMIZERS, OPTIONS, (1, 2)))
def test_training_takes_the_same_steps_as_with_whole_masters(whole, kind, option, num_devices):
    optimizer, options = OPTIMIZERS[kind], {**OPTIONS[option], "num_devices": num_devices}
    step = step_of(optimizer, **options)
    state, losses = train(step, step.init(parameters()), 6)
    # The shares of several devices do not end where blocks of codes do.
    assert (kinds(state) == {SplitMaster}) == (num_devices == 1 or "int8" not in kind)
    whole()
    step = step_of(optimizer, **options)
    expected, expected_losses = train(step, step.init(parameters()), 6)
    assert SplitMaster not in kinds(expected)
    assert losses == expected_losses and len(set(losses)) > 2
    assert_same_bits((state.params, state.opt_state), (expected.params, expected.opt_state))


@DEVICES
@FORMS
def test_masters_stay_split_whatever_is_done_with_a_state(tmp_path, whole, form, num_devices):
    optimizer = OPTIMIZERS[form]
    step = step_of(optimizer, num_devices=num_devices)
    state, _ = train(step, step.init(parameters()), 2)
    step.save(state, tmp_path / "saved")
    params = state.params
    others = {
        "copied": state.copy(),
        "restored": step.restore(tmp_path / "saved"),
        "assigned": step.restore(tmp_path / "saved"),
    }
    others["assigned"].params = params
    # Layers of other groups: the state is arranged anew.
    other = step_of(optimizer, modes=[Mode.RESIDENT] * DEPTH, num_devices=num_devices)
    moved, _ = train(other, other.restore(tmp_path / "saved"), 1)
    results = [train(step, own, 3) for own in (state, *others.values())]
    for own, _ in results:
        assert kinds(own) == {SplitMaster}
        assert_same_bits(own.params, results[0][0].params)
    assert all(losses == results[0][1] for _, losses in results)
    whole()
    assert_same_bits(step_of(optimizer).restore(tmp_path / "saved").params, params)
    assert moved.step == 3


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [(optax.adamw(1e-2), jnp.bfloat16)]
    + [(OPTIMIZERS[form], dtype) for form in ("adamw", "copy") for dtype in (np.float32, np.float16)],
)
def test_other_masters_stay_whole(optimizer, dtype):
    step = step_of(optimizer, compute_dtype=dtype)
    state, _ = train(step, step.init(parameters()), 2)
    assert SplitMaster not in kinds(state)


@FORMS
def test_a_layer_that_is_never_read_decays_and_stays_split(whole, form):
    more = {"masters": "bfloat16"} if form == "copy" else {}
    unread = np.random.default_rng(1).normal(size=(WIDTH, WIDTH)).astype(np.float32)
    params = {**parameters(), "unread": {"w": unread}}
    states = []
    for _ in range(2):
        reads = chain([f"l{i}" for i in range(DEPTH)])
        optimizer = (optax if form == "optax" else jaxferry).adamw(1e-2, weight_decay=0.1, **more)
        step = jaxferry.train_step(reads, optimizer, compute_dtype=jnp.bfloat16)
        if form == "optax":
            declared_in_little_memory(step, params)
        states.append(train(step, step.init(params), 3)[0])
        whole()
    assert kinds(states[0]) == {SplitMaster} and SplitMaster not in kinds(states[1])
    assert_same_bits(*[(state.params, state.opt_state) for state in states])
    left = np.abs(states[0].params["unread"]["w"]).mean() / np.abs(unread).mean()
    np.testing.assert_allclose(left, (1 - 1e-3) ** 3, atol=5e-4)


@pytest.mark.cpu_device
@pytest.mark.parametrize(("kind", "joins"), [("adamw", False), ("copy int8", True)])
def test_several_devices_update_their_shares_where_they_are(monkeypatch, kind, joins):
    def addresses(state):
        return [vector.addressable_shards[0].data.unsafe_buffer_pointer() for (vector,) in state.host.vectors]

    def counted(plain):
        return lambda *args: (joined.append(plain), plain(*args))[1]

    step, joined = step_of(OPTIMIZERS[kind], num_devices=2), []
    state, _ = train(step, step.init(parameters()), 1)  # a first step waits for all gradients, and joins them
    before = addresses(state)
    for name in ("write_shares", "from_shares"):
        monkeypatch.setattr(Ownership, name, counted(getattr(Ownership, name)))
    monkeypatch.setattr(Transport, "_new_vectors", None)  # gradients have their memory
    state, _ = train(step, state, 3)
    assert bool(joined) == joins and (kinds(state) == {SplitMaster}) != joins
    assert addresses(state) == before


@pytest.mark.cpu_device
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_several_devices_update_a_table_to_whose_gradient_rows_are_added_as_one_does(dtype):
    def tied_loss(params, tokens):
        x = params["table"]["w"][tokens]
        logits = jnp.tanh(x @ params["l0"]["w"]) @ params["table"]["w"].T
        return jax.nn.logsumexp(logits.astype(jnp.float32), -1).mean() - logits[..., 0].astype(jnp.float32).mean()

    generator, losses = np.random.default_rng(0), []
    params = {name: {"w": generator.normal(size=(WIDTH, WIDTH)).astype(np.float32)} for name in ("table", "l0")}
    tokens = generator.integers(0, WIDTH, (4, 5))
    for num_devices in (1, 2):
        mesh = {"mesh": jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])} if num_devices > 1 else {}
        step = jaxferry.train_step(tied_loss, jaxferry.adamw(1e-2), compute_dtype=dtype, **mesh)
        state, own = step.init(params), []
        for _ in range(6):
            state, metrics = step(state, tokens)
            own.append(float(metrics["loss"]))
        losses.append(own)
    assert losses[0][0] - losses[0][-1] > 0.1
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5 if dtype == np.float32 else 1e-2)


@DEVICES
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS.values(), optax.adamw(1e-2)], ids=[*OPTIMIZERS, "whole"])
def test_host_memory_is_counted_as_masters_are_stored(optimizer, num_devices):
    step = step_of(optimizer, num_devices=num_devices)
    state, _ = train(step, step.init(parameters()), 1)
    model, layers = step.compiler.model, state.host.layers
    masters = masters_of(state)
    found = model.host_bytes(layers)
    assert found["master parameters"] == stored_bytes(state)
    # Where XLA compiles updates, one at a time takes the masters of a layer whole.
    is_joined = optimizer is OPTIMIZERS["optax"]
    assert found.get("masters while they are updated", 0) == (4 * WIDTH**2 if is_joined else 0)
    streamed = model.host_bytes(layers, streamed=range(DEPTH))["master parameters"]
    assert streamed == sum(own.nbytes for own in masters) == 4 * DEPTH * WIDTH**2


def test_masters_that_xla_updates_are_split_only_where_fewer_gradient_buffers_do_not_do(monkeypatch):
    def made(limit, warns, **options):
        monkeypatch.setenv(host_memory.VARIABLE, str(limit))
        step = jaxferry.train_step(loss_fn, optax.adamw(1e-2), compute_dtype=jnp.bfloat16, **options)
        with contextlib.nullcontext() if warns is None else pytest.warns(UserWarning, match=warns):
            state, losses = train(step, step.init(parameters()), 4)
        return sum(step.compiler.model.host_bytes().values()), kinds(state), losses

    whole_bytes, whole, losses = made("1GiB", None)
    few_bytes, *found = made(whole_bytes - 1, "does not hold all gradients")
    assert few_bytes < whole_bytes and found == [whole, losses]
    split_bytes, *found = made(whole_bytes - 1, "does not hold the fp32 masters", gradient_buffers="all")
    assert split_bytes < whole_bytes and found == [{SplitMaster}, losses]
    least_bytes, *found = made(few_bytes - 1, "does not hold the fp32 masters", gradient_buffers=2)
    assert least_bytes < few_bytes and found == [{SplitMaster}, losses]


@pytest.mark.filterwarnings("ignore:the optimizer looks at whole stacked parameters")
@pytest.mark.parametrize("name", ["adafactor", "adamw"])
def test_masters_that_are_updated_together_stay_whole(monkeypatch, name):
    """Only the first batch shows that layers hold parts of one parameter, of which the optimizer looks at all."""
    monkeypatch.setattr(split_masters, "_LEAST_SIZE", 1)
    monkeypatch.setattr(scanned, "VOCAB", 128)
    task, found = scanned.linen(depth=2), []
    for has_little in (False, True):
        step = jaxferry.train_step(task.loss_fn, getattr(optax, name)(1e-2), compute_dtype=jnp.bfloat16)
        if has_little:
            declared_in_little_memory(step, task.params)
        state, losses = take_steps(step, step.init(task.params), [task.batch] * 3)
        state.block_until_ready()
        kinds_of = {state.host.layers[unit.layers[0]].name: set(map(type, unit.masters)) for unit in state.host.units}
        assert step.compiler.model.host_bytes(state.host.layers)["master parameters"] == stored_bytes(state)
        found.append((losses, kinds_of))
    (losses, whole), (same_losses, split) = found
    assert losses == same_losses and SplitMaster not in set.union(*whole.values())
    are_split = {"embed", "head"} if name == "adafactor" else whole.keys()
    assert split == whole | {key: {SplitMaster} for key in are_split}


def test_an_update_that_joins_masters_is_measured_apart_from_one_of_whole_masters():
    texts = []
    for optimizer in (optax.adamw(1e-2), OPTIMIZERS["optax"]):
        step = step_of(optimizer)
        step.declare(parameters())
        model = step.compiler.model
        unit = model.optimizer.units_of(model.layers)[0]
        texts.append(model.optimizer.updates.text(unit, model.layers, [Arrival.OWN] * DEPTH))
    assert texts[0] != texts[1] and texts[0] in texts[1]


def test_a_signalling_nan_stays_what_it_is():
    params = parameters()
    params["l3"]["w"].view(np.uint32)[0, 0] = 0x7F800001
    step = step_of(jaxferry.adamw(1e-2))
    state = step.init(params)
    state.fill()
    assert kinds(state) >= {SplitMaster}
    assert int(state.params["l3"]["w"].view(np.uint32)[0, 0]) == 0x7F800001


def test_estimated_updates_take_the_bytes_of_masters_as_they_are_stored():
    """Whole, split in one pass, and made whole before XLA's update and split after it: 28, 26.25 and 42.25 bytes."""
    cases = {"whole": OPTIMIZERS["optax"], "one pass": OPTIMIZERS["adamw"], "joined": OPTIMIZERS["optax"]}
    seconds = {}
    for name, optimizer in cases.items():
        options = {"policy": "auto", "profile": "estimate", "compute_dtype": jnp.bfloat16}
        step = jaxferry.train_step(loss_fn, optimizer, **options)
        declared_in_little_memory(step, parameters()) if name == "joined" else step.declare(parameters())
        seconds[name] = sum(layer.update_s for layer in step.prepare(BATCH).profile.layers)
    assert seconds["one pass"] / seconds["whole"] == pytest.approx(26.25 / 28, rel=0.02)
    assert seconds["joined"] / seconds["whole"] == pytest.approx(42.25 / 28, rel=0.02)
