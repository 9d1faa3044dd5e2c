"""Scans over layers: one segment per iteration, or left whole with a note that explains why."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

import scanned
from chained import assert_same_derivative, parts_of
from jaxferry.partition import Stack, layers_by_path, leaf_paths, partition, print_table, stored_leaves
from scanned import DEPTH, WIDTH
from slowly import slow

X = jnp.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)


def blocks(parts):
    return [segment for segment in parts.segments if any(c.isdigit() for c in segment.name)]


@pytest.mark.parametrize("depth", [4, *slow(7)])
def test_the_number_of_programs_does_not_depend_on_depth(depth):
    parts = parts_of(scanned.linen(depth=depth))
    assert [s.name for s in parts.segments] == ["embed", *(f"layers/{i}" for i in range(depth)), "head"]
    assert parts.num_programs == 3 and not parts.notes
    assert {leaf.path for leaf in parts.layers[2].leaves if "fc" in leaf.path} == {
        "layers/1/fc/bias",
        "layers/1/fc/kernel",
    }


@pytest.mark.parametrize("config", [{"dropout": 0.1}, {"remat": True, "dropout": 0.1, "dtype": jnp.bfloat16}])
def test_iterations_with_dropout_and_remat_share_a_program(config):
    parts = parts_of(scanned.linen(**config), rng=jax.random.key(0))
    assert len(blocks(parts)) == DEPTH and parts.num_programs == 3
    residual_bytes = 2 * 5 * WIDTH * 4
    assert {segment.alive_bytes for segment in blocks(parts)} == {residual_bytes}


def test_a_scan_in_reverse_meets_its_layers_in_reverse():
    assert [s.name for s in blocks(parts_of(scanned.plain(reverse=True)))] == [f"blocks/{i}" for i in (3, 2, 1, 0)]


def step(x, own):
    return jnp.tanh(x @ own["w"]) + own["b"], None


def stacked(length=3, **others):
    keys = jax.random.split(jax.random.key(0), 2)
    own = {"w": jax.random.normal(keys[0], (length, WIDTH, WIDTH)), "b": jax.random.normal(keys[1], (length, WIDTH))}
    return {"blocks": own, **others}


def test_what_else_is_scanned_over_goes_with_its_iteration():
    """A large array of the batch, closed-over rates, results of an earlier scan; the results of a scan are used too."""
    rates, memory = np.linspace(0.5, 1, 3, dtype=np.float32), jnp.ones((3, 64, WIDTH))

    def loss(params, x, memory):
        def first(x, own):
            x = step(x, own)[0]
            return x, x

        def second(x, slices):
            own, kept, rate, remembered, number = slices
            return step(x * rate + kept, own)[0] + remembered.mean(0) * number, x.sum()

        x, kept = jax.lax.scan(first, x, params["blocks"])
        x, sums = jax.lax.scan(second, x, (params["others"], kept, rates, memory, jnp.arange(3)))
        return jnp.mean(x**2) + jnp.mean(sums * jnp.arange(3))

    params = stacked(others=stacked()["blocks"])
    parts = assert_same_derivative(loss, params, X, memory)
    assert [s.name for s in parts.segments] == [f"{name}/{i}" for name in ("blocks", "others") for i in range(3)]
    deeper = {name: jax.tree.map(lambda a: jnp.concatenate([a, a]), own) for name, own in params.items()}
    rates = np.concatenate([rates, rates])

    def deep(params, x, memory):
        def body(x, slices):
            own, rate, remembered, number = slices
            return step(x * rate, own)[0] + remembered.mean(0) * number, None

        return jnp.mean(jax.lax.scan(body, x, (params["blocks"], rates, memory, jnp.arange(6)))[0])

    made = partition(deep, {"blocks": deeper["blocks"]}, (X, jnp.concatenate([memory, memory])))
    assert len(made.segments) == 6 and made.num_programs == 3  # the first reads the batch, the last makes the loss


def test_layers_that_are_run_twice_are_segments_that_share_a_layer():
    def loss(params, x):
        x = jax.lax.scan(step, x, params["blocks"])[0]
        return jnp.mean(jax.lax.scan(step, x, params["blocks"], reverse=True)[0])

    parts = assert_same_derivative(loss, stacked(), X)
    assert [s.group for s in parts.segments] == [0, 1, 2, 2, 1, 0]


def test_a_scan_of_one_iteration_and_scans_within_scans_are_left_in_place():
    def loss(params, x):
        def outer(x, own):
            return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, own)[0], None

        x = jax.lax.scan(step, x, params["one"])[0]
        return jnp.mean(jax.lax.scan(outer, x, params["nested"]["w"])[0])

    nested = {"w": jax.random.normal(jax.random.key(3), (3, 2, WIDTH, WIDTH))}
    parts = assert_same_derivative(loss, {"one": stacked(1)["blocks"], "nested": nested}, X)
    assert [s.name for s in parts.segments] == ["one", "nested/0", "nested/1", "nested/2"]
    assert not parts.notes


def also(read):
    """A loss that scans over the blocks and also reads them in another way."""

    def loss(params, x):
        return jnp.mean(jax.lax.scan(step, x, params["blocks"])[0]) + read(params["blocks"])

    return loss


def in_common(params, x):
    def body(x, own):
        return jnp.tanh(x @ params["shared"]) + own, None

    return jnp.mean(jax.lax.scan(body, x, params["blocks"]["b"])[0])


def within_remat(params, x):
    return jnp.mean(jax.checkpoint(lambda own: jax.lax.scan(step, x, own)[0])(params["blocks"]))


@pytest.mark.parametrize(
    ("loss", "names", "reason"),
    [
        (also(lambda own: jnp.max(own["w"])), "'blocks/w'", "'reduce_max' reads all of it"),
        (also(lambda own: jnp.sum(own["b"] * jnp.mean(own["w"]))), "'blocks/b'", "'mul' combines it"),
        (in_common, "'blocks/b'", "share more parameters than each has of its own"),
        (within_remat, "'blocks/b', 'blocks/w'", "the scan lies inside"),
    ],
)
def test_what_cannot_be_cut_stays_whole_and_says_why(loss, names, reason):
    params = stacked(shared=jnp.eye(WIDTH))
    parts = assert_same_derivative(loss, params, X)
    whole = {leaf.path for layer in parts.layers for leaf in layer.leaves if leaf.part is None}
    assert all(name.strip("'") in whole for name in names.split(", "))
    [note] = parts.notes
    assert names in note and reason in note
    console = rich.console.Console(width=200, record=True, file=io.StringIO())
    print_table(parts, console)
    assert note in " ".join(console.export_text().split())


def test_only_what_cannot_be_cut_stays_whole():
    parts = partition(also(lambda own: jnp.max(own["b"])), stacked(), (X,))
    assert {leaf.path for layer in parts.layers for leaf in layer.leaves} == {
        "blocks/b",
        *(f"blocks/{i}/w" for i in range(3)),
    }
    assert [leaf.part is None for layer in parts.layers for leaf in layer.leaves].count(True) == 1


def test_a_later_loss_keeps_parts_and_joins_layers_that_it_cannot_read_by_part():
    params = stacked()
    first = partition(also(lambda own: 0.0), params, (X,))
    other = partition(also(lambda own: jnp.max(own["w"])), params, (X,), layers=first.layers)
    assert len(other.segments) == 1 and [leaf.index for leaf in other.layers[0].leaves] == list(range(6))
    whole = partition(also(lambda own: 0.0), params, (X,), layers=layers_by_path(params))
    assert len(whole.segments) == 1 and all(leaf.part is None for leaf in whole.layers[0].leaves)
    again = partition(also(lambda own: 0.0), params, (X[:1],), layers=first.layers)
    assert again.layers == first.layers


def test_scans_side_by_side_have_names_of_their_own():
    tree = {"a": 0, "b": 0, "c": 0, "m": {"w": 0}}
    cuts = {0: Stack(2, 0, 0), 1: Stack(2, 0, 0), 2: Stack(3, 1, 2), 3: Stack(2, 0, 3)}
    names = [leaf.path for leaf in stored_leaves(leaf_paths(tree), cuts)]
    assert names == [
        *("scan/0/a", "scan/1/a", "scan/0/b", "scan/1/b"),
        *("scan_2/0/c", "scan_2/1/c", "scan_2/2/c", "m/0/w", "m/1/w"),
    ]
