"""Computes the peak device memory of a training step on an H200, without having one: compiles each program for it and
adds the memory that a step holds between programs (`jaxferry.engine.peak_bytes`).

    python benchmarks/device_memory.py [--only paper]

All policies run in this engine: `zero-offload` offloads gradients layer by layer, as the others do. What DeepSpeed
itself holds on the device is not compared here; `benchmarks/papers/deepspeed.py` counts it from its source for
MemFerry's Figure 12.

- `rows`: GPT-2-medium and BERT-base, batch 8, at two lengths. At full length, activations dominate.
- `paper`: the models of MemFerry's Figures 12 and 13 at the batches and lengths of `benchmarks/papers/memferry.py`,
  which the paper's text gives only in part. In bfloat16 and one layer per block, where the paper has single precision
  and modules; also with every block recomputed. Here bytes are those of a replay of the step with the compiled
  programs (`tests/native/compiled_steps.py`). `movable_share` is the share of parameters and gradients in
  `zero-offload`'s peak. The rest is activations, which these policies leave alone, and temporaries: programs that read
  host memory need fewer. Takes about 10 minutes on two busy cores.
"""

import argparse
import json
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import auto_gap
import benchmark_paths  # noqa: F401 - makes the others importable
import bert
import jax
import jax.numpy as jnp
import measure
import numpy as np
from rich.console import Console
from rich.table import Table
from user_gain import MACHINE, recomputing, without_recomputation

import model as gpt2
from benchmarks.papers.paper_models import known_models
from jaxferry.engine import RematVariants, derivatives_of, lower, lower_traced, peak_bytes, trace_program
from jaxferry.partition import partition
from jaxferry.planner import make_plan
from jaxferry.training import Conditions, Planning, choose_plan, planning_profile
from jaxferry.transport import make_placement
from native.compile_for_gpu import compile_lowered
from native.compiled_steps import CompiledModel, compare_step
from native.cuda_library import cuda_library

BATCH = 8
POLICIES = {"zero-offload": 1.0, "memferry": 1.0, "go-memferry": 0.0}
DEVICE_KIND = "NVIDIA H200"
EXAMPLES = {
    "BERT-base": "bert:base",
    "RoBERTa": "roberta:base",
    "BERT-large": "bert:large",
    "GPT-2-medium": "gpt2:medium",
}
"""The examples' models by the paper's names."""
XL_SIZES, XL_BATCH, XL_LENGTH = ("1b", "2.4b", "4.3b", "6.7b"), 8, 384


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
    options, variants = Planning(policy=policy, reserve_factor=reserve_factor), RematVariants(parts, "none")
    profile = planning_profile(variants, options, None, Conditions(DEVICE_KIND))
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


def paper_settings():
    """Returns name, example, batch and length of the paper's models."""
    for model in known_models():
        yield model.name, EXAMPLES[model.name], model.batch, model.length
    for size in XL_SIZES:
        yield f"Transformer-XL {size}", f"transformer_xl:{size}", XL_BATCH, XL_LENGTH


def measure_paper(name, example, batch, length):
    """Returns the rows of one of the paper's models: each policy, with nothing and with every block recomputed."""
    traced = auto_gap.Traced(example, batch, length=length)
    model = CompiledModel(traced.loss_fn, traced.params, traced.batch)
    profile, rows = model.with_temporaries(traced.on(MACHINE), traced.variants), []
    for recomputes in (False, True):
        found = {}
        for policy, factor in POLICIES.items():
            plan = make_plan(without_recomputation(profile), policy, reserve_factor=factor)
            plan = recomputing(profile, plan) if recomputes else plan
            prepared, programs = model.step(plan=plan, profile=profile)
            if prepared.plan.layers != plan.layers:
                raise AssertionError(f"train_step has changed the plan of {policy}")
            found[policy] = max(compare_step(model, prepared, programs), key=lambda row: row["total"][1])
        base = found["zero-offload"]
        moved = base["copies"][1] + base["gradients"][1]
        for policy, row in found.items():
            counted, compiled = row["total"]
            rows.append(
                {
                    "model": name,
                    "batch": batch,
                    "length": length,
                    "recomputing": recomputes,
                    "policy": policy,
                    "peak_bytes": compiled,
                    "counted_bytes": counted,
                    "copies_bytes": row["copies"][1],
                    "gradient_bytes": row["gradients"][1],
                    "below_zero_offload": 1 - compiled / base["total"][1],
                    "movable_share": moved / base["total"][1],
                }
            )
    return rows


def print_paper(rows, console):
    title = "Below zero-offload at the batches and lengths of benchmarks/papers, compiled for an H200"
    table = Table(title=title)
    heads = ("model", "size", "zero-offload, GB", "memferry", "go-memferry", "movable")
    for column in heads:
        table.add_column(column, justify="left" if column == "model" else "right")
    for recomputes in (False, True):
        groups = {}
        for row in rows:
            if row["recomputing"] == recomputes:
                groups.setdefault(row["model"], {})[row["policy"]] = row
        for name, group in groups.items():
            base, (ferry, go) = group["zero-offload"], (group[policy] for policy in ("memferry", "go-memferry"))
            shares = (ferry["below_zero_offload"], go["below_zero_offload"], base["movable_share"])
            size = f"{base['batch']} x {base['length']}"
            label = name + ", recomputing" * recomputes
            table.add_row(label, size, f"{base['peak_bytes'] / 1e9:.2f}", *(f"{share:.1%}" for share in shares))
    for key, share in means_of(rows).items():
        table.add_row(f"mean, {key}", "", "", "", f"{share:.1%}", "")
    console.print(table)


def means_of(rows):
    """The mean share that `go-memferry` saves, by group of models."""
    found = {}
    for row in rows:
        if row["policy"] == "go-memferry":
            figure = "Figure 12" if row["model"] in EXAMPLES else "Figure 13"
            found.setdefault(figure + ", recomputing" * row["recomputing"], []).append(row["below_zero_offload"])
    return {key: sum(shares) / len(shares) for key, shares in found.items()}


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("rows", "paper"), help="compute this part; the other stays in the JSON")
    only = parser.parse_args().only
    cuda_library()
    path, console = measure.RESULTS / "device_memory.json", Console(width=120)
    known = json.loads(path.read_text()) if only and path.exists() else {}
    if only != "paper":
        known["rows"] = [row for arguments in models() for row in measure_model(*arguments)]
        print_rows(known["rows"], console)
    if only != "rows":
        known["paper"] = [row for arguments in paper_settings() for row in measure_paper(*arguments)]
        known["paper_mean"] = means_of(known["paper"])
        print_paper(known["paper"], console)
    measure.write("device_memory", known | {"jax": jax.__version__, "device": DEVICE_KIND, "batch": BATCH})


if __name__ == "__main__":
    main()
