"""The matrix of tests/test_bits.py: options of training steps, of which cases cover every pair of values.

Each case trains a small model beside plain Optax. Cases that differ only in what moves data share a reference, whose
bits they have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxferry
import models
import scanned
import updated
from jaxferry.engine import lowering
from jaxferry.modes import BLOCK, MODULE, GradientPlace, Mode, UpdatePlace
from jaxferry.optimizer import on_disk, split_masters
from jaxferry.partition import partition
from jaxferry.step import LayerPlan, Plan, streaming

AXES: dict[str, tuple[str, ...]] = {
    "model": ("tied", "linen", "nnx", "scanned"),
    "mode": ("GFGB", "RELOAD", "mixed", "DHA", "DFGB"),
    "update": ("host", "gpu", "resident"),
    "device": ("cpu", "emulated", "out of reach", "mesh"),
    "gradient": ("device", "host"),
    "transport": ("ferry", "device_put"),
    "dtype": ("float32", "bfloat16"),
    "accumulate": ("once", "twice"),
    "weight": ("alike", "weighed"),
    "clip": ("whole", "clipped"),
    "remat": ("none", "full", "dots", "products"),
    "tiles": ("untiled", "tiled"),
    "offload": ("stays", "offloaded"),
    "buffers": ("all", "few"),
    "state": ("in memory", "on disk"),
    "frozen": ("all", "frozen"),
    "optimizer": ("optax", "fused", "rounded", "of the loss"),
    "granularity": (BLOCK, MODULE),
    "scale": ("1", "64"),
    "between": ("nothing", "questions", "resumed from another", "resumed by another"),
    "record": ("unrecorded", "recorded"),
}
EMULATED = ("emulated", "out of reach")
"""Accelerators, of which the CPU reaches one's pinned memory."""
MOVES = AXES | {"mode": AXES["mode"][:3], "update": ("host",), "device": ("cpu", *EMULATED)}
"""The values that only move data. Programs that read host memory, update or share a batch round otherwise."""

IMPOSSIBLE = frozenset(
    {
        frozenset({("device", "mesh"), ("transport", "ferry")}),
        frozenset({("device", "mesh"), ("update", "gpu")}),
        frozenset({("update", "gpu"), ("gradient", "host")}),
        frozenset({("buffers", "few"), ("accumulate", "twice")}),
        frozenset({("buffers", "few"), ("clip", "clipped")}),
    }
)
"""Pairs of values that `train_step` refuses."""

SEED, NUM_TRIED = 53, 3
"""Of random numbers, and how many cases are drawn for each that is taken: few cases cover all pairs then."""

Item = tuple[str, str]
Case = tuple[Item, ...]


def is_possible(items: Any) -> bool:
    """Whether no two of these values exclude each other."""
    return not any(frozenset(pair) in IMPOSSIBLE for pair in itertools.combinations(items, 2))


def all_pairs(axes: dict[str, tuple[str, ...]]) -> set[frozenset[Item]]:
    """All pairs of values of two axes that a step can have."""
    items = [[(axis, value) for value in values] for axis, values in axes.items()]
    pairs = (pair for one, other in itertools.combinations(items, 2) for pair in itertools.product(one, other))
    return {frozenset(pair) for pair in pairs if is_possible(pair)}


def pairs_of(cases: Iterable[Case]) -> set[frozenset[Item]]:
    """The pairs that cases cover."""
    return {frozenset(pair) for case in cases for pair in itertools.combinations(case, 2)}


def covering(axes: dict[str, tuple[str, ...]], given: Iterable[Case] = ()) -> list[Case]:
    """Cases that cover all pairs beside those given: of some that are drawn, each time the one that covers most.

    A draw begins with a pair that is left, and takes the other axes in random order, of each the value of most pairs.
    """
    left, cases, random_of = all_pairs(axes) - pairs_of(given), list[Case](), random.Random(SEED)
    partners = dict[Item, set[Item]]()
    for one, other in sorted(map(sorted, left)):  # of a set, the order differs from process to process
        partners.setdefault(one, set()).add(other)
        partners.setdefault(other, set()).add(one)

    def drawn(first: Item, second: Item) -> tuple[int, Case]:
        chosen, gain = dict((first, second)), 1
        for axis in random_of.sample(list(axes), len(axes)):
            if axis not in chosen:
                items = chosen.items()
                gains = {
                    value: len(partners.get((axis, value), set()) & items)
                    for value in axes[axis]
                    if is_possible([*items, (axis, value)])
                }
                most = max(gains.values())
                chosen[axis] = random_of.choice([value for value in gains if gains[value] == most])
                gain += most
        return gain, tuple((axis, chosen[axis]) for axis in axes)

    while any(partners.values()):
        first = max(partners, key=lambda item: len(partners[item]))
        tried = (drawn(first, second) for second in random_of.choices(sorted(partners[first]), k=NUM_TRIED))
        cases.append(max(tried)[1])
        for item, other in itertools.permutations(cases[-1], 2):
            partners.get(item, set()).discard(other)
    return cases


