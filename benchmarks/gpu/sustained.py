"""Measures the rate of bfloat16 products right after idling, and as work goes on. Usage: sustained.py OUTPUT.json

A card that works without pauses lowers its clock to stay within its power. A profile times each task after a pause, so
a step's programs take longer than their profile by up to the ratio of the first rate to the last.
"""

import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))

from benchmarks.measure import machine

ROWS, WIDTH, HIDDEN = 32_768, 3072, 8192
PAIRS, CALLS = 8, 24
IDLE_S = (0.3, 0.05)


def main():
    up, down, x = (
        jax.random.normal(jax.random.key(number), shape, jnp.bfloat16)
        for number, shape in enumerate([(WIDTH, HIDDEN), (HIDDEN, WIDTH), (ROWS, WIDTH)])
    )

    @jax.jit
    def products(x):
        for _ in range(PAIRS):
            x = (x @ up) @ down / (WIDTH * HIDDEN) ** 0.5
        return x

    products(x).block_until_ready()
    runs = []
    for idle_s in IDLE_S:
        time.sleep(idle_s)
        rates = []
        for _ in range(CALLS):
            begin_s = time.perf_counter()
            x = products(x).block_until_ready()
            rates.append(4e-12 * PAIRS * ROWS * WIDTH * HIDDEN / (time.perf_counter() - begin_s))
        runs.append({"idle_s": idle_s, "tflops": rates})
        print(f"after {idle_s} s without work: " + " ".join(f"{rate:.0f}" for rate in rates), flush=True)
    pathlib.Path(sys.argv[1]).write_text(json.dumps({"machine": machine(), "runs": runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
