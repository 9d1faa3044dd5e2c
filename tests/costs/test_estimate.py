"""Estimated profiles: the roofline by hand, and what must hold for every model and machine."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import models
from example_costs import COSTS, MACHINE
from jaxferry.costs import (
    ADAMW,
    MACHINES,
    UPDATE_BYTES_PER_PARAMETER,
    HostRead,
    LayerCosts,
    Profile,
    UpdateBytes,
    estimate_profile,
    partition_costs,
    scaled_profile,
)
from jaxferry.errors import InputError
from jaxferry.modes import Remat
from jaxferry.partition import differentiate, partition


def test_the_roofline_by_hand() -> None:
    (layer,) = estimate_profile([COSTS], MACHINE).layers
    assert (layer.forward_s, layer.backward_s) == (2.0, 4.0)
    assert (layer.forward_dha_s, layer.backward_dha_s) == (3.0, 9.0)
    assert layer.backward_go_s == 8.0
    assert layer.load_s == layer.offload_s == 8.125
    assert layer.update_s == UPDATE_BYTES_PER_PARAMETER * 40 / 60
    assert (layer.state_bytes, layer.state_up_s, layer.state_down_s) == (480, 48.125, 56.125)
    assert (layer.param_bytes, layer.grad_bytes, layer.activation_bytes) == (80, 80, 7)


def test_an_update_takes_the_bytes_of_the_optimizer_and_of_how_its_masters_are_stored() -> None:
    adamw, split = UpdateBytes.of_sizes(2, 4, 8), UpdateBytes.of_sizes(2, 2.125, 8)
    assert adamw == ADAMW
    # Instead of a master of 4 bytes, the copy and what it lacks are read and written; the copy was written before.
    assert split.on_host / adamw.on_host == pytest.approx((28 - 8 + 2 * 2.125 + 2) / 28)
    joined = UpdateBytes.of_sizes(2, 2.125, 8, is_joined=True)
    assert joined.on_host / adamw.on_host == pytest.approx((28 - 8 + 2 * 2.125 + 2 + 16) / 28)
    assert (split.on_device, split.state) == (joined.on_device, joined.state) == (adamw.on_device, adamw.state)
    small = UpdateBytes.of_sizes(2, 0, 2)  # of 8-bit moments; the copy is the master
    (layer,) = estimate_profile([COSTS], MACHINE, update=small).layers
    (other,) = estimate_profile([COSTS], MACHINE).layers
    assert layer.update_s / other.update_s == pytest.approx((2 + 2 + 2 + 4) / 28)
    assert layer.update_gpu_s == pytest.approx((2 + 2 + 8 + 4) / 28 * (other.update_gpu_s or 0))
    assert (layer.state_bytes, other.state_bytes) == (6 * 40, 12 * 40)
    assert (layer.state_up_s or 0) < (other.state_up_s or 0) and layer.forward_s == other.forward_s


@pytest.mark.parametrize(
    ("change", "forward_s"),
    [
        ({"itemsize": 4}, 4.0),
        ({"forward_bytes": 900}, 9.0),
        ({"forward_kernels": 20}, 5.0),
        ({"forward_flops": 0, "forward_bytes": 0}, 0.25),
    ],
)
def test_the_slowest_resource_decides(change: dict, forward_s: float) -> None:
    (layer,) = estimate_profile([dataclasses.replace(COSTS, **change)], MACHINE).layers
    assert layer.forward_s == forward_s


def test_products_and_memory_traffic_follow_each_other_where_products_were_measured_alone() -> None:
    machine = dataclasses.replace(MACHINE, product_efficiency=0.8)
    (layer,) = estimate_profile([COSTS], machine).layers
    products_s = COSTS.forward_flops / (machine.flops_per_s * 0.8)
    assert layer.forward_s == pytest.approx(products_s + COSTS.forward_bytes / machine.memory_bytes_per_s)
    wide = dataclasses.replace(COSTS, itemsize=4)
    assert (
        estimate_profile([wide], machine).layers[0].forward_s == estimate_profile([wide], MACHINE).layers[0].forward_s
    )


def test_what_kernels_move_over_the_link_takes_their_own_rate() -> None:
    machine = dataclasses.replace(MACHINE, kernel_link_bytes_per_s=MACHINE.link_bytes_per_s / 2)
    (layer,), (before,) = estimate_profile([COSTS], machine).layers, estimate_profile([COSTS], MACHINE).layers
    assert (layer.load_s, layer.offload_s) == (before.load_s, before.offload_s)
    names = (
        "forward_dha_s",
        "backward_dha_s",
        "backward_go_s",
        "forward_read_s",
        "backward_read_s",
        "backward_write_s",
    )
    assert [getattr(layer, name) for name in names] == [2 * getattr(before, name) for name in names]


def test_a_weight_of_one_panel_arrives_before_its_product_starts() -> None:
    costs = dataclasses.replace(COSTS, dha_products_forward=(HostRead(20, 1000.0),))
    (layer,) = estimate_profile([costs], MACHINE).layers
    # Ten bytes that no product reads, the launch of the panel's copy, and the panel.
    assert layer.forward_dha_s == layer.forward_s + 1.0 + 0.25 + 2.0


def _end_of_pipeline(product_s: float, moved_s: float, num_panels: int) -> float:
    """When the last of a product's panels is multiplied; each half of the scratch is free once its panel is used."""
    copied = [0.0] * num_panels
    used = [0.0] * num_panels
    for i in range(num_panels):
        is_free = used[i - 2] if i >= 2 else 0.0
        copied[i] = max(copied[i - 1] if i else 0.0, is_free) + moved_s / num_panels
        used[i] = max(used[i - 1] if i else 0.0, copied[i]) + product_s / num_panels
    return used[-1]


