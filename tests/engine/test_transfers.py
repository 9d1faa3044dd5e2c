import gc
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src.array import ArrayImpl

import jaxferry
import models
from accelerator import emulate
from jaxferry.engine import gradients as engine_gradients
from jaxferry.errors import NativeError
from jaxferry.modes import GradientPlace, Mode
from jaxferry.native import library
from jaxferry.partition import layers_by_path, leaf_paths, make_layer
from jaxferry.step import LayerPlan, Operation, Plan
from jaxferry.transport import DevicePut, Ferry, Placement, StoredCopy, hold_together, make_placement
from models import chain
from planned import assert_same_bits, plan_of, train, trained
from steps import link, transport_of, wrap

PARAMS = {"a": {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.float32)}, "c": np.ones(2)}


@pytest.fixture(params=["cpu", "accelerator"])
def placement(request, monkeypatch):
    """The placements of a CPU and of an accelerator; the latter also works on a CPU, with more copies."""
    monkeypatch.setattr(Placement, "is_cpu", property(lambda self: request.param == "cpu"))
    return make_placement(jax.devices("cpu")[0])


ADAMW = optax.adamw(1e-3)


def test_what_is_loaded_is_what_was_packed_and_is_counted_while_held(placement):
    layers = layers_by_path(PARAMS)
    layer = next(layer for layer in layers if layer.name == "a")
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(PARAMS["a"])]
    vectors = tuple(jax.device_put(v, placement.pinned) for v in layer.pack(leaves))
    transfers = DevicePut(placement, [layer])
    assert transfers.staging_bytes == (0 if placement.is_cpu else 2 * 36)
    held = transfers.load(0, vectors)
    assert_same_bits(held.parameters(), leaves)
    assert {p.sharding.memory_kind for p in held.parameters()} == {"device"}
    assert transfers.loaded_bytes.now == transfers.loaded_bytes.peak == layer.num_bytes == 36
    transfers.drop(held)
    assert transfers.loaded_bytes.now == 0
    assert all(p.is_deleted() for p in held.parameters())


def test_gradients_are_stored_added_up_and_freed(placement):
    layer = next(layer for layer in layers_by_path(PARAMS) if layer.name == "a")
    transfers = DevicePut(placement, [layer])
    total = None
    for factor in (1.0, 10.0):
        gradients = layer.join_small([jnp.full(leaf.shape, factor) for leaf in layer.leaves])
        gradients = jax.device_put(gradients, placement.device, may_alias=False)
        total = transfers.store(0, gradients, total)
        assert all(gradient.is_deleted() for gradient in gradients)
    (vector,) = transfers.gather(0, total)
    np.testing.assert_array_equal(np.asarray(vector), np.full(9, 11.0))
    assert vector.sharding.memory_kind in ("pinned_host", "unpinned_host")


@pytest.mark.parametrize("kind", [DevicePut, Ferry])
def test_an_accelerator_makes_no_vectors_for_gradients_in_its_own_memory(kind, monkeypatch):
    """XLA for GPU would make them there and copy them: as much device memory as the layer, which nothing counts."""
    emulate(monkeypatch)
    layers = [layer for layer in layers_by_path(PARAMS) if layer.name == "a"]
    transport, made = kind(make_placement(), layers), []
    monkeypatch.setattr(transport, "program", lambda name, layer: made.append(name))
    for number, layer in enumerate(layers):
        vectors = transport.destinations(number)
        assert [(v.shape, v.dtype) for v in vectors] == [(v.shape, v.dtype) for v in layer.trained.vectors]
        assert {v.sharding.memory_kind for v in vectors} == {"pinned_host"}
        assert not any(np.asarray(v).any() for v in vectors)
    assert made == []


def _mixed():
    """A layer of two matrices above, and four vectors below the size of what is packed."""
    shapes = {
        "bias": (3,),
        "kernel": (256, 129),
        "norm": {"bias": (5,), "scale": (5,)},
        "up": {"b": (7,), "w": (300, 128)},
    }
    params = jax.tree.map(lambda shape: jnp.zeros(shape, jnp.float32), shapes, is_leaf=lambda x: isinstance(x, tuple))
    avals = jax.tree.leaves(params)
    return make_layer(
        "a",
        range(len(avals)),
        ["/".join(path) for path in leaf_paths(params)],
        avals,
        [np.dtype("float32")] * len(avals),
    )


