"""The most memory that each way to make a state takes beside what was there before, in bytes, as JSON.

A process of its own, whose peak nothing else raises: python memory_peaks.py PATH, where checkpoints are written.
"""

import gc
import json
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

import jaxferry
from jaxferry.checkpoint import pretrained


def memory(name):
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(name))


def peak_of(make):
    """What a function returns, and how much memory it has taken at most."""
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is that from now on
    before = memory("VmRSS")
    made = make()
    return made, memory("VmHWM") - before


def loss(params, x):
    for name in params:
        x = x + jnp.tanh(x @ params[name])
    return jnp.mean(x**2)


def block_loss(params, x):
    return loss(params["block"], x) * jnp.mean(params["norm"]["scale"])


def packed_loss(params, x):
    return sum(jnp.mean((x @ leaf.astype(jnp.float32) * params["v"]) ** 2) for leaf in params["q"])


def train_step(loss_fn=loss, optimizer=None, **options):
    return jaxferry.train_step(loss_fn, optimizer or optax.sgd(0.1), **options)


def packed_step():
    return train_step(packed_loss, trainable=lambda path: path == "v")


def made_from(width):
    def init_fn(rng):
        keys = jax.random.split(rng, 8)
        block = {f"l{i}": jax.random.normal(keys[i], (width, width)) for i in range(8)}
        return {"block": block, "norm": {"scale": jnp.ones(width)}}

    return train_step(block_loss).init_from(init_fn, jax.random.key(0))


def peaks(path, width, rows):
    """Each way's peak by its name."""
    found, step = {}, train_step(optimizer=optax.adamw(1e-4))

    def measure(name, make):
        made, found[name] = peak_of(make)
        return made

    shapes = {f"l{i}": np.broadcast_to(np.float32(0.001), (width, width)) for i in range(5)}
    codes = np.broadcast_to(np.arange(rows).astype(np.int8).astype(ml_dtypes.int4), (4 * rows, rows))
    held = [measure("init", lambda: step.init(shapes))]
    step.save(held[0], path)
    measure("a copy", lambda: held[0].copy())
    measure("init from lazy parameters", lambda: train_step().init(held[0].lazy_params))
    measure("an export", lambda: pretrained.save_safetensors(f"{path}-export", held[0].lazy_params, ".".join))
    held.clear()
    measure("a restore", lambda: step.restore(path))
    measure("init_from", lambda: made_from(width))
    measure("four bits", lambda: packed_step().init({"q": [codes] * 4, "v": np.ones(rows, np.float32)}))
    return found


if __name__ == "__main__":
    peaks(f"{sys.argv[1]}-small", 8, 8)  # what JAX and TensorStore take themselves
    print(json.dumps(peaks(sys.argv[1], 2048, 4096)))
