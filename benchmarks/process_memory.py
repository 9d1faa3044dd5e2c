"""Host memory of each process, when 1, 2 and 4 of them train one model.

    python benchmarks/process_memory.py

Dense layers of 2048 x 2048 in float32 with AdamW: 16 MiB of parameters each, twice as much optimizer state. The
processes run on this machine, joined by gloo over loopback; memory of their virtual CPU devices is host memory here as
well. Counted, for 16 layers: the bytes of all arrays that the state holds, beside those that `Model.host_bytes`
predicts. Measured: how much the process's own memory (`RssAnon`) grows from before `init_from` until two steps and an
evaluation, which frees the loads of the next step, have ended; with 16 layers beyond what it does with 4, since
compilers and programs take the same for both. The C library first gives back the memory that it keeps for later. Once
with every layer loaded, and once with every layer read in host memory (DHA), of which each of several processes then
has a whole copy. Prints a table and writes `benchmarks/results/process_memory.json`.

Expected: 1/N of masters, optimizer state and compute copy in each process; what is counted is what is predicted, but
for AdamW's count, of which each layer has its own.
"""

import ctypes
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import benchmark_paths  # noqa: F401
from rich.console import Console
from rich.table import Table

import process_runs

NUM_LAYERS, FEW_LAYERS, WIDTH, ROWS = 16, 4, 2048, 8
MIB, COUNTS_BYTES = 2**20, 4 * NUM_LAYERS
KINDS = ("masters_and_state", "compute_copy", "copies_read_in_place")


def init_fn(num_layers):
    """The initialiser of so many layers."""

    def init(rng):
        import jax

        keys = jax.random.split(rng, num_layers)
        return {f"layer_{i}": {"w": jax.random.normal(keys[i], (WIDTH, WIDTH)) / WIDTH**0.5} for i in range(num_layers)}

    return init


def loss_fn(params, x):
    import jax.numpy as jnp

    for i in range(len(params)):
        x = jnp.tanh(x @ params[f"layer_{i}"]["w"])
    return jnp.mean(x**2)


def own_memory_bytes():
    """Memory of this process that no file backs and that it uses."""
    ctypes.CDLL(None).malloc_trim(0)
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return 1024 * int(line.split()[1])


class Member(process_runs.Member):
    """One of the processes."""

    def few(self):
        """With few layers, which are loaded."""
        return self._held("GFGB", FEW_LAYERS)

    def few_read(self):
        """With few layers, which are read in host memory."""
        return self._held("DHA", FEW_LAYERS)

    def loaded(self):
        """With all layers, which are loaded."""
        return self._held("GFGB", NUM_LAYERS)

    def read(self):
        """With all layers, which are read in host memory."""
        return self._held("DHA", NUM_LAYERS)

    def _held(self, mode, num_layers):
        import jax
        import numpy as np
        import optax

        import jaxferry
        from jaxferry.modes import Mode
        from jaxferry.step import LayerPlan, Plan

        layers = tuple(LayerPlan(f"layer_{i}", Mode(mode)) for i in range(num_layers))
        step = jaxferry.train_step(loss_fn, optax.adamw(1e-4), mesh=self.mesh, plan=Plan("any", 1.0, layers))
        rows = ROWS // jax.process_count()
        x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)[self.number * rows :][:rows]
        before = own_memory_bytes()
        state = step.init_from(init_fn(num_layers), jax.random.key(0))
        for _ in range(2):
            state, metrics = step(state, x)
        step.evaluate(state, x)
        found, program = process_runs.host_bytes(step, state), step.prepare(x).program
        predicted = step.compiler.model.host_bytes(state.host.layers, program.read_in_place)
        return {
            "masters_and_state": found["held"],
            "masters_and_state_predicted": found["predicted"],
            "masters_and_state_of_all": found["whole"],
            "compute_copy": found["copy"],
            "compute_copy_predicted": found["predicted copy"],
            "copies_read_in_place": state.host.whole_copies.num_bytes,
            "copies_read_in_place_predicted": predicted.get("copies to read in place", 0),
            "predicted": sum(predicted.values()),
            "memory_growth": own_memory_bytes() - before,
            "loss": float(metrics["loss"]),
        }


def started(scenario, number):
    """What the process has found whose memory has grown most."""
    with tempfile.TemporaryDirectory() as folder:
        ended = process_runs.start(scenario, number, 1, Path(folder), script=__file__)
    failed = [found for found in ended if isinstance(found, str)]
    assert not failed, failed[0]
    for found in ended:
        for name in KINDS:
            assert 0 <= found[name] - found[f"{name}_predicted"] <= COUNTS_BYTES, (name, found)
    return max(ended, key=lambda found: found["memory_growth"])


def main():
    import measure

    rows = []
    for scenario, few in (("loaded", "few"), ("read", "few_read")):
        for number in (1, 2, 4):
            found, less = started(scenario, number), started(few, number)
            beyond = {name: found[name] - less[name] for name in ("predicted", "memory_growth")}
            rows.append({"layers": scenario, "processes": number, **found, "beyond_few_layers": beyond})
    heads = ("masters, state", "compute copy", "read in place", "all, predicted", "12 layers, predicted", "measured")
    table = Table("layers", "processes", *heads, title="MiB in the process whose memory has grown most")
    for row in rows:
        sizes = [*(row[name] for name in (*KINDS, "predicted")), *row["beyond_few_layers"].values()]
        table.add_row(row["layers"], str(row["processes"]), *(f"{size / MIB:.1f}" for size in sizes))
    Console().print(table)
    facts = {"machine": measure.machine(), "parameters": NUM_LAYERS * WIDTH**2}
    measure.write("process_memory", {**facts, "rows": rows})


if __name__ == "__main__":
    process_runs.main(Member) if len(sys.argv) == 7 else main()
