"""Small neighbouring layers become one where a step would take longer to issue than to run."""

import dataclasses
import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich.console

import jaxferry
from accelerator import emulate
from jaxferry.costs import MACHINES, estimate_profile, partition_costs
from jaxferry.partition import partition, print_table
from jaxferry.planner import make_plan, merges_of_names, merges_of_small
from jaxferry.transport import Placement
from plain_optax import plain_losses
from slowly import slow

H200 = MACHINES["h200-pcie5"]
LAYERS, WIDTH, WORDS = 12, 16, 50
RNG = np.random.default_rng(0)
PARAMS = {
    "embed": {"table": RNG.normal(size=(WORDS, WIDTH)).astype(np.float32)},
    **{
        f"layer_{i}": {"w": (RNG.normal(size=(WIDTH, WIDTH)) / 4).astype(np.float32), "b": np.zeros(WIDTH, np.float32)}
        for i in range(LAYERS)
    },
    "head": {"w": (RNG.normal(size=(WIDTH, 3 * WIDTH)) / 4).astype(np.float32)},
}
WORDS_READ = jnp.asarray(RNG.integers(0, WORDS, (4, 8)))


def loss_fn(params, words):
    x = params["embed"]["table"][words]
    for i in range(LAYERS):
        layer = params[f"layer_{i}"]
        x = x + jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean(jnp.square(x @ params["head"]["w"]))


def parts_on(machine=None):
    merge = None if machine is None else functools.partial(merges_of_small, machine=machine)
    return partition(loss_fn, PARAMS, (WORDS_READ,), merge=merge)


def names_of(parts):
    return [segment.name for segment in parts.segments]


def test_tiny_layers_are_merged_up_to_an_eighth_of_the_model_and_lookups_stay_alone():
    parts = parts_on(H200)
    sizes = [layer.num_bytes for layer in parts_on().layers]
    pairs = [f"layer_{i}+layer_{i + 1}" for i in range(0, LAYERS, 2)]
    assert names_of(parts) == ["embed", *pairs, "head"]
    assert sizes[1] * 3 > sum(sizes) / 8 and sum(layer.num_bytes for layer in parts.layers) == sum(sizes)
    assert parts.num_programs == 3


def test_nothing_is_merged_where_the_step_takes_longer_than_to_issue_it():
    quick = dataclasses.replace(H200, issue_s=1e-9)
    busy = dataclasses.replace(H200, host_bytes_per_s=1e3)
    assert names_of(parts_on(quick)) == names_of(parts_on(busy)) == names_of(parts_on())


def chain(params, words):
    """The loss of any number of layers of the same size."""
    x = jnp.ones((4, WIDTH)) * words.mean()
    for layer in params.values():
        x = x + jnp.tanh(x @ layer["w"])
    return jnp.mean(x)


CHAIN = {f"layer_{i:02}": {"w": np.eye(WIDTH, dtype=np.float32)} for i in range(16)}


def test_each_merged_layer_takes_as_long_as_to_issue_it():
    costs = estimate_profile(partition_costs(partition(chain, CHAIN, (WORDS_READ,))), H200).layers[1]
    slowest_s = max(costs.load_s, costs.offload_s, costs.update_s, costs.forward_s + costs.backward_s)
    machine = dataclasses.replace(H200, issue_s=1.5 * slowest_s)
    merge = functools.partial(merges_of_small, machine=machine)
    merges = partition(chain, CHAIN, (WORDS_READ,), merge=merge).merges
    assert [len(merge.layers) for merge in merges] == [2] * 8


def test_layers_that_several_segments_read_stay_alone():
    def tied(params, words):
        x = jnp.tanh(jnp.ones((4, 8)) @ params["a"]["w"])
        for name in [f"l{i}" for i in range(16)]:
            x = jnp.tanh(x @ params[name]["w"])
        return jnp.mean(x @ params["a"]["w"])

    params = {name: {"w": np.eye(8, dtype=np.float32)} for name in ("a", *(f"l{i}" for i in range(16)))}
    merge = functools.partial(merges_of_small, machine=H200)
    parts = partition(tied, params, (WORDS_READ,), merge=merge)
    assert names_of(parts) == ["a", *(f"l{i}+l{i + 1}" for i in range(0, 16, 2)), "a#2"]


def test_the_table_of_segments_tells_what_was_merged_and_why():
    output = io.StringIO()
    print_table(parts_on(H200), rich.console.Console(file=output, width=200))
    assert "are one layer: together they take no longer than the 200.00 us that issuing a segment" in output.getvalue()


@pytest.mark.parametrize("given", [*slow("plan"), "profile"])
def test_a_plan_or_profile_with_merged_layers_runs_anywhere_with_the_same_losses(given):
    profile = estimate_profile(partition_costs(parts_on(H200)), H200)
    policy = None if given == "plan" else "exact"
    options = {"plan": make_plan(profile, "exact")} if given == "plan" else {"profile": profile}
    step = jaxferry.train_step(loss_fn, optax.adamw(1e-2), policy=policy, **options)
    state, losses = step.init(PARAMS), []
    for _ in range(3):
        state, metrics = step(state, WORDS_READ)
        losses.append(float(metrics["loss"]))
    assert [layer.name for layer in step.prepare(WORDS_READ).plan.layers] == names_of(parts_on(H200))
    expected = plain_losses(
        lambda params, batch: loss_fn(params, batch["words"]),
        optax.adamw(1e-2),
        PARAMS,
        lambda _: {"words": WORDS_READ},
        3,
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_names_that_fit_nothing_merge_nothing():
    parts = parts_on()
    assert merges_of_names(parts, ["layer_1+layer_0", "embed+head", "layer_1+layer_2+", "other"]) == ()
    (merge,) = merges_of_names(parts, ["embed", "layer_1+layer_2", "head"])
    assert merge.layers == ("layer_1", "layer_2")


@pytest.fixture
def h200(monkeypatch):
    """An emulated accelerator that calls itself an H200."""
    emulate(monkeypatch)
    monkeypatch.setattr(Placement, "device_kind", "NVIDIA H200")


def train(loss_fn=loss_fn, params=PARAMS, **options):
    step = jaxferry.train_step(loss_fn, optax.adamw(1e-2), compute_dtype=jnp.float32, **options)
    state, _ = step(step.init(params), WORDS_READ)
    return step.prepare(WORDS_READ), jax.tree.map(np.asarray, state.params)


def test_a_step_on_a_known_gpu_merges_unless_told_not_to(h200):
    prepared, params = train()
    apart, same = train(merge_small=False)
    assert names_of(prepared.partition) == names_of(parts_on(H200))
    assert names_of(apart.partition) == names_of(parts_on())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), params, same)


def test_a_budget_that_only_single_layers_fit_into_keeps_them_apart(h200):
    assert len(train(chain, CHAIN, memory_budget="1GiB")[0].partition.segments) == 8
    # No step fits into one byte; the error names what single layers need.
    with pytest.raises(jaxferry.BudgetError) as error:
        train(chain, CHAIN, memory_budget=1)
    prepared, _ = train(chain, CHAIN, memory_budget=error.value.smallest_bytes)
    assert len(prepared.partition.segments) == 16


def test_a_mapping_of_remat_names_the_layers_as_they_are(h200):
    prepared, _ = train(remat={"layer_3": "full"})
    assert names_of(prepared.partition) == names_of(parts_on())
