"""Trains in 16 bits with gradients that overflow at first; prints JSON of each step. Usage: SCRIPT DTYPE TRANSPORT."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxferry

dtype, transport = sys.argv[1:3]
rng = np.random.default_rng(0)
params = {f"l{i}": {"w": (rng.standard_normal((8, 8)) / 8**0.5).astype(np.float32)} for i in range(3)}
x = rng.standard_normal((32, 8)).astype(np.float32)


def loss_fn(params, x):
    for layer in params.values():
        x = jnp.tanh(x @ layer["w"])
    return jnp.mean((x.astype(jnp.float32) - 30) ** 2)


step = jaxferry.train_step(
    loss_fn, optax.adamw(1e-2), compute_dtype=jnp.dtype(dtype), transport=transport, loss_scale="dynamic"
)
state = step.init(params)
for _ in range(6):
    state, metrics = step(state, x)
    is_finite = all(bool(np.isfinite(np.asarray(leaf)).all()) for leaf in jax.tree.leaves(state.params))
    row = {name: float(value) for name, value in metrics.items()}
    print(json.dumps({**row, "finite": is_finite, "platform": jax.devices()[0].platform}))
