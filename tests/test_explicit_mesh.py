"""A loss function under `jax.set_mesh` with explicit axes, JAX's default: as in a plain `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxferry
from models import Task, plain_loop
from slowly import slow_but

NAMES = ["a", "b", "c"]
ROWS = PartitionSpec("data")


def params():
    return {name: {"w": np.eye(16, dtype=np.float32) * (i + 1) / 2} for i, name in enumerate(NAMES)}


def batch():
    return np.linspace(-1, 1, 8 * 16, dtype=np.float32).reshape(8, 16)


def mesh(num, axis_type=AxisType.Explicit):
    return jax.sharding.Mesh(np.array(jax.devices("cpu")[:num]), ("data",), axis_types=(axis_type,))


def through(layer):
    """A loss of three layers, each through a function of the product and the weights."""

    def loss(params, x):
        for name in NAMES:
            x = layer(jnp.tanh(x @ params[name]["w"]), params[name]["w"])
        return jnp.mean(jax.nn.logsumexp(x, -1))

    return loss


def in_scan(x, w):
    body = lambda x, _: (jax.sharding.reshard(jnp.tanh(x @ w), ROWS), None)  # noqa: E731
    return jax.lax.scan(body, jax.sharding.reshard(x, ROWS), length=2)[0]


def in_cond(x, w):
    return jax.lax.cond(x[0, 0] > 0, lambda x: jax.sharding.reshard(x, PartitionSpec(None, None)), lambda x: 2 * x, x)


def of_gradient(x, w):
    inner = lambda x: jnp.sum(jnp.sin(jax.sharding.reshard(x @ w, ROWS)) * jax.sharding.reshard(2.0, PartitionSpec()))  # noqa: E731
    return x + jax.grad(inner)(x)


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (doubled(x), x.shape), lambda _, g: (2 * g,))

LAYERS = {
    "constraint": lambda x, w: jax.lax.with_sharding_constraint(x, PartitionSpec(None, None)),
    "reshard": lambda x, w: jax.sharding.reshard(x, ROWS),
    "reshard of a number": lambda x, w: jax.sharding.reshard(x, ROWS) * jax.sharding.reshard(2.0, PartitionSpec()),
    "reshard in a gradient": of_gradient,
    "reading the mesh": lambda x, w: x * (2 if "data" in jax.sharding.get_abstract_mesh().axis_names else 1),
    "constraint after reshard": lambda x, w: jax.lax.with_sharding_constraint(jax.sharding.reshard(x, ROWS), ROWS),
    "out_sharding": lambda x, w: jnp.einsum("ab,bc->ac", x, w, out_sharding=PartitionSpec(None, None)),
    "scan": in_scan,
    "cond": in_cond,
    "custom_vjp": lambda x, w: doubled(x),
    "checkpoint": lambda x, w: jax.checkpoint(in_scan)(x, w),
    "relu, dropout": lambda x, w: jax.nn.relu(x) * jax.random.bernoulli(jax.random.key(1), 0.9, x.shape),
}


ALIKE = ("reshard of a number", "constraint after reshard", "checkpoint", "relu, dropout")
"""What others have one by one."""


def losses(loss_fn, given, num=3, **options):
    step = jaxferry.train_step(loss_fn, optax.sgd(0.1), **options)
    state = step.init(params())
    return [float(step(state, given)[1]["loss"]) for _ in range(num)]


def plain_losses(loss_fn, given, num=3):
    return plain_loop(Task(loss_fn, params(), given), optax.sgd(0.1), num)[1]


@pytest.mark.parametrize(
    ("name", "num"),
    slow_but(
        [("reshard", 1), *((name, 2) for name in LAYERS if name not in ALIKE)],
        [*((name, 2) for name in LAYERS), *((name, 1) for name in ("reshard", "out_sharding", "scan", "cond"))],
    ),
)
def test_losses_are_those_of_a_plain_jit(name, num):
    loss_fn, own = through(LAYERS[name]), mesh(num)
    with jax.set_mesh(own):
        expected = plain_losses(loss_fn, batch())
        np.testing.assert_allclose(losses(loss_fn, batch()), expected, rtol=1e-5)
        np.testing.assert_allclose(losses(loss_fn, batch(), mesh=own), expected, rtol=1e-5)


def test_a_sharded_batch_has_its_sharding_in_its_type():
    def loss_fn(params, x):
        x = jax.lax.with_sharding_constraint(x, PartitionSpec("data", None))  # asserts it
        return through(LAYERS["reshard"])(params, x)

    own = mesh(2)
    with jax.set_mesh(own):
        given = jax.device_put(batch(), NamedSharding(own, ROWS))
        np.testing.assert_allclose(losses(loss_fn, given, mesh=own), plain_losses(loss_fn, given), rtol=1e-5)
        with pytest.raises(AssertionError) as expected:
            jax.jit(loss_fn)(params(), batch())
        with pytest.raises(AssertionError) as caught:
            losses(loss_fn, batch())
    assert str(caught.value) == str(expected.value)


def test_the_partitioning_of_an_nnx_model_needs_no_more_than_under_jit():
    own = mesh(2)
    with jax.set_mesh(own):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "data"))
        model = nnx.Sequential(*(nnx.Linear(16, 16, rngs=nnx.Rngs(i), kernel_init=init) for i in range(3)))
        graph, given = nnx.split(model)
        loss_fn = lambda params, x: jnp.mean(jax.sharding.reshard(nnx.merge(graph, params)(x), ROWS) ** 2)  # noqa: E731
        step = jaxferry.train_step(loss_fn, optax.sgd(0.1), mesh=own)
        _, metrics = step(step.init(given), batch())
        expected = float(jax.jit(loss_fn)(given, batch()))
    assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-5)


def test_evaluate_and_apply_trace_under_the_mesh_too():
    loss_fn = through(LAYERS["reshard"])
    with jax.set_mesh(mesh(1)):
        step = jaxferry.train_step(loss_fn, optax.sgd(0.1))
        state = step.init(params())
        expected = float(jax.jit(loss_fn)(params(), batch()))
        assert float(step.evaluate(state, batch())) == pytest.approx(expected, rel=1e-5)
        assert float(step.apply(state, lambda p, x: loss_fn(p, x), batch())) == pytest.approx(expected, rel=1e-5)


def test_what_needs_the_mesh_itself_is_refused_with_the_remedy():
    def loss_fn(params, x):
        own_rows = jax.shard_map(lambda x: jax.lax.psum(x, "data"), in_specs=ROWS, out_specs=PartitionSpec())
        return through(LAYERS["reshard"])(params, own_rows(jax.sharding.reshard(x, ROWS)))

    with (
        jax.set_mesh(mesh(1)),
        pytest.raises(jaxferry.InputError, match=r"explicit axes .* shard_map: .*AxisType\.Auto"),
    ):
        losses(loss_fn, batch())
