"""Training steps of published models at their real sizes, compiled for an H200 on any machine.

`check_program`, `check_step` and `check_transport` compare what the engine counts with what XLA says of the same
programs; a test and a benchmark run them.
"""

import dataclasses
import functools
import statistics

import jax
import jax.numpy as jnp
import numpy as np

import model as gpt2
from examples.llama import model as llama
from jaxferry.modes import GradientPlace, Mode, Remat
from jaxferry.partition import partition
from jaxferry.step import LayerPlan, Plan
from native.compile_for_gpu import copied_after_stores
from native.compiled_programs import check_host_memory, device_bytes
from native.compiled_steps import TOLERANCE, CompiledModel


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


class RealModel(CompiledModel):
    """A published model's shapes, and its steps under `PLANS`.

    Args:
      setting: the model.
    """

    def __init__(self, setting):
        config = setting.model.SIZES[setting.size]
        params = jax.eval_shape(setting.model.make_init(config), jax.random.key(0))
        batch = {"tokens": jax.ShapeDtypeStruct((setting.batch, setting.length + 1), np.int32)}
        super().__init__(setting.model.make_loss(config), params, batch)
        self._setting = setting

    def prepare(self, name):
        """Prepares the step of one of `PLANS`; returns it and the engine's programs."""
        if name not in POLICIES:
            return self.step(plan=self._plan(name))
        small = {"memory_budget": self._setting.small_device} if name == "auto" else {}
        return self.step(policy=name, profile="estimate", **small)

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


def check_step(rows):
    """Asserts that every part of the engine's count is that of the compiled programs, while each program runs."""
    for place, row in enumerate(rows):
        for part, (counted, compiled) in row.items():
            assert _is_near(counted, compiled), (place, part, counted, compiled)


def _is_near(counted, compiled):
    return abs(counted - compiled) <= TOLERANCE * compiled
