"""examples/pi0: a model of pi0's structure and sizes; training by configurations with the fields of openpi's."""

import dataclasses
import functools
import itertools
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jaxferry
from examples.pi0 import model, train
from jaxferry.partition import partition
from metrics_files import read_losses
from plain_optax import plain_losses
from tolerances import LOSS_RTOL

TINY = model.SIZES["tiny"]
CREATE = model.make_create(TINY)
STEPS, ROWS, CLIP, RATE = 4, 3, 0.5, 1e-3
# Gradients of the keys' biases are rounding alone, which a smaller one would make whole steps of.
EPSILON = 1e-4


def observations():
    """What a loader of openpi's yields."""
    for number in itertools.count():
        yield model.make_batch(TINY, ROWS, jax.random.key(number))


@functools.cache
def expected_losses(seed):
    """The losses of plain Optax, with openpi's clipping in its chain."""
    source = list(itertools.islice(observations(), STEPS))
    batches = [
        {"observation": observation, "actions": actions, "key": jax.random.fold_in(jax.random.key(seed), number)}
        for number, (observation, actions) in enumerate(source)
    ]
    optimizer = optax.chain(
        optax.clip_by_global_norm(CLIP), optax.adamw(RATE, b2=0.95, eps=EPSILON, weight_decay=1e-10)
    )
    params = train.make_init(CREATE)(jax.random.key(seed))
    return plain_losses(train.make_loss(CREATE), optimizer, params, batches.__getitem__, STEPS)


def test_the_full_size_has_pi0_s_parameters_and_layers():
    params = jax.eval_shape(train.make_init(model.make_create(model.SIZES["base"])), jax.random.key(0))
    sizes = {name: sum(leaf.size for leaf in jax.tree.leaves(part)) for name, part in params.items()}
    attention = 8 * 2 * 256 + 2 * 256  # times channels
    language, expert = (18 * (c * (attention + 3 * hidden + 2)) + c for c, hidden in ((2048, 16_384), (1024, 4096)))
    assert sizes["llm"] == 257_152 * 2048 + language + expert
    block = 4 * 1152**2 + 2 * 1152 * 4304 + (4 + 4 + 1) * 1152 + 4304
    assert sizes["img"] == 27 * block + (14 * 14 * 3 + 1 + 256 + 2) * 1152 + (1152 + 1) * 2048
    assert 3.2e9 < sum(sizes.values()) < 3.3e9


def test_scans_over_pairs_and_the_encoder_of_all_images_are_cut_by_layer():
    loss_fn, init_fn = train.make_loss(CREATE), train.make_init(CREATE)
    observation, actions = model.make_batch(TINY, ROWS)
    batch = {"observation": observation, "actions": actions, "key": jax.random.key(0)}
    parts = partition(loss_fn, jax.eval_shape(init_fn, jax.random.key(0)), (batch,))
    uses = [parts.layers[use.group].name for use in parts.uses]
    assert [uses.count(f"img/encoderblock/{i}") for i in range(3)] == [3] * 3
    assert [uses.count(f"llm/layers/{i}") for i in range(4)] == [1] * 4
    assert not parts.notes


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"policy": "native-overlapped"}, {"policy": "auto", "memory_budget": "2MiB"}])
def test_losses_are_those_of_plain_optax(options, tmp_path):
    run = train.start(CREATE, train_optimizer(), observations(), ROWS, seed=7, clip_norm=CLIP, **options)
    assert run.train(STEPS, tmp_path / "metrics.jsonl", append=False) == 0
    np.testing.assert_allclose(
        [loss for _, loss in read_losses(tmp_path / "metrics.jsonl")], expected_losses(7), rtol=LOSS_RTOL
    )


def train_optimizer():
    return train.make_optimizer(AdamW(), Constant())


@dataclasses.dataclass(frozen=True)
class AdamW:
    b1: float = 0.9
    b2: float = 0.95
    eps: float = EPSILON
    weight_decay: float = 1e-10
    clip_gradient_norm: float = CLIP


class Constant:
    def create(self):
        return optax.constant_schedule(RATE)


