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


def main():
    """Prints the losses by model and number of devices as JSON."""
    warnings.simplefilter("ignore")
    most, names = int(sys.argv[1]), sys.argv[2:]
    found = {}
    for model in OURS:
        if names and model.name not in names:
            continue
        task = model.make()
        sizes = [leaf.shape[0] for leaf in jax.tree.leaves(task.batch) if getattr(leaf, "shape", ())]
        numbers = [num for num in (2, 4, 8) if num <= most and any(size % num == 0 for size in sizes)]
        by_number = {str(num): losses(task, num) for num in numbers[-1:]}
        found[f"{model.name} ({model.style})"] = {
            "plain": list(plain_losses(task, optax.adamw(LEARNING_RATE))),
            **by_number,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
