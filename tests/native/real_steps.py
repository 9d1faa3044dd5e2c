"""Training steps of published models at their real sizes, compiled for an H200 on any machine.

The engine prepares each step as it does for a user, from shapes alone, but its programs are compiled for the GPU. So
`Prepared.peak` is what a GPU's user would be told. `check_program`, `check_step` and `check_transport` compare it with
what XLA says of the same programs; a test and a benchmark run them.
"""

import contextlib
import dataclasses
import functools
import statistics
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxferry
import model as gpt2
from examples.llama import model as llama
from jaxferry.engine import Programs, footprints, lower_traced, make_placement
from jaxferry.engine.program_keys import Joins
from jaxferry.engine.transport.ferry import Ferry, landed_program
from jaxferry.modes import GradientPlace, Mode, Remat
from jaxferry.partition import partition
from jaxferry.plan.records import LayerPlan, Plan
from native.compile_for_gpu import copied_after_stores
from native.compiled_programs import GpuLowered, check_host_memory, device_bytes
from native.replayed_memory import PARTS, replay

TOLERANCE = 0.02
"""How far the engine's count of bytes may be from XLA's, relative to XLA's."""

DEVICE_MEMORY = "130GiB"
"""What an H200 has, less some for its runtime."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A model, its batch, and the smaller device that policy `auto` plans for."""

    model: object
    size: str
    batch: int
    length: int
    small_device: str


SETTINGS = {
    "GPT-2 medium": Setting(gpt2, "medium", 8, 1024, "8GiB"),
    "GPT-2 1.5B": Setting(gpt2, "xl", 8, 1024, "16GiB"),
    "GPT-2 6.7B": Setting(gpt2, "6.7b", 8, 1024, "24GiB"),
    "Llama 8B": Setting(llama, "3-8b", 2, 4096, "32GiB"),
}

POLICIES = ("zero-offload", "go-memferry", "auto")
PLANS = (*POLICIES, "direct", "recomputing", "mixed")
"""Besides policies: `direct` reads every layer in host memory and writes every gradient there; `recomputing` likewise,
and all but the last segment recompute; `mixed` loads blocks once or twice, in turn, and reads the others in place."""


class RealModel:
    """A model's shapes in bfloat16, and its steps.

    Args:
      setting: the model.

    Attributes:
      compiled: `CompiledProgram` by program key, of all steps prepared so far.
    """

    def __init__(self, setting):
        config = setting.model.SIZES[setting.size]
        self._setting = setting
        self.loss_fn = setting.model.make_loss(config)
        self.params = jax.eval_shape(setting.model.make_init(config), jax.random.key(0))
        self.batch = {"tokens": jax.ShapeDtypeStruct((setting.batch, setting.length + 1), np.int32)}
        self.batch_bytes = setting.batch * (setting.length + 1) * 4
        self.compiled = {}
        self._transport = {}

    def prepare(self, name):
        """Prepares the step of one of `PLANS`; returns it and the engine's programs."""
        made = []
        with _compiling_for_gpu(made):
            step = self._step(name)
            step.declare(self.params)
            prepared = step.prepare(self.batch)
        (programs,) = {id(each): each for each in made}.values() if made else [prepared.runner.runnable.programs]
        self.compiled |= {key: programs[key] for key in prepared.program.keys}
        return prepared, programs

    def _step(self, name):
        options = {"memory_budget": DEVICE_MEMORY, "remat": "auto"}
        if name in POLICIES:
            options |= {"policy": name, "profile": "estimate"}
        else:
            options |= {"plan": self._plan(name)}
        if name == "auto":
            options |= {"memory_budget": self._setting.small_device}
        return jaxferry.train_step(
            self.loss_fn, optax.adamw(1e-4), compute_dtype=jnp.bfloat16, transport="ferry", **options
        )

    def _plan(self, name):
        segments = self._partition.segments
        blocks = statistics.mode(segment.program for segment in segments)
        layers = []
        for number, segment in enumerate(segments):
            again = name == "recomputing" and number < len(segments) - 1
            place = (Mode.DHA, GradientPlace.HOST)
            if name == "mixed" and segment.program == blocks:
                place = ((Mode.GFGB, Mode.RELOAD)[number % 2], GradientPlace.DEVICE)
            layers.append(LayerPlan(segment.name, *place, Remat.FULL if again else Remat.NONE))
        return Plan("any", 0.0, tuple(layers))

    @functools.cached_property
    def _partition(self):
        return partition(self.loss_fn, self.params, (self.batch,), compute_dtype=jnp.bfloat16)

    def transport(self, layers):
        """The transport's compiled programs, by name and group; groups of one layout share them."""
        made, ferry = {}, Ferry(make_placement(), layers)
        for group, layer in enumerate(layers):
            if layer.layout not in self._transport:
                self._transport[layer.layout] = dict(_transport_programs(ferry, layer, group))
            made |= {(name, group): program for name, program in self._transport[layer.layout].items()}
        return made, ferry.staging_bytes


