"""Updates of parts of stacked parameters equal those parts of plain Optax's whole update."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
from jaxferry.native import is_available
from jaxferry.optimizer import FusedUpdate, HostOptimizer, Pieces, Stored, stored_whole
from jaxferry.partition import Part, make_layer
from jaxferry.step import Arrival
from jaxferry.transport import make_placement
from planned import assert_same_bits
from slowly import slow_but

# Updates of the host alone; what an accelerator changes for them is a parameter of the tests.
pytestmark = [pytest.mark.cpu_device, pytest.mark.usefixtures("engine_settings")]

LENGTH = 3
SHAPES = {"head": {"bias": (LENGTH, 4)}, "layers": {"kernel": (LENGTH, 4, 5), "scale": (5, LENGTH)}}
"""One of the layers' parameters is stacked along its first axis, the other along its last."""


def shapes():
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def random(seed):
    leaves, tree = jax.tree.flatten(shapes())
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(tree, [jax.random.normal(k, s.shape) for k, s in zip(keys, leaves, strict=True)])


def layers(num_in_a_layer=1):
    """One layer of whole parameters, and layers that hold parts of one or several iterations."""
    cut = [(1, 0), (2, 1)]
    origins = [(0, None), *((leaf, Part(i, LENGTH, axis)) for leaf, axis in cut for i in range(LENGTH))]
    leaves = jax.tree.leaves(shapes())
    avals = [leaves[0], *(jax.ShapeDtypeStruct(s, np.float32) for s in [(4, 5)] * LENGTH + [(5,)] * LENGTH)]
    paths, masters = [str(i) for i in range(7)], [np.dtype(np.float32)] * 7
    groups = [range(i, min(i + num_in_a_layer, LENGTH)) for i in range(0, LENGTH, num_in_a_layer)]
    indices = [[0], *([*(1 + i for i in g), *(4 + i for i in g)] for g in groups)]
    return [make_layer(str(i), group, paths, avals, masters, origins=origins) for i, group in enumerate(indices)]


class Run:
    """An optimizer over the layers, used as by a state and an executor."""

    def __init__(self, optimizer, layers, clip_norm=None):
        self.place, self.layers = make_placement(), layers
        leaves, tree = jax.tree.flatten(shapes())
        self.host = HostOptimizer(optimizer, tree, leaves, self.place, clip_norm)
        self.host.check_parts(layers)
        self.units = self.host.units_of(layers)
        leaves = jax.tree.leaves(random(0))
        masters = Pieces({i: stored_whole(self.put(leaf)) for i, leaf in enumerate(leaves)}, self.place)
        for unit in self.units:
            unit.masters = [masters.take(key) for key in unit.keys]
            unit.state = self.host.updates.init_state(unit, unit.masters)
        self.host.updates.compile(self.units, layers, [Arrival.OWN] * len(layers))

    def put(self, array, pinned=False):
        return jax.device_put(np.array(array), self.place.pinned if pinned else self.place.host, may_alias=False)

    def pack(self, tree):
        leaves, packed = jax.tree.leaves(tree), []
        for layer in self.layers:
            parts = [
                leaves[leaf.source]
                if leaf.part is None
                else jnp.take(leaves[leaf.source], leaf.part.number, leaf.part.axis)
                for leaf in layer.leaves
            ]
            packed.append(tuple(self.put(v, pinned=True) for v in layer.pack(parts)))
        return packed

    def step(self, gradients):
        packed, vectors = jax.block_until_ready((self.pack(gradients), self.pack(random(0))))
        numbers = [jax.device_put(np.float32(x), self.place.host_compute) for x in (0, 1)]
        for unit in self.units:
            update = unit.programs[(Arrival.OWN,) * len(unit.layers)]
            made = update(unit, *([v[i] for i in unit.layers] for v in (vectors, packed)), *numbers)
            for i, vector in zip(unit.layers, made, strict=True):
                vectors[i] = vector
        for vector, expected in zip(vectors, self.pack(self.params()), strict=True):
            assert_same_bits(vector, expected)

    def params(self):
        return [stored.array(self.place) for _, stored in sorted(self.collect("keys", "masters").items())]

    def state(self):
        return {name: stored.array(self.place) for name, stored in self.collect("state_keys", "state").items()}

    def collect(self, keys, arrays):
        found = {}
        for unit in self.units:
            for (name, part), array in zip(getattr(unit, keys), getattr(unit, arrays), strict=True):
                found.setdefault(name, {})[part] = array
        return {name: Stored(pieces, (), None) for name, pieces in found.items()}


def plain(optimizer, num_steps):
    """Plain Optax on the model's own tree."""
    params = random(0)
    state = optimizer.init(params)

    @jax.jit
    def step(gradients, state, params):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for number in range(num_steps):
        params, state = step(random(number + 1), state, params)
    return params, state


