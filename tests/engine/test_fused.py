"""The compiled update of a unit, fused and generic, against plain Optax: 100 steps, all dtypes, clipping, scales."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
from jaxferry.optimizer import FusedUpdate, HostOptimizer, UpdateGroup, fused_rule, path_names
from jaxferry.partition import make_layer
from jaxferry.step import Arrival
from jaxferry.transport import make_placement
from planned import assert_same_bits
from slowly import slow_but
from tolerances import FUSED_RTOL

# Updates of the host alone; what an accelerator changes for them is a parameter of the tests.
pytestmark = [pytest.mark.cpu_device, pytest.mark.usefixtures("engine_settings")]

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 20, 100)


def is_matrix(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


PAIRS = {
    "adam": (jaxferry.adam(1e-2), optax.adam(1e-2)),
    "adamw": (jaxferry.adamw(1e-2, weight_decay=0.1), optax.adamw(1e-2, weight_decay=0.1)),
    "schedule": (jaxferry.adamw(SCHEDULE, eps_root=1e-8), optax.adamw(SCHEDULE, eps_root=1e-8)),
    "mask": (jaxferry.adamw(1e-2, weight_decay=1, mask=is_matrix), optax.adamw(1e-2, weight_decay=1, mask=is_matrix)),
    "scheduled decay": (
        jaxferry.adamw(1e-2, weight_decay=SCHEDULE, mask=is_matrix),
        optax.adamw(1e-2, weight_decay=SCHEDULE, mask=is_matrix),
    ),
    "nadamw": (jaxferry.adamw(1e-2, b1=0.8, nesterov=True), optax.adamw(1e-2, b1=0.8, nesterov=True)),
    "lion": (jaxferry.lion(1e-3, weight_decay=0.1, mask=is_matrix), optax.lion(1e-3, weight_decay=0.1, mask=is_matrix)),
    "sgd": (jaxferry.sgd(1e-2), optax.sgd(1e-2)),
    "momentum": (jaxferry.sgd(SCHEDULE, 0.9), optax.sgd(SCHEDULE, 0.9)),
    "nesterov": (jaxferry.sgd(1e-2, 0.9, nesterov=True), optax.sgd(1e-2, 0.9, nesterov=True)),
}
CLIP_NORM = 1.25
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def parameters():
    rng = np.random.default_rng(0)
    shapes = {"kernel": (37, 29), "bias": (29,), "scale": ()}
    return {"layer": {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}}


def gradients_at(step, dtype):
    """Random gradients of all magnitudes down to the dtype's subnormal numbers, and some zeros."""
    rng = np.random.default_rng(step)
    shapes = jax.tree.map(np.shape, parameters(), is_leaf=lambda x: isinstance(x, np.ndarray))

    def gradient(shape):
        x = rng.normal(size=shape) * 2.0 ** rng.integers(-20, 3, size=shape)
        return np.asarray(np.where(rng.random(shape) < 0.1, 0.0, x)).astype(dtype)

    return jax.tree.map(gradient, shapes, is_leaf=lambda x: isinstance(x, tuple))


def layer_of(params, dtype):
    leaves = [jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype) for leaf in jax.tree.leaves(params)]
    masters = [np.dtype(np.float32 if dtype else leaf.dtype) for leaf in leaves]
    return make_layer("layer", range(len(leaves)), path_names(params), leaves, masters)


