"""Training steps whose programs run in tiles: numerics, plans, memory, several devices."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
import models
from examples.llama import model as llama
from jaxferry.costs import backward_variant, forward_variant, partition_costs
from jaxferry.engine import Programs, RematVariants, lower_traced, trace_program
from jaxferry.errors import BudgetError
from jaxferry.modes import GradientPlace, Mode
from jaxferry.partition import host_stores, partition
from jaxferry.settings import own_settings
from jaxferry.step import ProgramKey, ProgramKind, Target
from jaxferry.transport import make_placement
from native.compile_for_gpu import compile_lowered, instructions, text
from native.cuda_library import cuda_library
from planned import assert_same_bits, plan_of, train
from slowly import slow, slow_cases

ADAMW, NUM_STEPS = optax.adamw(1e-3), 20
CUBLAS_BYTES = 2**25
"""What a product of cuBLASLt takes beside its operands, on an H200."""


@pytest.fixture(scope="module")
def gpt():
    """A model with a batch of eight rows."""
    task = models.mlp()
    return dataclasses.replace(task, batch=jax.random.randint(jax.random.key(1), (8, 33), 0, 128))


def test_losses_of_many_steps_are_those_of_one_tile(gpt):
    steps = (jaxferry.train_step(gpt.loss_fn, ADAMW, tiles=tiles) for tiles in (3, "off"))
    losses, others = (train(step, gpt, NUM_STEPS)[1] for step in steps)
    np.testing.assert_allclose(losses, others, rtol=1e-6)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("rows", "tiles"), [(2, 2), (1, 4)], ids=["along the batch", "along one row"])
def test_dropout_draws_the_masks_of_one_tile(rows, tiles):
    task = models.gpt(depth=1, dropout=0.3)
    task = dataclasses.replace(task, batch=task.batch[:rows])
    step, whole = (jaxferry.train_step(task.loss_fn, ADAMW, tiles=each) for each in (tiles, "off"))
    losses, others = (train(each, task, 3, rng=jax.random.key(7))[1] for each in (step, whole))
    np.testing.assert_allclose(losses, others, rtol=1e-6)
    assert not np.allclose(losses, train(whole, task, 3)[1], rtol=1e-3)


@pytest.fixture(scope="module")
def long_row():
    """A Llama whose batch is one row, with attention scores that are larger than all else."""
    config = llama.Config(2, 4, 2, 32, 64, max_length=512, vocab_size=64)
    batch = {"tokens": jax.random.randint(jax.random.key(1), (1, 513), 0, 64)}
    return models.Task(llama.make_loss(config), llama.make_init(config)(jax.random.key(0)), batch)


@pytest.mark.parametrize(
    "remat", ["none", jax.checkpoint_policies.dots_with_no_batch_dims_saveable], ids=["none", "dots"]
)
def test_one_long_row_trains_to_the_losses_of_plain_optax(long_row, remat):
    step = jaxferry.train_step(long_row.loss_fn, ADAMW, tiles=4, remat=remat)
    _, losses = train(step, long_row, 5)
    tilings = {each.name: each.tiling for each in step.prepare(long_row.batch).partition.segments if each.tiling}
    assert {(tiling.along, tiling.actual_tiles) for tiling in tilings.values()} == {("tokens", 4)}
    assert {"layers/0", "layers/1", "head"} <= set(tilings)
    plain = [loss for *_, loss in itertools.islice(models.plain_steps(long_row, ADAMW), 5)]
    np.testing.assert_allclose(losses, plain, rtol=1e-5)
    assert losses[-1] < losses[0]


def test_one_long_row_fits_where_its_scores_do_not_and_has_the_same_bits_each_time(long_row):
    with pytest.raises(BudgetError) as raised:
        in_budget(long_row, "off", 1)
    budget = raised.value.smallest_bytes // 2
    step, prepared = in_budget(long_row, "auto", budget)
    assert prepared.peak.total <= budget
    assert {layer.tiles for layer in prepared.plan.layers if layer.name.startswith("layers")} <= {4, 8}
    (state, losses), (other, again) = (train(step, long_row, 3) for _ in range(2))
    assert losses == again
    assert_same_bits(state.params, other.params)


def test_a_loss_of_which_no_trained_parameter_has_a_gradient_runs_in_tiles():
    def loss_fn(params, x):
        return jnp.mean(jnp.tanh(x @ params["first"] @ jax.lax.stop_gradient(params["last"])) ** 2)

    params = {"first": np.full((8, 8), 0.1, np.float32), "last": np.full((8, 8), 0.2, np.float32)}
    task = models.Task(loss_fn, params, np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8))
    trainable = {"first": False, "last": True}
    options = {"trainable": trainable, "policy": "native-overlapped", "profile": "estimate"}
    steps = [jaxferry.train_step(loss_fn, ADAMW, tiles=tiles, **options) for tiles in (2, "off")]
    (state, losses), (_, expected) = (train(step, task, 3) for step in steps)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert np.all(state.params["first"] == params["first"])


def test_evaluation_and_other_functions_run_in_tiles_too(gpt):
    step, whole = (jaxferry.train_step(gpt.loss_fn, ADAMW, tiles=tiles) for tiles in (3, "off"))
    states = [each.init(gpt.params) for each in (step, whole)]
    found, expected = (each.evaluate(state, gpt.batch) for each, state in zip((step, whole), states, strict=True))
    np.testing.assert_allclose(found, expected, rtol=1e-6)

    def rows(params, batch):
        return batch * jnp.sum(params["ln_f"]["scale"] ** 2)

    found, expected = (each.apply(state, rows, gpt.batch) for each, state in zip((step, whole), states, strict=True))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def in_budget(task, tiles, budget, **options):
    step = jaxferry.train_step(task.loss_fn, ADAMW, tiles=tiles, memory_budget=budget, remat="auto", **options)
    step.declare(task.params)
    return step, step.prepare(task.batch)


@pytest.fixture(scope="module")
def worded():
    """A model whose logits need the most memory."""
    task = models.mlp(vocab=4096, depth=2)
    return dataclasses.replace(task, batch=jax.random.randint(jax.random.key(1), (8, 33), 0, 4096))


@pytest.fixture(scope="module")
def least_bytes(worded):
    with pytest.raises(BudgetError) as raised:
        in_budget(worded, "off", 1)
    return raised.value.smallest_bytes


@pytest.fixture(scope="module")
def small(worded, least_bytes):
    return in_budget(worded, "auto", int(0.7 * least_bytes))


def test_a_step_fits_where_it_does_not_in_one_tile(small, least_bytes):
    _, prepared = small
    assert prepared.peak.total <= 0.7 * least_bytes
    segments = prepared.partition.segments
    tiles = {segment.name: segment.num_tiles for segment in segments}
    assert {
        use.name: layer.tiles for use, layer in zip(prepared.partition.uses, prepared.plan.layers, strict=True)
    } == tiles
    assert tiles[segments[-1].name] > 1


def test_it_trains_as_with_these_numbers_given_and_as_its_plan_read_from_a_file(worded, small, tmp_path):
    step, prepared = small
    prepared.plan.save(tmp_path / "plan.json")
    state, losses = train(step, worded, 5)
    tiles = {segment.name: segment.num_tiles for segment in prepared.partition.segments}
    same = jaxferry.train_step(worded.loss_fn, ADAMW, tiles=tiles, remat="auto", plan=prepared.plan)
    read = jaxferry.train_step(worded.loss_fn, ADAMW, remat="auto", plan=tmp_path / "plan.json")
    for other in (same, read):
        others, found = train(other, worded, 5)
        assert found == losses
        assert_same_bits(others.params, state.params)


def test_with_room_a_step_is_that_of_one_tile_to_the_bit(worded):
    step, prepared = in_budget(worded, "auto", "1GiB")
    assert all(segment.tiling is None for segment in prepared.partition.segments)
    whole = jaxferry.train_step(worded.loss_fn, ADAMW, remat="auto")
    assert train(step, worded, 3)[1] == train(whole, worded, 3)[1]


def test_a_policy_chooses_among_plans_in_tiles(worded, least_bytes):
    _, prepared = in_budget(worded, "auto", int(0.7 * least_bytes), policy="auto", profile="estimate")
    assert prepared.plan.layers[-1].tiles > 1 and prepared.peak.total <= 0.7 * least_bytes


@pytest.mark.parametrize("accumulate", [*slow(1), 2])
def test_gradients_that_programs_write_to_the_host_have_the_bits_of_others(gpt, accumulate, monkeypatch):
    monkeypatch.setattr(host_stores, "FUSED_BYTES", 2**8)
    options = {"compute_dtype": jnp.bfloat16, "clip_norm": 0.1, "accumulate": accumulate, "tiles": 3}
    states = []
    for place in (GradientPlace.HOST, GradientPlace.DEVICE):
        step = jaxferry.train_step(gpt.loss_fn, ADAMW, plan=plan_of(gpt, [Mode.RELOAD], [place]), **options)
        states.append(train(step, gpt, 4)[0].params)
    assert_same_bits(*states)


@functools.lru_cache(maxsize=8)
def compiled_for_gpu(parts, segment, kind, remat, tiles, target=Target.DEVICE):
    variants = RematVariants(parts, remat, tiles)
    key = ProgramKey(kind, variants.base.segments[segment].program, writes=(target,))
    with own_settings():
        is_native = key.writes_host and bool(cuda_library())
        traced = trace_program(variants.base, variants.derivatives, make_placement(), key, native=is_native)
        return compile_lowered(lower_traced(traced, "cuda"))


@pytest.fixture(scope="module")
def wide():
    """A model with large logits and hidden values, as shapes, in 16 bits."""
    task = models.gpt(vocab=8192, width=256, depth=1)
    batch = jax.ShapeDtypeStruct((128, 65), jnp.int32)
    return partition(task.loss_fn, jax.eval_shape(lambda: task.params), (batch,), compute_dtype=jnp.bfloat16)


@pytest.mark.parametrize(
    "number, kind, remat",
    [
        (-1, ProgramKind.LOSS, "none"),
        (2, ProgramKind.FORWARD, "none"),
        *slow_cases((2, ProgramKind.BACKWARD, "none")),
        (2, ProgramKind.BACKWARD, "full"),
    ],
)
def test_temporaries_of_a_gpu_are_those_of_a_tile_and_the_sums_of_gradients(wide, number, kind, remat):
    whole, tiled = (compiled_for_gpu(wide, number, kind, remat, tiles) for tiles in (1, 16))
    one, other = (each.get_compiled_memory_stats().temp_size_in_bytes for each in (whole, tiled))
    sizes = [wide.graph.avals[value].size for value in wide.segments[number].weights]
    sums_bytes = 0 if kind is ProgramKind.FORWARD else 4 * sum(sizes)
    of_tile = other - CUBLAS_BYTES - sums_bytes
    assert of_tile < (one - CUBLAS_BYTES) / 4
    assert other <= sums_bytes + CUBLAS_BYTES + one / 8
    loops = re.findall(r" while\(", text(tiled))
    assert len(loops) == 1


@pytest.mark.parametrize("kind", [*slow(ProgramKind.FORWARD), ProgramKind.BACKWARD])
def test_a_block_of_llama_8b_needs_on_a_gpu_what_is_estimated_for_one_row_of_131072_tokens(kind):
    """Without flash attention: the scores of all queries are 2 TiB."""
    config = dataclasses.replace(llama.SIZES["3-8b"], num_layers=1, attention="xla")
    params = jax.eval_shape(llama.make_init(config), jax.random.key(0))
    batch = {"tokens": jax.ShapeDtypeStruct((1, 2**17 + 1), jnp.int32)}
    parts = partition(llama.make_loss(config), params, (batch,), compute_dtype=jnp.bfloat16)
    costs = partition_costs(RematVariants(parts, "full", 2048).base, "full", temporaries=True)
    name = forward_variant(False) if kind is ProgramKind.FORWARD else backward_variant(False, False)
    stats = compiled_for_gpu(parts, 1, kind, "full", 2048).get_compiled_memory_stats()
    assert stats.temp_size_in_bytes < 6 * 2**30
    assert 0.95 < costs[1].temporary_bytes[name] / stats.temp_size_in_bytes < 1.05


@pytest.mark.parametrize("target", [*slow(Target.HOST), Target.HOST_SUM])
def test_a_gradient_that_a_gpu_writes_to_the_host_is_the_sum_and_has_no_copy(wide, target):
    compiled, other = (compiled_for_gpu(wide, -1, ProgramKind.LOSS, "none", 16, to) for to in (target, Target.DEVICE))
    [weight] = [wide.graph.avals[value] for value in wide.segments[-1].weights if wide.graph.avals[value].ndim > 1]
    entry = instructions(compiled)
    made = [i for i in entry if f"[{weight.shape[0]},{weight.shape[1]}]" in i.type and i.opcode != "parameter"]
    assert made and not [i for i in made if i.opcode in ("fusion", "copy", "convert") and i.type.startswith("bf16")]
    stats, others = compiled.get_compiled_memory_stats(), other.get_compiled_memory_stats()
    assert stats.host_temp_size_in_bytes == 0
    on_device = stats.temp_size_in_bytes - others.temp_size_in_bytes
    assert on_device < others.output_size_in_bytes / 2


@pytest.mark.cpu_device
def test_devices_share_each_tile_and_exchange_gradients_once_after_the_loop():
    """As XLA compiles the programs for two H200: tiles of each device's own rows, nothing is gathered."""
    task = models.mlp(depth=1)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    step = jaxferry.train_step(task.loss_fn, optax.sgd(0.1), mesh=mesh, tiles=2)
    step.declare(task.params)
    program = step.prepare(jax.random.randint(jax.random.key(1), (8, 17), 0, 128)).program
    programs = Programs(program.partition, program.derivatives, make_placement(mesh=mesh))
    lookup = program.partition.segments[0].program
    for key in dict.fromkeys(each.key for each in program.programs):
        compiled = text(compile_lowered(lower_traced(programs.traced(key), "cuda"), 2))
        entry = compiled[compiled.index("\nENTRY ") :]
        kinds = r" (all-gather|all-to-all|collective-permute|reduce-scatter|all-reduce)(?:-start)?\("
        if key.program != lookup:  # XLA adds up the devices' rows of a table in each tile (JAX 0.12)
            assert re.findall(kinds, compiled) == re.findall(kinds, entry), key
        assert not re.search(r" (all-gather|all-to-all|collective-permute)", compiled), key
        assert " while(" in entry
