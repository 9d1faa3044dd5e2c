"""Trains models on meshes of as many devices as share their batches.

A process of its own, since JAX makes its devices once.

python mesh_losses.py NUM_DEVICES [NAME ...]
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
from models.compare import LEARNING_RATE, NUM_STEPS, plain_losses
from models.registry import OURS


def losses(task, num_devices):
    """The losses of ten steps of AdamW, as `models.compare` takes them."""
    mesh = jax.make_mesh((num_devices,), ("data",), devices=jax.devices()[:num_devices])
    step = jaxferry.train_step(task.loss_fn, optax.adamw(LEARNING_RATE), mesh=mesh)
    state, batch, found = step.init(task.params), task.batch, []
    for _ in range(NUM_STEPS):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
        batch = task.advance(batch, metrics.get("aux")) if task.advance else batch
    return found


def on_most_devices(task, most):
    """The largest number of devices, up to `most`, that divides the task's batch, and the losses on so many."""
    for number in (most, 4):
        try:
            return number, losses(task, number)
        except InputError as error:
            if "must be a multiple" not in str(error):
                raise
    return 2, losses(task, 2)


def main():
    """Prints the losses by model and number of devices as JSON."""
    warnings.simplefilter("ignore")
    most, names = int(sys.argv[1]), sys.argv[2:]
    found = {}
    for model in OURS:
        if names and model.name not in names:
            continue
        task = model.make()
        num_devices, shared = on_most_devices(task, most)
        plain = list(plain_losses(task, optax.adamw(LEARNING_RATE)))
        found[f"{model.name} ({model.style})"] = {"plain": plain, str(num_devices): shared}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
