import functools
import io
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich.console

import jaxferry
import models
from chained import assert_same_derivative, parts_of
from jaxferry.partition import RowGradient, differentiate, evaluate, group_leaves, leaf_paths, partition, print_table
from models import experts, rematerialised
from planned import train


def test_twelve_blocks_are_16_segments_of_5_programs_and_a_tied_table_is_one_layer():
    parts = parts_of(models.gpt(depth=12))
    blocks = [f"h_{i}" for i in range(12)]
    assert [s.name for s in parts.segments] == ["wte", "wpe", *blocks, "ln_f", "wte#2"]
    assert [layer.name for layer in parts.layers] == ["wte", "wpe", *blocks, "ln_f"]
    assert parts.segments[0].group == parts.segments[-1].group
    assert parts.num_programs == 5
    assert len({s.program for s in parts.segments if s.name in blocks}) == 1


def test_nnx_models_are_cut_by_their_lists_of_modules():
    task = models.nnx_net()
    parts = assert_same_derivative(task.loss_fn, task.params, task.batch)
    assert [s.name for s in parts.segments] == ["embed", "blocks/0", "blocks/1", "blocks/2", "head"]
    assert parts.num_programs == 3


class Wrapped(nn.Module):
    """A block under nn.remat, with a custom_vjp and a nested jit."""

    num_heads: int
    dropout: float
    dtype: object

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.remat(models.Block, static_argnums=(2,))(self.num_heads, name="inner")(x, train)
        return x + jax.jit(clipped)(nn.Dense(x.shape[-1], name="extra")(x))


@jax.custom_vjp
def clipped(x):
    return jnp.clip(x, -1, 1)


clipped.defvjp(lambda x: (jnp.clip(x, -1, 1), None), lambda _, g: (2 * g,))


def test_nested_jit_custom_vjp_and_remat_work_and_share_programs():
    task = models.gpt(block=Wrapped, depth=3)
    parts = assert_same_derivative(jax.jit(task.loss_fn), task.params, task.batch)
    assert [s.name for s in parts.segments[2:5]] == ["h_0", "h_1", "h_2"]
    assert parts.num_programs == 5


def test_a_head_with_a_bias_is_one_segment_because_the_cut_would_carry_all_logits():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(4096, 8, name="embed")
            x = embed(tokens)
            for i in range(3):
                x = x + nn.Dense(8, name=f"dense_{i}")(x)
            return embed.attend(x) + self.param("bias", nn.initializers.zeros, (4096,))

    tokens = jnp.arange(32).reshape(2, 16)
    params = Net().init(jax.random.key(0), tokens)["params"]
    parts = assert_same_derivative(
        lambda p, t: nn.log_softmax(Net().apply({"params": p}, t))[..., 0].mean(), params, tokens
    )
    assert {layer.name for layer in parts.layers} >= {"dense_0", "dense_1", "dense_2"}
    assert any({leaf.path for leaf in layer.leaves} == {"bias", "embed/embedding"} for layer in parts.layers)


def test_integer_and_boolean_values_cross_segments_without_a_derivative():
    def loss_fn(params, batch):
        h = batch["x"] @ params["a"]
        mask, rank = h > 0, jnp.argsort(h, axis=-1)
        y = jnp.tanh(h) @ params["b"]
        return jnp.where(mask, y, 0).sum() + jnp.take_along_axis(y @ params["c"], rank, -1)[:, 0].sum()

    keys = jax.random.split(jax.random.key(0), 3)
    params = {n: jax.random.normal(k, (6, 6)) for n, k in zip("abc", keys, strict=True)}
    parts = assert_same_derivative(loss_fn, params, {"x": jnp.ones((2, 6)) * 0.3, "unused": jnp.arange(3)})
    assert parts.segments[1].nondiff_outputs


def test_residuals_kept_are_no_more_bytes_than_jax_keeps():
    parts = parts_of(models.gpt())
    block = parts.segments[2]

    def forward(weights, inputs):
        return block.forward(weights, inputs, [])[0]

    arguments = [
        [jnp.zeros(a.shape) for a in (parts.graph.avals[v] for v in vs)] for vs in (block.weights, block.inputs)
    ]
    pullback = jax.vjp(forward, *arguments)[1]
    weights = {w.shape for w in arguments[0]}
    theirs = sum(leaf.nbytes for leaf in jax.tree.leaves(pullback) if leaf.shape not in weights)
    ours = differentiate(parts.graph, block)
    assert ours.saved_bytes + sum(parts.graph.num_bytes(block.inputs[i]) for i in ours.inputs_read) < 0.5 * theirs


def test_the_table_shows_every_segment():
    parts = parts_of(models.gpt())
    console = rich.console.Console(width=100, record=True, file=io.StringIO())
    print_table(parts, console)
    text = console.export_text()
    for segment in parts.segments:
        layer = parts.layers[segment.group]
        assert any(
            segment.name in line
            and f"{layer.num_parameters:,}" in line
            and line.rstrip(" │").endswith(str(segment.program))
            for line in text.splitlines()
        ), segment.name
    assert f"{len(parts.segments)} segments, {len(parts.layers)} layers, {parts.num_programs} programs" in text


