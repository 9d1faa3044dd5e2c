"""Pinned memory as the CPU sees it, and that no step copies between the clients of an accelerator and of the CPU."""

import collections
import dataclasses
import mmap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
from accelerator import emulate
from jaxferry.modes import GradientPlace, Mode
from jaxferry.native import library
from jaxferry.partition import Ownership, make_layer
from jaxferry.step import LayerPlan, Plan
from jaxferry.transport import make_placement, pinned
from planned import assert_same_bits, taken

NUM_STEPS = 6
DEPTH, WIDTH, WORDS = 3, 64, 32
LARGE = 256


@pytest.fixture
def accelerator(monkeypatch):
    return emulate(monkeypatch).placement


@pytest.fixture
def unreachable(monkeypatch):
    for module in ("transport.pinned", "transport.base", "optimizer.arrays", "optimizer.update_programs"):
        monkeypatch.setattr(f"jaxferry.{module}.can_view", lambda placement: False)


@pytest.fixture
def vectors(accelerator):
    return [jax.device_put(np.arange(size, dtype=np.float32), accelerator.pinned) for size in (1, 1000)]


def layer_of(vectors):
    """A layer of one parameter in each of its vectors."""
    avals = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in vectors]
    paths = list(map(str, range(len(vectors))))
    layer = make_layer("layer", range(len(vectors)), paths, avals, [np.dtype(np.float32)] * len(vectors))
    leaves = [dataclasses.replace(leaf, vector=i, offset=0) for i, leaf in enumerate(layer.leaves)]
    return dataclasses.replace(layer, leaves=tuple(leaves))


def test_a_view_is_the_memory_itself(accelerator, vectors):
    place = accelerator
    assert pinned.can_view(place)
    views = pinned.on_cpu(vectors, place)
    assert [view.unsafe_buffer_pointer() for view in views] == [vector.unsafe_buffer_pointer() for vector in vectors]
    assert all(view.sharding == place.host for view in views)
    assert_same_bits(views, vectors)
    pinned.as_numpy(vectors[1])[3] = 77
    assert float(vectors[1][3]) == 77


def test_a_view_keeps_its_memory_alive(accelerator, vectors):
    expected = np.array(vectors[1])
    [view] = pinned.on_cpu(vectors[1:], accelerator)
    vectors.clear()
    others = [jax.device_put(np.zeros(1000, np.float32), accelerator.pinned) for _ in range(50)]
    assert_same_bits(view, expected)
    del others


def test_empty_vectors_and_16_bits_have_views_too(accelerator):
    place = accelerator
    for array in (np.zeros((0, 3), np.float32), np.arange(7).astype(jnp.bfloat16)):
        [vector] = pinned.to_pinned([jax.device_put(array, place.host)], place)
        assert vector.sharding.memory_kind == "pinned_host"
        assert_same_bits(pinned.on_cpu([vector], place), [array])


def test_what_an_update_returns_is_written_where_the_device_reads(accelerator, vectors):
    place = accelerator
    before = [vector.unsafe_buffer_pointer() for vector in vectors]
    made = [jax.device_put(-np.arange(vector.size, dtype=np.float32), place.host) for vector in vectors]
    [new] = pinned.updated_vectors([tuple(vectors)], [tuple(made)], place, [layer_of(made)])
    assert [vector.unsafe_buffer_pointer() for vector in new] == before
    assert_same_bits(new, made)
    [same] = pinned.updated_vectors([tuple(vectors)], [()], place, [layer_of(made)])
    assert_same_bits(same, made)


def test_a_client_that_tells_no_addresses_has_no_views(monkeypatch):
    def refuses(array):
        raise NotImplementedError("unsafe_buffer_pointer")

    monkeypatch.setattr(pinned, "_bytes_of", refuses)
    assert not pinned.can_view.__wrapped__(make_placement())


def test_memory_of_two_mappings_is_reached_and_memory_that_is_not_writable_is_not():
    memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    memory.madvise(mmap.MADV_DONTFORK, 2 * mmap.PAGESIZE)  # which divides the mapping
    assert pinned.is_mapped(address + 1, 4 * mmap.PAGESIZE - 1)
    constant = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ)
    assert not pinned.is_mapped(np.frombuffer(constant, np.uint8).ctypes.data, 1)


def test_without_views_there_are_copies(accelerator, unreachable, vectors):
    place = accelerator
    made = [jax.device_put(-np.arange(vector.size, dtype=np.float32), place.host) for vector in vectors]
    [new] = pinned.updated_vectors([tuple(vectors)], [tuple(made)], place, [layer_of(made)])
    assert all(vector.sharding.memory_kind == "pinned_host" for vector in new)
    assert_same_bits(new, made)
    [partly] = pinned.updated_vectors([tuple(vectors)], [tuple(made[:1])], place, [layer_of(made)])
    assert_same_bits(partly, [made[0], *vectors[1:]])
    assert_same_bits(pinned.on_cpu(vectors, place), vectors)


