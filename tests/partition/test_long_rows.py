"""Programs in tiles along the tokens of one row, where attention mixes these, beside the same programs whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from chained import equations_of
from jaxferry.partition import CannotTile, InTiles, Rows, numbers_of_operands, trace
from jaxferry.settings import for_planned_gpu
from pairwise import pairwise
from slowly import slow_but

T, C, H, K, D = 48, 16, 4, 2, 8
"""Tokens, channels, heads, heads of keys and values, channels of a head."""
TOKENS = Rows(1)
RNG = np.random.default_rng(0)
SIZES = {"q": (C, H * D), "k": (C, K * D), "v": (C, K * D), "o": (H * D, C), "up": (C, 3 * C), "down": (3 * C, C)}
WEIGHTS = {name: jnp.asarray(0.3 * RNG.normal(size=size), jnp.float32) for name, size in SIZES.items()}
X = jnp.asarray(RNG.normal(size=(1, T, C)), jnp.float32)
G = jnp.asarray(RNG.normal(size=(1, T, C)), jnp.float32)
KEY = jax.random.key(3)


def rotated(z):
    angles = jnp.arange(z.shape[1])[:, None] * 10.0 ** -jnp.arange(D // 2)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(z.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(z.dtype)


def normed(x):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)


def grouped(q, k, v):
    """Each key is read by a group of queries."""
    return jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True, implementation="xla")


def repeated(q, k, v, rate=0.0):
    """Keys and values are repeated for their groups, the softmax is in fp32."""
    k, v = (jnp.repeat(z, H // K, 2) for z in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) / D**0.5
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -1e9)).astype(q.dtype)
    weights = (
        jnp.where(jax.random.bernoulli(KEY, 1 - rate, weights.shape), weights / (1 - rate), 0) if rate else weights
    )
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def dropped(q, k, v):
    return repeated(q, k, v, rate=0.3)


def linear(q, k, v):
    """No score is computed: queries meet the sum of all products of keys and values."""
    k, v = (jnp.repeat(jax.nn.elu(z) + 1, H // K, 2) for z in (k, v))
    return jnp.einsum("bthd,bhde->bthe", q, jnp.einsum("bshd,bshe->bhde", k, v)) / T


def block(attention):
    def run(x, w):
        q, k, v = (z.reshape(*z.shape[:2], -1, D) for z in (normed(x) @ w[name] for name in "qkv"))
        x = x + attention(q, k, v).reshape(*x.shape[:2], H * D) @ w["o"]
        return x + jax.nn.silu(normed(x) @ w["up"]) @ w["down"]

    return run


def pulled_back(function):
    return lambda x, w, g: jax.vjp(function, x, w)[1](g)


def backward_of_kept(x, w, g, q, k, v):
    """The backward of attention whose operands the forward has kept."""
    out, pullback = jax.vjp(lambda q, k, v: grouped(q, k, v).reshape(1, -1, H * D) @ w["o"], q, k, v)
    return out, pullback(g)


ROWS = (TOKENS, dict.fromkeys(WEIGHTS))
ATTENTIONS = {"grouped": grouped, "repeated": repeated, "dropout": dropped, "linear": linear}
NUM_LOOPS = {"grouped": (2, 3), "repeated": (2, 3), "dropout": (2, 3), "linear": (2, 3)}
KEPT = [jnp.asarray(RNG.normal(size=(1, T, n, D)), jnp.float32) for n in (H, K, K)]


def leaves(tree):
    return jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)


def program(name, is_backward, dtype=jnp.float32):
    """A program, its arguments, and the analysis."""
    function = block(ATTENTIONS[name])
    function, given, rows = (
        (pulled_back(function), (X, WEIGHTS, G), (*ROWS, TOKENS)) if is_backward else (function, (X, WEIGHTS), ROWS)
    )
    given = jax.tree.map(lambda leaf: leaf.astype(dtype), given)
    return function, given, InTiles(function, given, leaves(rows), T, stores=True)


def assert_near(found, expected, tolerance):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        other = np.asarray(other, np.float64)
        np.testing.assert_allclose(
            np.asarray(one, np.float64), other, rtol=tolerance, atol=tolerance * np.abs(other).max()
        )


TOLERANCES = {"float32": 2e-6, "bfloat16": 2e-2}
CASES = pairwise(ATTENTIONS, (False, True), TOLERANCES)
OFTEN = [case for case in CASES if case[1] != (case[0] == "dropout")]


@pytest.mark.parametrize(("name", "is_backward", "dtype"), slow_but(OFTEN, CASES))
def test_blocks_with_attention_compute_what_they_compute_whole_and_the_same_bits_each_time(name, is_backward, dtype):
    function, given, tiled = program(name, is_backward, dtype)
    assert tiled.num_loops == NUM_LOOPS[name][is_backward]
    for num_tiles in (5, T):
        run = jax.jit(tiled.run(num_tiles))
        found = run(*given)
        assert_near(found, jax.jit(function)(*given), TOLERANCES[dtype])
        for one, other in zip(jax.tree.leaves(run(*given)), jax.tree.leaves(found), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("is_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", ["grouped", "repeated"])
def test_no_product_is_computed_twice_and_no_score_exists_outside_a_tile(name, is_backward):
    function, given, tiled = program(name, is_backward)
    made = list(equations_of(jax.make_jaxpr(tiled.run(4))(*given).jaxpr))
    needed = trace(lambda given: function(*given), list(given), (), {}, is_derived=True).equations
    counts = [sum(eqn.primitive.name == "dot_general" for eqn in equations) for equations in (made, needed)]
    assert counts[0] == counts[1]
    assert max(v.aval.size for eqn in made for v in eqn.outvars) <= H * T * T // 4


def test_operands_that_are_kept_are_read_whole_at_once():
    given = (X, WEIGHTS, G, *KEPT)
    tiled = InTiles(backward_of_kept, given, leaves((*ROWS, *[TOKENS] * 4)), T, stores=True)
    assert tiled.num_loops == 1
    assert_near(jax.jit(tiled.run(3))(*given), backward_of_kept(*given), 2e-6)


def test_gradients_of_keys_and_values_are_sums_in_fp32():
    """Each of 512 queries adds 1 to the gradient of the only key; in bfloat16, 256 + 1 is 256."""
    ones = jnp.ones((1, 512, 1), jnp.bfloat16)

    def gradient(q, g):
        k = q * 1
        pullback = jax.vjp(lambda k: jnp.einsum("btd,bsd->bts", q, k[:, :1]), k[:, :1])[1]
        return pullback(g)[0]

    tiled = InTiles(gradient, (ones, ones), [TOKENS, TOKENS], 512, stores=True)
    assert float(jax.jit(tiled.run(512))(ones, ones)[0, 0, 0]) == 512


def test_compiled_temporaries_are_those_of_a_tile_beside_what_is_stored():
    x, function = jnp.ones((1, 1024, C)), pulled_back(block(grouped))
    tiled = InTiles(function, (x, WEIGHTS, x), leaves((*ROWS, TOKENS)), 1024, stores=True)
    sizes = [
        jax.jit(each).lower(x, WEIGHTS, x).compile().memory_analysis().temp_size_in_bytes
        for each in (function, tiled.run(16), tiled.run(32))
    ]
    score_bytes = 4 * H * 1024**2
    assert sizes[0] > 2 * score_bytes
    assert sizes[1] < sizes[0] / 8 and sizes[2] < sizes[1]


def test_what_a_loop_stores_takes_the_memory_of_a_donated_input_until_a_result_does():
    given = (X, WEIGHTS, G)
    run = InTiles(pulled_back(block(grouped)), given, leaves((*ROWS, TOKENS)), T, stores=True).run(
        4, [len(WEIGHTS) + 1]
    )
    jaxpr = jax.make_jaxpr(run)(*given).jaxpr
    loops = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("scan", "while")]
    donated = jaxpr.invars[-1]
    owners = [donated]
    for eqn in loops[1:]:
        assert eqn.invars.count(owners[-1]) == 1
        first, _ = numbers_of_operands(eqn.params)
        owners.append(eqn.outvars[eqn.invars.index(owners[-1]) - first])
    assert owners[-1] is jaxpr.outvars[0]
    assert_near(jax.jit(run)(*given), pulled_back(block(grouped))(*given), 2e-6)


def test_a_kernel_of_attention_runs_whole_between_loops():
    """By cuDNN, which this machine need not have: the program is traced, not run."""

    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    def loops(is_backward):
        function = block(attend)
        given = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (X, WEIGHTS, G))
        if is_backward:
            tiled = InTiles(pulled_back(function), given, leaves((*ROWS, TOKENS)), T, stores=True)
        else:
            given = given[:2]
            tiled = InTiles(function, given, leaves(ROWS), T, stores=True)
        names = [eqn.primitive.name for eqn in jax.make_jaxpr(tiled.run(4))(*given).jaxpr.eqns]
        return [name.split("_wrapper")[0] for name in names if name == "scan" or name.startswith("dot_product")]

    forward, backward = for_planned_gpu(lambda: (loops(False), loops(True)))
    assert forward == ["scan", "dot_product_attention_fwd", "scan"]
    assert backward == ["scan", "dot_product_attention_fwd", "scan", "dot_product_attention_bwd", "scan"]


def doubled_by_pallas(x):
    kernel = lambda x, out: out.__setitem__(..., 2 * x[...])  # noqa: E731
    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


REFUSED = {
    "an unknown kernel": (doubled_by_pallas, r"pallas_call\(.*\): there is no rule for it"),
    "a sum along the tokens so far": (lambda x: jnp.cumsum(x, 1), r"cumsum\(.*\): it works along the axis of the rows"),
    "a scan along the tokens": (lambda x: lax.scan(lambda c, y: (c + y, c), x[:, 0], x.swapaxes(0, 1)), "scans along"),
    "a callback": (lambda x: jax.debug.print("{}", x[0, 0]) or x, r"debug\w*\(.*\): it has side effects"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_tiled_names_the_equation_in_the_way(name):
    function, message = REFUSED[name]
    with pytest.raises(CannotTile, match=message):
        InTiles(function, (X,), [TOKENS], T, stores=True)


def test_what_only_moves_tokens_reads_them_whole():
    function = lambda x: jnp.sin(jnp.concatenate([jnp.cos(x)[:, 1:], x[:, :1]], 1)) + jnp.flip(x, 1)  # noqa: E731
    found = jax.jit(InTiles(function, (X,), [TOKENS], T, stores=True).run(5))(X)
    np.testing.assert_array_equal(found, jax.jit(function)(X))