def few_with_all_values(cases: Iterable[Case]) -> list[Case]:
    """Of these cases as few as together have all their values, the first of those that add most."""
    given, chosen = list(cases), list[Case]()
    left = set(itertools.chain.from_iterable(given))
    while left:
        chosen.append(max(given, key=lambda case: len(left.intersection(case))))
        left.difference_update(chosen[-1])
    return chosen


def with_most_pairs(cases: Iterable[Case], num: int) -> list[Case]:
    """So many of these cases, each time the one that adds most pairs of values."""
    given, chosen, seen = list(cases), list[Case](), set[frozenset[Item]]()
    while len(chosen) < num:
        chosen.append(max(given, key=lambda case: len(pairs_of([case]) - seen)))
        seen |= pairs_of(chosen[-1:])
    return chosen


def _times_the_loss(updates: Any, state: Any, params: Any = None, *, value: Any, **_: Any) -> Any:
    # An eighth, as losses are about eight: an update of ten times the size has ten times the rounding of bf16.
    return jax.tree.map(lambda update: update * value / 8, updates), state


OF_THE_LOSS = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), _times_the_loss)
OPTIMIZERS = {"optax": optax.adamw(1e-2, eps=1e-3), "fused": jaxferry.adamw(1e-2, eps=1e-3)}
OPTIMIZERS["rounded"] = jaxferry.adamw(1e-2, eps=1e-3, moments="bfloat16", masters="bfloat16")
OPTIMIZERS["of the loss"] = optax.chain(OPTIMIZERS["optax"], OF_THE_LOSS)
REMAT = {"dots": lambda name: jax.checkpoint_policies.dots_saveable}
CLIP_NORM, NUM_BATCHES = 0.05, 4


@functools.cache
def task_of(model: str) -> models.Task:
    """The models of the matrix."""
    make = {
        "tied": lambda: models.Task(updated.loss_fn, updated.PARAMS, np.arange(32).reshape(4, 8) % updated.WORDS),
        "linen": lambda: models.mlp(vocab=64, width=8, depth=2, num_heads=1),
        "nnx": lambda: models.nnx_net(vocab=16, width=8, depth=2),
        "scanned": lambda: scanned.plain(depth=4),
    }
    return make[model]()


@functools.cache
def batches_of(model: str) -> list[Any]:
    """Different batches of the model."""

    def shuffled(leaf: Any, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).permutation(np.asarray(leaf).ravel()).reshape(leaf.shape)

    batch = task_of(model).batch
    return [jax.tree.map(lambda leaf, seed=seed: shuffled(leaf, seed), batch) for seed in range(NUM_BATCHES)]


def weight_of(batch: Any) -> jax.Array:
    """A weight of a batch, from its first element."""
    return 1 + jnp.abs(jnp.ravel(jax.tree.leaves(batch)[0])[0]) % 5


@functools.cache
def weighed(model: str) -> Any:
    """The model's loss function, which states the weight of its batch."""
    return lambda params, batch: (task_of(model).loss_fn(params, batch), {"tokens": weight_of(batch)})


def is_trained(model: str) -> Any:
    """A tree that freezes every third parameter."""
    leaves, tree = jax.tree.flatten(task_of(model).params)
    return jax.tree.unflatten(tree, [number % 3 != 2 for number in range(len(leaves))])


