"""Trains GPT-2 on real text with Adam's moments and masters in fewer bits, and compares the loss curves.

    python benchmarks/moments.py [--steps 2000] [--every 100] [--seeds 0 1] [--optimizers float32 int8]

The example's smallest model on the text of Python's standard library, 8 x 128 tokens a step, in turns:

- float32: `jaxferry.adamw`;
- bfloat16: `jaxferry.adamw(moments="bfloat16")`, whose moments are rounded up or down at random;
- int8: `jaxferry.adamw(moments="int8")`, codes of 8 bits in blocks of 256, rounded up or down at random too;
- masters: as int8, with masters in bfloat16, rounded up or down at random;
- nearest: both moments in bf16 to nearest, in Optax: why that is not done. A step changes the second moment by less
  than half of what bf16 resolves, unless a gradient is large: it grows and hardly falls.

With `--optimizers`, the others keep their rows in the JSON. Expected: the validation losses of bfloat16, int8 and
masters differ from that of float32 by less than two seeds of float32 differ.
"""

import argparse
import json
import statistics

import benchmark_paths  # noqa: F401 - makes the others importable
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import measure
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import jaxferry
from examples.common.batches import Batches
from examples.common.text import load, train_byte_bpe
from examples.gpt2 import model
from jaxferry.optimizer import moments_of

BATCH, LENGTH, RATE, WARMUP = 8, 128, 1e-3, 20
NUM_VALIDATION = 16


def nearest(rate):
    """AdamW with both moments rounded to nearest."""
    adam = optax.scale_by_adam()

    def cast(state, dtype):
        own = (jax.tree.map(lambda x: x.astype(dtype), tree) for tree in (state.mu, state.nu))
        return state._replace(**dict(zip(("mu", "nu"), own, strict=True)))

    def update(gradients, state, params=None):
        updates, new = adam.update(gradients, cast(state, jnp.float32), params)
        return updates, cast(new, jnp.bfloat16)

    scale = optax.GradientTransformation(lambda params: cast(adam.init(params), jnp.bfloat16), update)
    return optax.chain(scale, optax.add_decayed_weights(1e-4), optax.scale_by_learning_rate(rate))


OPTIMIZERS = {
    "float32": jaxferry.adamw,
    "bfloat16": lambda rate: jaxferry.adamw(rate, moments="bfloat16"),
    "int8": lambda rate: jaxferry.adamw(rate, moments="int8"),
    "masters": lambda rate: jaxferry.adamw(rate, moments="int8", masters="bfloat16"),
    "nearest": nearest,
}
BYTES = {"float32": "8", "bfloat16": "4", "int8": "2.03", "masters": "2.03", "nearest": "4"}


def curve(config, corpus, name, seed, steps, every, report):
    """The validation loss after every so many steps."""
    schedule = optax.linear_schedule(0.0, RATE, WARMUP)
    step = jaxferry.train_step(model.make_loss(config), OPTIMIZERS[name](schedule))
    state = step.init_from(model.make_init(config), jax.random.key(seed))
    batches = Batches(corpus.train, BATCH, LENGTH, seed)
    held_out = Batches(corpus.validation, BATCH, LENGTH, 0)
    losses = []
    for number in range(steps):
        state, _ = step(state, batches(number))
        if (number + 1) % every == 0:
            found = [float(step.evaluate(state, held_out(i))) for i in range(NUM_VALIDATION)]
            losses.append(statistics.fmean(found))
            report(f"{name}, seed {seed}, step {number + 1}: {losses[-1]:.4f}")
    second = float(np.mean([np.mean(leaf) for leaf in jax.tree.leaves(moments_of(state.opt_state)[1])]))
    return {"optimizer": name, "seed": seed, "validation_losses": losses, "mean_second_moment": second}


def draw(rows, every, path):
    figure, axes = plt.subplots(figsize=(6.4, 4))
    styles = {"float32": "k-", "bfloat16": "C0--", "int8": "C2-.", "masters": "C1--", "nearest": "C3:"}
    for row in rows:
        places = every * np.arange(1, 1 + len(row["validation_losses"]))
        label = row["optimizer"] if row["seed"] == rows[0]["seed"] else None
        axes.plot(places, row["validation_losses"], styles[row["optimizer"]], linewidth=1.2, label=label)
    axes.set(xlabel="step", ylabel="validation loss (nats a token)", title="GPT-2 tiny: state in fewer bits")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    options = parser.parse_args()
    config, console = model.SIZES["tiny"], Console()
    corpus = load(None, config.vocab_size, train_byte_bpe, "gpt2")
    rows, path = [], measure.RESULTS / "moments.json"
    if len(options.optimizers) < len(OPTIMIZERS):
        rows = [row for row in json.loads(path.read_text())["rows"] if row["optimizer"] not in options.optimizers]
    for seed in options.seeds:
        for name in options.optimizers:
            rows.append(curve(config, corpus, name, seed, options.steps, options.every, console.print))
            rows.sort(key=lambda row: (row["seed"], list(OPTIMIZERS).index(row["optimizer"])))
            document = {"machine": measure.machine(), "steps": options.steps, "every": options.every, "rows": rows}
            measure.write("moments", document)  # each takes minutes
    final = {name: [row["validation_losses"][-1] for row in rows if row["optimizer"] == name] for name in OPTIMIZERS}
    table = Table("optimizer", "bytes for moments", "validation loss at the end, by seed", "mean second moment")
    for name, losses in final.items():
        second = [row["mean_second_moment"] for row in rows if row["optimizer"] == name]
        table.add_row(name, BYTES[name], ", ".join(f"{x:.4f}" for x in losses), ", ".join(f"{x:.2e}" for x in second))
    console.print(table)
    draw(rows, options.every, measure.RESULTS / "moments.png")


if __name__ == "__main__":
    main()