@pytest.fixture
def mixed(engine_settings):
    """That layer, a placement and its transport."""
    layer, placement = _mixed(), make_placement()
    return layer, placement, Ferry(placement, [layer])


def test_small_gradients_leave_as_one_transfer(mixed):
    layer, placement, transport = mixed
    made = [np.random.default_rng(leaf.index).normal(size=leaf.shape).astype(np.float32) for leaf in layer.leaves]
    vectors = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in layer.vectors]
    sources = jax.eval_shape(layer.join_small, made)
    traced = transport.program("store", 0).trace(sources, vectors).jaxpr
    (store,) = [e for e in traced.eqns if e.params.get("target_name") == "jaxferry_ferry_store"]
    assert [operand.aval.size for operand in store.invars] == [256 * 129, 300 * 128, 20, layer.vectors[0].size]
    assert_same_bits(jax.jit(lambda joined: layer.split_small(joined))(layer.join_small(made)), made)
    total = None
    for _ in range(2):
        gradients = jax.device_put(layer.join_small(list(map(jnp.asarray, made))), placement.device)
        total = transport.store(0, gradients, total)
        (vector,) = transport.gather(0, total)
        assert all(gradient.is_deleted() for gradient in gradients)
    assert_same_bits(layer.unpack([jnp.asarray(vector)]), [gradient + gradient for gradient in made])


@pytest.fixture
def calls(monkeypatch):
    """The programs that move parameters, in the order in which they are called."""
    called, program = [], Ferry.program

    def noted(self, name, layer, is_sum=False):
        made = program(self, name, layer, is_sum)
        return lambda *args: called.append(name) or made(*args)

    monkeypatch.setattr(Ferry, "program", noted)
    return called


def _pinned(placement, layer, start=0):
    return tuple(
        jax.device_put(np.arange(start, start + v.size, dtype=v.dtype), placement.pinned) for v in layer.vectors
    )


@pytest.mark.usefixtures("engine_settings")
def test_a_load_waits_for_its_buffers_alone_once_nothing_else_writes_what_it_reads(placement, calls, monkeypatch):
    layer = _mixed()
    transport, ready = Ferry(placement, [layer]), True
    monkeypatch.setattr(ArrayImpl, "is_ready", lambda array: ready)
    loads = []
    for start, ready in enumerate((True, True, False, True)):
        vectors = _pinned(placement, layer, start)
        held = transport.load(0, vectors)
        loads.append(calls[-1])
        assert_same_bits(held.parameters(), layer.unpack([jnp.asarray(v) for v in vectors]))
        transport.drop(held)
    vacant = "load onto" if placement.is_cpu else "load vacant"
    assert loads == ["load", vacant, "load onto", vacant]
    assert calls.count("vacate") == (0 if placement.is_cpu else 4)


@pytest.mark.usefixtures("engine_settings")
def test_reserved_buffers_are_loaded_without_a_wait_by_the_next_load_of_their_layer_alone(calls, monkeypatch):
    monkeypatch.setattr(Placement, "is_cpu", property(lambda self: False))
    monkeypatch.setattr(ArrayImpl, "is_ready", lambda array: True)
    layer, placement = _mixed(), make_placement()
    transport = Ferry(placement, [layer, layer])

    def loaded(number, is_reserved):
        vectors = _pinned(placement, layer, number)
        held = transport.load(number, vectors)
        name = calls[-1]
        assert_same_bits(held.parameters(), layer.unpack([jnp.asarray(v) for v in vectors]))
        transport.drop(held, is_reused=False, is_reserved=is_reserved)
        return name

    # Other loads neither take them nor free them.
    found = [loaded(number, is_reserved) for number, is_reserved in ((0, True), (1, False), (0, True), (1, True))]
    assert found == ["load", "load", "load unused", "load"]
    transport.release()
    assert [loaded(0, True), loaded(0, False), loaded(0, False)] == ["load", "load unused", "load"]
    assert "vacate" not in calls


