"""Which elements of a layer each of several processes or devices holds, without these."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxferry.partition import Ownership, RowGradient, Span, held_whole, keep_rows, make_layer, shared

SHAPES = [(), (5,), (3, 4), (0, 2), (7, 11)]


def layer_of(shapes=tuple(SHAPES), frozen=()):
    avals = [jax.ShapeDtypeStruct(shape, np.float32 if i % 2 else jnp.bfloat16) for i, shape in enumerate(shapes)]
    paths = [str(i) for i in range(len(shapes))]
    return make_layer("layer", range(len(shapes)), paths, avals, [np.dtype(np.float32)] * len(shapes), frozen)


def processes(num, num_own):
    return [Ownership(num * num_own, num_own, number * num_own) for number in range(num)]


@pytest.mark.parametrize(("num", "num_own"), [(3, 2), *(pytest.param(n, 1, marks=pytest.mark.slow) for n in (2, 9))])
def test_processes_hold_each_element_once_and_in_the_order_of_their_devices(num, num_own):
    layer, owners = layer_of(frozen={2}), processes(num, num_own)
    leaves = [np.arange(leaf.size, dtype=np.float32).astype(leaf.dtype) for leaf in layer.leaves]
    whole = layer.pack(leaves)
    rows = [[] for _ in whole]
    for own in owners:
        spans = [own.span(layer, leaf) for leaf in layer.leaves]
        vectors = own.of(layer).pack([span.of(leaf) for span, leaf in zip(spans, leaves, strict=True)])
        shares = own.to_shares(layer, [np.asarray(vector) for vector in vectors])
        backs = [np.zeros(vector.shape, vector.dtype) for vector in vectors]
        own.from_shares(layer, shares, backs)
        for back, vector in zip(backs, vectors, strict=True):
            np.testing.assert_array_equal(back, vector)
        assert own.num_host_bytes(layer) == sum(share.nbytes for share in shares)
        for found, share in zip(rows, shares, strict=True):
            found.extend(share)
    for i, leaf in enumerate(layer.leaves):
        spans = [own.span(layer, leaf) for own in owners]
        np.testing.assert_array_equal(np.concatenate([span.of(leaves[i]) for span in spans]), leaves[i])
    expected = owners[0].shared(layer).pack(leaves)
    for found, vector in zip(rows, expected, strict=True):
        np.testing.assert_array_equal(np.concatenate(found), vector)


@pytest.mark.parametrize("num", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=str)
def test_a_share_of_a_layer_holds_its_part_of_each_parameter(num, dtype):
    shapes = [(), (5,), (3, 4), (0, 2), (300, 301)]
    avals = [jax.ShapeDtypeStruct(shape, dtype if i % 2 else np.float32) for i, shape in enumerate(shapes)]
    paths = [str(i) for i in range(len(shapes))]
    layer = make_layer("layer", range(len(shapes)), paths, avals, [np.dtype(np.float32)] * len(shapes), frozen={2})
    leaves = [jnp.asarray(np.random.default_rng(i).normal(size=x.shape), x.dtype) for i, x in enumerate(avals)]
    there = shared(layer, num)
    vectors = there.pack(leaves)
    assert [(v.shape, v.dtype) for v in vectors] == [(v.shape, v.dtype) for v in there.vectors]
    for found, leaf in zip(there.unpack(vectors), leaves, strict=True):
        np.testing.assert_array_equal(found, leaf)
    joined = there.trained.join_small([leaves[i] for i, leaf in enumerate(layer.leaves) if leaf.is_trained])
    for found, vector in zip(there.trained.pack_joined(joined), vectors, strict=False):
        np.testing.assert_array_equal(found, vector)
    if num > 1:
        own, host = Ownership(num, num), [np.asarray(vector) for vector in layer.pack(leaves)]
        for found, vector in zip(own.to_shares(layer, host), vectors, strict=True):
            np.testing.assert_array_equal(found.reshape(-1), vector)
        rows = [np.asarray(vector).reshape(num, -1) for vector in vectors]
        found = [np.zeros(vector.shape, vector.dtype) for vector in host]
        own.from_shares(layer, rows, found)
        for back, vector in zip(found, host, strict=True):
            np.testing.assert_array_equal(back, vector)
        row = np.asarray(vectors[-1]).reshape(num, -1)
        assert row.shape[1] == sum(-(-leaf.size // num) for leaf in layer.leaves if leaf.vector == len(vectors) - 1)


def test_layers_held_whole_and_a_process_alone_are_not_cut():
    (whole,) = held_whole([layer_of()], {1})
    own = Ownership(4, 2, 2)
    assert own.of(whole) is whole and own.num_shares(whole) == 2
    assert own.shared(whole).num_devices == 2 and own.shared(layer_of()).num_devices == 4
    assert held_whole([whole], {9}) == (whole,)
    layer = layer_of()
    assert Ownership(4, 4).of(layer) is layer and Ownership().of(layer) is layer


TABLE = (6, 5)


def gradient_of(indices, **options):
    """The gradient of a lookup as rows, and as a table."""

    def backward(weights, cotangent):
        return jax.vjp(lambda table: table.at[indices].get(**options), weights[0])[1](cotangent)

    cotangent = jax.random.normal(jax.random.key(0), (*np.shape(indices), TABLE[1]))
    arguments = [[jnp.zeros(TABLE)], cotangent]
    kept, _ = keep_rows(lambda *given: (list(backward(*given)), []), arguments, 1)
    (rows,), _ = kept(*arguments)
    assert isinstance(rows, RowGradient)
    return rows, backward(*arguments)[0]


MODES = ("fill", "clip", "promise_in_bounds")
SLOW = [pytest.param(mode, start, marks=pytest.mark.slow) for mode in MODES for start in (0, 3, 5, 13, 29, 30)]


@pytest.mark.parametrize(("mode", "start"), [("fill", 13), *SLOW])
@pytest.mark.usefixtures("allowed_nans")  # out of range, "fill" reads NaN
def test_rows_are_added_to_the_elements_that_a_process_holds(start, mode):
    indices = np.array([1, 4, 4]) if mode == "promise_in_bounds" else np.array([1, 9, 4, 4, -9])
    rows, dense = gradient_of(jnp.asarray(indices), mode=mode)
    span = Span(start, min(start + 11, TABLE[0] * TABLE[1]))
    own = RowGradient(rows.indices, rows.rows, rows.scatter, rows.shape, rows.dtype, span)
    np.testing.assert_array_equal(own.onto(jnp.ones(span.size)), span.of(rows.onto(jnp.ones(TABLE))))
    np.testing.assert_allclose(rows.dense(), dense, rtol=1e-6)


def test_lookups_of_other_axes_leave_no_rows():
    def backward(weights, cotangent):
        return list(jax.vjp(lambda table: table[:, jnp.array([1, 3])], weights[0])[1](cotangent)), []

    assert keep_rows(backward, [[jnp.zeros(TABLE)], jnp.ones((TABLE[0], 2))], 1) is None
