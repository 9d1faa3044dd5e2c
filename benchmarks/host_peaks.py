"""Peaks of host memory and of address space: make a state, train, save, restore, export, copy.

    python benchmarks/host_peaks.py [--layers 15] [--before OTHER.json] [--package FOLDER --name NAME]

Dense layers of 4096 x 4096 in float32 with AdamW on a CPU: 64 MiB of parameters each, random so that files hold them
in full, 12 bytes of state a parameter (3 GB with 15 layers), 20 bytes to train them. Each operation runs in a process
of its own, with the state and two steps before it where it needs them; once with each transport, and once in two
processes that train together, of which each has half of the state. Measured: the most resident memory during the
operation (`VmHWM`, which is reset before it) and the most address space until its end (`VmPeak`), both beyond what the
process had when JAX had started and one step of a tiny model had been trained, saved and restored; and how much of the
resident memory the operation has added to what the process had before it. Of two processes, the larger figures. On a
CPU, copies that a GPU would hold are host memory as well: they are part of a step's figure.

`--package` measures another checkout of JaxFerry; `--before` adds its results as a second column.
Writes `benchmarks/results/NAME.json`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import benchmark_paths  # noqa: F401
import numpy as np

import process_runs

WIDTH, ROWS, MIB = 4096, 8, 2**20
OPERATIONS = (
    "init",
    "init_from",
    "step",
    "save",
    "save in the background",
    "restore",
    "restore and step",
    "export",
    "pretrained",
    "copy",
)
"""Each after those whose files it reads."""
WITHOUT_STATE = ("init", "init_from", "restore", "restore and step", "pretrained")
SETTINGS = {"ferry": ("ferry", 1), "device_put": ("device_put", 1), "two processes": ("device_put", 2)}
"""Transport and number of processes, by name."""


def status_bytes(name):
    """A size of this process, by its name in /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def reset_peak():
    """Lets `VmHWM` start again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


class Drawn:
    """A matrix of random numbers, drawn where they are wanted."""

    shape, dtype = (WIDTH, WIDTH), np.dtype(np.float32)

    def __init__(self, seed):
        self.seed = seed

    def read_into(self, made, span=None):
        rng, start = np.random.default_rng(self.seed), 0 if span is None else span.start
        rng.bit_generator.advance(start)
        flat = made.reshape(-1)
        for first in range(0, flat.size, MIB):
            some = flat[first : first + MIB]
            some[:] = rng.random(some.size, np.float32) * 0.02 - 0.01

    def __array__(self, dtype=None, copy=None):
        made = np.empty(self.shape, self.dtype)
        self.read_into(made)
        return made


def loss_fn(params, x):
    import jax.numpy as jnp

    for name in sorted(params):
        x = x + 0.1 * jnp.tanh(x @ params[name])
    return jnp.mean(x**2)


def trained(step, state, x):
    """The state after two steps, with all updates made."""
    for _ in range(2):
        state, metrics = step(state, x)
        float(metrics["loss"])
    state.block_until_ready()
    return state


def run(operation, num_layers, folder, transport, num_processes):
    """Runs an operation in this process; returns its peaks in bytes."""
    import jax
    import optax

    import jaxferry
    from jaxferry.checkpoint import pretrained
    from jaxferry.processes import distributed

    mesh = distributed.start() if num_processes > 1 else None

    def make(width):
        step = jaxferry.train_step(loss_fn, optax.adamw(1e-4), mesh=mesh, transport=transport)
        rng, own = np.random.default_rng(jax.process_index()), ROWS // num_processes
        return step, rng.standard_normal((own, width), np.float32)

    def init_fn(rng):
        keys = jax.random.split(rng, num_layers)
        return {name: 0.01 * jax.random.normal(key, (WIDTH, WIDTH)) for name, key in zip(names, keys, strict=True)}

    names = [f"l{i:02}" for i in range(num_layers)]
    tiny, x = make(8)
    tiny.save(trained(tiny, tiny.init({name: np.ones((8, 8), np.float32) for name in names[:2]}), x), folder / "tiny")
    tiny.restore(folder / "tiny")
    step, x = make(WIDTH)
    shapes = {name: Drawn(i) for i, name in enumerate(names)}
    before = {"resident": status_bytes("VmRSS"), "address_space": status_bytes("VmSize")}

    own = folder / f"export {jax.process_index()}"

    def source_of(path):
        return pretrained.Source(path[0], True)

    operations = {
        "init": lambda state: step.init(shapes),
        "init_from": lambda state: step.init_from(init_fn, jax.random.key(0)),
        "step": lambda state: trained(step, state, x),
        "save": lambda state: step.save(state, folder / "saved"),
        "save in the background": lambda state: (
            step.save(state, folder / "in the background", wait=False),
            step.wait_for_saves(),
        ),
        "restore": lambda state: step.restore(folder / "saved"),
        "restore and step": lambda state: trained(step, step.restore(folder / "saved"), x),
        "export": lambda state: pretrained.save_safetensors(own, state.lazy_params, source_of),
        "pretrained": lambda state: step.init(pretrained.arrange(pretrained.open_safetensors(own), shapes, source_of)),
        "copy": lambda state: state.copy(),
    }

    state = None if operation in WITHOUT_STATE else step.init(shapes)
    if state is not None and operation != "step":
        trained(step, state, x)
    reset_peak()
    there = status_bytes("VmRSS")
    operations[operation](state)
    peak = status_bytes("VmHWM")
    return {
        "resident": peak - before["resident"],
        "address_space": status_bytes("VmPeak") - before["address_space"],
        "added": peak - there,
    }


def measured(package, num_layers, settings):
    """The peaks of all operations in each setting."""
    found = {}
    for setting in settings:
        found[setting] = {}
        with tempfile.TemporaryDirectory() as folder:
            for operation in OPERATIONS:
                peaks = in_processes(operation, setting, package, num_layers, folder)
                found[setting][operation] = {name: max(own[name] for own in peaks) for name in peaks[0]}
                resident = found[setting][operation]["resident"]
                print(f"{setting}, {operation}: {resident / MIB:.0f} MiB", file=sys.stderr)
    return found


def in_processes(operation, setting, package, num_layers, folder):
    """Runs an operation in as many new processes as the setting has; returns the peaks of each."""
    _, num_processes = SETTINGS[setting]
    command = [sys.executable, __file__, "--run", operation, "--layers", num_layers, "--folder", folder]
    command += ["--package", package, "--setting", setting]
    together = {"JAX_COORDINATOR_ADDRESS": process_runs.free_address(), "JAX_NUM_PROCESSES": str(num_processes)}
    running = [
        subprocess.Popen(
            list(map(str, command)),
            stdout=subprocess.PIPE,
            env={**os.environ, **(together | {"JAX_PROCESS_ID": str(number)} if num_processes > 1 else {})},
        )
        for number in range(num_processes)
    ]
    texts = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit(f"{operation} failed: {setting}")
    return [json.loads(text.splitlines()[-1]) for text in texts]


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
    parser.add_argument("--setting", choices=SETTINGS, help="one to measure; all by default")
    options = parser.parse_args()
    if options.run is not None:
        take_package(options.package)
        print(json.dumps(run(options.run, options.layers, options.folder, *SETTINGS[options.setting])))
        return

    import measure
    from rich.console import Console
    from rich.table import Table

    num_parameters = options.layers * WIDTH**2
    peaks = measured(options.package, options.layers, [options.setting] if options.setting else SETTINGS)
    before = None if options.before is None else json.loads(options.before.read_text())["peaks"]
    sizes = {"state_bytes": 12 * num_parameters, "training_bytes": 20 * num_parameters}
    measure.write(
        options.name,
        {**measure.machine(), "num_parameters": num_parameters, **sizes, "before": before, "peaks": peaks},
    )
    for setting, now in peaks.items():
        table = Table(title=f"{setting}: peak MiB beyond what the process had before: resident, address space, added")
        for column in ("operation", "before", "now"):
            table.add_column(column, justify="left" if column == "operation" else "right")
        for operation in OPERATIONS:
            pair = [(before or {}).get(setting, {}).get(operation), now[operation]]
            table.add_row(operation, *map(shown, pair))
        Console().print(table)


def shown(found):
    """An operation's peaks in MiB."""
    return "-" if found is None else ", ".join(f"{size / MIB:,.0f}" for size in found.values())


if __name__ == "__main__":
    main()