class Model:
    def create(self, key):
        return CREATE(key)


class NoWeights:
    def load(self, params):
        return params


class Loader:
    """Returns pretrained parameters as openpi's weight loaders do: a plain dictionary, here of zeros."""

    def load(self, params):
        return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), params)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The fields of openpi's `TrainConfig` that the example reads."""

    model: Any = dataclasses.field(default_factory=Model)
    optimizer: Any = AdamW()
    lr_schedule: Any = dataclasses.field(default_factory=Constant)
    weight_loader: Any = dataclasses.field(default_factory=NoWeights)
    freeze_filter: Any = dataclasses.field(default_factory=nnx.Nothing)
    batch_size: int = ROWS
    seed: int = 7
    num_train_steps: int = STEPS


@pytest.fixture
def openpi(monkeypatch):
    """Puts modules of openpi's names in place, whose configurations are tiny."""
    configs = {
        "tiny": TrainConfig(),
        "loaded": TrainConfig(weight_loader=Loader()),
        "frozen": TrainConfig(freeze_filter=nnx.filterlib.PathContains("img")),
    }
    config = types.ModuleType("openpi.training.config")
    config.get_config = configs.__getitem__
    loader = types.ModuleType("openpi.training.data_loader")
    loader.create_data_loader = lambda config, shuffle: observations()
    training = types.ModuleType("openpi.training")
    training.config, training.data_loader = config, loader
    for module in (types.ModuleType("openpi"), training, config, loader):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.slow
def test_the_command_trains_a_configuration_saves_resumes_and_exports(openpi, tmp_path):
    metrics, saved, exported = tmp_path / "metrics.jsonl", tmp_path / "state", tmp_path / "export"
    common = ["--policy", "native-overlapped"]
    assert train.main(["tiny", *common, "--steps", "2", "--metrics", str(metrics), "--save", str(saved)]) == 0
    np.testing.assert_allclose([loss for _, loss in read_losses(metrics)], expected_losses(7)[:2], rtol=LOSS_RTOL)
    assert train.main(["tiny", *common, "--steps", "3", "--resume", str(saved), "--export", str(exported)]) == 0
    params = train.read_params(exported / "params")
    own = jax.eval_shape(train.make_init(CREATE), jax.random.key(0)).to_pure_dict()
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, own)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


def test_pretrained_parameters_are_read_once_and_all_of_them():
    init_fn = train.make_init(CREATE)
    params = train.loaded(init_fn, Loader().load)
    step = jaxferry.train_step(train.make_loss(CREATE), train_optimizer(), policy="native-overlapped")
    state = step.init(params)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state.params))
    assert all(leaf._array is None for leaf in jax.tree.leaves(params))
    partly = lambda shapes: shapes | {"state_proj": Loader().load(shapes["state_proj"])}  # noqa: E731
    with pytest.raises(jaxferry.InputError, match="not those of all parameters"):
        train.loaded(init_fn, partly)


def test_checkpoints_of_nnx_states_are_read_like_those_of_dictionaries(tmp_path):
    state = train.make_init(CREATE)(jax.random.key(0))
    deep = {"params": jax.tree.map(lambda leaf: {"value": np.asarray(leaf)}, state.to_pure_dict())}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", deep)
    jax.tree.map(np.testing.assert_array_equal, train.read_params(tmp_path / "params"), state.to_pure_dict())


@pytest.mark.slow
def test_what_a_configuration_freezes_stays(openpi):
    before = train.make_init(CREATE)(jax.random.key(7))
    trainable = train.trained_by(train.find("frozen"))
    run = train.start(CREATE, train_optimizer(), observations(), ROWS, 7, trainable=trainable)
    run.train_one(lambda record: None, True)
    same = jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), run.state.params, before)
    assert all(jax.tree.leaves(same["img"])) and not all(jax.tree.leaves(same["llm"]))


def test_without_openpi_the_command_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "openpi", None)
    assert train.main(["pi0_libero"]) == 2
    assert "openpi is not installed" in capsys.readouterr().err