@contextlib.contextmanager
def _compiling_for_gpu(made):
    """Has the engine compile for a GPU; adds its `Programs` to a list when they lower one."""

    known = {}

    def lowered(programs, key):
        made.append(programs)
        if (id(programs), key) not in known:
            known[id(programs), key] = GpuLowered(lower_traced(programs.traced(key), "cuda"))
        return known[id(programs), key]

    joins = Joins(arrives=True, stores=True)  # as on a GPU
    with mock.patch.object(Programs, "lowered", lowered), mock.patch.object(Ferry, "joins", joins):
        yield


def _transport_programs(ferry, layer, group):
    """The programs that move a layer and its gradient."""

    def structs(shapes, where):
        return [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where) for s in shapes]

    placement, trained = make_placement(), layer.trained
    vectors, leaves = structs(layer.vectors, placement.pinned), structs(layer.leaves, placement.device)
    stored = structs(trained.vectors, placement.pinned)
    sources = structs(jax.eval_shape(trained.join_small, structs(trained.leaves, placement.device)), placement.device)
    arguments = {
        "load": (tuple(vectors),),
        "load onto": (tuple(vectors), leaves),
        "arrived": (leaves, tuple(vectors)),
        "store": (sources, tuple(stored)),
        "accumulate": (sources, tuple(stored)),
    }
    traced = {name: ferry.program(name, group).trace(*given) for name, given in arguments.items()}
    traced["landed"] = landed_program(placement).trace(sources)
    for name, program in traced.items():
        yield name, GpuLowered(lower_traced(program, "cuda")).compile()


def check_program(program, name):
    """Asserts that a program computes nothing on the host, copies nothing of it, and writes pinned results in place.

    It also compares the temporaries that the engine counts with those of XLA's simulation of its heap.
    """
    check_host_memory(program, name)
    results = jax.tree.leaves(program.results)
    stats = program.stats
    # XLA returns several results by a table of their addresses.
    assert stats.argument_size_in_bytes == program.argument_bytes, name
    assert 0 <= stats.output_size_in_bytes - program.result_bytes <= 16 * (len(results) + 1), name
    assert copied_after_stores(program.executable) == [], name
    needed = program.needed_bytes
    assert abs(stats.temp_size_in_bytes - program.simulated_temporary_bytes) <= TOLERANCE * needed, name


def check_transport(programs, layers, staging_bytes):
    """Asserts that transfers need no device memory but the copies and the gradients that are counted."""
    assert staging_bytes == 0
    for (name, group), program in programs.items():
        layer, stats = layers[group], program.stats
        check_host_memory(program, (name, layer.name))
        if name.startswith("load"):
            assert _is_near(layer.num_bytes, program.result_bytes), (name, layer.name)
        if name != "load":  # all results lie in the memory of an argument
            assert stats.alias_size_in_bytes == device_bytes(program.results), (name, layer.name)
        # Only a table of the results' addresses may remain.
        assert stats.temp_size_in_bytes < 4096, (name, layer.name, stats.temp_size_in_bytes)


def compare_step(model, prepared, programs):
    """Returns the engine's and the replayed memory of a step, place by place, each part and in total."""
    layers = prepared.partition.layers
    transport, staging_bytes = model.transport(layers)
    loads = {group: transport["load", group] for group in range(len(layers))}
    counted = footprints(prepared.program, programs.temporary_bytes, staging_bytes)
    moments = replay(prepared.program, model.compiled, loads, model.batch_bytes)
    rows = []
    for instruction, ours, xlas in zip(prepared.program.programs, counted, moments, strict=True):
        row = {part: (getattr(ours, part), getattr(xlas, part)) for part in (*PARTS, "total")}
        row["temporaries"] = (ours.temporaries, model.compiled[instruction.key].stats.temp_size_in_bytes)
        rows.append(row)
    return rows


def check_step(rows):
    """Asserts that every part of the engine's count is that of the compiled programs, while each program runs."""
    for place, row in enumerate(rows):
        for part, (counted, compiled) in row.items():
            assert _is_near(counted, compiled), (place, part, counted, compiled)


def _is_near(counted, compiled):
    return abs(counted - compiled) <= TOLERANCE * compiled
