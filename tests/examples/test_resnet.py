"""examples/resnet: its sizes, its running averages, agreement with plain Optax, its command line from end to end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxferry
from examples.common import digits
from examples.common.training import count_parameters
from examples.resnet import model, train
from metrics_files import read_losses, read_metrics
from plain_optax import assert_same_losses
from planned import assert_same_bits

pytestmark = pytest.mark.slow

SMALL = model.Config((1, 1), width=8, is_small=True, image_size=8, num_colours=1, num_classes=10)
NARROW = model.Config((1, 1), width=8, is_bottleneck=True, is_small=True, image_size=8, num_colours=1, num_classes=10)


def make_params(config):
    return jax.jit(model.make_init(config))(jax.random.key(0))


def make_batches(batch_size=16):
    return digits.Batches(digits.load()[0], batch_size, seed=0)


def first_stats(config):
    return {"batch_stats": model.make_batch_stats(config)}


# Those of the published models for 1000 classes (He et al. 2016), as PyTorch's torchvision counts them.
@pytest.mark.parametrize(("size", "expected"), [("18", 11_689_512), ("50", 25_557_032)])
def test_sizes_are_the_published_ones(size, expected):
    assert count_parameters(model.make_init(model.SIZES[size])) == expected


@pytest.mark.parametrize("config", [SMALL, NARROW], ids=["basic", "bottleneck"])
def test_losses_agree_with_a_plain_optax_loop(config):
    optimizer, carried = train.make_optimizer(0.05), first_stats(config)
    assert_same_losses(model.make_loss(config), optimizer, make_params(config), make_batches(), carried=carried)


def test_running_averages_begin_at_zero_and_one_and_move_towards_each_batch():
    params, carried, batch = make_params(SMALL), first_stats(SMALL), make_batches()(0)
    for path, leaf in jax.tree.leaves_with_path(carried):
        assert (leaf == ("var" in jax.tree_util.keystr(path))).all()
    step = jaxferry.train_step(model.make_loss(SMALL), train.make_optimizer(0.05))
    _, metrics = step(step.init(params), {**batch, **carried})
    stem = jax.lax.conv(
        jnp.moveaxis(batch["images"], -1, 1), params["conv_stem"]["kernel"].transpose(3, 2, 0, 1), (1, 1), "SAME"
    )
    moved = metrics["aux"]["batch_stats"]["bn_stem"]
    np.testing.assert_allclose(moved["mean"], 0.1 * stem.mean((0, 2, 3)), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(moved["var"], 0.9 + 0.1 * stem.var((0, 2, 3)), rtol=1e-4)


def test_running_averages_are_those_of_the_plain_loss():
    params, carried, batch = make_params(SMALL), first_stats(SMALL), make_batches()(0)
    step = jaxferry.train_step(model.make_loss(SMALL), train.make_optimizer(0.05))
    _, metrics = step(step.init(params), {**batch, **carried})
    _, expected = jax.jit(model.make_loss(SMALL))(params, {**batch, **carried})
    ours, theirs = metrics["aux"]["batch_stats"], expected["batch_stats"]
    assert jax.tree.structure(ours) == jax.tree.structure(theirs) == jax.tree.structure(carried["batch_stats"])
    for leaf, same in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(leaf, same, rtol=1e-5, atol=1e-6)


def test_what_is_predicted_depends_on_no_other_image():
    params, stats, batch = make_params(SMALL), first_stats(SMALL)["batch_stats"], make_batches()(0)
    step = jaxferry.train_step(model.make_loss(SMALL), train.make_optimizer(0.05))
    state, predict = step.init(params), model.make_predict(SMALL)
    together = step.apply(state, predict, batch["images"], stats)
    alone = step.apply(state, predict, batch["images"][:1], stats)
    np.testing.assert_allclose(together[:1], alone, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(together, predict(params, batch["images"], stats), rtol=1e-4, atol=1e-5)


@pytest.fixture
def small(monkeypatch):
    """Lets the size `tiny` stand for a model that is quick to compile."""
    monkeypatch.setitem(model.SIZES, "tiny", SMALL)


def run(*args):
    return train.main(["--batch", "32", *map(str, args)])


def test_training_learns_to_tell_digits_apart(small, tmp_path, capsys):
    metrics = tmp_path / "metrics.jsonl"
    assert run("--steps", 100, "--metrics", metrics) == 0
    assert read_metrics(metrics)[0].keys() >= {"loss", "accuracy", "images_per_s"}
    printed = capsys.readouterr().out.splitlines()[-1]
    assert printed.endswith("of 359 unseen images recognised, with the running averages")
    assert float(printed.split("%")[0]) > 80


def test_a_resumed_run_goes_on_bit_by_bit_with_its_running_averages(small, tmp_path, monkeypatch):
    averages, accuracy_of = [], digits.accuracy_of
    monkeypatch.setattr(digits, "accuracy_of", lambda *args: averages.append(args[-1]) or accuracy_of(*args))
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert run("--steps", 6, "--metrics", whole, "--save", tmp_path / "whole") == 0
    assert run("--steps", 3, "--metrics", parts, "--save", tmp_path / "saved") == 0
    assert run("--steps", 6, "--metrics", parts, "--resume", tmp_path / "saved", "--save", tmp_path / "parts") == 0
    assert read_losses(whole) == read_losses(parts)
    of_whole, _, of_parts = averages
    assert_same_bits(of_whole, of_parts)