@pytest.mark.usefixtures("engine_settings")
def test_buffers_are_vacant_from_the_last_reader_on_that_asks_for_them(calls, monkeypatch):
    monkeypatch.setattr(Placement, "is_cpu", property(lambda self: False))
    layer, placement = _mixed(), make_placement()
    transport, vectors = Ferry(placement, [layer]), _pinned(placement, layer)

    def vacated(*readers_after):
        held = transport.load(0, vectors)
        del calls[:]
        transport.vacate(held)
        for _ in readers_after:
            assert_same_bits(held.parameters(), layer.unpack([jnp.asarray(v) for v in vectors]))
        transport.drop(held)
        return calls.count("vacate")

    # One that comes late would be overwritten while it reads, so the buffers are vacant behind it only.
    assert [vacated(), vacated("late"), vacated("late", "later"), vacated()] == [1, 2, 2, 1]


@pytest.mark.usefixtures("engine_settings")
def test_the_buffers_that_were_dropped_first_are_loaded_first(calls):
    layer, placement = _mixed(), make_placement()
    transport, vectors = Ferry(placement, [layer]), _pinned(placement, layer)
    held = [transport.load(0, vectors) for _ in range(3)]
    addresses = [each.parameters()[0].unsafe_buffer_pointer() for each in held]
    for each in held:
        transport.drop(each)
    again = [transport.load(0, vectors) for _ in held]
    assert [each.parameters()[0].unsafe_buffer_pointer() for each in again] == addresses
    for each in again:
        transport.drop(each, is_reused=False)


@pytest.fixture
def slow_store():
    """A link that carries nothing to the host until the test opens it."""
    with link(store=1.0) as native:
        yield native


def gradients_of(layer, placement):
    made = [np.random.default_rng(leaf.index).normal(size=leaf.shape).astype(np.float32) for leaf in layer.leaves]
    return made, jax.device_put(layer.join_small(list(map(jnp.asarray, made))), placement.device)


def test_a_gradient_and_its_vectors_stay_until_the_copy_has_ended(mixed, slow_store):
    layer, placement, transport = mixed
    made, gradients = gradients_of(layer, placement)
    stored = transport.store(0, gradients)
    vectors = weakref.ref(stored.vectors[0])
    jax.block_until_ready(stored.vectors)
    del stored
    gc.collect()
    [(copy, sources)] = transport.in_flight.values()
    assert copy.arrays[0] is vectors() and not any(gradient.is_deleted() for gradient in sources)
    slow_store.set_bandwidth("store", 0)
    copy.wait()
    assert not transport.in_flight and all(gradient.is_deleted() for gradient in sources)
    assert_same_bits(layer.unpack([jnp.asarray(copy.arrays[0])]), made)


def test_a_device_that_waits_for_a_copy_may_reuse_its_sources_but_not_its_vectors(mixed):
    layer, placement, transport = mixed
    made, gradients = gradients_of(layer, placement)
    stored = transport.store(0, gradients)
    stored.copy.hold()
    assert all(gradient.is_deleted() for gradient in gradients)
    assert [copy for copy, _ in transport.in_flight.values()] == [stored.copy]
    stored.copy.hold()
    assert_same_bits(layer.unpack([jnp.asarray(v) for v in transport.gather(0, stored)]), made)
    assert not transport.in_flight


def test_what_has_failed_to_arrive_stays(mixed, monkeypatch):
    layer, placement, transport = mixed
    _, gradients = gradients_of(layer, placement)
    stored = transport.store(0, gradients)

    def failing(addresses, sizes):
        raise NativeError("a copy has failed")

    monkeypatch.setattr(transport.library, "wait_for", failing)
    for _ in range(2):
        with pytest.raises(NativeError, match="a copy has failed"):
            transport.gather(0, stored)
    [(copy, sources)] = transport.in_flight.values()
    assert copy is stored.copy and not any(array.is_deleted() for array in (*copy.arrays, *sources))


