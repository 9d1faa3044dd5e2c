"""Measures what an update on the host costs beside its memory traffic: its fixed cost, and a tied table's rows.

    python benchmarks/host_updates.py [--before CHECKOUT --before-libraries FOLDER] [--repetitions 3]

- **Fixed cost**: a model of 24 layer norms of 1,536 parameters, and one of 24 with 128 times as many. Clipping makes
  all updates follow the last gradient, one after another. `in_step`: the median time of an update's task in recorded
  steps. `alone`: as a profile measures the update, with caches emptied before each. The fixed cost is the time of a
  small update, less that of its parameters at the rate of the large ones. Expected: at most 0.1 ms with
  `jaxferry.adamw`.
- **Tied table**: the host's time for a table that a head and a lookup of 2,048 tokens share (the lookup's rows are
  added there), beside that for the head alone. Expected: at most 1.2 times.
- **Several devices**: the host's time for a layer of which four devices have a share each, beside that for one device;
  they are virtual CPU devices if there are none. Expected: at most 1.2 times with `jaxferry.adamw`, which reads and
  writes the shares where they are.

`--before` runs an older checkout too, with its own native libraries, in turns with this one. Each repetition is a
process of its own. A GPU is used if JAX finds one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import benchmark_paths  # noqa: F401 - makes the others importable
import jax
import jax.numpy as jnp
import measure
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import jaxferry
from jaxferry.optimizer import HostOptimizer
from jaxferry.partition import make_layer
from jaxferry.settings import own_settings
from jaxferry.step import Arrival
from jaxferry.training import Effort, HostUpdate
from jaxferry.transport import make_placement

ROOT = Path(__file__).resolve().parents[1]
NUM_LAYERS, NUM_STEPS, NUM_TOKENS = 24, 12, 2048
WIDTHS = (768, 768 * 128)
PER_LAYER = 2  # scale and bias
EXPECTED_FIXED_S, EXPECTED_TIED, EXPECTED_SHARED = 1e-4, 1.2, 1.2
NUM_DEVICES, SHARED_WIDTH = 4, 2048


def optimizers():
    return {"jaxferry.adamw": jaxferry.adamw(1e-3), "optax.adamw": optax.adamw(1e-3)}


def norms_loss(params, x):
    for layer in sorted(params):
        x = x - x.mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * params[layer]["scale"] + params[layer]["bias"]
    return (x * x).mean()


def recorded_tasks(loss_fn, optimizer, params, batch, **more):
    """The seconds of each task of recorded steps, by kind and name."""
    settings = {"policy": "native-offload", "compute_dtype": jnp.bfloat16, "record_steps": 1, **more}
    step = jaxferry.train_step(loss_fn, optimizer, **settings)
    state = step.init(params)
    seconds = {}
    for number in range(NUM_STEPS):
        state, _ = step(state, batch)
        state.block_until_ready()
        run = step.recorded()
        for task, start_s, end_s in zip(run.schedule.tasks, run.starts_s, run.ends_s, strict=True):
            if number >= NUM_STEPS // 4:
                seconds.setdefault((task.kind.value, task.name), []).append(end_s - start_s)
    return seconds


def in_step_s(optimizer, width):
    layer = {"scale": np.ones(width, np.float32), "bias": np.zeros(width, np.float32)}
    params = {f"norm_{number:02d}": layer for number in range(NUM_LAYERS)}
    x = np.random.default_rng(0).normal(size=(2, width)).astype(np.float32)
    found = recorded_tasks(norms_loss, optimizer, params, x, clip_norm=1.0)
    return statistics.median(s for (kind, _), each in found.items() if kind == "update" for s in each)


def alone_s(optimizer, width):
    with own_settings():
        place, leaf = make_placement(), jax.ShapeDtypeStruct((width,), np.float32)
        leaves = [jax.ShapeDtypeStruct((width,), jnp.bfloat16)] * PER_LAYER
        layer = make_layer("norm", [0, 1], ["bias", "scale"], leaves, [np.dtype(np.float32)] * PER_LAYER)
        tree = jax.tree.structure({"bias": 0, "scale": 0})
        host = HostOptimizer(optimizer, tree, [leaf] * PER_LAYER, place, None)
        [unit] = host.units_of([layer])
        update = HostUpdate(host, place, unit, [layer], [Arrival.OWN])
        return update.subject().time(Effort(min_repetitions=9, budget_s=0.0))


def table_loss(params, tokens):
    rows = params["head" if "lookup" not in params else "lookup"]["rows"]
    x = jnp.tanh(jnp.take(rows, tokens, axis=0).mean(0) @ params["block"]["kernel"])
    return jax.nn.logsumexp(params["head"]["rows"] @ x)


def table_s(optimizer, is_tied, vocabulary, width):
    """The host's least seconds for the head's table, which is the lookup's too if tied."""
    rng = np.random.default_rng(0)
    shapes = {"block": ("kernel", (width, width)), "head": ("rows", (vocabulary, width))}
    if not is_tied:
        shapes["lookup"] = ("rows", (NUM_TOKENS, width))
    params = {layer: {name: rng.normal(size=shape).astype(np.float32) / 16} for layer, (name, shape) in shapes.items()}
    vocabulary = params["head" if is_tied else "lookup"]["rows"].shape[0]
    tokens = rng.integers(0, vocabulary, NUM_TOKENS).astype(np.int32)
    found = {key: min(s) for key, s in recorded_tasks(table_loss, optimizer, params, tokens).items()}
    offloads = [s for (kind, name), s in found.items() if kind == "offload" and "head" in name]
    # A CPU adds rows as they are offloaded, in the shorter one of both offloads; other devices leave it to the update.
    rows_s = min(offloads) if is_tied and jax.default_backend() == "cpu" else 0.0
    return rows_s + max(s for (kind, name), s in found.items() if kind == "update" and "head" in name)


