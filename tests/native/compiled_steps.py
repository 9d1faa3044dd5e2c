"""Training steps of any model, compiled for an H200 on any machine, and the device memory that they need.

The engine prepares each step as it does for a user, from shapes alone, but its programs are compiled for the GPU. So
`Prepared.peak` is what a GPU's user would be told. `compare_step` sets the count beside what XLA says of the same
programs.
"""

import contextlib
import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import optax

import jaxferry
from jaxferry.engine import Programs, footprints, lower_traced
from jaxferry.step import Joins
from jaxferry.training import program_variants
from jaxferry.transport import Ferry, landed_program, make_placement
from native.compiled_programs import GpuLowered, device_bytes
from native.replayed_memory import PARTS, replay

TOLERANCE = 0.02
"""How far the engine's count of bytes may be from XLA's, relative to XLA's."""

HOST = jax.devices("cpu")[0]
"""The device of the steps, whatever is JAX's default one: all else is compiled for it."""

DEVICE_MEMORY = "130GiB"
"""What an H200 has, less some for its runtime."""


class CompiledModel:
    """A model's shapes in bfloat16, and its steps with AdamW.

    Args:
      loss_fn: `loss_fn(params, batch)`.
      params, batch: shapes.

    Attributes:
      compiled: `CompiledProgram` by program key, of all steps prepared so far.
    """

    def __init__(self, loss_fn, params, batch):
        self.loss_fn, self.params, self.batch = loss_fn, params, batch
        self.compiled = {}
        self._transport, self._programs = {}, None

    def step(self, **options):
        """Prepares the step of these options of `train_step`; returns it and the engine's programs."""
        made, options = [], {"memory_budget": DEVICE_MEMORY, "remat": "auto"} | options
        with _compiling_for_gpu(made):
            step = jaxferry.train_step(
                self.loss_fn, optax.adamw(1e-4), compute_dtype=jnp.bfloat16, transport="ferry", device=HOST, **options
            )
            step.declare(self.params)
            prepared = step.prepare(self.batch)
        (programs,) = {id(each): each for each in made}.values() if made else [prepared.runner.runnable.programs]
        self.compiled |= {key: programs[key] for key in prepared.program.keys}
        return prepared, programs

    def with_temporaries(self, profile, variants):
        """A profile with the temporaries of all programs that a step of any plan may run, compiled for an H200.

        So has a profile that is measured there (`jaxferry/training/measured_profile.py`); the times stay.

        Args:
          profile: of the variants' layers.
          variants: the model's segments, as `RematVariants`.
        """
        named = program_variants(variants.base, variants.recomputing, variants.derivatives)
        with _compiling_for_gpu([]):
            # Held, since steps run some of these programs.
            self._programs = Programs(variants.base, variants.derivatives, make_placement(HOST), native=True)
            keys = dict.fromkeys(key for variant in named for key in variant.values())
            num_bytes = self._programs.temporary_bytes_of(keys)
        layers = []
        for layer, use in zip(profile.layers, variants.base.uses, strict=True):
            own = named[use.segment] if use.place == 0 else {}
            temporaries = {name: num_bytes[key] for name, key in own.items()}
            layers.append(dataclasses.replace(layer, temporary_bytes=temporaries))
        return dataclasses.replace(profile, layers=tuple(layers))

    def transport(self, layers):
        """The transport's compiled programs, by name and group; groups of one layout share them."""
        made, ferry = {}, Ferry(make_placement(HOST), layers)
        for group, layer in enumerate(layers):
            if layer.layout not in self._transport:
                self._transport[layer.layout] = dict(_transport_programs(ferry, layer, group))
            made |= {(name, group): program for name, program in self._transport[layer.layout].items()}
        return made, ferry.staging_bytes

    def given_bytes(self, prepared):
        """The bytes on the device before a step's first program, by value: batch, constants, what the prelude makes."""
        partition, programs = prepared.partition, prepared.runner.runnable.programs
        graph, where = partition.graph, make_placement(HOST).device
        leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where) for leaf in jax.tree.leaves(self.batch)]
        sizes = {value: leaf.size * leaf.dtype.itemsize for value, leaf in zip(graph.batch, leaves, strict=True)}
        sizes |= {value: constant.nbytes for value, constant in graph.constants.items()}
        if programs.prelude is not None:
            prelude = GpuLowered(lower_traced(programs.prelude.trace(leaves), "cuda")).compile()
            made = [device_bytes(result) for result in prelude.results]
            sizes |= zip(partition.prelude_outputs, made[:-1], strict=True)  # the last is a flag
        return sizes


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
    with (
        mock.patch.object(Programs, "lowered", lowered),
        mock.patch.object(Ferry, "joins", joins),
        mock.patch.object(Ferry, "reserves", True),
    ):
        yield


def _transport_programs(ferry, layer, group):
    """The programs that move a layer and its gradient."""

    def structs(shapes, where):
        return [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where) for s in shapes]

    placement, trained = make_placement(HOST), layer.trained
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


def compare_step(model, prepared, programs):
    """Returns the engine's and the replayed memory of a step, place by place, each part and in total."""
    layers = prepared.partition.layers
    transport, staging_bytes = model.transport(layers)
    loads = {group: transport["load", group] for group in range(len(layers))}
    counted = footprints(prepared.program, programs.temporary_bytes, staging_bytes)
    moments = replay(prepared.program, model.compiled, loads, model.given_bytes(prepared))
    rows = []
    for instruction, ours, xlas in zip(prepared.program.programs, counted, moments, strict=True):
        row = {part: (getattr(ours, part), getattr(xlas, part)) for part in (*PARTS, "total")}
        row["temporaries"] = (ours.temporaries, model.compiled[instruction.key].stats.temp_size_in_bytes)
        rows.append(row)
    return rows


def peak_bytes(rows):
    """The most device memory of a step, as the engine counts it and as the compiled programs have it.

    Args:
      rows: as `compare_step` returns them.
    """
    return tuple(max(row["total"][which] for row in rows) for which in (0, 1))