@pytest.mark.parametrize("tokens", [16, 2048, 16_384, 131_072])
@pytest.mark.parametrize("num_weights", [3_000_000, 25_165_824, 400_000_000])
def test_a_product_by_dha_takes_what_the_pipeline_of_its_panels_takes(tokens: int, num_weights: int) -> None:
    machine, num_bytes, flops = MACHINES["h200-pcie5"], 2 * num_weights, 2.0 * tokens * num_weights
    weight = (HostRead(num_bytes, flops),)
    costs = dataclasses.replace(
        COSTS,
        forward_flops=3 * flops,
        backward_flops=6 * flops,
        param_bytes=num_bytes + 1000,
        grad_bytes=num_bytes + 1000,
        dha_bytes_forward=num_bytes + 1000,
        dha_products_forward=weight,
    )
    (layer,) = estimate_profile([costs], machine).layers
    product_s = flops / (machine.flops_per_s * (machine.product_efficiency or 1.0))
    panel_bytes = min(max(num_bytes / 16, 2 * 2**20), 4 * 2**20)
    num_panels = math.ceil(num_bytes / panel_bytes)
    moved_s = machine.direct_s(num_bytes) + num_panels * machine.launch_s
    longer_s = _end_of_pipeline(product_s, moved_s, num_panels) - product_s + machine.direct_s(1000)
    assert layer.forward_dha_s - layer.forward_s == pytest.approx(longer_s, rel=1e-6)
    # A gradient of as many operations leaves in the reverse order.
    assert layer.backward_go_s - layer.backward_s == pytest.approx(longer_s, rel=1e-6)
    assert longer_s > moved_s / num_panels


def test_a_forward_that_is_run_again_reads_its_weights_again() -> None:
    parts = partition(*_tied_model())
    kept, again = partition_costs(parts)[1], partition_costs(parts, "full")[1]
    assert [read.num_bytes for read in kept.dha_products_forward or ()] == [8 * 8 * 4]
    assert [read.flops for read in kept.dha_products_forward or ()] == [2 * 24 * 8 * 8]
    assert len(again.dha_products_backward or ()) == len(kept.dha_products_backward or ()) + 1 == 2
    assert again.dha_bytes_backward == kept.dha_bytes_backward + kept.dha_bytes_forward