def test_layers_that_cannot_be_apart_are_one_and_say_why():
    parts = parts_of(rematerialised.whole_model_checkpoint())
    (merge,) = parts.merges
    assert set(merge.layers) == {"h_0", "h_1", "h_2", "ln_f", "wpe", "wte"} and merge.is_forced
    assert "jax.checkpoint" in merge.message and parts.coarse_merges == parts.merges
    console = rich.console.Console(width=300, record=True, file=io.StringIO())
    print_table(parts, console)
    assert merge.message in console.export_text()
    task = experts.nnx_switch()
    assert [merge.is_forced for merge in parts_of(task).merges] == [True, False]
    with pytest.warns(UserWarning, match="a branch is chosen only while the program runs"):
        train(jaxferry.train_step(task.loss_fn, optax.sgd(0.1)), task, 1)


def names(tree, tables=()):
    return [group.name for group in group_leaves(leaf_paths(tree), tables)]


@pytest.mark.parametrize("blocks", [["block", "block_1", "block_2"], ["block_0", "block_1", "block_2"]], ids=str)
@pytest.mark.parametrize("granularity", ["block", "module"])
def test_flat_names_of_modules_are_cut_into_blocks_as_nested_ones(blocks, granularity):
    """Haiku names a module by its whole path, and numbers the second one of a class first."""
    modules = ["layer_norm", "attention/query", "attention/linear", "linear", "linear_1"]
    paths = ["transformer/~/embed", *(f"transformer/{b}/{m}" for b in blocks for m in modules), "transformer/linear"]
    flat = {path: {"w": np.eye(16, dtype=np.float32), "b": np.zeros(16, np.float32)} for path in paths}
    nested = {}
    for path, module in flat.items():
        *above, last = path.split("/")
        functools.reduce(lambda node, key: node.setdefault(key, {}), above, nested)[last] = module

    def loss_of(module_of):
        def loss_fn(params, x):
            for path in paths:
                module = module_of(params, path)
                x = x + jnp.tanh(x @ module["w"] + module["b"])
            return jnp.mean(x**2)

        return loss_fn

    def of_nested(params, path):
        return functools.reduce(lambda node, key: node[key], path.split("/"), params)

    x = np.ones((4, 16), np.float32)
    found = partition(loss_of(lambda params, path: params[path]), flat, (x,), granularity=granularity)
    expected = partition(loss_of(of_nested), nested, (x,), granularity=granularity)
    assert [segment.name for segment in found.segments] == [segment.name for segment in expected.segments]
    assert {layer.name for layer in found.layers} == {layer.name for layer in expected.layers}
    assert len(found.segments) == 5


def test_a_later_partition_keeps_the_layers_of_an_earlier_one():
    task = models.gpt()
    first = parts_of(task)
    other = partition(task.loss_fn, task.params, (task.batch[:1, :5],), layers=first.layers)
    assert other.layers == first.layers
    assert all(a.group <= b.group for a, b in itertools.pairwise(other.segments[:-1]))


def test_the_gradient_of_a_lookup_is_its_rows_and_adds_repeated_ones():
    table = jax.random.normal(jax.random.key(0), (50, 4))
    tokens = jnp.array([[3, 3, 7], [49, 3, 0]])

    def loss_fn(params, batch):
        return jnp.sin(jnp.take(params["table"], batch, axis=0) @ params["head"]).sum()

    params = {"table": table, "head": jnp.ones((4, 3))}
    parts = assert_same_derivative(loss_fn, params, tokens)
    lookup = parts.segments[0]
    derivative = differentiate(parts.graph, lookup)
    values = {**parts.graph.constants, parts.graph.batch[0]: tokens}
    evaluate(parts.prelude, values)
    nondiff_inputs = [values[lookup.nondiff_inputs[i]] for i in derivative.nondiff_inputs_read]
    cotangent = jnp.ones(parts.graph.avals[lookup.outputs[0]].shape)
    (gradient,), _ = derivative.backward([table], [], nondiff_inputs, [], [], [cotangent])
    assert isinstance(gradient, RowGradient)
    assert gradient.rows.size < table.size
    counts = np.bincount(np.asarray(tokens).ravel(), minlength=50)
    np.testing.assert_array_equal(gradient.dense(), np.repeat(counts[:, None], 4, axis=1))
    np.testing.assert_allclose(gradient.onto(table), np.asarray(table) + counts[:, None], rtol=1e-6)


def test_a_short_table_keeps_a_dense_gradient():
    def loss_fn(params, batch):
        return jnp.take(params["table"], batch, axis=0).sum() * params["scale"].sum()

    params = {"scale": jnp.ones(2), "table": jnp.ones((3, 4))}
    parts = assert_same_derivative(loss_fn, params, jnp.arange(12) % 3)
    for segment in parts.segments:
        gradients, _ = jax.eval_shape(
            differentiate(parts.graph, segment).backward,
            *differentiate(parts.graph, segment).backward_arguments(parts.graph),
        )
        assert not any(isinstance(gradient, RowGradient) for gradient in gradients)