def loss_fn(params, tokens):
    x = params["table"]["w"][tokens]
    for i in range(DEPTH):
        x = jnp.tanh(x @ params[f"l{i}"]["w"] + params[f"l{i}"]["b"])
    return jnp.mean(x**2)


def parameters():
    generator = np.random.default_rng(0)
    params = {"table": {"w": generator.normal(size=(WORDS, WIDTH)).astype(np.float32)}}
    for i in range(DEPTH):
        weights = generator.normal(size=(WIDTH, WIDTH)).astype(np.float32) * 0.1
        params[f"l{i}"] = {"w": weights, "b": np.zeros(WIDTH, np.float32)}
    return params


TOKENS = np.arange(8) % WORDS
OPTIMIZERS = {"fused": jaxferry.adamw, "optax": optax.adamw}
PLANS = {
    "loads": ([Mode.GFGB, Mode.GFGB, Mode.RELOAD, Mode.RESIDENT], [GradientPlace.DEVICE] * 4),
    "in host memory": ([Mode.GFGB, Mode.DHA, Mode.DFGB, Mode.DHA], [GradientPlace.DEVICE] + [GradientPlace.HOST] * 3),
}


def train(transport, optimizer="fused", plan="loads", num_steps=NUM_STEPS, **options):
    modes, places = PLANS[plan]
    names = ["table", *(f"l{i}" for i in range(DEPTH))]
    layers = [LayerPlan(*of_layer) for of_layer in zip(names, modes, places, strict=True)]
    step = jaxferry.train_step(
        loss_fn,
        OPTIMIZERS[optimizer](1e-2),
        plan=Plan("any", 1.0, tuple(layers)),
        transport=transport,
        compute_dtype=jnp.bfloat16,
        **options,
    )
    state, metrics = step.init(parameters()), []
    for _ in range(num_steps):
        state, made = step(state, TOKENS)
        metrics.append((float(made["loss"]), float(made.get("grad_norm", 0))))
    state.block_until_ready()
    return step, state, metrics


@pytest.fixture
def crossings(monkeypatch):
    """Counts the bytes of JAX arrays that `jax.device_put` copies between the clients of an accelerator and a CPU."""
    put, counted = jax.device_put, collections.Counter()

    def kind(where):
        return getattr(where, "memory_kind", None)

    def counting(value, device=None, **options):
        for leaf in jax.tree.leaves(value):
            if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.nbytes >= LARGE:
                ways = {kind(leaf.sharding), kind(device)}
                # The host's own memory is on one side only.
                if "unpinned_host" in ways and len(ways) == 2:
                    counted[kind(leaf.sharding), kind(device)] += leaf.nbytes
        return put(value, device, **options)

    monkeypatch.setattr(jax, "device_put", counting)
    return counted


def copied_bytes(placement, monkeypatch):
    """The bytes of each copy into pinned memory from now on."""
    assert pinned.can_view(placement)
    copied, write = [], Ownership.write_shares

    def counted(own, layer, vectors, rows):
        copied.extend(vector.nbytes for vector in vectors)
        write(own, layer, vectors, rows)

    monkeypatch.setattr(Ownership, "write_shares", counted)
    return copied


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("transport", ["ferry", "device_put"])
def test_a_fused_adamw_moves_26_bytes_a_parameter_optax_copies_once_more_and_nothing_crosses_between_the_clients(
    accelerator, crossings, monkeypatch, transport, optimizer, plan
):
    """The gradient once, of 2 bytes; compute copy, what it lacks of the master, and two moments of 4 bytes twice.

    Biases are too small to be split: their masters, of 4 bytes, are written beside the compute copy, which stays where
    it is.
    """
    native, copied = library("cpu"), copied_bytes(accelerator, monkeypatch)
    before = native.host_step_bytes
    step, state, _ = train(transport, optimizer, plan)
    sizes = [leaf.size for leaf in jax.tree.leaves(state.params)]
    by_library = NUM_STEPS * sum(26.25 * n if n > WIDTH else 28 * n for n in sizes)
    assert native.host_step_bytes - before == (by_library if optimizer == "fused" else 0)
    assert sum(copied) == (0 if optimizer == "fused" else NUM_STEPS * 2 * sum(sizes))
    places = [[v.unsafe_buffer_pointer() for v in of_group] for of_group in state.host.vectors]
    state = taken(step, state, TOKENS, 3)
    state.block_until_ready()
    assert [[v.unsafe_buffer_pointer() for v in of_group] for of_group in state.host.vectors] == places
    assert not crossings


def test_copies_between_the_clients_are_counted(accelerator, unreachable, crossings):
    train("ferry")
    # The gradients of the layers that are loaded; compute copies pass through NumPy.
    assert crossings["pinned_host", "unpinned_host"] >= NUM_STEPS * DEPTH * 2 * WIDTH**2
