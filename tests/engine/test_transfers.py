import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
import models
from jaxferry.engine.placement import Placement, make_placement
from jaxferry.engine.transport.device_put import DevicePut
from jaxferry.modes import Mode
from jaxferry.partition import layers_by_path
from planned import assert_same_bits, plan_of, train, trained

PARAMS = {"a": {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.float32)}, "c": np.ones(2)}


@pytest.fixture(params=["cpu", "accelerator"])
def placement(request, monkeypatch):
    """The placements of a CPU and of an accelerator; the latter also works on a CPU, with more copies."""
    monkeypatch.setattr(Placement, "is_cpu", property(lambda self: request.param == "cpu"))
    return make_placement()


ADAMW = optax.adamw(1e-3)


@pytest.fixture(scope="module")
def gpt():
    return models.gpt(depth=2)


@pytest.mark.parametrize(
    "modes",
    [
        *(pytest.param([mode], marks=pytest.mark.slow) for mode in (Mode.GFGB, Mode.RELOAD)),
        [Mode.RESIDENT, Mode.RELOAD, Mode.GFGB],
    ],
)
def test_the_way_of_accelerators_has_the_same_bits(gpt, modes, monkeypatch):
    expected, losses = trained(gpt, ADAMW, 3)
    plan = plan_of(gpt, modes)
    monkeypatch.setattr(Placement, "is_cpu", property(lambda self: False))
    state, others = train(jaxferry.train_step(gpt.loss_fn, ADAMW, plan=plan), gpt, 3)
    assert others == losses
    assert_same_bits(state.params, expected)
    assert {v.sharding.memory_kind for vectors in state.vectors for v in vectors} == {"pinned_host"}


def test_what_is_loaded_is_what_was_packed_and_is_counted_while_held(placement):
    layers = layers_by_path(PARAMS)
    layer = next(layer for layer in layers if layer.name == "a")
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(PARAMS["a"])]
    vectors = tuple(jax.device_put(v, placement.pinned) for v in layer.pack(leaves))
    transfers = DevicePut(placement, [layer])
    assert transfers.staging_bytes == (0 if placement.is_cpu else 2 * 36)
    held = transfers.load(0, vectors)
    assert_same_bits(held.parameters(), leaves)
    assert {p.sharding.memory_kind for p in held.parameters()} == {"device"}
    assert transfers.device_bytes == transfers.peak_device_bytes == layer.num_bytes == 36
    transfers.drop(held)
    assert transfers.device_bytes == 0
    assert all(p.is_deleted() for p in held.parameters())


def test_gradients_are_stored_added_up_and_freed(placement):
    layer = next(layer for layer in layers_by_path(PARAMS) if layer.name == "a")
    transfers = DevicePut(placement, [layer])
    total = None
    for factor in (1.0, 10.0):
        gradients = [jax.device_put(jnp.full(leaf.shape, factor), placement.device) for leaf in layer.leaves]
        total = transfers.store(0, gradients, total)
        assert all(gradient.is_deleted() for gradient in gradients)
    (vector,) = transfers.gather(0, total)
    np.testing.assert_array_equal(np.asarray(vector), np.full(9, 11.0))
    assert vector.sharding.memory_kind in ("pinned_host", "unpinned_host")