def test_estimates_are_marked_and_name_the_machine() -> None:
    profile = estimate_profile([COSTS], MACHINES["h200-pcie5"], {"model": "mine"})
    assert profile.machine["estimated"] is True
    assert profile.machine["name"] == "h200-pcie5"
    assert profile.machine["model"] == "mine"
    assert Profile.from_json(profile.to_json()) == profile


def test_nothing_to_move_takes_no_time() -> None:
    (layer,) = estimate_profile([dataclasses.replace(COSTS, param_bytes=0, grad_bytes=0)], MACHINE).layers
    assert layer.load_s == layer.offload_s == 0
    (frozen,) = estimate_profile([dataclasses.replace(COSTS, grad_bytes=0)], MACHINE).layers
    assert (frozen.load_s, frozen.offload_s) == (8.125, 0)


def test_bad_costs_are_refused() -> None:
    with pytest.raises(InputError, match="at least one layer"):
        estimate_profile([], MACHINE)
    with pytest.raises(InputError, match="occurs twice"):
        estimate_profile([COSTS, COSTS], MACHINE)
    with pytest.raises(InputError, match="itemsize must be positive, got 0"):
        estimate_profile([dataclasses.replace(COSTS, itemsize=0)], MACHINE)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.sampled_from(sorted(MACHINES)),
    st.integers(0, 10**10),
    st.floats(0, 1e15),
    st.floats(0, 1e12),
    st.floats(0, 1e12),
)
def test_detours_never_gain_time_and_times_never_undercut_the_resources(
    name: str, num_bytes: int, flops: float, moved: float, touched: float
) -> None:
    machine = MACHINES[name]
    costs = dataclasses.replace(
        COSTS, param_bytes=num_bytes, forward_flops=flops, forward_bytes=moved, dha_bytes_forward=touched
    )
    (layer,) = estimate_profile([costs], machine).layers
    assert layer.forward_s <= layer.forward_dha_s
    assert layer.backward_s <= min(layer.backward_dha_s, layer.backward_go_s)
    assert layer.forward_s >= flops / machine.flops_per_s
    assert layer.load_s * machine.link_bytes_per_s >= num_bytes * (1 - 1e-12)


def _tied_model(activation: Callable[[Any], Any] = jnp.tanh) -> tuple[Any, Any, Any]:
    """An embedding that is also the head, and two equal blocks between."""
    shapes = {
        "embed": {"table": (100, 8)},
        "block_0": {"kernel": (8, 8), "bias": (8,)},
        "block_1": {"kernel": (8, 8), "bias": (8,)},
    }
    params = jax.tree.map(
        lambda sizes: jax.ShapeDtypeStruct(sizes, jnp.float32), shapes, is_leaf=lambda value: isinstance(value, tuple)
    )

    def loss_fn(params: Any, ids: Any) -> Any:
        x = params["embed"]["table"][ids]
        for name in ("block_0", "block_1"):
            x = activation(x @ params[name]["kernel"] + params[name]["bias"])
        return jnp.mean(jax.nn.logsumexp(x @ params["embed"]["table"].T, axis=-1))

    return loss_fn, params, (jax.ShapeDtypeStruct((4, 6), jnp.int32),)


def test_the_segments_of_a_partition_as_costs() -> None:
    costs = partition_costs(partition(*_tied_model()))
    assert [layer.parameters for layer in costs] == ["embed", "block_0", "block_1", "embed"]
    lookup, first, second, head = costs
    assert lookup.param_bytes == head.param_bytes == 100 * 8 * 4
    assert lookup.dha_bytes_forward == 24 * 8 * 4
    assert lookup.dha_bytes_backward == 0
    assert head.dha_bytes_forward == 100 * 8 * 4
    renamed = dataclasses.replace(first, name=second.name, parameters=second.parameters)
    assert dataclasses.replace(renamed, activation_bytes=second.activation_bytes) == second
    assert first.num_parameters == 8 * 8 + 8
    assert first.backward_flops > first.forward_flops >= 2 * 24 * 8 * 8


