"""Trains models on meshes of as many devices as share their batches.

A process of its own, since JAX makes its devices once.

python mesh_losses.py NUM_DEVICES PLACE [NAME ...]

PLACE, "host" or "resident", is where all groups are updated.
"""

import json
import sys
import warnings
from pathlib import Path

import jax
import optax

sys.path.insert(0, str(Path(__file__).parents[1]))

import jaxferry
from jaxferry.errors import InputError
from jaxferry.modes import Mode, UpdatePlace
from jaxferry.step import LayerPlan, Plan
from models.compare import LEARNING_RATE, NUM_STEPS, plain_losses
from models.registry import OURS


def losses(task, num_devices, place):
    """The losses of ten steps of AdamW, as `models.compare` takes them."""
    mesh = jax.make_mesh((num_devices,), ("data",), devices=jax.devices()[:num_devices])
    step = jaxferry.train_step(task.loss_fn, optax.adamw(LEARNING_RATE), mesh=mesh)
    if place is UpdatePlace.RESIDENT:
        step.declare(task.params)
        names = [layer.name for layer in step.prepare(task.batch).plan.layers]
        plan = Plan("any", 1.0, tuple(LayerPlan(name, Mode.RESIDENT, update=place) for name in names))
        step = jaxferry.train_step(task.loss_fn, optax.adamw(LEARNING_RATE), mesh=mesh, plan=plan)
    state, batch, found = step.init(task.params), task.batch, []
    for _ in range(NUM_STEPS):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
        batch = task.advance(batch, metrics.get("aux")) if task.advance else batch
    assert all(unit.is_on_device == (place is UpdatePlace.RESIDENT) for unit in state.host.units)
    return found


def on_most_devices(task, most, place):
    """The largest number of devices, up to `most`, that divides the task's batch, and the losses on so many."""
    for number in (most, 4):
        try:
            return number, losses(task, number, place)
        except InputError as error:
            if "must be a multiple" not in str(error):
                raise
    return 2, losses(task, 2, place)


def main():
    """Prints the losses by model and number of devices as JSON."""
    warnings.simplefilter("ignore")
    most, place, names = int(sys.argv[1]), UpdatePlace(sys.argv[2]), sys.argv[3:]
    found = {}
    for model in OURS:
        if names and model.name not in names:
            continue
        task = model.make()
        num_devices, shared = on_most_devices(task, most, place)
        plain = list(plain_losses(task, optax.adamw(LEARNING_RATE)))
        found[f"{model.name} ({model.style})"] = {"plain": plain, str(num_devices): shared}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
