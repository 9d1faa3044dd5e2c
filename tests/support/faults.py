"""What fails on purpose: models whose callback raises in the middle of a program, and saves."""

import time

import jax
import numpy as np
import orbax.checkpoint as ocp


class Fault:
    """An identity on the host, in forward and backward, that can be made to raise.

    Attributes:
      at: which call raises, counted from 1; None for none.
      times: how many calls do from there on.
    """

    def __init__(self):
        self.at, self.times, self._count = None, 1, 0

    def arm(self, at, times=1):
        self.at, self.times, self._count = at, times, 0

    def __call__(self, x):
        self._count += 1
        if self.at is not None and self.at <= self._count < self.at + self.times:
            time.sleep(0.03)  # meanwhile gradients arrive, and layers behind this one are updated
            raise RuntimeError("the callback broke")
        return np.asarray(x)


def identity_that_calls(fault):
    """An identity of arrays whose forward and whose backward each call `fault` on the host once."""

    def call(x):
        return jax.pure_callback(fault, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    identity = jax.custom_vjp(call)
    identity.defvjp(lambda x: (call(x), None), lambda _, g: (call(g),))
    return identity


def first_save_fails(monkeypatch, error=None):
    """Makes Orbax's next save raise; returns the list of the calls."""
    save, calls = ocp.Checkpointer.save, []

    def once(self, *args, **kwargs):
        calls.append(args)
        if len(calls) == 1:
            raise error or ValueError("no space")
        return save(self, *args, **kwargs)

    monkeypatch.setattr(ocp.Checkpointer, "save", once)
    return calls
