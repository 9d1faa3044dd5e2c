"""The programs of a training step, compiled for an H200 on any machine."""

import dataclasses
import functools
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
import model as gpt2
from jaxferry.engine import derivatives_of, lower_traced, trace_program
from jaxferry.modes import BLOCK, MODULE, GradientPlace, Mode
from jaxferry.partition import host_stores, partition
from jaxferry.settings import own_settings
from jaxferry.step import LayerPlan, Plan, ProgramKind, Source, Target, program_keys
from jaxferry.transport import Ferry, make_placement
from native.compile_for_gpu import compile_lowered, copied_after_stores, host_compute, instructions, text
from native.cuda_library import cuda_library
from slowly import slow

CONFIG = gpt2.Config(num_layers=2, num_heads=4, channels=256, max_length=128, vocab_size=4096)


@dataclasses.dataclass(frozen=True)
class Model:
    """A partitioned GPT-2 in 16 bits, made of shapes only."""

    parts: object
    derivatives: dict
    compiled: dict = dataclasses.field(default_factory=dict)

    def uses(self, mode, place):
        """The distinct programs of a step."""
        layers = tuple(LayerPlan(segment.name, mode, place) for segment in self.parts.segments)
        return list(dict.fromkeys(program_keys(self.parts, self.derivatives, Plan("any", 1.0, layers))))

    def trace(self, use, native=True):
        return trace_program(self.parts, self.derivatives, make_placement(), use, native)

    def compile(self, use, native=True):
        """Compiles a program, once for all tests."""
        if (use, native) not in self.compiled:
            self.compiled[use, native] = compile_lowered(lower_traced(self.trace(use, native), "cuda"))
        return self.compiled[use, native]

    def layer(self, use):
        return self.parts.layers[self.derivatives[use.program].segment.group]


@functools.cache
def make_model(config, granularity, dtype):
    params = jax.eval_shape(gpt2.make_init(config), jax.random.key(0))
    batch = {"tokens": jax.ShapeDtypeStruct((2, config.max_length + 1), np.int32)}
    settings = {"compute_dtype": dtype, "granularity": granularity}
    parts = partition(gpt2.make_loss(config), params, (batch,), **settings)
    return Model(parts, derivatives_of(parts, "none"))


@pytest.fixture(scope="module", autouse=True)
def engine_settings():
    """Programs that tests lower by themselves donate as in a step."""
    with own_settings():
        yield


@pytest.fixture(scope="module")
def model():
    cuda_library()
    return make_model(CONFIG, BLOCK, jnp.bfloat16)


@pytest.fixture(scope="module")
def direct(model):
    """Every program of a step in which all layers are DHA and all gradients GO, by its key."""
    with pytest.MonkeyPatch.context() as patch:
        # Lowers the threshold for panels, which this small model's gradients would not reach.
        patch.setattr(host_stores, "FUSED_BYTES", 2**16)
        own = dataclasses.replace(model, compiled={})
        return {use: own.compile(use) for use in own.uses(Mode.DHA, GradientPlace.HOST)}


def readers(executable, value):
    return [i for i in instructions(executable) if value in i.operands]


def test_programs_read_host_memory_by_operations_alone_and_copy_nothing_of_it(direct):
    seen = set()
    for use, executable in direct.items():
        for parameter in (i for i in instructions(executable) if i.opcode == "parameter" and i.is_on_host):
            found = {reader.target for reader in readers(executable, parameter.name)}
            assert found and all(target and target.startswith("jaxferry_") for target in found), (use, found)
            seen |= found
        assert not host_compute(executable)
    assert seen >= {"jaxferry_dha_gather", "jaxferry_dha_matmul", "jaxferry_dha_read"}


def test_every_program_that_should_read_host_memory_does(direct):
    for use, executable in direct.items():
        on_host = [i for i in instructions(executable) if i.opcode == "parameter" and i.is_on_host]
        expected = (Source.HOST in use.reads) + use.writes_host
        assert len(on_host) == expected, use


def test_backwards_return_the_gradient_vector_that_they_were_given(direct):
    written = [use for use in direct if use.kind is not ProgramKind.FORWARD and use.writes_host]
    assert {use.kind for use in written} == {ProgramKind.LOSS, ProgramKind.BACKWARD}
    for use in written:
        stats = direct[use].get_compiled_memory_stats()
        first = text(direct[use]).splitlines()[0]
        assert "{0}: (0, {}, may-alias)" in first or "{}: (0, {}, may-alias)" in first, first
        stores = [i for i in instructions(direct[use]) if i.is_on_host and i.opcode == "custom-call"]
        assert stores and all(i.target in ("jaxferry_gradient_store", "jaxferry_dha_matmul_gradient") for i in stores)
        assert stats.host_alias_size_in_bytes == stats.host_output_size_in_bytes > 0
        assert stats.host_temp_size_in_bytes == 0