@functools.cache
def plain_optax(
    model: str, dtype: str, accumulate: str, clip: str, frozen: str, weight: str, optimizer: str
) -> tuple[list[float], list[float], list[Any]]:
    """Losses, the norms of gradients and parameters of a jitted loop of Optax, with masters in float32."""
    task, chosen_optimizer = task_of(model), OPTIMIZERS["optax" if optimizer == "fused" else optimizer]
    if clip == "clipped":
        chosen_optimizer = optax.chain(optax.clip_by_global_norm(CLIP_NORM), chosen_optimizer)
    chosen_optimizer = optax.with_extra_args_support(chosen_optimizer)
    leaves, tree = jax.tree.flatten(task.params)
    chosen = jax.tree.leaves(is_trained(model)) if frozen == "frozen" else [True] * len(leaves)

    def loss_of(trained: list[Any], batch: Any) -> jax.Array:
        own = iter(trained)
        whole = [next(own) if is_own else jnp.asarray(leaf) for leaf, is_own in zip(leaves, chosen, strict=True)]
        return task.loss_fn(jax.tree.unflatten(tree, [leaf.astype(dtype) for leaf in whole]), batch)

    @models.quickly
    def step(trained: list[Any], state: Any, batches: Any) -> Any:
        weights = [weight_of(batch) if weight == "weighed" else 1 for batch in batches]
        made = [jax.value_and_grad(loss_of)(trained, batch) for batch in batches]
        loss, gradients = (
            jax.tree.map(lambda *all_of: sum(w * x for w, x in zip(weights, all_of, strict=True)) / sum(weights), *each)
            for each in zip(*made, strict=True)
        )
        updates, state = chosen_optimizer.update(gradients, state, trained, value=loss)
        return optax.apply_updates(trained, updates), state, [own for own, _ in made], optax.tree.norm(gradients)

    trained = [jnp.asarray(leaf) for leaf, is_own in zip(leaves, chosen, strict=True) if is_own]
    state, losses, norms = chosen_optimizer.init(trained), list[float](), list[float]()
    num = 1 + (accumulate == "twice")
    for first in range(0, NUM_BATCHES, num):
        trained, state, found, norm = step(trained, state, batches_of(model)[first : first + num])
        losses += map(float, found)
        norms += [*[0.0] * (num - 1), float(norm)]
    own = iter(trained)
    return losses, norms, [next(own) if is_own else leaf for leaf, is_own in zip(leaves, chosen, strict=True)]


def plan_of(model: str, mode: str, gradient: str, update: str, granularity: str) -> Plan:
    """A plan of one mode, or of three in turn; every second layer is updated on the device if updates are resident."""
    task, layers = task_of(model), []
    parts = partition(task.loss_fn, task.params, (task.batch,), granularity=granularity)
    groups = list(dict.fromkeys(use.group for use in parts.uses))
    for number, use in enumerate(parts.uses):
        modes = (Mode.RELOAD, Mode.RESIDENT, Mode.GFGB) if mode == "mixed" else (Mode(mode),)
        own = modes[groups.index(use.group) % len(modes)]
        own = Mode.GFGB if own is Mode.DFGB and number in parts.uses_of[-1] else own
        place = GradientPlace(gradient)
        layer = LayerPlan(use.name, own, place)
        if parts.layers[use.group].trained.leaves and update == "gpu":
            layer = dataclasses.replace(layer, update=UpdatePlace.GPU)
        elif update == "resident" and groups.index(use.group) % 2 == 0:
            layer = LayerPlan(use.name, Mode.RESIDENT, update=UpdatePlace.RESIDENT)
        layers.append(layer)
    return Plan("matrix", 1.0, tuple(layers), deferred_updates=2)  # of states on disk; others ignore it


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a step has computed, its state, and the prepared step."""

    losses: list[float]
    norms: list[float]
    params: list[np.ndarray]
    opt_state: list[np.ndarray]
    most_bytes: int
    state: Any
    prepared: Any
    recorded: Any


def options_of(case: dict[str, str]) -> dict[str, Any]:
    """The options of `train_step` that decide what is computed."""
    return {
        "compute_dtype": jnp.dtype(case["dtype"]),
        "accumulate": 1 + (case["accumulate"] == "twice"),
        "weight": "tokens" if case["weight"] == "weighed" else None,
        "clip_norm": CLIP_NORM if case["clip"] == "clipped" else None,
        "remat": REMAT.get(case["remat"], case["remat"]),
        "tiles": (2 if case.get("device") == "mesh" else 3) if case["tiles"] == "tiled" else "off",
        "trainable": is_trained(case["model"]) if case["frozen"] == "frozen" else None,
        "granularity": case["granularity"],
    }


def made(case: dict[str, str], **options: Any) -> jaxferry.TrainStep:
    """A step by the options that decide what is computed, and further ones."""
    loss_fn = weighed(case["model"]) if case["weight"] == "weighed" else task_of(case["model"]).loss_fn
    return jaxferry.train_step(loss_fn, OPTIMIZERS[case["optimizer"]], **options_of(case), **options)


def train(case: dict[str, str], between: str = "nothing", **options: Any) -> Trained:
    """Trains the case's model; half-way the state is asked everything, or saved and resumed, once by a plain step."""
    task, batches = task_of(case["model"]), batches_of(case["model"])
    step = made(case, **options)
    first, second = (
        made(case, loss_scale=options.get("loss_scale")) if between == f"resumed {where} another" else step
        for where in ("from", "by")
    )
    own = state = first.init(task.params)
    losses, norms, most_bytes, half = list[float](), list[float](), 0, NUM_BATCHES // 2
    for number, batch in enumerate(batches):
        if number == half and between == "questions":
            state = asked(step, state, batch, is_half=case["dtype"] != "float32")
        elif number == half and between != "nothing":
            with tempfile.TemporaryDirectory() as folder:
                first.save(state, f"{folder}/saved")
                state = second.restore(f"{folder}/saved", task.params)
        taken = first if number < half else second
        state, metrics = taken(state, batch)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics.get("grad_norm", 0)))
        if taken is step:
            own, most_bytes = state, max(most_bytes, metrics["device_param_bytes_peak"])
    params, opt_state = ([np.asarray(x) for x in jax.tree.leaves(tree)] for tree in (state.params, state.opt_state))
    return Trained(losses, norms, params, opt_state, most_bytes, own, step.prepare(batches[0]), step.recorded())