@dataclasses.dataclass
class Updater:
    """The single unit of the parameters, and its compiled update."""

    optimizer: HostOptimizer
    unit: UpdateGroup
    layers: tuple
    vectors: list

    @classmethod
    def make(cls, optimizer, dtype, clip_norm=None, placement=None):
        params, place = parameters(), placement or make_placement()
        leaves, tree = jax.tree.flatten(params)
        avals = [jax.ShapeDtypeStruct(leaf.shape, np.float32) for leaf in leaves]
        layers = (layer_of(params, dtype),)
        host = HostOptimizer(optimizer, tree, avals, place, clip_norm)
        masters = [jax.device_put(leaf, place.host, may_alias=False) for leaf in leaves]
        indices = tuple(leaf.index for leaf in layers[0].leaves)
        [unit] = host.units_of(layers)
        unit = dataclasses.replace(unit, masters=masters, state=host.updates.init_state(unit, masters))
        host.updates.compile([unit], layers, [Arrival.OWN])
        packed = layers[0].pack([masters[i] for i in indices])
        return cls(host, unit, layers, [tuple(jax.device_put(v, place.pinned, may_alias=False) for v in packed)])

    def step(self, gradients, norm=0.0, scale=1.0, vectors=None, dtype=None):
        leaves = jax.tree.leaves(gradients)
        packed = self.layers[0].pack([leaves[leaf.index] for leaf in self.layers[0].leaves])
        packed = packed if dtype is None else [vector.astype(dtype) for vector in packed]
        place = make_placement()
        arrived = [tuple(jax.block_until_ready(jax.device_put(v, place.update_output)) for v in packed)]
        numbers = [
            x if isinstance(x, (jax.Array, np.floating)) else jax.device_put(np.float32(x), place.host_compute)
            for x in (norm, scale)
        ]
        given = self.vectors if vectors is None else vectors
        self.vectors = self.unit.programs[(Arrival.OWN,)](self.unit, given, arrived, *numbers)
        return self.unit.masters, self.unit.state, self.vectors


@pytest.fixture
def is_fused():
    """Whether an optimizer's update is the native operation."""

    def check(optimizer):
        updater = Updater.make(optimizer, jnp.bfloat16)
        return isinstance(updater.unit.programs[(Arrival.OWN,)], FusedUpdate)

    return check


def plain_steps(optimizer, dtype, num_steps, clip_norm=None, scale=1.0):
    params, norms = parameters(), []
    if clip_norm is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)
    state = optimizer.init(params)

    @jax.jit
    def step(gradients, state, params):
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, gradients)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, optax.tree.norm(gradients)

    for number in range(num_steps):
        params, state, norm = step(gradients_at(number, dtype), state, params)
        norms.append(norm)
    return params, state if clip_norm is None else state[1], norms


def assert_near(ours, theirs):
    for mine, other in zip(ours, jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(mine, other, rtol=FUSED_RTOL, atol=FUSED_RTOL)


OFTEN = ("mask", "nadamw", "lion", "momentum")


@pytest.mark.parametrize("name", slow_but(OFTEN, PAIRS))
def test_100_steps_are_those_of_optax(is_fused, name):
    ours, theirs = PAIRS[name]
    assert is_fused(ours) and not is_fused(theirs)
    updater = Updater.make(ours, jnp.bfloat16)
    for number in range(100):
        updater.step(gradients_at(number, jnp.bfloat16))
    params, state, _ = plain_steps(theirs, jnp.bfloat16, 100)
    assert_near(updater.unit.masters, params)
    assert_near(updater.unit.state, state)


@pytest.mark.parametrize("dtype", DTYPES)
def test_100_clipped_and_scaled_steps_of_every_dtype_are_those_of_optax(dtype):
    ours, theirs = PAIRS["mask"]
    params, state, norms = plain_steps(theirs, dtype, 100, clip_norm=CLIP_NORM, scale=24.0)
    assert min(norms) < CLIP_NORM < max(norms)
    updater = Updater.make(ours, dtype, clip_norm=CLIP_NORM)
    for number in range(100):
        updater.step(gradients_at(number, dtype), norms[number], 24.0)
    assert_near(updater.unit.masters, params)
    assert_near(updater.unit.state, state)
    [vector] = updater.vectors[0]
    packed = updater.layers[0].pack([updater.unit.masters[leaf.index] for leaf in updater.layers[0].leaves])
    assert_same_bits(vector, packed[0])


@pytest.mark.parametrize("which", [0, 1])
def test_gradients_that_are_not_finite_make_parameters_that_are_not(which):
    updater = Updater.make(PAIRS["adamw"][which], jnp.bfloat16, clip_norm=1.0)
    gradients = gradients_at(0, jnp.bfloat16)
    gradients["layer"]["bias"][3] = np.inf
    masters, _, [[vector]] = updater.step(gradients, np.inf)
    bias = np.asarray(masters[0])
    assert np.isnan(bias[3]) and np.isfinite(np.delete(bias, 3)).all()
    assert np.isnan(np.asarray(vector).astype(np.float32)).sum() == 1


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    "name", [name if name == "adamw" else pytest.param(name, marks=pytest.mark.slow) for name in PAIRS]
)
def test_masters_state_and_compute_copy_stay_where_they_are(name, which):
    updater = Updater.make(PAIRS[name][which], jnp.bfloat16)

    def arrays():
        return [*updater.unit.masters, *(leaf for leaf in updater.unit.state if leaf.shape), *updater.vectors[0]]

    updater.step(gradients_at(0, jnp.bfloat16))
    before = [array.unsafe_buffer_pointer() for array in jax.block_until_ready(arrays())]
    updater.step(gradients_at(1, jnp.bfloat16))
    assert [array.unsafe_buffer_pointer() for array in arrays()] == before