def test_gradients_of_products_are_never_whole_on_the_device(direct, model):
    (use,) = [u for u in direct if u.kind is ProgramKind.LOSS]
    table = model.layer(use).leaves[0].shape
    assert any(i.target == "jaxferry_dha_matmul_gradient" for i in instructions(direct[use]))
    made = [i for i in instructions(direct[use]) if f"[{table[0]},{table[1]}]" in i.type]
    assert made == []


@pytest.mark.parametrize("kind", [ProgramKind.FORWARD, ProgramKind.BACKWARD])
def test_a_program_that_waits_for_its_load_and_queues_its_store_copies_neither(model, kind):
    blocks = statistics.mode(segment.program for segment in model.parts.segments)
    plain = next(u for u in model.uses(Mode.GFGB, GradientPlace.DEVICE) if u.kind is kind and u.program == blocks)
    stores, layer = kind is ProgramKind.BACKWARD, model.layer(plain)
    compiled = {use: model.compile(use) for use in (plain, dataclasses.replace(plain, arrives=True, stores=stores))}
    alone, joined = (executable.get_compiled_memory_stats() for executable in compiled.values())
    executable = list(compiled.values())[1]
    # More is a table of the results' addresses.
    assert joined.temp_size_in_bytes - alone.temp_size_in_bytes < 1024
    assert joined.alias_size_in_bytes - alone.alias_size_in_bytes == layer.num_bytes
    assert joined.host_alias_size_in_bytes == joined.host_output_size_in_bytes == stores * layer.num_bytes
    targets = [i.target for i in instructions(executable) if (i.target or "").startswith("jaxferry_ferry")]
    assert targets.count("jaxferry_ferry_wait") == 1 + stores and targets.count("jaxferry_ferry_store") == stores
    assert copied_after_stores(executable) == []


def reached(executable, start, stops):
    """The opcodes of all that an instruction is computed from, without looking behind the instructions `stops`."""
    known = {i.name: i for i in instructions(executable)}
    seen, left = set(), [start]
    while left:
        name = left.pop()
        if name not in seen and name not in stops:
            seen.add(name)
            left += known[name].operands
    return {known[name].opcode for name in seen}


def stored_values(executable):
    """The instructions whose values a program returns or hands to an operation that stores them."""
    known = {i.name: i for i in instructions(executable)}
    results = list(known.values())[-1].operands
    stores = [i for i in known.values() if i.target in ("jaxferry_gradient_store", "jaxferry_ferry_wait")]
    left, stored = [*results, *(operand for store in stores for operand in store.operands)], set()
    while left:
        value = known[left.pop()]
        if value.type.startswith(("f16", "bf16")):
            stored.add(value.name)
        if value.opcode in ("bitcast", "copy"):
            left += value.operands
    return results, stored


@pytest.mark.parametrize("dtype", [*slow(jnp.float16), jnp.bfloat16])
def test_norms_and_finiteness_are_those_of_the_rounded_values_that_are_stored(dtype):
    cuda_library()
    half, num_norms, num_flags = make_model(CONFIG, BLOCK, dtype), 0, 0  # the other tests' if that is their dtype
    uses = {use: None for place in GradientPlace for use in half.uses(Mode.GFGB, place)}
    uses |= {dataclasses.replace(use, arrives=True, stores=True): None for use in uses if can_store(half, use)}
    for use in uses:
        executable, outputs = half.compile(use), half.trace(use).out_info
        results, stored = stored_values(executable)
        assert len(results) == len(jax.tree.leaves(outputs))
        if use.kind is ProgramKind.FORWARD:
            # Whether outputs are finite, of those that have 16 bits.
            checked = all(output.dtype == dtype for output in outputs[0])
            decisions = results[-1:] if checked else ()
            num_flags += len(decisions)
        else:
            decisions = results[len(results) - len(jax.tree.leaves(outputs[-1])) :]
            num_norms += len(decisions)
        for decision in decisions:
            found = reached(executable, decision, stored)
            assert not found & {"parameter", "custom-call"}, (use, found)
    assert num_norms >= 8 and num_flags >= 3


