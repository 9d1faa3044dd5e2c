"""Parameters of every dtype that JAX has: right bits, or one refusal before anything is allocated."""

import contextlib
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jaxferry
from jaxferry import checkpoint
from jaxferry.modes import GradientPlace, Mode
from jaxferry.optimizer import host_array, host_memory
from jaxferry.partition import Span, from_bytes, shape_from_stored, stored_struct, to_bytes
from jaxferry.step import LayerPlan, Plan
from jaxferry.transport import make_placement
from pairwise import pairwise
from planned import take_steps

NUMPY = ["bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))]
NUMPY += ["float16", "float32", "float64", "complex64", "complex128"]
SMALL = sorted(name for name in dir(ml_dtypes) if re.fullmatch(r"b?float\d+(_\w+)?|u?int\d+", name))
REFUSED = {"int1", "uint1", "float6_e2m3fn", "float6_e3m2fn"}
TRAINED = {"float16", "bfloat16", "float32", "float64", *(n for n in SMALL if n.startswith("float8_"))}
TRAINED -= {"float8_e8m0fnu"}  # it has no sign
NATIVE = {"float16", "bfloat16", "float32"}
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def every_dtype():
    return [*NUMPY, *SMALL]


def needs_64_bits(name):
    return name in ("int64", "uint64", "float64", "complex128")


def settings_for(name):
    return jax.enable_x64(True) if needs_64_bits(name) else contextlib.nullcontext()


def codes(dtype):
    """Every code of a dtype of up to 8 bits; numbers of each sign of a larger one."""
    if dtype.itemsize > 1 or dtype == np.bool_:
        return np.arange(-24, 24).astype(dtype)
    if dtype.name.startswith(("int", "uint")):
        info = ml_dtypes.iinfo(dtype) if hasattr(ml_dtypes, dtype.name) else np.iinfo(dtype)
        return np.arange(int(info.min), int(info.max) + 1).astype(np.int16).astype(dtype)
    return np.arange(1 << ml_dtypes.finfo(dtype).bits, dtype=np.uint8).view(dtype)


def frozen_array(name, shape):
    return np.resize(codes(dtype_of(name)), shape)


def loss_fn(params, x):
    z = params["q"]["q"]
    z = (z.real if jnp.iscomplexobj(z) else z).astype(jnp.float32)
    z = jnp.where(jnp.isfinite(z), z, 1)
    return jnp.mean((jnp.tanh(x @ params["a"]["w"]) @ (z / (1 + jnp.abs(z))) @ params["v"]["v"]) ** 2)


def make_params(name, shape):
    q = frozen_array(name, shape)
    return {
        "a": {"w": np.eye(8, shape[0], dtype=np.float32)},
        "q": {"q": q},
        "v": {"v": np.eye(shape[1], 4, dtype=np.float32)},
    }


def make_step(transport="device_put", mode=None, params=None):
    options = {"transport": transport, "trainable": lambda path: path != "q/q"}
    if mode is not None:
        step = jaxferry.train_step(loss_fn, optax.sgd(1e-2), **options)
        step.declare(params)
        names = [segment.name for segment in step.prepare(X).partition.segments]
        options["plan"] = Plan("any", 1.0, tuple(LayerPlan(n, mode, GradientPlace.DEVICE) for n in names))
    return jaxferry.train_step(loss_fn, optax.sgd(1e-2), **options)


def plain_losses(params, num_steps):
    """Plain JAX, which updates all but the frozen leaf."""
    params, losses = jax.tree.map(jnp.asarray, params), []
    slope = jax.jit(jax.value_and_grad(lambda own, q, x: loss_fn({**own, "q": q}, x)))
    own, q = {"a": params["a"], "v": params["v"]}, params["q"]
    for _ in range(num_steps):
        loss, gradients = slope(own, q, X)
        own = jax.tree.map(lambda a, b: a - 1e-2 * b, own, gradients)
        losses.append(float(loss))
    return losses


def assert_same(array, expected):
    assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
    assert array.tobytes() == expected.tobytes()


# One of each way in which elements are stored, and of each width.
KINDS = ("bool", "int8", "int64", "complex128", "int2", "int4", "float4_e2m1fn", "float8_e4m3", "float8_e5m2")
ODD = ("int4", "float4_e2m1fn")


def frozen_cases():
    for name in every_dtype():
        for shape, chosen in (((8, 8), KINDS), ((8, 3), ODD)):
            marks = [] if name in chosen else [pytest.mark.slow]
            yield pytest.param(name, shape, marks=marks, id=f"{name}{list(shape)}")


@pytest.mark.parametrize(("name", "shape"), [case for case in frozen_cases() if case.values[0] not in REFUSED])
def test_frozen_parameters_keep_their_bits(name, shape, tmp_path):
    """Loaded, read in place, kept, copied, assigned, saved and restored; each dtype by one transport, both by some."""
    with settings_for(name):
        params = make_params(name, shape)
        expected = plain_losses(params, 3)
        transport = ("ferry", "device_put")[every_dtype().index(name) % 2]
        for mode in (None, Mode.DHA, Mode.RELOAD):
            step, losses = make_step(transport, mode, params), []
            state = step.init(params)
            for _ in range(3):
                state, metrics = step(state, X)
                losses.append(float(metrics["loss"]))
            np.testing.assert_allclose(losses, expected, rtol=1e-5)
            assert_same(state.params["q"]["q"], params["q"]["q"])
            copy = state.copy()
            copy.params = copy.params
            assert_same(copy.params["q"]["q"], params["q"]["q"])
            path = tmp_path / f"{transport} {mode}"
            step.save(state, path)
            restored = make_step(transport, mode, params).restore(path)
            assert_same(restored.params["q"]["q"], params["q"]["q"])
            assert float(step.evaluate(state, X)) == float(step.evaluate(copy, X))


COPIES = {
    "copied": lambda step, state, path: state.copy(),
    "assigned": lambda step, state, path: assigned(state.copy(), state.params),
    "assigned lazily": lambda step, state, path: assigned(state.copy(), state.lazy_params),
    "begun from lazy parameters": lambda step, state, path: make_step().init(state.lazy_params),
    "restored": lambda step, state, path: saved(step, state, path, wait=True),
    "restored from a save in the background": lambda step, state, path: saved(step, state, path, wait=False),
}


def assigned(state, params):
    state.params = params
    return state


def saved(step, state, path, wait):
    step.save(state, path, wait=wait)
    step.wait_for_saves()
    return make_step().restore(path)


CODED = [("int2", (8, 8)), ("int4", (8, 8)), ("int4", (8, 3)), ("float4_e2m1fn", (8, 3)), ("float8_e4m3", (8, 8))]


@pytest.mark.parametrize(("coded", "way", "is_filled"), pairwise(CODED, COPIES, (False, True)), ids=str)
def test_states_that_are_made_of_others_hold_and_show_the_same_codes(coded, way, is_filled, tmp_path):
    """A trained state has coded parameters only in its compute copy."""
    params = make_params(*coded)
    step = make_step()
    state = step.init(params)
    if is_filled:
        state, _ = step(state, X)
    made = COPIES[way](step, state, tmp_path / "saved")
    array, lazy = params["q"]["q"], made.lazy_params["q"]["q"]
    for found in (made.params["q"]["q"], np.asarray(lazy), lazy[...]):
        assert_same(found, array)
    assert (lazy.shape, lazy.dtype) == (array.shape, array.dtype)
    for index in (2, slice(1, 6), slice(None, None, -2), (slice(None), slice(1, 3)), (3, 1), [4, 1]):
        assert_same(np.asarray(lazy[index]), np.asarray(array[index]))
    assert_same(state.lazy_params["q"]["q"][1:6], array[1:6])


@pytest.mark.cpu_device  # XLA pins more than is asked for
@pytest.mark.parametrize(("name", "shape"), CODED, ids=str)
def test_memory_is_checked_for_the_bytes_that_coded_parameters_take(name, shape, monkeypatch, tmp_path):
    """A state holds several elements in a byte. NumPy, and so a copy for the user, holds one."""
    params = make_params(name, shape)
    step = make_step()
    state = step.init(params)
    step.save(state, tmp_path / "saved")
    counted = []
    monkeypatch.setattr(host_memory, "check", lambda needed, *_, **__: counted.append(sum(needed.values())))
    trained = params["a"]["w"].nbytes + params["v"]["v"].nbytes
    stored = to_bytes(params["q"]["q"]).nbytes
    for use, expected in (
        (lambda: state.params, trained + params["q"]["q"].nbytes),
        (state.copy, trained + stored),
        (lambda: assigned(state, params), trained + stored),
        (lambda: step.save(state, tmp_path / "background", wait=False), trained + stored),
        # The masters, the compute copy, and the gradients of what is trained; a frozen one has one copy.
        (lambda: step.restore(tmp_path / "saved"), 3 * trained + stored),
    ):
        counted.clear()
        use()
        assert counted[0] == expected
    step.wait_for_saves()


def test_elements_of_a_process_are_cut_from_the_bytes(tmp_path):
    """Where several processes train, each holds a span of a parameter's elements, which for coded ones are bytes."""
    array = make_params("int4", (8, 8))["q"]["q"]
    step = make_step()
    state = step.init(make_params("int4", (8, 8)))
    step.save(state, tmp_path / "saved")
    leaf = checkpoint.load(tmp_path / "saved", lambda content: content.params["['q']['q']"])
    for source in (array, jnp.asarray(array), state.lazy_params["q"]["q"], leaf):
        found = host_array(source, make_placement(), np.dtype(np.uint8), Span(5, 23))
        assert_same(np.asarray(found.arrays[0]), to_bytes(array).reshape(-1)[5:23])


@pytest.mark.parametrize("name", sorted(REFUSED & set(every_dtype())))
def test_dtypes_with_which_xla_does_not_compute_are_refused_before_anything_is_allocated(name):
    step = make_step()
    with pytest.raises(jaxferry.InputError, match=f"parameter 'q/q' has dtype {name}.*cast it"):
        step.declare(make_params(name, (8, 8)))


def casts_right(dtype):
    """Whether XLA casts to a dtype as NumPy does; zero has no sign in some dtypes."""
    small = np.float32([-1e-6, 1e-6, -0.5])
    with jax.debug_nans(False):  # a wrong cast makes a NaN
        made = jax.jit(lambda x: x.astype(dtype).astype(jnp.float32))(small)
    return np.array_equal(made, small.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("transport", ["ferry", "device_put"])
@pytest.mark.parametrize("name", every_dtype())
def test_trained_parameters_are_those_of_plain_jax_or_refused(name, transport):
    dtype = dtype_of(name)
    generator = np.random.default_rng(0)
    params = {f"l{i}": {"w": (generator.standard_normal((8, 8)) / 2).astype(dtype)} for i in range(3)}

    def loss_fn(params, x):
        for layer in params.values():
            x = x + jnp.tanh(x @ layer["w"].astype(jnp.float32))
        return jnp.mean(x**2)

    with settings_for(name):
        if name in TRAINED and not casts_right(dtype):
            pytest.skip("XLA without its emitters of fusions (tests/conftest.py) casts small negative numbers to NaN")
        step = jaxferry.train_step(loss_fn, optax.sgd(0.1), transport=transport)
        if name not in TRAINED or (transport == "ferry" and name not in NATIVE):
            with pytest.raises(jaxferry.InputError, match=name):
                step.declare(params)
            return
        wide = jnp.float64 if name == "float64" else jnp.float32
        masters = jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(wide), params)

        @jax.jit
        def plain(masters):
            loss, gradients = jax.value_and_grad(loss_fn)(jax.tree.map(lambda leaf: leaf.astype(dtype), masters), X)
            return loss, jax.tree.map(lambda leaf, g: leaf - 0.1 * g.astype(leaf.dtype), masters, gradients)

        state = step.init(params)
        for _ in range(3):
            state, metrics = step(state, X)
            loss, masters = plain(masters)
            np.testing.assert_allclose(float(metrics["loss"]), float(loss), rtol=2e-2 if dtype.itemsize < 4 else 1e-5)
        for ours, expected in zip(jax.tree.leaves(state.params), jax.tree.leaves(masters), strict=True):
            assert ours.dtype == wide
            np.testing.assert_allclose(ours, expected, atol=5e-2 if dtype.itemsize < 4 else 1e-5)


@pytest.mark.parametrize("name", [name for name in SMALL if name not in REFUSED])
def test_bytes_hold_every_code(name):
    for shape in ((), (0, 4), (1,), (3, 5), (2, 3, 8)):
        array = np.asarray(frozen_array(name, shape) if np.prod(shape) else np.zeros(shape, dtype_of(name)))
        stored = to_bytes(array)
        assert (stored.shape, stored.dtype) == (stored_struct(array).shape, stored_struct(array).dtype)
        assert shape_from_stored(stored, array.dtype) == shape
        assert_same(np.asarray(from_bytes(stored, array.dtype)), array)


def test_four_bits_take_half_a_byte_on_the_host_and_on_the_device():
    params = make_params("int4", (8, 8))
    step = make_step("ferry")
    state, _ = step(step.init(params), X)
    [layer] = [layer for layer in state.host.layers if layer.name == "q"]
    assert layer.num_bytes == 32
    state.fill()
    assert [vector.nbytes for vector in state.host.vectors[state.host.layers.index(layer)]] == [32]


def test_layers_of_a_scan_are_cut_from_packed_stacks():
    generator = np.random.default_rng(0)
    params = {
        "w": generator.standard_normal((4, 8, 8), np.float32) / 8,
        "q": generator.integers(-8, 8, (4, 8, 8)).astype(np.int8).astype(ml_dtypes.int4),
    }

    def scanned(params, x):
        def body(h, layer):
            return h + jnp.tanh(h @ layer["w"]) @ (layer["q"].astype(jnp.float32) / 16), None

        return jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)

    step = jaxferry.train_step(scanned, optax.sgd(0.1), trainable=lambda path: path != "q")
    state = step.init(params)
    state, metrics = step(state, X)
    assert len(step.prepare(X).partition.segments) == 4
    np.testing.assert_allclose(
        float(metrics["loss"]), float(jax.jit(scanned)(jax.tree.map(jnp.asarray, params), X)), rtol=1e-6
    )
    assert_same(state.params["q"], params["q"])
    lazy = state.lazy_params["q"]
    for index in (..., slice(1, 3), 2, (slice(None), 3)):
        assert_same(lazy[index], params["q"][index])
    again = jaxferry.train_step(scanned, optax.sgd(0.1), trainable=lambda path: path != "q")
    assert_same(again.init(state.lazy_params).params["q"], params["q"])