@pytest.mark.parametrize("replaced", ["arrays", "unit", "state alone"])
def test_replaced_masters_and_state_are_those_that_are_updated(replaced):
    """What is prepared for an update belongs to the arrays that it was prepared for."""
    ours, theirs = (Updater.make(PAIRS["adamw"][0], jnp.bfloat16) for _ in range(2))
    for number in range(3):
        theirs.step(gradients_at(number, jnp.bfloat16))
        ours.step(gradients_at(number, jnp.bfloat16))
        if number == 2:
            break
        before = [*map(np.asarray, (*ours.unit.masters, *ours.unit.state))]
        expected = [array.copy() for array in before]
        masters, state = (
            [jax.device_put(np.array(array), ours.unit.masters[0].sharding, may_alias=False) for array in arrays]
            for arrays in (ours.unit.masters, ours.unit.state)
        )
        if replaced == "unit":  # in a unit that is made of this one
            ours.unit = dataclasses.replace(ours.unit, masters=masters, state=state)
        else:
            if replaced == "arrays":
                ours.unit.masters = masters
            ours.unit.state = state
    assert "alone" in replaced or not assert_same_bits(before, expected)
    assert_same_bits([*ours.unit.masters, *ours.unit.state], [*theirs.unit.masters, *theirs.unit.state])


def test_gradients_of_another_layout_are_refused_before_anything_changes():
    updater = Updater.make(PAIRS["adamw"][0], jnp.bfloat16)
    before = [np.array(array) for array in (*updater.unit.masters, *updater.unit.state)]
    with pytest.raises(ValueError, match="an update takes a gradient of"):
        updater.step(gradients_at(0, jnp.float32), dtype=jnp.float32)
    assert_same_bits([*updater.unit.masters, *updater.unit.state], before)


NOT_FUSED = {
    "moments of 16 bits": jaxferry.adamw(1e-2, mu_dtype=jnp.bfloat16),
    "a sum of 16 bits": jaxferry.sgd(1e-2, 0.9, accumulator_dtype=jnp.bfloat16),
    "part of a chain": optax.chain(jaxferry.adamw(1e-2), optax.scale(0.5)),
    "hyperparameters": optax.inject_hyperparams(jaxferry.adamw)(learning_rate=1e-2),
}


@pytest.mark.parametrize("name", NOT_FUSED)
def test_what_the_library_does_not_do_is_left_to_optax(is_fused, name):
    assert not is_fused(NOT_FUSED[name])


def test_a_layer_without_a_gradient_or_of_other_dtypes_is_left_to_optax():
    ours = PAIRS["adamw"][0]
    layers = [layer_of(parameters(), jnp.bfloat16)]
    state = jax.eval_shape(ours.init, parameters())
    assert fused_rule(ours, state, layers, [True]) is ours.rule
    assert fused_rule(ours, state, layers, [False]) is None
    wide = [layer_of(jax.tree.map(lambda x: x.astype(np.float64), parameters()), None)]
    assert fused_rule(ours, state, wide, [True]) is None


def test_without_the_library_optax_does_it(monkeypatch, is_fused):
    monkeypatch.setattr("jaxferry.optimizer.optimizers.is_available", lambda platform: False)
    assert not is_fused(PAIRS["adamw"][0])
