"""Measures the host memory of training in bytes a parameter, by optimizer.

    python benchmarks/host_bytes.py [--layers 60] [--width 4096] [--steps 4] [--optimizers optax.adamw]

A chain of square layers in bfloat16 on a CPU. Device copies would be host memory there, so layers are read and
gradients written in host memory (DHA, GO). Measured: the most memory that is resident during steps (`VmHWM`, reset
before the first), beyond what was resident before the state was made, a parameter. Each optimizer trains in a process
of its own. Expected within 3 %: 16 (masters, two moments, compute copy, gradient), 14.1 with split masters, 10.1 with
moments in bfloat16 as well, 8.2 with moments of 8 bits, 6.03 with masters in bfloat16 too. Some 0.2 GB of XLA's
programs and temporaries come on top. Optax's own AdamW has split masters where host memory does not hold whole ones, as
in 15 bytes a parameter: then 14.2 with those of one layer whole. With `--optimizers`, the others keep their rows in the
JSON. The seconds of updates in a step tell what each costs.
"""

import argparse
import json
import os
import subprocess
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import benchmark_paths  # noqa: F401 - makes the others importable
import jax
import jax.numpy as jnp
import measure
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import jaxferry
from jaxferry.modes import GradientPlace, Mode
from jaxferry.step import Kind, LayerPlan, Plan

SPLIT = "optax.adamw in 15 bytes a parameter"
OPTIMIZERS = {
    "optax.adamw": (lambda: optax.adamw(1e-4), 16),
    SPLIT: (lambda: optax.adamw(1e-4), 14.125 + 4 / 60),
    "jaxferry.adamw": (lambda: jaxferry.adamw(1e-4), 14.125),
    'jaxferry.adamw(moments="bfloat16")': (lambda: jaxferry.adamw(1e-4, moments="bfloat16"), 10.125),
    'jaxferry.adamw(moments="int8")': (lambda: jaxferry.adamw(1e-4, moments="int8"), 8.15625),
    'jaxferry.adamw(moments="int8", masters="bfloat16")': (
        lambda: jaxferry.adamw(1e-4, moments="int8", masters="bfloat16"),
        6.03125,
    ),
}
BATCH = 4


def loss_fn(params, x):
    for name in sorted(params):
        x = x + jnp.tanh(x @ params[name]["w"])
    return jnp.mean(x.astype(jnp.float32) ** 2)


def chain_of(layers, width):
    """The plan of a chain of square layers, and the function that initialises it."""
    names = [f"l{i:03d}" for i in range(layers)]
    plan = Plan("any", 1.0, tuple(LayerPlan(each, Mode.DHA, GradientPlace.HOST) for each in names))

    def init(rng):
        keys = jax.random.split(rng, layers)
        return {
            each: {"w": 0.01 * jax.random.normal(key, (width, width))} for each, key in zip(names, keys, strict=True)
        }

    return plan, init


def run(name, layers, width, steps):
    """The bytes a parameter of this process."""
    plan, init = chain_of(layers, width)
    num = layers * width**2
    if name == SPLIT:
        os.environ["JAXFERRY_HOST_MEMORY"] = str(15 * num)
    options = {"plan": plan, "compute_dtype": jnp.bfloat16, "gradient_buffers": "all", "record_steps": steps - 1}
    step = jaxferry.train_step(loss_fn, OPTIMIZERS[name][0](), **options)
    batch = jnp.ones((BATCH, width), jnp.bfloat16)
    before = measure.status_bytes("VmRSS")
    state = step.init_from(init, jax.random.key(0))
    made = measure.status_bytes("VmHWM")
    measure.reset_peak()
    for _ in range(steps):
        state, metrics = step(state, batch)
    state.block_until_ready()
    assert np.isfinite(float(metrics["loss"]))
    recorded = step.recorded()
    tasks = zip(recorded.schedule.tasks, recorded.starts_s, recorded.ends_s, strict=True)
    updates_s = sum(end - start for task, start, end in tasks if task.kind is Kind.UPDATE) / recorded.schedule.steps
    found = {"in_steps": (measure.status_bytes("VmHWM") - before) / num, "in_init": (made - before) / num}
    return found | {"updates_s": updates_s}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--run", choices=OPTIMIZERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run(options.run, options.layers, options.width, options.steps)))
        return
    rows, sizes = [], ["--layers", str(options.layers), "--width", str(options.width), "--steps", str(options.steps)]
    table = Table(
        "optimizer",
        "expected",
        "measured in steps",
        "in init",
        "updates, s a step",
        title="Bytes of host memory a parameter",
    )
    if len(options.optimizers) < len(OPTIMIZERS):
        known = json.loads((measure.RESULTS / "host_bytes.json").read_text())["rows"]
        rows = [row for row in known if row["optimizer"] not in options.optimizers]
    for name in options.optimizers:
        expected = OPTIMIZERS[name][1]
        command = [sys.executable, __file__, "--run", name, *sizes]
        found = json.loads(
            subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
        )
        rows.append({"optimizer": name, "expected": expected, **found})
        table.add_row(
            name, f"{expected:.2f}", f"{found['in_steps']:.2f}", f"{found['in_init']:.2f}", f"{found['updates_s']:.2f}"
        )
    Console().print(table)
    sizes = {"num_parameters": options.layers * options.width**2, "layers": options.layers, "steps": options.steps}
    measure.write("host_bytes", {"machine": measure.machine(), **sizes, "rows": rows})


if __name__ == "__main__":
    main()