def test_a_scan_over_the_packed_axis_is_refused():
    def scanned(params, x):
        def body(h, layer):
            return h * (1 + layer["w"] * layer["q"].astype(jnp.float32)), None

        return jnp.mean(jax.lax.scan(body, x, {"w": params["w"], "q": params["q"].T})[0] ** 2)

    params = {"w": np.ones((4, 8), np.float32), "q": np.ones((8, 4), ml_dtypes.int4)}
    step = jaxferry.train_step(scanned, optax.sgd(0.1), trainable=lambda path: path != "q")
    state = step.init(params)
    with pytest.raises(jaxferry.InputError, match="scanned over its last axis"):
        step(state, X)
    assert_same(state.params["q"], params["q"])


def test_a_checkpoint_of_another_coded_dtype_is_an_error(tmp_path):
    step = make_step()
    step.save(step.init(make_params("int4", (8, 8))), tmp_path / "saved")
    for name in ("uint4", "int8", "float4_e2m1fn"):
        with pytest.raises(jaxferry.CheckpointError, match=f"is int4 in the checkpoint and {name} in the model"):
            make_step().restore(tmp_path / "saved", make_params(name, (8, 8)))


@pytest.mark.cpu_device  # one accelerator is no mesh
def test_devices_that_share_a_batch_gather_packed_parameters():
    params = make_params("int4", (8, 8))
    step = jaxferry.train_step(
        loss_fn,
        optax.sgd(1e-2),
        trainable=lambda path: path != "q/q",
        mesh=jax.make_mesh((2,), ("data",), devices=jax.devices("cpu")[:2]),
    )
    state, losses = take_steps(step, step.init(params), [X] * 3)
    np.testing.assert_allclose(losses, plain_losses(params, 3), rtol=1e-5)
    assert_same(state.params["q"]["q"], params["q"]["q"])
