"""Compares what the device's allocator reports with the memory budget. Usage: budgets.py OUTPUT_DIR [--size 124m]

Trains GPT-2 in bfloat16 under several policies, transports and budgets, each in a process of its own, because the
allocator's peak cannot be reset. Budgets are multiples of the least one that the step accepts. A row has the budget,
what the engine counts, what it leaves for chunks that the allocator does not split, and the allocator's peak.

Expectation, written before the first run: no peak is above its budget; unsplit chunks take at most 3 % of what is
counted for `medium`, and more for `124m`.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))

from benchmarks.gpu.settings import BATCHES, SHAPES

RUNS = (
    ("native-overlapped", "ferry", 1.0, "true"),
    ("native-overlapped", "ferry", 1.5, "true"),
    ("auto", "ferry", 1.2, "true"),
    ("l2l", "ferry", 1.0, "false"),
    ("native-overlapped", "device_put", 1.0, "true"),
    ("native-overlapped", "device_put", 1.4, "false"),
)
"""Policy, transport, multiple of the least budget, and whether JAX preallocates."""
NUM_STEPS = 6


def train(size, batch_size, policy, transport, multiple):
    """Trains one contender in this process and returns its row."""
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "gpt2"))
    import jax
    import jax.numpy as jnp

    import jaxferry
    import model
    from benchmarks.gpu import contenders, inputs

    layers, heads, channels, length, vocabulary = SHAPES[size]
    config = model.Config(layers, heads, channels, length, vocabulary)
    loss_fn, params = model.make_loss(config), contenders.make_params(config)
    batch = {"tokens": inputs.tokens(batch_size, BATCHES[size][1], vocabulary)}

    def make(budget):
        return jaxferry.train_step(
            loss_fn,
            jaxferry.adamw(1e-4),
            policy=policy,
            profile="estimate",
            transport=transport,
            memory_budget=budget,
            compute_dtype=jnp.bfloat16,
            remat="auto",
        )

    step = make(1024)
    step.declare(params)
    try:
        step.prepare(batch)
    except jaxferry.BudgetError as error:
        least = error.smallest_bytes
    budget = int(least * multiple)
    step = make(budget)
    state, peak = step.init(params), step.prepare(batch).peak
    for _ in range(NUM_STEPS):
        state, metrics = step(state, batch)
    state.block_until_ready()
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "device": jax.devices()[0].device_kind,
        "budget_bytes": budget,
        "counted_bytes": peak.counted,
        "unsplit_bytes": peak.total - peak.counted,
        "allocator_peak_bytes": stats.get("peak_bytes_in_use"),
        "loss": float(metrics["loss"]),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--size", choices=BATCHES, default="124m")
    parser.add_argument("--batch", type=int, help="rows; default: that of the size")
    parser.add_argument("--run", type=int, help="trains this one of the runs in this process")
    parser.add_argument("--limit", type=float, default=90, help="seconds for each run")
    arguments = parser.parse_args()
    batch_size = arguments.batch or BATCHES[arguments.size][0]
    if arguments.run is not None:
        print(json.dumps(train(arguments.size, batch_size, *RUNS[arguments.run][:3])))
        return
    rows, cache = [], tempfile.mkdtemp(prefix="budgets-")
    for number, (policy, transport, multiple, preallocate) in enumerate(RUNS):
        command = [sys.executable, __file__, str(arguments.output), "--size", arguments.size, "--run", str(number)]
        environment = {"JAX_COMPILATION_CACHE_DIR": cache, **os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": preallocate}
        row = {"policy": policy, "transport": transport, "multiple": multiple, "preallocate": preallocate == "true"}
        try:
            done = subprocess.run(
                [*command, "--batch", str(batch_size)],
                env=environment,
                capture_output=True,
                text=True,
                timeout=arguments.limit,
            )
            lines = done.stdout.strip().splitlines()
            row |= json.loads(lines[-1]) if done.returncode == 0 else {"error": done.stderr[-600:]}
        except subprocess.TimeoutExpired:
            row |= {"error": f"not done in {arguments.limit} s"}
        rows.append(row)
        print(json.dumps(row), flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    found = {"size": arguments.size, "batch": batch_size, "rows": rows}
    (arguments.output / f"budgets_{arguments.size}.json").write_text(json.dumps(found, indent=1) + "\n")
    above = [row for row in rows if (row.get("allocator_peak_bytes") or 0) > row.get("budget_bytes", 0)]
    failed = [row for row in rows if "error" in row]
    print(f"{len(rows)} runs, {len(above)} above their budget, {len(failed)} failed")
    sys.exit(bool(above or failed))


if __name__ == "__main__":
    main()
