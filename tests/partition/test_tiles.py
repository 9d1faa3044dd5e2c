"""Programs in tiles beside the same programs whole: one case for each rule of a primitive."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core

from chained import equations_of
from jaxferry.partition import CannotTile, InTiles, Rows

B, T, D = 6, 4, 8
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(B, T, D)), jnp.float32)
W = jnp.asarray(RNG.normal(size=(D, D)), jnp.float32)
IDS = jnp.asarray(RNG.integers(0, D, size=(B, T)))
IMAGE = jnp.asarray(RNG.normal(size=(B, 8, 8, 3)), jnp.float32)
KERNEL = jnp.asarray(RNG.normal(size=(3, 3, 3, 4)), jnp.float32)
KEY = jax.random.key(3)


def convolved(image, kernel):
    return lax.conv_general_dilated(image, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def recurrent(x, w):
    def step(carry, each):
        carry = jnp.tanh(each + carry @ w)
        return carry, carry

    last, states = lax.scan(step, jnp.zeros((x.shape[0], D)), x.swapaxes(0, 1))
    return last, states


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (3 * g,))


def normalised(x):
    mean = x.mean((0, 1))
    return (x - mean) / jnp.sqrt((x**2).mean((0, 1)) - mean**2 + 1e-3)


def dropped(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)


def weighed(x, ids):
    weights = (ids > 2).astype(jnp.float32)
    return ((x**2).sum(-1) * weights).sum() / weights.sum()


def attended(x):
    scores = jnp.einsum("btd,bsd->bts", x, x) + jnp.where(jnp.tril(jnp.ones((T, T), bool)), 0, -1e9)
    return jax.nn.softmax(scores) @ x


def entropy(x, w, ids):
    logits = (x @ w).reshape(-1, D)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), ids.reshape(-1, 1), -1).mean()


def chosen(x, w, number):
    return lax.switch(number, [lambda x: x @ w, lambda x: jnp.zeros_like(x), lambda x: x @ (2 * w)], x)


def both(function, *argnums):
    """The results of a function, and the gradients of the sum of their squares; of a scalar result, its own."""
    square = lambda leaf: jnp.sum(leaf * leaf) if leaf.ndim else leaf  # noqa: E731
    total = lambda *args: sum(map(square, jax.tree.leaves(function(*args))))  # noqa: E731
    return lambda *args: (function(*args), jax.grad(total, argnums or 0)(*args))


ROWS = Rows(0)
# Each case: a function, its arguments, and which of them have rows; by name.
CASES = {
    "elementwise": (lambda x: jnp.where(x > 0, jnp.sin(x), 3.0) * 2, (X,), (ROWS,)),
    "axes of size 1": (lambda x: x * x.mean((1, 2), keepdims=True), (X,), (ROWS,)),
    "reductions": (lambda x: (x.sum(0), x.max(0), x.min(0), (x > 0).all(0), (x > 2).any(0)), (X,), (ROWS,)),
    "reductions of rows": (lambda x: (x.sum(1), x.max(-1), jnp.argmax(x, 1), jnp.prod(x, 2)), (X,), (ROWS,)),
    "along other axes": (lambda x: (jnp.cumsum(x, 1), jnp.flip(x, 1), jnp.sort(x, -1), lax.top_k(x, 3)), (X,), (ROWS,)),
    "argsort": (lambda x: jnp.argsort(x, axis=1), (X,), (ROWS,)),
    "joins": (lambda x: (jnp.concatenate([x, 2 * x], 1), jnp.stack([x, x], 0), jnp.split(x, 2, 1)), (X,), (ROWS,)),
    "shapes": (lambda x: (x.reshape(-1, D).T, x.swapaxes(0, 1)[:, :, None], x[:, :1].squeeze(1)), (X,), (ROWS,)),
    "rows within the last axis": (lambda x: x.swapaxes(0, 1).reshape(T, -1) * 2, (X,), (ROWS,)),
    "rows not first": (lambda x: jnp.tanh(x).sum(0), (X.swapaxes(0, 1),), (Rows(1),)),
    "rows within an axis": (lambda x: x.reshape(B, T, D).sum(1), (X.reshape(-1, D),), (Rows(0, 1, T),)),
    "parts": (lambda x: (jnp.pad(x, ((0, 0), (1, 2), (0, 0))), x[:, 1:3], x[:, ::2], x[..., -1]), (X,), (ROWS,)),
    "repeated": (lambda x: jnp.tile(x, (1, 2, 1)), (X,), (ROWS,)),
    "parts by index": (
        lambda x: lax.dynamic_update_slice(x, lax.dynamic_slice(x, (0, 1, 0), (B, 2, D)), (0, 0, 0)),
        (X,),
        (ROWS,),
    ),
    "products": (both(lambda x, w: (x @ w, jnp.einsum("btd,btd->b", x, x)), 0, 1), (X, W), (ROWS, None)),
    "products from the right": (both(lambda x, w: jnp.einsum("de,bte->dbt", w, x), 0, 1), (X, W), (ROWS, None)),
    "convolution": (both(convolved, 0, 1), (IMAGE, KERNEL), (ROWS, None)),
    "windows": (
        both(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")),
        (IMAGE,),
        (ROWS,),
    ),
    "lookup": (both(lambda w, ids: w[ids]), (W, IDS), (None, ROWS)),
    "lookup in rows": (both(lambda x: x[:, jnp.array([2, 0, 2])]), (X,), (ROWS,)),
    "lookup by row": (both(lambda x, ids: jnp.take_along_axis(x, ids[..., None], 2)), (X, IDS), (ROWS, ROWS)),
    "decomposition": (lambda x: jnp.linalg.cholesky(x @ x.swapaxes(1, 2) + 9 * jnp.eye(T)), (X,), (ROWS,)),
    "scan": (both(recurrent, 0, 1), (X, W), (ROWS, None)),
    "branches": (both(chosen, 0, 1), (X, W, jnp.int32(2)), (ROWS, None, None)),
    "checkpoint": (both(jax.checkpoint(lambda x, w: jnp.sin(x @ w)), 0, 1), (X, W), (ROWS, None)),
    "custom derivative": (both(doubled), (X,), (ROWS,)),
    "mask and softmax": (both(attended), (X,), (ROWS,)),
    "labels seen whole": (both(entropy, 0, 1), (X, W, IDS), (ROWS, None, None)),
    "labels one-hot": (lambda x, ids: (jax.nn.one_hot(ids, D) * x).sum(), (X, IDS), (ROWS, None)),
    "dropout": (dropped, (X, KEY), (ROWS, None)),
    "dropout along another axis": (dropped, (X.swapaxes(0, 1), KEY), (Rows(1), None)),
    "dropout of few bits": (lambda x, k: x + jax.random.bits(k, x.shape, jnp.uint8), (X, KEY), (ROWS, None)),
    "weighed mean": (both(weighed), (X, IDS), (ROWS, ROWS)),
    "weighed mean of known weights": (both(weighed), (X, IDS), (ROWS, None)),
    "normalisation over the batch": (both(normalised), (X,), (ROWS,)),
    "one result is an input": (lambda x: (x, x + 1), (X,), (ROWS,)),
}
NUM_LOOPS = {"weighed mean": 2, "normalisation over the batch": 3}


def whole_and_tiled(name, num_tiles):
    function, arguments, rows = CASES[name]
    tiled = InTiles(function, arguments, rows, B)
    run = tiled.run(num_tiles)
    return jax.jit(function)(*arguments), jax.jit(run)(*arguments), tiled, jax.make_jaxpr(run)(*arguments)


@pytest.mark.parametrize(
    ("name", "num_tiles"), [*itertools.product(CASES, (4, 6)), ("elementwise", 2), ("products", 2), ("reductions", 2)]
)
def test_results_and_gradients_are_those_of_the_whole_program(name, num_tiles):
    whole, tiled, made, _ = whole_and_tiled(name, num_tiles)
    assert made.num_loops == NUM_LOOPS.get(name, 1)
    for expected, found in zip(jax.tree.leaves(whole), jax.tree.leaves(tiled), strict=True):
        assert (expected.shape, expected.dtype) == (found.shape, found.dtype)
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["dropout", "dropout along another axis", "dropout of few bits"])
def test_dropout_draws_the_masks_of_the_whole_program(name):
    whole, tiled, _, _ = whole_and_tiled(name, 3)
    np.testing.assert_array_equal(tiled, whole)


@pytest.mark.parametrize("name", ["products", "mask and softmax", "labels seen whole", "dropout"])
def test_a_tile_computes_its_own_rows_and_no_product_twice(name):
    function, arguments, _ = CASES[name]
    _, _, _, program = whole_and_tiled(name, 3)
    [loop] = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name in ("scan", "while")]
    assert loop.params["length"] == 3
    inside = list(equations_of(loop.params["jaxpr"].jaxpr))
    count = lambda eqns: sum(eqn.primitive.name == "dot_general" for eqn in eqns)  # noqa: E731
    assert count(equations_of(program.jaxpr)) == count(equations_of(jax.make_jaxpr(function)(*arguments).jaxpr))
    moved = ("dynamic_update_slice", "dynamic_slice")
    made = [v.aval.size for eqn in inside if eqn.primitive.name not in moved for v in eqn.outvars]
    assert max(made) <= max(X.size // 3, W.size)


@pytest.mark.parametrize("name", ["weighed mean", "normalisation over the batch", "scan", "labels seen whole"])
def test_only_loops_over_tiles_read_the_rows_of_inputs(name):
    rows = CASES[name][-1]
    _, _, _, program = whole_and_tiled(name, 3)
    of_rows = {v for v, at in zip(program.jaxpr.invars, rows, strict=True) if at is not None}
    assert len(of_rows) == sum(at is not None for at in rows) > 0
    others = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name not in ("scan", "while")]
    assert not [eqn for eqn in others if any(v in of_rows for v in eqn.invars if isinstance(v, core.Var))]


def test_a_last_smaller_tile_waits_for_the_loop():
    function, arguments = both(lambda x, w: jnp.tanh(x @ w), 0, 1), (X[:5], W)
    run = InTiles(function, arguments, (ROWS, None), 5).run(2)
    for expected, found in zip(jax.tree.leaves(function(*arguments)), jax.tree.leaves(run(*arguments)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-5)
    jaxpr = jax.make_jaxpr(run)(*arguments).jaxpr
    readers = [eqn for eqn in jaxpr.eqns if any(v in jaxpr.invars for v in eqn.invars if isinstance(v, core.Var))]
    assert [eqn.primitive.name for eqn in readers] == ["scan", "optimization_barrier"]
    assert not set(readers[0].outvars).isdisjoint(readers[1].invars)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_weight_that_a_loop_reads_again_and_again_has_its_gradient_in_16_bits(dtype):
    """Powers of 2 and small integers, whose sums are exact in these dtypes."""
    x, w = jnp.eye(B, D, dtype=dtype) * 2, jnp.eye(D, dtype=dtype)

    def function(x, w):
        return jax.grad(lambda w: lax.scan(lambda c, _: (c @ w, c.sum(0)), x, None, length=3)[0].sum())(w)

    found = jax.jit(InTiles(function, (x, w), (ROWS, None), B).run(2))(x, w)
    assert found.dtype == dtype and float(found.sum()) > 0
    np.testing.assert_array_equal(np.float32(found), np.float32(jax.jit(function)(x, w)))


def test_sums_of_16_bits_over_tiles_are_in_fp32():
    ones = jnp.ones((512, 1), jnp.bfloat16)

    def gradient(x):
        counts = jnp.zeros(2, x.dtype).at[x[:, 0].astype(int)].add(x[:, 0])
        return x.T @ x, x.sum(0, dtype=jnp.bfloat16), counts

    found = jax.jit(InTiles(gradient, (ones,), (ROWS,), 512).run(512))(ones)
    # In bfloat16, 256 + 1 is 256.
    assert [float(leaf.ravel()[-1]) for leaf in found] == [512, 512, 512]
    assert all(leaf.dtype == jnp.bfloat16 for leaf in found)


@pytest.mark.parametrize("donated", [False, True])
def test_results_take_donated_memory_only_where_no_later_tile_reads_it(donated):
    def function(x, y):
        return jnp.cos(x), x + y, x[:, ::-1] * y

    other = X[:, ::-1] * 2
    run = InTiles(function, (X, other), (ROWS, ROWS), B).run(3, (0, 1) if donated else ())
    for found, expected in zip(jax.jit(run)(X, other), (jnp.cos(X), X + other, X[:, ::-1] * other), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    if donated:
        compiled = jax.jit(run, donate_argnums=(0, 1)).lower(X, other).compile()
        assert compiled.memory_analysis().alias_size_in_bytes == 2 * X.nbytes


def test_donated_memory_that_each_tile_reads_whole_is_kept():
    def function(x, y):
        return 2 * x, jnp.einsum("btd,ctd->bc", x, y)

    run = InTiles(function, (X, X + 1), (ROWS, None), B).run(3, (1,))
    for found, expected in zip(jax.jit(run)(X, X + 1), function(X, X + 1), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def counted(count):
    """A loop that makes something of a sum over the rows in each iteration."""
    return lambda x: lax.scan(lambda c, y: (jnp.tanh(c * y), count(c * y)), x, jnp.arange(3.0))[1]


REFUSED = {
    "a rounded sum in a loop": (counted(lambda y: jnp.abs(y).sum().astype(int)), "it rounds a sum over the rows"),
    "a divided count in a loop": (counted(lambda y: lax.div((y > 0).sum(), 5)), "it rounds a sum over the rows"),
    "a sum in a loop as a flag": (counted(lambda y: y.sum().astype(bool)), "it rounds a sum over the rows"),
    "a sum along the rows so far": (lambda x: jnp.cumsum(x, 0), r"cumsum\(float32\[6,4,8\]\): it works along"),
    "rows times rows": (lambda x: x[:, 0] @ x[:, 0].T, r"dot_general\(.*\): it multiplies rows with rows"),
    "rows by index": (lambda x: x[jnp.array([1, 0])], r"gather\(.*\): an index picks rows"),
    "a part of the rows": (lambda x: x[1:], r"slice\(.*\): it takes a part of the rows"),
    "unknown": (lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x), r"while\(.*\): there is no rule"),
    "a choice by row": (lambda x: lax.cond(x[0, 0, 0] > 0, jnp.sin, jnp.cos, x), r": it takes a part of the rows"),
    "a callback": (lambda x: jax.debug.print("{}", x.sum()) or x, r"debug\w*\(.*\): it has side effects"),
    "three sums one after the other": (
        lambda x: normalised(normalised(normalised(x))),
        r": it needs 3 sums over all rows, one after the other",
    ),
    "a sum onto another one": (
        lambda x: lax.scan(lambda c, y: (c + y.sum(0), None), jnp.ones(D), x.swapaxes(0, 1))[0],
        "it adds to what was there before",
    ),
    "a scan along the rows": (lambda x: lax.scan(lambda c, y: (c + y, c), x[0] * 0, x), r"it takes a part|scans along"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_tiled_names_the_equation_in_the_way(name):
    function, message = REFUSED[name]
    with pytest.raises(CannotTile, match=message):
        InTiles(function, (X,), (ROWS,), B)


def test_any_choice_of_rows_is_right_or_refused():
    """A square value whose rows are not where they seem to be: no wrong result, whatever is taken for rows."""
    square = X[:, 0, :B]
    function = lambda x, y: ((x @ y).sum(), x.T * y, y[0])  # noqa: E731
    expected = function(square, 2 * square)
    count = 0
    for rows in [(Rows(a), b) for a in (0, 1) for b in (None, Rows(0), Rows(1))]:
        try:
            run = InTiles(function, (square, square), rows, B).run(2)
        except CannotTile:
            continue
        count += 1
        for found, own in zip(run(square, 2 * square), expected, strict=True):
            np.testing.assert_allclose(found, own, rtol=1e-5, atol=1e-5)
    assert count
