"""Prints how many algorithms of products a GPU knows before the first step of DHA and GO, and after each step."""

import json
import sys

import jax.numpy as jnp
import numpy as np

import jaxferry
from jaxferry.modes import GradientPlace, Mode
from jaxferry.native import library, targets
from jaxferry.step import LayerPlan, Plan

WIDTH, DTYPE = 1001, jnp.dtype(sys.argv[1])
NAMES = "ab"


def loss_fn(params, x):
    for name in NAMES:
        x = jnp.tanh(x @ params[name])
    return jnp.mean(x.astype(jnp.float32) ** 2)


def num_known():
    return library("gpu").plan_product(0, *first)


plan = Plan("any", 1.0, tuple(LayerPlan(name, Mode.DHA, GradientPlace.HOST) for name in NAMES))
step = jaxferry.train_step(loss_fn, jaxferry.sgd(1.0), plan=plan, compute_dtype=DTYPE)
state = step.init({name: np.full((WIDTH, WIDTH), 1e-3, np.float32) for name in NAMES})
batch = np.ones((8, WIDTH), DTYPE)
step.prepare(batch)
first = next(iter(targets.PRODUCTS))
counts = [num_known()]
for _ in range(2):
    state = step(state, batch)[0]
    state.block_until_ready()
    counts.append(num_known())
print(json.dumps({"products": len(targets.PRODUCTS), "algorithms": counts}))
