"""examples/resnet: its running averages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxferry
import small_examples
from examples.common import digits
from examples.resnet import model, train
from metrics_files import read_losses
from planned import assert_same_bits
from small_examples import run

pytestmark = pytest.mark.slow

SMALL = small_examples.SMALL["resnet"]


def made():
    """Parameters, running averages and a batch."""
    batch = small_examples.batches_of("resnet", None)(0)
    return small_examples.params_of("resnet"), small_examples.carried_of("resnet"), batch


def test_running_averages_begin_at_zero_and_one_and_move_towards_each_batch():
    params, carried, batch = made()
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


def test_what_is_predicted_depends_on_no_other_image():
    params, carried, batch = made()
    stats = carried["batch_stats"]
    step = jaxferry.train_step(model.make_loss(SMALL), train.make_optimizer(0.05))
    state, predict = step.init(params), model.make_predict(SMALL)
    together = step.apply(state, predict, batch["images"], stats)
    alone = step.apply(state, predict, batch["images"][:1], stats)
    np.testing.assert_allclose(together[:1], alone, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(together, predict(params, batch["images"], stats), rtol=1e-4, atol=1e-5)


def test_a_resumed_run_goes_on_bit_by_bit_with_its_running_averages(tmp_path, monkeypatch):
    small_examples.tiny(monkeypatch, "resnet")
    averages, accuracy_of = [], digits.accuracy_of
    monkeypatch.setattr(digits, "accuracy_of", lambda *args: averages.append(args[-1]) or accuracy_of(*args))
    whole, parts, saved = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl", tmp_path / "saved"
    assert run("resnet", None, "--steps", 6, "--metrics", whole, "--save", tmp_path / "whole") == 0
    assert run("resnet", None, "--steps", 3, "--metrics", parts, "--save", saved) == 0
    assert run("resnet", None, "--steps", 6, "--metrics", parts, "--resume", saved, "--save", tmp_path / "parts") == 0
    assert read_losses(whole) == read_losses(parts)
    of_whole, _, of_parts = averages
    assert_same_bits(of_whole, of_parts)
