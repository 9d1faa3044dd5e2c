"""Peaks of host memory and of address space: make a state, train, save, restore, export, copy.

    python benchmarks/host_peaks.py [--layers 15] [--before OTHER.json] [--package FOLDER --name NAME]

Dense layers of 4096 x 4096 in float32 with AdamW on a CPU: 64 MiB of parameters each, 12 bytes of state a parameter
(3 GB with 15 layers), 20 bytes to train them. Each operation runs in a process of its own, with the state and two
steps before it where it needs them. Measured: the most resident memory during the operation (`VmHWM`, which is reset
before it), and the most address space until its end (`VmPeak`), both beyond what the process had when JAX had started
and one step of a tiny model had been trained, saved and restored. On a CPU, copies that a GPU would hold are host
memory as well: they are part of a step's figure.

`--package` measures another checkout of JaxFerry; `--before` adds its results as a second column.
Writes `benchmarks/results/NAME.json`.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

WIDTH, ROWS, MIB = 4096, 8, 2**20
OPERATIONS = ("init", "step", "save", "save in the background", "restore", "restore and step", "export", "copy")


def status_bytes(name):
    """A size of this process, by its name in /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def reset_peak():
    """Lets `VmHWM` start again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def run(operation, num_layers, folder):
    """Runs an operation in this process; returns its peaks in bytes."""
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jaxferry
    from jaxferry import pretrained

    def loss_fn(params, x):
        for name in sorted(params):
            x = x + 0.1 * jnp.tanh(x @ params[name])
        return jnp.mean(x**2)

    def make(width, layers):
        step = jaxferry.train_step(loss_fn, optax.adamw(1e-4))
        shapes = {f"l{i:02}": np.broadcast_to(np.float32(1e-3), (width, width)) for i in range(layers)}
        return step, shapes, np.ones((ROWS, width), np.float32)

    def trained(step, state, x):
        for _ in range(2):
            state, metrics = step(state, x)
            float(metrics["loss"])
        state.block_until_ready()
        return state

    tiny, shapes, x = make(8, 2)
    tiny.save(trained(tiny, tiny.init(shapes), x), folder / "tiny")
    tiny.restore(folder / "tiny")
    step, shapes, x = make(WIDTH, num_layers)
    before = {"resident": status_bytes("VmRSS"), "address_space": status_bytes("VmSize")}

    state = None if operation in ("init", "restore", "restore and step") else step.init(shapes)
    if operation not in ("init", "restore", "restore and step", "step"):
        trained(step, state, x)
    reset_peak()
    if operation == "init":
        step.init(shapes)
    elif operation == "step":
        trained(step, state, x)
    elif operation == "save":
        step.save(state, folder / "saved")
    elif operation == "save in the background":
        step.save(state, folder / "in the background", wait=False)
        step.wait_for_saves()
    elif operation == "restore":
        step.restore(folder / "saved")
    elif operation == "restore and step":
        trained(step, step.restore(folder / "saved"), x)
    elif operation == "export":
        params = state.lazy_params if hasattr(state, "lazy_params") else state.params
        pretrained.save_safetensors(folder / "export", params, ".".join)
    elif operation == "copy":
        state.copy()
    return {
        "resident": status_bytes("VmHWM") - before["resident"],
        "address_space": status_bytes("VmPeak") - before["address_space"],
    }


def measured(package, num_layers):
    """The peaks of all operations, each in a process of its own."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for operation in OPERATIONS:
            command = [sys.executable, __file__, "--run", operation, "--layers", num_layers, "--folder", folder]
            command += ["--package", package]
            done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, check=True)
            found[operation] = json.loads(done.stdout.splitlines()[-1])
            print(f"{operation}: {found[operation]['resident'] / MIB:.0f} MiB", file=sys.stderr)
    return found


def take_package(folder):
    """Imports JaxFerry from a checkout, also if another one is installed for editing."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
    sys.path.insert(0, str(folder))


def main():
    """Measures, prints a table, writes the results; with `--run`, runs one operation."""
    own = Path(__file__).resolve().parents[1]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--before", type=Path, help="results of another version, for a second column")
    parser.add_argument("--package", type=Path, default=own, help="the checkout to measure")
    parser.add_argument("--name", default="host_peaks", help="name of the results")
    parser.add_argument("--run", choices=OPERATIONS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run is not None:
        take_package(options.package)
        print(json.dumps(run(options.run, options.layers, options.folder)))
        return

    import benchmark_paths  # noqa: F401
    from rich.console import Console
    from rich.table import Table

    from benchmarks import measure

    num_parameters = options.layers * WIDTH**2
    peaks = measured(options.package, options.layers)
    before = None if options.before is None else json.loads(options.before.read_text())["peaks"]
    sizes = {"state_bytes": 12 * num_parameters, "training_bytes": 20 * num_parameters}
    measure.write(
        options.name,
        {**measure.machine(), "num_parameters": num_parameters, **sizes, "before": before, "peaks": peaks},
    )
    table = Table(title="peak MiB beyond what the process had before: resident, address space")
    for column in ("operation", "before", "now"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    shown = functools.partial(map, lambda size: f"{size / MIB:,.0f}")
    for operation in OPERATIONS:
        columns = [found and ", ".join(shown(found[operation].values())) for found in (before, peaks)]
        table.add_row(operation, *(column or "-" for column in columns))
    Console().print(table)


if __name__ == "__main__":
    main()
