"""Trains a 2-layer GPT-2 for three steps and compares its losses with plain JAX on a CPU. A stage of check.py.

smoke.py reference FILE.json                          plain JAX; run it on a CPU
smoke.py POLICY TRANSPORT DTYPE FILE.json             one case, on JAX's first device

POLICY may also be the places of the updates: those of `PLACES`. Masters and state that stream are cut into subgroups
that are small enough for several of each layer.
"""

import itertools
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "gpt2"))

import jaxferry
import model
from benchmarks.gpu.stages import emit
from jaxferry.modes import Mode, UpdatePlace
from jaxferry.partition import partition
from jaxferry.step import LayerPlan, Plan, streaming

HOST, STAYS = (UpdatePlace.HOST, Mode.GFGB), (UpdatePlace.RESIDENT, Mode.RESIDENT)
STREAMS, COPY_STAYS = (UpdatePlace.GPU, Mode.GFGB), (UpdatePlace.GPU, Mode.RESIDENT)
PLACES = {"gpu": (STREAMS,), "resident": (STAYS,), "mixed": (HOST, STAYS, STREAMS, COPY_STAYS)}
"""The places of updates with the modes of their layers, layer by layer in turns."""
SUBGROUP_BYTES = 2**18
CONFIG = model.Config(num_layers=2, num_heads=4, channels=128, max_length=64, vocab_size=512)
BATCH, LENGTH, NUM_STEPS, LEARNING_RATE = 4, 64, 3, 1e-3
MOST_OFF = {"float32": 1e-3, "bfloat16": 2e-2}
"""The relative difference of a loss that products in TF32, and in bfloat16, may make."""


def make():
    """Loss function, parameters and batch, the same on every device."""
    shapes = jax.eval_shape(model.make_init(CONFIG), jax.random.key(0))
    generator = np.random.default_rng(0)

    def leaf(path, like):
        if path[-1].key in ("scale", "bias"):
            return np.full(like.shape, path[-1].key == "scale", np.float32)
        return generator.standard_normal(like.shape, np.float32) * np.float32(0.02)

    params = jax.tree_util.tree_map_with_path(leaf, shapes)
    tokens = generator.integers(0, CONFIG.vocab_size, (BATCH, LENGTH + 1), dtype=np.int32)
    return model.make_loss(CONFIG), params, {"tokens": tokens}


def reference(dtype):
    """The losses of plain JAX and Optax."""
    loss_fn, params, batch = make()
    optimizer = optax.adamw(LEARNING_RATE)

    @jax.jit
    def step(params, state):
        compute = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        loss, gradients = jax.value_and_grad(loss_fn)(compute, batch)
        gradients = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradients)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = optimizer.init(params), []
    for _ in range(NUM_STEPS):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    return losses


def plan_of(name, dtype):
    """A plan that updates parameters at these places; the uses of one group agree."""
    loss_fn, params, batch = make()
    parts = partition(loss_fn, params, (batch,), compute_dtype=dtype)
    groups = dict.fromkeys(use.group for use in parts.uses)
    of_group = dict(zip(groups, itertools.cycle(PLACES[name]), strict=False))
    chosen = ((use.name, *of_group[use.group]) for use in parts.uses)
    layers = (LayerPlan(use, mode, update=place) for use, place, mode in chosen)
    return Plan(name, 1.0, tuple(layers))


def smoke(policy, transport, dtype, expected):
    """Trains one case; returns whether the losses are those expected."""
    loss_fn, params, batch = make()
    begin_s = time.perf_counter()
    chosen = {"policy": policy, "profile": "estimate"}
    if policy in PLACES:
        streaming.SUBGROUP_BYTES = SUBGROUP_BYTES
        chosen = {"plan": plan_of(policy, jnp.dtype(dtype))}
    step = jaxferry.train_step(
        loss_fn,
        jaxferry.adamw(LEARNING_RATE),
        **chosen,
        transport=transport,
        compute_dtype=jnp.dtype(dtype),
        merge_small=False,
    )
    state, losses = step.init(params), []
    for _ in range(NUM_STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    state.block_until_ready()
    off = max(abs(found / wanted - 1) for found, wanted in zip(losses, expected, strict=True))
    prepared = step.prepare(batch)
    emit(
        case=f"{policy}/{transport}/{dtype}",
        losses=losses,
        expected=expected,
        off=off,
        seconds=time.perf_counter() - begin_s,
        modes=[mode.value for mode in prepared.modes],
        updates=[layer.update.value for layer in prepared.plan.layers],
        subgroups=max(prepared.program.streamed.values(), default=0),
        counted_bytes=prepared.peak.total,
        device=jax.devices()[0].device_kind,
    )
    return off <= MOST_OFF[dtype]


def main():
    *case, path = sys.argv[1:]
    if case == ["reference"]:
        pathlib.Path(path).write_text(json.dumps({dtype: reference(jnp.dtype(dtype)) for dtype in MOST_OFF}))
        return 0
    expected = json.loads(pathlib.Path(path).read_text())
    if not smoke(*case, expected[case[2]]):
        print(f"the losses of {'/'.join(case)} are not those of plain JAX")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
