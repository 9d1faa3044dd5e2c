"""Transports that are garbage-collected while their copies are in flight."""

import threading
import weakref

import jax

from jaxferry.transport import OrphanedCopies, Placement, make_placement
from python_runs import run_python

SCRIPT = """
import gc
import jax, jax.numpy as jnp, numpy as np
import jaxferry.transport.ferry
from jaxferry.transport.placement import make_placement
from jaxferry.native import library
from jaxferry.partition.layout import make_layer

placement = make_placement(None)
layer = make_layer("layer", [0], ["w"], [jax.ShapeDtypeStruct((64,), jnp.float32)], [np.dtype(np.float32)])
vectors = (jax.device_put(np.ones(64, np.float32), placement.pinned),)

def deep(depth):
    return deep(depth - 1) if depth else jnp.ones(3)

for number in range(60):
    gc.disable()
    transport = jaxferry.transport.ferry.Ferry(placement, [layer])
    transport.load(0, vectors)
    transport.load(0, vectors)
    transport.itself = transport
    del transport
    gc.set_threshold(gc.get_count()[0] + number)
    gc.enable()
    deep(200)  # to note such a stack makes most of the objects after which the collector runs
gc.collect()
library("cpu").set_bandwidth("load", 1000)  # what is left at the end takes a quarter of a second otherwise
transport = jaxferry.transport.ferry.Ferry(placement, [layer])
transport.load(0, vectors)
print("all hold")
"""


def test_the_collector_takes_transports_whose_copies_are_under_way_wherever_it_runs():
    assert run_python("-c", SCRIPT) == "all hold\n"


class Pending:
    """An array that is not ready until the test says so."""

    def __init__(self):
        self.is_awaited, self.may_go = threading.Event(), threading.Event()

    def block_until_ready(self):
        self.is_awaited.set()
        assert self.may_go.wait(60)


def test_what_others_drop_goes_while_a_dropped_state_waits_for_the_device(monkeypatch):
    """Else another state's steps would need memory that no budget counts."""
    pending, others = Pending(), [Pending() for _ in range(3)]
    arrays, references = [pending, *others], list(map(weakref.ref, others))
    monkeypatch.setattr(jax, "live_arrays", {"cpu": arrays}.get)
    monkeypatch.setattr(Placement, "is_cpu", False)
    copies = OrphanedCopies()
    copies.drop(make_placement(jax.devices("cpu")[1]), ())
    assert pending.is_awaited.wait(60)
    others.clear()
    arrays.clear()
    assert [reference() for reference in references] == [None] * 3
    pending.may_go.set()
    copies._end()