@pytest.mark.cpu_device  # so is the emulated one
def test_a_step_is_rolled_back_once_nothing_of_it_is_in_flight(gpt, monkeypatch):
    expected, _ = trained(gpt, ADAMW, 1)
    emulate(monkeypatch)
    step = jaxferry.train_step(gpt.loss_fn, ADAMW, plan=plan_of(gpt, [Mode.GFGB]), transport="ferry")
    state = step.init(gpt.params)
    transport, before = transport_of(step, gpt.batch), step.init(gpt.params).params
    queued = []

    def broken(function, *args):
        queued.append(len(transport.in_flight))
        if len(queued) == 3:
            raise RuntimeError("the host ran out of memory")
        return function(*args)

    with link(delay_s=0.02, seed=1), monkeypatch.context() as patch:
        wrap(patch, Operation.BACKWARD, broken)
        with pytest.raises(jaxferry.TaskError, match="the state is that before the step"):
            step(state, gpt.batch)
    assert queued[2] > 0 and not transport.in_flight
    assert_same_bits(state.params, before)
    state, _ = step(state, gpt.batch)
    assert_same_bits(state.params, expected)


def test_a_small_gradient_beside_an_empty_one_leaves_whole():
    """XLA drops an empty operand, so what is packed is then the gradient itself, or a copy of it."""
    shapes = {"b": (256,), "e": (0, 7), "w": (256, 256)}
    params = {
        f"l{index}": {name: np.full(shape, 0.01 * (index + 1), np.float32) for name, shape in shapes.items()}
        for index in range(6)
    }

    def loss_fn(params, x):
        for layer in params.values():
            x = jnp.tanh(x @ layer["w"] + layer["b"]) + layer["e"].sum()
        return jnp.mean(x**2)

    task = models.Task(loss_fn, params, jnp.ones((8, 256)))
    expected, losses = train(jaxferry.train_step(loss_fn, ADAMW, transport="device_put"), task, 4)
    state, others = train(jaxferry.train_step(loss_fn, ADAMW, transport="ferry"), task, 4)
    assert others == losses
    assert_same_bits(state.params, expected.params)


@pytest.mark.parametrize("transport", ["ferry", "device_put"])
def test_a_gradient_stays_until_its_norm_is_known_though_its_update_has_ended(transport, monkeypatch):
    computed = engine_gradients._norm_of_vectors

    def late(vectors):
        time.sleep(0.05)
        return computed(vectors)

    monkeypatch.setattr(engine_gradients, "_norm_of_vectors", late)

    # No program knows the norm of a gradient to which two add.
    loss_fn = chain(("l0", "l1", "l0"))

    params = {f"l{i}": {"w": np.full((8, 8), 0.1 + 0.01 * i, np.float32)} for i in range(2)}
    places = {"l0": GradientPlace.HOST, "l1": GradientPlace.DEVICE, "l0#2": GradientPlace.HOST}
    plan = Plan("any", 1.0, tuple(LayerPlan(name, Mode.GFGB, place) for name, place in places.items()))
    step = jaxferry.train_step(loss_fn, optax.sgd(0.0), transport=transport, plan=plan)
    state, x = step.init(params), np.ones((2, 8), np.float32)
    expected = float(optax.global_norm(jax.grad(loss_fn)(params, x)))
    for _ in range(3):
        state, metrics = step(state, x)
        assert float(metrics["grad_norm"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("keeps_freed", "expected"), [(True, [1]), (False, [4, 2, 1])])
def test_the_device_waits_for_the_last_of_several_copies_or_in_few_sizes(keeps_freed, expected):
    """Each size is a program of its own, so there are few. All sources are freed for the next program."""
    sources = [[jnp.full(4, number)] for number in range(8)]
    copies = [StoredCopy(library("cpu"), (), arrays, lambda given: given, {}) for arrays in sources]
    copies[2].forget()  # the host has seen its end
    launched = []
    hold_together(copies, lambda given: launched.append(given) or given, keeps_freed)
    assert [len(given) for given in launched] == expected and launched[-1][-1] is sources[-1][0]
    assert all(array.is_deleted() for arrays in sources for array in arrays)