def labels(params):
    return jax.tree.map(lambda x: "large" if x.size > 20 else "small", params)


BY_PART = {
    "adamw": optax.adamw(optax.cosine_decay_schedule(1e-2, 10)),
    "decay by ndim": optax.adamw(1e-2, weight_decay=0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "decay by size": optax.adamw(1e-2, weight_decay=0.1, mask=lambda p: jax.tree.map(lambda x: x.size > 20, p)),
    "by label": optax.multi_transform({"large": optax.adam(1e-2), "small": optax.sgd(0.1, 0.9)}, labels),
    "hyperparameters": optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(1e-2, 0, 9)),
    "lion": optax.lion(1e-3),
    "16-bit moments": optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "by value": optax.chain(optax.clip(0.01), optax.sgd(0.1, momentum=0.9, nesterov=True)),
    "schedule free": optax.contrib.schedule_free_adamw(1e-2),
    "fused": jaxferry.adamw(1e-2, weight_decay=0.1, mask=lambda p: jax.tree.map(lambda x: x.size > 20, p)),
}
NOT_BY_PART = {
    "lamb": (optax.lamb(1e-2), "'reduce_sum' is not element-wise"),
    "adafactor": (optax.adafactor(1e-2, min_dim_size_to_factor=4), "its state has another shape"),
    "block norm": (optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)), "'reduce_sum' is not element-wise"),
}


def assert_as_plain(run, optimizer, num_steps=4):
    for number in range(num_steps):
        run.step(random(number + 1))
    params, state = plain(optimizer, num_steps)
    near = {"rtol": 3e-7 * num_steps, "atol": 3e-8 * num_steps}
    for ours, theirs in zip(run.params(), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(ours, theirs, **near)
    expected = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}
    ours = run.state()
    assert ours.keys() == expected.keys()
    for name, leaf in expected.items():
        assert (ours[name].shape, ours[name].dtype) == (leaf.shape, leaf.dtype)
        rough = {"rtol": 2**-8, "atol": 2**-12} if leaf.dtype == jnp.bfloat16 else near
        np.testing.assert_allclose(ours[name].astype(np.float32), leaf.astype(np.float32), **rough, err_msg=name)


OFTEN = ("decay by size", "by label", "schedule free", "fused")


@pytest.mark.parametrize("name", slow_but(OFTEN, BY_PART))
def test_an_element_wise_update_is_done_part_by_part_by_one_program(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = Run(BY_PART[name], layers())
    assert [unit.layers for unit in run.units] == [(0,), (1,), (2,), (3,)]
    assert len({id(program) for unit in run.units[1:] for program in unit.programs.values()}) == 1
    assert_as_plain(run, BY_PART[name])
    if name == "fused" and is_available("cpu"):
        assert all(isinstance(p, FusedUpdate) for unit in run.units for p in unit.programs.values())


@pytest.mark.parametrize("name", ["decay by size", "fused"])
def test_several_parts_in_a_layer_are_updated_alike(name):
    run = Run(BY_PART[name], layers(2))
    assert [len(unit.masters) for unit in run.units] == [1, 4, 2]
    assert_as_plain(run, BY_PART[name])


@pytest.mark.parametrize("name", NOT_BY_PART)
def test_an_update_that_is_not_element_wise_is_done_for_all_parts_at_once_with_a_warning(name):
    optimizer, reason = NOT_BY_PART[name]
    with pytest.warns(UserWarning, match=reason):
        run = Run(optimizer, layers())
    assert [unit.layers for unit in run.units] == [(0,), (1, 2, 3)]
    assert_as_plain(run, optimizer)


def test_a_joint_optimizer_updates_whole_parameters():
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    with pytest.warns(UserWarning, match="all parameters at once"):
        run = Run(optimizer, layers())
    assert [unit.layers for unit in run.units] == [(0, 1, 2, 3)]
    assert_as_plain(run, optimizer)


def test_pieces_are_cut_and_joined_along_their_axis_and_given_away_once():
    place, whole = make_placement(), np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    parts = [Part(i, 3, 1) for i in range(3)]
    pieces = Pieces({"a": stored_whole(jax.device_put(whole, place.host))}, place)
    cut = {part: pieces.take(("a", part)) for part in parts}
    for part, array in cut.items():
        np.testing.assert_array_equal(array, whole[:, part.number])
    again = pieces.take(("a", parts[0]))
    assert again is not cut[parts[0]] and again.unsafe_buffer_pointer() != cut[parts[0]].unsafe_buffer_pointer()
    stored = {"a": Stored(cut, whole.shape, whole.dtype)}
    np.testing.assert_array_equal(Pieces(stored, place).take(("a", None)), whole)
    other = Pieces(stored, place).take(("a", Part(1, 2, 0)))
    np.testing.assert_array_equal(other, whole[1])