def test_a_value_that_two_backwards_read_is_kept_once() -> None:
    parts = partition(*_tied_model())
    derivatives = [differentiate(parts.graph, segment) for segment in parts.segments]
    read = {d.segment.inputs[index] for d in derivatives for index in d.inputs_read}
    read |= {d.segment.outputs[index] for d in derivatives for index in d.outputs_read}
    expected = sum(d.saved_bytes for d in derivatives) + sum(map(parts.graph.num_bytes, read))
    assert sum(layer.activation_bytes for layer in partition_costs(parts)) == expected > 0


def test_a_partition_becomes_a_profile_with_shared_parameters() -> None:
    profile = estimate_profile(partition_costs(partition(*_tied_model())), MACHINES["a100-pcie3"])
    assert [len(members) for members in profile.groups] == [2, 1, 1]
    assert profile.layers[0].forward_dha_s < profile.layers[0].load_s + profile.layers[0].forward_s


def test_what_recomputation_costs_is_estimated_where_it_is_left_to_plans() -> None:
    parts = partition(*_tied_model(lambda x: x))  # what an activation keeps differs between releases of JAX
    layers = estimate_profile(partition_costs(parts, "auto"), MACHINES["a100-pcie3"]).layers
    assert [layer.can_recompute for layer in layers] == [False] * 4  # nothing but its inputs is kept of any
    assert not any(costs.recomputation for costs in partition_costs(parts))


def test_recomputation_adds_a_forward_but_for_its_last_product_and_leaves_what_crosses_segments() -> None:
    task = models.gpt(width=64)
    parts = partition(task.loss_fn, task.params, (task.batch,))
    costs = {layer.name: layer for layer in partition_costs(parts, "auto")}
    full = {layer.name: layer for layer in partition_costs(parts, "full")}
    assert [name for name, layer in costs.items() if layer.recomputation] == ["h_0", "h_1", "h_2", "h_3", "ln_f"]
    for name in ("h_0", "h_1", "h_2", "h_3"):
        again = costs[name].recomputation[Remat.FULL]
        assert again.flops == full[name].backward_flops - costs[name].backward_flops
        last_flops = 2 * task.batch[:, 1:].size * 256 * 64
        assert again.flops == pytest.approx(costs[name].forward_flops - last_flops, rel=0.05)
        assert again.activation_bytes < costs[name].activation_bytes
    kept = [c.recomputation.get(Remat.FULL, c).activation_bytes for c in costs.values()]
    # Counts are never too low for any mixture of recomputing layers, so the sum over all of them may be too high.
    everything, nothing = (sum(c.activation_bytes for c in some.values()) for some in (costs, full))
    assert nothing <= sum(kept) < 0.5 * everything


@pytest.mark.parametrize("rows", [32, 48, 128])
def test_a_profile_scaled_to_another_batch_is_that_batch_s_where_operations_take_the_time(rows: int) -> None:
    """Each time is in proportion to operations then, and so is what is kept but for the parameters."""
    machine = dataclasses.replace(MACHINES["h200-pcie5"], launch_s=0.0, memory_bytes_per_s=1e30)

    def costs_of(rows: int) -> tuple[LayerCosts, ...]:
        task = models.gpt(width=64)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), task.batch)
        counted = partition_costs(partition(task.loss_fn, task.params, (batch,)), "auto")
        return tuple(layer for layer in counted if layer.name.startswith("h_"))

    known, own = costs_of(64), costs_of(rows)
    scaled = scaled_profile(estimate_profile(known, machine), known, own)
    expected = estimate_profile(own, machine)
    assert scaled.machine["scaled_by"] == pytest.approx(rows / 64, rel=0.1)
    for layer, other in zip(scaled.layers, expected.layers, strict=True):
        for name in ("forward_s", "backward_s", "recompute_s"):
            assert getattr(layer, name) == pytest.approx(getattr(other, name), rel=1e-4), (layer.name, name)
        for name in ("activation_bytes", "recompute_activation_bytes", "load_s", "offload_s", "update_s"):
            assert getattr(layer, name) == getattr(other, name), (layer.name, name)
        assert layer.forward_dha_s >= layer.forward_s and layer.forward_dha_s >= layer.forward_read_s
