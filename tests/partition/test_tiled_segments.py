"""Segments of models in tiles, beside the same segments whole; and which of them the argument `tiles` names."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

import models
from jaxferry.errors import InputError
from jaxferry.partition import check_tiles, differentiate, forward_of, partition, print_table, with_tiles
from models import (
    convolutional,
    experts,
    heads,
    kernels,
    mixed_dtypes,
    random_streams,
    recurrent,
    rematerialised,
    shared,
)
from slowly import slow_but

QUICK = {
    "dropout": random_streams.gpt_dropout,
    "LSTM": recurrent.nnx_lstm,
    "BatchNorm": convolutional.nnx_resnet,
    "branches": experts.nnx_switch,
    "checkpoint": rematerialised.nnx_remat,
    "16 bits": mixed_dtypes.linen_mixed_dtypes,
}
SLOW = {
    "tied table": models.gpt,
    "custom derivatives": kernels.linen_custom_vjp,
    "LSTM and GRU": recurrent.linen_lstm,
    "one checkpoint": rematerialised.whole_model_checkpoint,
    "U-Net": convolutional.linen_unet,
    "one block four times": shared.linen_albert,
    "experts": experts.linen_dense_experts,
}
TOLERANCE = {"16 bits": 2e-2, "one row of 16 bits": 2e-2}


def one_row(make):
    """The task with a batch of one row."""
    task = make()
    return models.Task(task.loss_fn, task.params, jax.tree.map(lambda x: x[:1] if x.ndim > 1 else x, task.batch))


LONG = {
    "one row": models.gpt,
    "one row under a checkpoint": rematerialised.linen_remat,
    "one row with dropout": random_streams.gpt_dropout,
    "one row of 16 bits": mixed_dtypes.linen_mixed_dtypes,
    "one row, one block four times": shared.linen_albert,
}
OFTEN = ["dropout", "BatchNorm", "branches", "16 bits", "one row with dropout"]


def cut(task, tiles, remat="none"):
    parts = partition(task.loss_fn, task.params, (task.batch,))
    return parts, with_tiles(parts, tiles, [remat] * len(parts.segments))


def drawn(graph, values):
    generator = np.random.default_rng(0)

    def draw(aval):
        if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(3), int(np.prod(aval.shape))).reshape(aval.shape)
        if jnp.issubdtype(aval.dtype, jnp.floating):
            return jnp.asarray(generator.uniform(0.5, 1.5, aval.shape), aval.dtype)
        return jnp.asarray(generator.integers(0, 2, aval.shape), aval.dtype)

    return [draw(graph.avals[value]) for value in values]


def assert_close(found, expected, tolerance):
    leaves = [(jax.tree.leaves(one)) for one in (found, expected)]
    numeric = [
        [jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in one]
        for one in leaves
    ]
    arrays = [[np.asarray(x, np.float64) for x in one] for one in numeric]
    scale = max((float(np.abs(x).max(initial=0)) for x in arrays[1]), default=0)
    for a, b in zip(*leaves, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    for a, b in zip(*arrays, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * scale)


def run(function, *given):
    return models.quickly(function)(*given)


def ones(outputs):
    return jax.tree.map(jnp.ones_like, outputs)


@pytest.mark.parametrize("name", slow_but(OFTEN, [*QUICK, *LONG, *SLOW]))
def test_forward_backward_and_loss_of_each_segment_are_those_of_the_whole_batch(name):
    parts, tiled = cut(one_row(LONG[name]) if name in LONG else (QUICK | SLOW)[name](), 3)
    graph, tolerance, seen = parts.graph, TOLERANCE.get(name, 1e-4), set()
    for number, (whole, segment) in enumerate(zip(parts.segments, tiled.segments, strict=True)):
        if segment.tiling is None or segment.program in seen:
            continue
        seen.add(segment.program)
        given = [drawn(graph, values) for values in (segment.weights, segment.inputs, segment.nondiff_inputs)]
        one, other = (differentiate(graph, each, "none") for each in (whole, segment))
        if number == len(parts.segments) - 1:
            assert_close(
                run(lambda *x, d=other: d.both(ones, *x), *given),
                run(lambda *x, d=one: d.both(ones, *x), *given),
                tolerance,
            )
            continue
        outputs, _, saved = made = run(one.forward, *given)
        assert_close(run(other.forward, *given), made, tolerance)
        assert_close(run(forward_of(graph, segment), *given), made[:2], tolerance)
        if segment.runs_back:
            weights, inputs, others = given
            read = (
                [inputs[i] for i in one.inputs_read],
                [others[i] for i in one.nondiff_inputs_read],
                [outputs[i] for i in one.outputs_read],
            )
            arguments = (weights, *read, saved, drawn(graph, segment.outputs))
            assert_close(run(other.backward, *arguments), run(one.backward, *arguments), tolerance)
    assert seen


def test_blocks_share_their_programs_with_blocks_of_as_many_tiles():
    parts, tiled = cut(models.mlp(), {"h_1": 2, "h_2": 2})
    of = {segment.name: segment for segment in tiled.segments}
    assert of["h_1"].program == of["h_2"].program != of["h_0"].program
    assert {name: segment.tiling.actual_tiles for name, segment in of.items() if segment.tiling} == {"h_1": 2, "h_2": 2}
    assert [s for s in tiled.segments if not s.tiling] == [s for s in parts.segments if s.name not in ("h_1", "h_2")]


def test_what_cannot_be_tiled_stays_whole_and_the_table_names_the_operation_in_the_way():
    _, tiled = cut(heads.linen_multi_task(), 2)
    console = rich.console.Console(file=io.StringIO(), width=240)
    print_table(tiled, console)
    [line] = [line for line in console.file.getvalue().splitlines() if "contrast_head" in line]
    assert "dot_general(float32[4,8], float32[4,8]): it multiplies rows with rows" in line
    whole = {segment.name for segment in tiled.segments if segment.tiling is None}
    assert "contrast_head" in whole and len(whole) < len(tiled.segments)


def test_a_segment_that_is_named_and_cannot_be_tiled_is_an_error():
    message = r"tiles: 'contrast_head' cannot run in tiles: dot_general\(.*\): it multiplies rows with rows"
    with pytest.raises(InputError, match=message):
        cut(heads.linen_multi_task(), {"contrast_head": 2})


def test_unknown_names_and_numbers_below_one_are_refused():
    with pytest.raises(InputError, match="tiles names 'h_9', which is not a segment; use one of wte, "):
        cut(models.mlp(), {"h_9": 2})
    for wrong in (0, -1, True, 2.5, "many", None):
        with pytest.raises(InputError, match='tiles must be "off" or a number of tiles, 1 or more, or numbers by'):
            check_tiles(wrong)
    for wrong in (0, "auto"):
        with pytest.raises(InputError, match=r"tiles\['h_0'\] must be \"off\" or a number of tiles, 1 or more, got"):
            check_tiles({"h_0": wrong})
    assert check_tiles({"h_0": np.int32(2)}) == {"h_0": 2}


def tilings_of(task, tiles):
    _, tiled = cut(task, tiles)
    return {each.name: each.tiling and (each.tiling.along, each.tiling.actual_tiles) for each in tiled.segments}


def test_more_tiles_than_rows_are_along_the_tokens_where_these_can_be_tiled():
    task = models.gpt()
    rows, length = task.batch.shape[0], task.batch.shape[1] - 1
    tilings = tilings_of(task, 99)
    assert tilings["h_0"] == tilings["ln_f"] == tilings["wte#2"] == ("tokens", length)
    assert tilings["wte"] == ("batch", rows)
    recurrent_layers = tilings_of(recurrent.nnx_lstm(), 99)
    assert recurrent_layers["layers/0"][0] == "batch"
    assert set(tilings_of(task, rows).values()) == {("batch", rows)}


def test_a_batch_of_one_row_is_tiled_along_the_tokens_or_not_at_all():
    task = one_row(models.gpt)
    tilings = tilings_of(task, 2)
    assert tilings["wte"] is None
    assert tilings["h_0"] == tilings["wte#2"] == ("tokens", 2)
