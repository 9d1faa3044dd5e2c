"""Trains under a plan whose last layers are RESIDENT, then under random ones; prints JSON of each: losses, same bits.

usage: SCRIPT SEED COUNT

Plans only move data, so all bits are equal. A load that overwrites what a program still reads changes them.
"""

import hashlib
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxferry
from jaxferry.modes import Mode
from jaxferry.step import LayerPlan, Plan

WIDTH, NUM_LAYERS, NUM_STEPS = 64, 6, 4
MODES = (Mode.RESIDENT, Mode.RESIDENT, Mode.GFGB, Mode.RELOAD)
OPTIONS: tuple[dict[str, float], ...] = ({}, {"accumulate": 2}, {"clip_norm": 1.0})


def loss_fn(params, x):
    for layer in params.values():
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean(x.astype(jnp.float32) ** 2)


def train(modes, params, batches, options, evaluates):
    """Returns the losses, and a digest of the parameters."""
    layers = tuple(LayerPlan(name, mode) for name, mode in zip(params, modes, strict=True))
    plan = Plan("any", 1.0, layers)
    step = jaxferry.train_step(
        loss_fn, optax.adamw(1e-2), plan=plan, transport="ferry", compute_dtype=jnp.float32, **options
    )
    state, losses = step.init(params), []
    for number, batch in enumerate(batches):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
        if evaluates and number % 2:
            losses.append(step.evaluate(state, batch))
    state.block_until_ready()
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state.params)))
    return [float(loss) for loss in losses], digest.hexdigest()


def main(seed, count):
    rng = np.random.default_rng(seed)
    params = {
        f"l{i}": {
            "w": (rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32),
            "b": rng.standard_normal(WIDTH).astype(np.float32),
        }
        for i in range(NUM_LAYERS)
    }
    batches = [rng.standard_normal((4, WIDTH)).astype(np.float32) for _ in range(NUM_STEPS)]
    resident_last = [Mode.GFGB] * (NUM_LAYERS - 2) + [Mode.RESIDENT] * 2
    expected = {}
    for number in range(count + 1):
        modes = [MODES[int(i)] for i in rng.integers(len(MODES), size=NUM_LAYERS)] if number else resident_last
        options, evaluates = OPTIONS[number % len(OPTIONS)], number % 4 > 1
        key = str((options, evaluates))
        if key not in expected and number:
            expected[key] = train([Mode.GFGB] * NUM_LAYERS, params, batches, options, evaluates)
        losses, digest = train(modes, params, batches, options, evaluates)
        same = (losses, digest) == expected.get(key, (losses, digest))
        row = {"modes": [mode.value for mode in modes], "options": key, "losses": losses, "same": same}
        print(json.dumps({**row, "platform": jax.devices()[0].platform}), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
