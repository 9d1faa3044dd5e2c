"""Memory and processor time of a step in tiles, beside one tile and beside a chunked cross-entropy written by hand.

    python benchmarks/tiles.py [--rows 8] [--tokens 128] [--words 50257] [--steps 5]

A small model with a vocabulary of 50,257 words, float32, on a CPU, where a program's temporaries are host memory: an
embedding, two MLPs and a head. Each variant trains in a process of its own. Measured: the most memory that is resident
during a step (`VmHWM`, reset before it) beyond what was resident before it, the processor time of a step (other load on
the machine does not count), and the losses. By hand: the logits of a chunk are computed in a `lax.scan` over chunks of
the batch, under `jax.checkpoint`, so that their products are computed twice.
Writes `benchmarks/results/tiles.json`.
"""

import argparse
import json
import os
import subprocess
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import benchmark_paths  # noqa: F401
import jax
import jax.numpy as jnp
import optax

import jaxferry
from benchmarks.measure import machine, reset_peak, status_bytes, write

WIDTH, LAYERS, MIB = 256, 2, 2**20
VARIANTS = {"one tile": {}, "2 tiles": {"tiles": 2}, "4 tiles": {"tiles": 4}, "8 tiles": {"tiles": 8}}
VARIANTS |= {"by hand, 4 chunks": {"chunks": 4}, "by hand, 8 chunks": {"chunks": 8}}


def init(key, words):
    keys = iter(jax.random.split(key, 2 + 2 * LAYERS))
    normal = lambda *shape: 0.02 * jax.random.normal(next(keys), shape)  # noqa: E731
    blocks = {f"h_{i}": {"up": normal(WIDTH, 4 * WIDTH), "down": normal(4 * WIDTH, WIDTH)} for i in range(LAYERS)}
    return {"embed": normal(words, WIDTH), **blocks, "head": normal(WIDTH, words)}


def loss_of(chunks):
    """The mean cross-entropy of each next token; with `chunks`, by a scan over chunks of the batch."""

    def entropy(x, head, labels):
        logits = x @ head
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()

    def loss_fn(params, tokens):
        x, labels = params["embed"][tokens[:, :-1]], tokens[:, 1:]
        for i in range(LAYERS):
            block = params[f"h_{i}"]
            x = x + jax.nn.gelu(x @ block["up"]) @ block["down"]
        if not chunks:
            return entropy(x, params["head"], labels) / labels.size
        parts = [each.reshape(chunks, -1, *each.shape[1:]) for each in (x, labels)]
        add = jax.checkpoint(lambda total, part: (total + entropy(part[0], params["head"], part[1]), None))
        return jax.lax.scan(add, jnp.float32(0), tuple(parts))[0] / labels.size

    return loss_fn


def run(name, rows, length, words, steps):
    """Trains a variant in this process; returns its figures."""
    options = dict(VARIANTS[name])
    step = jaxferry.train_step(loss_of(options.pop("chunks", 0)), optax.sgd(0.1), **options)
    state = step.init(init(jax.random.key(0), words))
    tokens = jax.random.randint(jax.random.key(1), (rows, length + 1), 0, words)
    peaks, seconds, losses = [], [], []
    for number in range(steps + 2):
        state.block_until_ready()
        reset_peak()
        before, start_s = status_bytes("VmRSS"), time.process_time()
        state, metrics = step(state, tokens)
        losses.append(float(metrics["loss"]))
        state.block_until_ready()
        if number >= 2:
            peaks.append(status_bytes("VmHWM") - before)
            seconds.append(time.process_time() - start_s)
    segments = step.prepare(tokens).partition.segments
    return {
        "tiles": {segment.name: segment.tiling.actual_tiles if segment.tiling else 1 for segment in segments},
        "predicted_device_bytes": step.prepare(tokens).peak.total,
        "peak_bytes": max(peaks),
        "processor_s": sorted(seconds)[len(seconds) // 2],
        "losses": losses,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--words", type=int, default=50_257)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = (options.rows, options.tokens, options.words, options.steps)
    if options.only:
        print(json.dumps(run(options.only, *sizes)))
        return
    found = {}
    for name in VARIANTS:
        command = [sys.executable, __file__, "--only", name]
        command += [f"--{key}={value}" for key, value in zip(("rows", "tokens", "words", "steps"), sizes, strict=True)]
        found[name] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
        own, one = found[name], found["one tile"]
        difference = max(abs(a - b) / abs(b) for a, b in zip(own["losses"], one["losses"], strict=True))
        own |= {"time_ratio": own["processor_s"] / one["processor_s"], "loss_difference": difference}
        row = f"{name:20s} {own['peak_bytes'] / MIB:7.0f} MiB  predicted {own['predicted_device_bytes'] / MIB:7.0f} MiB"
        print(f"{row}  {own['processor_s']:6.2f} s ({own['time_ratio']:.2f})  losses {difference:.1e}")
    sizes = dict(zip(("rows", "tokens", "words", "steps"), sizes, strict=True)) | {"width": WIDTH, "layers": LAYERS}
    write("tiles", {"machine": machine(), "sizes": sizes, "variants": found})


if __name__ == "__main__":
    main()