def chain_loss(params, x):
    for layer in sorted(params):
        x = jnp.tanh(x @ params[layer]["kernel"])
    return (x * x).mean()


def shared_s(optimizer, num_devices):
    """The host's median seconds for a layer that so many devices share."""
    rng, shape = np.random.default_rng(0), (SHARED_WIDTH, SHARED_WIDTH)
    params = {f"l{number}": {"kernel": rng.normal(size=shape).astype(np.float32) / 45} for number in range(4)}
    batch = rng.normal(size=(8, SHARED_WIDTH)).astype(np.float32)
    where = {"mesh": jax.make_mesh((num_devices,), ("data",), devices=jax.devices()[:num_devices])}
    found = recorded_tasks(chain_loss, optimizer, params, batch, **(where if num_devices > 1 else {}))
    return statistics.median(s for (kind, _), each in found.items() if kind == "update" for s in each)


def work(vocabulary, width):
    """The measurements of this process's checkout."""
    made = {}
    for name, optimizer in optimizers().items():
        timers = {"in_step": in_step_s, "alone": alone_s}
        made[name] = {what: [timer(optimizer, width) for width in WIDTHS] for what, timer in timers.items()}
        made[name]["table"] = [table_s(optimizer, is_tied, vocabulary, width) for is_tied in (False, True)]
        made[name]["shared"] = [shared_s(optimizer, num) for num in (1, min(NUM_DEVICES, jax.device_count()))]
    return {"machine": measure.machine(), "seconds": made}


def fixed_s(small_s, large_s):
    small, large = (PER_LAYER * width for width in WIDTHS)
    return small_s - (large_s - small_s) / (large - small) * small


def run_side(checkout, libraries, arguments):
    """Runs the measurements on a checkout, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "JAXFERRY_CACHE_DIR": "off", "JAXFERRY_PROGRESS": "off"}
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={NUM_DEVICES}"
    if libraries:
        environment["JAXFERRY_NATIVE_DIR"] = libraries
    sizes = ["--vocabulary", str(arguments.vocabulary), "--width", str(arguments.width)]
    command = [sys.executable, __file__, "--worker", *sizes]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def summary(results):
    """Medians over repetitions."""
    found = {}
    for name in optimizers():
        seconds = [result["seconds"][name] for result in results]
        medians = {
            what: [statistics.median(s) for s in zip(*(each[what] for each in seconds), strict=True)]
            for what in seconds[0]
        }
        found[name] = {
            **{
                f"{what}_s": dict(zip((f"{PER_LAYER * w}" for w in WIDTHS), medians[what], strict=True))
                for what in ("in_step", "alone")
            },
            **{f"fixed_{what}_s": fixed_s(*medians[what]) for what in ("in_step", "alone")},
            "table_s": dict(zip(("untied", "tied"), medians["table"], strict=True)),
            "tied_ratio": statistics.median(each["table"][1] / each["table"][0] for each in seconds),
            "shared_s": dict(zip(("1", f"{NUM_DEVICES}"), medians["shared"], strict=True)),
            "shared_ratio": statistics.median(each["shared"][1] / each["shared"][0] for each in seconds),
        }
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--before", help="an older checkout to measure too")
    parser.add_argument("--before-libraries", help="the folder of its native libraries; by default, as for this one")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--name", default="host_updates", help="name of the file under results/")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(work(arguments.vocabulary, arguments.width)))
        return
    sides = {"now": (ROOT, None)}
    if arguments.before:
        sides["before"] = (arguments.before, arguments.before_libraries)
    results = {side: [] for side in sides}
    for _ in range(arguments.repetitions):
        for side, given in sides.items():
            results[side].append(run_side(*given, arguments))
    made = {side: summary(each) for side, each in results.items()}
    columns = ("fixed, in a step [ms]", "fixed, alone [ms]", "tied / untied", "shared / alone")
    table = Table("", "optimizer", *columns, title="Updates on the host")
    for side, optimizers_of in made.items():
        for name, row in optimizers_of.items():
            fixed = [f"{1e3 * row[f'fixed_{what}_s']:.3f}" for what in ("in_step", "alone")]
            table.add_row(side, name, *fixed, *(f"{row[f'{what}_ratio']:.2f}" for what in ("tied", "shared")))
    Console().print(table)
    measure.write(
        arguments.name,
        {
            "benchmark": "host_updates",
            "machine": results["now"][0]["machine"],
            "repetitions": arguments.repetitions,
            "model": {
                "num_layers": NUM_LAYERS,
                "table": [arguments.vocabulary, arguments.width],
                "num_tokens": NUM_TOKENS,
            },
            "expected": {"fixed_s": EXPECTED_FIXED_S, "tied_ratio": EXPECTED_TIED, "shared_ratio": EXPECTED_SHARED},
            **made,
        },
    )


if __name__ == "__main__":
    main()
