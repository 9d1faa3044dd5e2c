"""Losses of ten Flax models that several processes train, beside those of one device.

    python benchmarks/process_losses.py

Twenty steps of AdamW in float32, in linen and NNX, with dropout, BatchNorm, auxiliary results, scanned and frozen
parameters: models of the tests. Two processes of one and of two virtual CPU devices each, joined by gloo over loopback,
share each batch; a third run reads every layer in host memory and writes its gradient there (DHA and GO). Prints a
table and writes `benchmarks/results/process_losses.json`.

Expected: relative differences below 1e-5.
"""

import os
import sys
import tempfile
import warnings
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import benchmark_paths  # noqa: F401
from rich.console import Console
from rich.table import Table

import process_runs

NUM_STEPS, LEARNING_RATE = 20, 1e-3
MODELS = (
    ("GPT-2, tied head", "linen"),
    ("residual MLPs", "NNX"),
    ("GPT-2 with dropout", "linen"),
    ("dropout from the model's own Rngs", "NNX"),
    ("ResNet with BatchNorm", "linen"),
    ("ResNet with BatchNorm", "NNX"),
    ("mixture of experts, top 2", "linen"),
    ("five heads, three losses", "linen"),
    ("blocks under nn.scan", "linen"),
    ("LoRA, base by stop_gradient", "linen"),
)
RUNS = {
    "2 processes": (2, 1, False),
    "2 processes of 2 devices": (2, 2, False),
    "2 processes, DHA and GO": (2, 1, True),
}
"""Processes, devices of each, and whether programs read and write host memory."""


def trained(task, in_host_memory=False, **where):
    """The losses of a task; where given, every segment reads and writes host memory."""
    import optax

    import jaxferry
    from jaxferry.modes import GradientPlace, Mode
    from jaxferry.processes import distributed
    from jaxferry.step import LayerPlan, Plan

    warnings.simplefilter("ignore")
    optimizer, batch = optax.adamw(LEARNING_RATE), distributed.alike(task.batch)
    if in_host_memory:
        step = jaxferry.train_step(task.loss_fn, optimizer, **where)
        step.declare(task.params)
        names = [segment.name for segment in step.prepare(batch).partition.segments]
        layers = tuple(LayerPlan(name, Mode.DHA, gradient=GradientPlace.HOST) for name in names)
        where = {**where, "plan": Plan("any", 0.0, layers)}
    step, losses = jaxferry.train_step(task.loss_fn, optimizer, **where), []
    state = step.init(task.params)
    for _ in range(NUM_STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        if task.advance:
            batch = distributed.alike(task.advance(task.batch, distributed.whole(metrics.get("aux"))))
    return losses


def tasks():
    """The models, by name and style."""
    from models.registry import OURS

    made = {(model.name, model.style): model.make for model in OURS}
    return [made[model]() for model in MODELS]


class Member(process_runs.Member):
    """One of the processes."""

    def loaded(self):
        """Losses of all models whose batches the devices can share; else None."""
        return self._losses(False)

    def read(self):
        """Likewise, with DHA and GO."""
        return self._losses(True)

    def _losses(self, in_host_memory):
        from jaxferry.errors import InputError

        found = []
        for task in tasks():
            try:
                found.append(trained(task, in_host_memory, mesh=self.mesh))
            except InputError as error:
                if "must be a multiple" not in str(error):
                    raise
                found.append(None)
        return found


def difference(losses, expected):
    """The largest difference of a step, relative to one device."""
    return None if losses is None else max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def main():
    import measure

    alone = [trained(task, transport="device_put") for task in tasks()]
    rows = [
        {"model": name, "style": style, "loss": losses[-1]} for (name, style), losses in zip(MODELS, alone, strict=True)
    ]
    for run, (num_processes, num_devices, in_host_memory) in RUNS.items():
        scenario = "read" if in_host_memory else "loaded"
        with tempfile.TemporaryDirectory() as folder:
            ended = process_runs.start(scenario, num_processes, num_devices, Path(folder), script=__file__)
        failed = [found for found in ended if isinstance(found, str)]
        assert not failed, failed[0]
        assert all(found == ended[0] for found in ended), "processes have different losses"
        for row, losses, expected in zip(rows, ended[0], alone, strict=True):
            row[run] = difference(losses, expected)
    table = Table("model", "", "loss", *RUNS)
    for row in rows:
        cells = ["-" if row[run] is None else f"{row[run]:.1e}" for run in RUNS]
        table.add_row(row["model"], row["style"], f"{row['loss']:.5f}", *cells)
    Console().print(table)
    worst = max(row[run] for row in rows for run in RUNS if row[run] is not None)
    print(f"largest relative difference: {worst:.1e}")
    measure.write(
        "process_losses", {"machine": measure.machine(), "num_steps": NUM_STEPS, "largest": worst, "models": rows}
    )


if __name__ == "__main__":
    process_runs.main(Member) if len(sys.argv) > 1 else main()
