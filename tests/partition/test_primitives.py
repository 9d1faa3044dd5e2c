"""Equations of every primitive that a rule names, with any number of results, also unused ones: counted and trained."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.experimental.layout import Layout, with_layout_constraint

import jaxferry
from chained import equations_of
from jaxferry.costs import counts, partition_costs, segment_costs
from jaxferry.modes import GradientPlace, Mode
from jaxferry.optimizer import replay
from jaxferry.partition import AUTO, cuts, derivatives, partition, rows
from jaxferry.step import LayerPlan, Plan
from models import Task, plain_loop
from planned import train
from slowly import slow_but

NAMES = ["a", "b", "c"]
X = np.linspace(-1, 1, 4 * 8, dtype=np.float32).reshape(4, 8)

UNARY = "abs acos asin asinh atan atanh cbrt ceil cos cosh erf erf_inv erfc exp exp2 expm1 floor log log1p logistic neg"
UNARY += " round rsqrt sign sin sinh sqrt square tan tanh cumlogsumexp cummax cummin cumprod cumsum"
BINARY = "add atan2 div max min mul pow rem sub"
COMPARED = "eq ge gt le lt ne"


def compared(name):
    return lambda y, w: (jnp.where(getattr(lax, name)(y, w[:4]), y, w[:4]),)


def on_bits(name):
    """Of the bits of rounded numbers, whose derivative is zero."""

    def case(y, w):
        first, second = ((10 * each).astype(jnp.int32) & 3 for each in (y, w[:4]))
        made = getattr(lax, name)(first) if name == "bitwise_not" else getattr(lax, name)(first, second)
        return (made * y,)

    return case


def reduced(name, of_bools=False):
    def case(y, w):
        made = getattr(lax, name)((w > 0.2) if of_bools else w, (0,))
        return (jnp.where(made, w[0], 0) if of_bools else made,)

    return case


def windows(reducer, init):
    return lambda y, w: (lax.reduce_window(lax.stop_gradient(w), init, reducer, (2, 2), (1, 1), "VALID") * y[0, 0],)


def scattered(way):
    return lambda y, w: (getattr(w.at[jnp.array([0, 2])], way)(y[:2], unique_indices=True),)


@jax.custom_jvp
def with_jvp(y, w):
    return y * 2, w * 3


@with_jvp.defjvp
def _(primals, tangents):
    return with_jvp(*primals), (tangents[0] * 2, tangents[1] * 3)


@jax.custom_vjp
def with_vjp(y, w):
    return y * 2, w * 3, y[0]


with_vjp.defvjp(lambda y, w: (with_vjp(y, w), None), lambda _, g: ((2 * g[0]).at[0].add(g[2]), 3 * g[1]))


def loop(y, w):
    return lax.fori_loop(0, 2, lambda _, carry: (carry[0] * 1.1, carry[1] + 1), (y, w[0]))


def unary(name):
    return lambda y, w: (getattr(lax, name)(y), getattr(lax, name)(0.1 + 0.5 * jax.nn.sigmoid(w)))


def binary(name):
    return lambda y, w: (getattr(lax, name)(y, w[:4]),)


SINGLE = {
    **{name: unary(name) for name in UNARY.split()},
    **{name: binary(name) for name in BINARY.split()},
    **{name: compared(name) for name in COMPARED.split()},
    **{name: on_bits(f"bitwise_{name}") for name in ("and", "or", "xor", "not")},
    **{name: on_bits(name) for name in ("shift_left", "shift_right_arithmetic", "shift_right_logical")},
    **{name: reduced(name) for name in ("reduce_max", "reduce_min", "reduce_prod", "reduce_sum")},
    **{name: reduced(name, of_bools=True) for name in ("reduce_and", "reduce_or", "reduce_xor")},
    "acosh": lambda y, w: (lax.acosh(1 + y),),
    "argmax": lambda y, w: (y[0] * jnp.argmax(w, 0),),
    "argmin": lambda y, w: (y[0] * jnp.argmin(w, 0),),
    "bitcast_convert_type": lambda y, w: (
        lax.bitcast_convert_type(lax.bitcast_convert_type(w, jnp.int32), jnp.float32),
    ),
    "broadcast_in_dim": lambda y, w: (lax.broadcast(w, (2,)), lax.broadcast(w[0, 0], (3, 3))),
    "clamp": lambda y, w: (lax.clamp(0.2, w, 0.7),),
    "concatenate": lambda y, w: (jnp.concatenate([y, w]),),
    "conv_general_dilated": lambda y, w: (lax.conv(y[None, None], w[None, None, :3, :3], (1, 1), "SAME"),),
    "convert_element_type": lambda y, w: (w.astype(jnp.bfloat16).astype(jnp.float32),),
    "copy": lambda y, w: (lax.copy_p.bind(w),),
    "layout_constraint": lambda y, w: (with_layout_constraint(w, Layout((0, 1))),),
    "dot_general": lambda y, w: (y @ w.T,),
    "dynamic_slice": lambda y, w: (lax.dynamic_slice(w, (jnp.argmax(y[0]), 0), (2, 8)),),
    "dynamic_update_slice": lambda y, w: (lax.dynamic_update_slice(w, y[:2], (jnp.argmax(y[0]), 0)),),
    "fft": lambda y, w: (jnp.abs(jnp.fft.fft(w)),),
    "gather": lambda y, w: (w[jnp.array([1, 3])], w[0][jnp.array([[1], [3]])]),
    "integer_pow": lambda y, w: (w**3,),
    "iota": lambda y, w: (w * lax.iota(jnp.float32, 8),),
    "is_finite": lambda y, w: (jnp.where(lax.is_finite(w), w, 0),),
    "name": lambda y, w: (checkpoint_name(w, "kept"),),
    "nextafter": lambda y, w: (lax.nextafter(lax.stop_gradient(y), lax.stop_gradient(w[:4])) * y,),
    "pad": lambda y, w: (jnp.pad(w, 1),),
    "real": lambda y, w: (lax.real(lax.complex(w, w)),),
    "reduce_precision": lambda y, w: (lax.reduce_precision(w, 8, 7),),
    "reduce_window": windows(lambda a, b: a * b * 1.0, np.float32(1)),
    "reduce_window_max": windows(lax.max, -np.inf),
    "reduce_window_min": windows(lax.min, np.inf),
    "reduce_window_sum": windows(lax.add, np.float32(0)),
    "reshape": lambda y, w: (w.reshape(4, 16),),
    "rev": lambda y, w: (w[::-1],),
    "scatter": scattered("set"),
    "scatter-add": scattered("add"),
    "scatter-sub": scattered("subtract"),
    "scatter-max": scattered("max"),
    "scatter-min": scattered("min"),
    "scatter-mul": scattered("multiply"),
    "select_n": lambda y, w: (jnp.where(y > 0.5, y, w[:4]),),
    "slice": lambda y, w: (w[1:3],),
    "squeeze": lambda y, w: (lax.squeeze(w[:1], [0]),),
    "stop_gradient": lambda y, w: (lax.stop_gradient(w) * y[0],),
    "transpose": lambda y, w: (w.T,),
}
"""Cases by primitive: functions of a value and a weight that return some results."""

SEVERAL = {
    "optimization_barrier": lambda y, w: lax.optimization_barrier((y, w, w.T)),
    "optimization_barrier of one": lambda y, w: lax.optimization_barrier((w,)),
    "optimization_barrier of none": lambda y, w: (w, *lax.optimization_barrier(())),
    "scan": lambda y, w: (lambda made: (*made[0], made[1]))(
        lax.scan(lambda c, row: ((c[0] * 1.1, c[1] + row), row * 2), (y, w[0]), w)
    ),
    "scan without results": lambda y, w: (
        w,
        lax.scan(lambda c, row: (c, jax.debug.callback(lambda a: None, row)), (), w)[1] or w[0],
    ),
    "while": lambda y, w: (*map(lax.stop_gradient, loop(y, w)), w[0]),
    "cond": lambda y, w: lax.cond(y[0, 0] > 0.5, lambda: (y * 2, w, w[0]), lambda: (y, w * 3, w[1])),
    "pjit": lambda y, w: jax.jit(lambda y, w: (y * 2, w + 1, w[0]))(y, w),
    "custom_jvp_call": with_jvp,
    "custom_vjp_call": with_vjp,
    "remat": lambda y, w: jax.checkpoint(lambda y, w: (jnp.tanh(y @ w), jnp.sin(w), w[0]))(y, w),
    "reduce": lambda y, w: tuple(
        lax.stop_gradient(each)
        for each in lax.reduce((w, w.T, w * 2), (0.0, 0.0, 0.0), lambda a, b: tuple(map(lax.add, a, b)), (0,))
    ),
    "sort": lambda y, w: lax.sort((w, w.T, w * 2), num_keys=1),
    "split": lambda y, w: lax.split(w, (2, 5, 1)),
    "top_k": lambda y, w: lax.top_k(w, 2),
    "cumsum of tuple": lambda y, w: lax.associative_scan(lambda a, b: (a[0] + b[0], a[1] * b[1]), (w, w.T)),
    "rng_bit_generator": lambda y, w: (w, lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (2,))[1] * 0.0),
    "debug callback": lambda y, w: (w, jax.debug.callback(lambda a: None, w) or w[0]),
    "ragged_dot": lambda y, w: (lax.ragged_dot(y, w[None], jnp.array([4])),),
    "linear solve": lambda y, w: (lax.custom_linear_solve(lambda v: 2 * v, w[0], lambda _, b: b / 2, symmetric=True),),
    "eigenvalues": lambda y, w: jnp.linalg.eigh(w + w.T + jnp.diag(jnp.arange(8.0))),
}
"""Equations with several results, one, or none."""

USED = {"all": slice(None), "first": slice(0, 1), "last": slice(-1, None)}


def loss_of(case, used=slice(None)):
    def loss_fn(params, x):
        for name in NAMES:
            y, w = 0.05 + 0.9 * jax.nn.sigmoid(x), params[name]["w"]
            made = [jnp.mean(each.astype(jnp.float32)) for each in case(y, w)[used]]
            x = jnp.tanh(x @ w + sum(made))
        return jnp.mean(x**2)

    return loss_fn


def params():
    own = np.random.default_rng(0)
    return {name: {"w": own.uniform(0.1, 0.9, (8, 8)).astype(np.float32)} for name in NAMES}


def plain_losses(loss_fn, num=3):
    return plain_loop(Task(loss_fn, params(), X), optax.sgd(0.1), num)[1]


def losses(loss_fn, num=3, **options):
    return train(jaxferry.train_step(loss_fn, optax.sgd(0.1), **options), Task(loss_fn, params(), X), num)[1]


def test_a_case_has_an_equation_of_its_primitive():
    for name, case in SINGLE.items():
        made = jax.make_jaxpr(case)(X, X[:, :8].repeat(2, 0))
        assert name in {eqn.primitive.name for eqn in equations_of(made.jaxpr)}, name


ELSEWHERE = segment_costs.ATTENTION | {"ffi_call", "custom_lin", "add_any", "copy_p", "expand_dims"}
ELSEWHERE |= {"select_and_gather_add", "select_and_scatter_add", "remat2", "checkpoint"}
"""Of cuDNN and of native calls, of derivatives, and other names of the same."""


def test_each_primitive_that_a_rule_names_has_a_case():
    named = counts.VIEWS | counts._FREE | counts._REDUCERS | counts._HEAVY | set(counts._FLOPS) | segment_costs._LOOPS
    named |= rows.ELEMENTWISE | derivatives._CHEAP | replay._SAME_ZEROS
    named |= {*cuts._REPEATING, *cuts._SELECTING, *cuts._INDIVISIBLE}
    assert named - ELSEWHERE <= {*SINGLE, *SEVERAL}


GROUPS = [("one result", "all", number) for number in range(6)]
GROUPS += [("several", used, number) for used in USED for number in range(4)]


def loss_of_group(kind, used, number):
    """A loss of every sixth case with one result, or of every fourth one with several, of which these are used."""
    cases = list(SINGLE.values())[number::6] if kind == "one result" else list(SEVERAL.values())[number::4]
    return loss_of(lambda y, w: [each for case in cases for each in case(y, w)[USED[used]]])


@pytest.mark.parametrize(
    ("kind", "used", "number"), slow_but([x for x in GROUPS if x[1] == "all" and x[2] % 2 == 0], GROUPS)
)
def test_counts_are_finite_and_no_rule_falls(kind, used, number):
    loss_fn = loss_of_group(kind, used, number)
    closed = jax.make_jaxpr(jax.value_and_grad(loss_fn))(params(), X)
    costs = counts.jaxpr_costs(closed)
    assert np.isfinite([costs.flops, costs.bytes]).all() and costs.flops > 0
    read = counts.host_reads(closed, range(3))
    assert read and all(np.isfinite([each.num_bytes, each.flops]).all() for each in read)
    assert segment_costs.temporary_bytes(closed) >= 0
    layers = partition_costs(partition(loss_fn, params(), (X,)), AUTO, temporaries=True)
    assert sum(layer.forward_flops for layer in layers) > 0


@pytest.mark.parametrize(
    ("kind", "used", "number"),
    slow_but([x for x in GROUPS if x[2] % 2 and (x[0] != "several" or x[1] == "last")], GROUPS),
)
def test_they_train_to_plain_jax_s_losses(kind, used, number):
    loss_fn = loss_of_group(kind, used, number)
    plan = Plan("any", 1.0, tuple(LayerPlan(name, Mode.DHA, GradientPlace.HOST) for name in NAMES))
    np.testing.assert_allclose(losses(loss_fn, plan=plan), plain_losses(loss_fn), rtol=2e-5)


PRINTED = {
    "an element": lambda p: p["b"]["w"][0, 0],
    "all layers' norm": lambda p: jnp.sqrt(sum(jnp.sum(each["w"] ** 2) for each in p.values())),
    "a stopped sum": lambda p: lax.stop_gradient(p["b"]["w"]).sum(),
    "a callback's result": lambda p: jax.pure_callback(
        lambda v: 2 * np.asarray(v), jax.ShapeDtypeStruct((), jnp.float32), lax.stop_gradient(p["b"]["w"][0, 0])
    ),
    "a layer": lambda p: p["a"]["w"],
}


WAYS = {
    "debug": jax.debug.callback,
    "debug, ordered": functools.partial(jax.debug.callback, ordered=True),
    "io, ordered": lambda see, v: io_callback(see, None, lax.stop_gradient(v), ordered=True),
}


@pytest.mark.parametrize(
    ("name", "way"),
    [*((name, "debug") for name in PRINTED), ("all layers' norm", "debug, ordered"), ("a layer", "io, ordered")],
)
def test_callbacks_see_what_is_made_of_parameters_as_in_plain_jax(name, way):
    seen, in_branch, plain = [], [], loss_of(lambda y, w: (w,))
    see, see_in_branch = (lambda v, to=to: to.append(float(np.sum(v))) for to in (seen, in_branch))

    def loss_fn(params, x):
        WAYS[way](see, PRINTED[name](params))
        lax.cond(x[0, 0] < 0, lambda v: jax.debug.callback(see_in_branch, v), lambda v: None, params["c"]["w"][0, 0])
        loss = plain(params, x)
        for printed in (params["c"]["w"], PRINTED[name](params)):
            WAYS[way](see, printed)
        return loss

    found = []
    for run in (plain_losses, losses):
        trained = run(loss_fn)
        jax.effects_barrier()
        found.append((list(seen) if "ordered" in way else sorted(seen), sorted(in_branch), trained))
        seen.clear(), in_branch.clear()
    for own, expected in zip(found[1], found[0], strict=True):
        np.testing.assert_allclose(own, expected, rtol=2e-5)


@pytest.mark.parametrize("name", ["optimization_barrier", "scan without results", "sort", "custom_jvp_call"])
def test_an_optimizer_of_such_equations_updates_as_plain_optax(name):
    def of_leaf(g):
        return g + sum(jnp.mean(each) for each in SEVERAL[name](g[:4], g)[1:])

    def update(gradients, state, params=None):
        return jax.tree.map(of_leaf, gradients), state

    optimizer = optax.chain(optax.GradientTransformation(lambda _: optax.EmptyState(), update), optax.sgd(0.1))
    loss_fn = loss_of(lambda y, w: (w,))
    task = Task(loss_fn, params(), X)
    state, _ = train(jaxferry.train_step(loss_fn, optimizer), task, 2)
    own, _ = plain_loop(task, optimizer, 2)
    for name in NAMES:
        np.testing.assert_allclose(state.params[name]["w"], own[name]["w"], rtol=1e-5, atol=1e-6)


def test_a_lookup_by_an_index_in_host_memory_reads_the_index():
    take = lambda table, index: lax.dynamic_slice_p.bind(table, index, index, slice_sizes=(2, 8))  # noqa: E731
    closed = jax.make_jaxpr(take)(jnp.ones((8, 8)), jnp.int32(0))
    [of_index], [of_table] = counts.host_reads(closed, [1]), counts.host_reads(closed, [0])
    assert (of_index.num_bytes, of_table.num_bytes) == (2 * 4, 2 * 8 * 4)
