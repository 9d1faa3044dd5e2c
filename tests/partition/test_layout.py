"""How the leaves of a layer lie in its flat vectors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxferry.partition import layout, make_layer

ODD = (1023, 1025)  # of 2.1 MB in bfloat16, no multiple of 128 bytes


def layer_of(shapes, dtypes=(jnp.bfloat16,), frozen=()):
    avals = [jax.ShapeDtypeStruct(shape, dtypes[i % len(dtypes)]) for i, shape in enumerate(shapes)]
    paths = [str(i) for i in range(len(shapes))]
    return make_layer("layer", range(len(shapes)), paths, avals, [np.dtype(np.float32)] * len(shapes), frozen)


@pytest.mark.parametrize("dtypes", [(jnp.bfloat16,), (jnp.bfloat16, np.float32)], ids=len)
@pytest.mark.parametrize("frozen", [(), {0, 3}], ids=["trained", "frozen"])
def test_matrices_are_aligned_without_gaps_and_trained_vectors_come_first(dtypes, frozen):
    shapes = [ODD, (7,), (1024, 1024), ODD, (301, 300), (768,), (2048, 513), ODD, (0, 3)]
    layer = layer_of(shapes, dtypes, frozen)
    in_vector = {}
    for leaf in layer.leaves:
        in_vector.setdefault(leaf.vector, []).append(leaf)
        if leaf.size * leaf.dtype.itemsize >= layout.MATRIX_BYTES:
            assert leaf.offset * leaf.dtype.itemsize % layout.ALIGNED_BYTES == 0
    for number, leaves in in_vector.items():
        leaves.sort(key=lambda leaf: (leaf.offset, leaf.size))
        assert [leaf.offset for leaf in leaves] == [0, *np.cumsum([leaf.size for leaf in leaves])[:-1]]
        assert {leaf.dtype for leaf in leaves} == {layer.vectors[number].dtype}
        assert len({leaf.is_trained for leaf in leaves}) == 1
    assert sorted(in_vector) == list(range(len(layer.vectors)))
    own = len(layer.trained.vectors)
    assert all(leaf.is_trained == (leaf.vector < own) for leaf in layer.leaves)


@pytest.mark.parametrize(("left_out", "num_writes"), [(None, 3), (2, 4)], ids=["whole", "gap"])
def test_small_neighbours_are_written_together_and_nothing_beside_them(left_out, num_writes):
    whole = layer_of([(300, 301), (3,), (4, 5), (200, 500), (7,), (2, 2)], [np.float32])
    assert [leaf.is_small for leaf in whole.leaves] == [False, True, True, False, True, True]
    layer = dataclasses.replace(whole, leaves=tuple(leaf for leaf in whole.leaves if leaf.index != left_out))
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=leaf.shape).astype(np.float32) for leaf in layer.leaves]
    [into] = [rng.normal(size=vector.size).astype(np.float32) for vector in whole.vectors]
    expected = into.copy()
    for leaf, array in zip(layer.leaves, arrays, strict=True):
        expected[leaf.offset : leaf.offset + leaf.size] = array.ravel()
    [made] = jax.jit(layer.pack)(arrays, [into])
    np.testing.assert_array_equal(made, expected)
    equations = jax.make_jaxpr(layer.pack)(arrays, [into]).eqns
    assert [each.primitive.name for each in equations].count("dynamic_update_slice") == num_writes


@pytest.mark.parametrize("shapes", [[(0, 3), (4,)], [(), (0,), (5,)], [(0,)]], ids=str)
def test_leaves_without_elements_are_packed_with_their_neighbours(shapes):
    layer = layer_of(shapes, [np.float32])
    arrays = [np.full(leaf.shape, number + 1, np.float32) for number, leaf in enumerate(layer.leaves)]
    into = [np.zeros(vector.size, np.float32) for vector in layer.vectors]
    made = jax.jit(layer.pack)(arrays, into)
    for leaf, array in zip(layer.leaves, arrays, strict=True):
        found = made[leaf.vector][leaf.offset : leaf.offset + leaf.size]
        np.testing.assert_array_equal(found.reshape(leaf.shape), array)