def asked(step: jaxferry.TrainStep, state: Any, batch: Any, is_half: bool) -> Any:
    """A copy of a state, which was evaluated, read and trained meanwhile."""
    copy = state.copy()
    loss, before = jax.tree.leaves(step.evaluate(state, batch))[0], (state.params, state.opt_state)
    np.testing.assert_allclose(step(state, batch)[1]["loss"], loss, rtol=2e-2 if is_half else 1e-5)
    state.block_until_ready()
    jax.tree.map(np.testing.assert_array_equal, (copy.params, copy.opt_state), before)
    return copy


PLAIN = ("model", "dtype", "accumulate", "clip", "frozen", "weight", "optimizer")
COMPUTES = (*PLAIN, "remat", "tiles", "granularity")


@functools.cache
def _trained(items: Case, by_plan: bool) -> Trained:
    return train_as(dict(items)) if by_plan else train(dict(items))


def reference(case: dict[str, str]) -> Trained | None:
    """What has the case's bits: it is trained on a CPU without interruption, and moves other data at other times."""
    # Without the native library's products, programs load what they read in host memory.
    loaded = {"mode": "GFGB"} if case["transport"] == "device_put" else {}
    if only_moves(tuple((case | loaded).items())):
        return _trained(tuple((axis, case[axis]) for axis in COMPUTES), by_plan=False)
    same = case | {"record": "unrecorded", "gradient": "device", "offload": "stays", "buffers": "all"}
    same |= {"state": "in memory", "scale": "1"}
    same["device"] = "cpu" if case["device"] in EMULATED else case["device"]
    if case["mode"] in MOVES["mode"] and case["update"] != "gpu":  # whose programs keep the copy or not
        same["mode"] = "GFGB"
    if "another" not in case["between"]:
        same["between"] = "nothing"
    return _trained(tuple(same.items()), by_plan=True) if same != case else None


def all_options_of(case: dict[str, str]) -> dict[str, Any]:
    """The other options of the case's step."""
    return {
        "plan": plan_of(*(case[name] for name in ("model", "mode", "gradient", "update", "granularity"))),
        "transport": case["transport"],
        "mesh": jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]) if case["device"] == "mesh" else None,
        "offload_activations": case["offload"] == "offloaded",
        **({"scratch": tempfile.gettempdir(), "host_memory": 1} if case["state"] == "on disk" else {}),
        "gradient_buffers": "all" if case["buffers"] == "all" else 1 if case["gradient"] == "host" else 2,
        "loss_scale": None if case["scale"] == "1" else float(case["scale"]),
        "record_steps": 2 if case["record"] == "recorded" else 0,
    }


@contextlib.contextmanager
def small_sizes() -> Iterator[None]:
    """Small models have one subgroup, and keep values, state and masters as they are, unless these are smaller."""
    sizes = (
        *((streaming, "SUBGROUP_BYTES", 400), (lowering, "MIN_OFFLOADED_BYTES", 64)),
        *((on_disk, "_LEAST_BYTES", 32), (split_masters, "_LEAST_SIZE", 8)),
    )
    with contextlib.ExitStack() as stack:
        for each in sizes:
            stack.enter_context(mock.patch.object(*each))
        yield


def train_as(case: dict[str, str]) -> Trained:
    """Trains as all values of the case say, on JAX's default device."""
    with small_sizes():
        return train(case, case["between"], **all_options_of(case))


def only_moves(case: Case) -> bool:
    """Whether the case has only values that move data."""
    return all(value in MOVES[axis] for axis, value in case)
