"""Trains random models under random plans and budgets; prints each budget, and the peak that the allocator reports.

usage: SCRIPT SEED COUNT TRANSPORT

The allocator's peak never falls, so all plans of one process run in the order of their budgets.
"""

import gc
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxferry

SELF_TEST_BYTES = 640 * 1024
"""More than the library's self-test takes, once for each process, whatever the budgets."""
POLICIES = ("auto", "native-overlapped", "l2l", "exact", "memferry", None)


def loss_fn(params, x):
    for layer in params.values():
        x = x + jnp.tanh(x @ layer["up"]) @ layer["down"] + layer["bias"]
    return jnp.mean(x.astype(jnp.float32) ** 2)


def draw(rng):
    """Draws a model, its batch and the options of its step."""
    width = int(rng.choice([96, 128, 200, 256]))
    params = {}
    for i in range(int(rng.integers(3, 7))):
        inner = width * int(rng.integers(1, 5))
        up, down = rng.standard_normal((width, inner)), rng.standard_normal((inner, width))
        params[f"l{i}"] = {"up": up / width**0.5, "down": down / inner**0.5, "bias": np.zeros(width)}
    params = jax.tree.map(lambda leaf: leaf.astype(np.float32), params)
    options = {"compute_dtype": jnp.dtype(rng.choice(["float32", "bfloat16", "float16"]))}
    policy = POLICIES[int(rng.integers(len(POLICIES)))]
    options |= {} if policy is None else {"policy": policy}
    options |= {"remat": "auto"} if rng.random() < 0.3 else {}
    options |= {"accumulate": 2} if rng.random() < 0.3 else {}
    options |= {"clip_norm": 1.0} if rng.random() < 0.3 else {}
    options |= {"offload_activations": True} if rng.random() < 0.3 and "remat" not in options else {}
    x = rng.standard_normal((int(rng.choice([4, 16, 48])), width)).astype(np.float32)
    return params, x, options


def least_budget(params, x, options):
    """The budget that the refusal of a smaller one names."""
    step = jaxferry.train_step(loss_fn, jaxferry.adamw(1e-3), memory_budget="1KiB", **options)
    step.declare(params)
    try:
        step.prepare(x)
    except jaxferry.BudgetError as error:
        return error.smallest_bytes
    raise AssertionError("a budget of 1 KiB was accepted")


def main(seed, count, transport):
    rng = np.random.default_rng(seed)
    runs = []
    for _ in range(count):
        params, x, options = draw(rng)
        options["transport"] = transport
        # Every third plan has the least budget of all.
        budget = int(least_budget(params, x, options) * (1 + max(0.0, rng.uniform(-0.4, 0.8))))
        runs.append((max(budget, SELF_TEST_BYTES), params, x, options))
    for budget, params, x, options in sorted(runs, key=lambda run: run[0]):
        step = jaxferry.train_step(loss_fn, jaxferry.adamw(1e-3), memory_budget=budget, **options)
        state = step.init(params)
        for _ in range(5):
            state, metrics = step(state, x)
        state.block_until_ready()
        # An evaluation takes the whole batch at once, and so may need more than a step with micro-batches.
        refused = None
        try:
            step.evaluate(state, x)
        except jaxferry.BudgetError as error:
            refused = error.smallest_bytes
        peak = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
        named = {name: str(value) for name, value in options.items()}
        found = {"budget": budget, "peak": peak, "refused": refused, "loss": float(metrics["loss"])}
        print(json.dumps(found | named), flush=True)
        del step, state, metrics
        gc.collect()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
