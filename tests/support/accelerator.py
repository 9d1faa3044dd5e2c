"""An emulated accelerator: a second CPU device with memories of its own, for which one thread issues the work.

Arrays of two devices do not mix in one program, as those of an accelerator's client and of the CPU backend do not.
"""

import dataclasses
import sys

import jax

from jaxferry.engine.placement import Placement, make_placement


def emulate(monkeypatch):
    """Makes training steps train on it; returns their placement."""
    host, device = jax.devices("cpu")[:2]
    on_host = make_placement(host)
    placement = dataclasses.replace(make_placement(device), host=on_host.host, host_compute=on_host.host_compute)
    monkeypatch.setattr(Placement, "is_cpu", property(lambda self: False))
    # The package's attribute of this name is the function.
    monkeypatch.setattr(sys.modules["jaxferry.train_step"], "make_placement", lambda device=None: placement)
    return placement
