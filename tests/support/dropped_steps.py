"""A program that drops training steps, and prints the bytes that the process has allocated more at its end.

    python dropped_steps.py LOSS_FUNCTIONS NUM_STEPS

LOSS_FUNCTIONS: "shared" by all steps, or a "fresh" one for each.
"""

import ctypes
import gc
import sys

import jax.numpy as jnp
import numpy as np
import optax

import jaxferry

NUM_FIRST = 10
"""Steps that fill the caches of Python and JAX before anything is counted."""
PARAMS = {f"l{i}": {"w": np.ones((32, 32), np.float32)} for i in range(4)}
BATCH = np.ones((2, 32), np.float32)


class Allocated(ctypes.Structure):
    """glibc's `struct mallinfo2`: of the heap that all threads share where there is no other."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


def allocated_bytes():
    gc.collect()
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = Allocated
    found = library.mallinfo2()
    return found.uordblks + found.hblkhd


def make_loss_fn():
    def loss_fn(params, batch):
        for name in params:
            batch = jnp.tanh(batch @ params[name]["w"])
        return jnp.mean(batch * batch)

    return loss_fn


def train(loss_fn):
    step = jaxferry.train_step(loss_fn, optax.adam(1e-2))
    state = step.init(PARAMS)
    for _ in range(2):
        state, _ = step(state, BATCH)
    state.settle()


def main(loss_functions, num_steps):
    shared = make_loss_fn()
    before = 0
    for number in range(NUM_FIRST + num_steps):
        if number == NUM_FIRST:
            before = allocated_bytes()
        train(shared if loss_functions == "shared" else make_loss_fn())
    print(allocated_bytes() - before)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
