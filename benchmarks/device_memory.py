"""Computes the peak device memory of a training step on an H200, without having one: compiles each program for it and
adds the memory that a step holds between programs (`jaxferry.engine.peak_bytes`).

    python benchmarks/device_memory.py

All policies run in this engine: `zero-offload` offloads gradients layer by layer, as the others do. What DeepSpeed
itself holds on the device is not compared here; `benchmarks/papers/deepspeed.py` counts it from its source for
MemFerry's Figure 12. The sequence lengths behind that figure are not published; two are shown. At full length,
activations dominate.
"""

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import benchmark_paths  # noqa: F401 - makes the others importable
import bert
import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import measure
import model as gpt2
from jaxferry.choice import choose_plan, planning_profile
from jaxferry.engine import (
    RematVariants,
    derivatives_of,
    lower,
    lower_traced,
    make_placement,
    peak_bytes,
    trace_program,
)
from jaxferry.options import Options
from jaxferry.partition import partition
from native.compile_for_gpu import compile_lowered
from native.cuda_library import cuda_library

BATCH = 8
POLICIES = {"zero-offload": 1.0, "memferry": 1.0, "go-memferry": 0.0}
DEVICE_KIND = "NVIDIA H200"


def models():
    """Returns name, loss function, and shapes of parameters and batch."""
    key = jax.random.key(0)
    config = gpt2.SIZES["medium"]
    for length in (128, 1024):
        batch = {"tokens": jax.ShapeDtypeStruct((BATCH, length + 1), np.int32)}
        yield "GPT-2-medium", length, gpt2.make_loss(config), jax.eval_shape(gpt2.make_init(config), key), batch
    config = bert.Config()
    for length in (128, 512):
        batch = {name: jax.ShapeDtypeStruct((BATCH, length), np.int32) for name in ("tokens", "labels")}
        yield "BERT-base", length, bert.make_loss(config), jax.eval_shape(bert.make_init(config), key), batch


def measure_policy(parts, derivatives, policy, reserve_factor, temporary_bytes):
    """Returns the row of one policy; `temporary_bytes` caches the programs' temporary memory."""
    options, variants = Options(policy=policy, reserve_factor=reserve_factor), RematVariants(parts, "none")
    profile = planning_profile(variants, options, None, DEVICE_KIND)
    plan = choose_plan(variants, options, profile)
    program, placement = lower(parts, derivatives, plan, profile), make_placement()
    for key in program.keys:
        if key not in temporary_bytes:
            traced = trace_program(parts, derivatives, placement, key, native=True)
            stats = compile_lowered(lower_traced(traced, "cuda")).get_compiled_memory_stats()
            temporary_bytes[key] = stats.temp_size_in_bytes
    peak = peak_bytes(program, temporary_bytes)
    return {
        "policy": policy,
        "peak_bytes": peak.total,
        "parameter_bytes": peak.parameters,
        "modes": {mode: plan.modes.count(mode) for mode in dict.fromkeys(plan.modes)},
        "gradients_on_host": sum(place == "host" for place in plan.gradients),
        "predicted_peak_bytes": plan.predicted.peak_device_bytes,
    }


def measure_model(name, length, loss_fn, params, batch):
    """Returns the rows of one model."""
    parts = partition(loss_fn, params, (batch,), compute_dtype=jnp.bfloat16)
    derivatives, temporary_bytes = derivatives_of(parts, "none"), {}
    model_bytes = sum(layer.num_bytes for layer in parts.layers)
    rows = [measure_policy(parts, derivatives, policy, factor, temporary_bytes) for policy, factor in POLICIES.items()]
    base = rows[0]["peak_bytes"]
    for row in rows:
        row |= {
            "model": name,
            "length": length,
            "model_bytes": model_bytes,
            "below_zero_offload": 1 - row["peak_bytes"] / base,
        }
    return rows


def print_rows(rows, console):
    table = Table(title=f"Peak device memory of a step, batch {BATCH}, bfloat16, compiled for an H200 (MiB)")
    for column in ("model", "length", "policy", "peak", "parameters", "below zero-offload"):
        table.add_column(column, justify="left" if column in ("model", "policy") else "right")
    for row in rows:
        table.add_row(
            row["model"],
            str(row["length"]),
            row["policy"],
            f"{row['peak_bytes'] / 2**20:.0f}",
            f"{row['parameter_bytes'] / 2**20:.0f}",
            f"{row['below_zero_offload']:.1%}",
        )
    console.print(table)


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    cuda_library()
    rows = [row for arguments in models() for row in measure_model(*arguments)]
    print_rows(rows, Console())
    measure.write("device_memory", {"jax": jax.__version__, "device": DEVICE_KIND, "batch": BATCH, "rows": rows})


if __name__ == "__main__":
    main()
