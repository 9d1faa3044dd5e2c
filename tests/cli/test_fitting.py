"""The largest batch against brute force, and the memory that a fit states."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
from jaxferry.cli.fit import Sizes, find_fit
from jaxferry.cli.traced import trace
from jaxferry.costs import find_machine
from jaxferry.modes import Mode, Remat
from jaxferry.step import LayerPlan, Plan, needed_bytes
from jaxferry.training import StepCompiler
from jaxferry.transport import Allocator, Placement
from jaxferry.units import format_apart
from models import chain
from slowly import slow_cases

MACHINE = find_machine("a100-pcie4")
WIDTH, DEPTH = 64, 3
KEPT = {"master parameters": 600, "gradients": 400}


def loss_fn(params, batch):
    x = batch["x"]
    for kernel in params:
        x = jnp.tanh(x @ kernel)
    return (x**2).mean()


def traced(size):
    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * DEPTH
    return trace(size, loss_fn, params, {"x": jax.ShapeDtypeStruct((size, WIDTH), jnp.float32)}, MACHINE, None)


def find(own, budget, host_memory_bytes=None):
    sizes = {"model": "m", "machine": "a100", "host_bytes": lambda traced, streamed, num: KEPT}
    return find_fit(traced, own, budget_bytes=budget, host_memory_bytes=host_memory_bytes, **sizes)


@dataclasses.dataclass(frozen=True)
class Fake:
    batch_size: int
    loading_bytes: int
    smallest_bytes: int

    @property
    def without_samples(self):
        return Fake(0, 0, 0)


@pytest.mark.parametrize("own", [1, 7, 50, 999])
@pytest.mark.parametrize(
    "need", [lambda n: 100 + 10 * n, lambda n: 10 * n, lambda n: 1000 + max(20 * n, 3 * n + 5000), lambda n: n * n + 50]
)
@pytest.mark.parametrize("budget", [6_003, 10_000, 123_456])
def test_the_largest_batch_is_that_of_trying_all(own, need, budget):
    sizes = Sizes(lambda size: Fake(size, need(size), 0), budget)
    sizes.of(own)
    sizes.of(1)
    found = sizes.largest(loading=True).batch_size
    assert need(found) <= budget < need(found + 1)


def test_the_stated_memory_has_the_copies_of_the_plan_s_layers():
    model, kernel_bytes = traced(8), WIDTH * WIDTH * 4
    for mode, num in ((Mode.GFGB, DEPTH), (Mode.RELOAD, 2), (Mode.DHA, 0)):
        layers = (LayerPlan(layer.name, mode) for layer in model.profile.layers)
        found = model.device_bytes(Plan("any", 1.0, tuple(layers)), 2**30)
        assert found["parameters"] == num * kernel_bytes, mode


def test_memory_that_is_nearly_linear_in_the_batch_needs_few_traces():
    """The buffers of a step are linear; what the allocator takes beyond them is not."""
    sizes, sizes_traced = traced(16), []

    def counted(size):
        sizes_traced.append(size)
        return traced(size)

    for budget in (sizes.loading_bytes * 3 + 1, sizes.loading_bytes * 5 + 70):
        sizes_traced.clear()
        known = Sizes(counted, budget)
        known.of(16)
        largest = known.largest(loading=True)
        assert largest.loading_bytes <= budget
        assert {16, largest.batch_size, largest.batch_size + 1} <= set(sizes_traced)
        assert len(sizes_traced) <= 6


def test_the_stated_memory_is_that_of_the_plan_and_within_the_budget():
    budget = traced(64).loading_bytes * 2
    for row in find(16, budget).rows:
        made = traced(row.batch_size)
        assert needed_bytes(made.profile, row.plan) <= budget
        assert sum(row.device_bytes.values()) <= budget
        activations = 4 * row.batch_size * WIDTH
        assert row.device_bytes["activations"] >= activations
        assert row.samples_per_s == row.batch_size / row.plan.predicted.steady_step_s
        assert row.tokens_per_s is None


def test_the_smallest_budget_is_the_edge():
    least = traced(1).smallest_bytes
    assert find(1, least).fits
    fit = find(3, least - 1)
    assert (fit.fits, fit.rows, fit.largest_batch_size) == (False, (), 0)
    assert (fit.smallest_bytes, fit.smallest_batch_size) == (least, 1)
    assert fit.to_json()["pinned_bytes"] == fit.host_bytes["gradients"] < sum(fit.host_bytes.values())
    assert "batches of 1 need" in fit.problem and "of device memory" in fit.problem


def test_too_little_host_memory_does_not_fit_and_is_named():
    budget = traced(8).loading_bytes
    assert find(8, budget, host_memory_bytes=1000).fits
    fit = find(8, budget, host_memory_bytes=999)
    assert not fit.fits and fit.largest_batch_size >= 8
    assert "training needs 1000 B of host memory, and there are 999 B" in fit.problem


@pytest.mark.parametrize(
    ("compute_dtype", "granularity", "tiles"),
    [(jnp.bfloat16, "block", 1), *slow_cases((None, "module", 1), (None, "block", 4))],
)
def test_the_least_budget_is_what_a_step_accepts_to_the_byte_where_temporaries_are_those_estimated(
    compute_dtype, granularity, tiles, monkeypatch
):
    params = {f"w{i}": jax.ShapeDtypeStruct((64, 64), np.float32) for i in range(4)}
    deep, batch = chain(residual=True), jax.ShapeDtypeStruct((8, 64), np.float32)
    made = trace(8, deep, params, batch, find_machine("h100-pcie5"), compute_dtype, granularity, tiles=tiles)

    def counted(self, program):
        return made._temporary_bytes(program), self._resources.transport.staging_bytes

    def prepared(budget):
        step = jaxferry.train_step(
            deep, optax.adamw(1e-3), memory_budget=budget, policy="auto", profile="estimate", remat="auto",
            compute_dtype=compute_dtype, granularity=granularity, tiles=tiles,
        )  # fmt: skip
        step.declare(params)
        return step.prepare(batch)

    monkeypatch.setattr(StepCompiler, "_counted", counted)
    # What XLA's allocator does not split may be less for a plan that needs as much.
    with monkeypatch.context() as patch:
        patch.setattr(Placement, "allocator", Allocator.PREALLOCATED)
        assert prepared(made.smallest_bytes).peak.total <= made.smallest_bytes
    monkeypatch.setattr("jaxferry.cli.traced.unsplit_by_step", lambda *_: 0)
    least = dataclasses.replace(made).smallest_bytes
    assert prepared(least).peak.total <= least < made.smallest_bytes
    with pytest.raises(jaxferry.BudgetError) as caught:
        prepared(least - 1)
    assert caught.value.smallest_bytes == least


def offloading(size):
    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 6
    batch = {"x": jax.ShapeDtypeStruct((size, 16, WIDTH), jnp.float32)}
    return trace(size, loss_fn, params, batch, MACHINE, None, offload_activations=True)


def test_residuals_count_as_saved_activations_where_they_are_kept():
    params = {f"w{i}": jax.ShapeDtypeStruct((64, 64), np.float32) for i in range(8)}
    deep, batch = chain(residual=True), jax.ShapeDtypeStruct((4096, 64), np.float32)

    def saving(remat, is_offloaded=True):
        return trace(4096, deep, params, batch, MACHINE, None, remat=remat, offload_activations=is_offloaded)

    # Of eight segments, all but the last two keep a product until their backward, and all but the first an input.
    assert saving("full").saved_bytes == saving("auto").saved_bytes == 5 * 2**20
    assert saving("none").saved_bytes == (5 + 6) * 2**20
    assert saving("none").loading_bytes < saving("none", is_offloaded=False).loading_bytes / 1.5


def test_saved_activations_bound_the_batch_by_host_memory_and_are_stated():
    sizes = {"model": "m", "machine": "a100", "host_bytes": lambda traced, streamed, num: KEPT}
    one = offloading(1).saved_bytes
    assert one > 0 and offloading(7).saved_bytes == 7 * one
    budget = offloading(64).loading_bytes
    for rows in (1, 23):
        fit = find_fit(offloading, 4, budget_bytes=budget, host_memory_bytes=1000 + rows * one, **sizes)
        assert (fit.largest_batch_size, fit.fits) == (rows, True)
        assert fit.host_bytes == {**KEPT, "saved activations": rows * one}
        assert [row.batch_size for row in fit.rows] == ([4, rows] if rows > 4 else [rows])
    fit = find_fit(offloading, 4, budget_bytes=budget, host_memory_bytes=1000 + one - 1, **sizes)
    assert (fit.fits, fit.rows, fit.smallest_batch_size) == (False, (), 1)
    needed, available = format_apart(1000 + one, 1000 + one - 1)
    assert f"training needs {needed} of host memory, and there are {available}" in fit.problem
    assert find_fit(offloading, 4, budget_bytes=budget, **sizes).largest_batch_size >= 64


def test_activations_that_plans_let_leave_take_no_more_host_memory_than_training_leaves():
    def choosing(size):
        params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 6
        batch = {"x": jax.ShapeDtypeStruct((size, 16, WIDTH), jnp.float32)}
        return trace(size, loss_fn, params, batch, MACHINE, None, offload_activations="auto")

    sizes = {"model": "m", "machine": "a100", "host_bytes": lambda traced, streamed, num: KEPT}
    budget, one = choosing(64).loading_bytes, offloading(1).saved_bytes
    for left in (0, 20 * one, 2**30):
        fit = find_fit(choosing, 4, budget_bytes=budget, host_memory_bytes=1000 + left, **sizes)
        saved = fit.host_bytes.get("saved activations", 0)
        assert saved <= left and (saved > 0) == fit.rows[-1].plan.offloads_activations == (left == 2**30)


def test_the_share_of_recomputed_operations_is_that_of_the_products():
    params = {f"w{i}": jax.ShapeDtypeStruct((64, 64), np.float32) for i in range(6)}
    deep, batch = chain(residual=True), jax.ShapeDtypeStruct((512, 64), np.float32)

    traced = trace(512, deep, params, batch, MACHINE, None)
    can = [Remat.FULL in layer.levels for layer in traced.profile.layers]
    plan = traced.leanest(2**40)
    layers = tuple(
        dataclasses.replace(own, remat="full" if may else "none") for own, may in zip(plan.layers, can, strict=True)
    )
    # A product for each forward, two for each backward but the first one's, and one for each that recomputes.
    expected = sum(can) / (3 * 6 - 1 + sum(can))
    assert traced.recomputed_share(dataclasses.replace(plan, layers=layers)) == pytest.approx(expected, rel=0.03)
    layers = tuple(dataclasses.replace(own, remat="none") for own in plan.layers)
    assert traced.recomputed_share(dataclasses.replace(plan, layers=layers)) == 0
    fixed = trace(512, deep, params, batch, MACHINE, None, remat="full")
    assert fixed.recomputed_share(fixed.leanest(2**40)) > expected