@pytest.mark.parametrize("dtype", [jnp.int4, *slow(jnp.uint4, jnp.int2), jnp.float4_e2m1fn])
def test_products_with_packed_parameters_compile_where_xla_may_choose_triton(dtype):
    """XLA's choice of Triton kernels ended the process for int4."""
    cuda_library()
    shapes = {name: jax.ShapeDtypeStruct((64, 64), jnp.float32) for name in "uvw"}
    params = {**shapes, "v": jax.ShapeDtypeStruct((64, 64), dtype)}

    def loss(params, x):
        x = jnp.tanh(x @ params["u"]) @ params["v"].astype(jnp.float32) @ params["w"]
        return jnp.mean(x**2)

    step = jaxferry.train_step(loss, optax.sgd(0.1), trainable=lambda path: path != "v")
    step.declare(params)
    prepared = step.prepare(jax.ShapeDtypeStruct((2, 64), jnp.float32))
    programs = prepared.runner.runnable.programs
    for key in dict.fromkeys(prepared.program.keys):
        lowered = lower_traced(programs.traced(key), "cuda")
        assert compile_lowered(lowered, flags={"xla_gpu_autotune_level": "0"}) is not None


def can_store(model, use):
    """Whether a program may queue the offload of its gradient: it has no rows of lookups."""
    segment = model.derivatives[use.program].segment
    return use.kind is ProgramKind.BACKWARD and not use.writes_host and segment.name.startswith("h_")


@pytest.mark.parametrize(
    ("name", "moves"), [("load", "ferry_load"), ("load onto", "ferry_load"), ("store", "ferry_store")]
)
def test_marks_stay_behind_the_copies_that_they_time(model, name, moves):
    placement, layers = make_placement(), model.parts.layers
    layer = max(range(len(layers)), key=lambda i: len(layers[i].leaves))
    program = Ferry(placement, layers).program(name, layer)

    def struct(shape, dtype, where):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    vectors = tuple(struct(v.shape, v.dtype, placement.pinned) for v in layers[layer].vectors)
    leaves = [struct(leaf.shape, leaf.dtype, placement.device) for leaf in layers[layer].leaves]
    token = struct((1,), jnp.uint8, placement.device)
    joined = jax.eval_shape(layers[layer].join_small, leaves)
    sources = [struct(source.shape, source.dtype, placement.device) for source in joined]
    arguments = {"load": (vectors,), "load onto": (vectors, leaves), "store": (sources, vectors)}[name]
    found = {}
    for tokens in ((), (token,)):
        executable = compile_lowered(lower_traced(program.trace(*arguments, *tokens), "cuda"))
        stats = executable.get_compiled_memory_stats()
        # Only a table of the results' addresses may remain.
        assert stats.temp_size_in_bytes < 1024 and stats.host_temp_size_in_bytes == 0
        assert not {i.opcode for i in instructions(executable)} & {"copy", "copy-start", "fusion"}
        targets = [i.target for i in instructions(executable) if i.opcode == "custom-call"]
        # Arrays that are not given are made by calls that do nothing.
        assert ("jaxferry_scratch" in targets) == (name == "load")
        found[len(tokens)] = [target for target in targets if target != "jaxferry_scratch"]
    assert found[0] == [f"jaxferry_{moves}"] * len(found[0])
    assert found[1] == [*found[0], "jaxferry_mark"]


def test_programs_of_several_layers_read_and_write_some_of_them_in_host_memory(model):
    """Vectors read in place beside loaded matrices, and every second gradient written to host memory."""
    fine = make_model(CONFIG, MODULE, jnp.bfloat16)
    layers = tuple(
        LayerPlan(
            use.name,
            Mode.DHA if use.name.endswith("/vectors") else Mode.GFGB,
            GradientPlace.HOST if use.place % 2 else GradientPlace.DEVICE,
        )
        for use in fine.parts.uses
    )
    keys = program_keys(fine.parts, fine.derivatives, Plan("any", 1.0, layers))
    blocks = [key for key in dict.fromkeys(keys) if len(key.reads) > 2]
    assert {key.kind for key in blocks} >= {ProgramKind.FORWARD, ProgramKind.BACKWARD}
    for key in blocks:
        executable = fine.compile(key)
        assert not host_compute(executable)
        on_host = [i for i in instructions(executable) if i.opcode == "parameter" and i.is_on_host]
        written = sum(target is not Target.DEVICE for target in key.writes)
        assert len(on_host) == sum(source is Source.HOST for source in key.reads) + written
        stats = executable.get_compiled_memory_stats()
        assert stats.host_temp_size_in_bytes == 0
        assert stats.host_alias_size_in_bytes == stats.host_output_size_in_bytes
        assert (stats.host_output_size_in_bytes > 0) == (written > 0)
