"""examples/vit: its model against NumPy and the published sizes, its images, its command line from end to end."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf, log_softmax

import jaxferry
from examples.common import digits
from examples.common.training import count_parameters
from examples.vit import model, train
from jaxferry.errors import InputError
from jaxferry.partition import partition
from metrics_files import read_losses, read_metrics
from plain_optax import assert_same_losses

pytestmark = pytest.mark.slow

SMALL = dataclasses.replace(model.SIZES["tiny"], num_layers=2, num_heads=2, channels=16)


@pytest.fixture(scope="module")
def params():
    """Parameters without zeros, so that omitting one is noticed."""
    leaves, tree = jax.tree.flatten(jax.jit(model.make_init(SMALL))(jax.random.key(0)))
    rng = np.random.default_rng(2)
    return jax.tree.unflatten(tree, [leaf + rng.normal(0, 0.1, leaf.shape).astype(np.float32) for leaf in leaves])


def make_batches(batch_size=5):
    return digits.Batches(digits.load()[0], batch_size, seed=0)


def numpy_logits(config, params, image):
    """A ViT for one image, patch by patch."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def norm(x, p):
        variance = ((x - x.mean(-1, keepdims=True)) ** 2).mean(-1, keepdims=True)
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(variance + config.epsilon) * p["scale"] + p["bias"]

    def dense(x, p):
        return x @ p["kernel"] + p["bias"]

    def gelu(x):
        return x * (1 + erf(x / np.sqrt(2))) / 2

    size = config.patch
    cut = [
        image[row : row + size, column : column + size]
        for row in range(0, config.image_size, size)
        for column in range(0, config.image_size, size)
    ]
    patches = [np.tensordot(patch, p["patches"]["kernel"], axes=3) + p["patches"]["bias"] for patch in cut]
    x = np.stack([p["class_token"][0, 0], *patches]) + p["positions"][0]
    width = config.channels // config.num_heads
    for layer in (p[f"block_{i}"] for i in range(config.num_layers)):
        q, k, v = np.split(dense(norm(x, layer["ln_1"]), layer["qkv"]), 3, axis=-1)
        y = np.zeros_like(x)
        for part in (slice(head * width, (head + 1) * width) for head in range(config.num_heads)):
            scores = np.exp(q[:, part] @ k[:, part].T / np.sqrt(width))
            y[:, part] = scores / scores.sum(-1, keepdims=True) @ v[:, part]
        x = x + dense(y, layer["proj"])
        x = x + dense(gelu(dense(norm(x, layer["ln_2"]), layer["up"])), layer["down"])
    return dense(norm(x, p["ln"])[0], p["head"])


def test_losses_and_hits_are_those_of_a_numpy_vit(params):
    batch = make_batches()(0)
    logits = np.stack([numpy_logits(SMALL, params, image) for image in batch["images"].astype(np.float64)])
    loss, told = jax.jit(model.make_loss(SMALL))(params, batch)
    expected = -np.take_along_axis(log_softmax(logits, axis=-1), batch["labels"][:, None], axis=-1).mean()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(told["accuracy"], (logits.argmax(-1) == batch["labels"]).mean())
    np.testing.assert_allclose(model.make_predict(SMALL)(params, batch["images"]), logits, atol=1e-5)


# Those of the published models for 224 x 224 images and 1000 classes (Dosovitskiy et al. 2021): 86 M and 304 M.
@pytest.mark.parametrize(("size", "expected"), [("base", 86_567_656), ("large", 304_326_632)])
def test_sizes_are_the_published_ones(size, expected):
    assert count_parameters(model.make_init(model.SIZES[size])) == expected


def test_losses_agree_with_a_plain_optax_loop(params):
    assert_same_losses(model.make_loss(SMALL), train.make_optimizer(1e-3), params, make_batches())


def test_all_blocks_share_one_program(params):
    segments = partition(model.make_loss(SMALL), params, (make_batches()(0),), {}).segments
    blocks = [segment for segment in segments if segment.name.startswith("block_")]
    assert [segment.name for segment in blocks] == ["block_0", "block_1"]
    assert blocks[0].program == blocks[1].program


def test_parts_of_the_digits_have_no_image_in_common_and_are_all_of_them():
    seen, unseen = digits.load()
    assert len(seen.labels) + len(unseen.labels) == 1797
    assert len(unseen.labels) == 359
    images = np.concatenate([seen.images, unseen.images])
    assert (images.min(), images.max()) == (-1, 1)
    whole = {image.tobytes() for image in images}
    assert len(whole) > 1790
    assert not {image.tobytes() for image in seen.images} & {image.tobytes() for image in unseen.images}
    assert set(unseen.labels.tolist()) == set(range(10))


def test_a_larger_image_shows_the_same_digit():
    seen, _ = digits.load()
    large = digits.enlarge(seen.images[:3], 24, 3)
    assert large.shape == (3, 24, 24, 3)
    np.testing.assert_array_equal(large[:, 1::3, 2::3, 1], seen.images[:3])
    np.testing.assert_array_equal(large.reshape(3, 8, 3, 8, 3, 3).std(axis=(2, 4, 5)), 0)
    with pytest.raises(InputError, match="must be a multiple of 8, got 12"):
        digits.enlarge(seen.images, 12, 1)


def test_a_batch_depends_on_seed_and_step_alone():
    seen, _ = digits.load()

    def draw(seed, step):
        return digits.Batches(seen, 16, seed)(step)["images"]

    np.testing.assert_array_equal(draw(0, 7), draw(0, 7))
    assert not (draw(0, 8) == draw(0, 7)).all()
    assert not (draw(1, 7) == draw(0, 7)).all()


def test_accuracy_is_the_share_of_all_images_that_are_recognised(params):
    _, unseen = digits.load()
    few = digits.Digits(unseen.images[:50], unseen.labels[:50])
    step = jaxferry.train_step(model.make_loss(SMALL), train.make_optimizer(1e-3))
    predict = model.make_predict(SMALL)
    accuracy = digits.accuracy_of(step, step.init(params), predict, few, SMALL, 16)
    guesses = jnp.argmax(predict(params, few.images[..., None]), -1)
    assert accuracy == int((guesses == few.labels).sum()) / 50


@pytest.fixture
def small(monkeypatch):
    """Lets the size `tiny` stand for a model that is quick to compile."""
    monkeypatch.setitem(model.SIZES, "tiny", SMALL)


def run(*args):
    return train.main(["--batch", "32", *map(str, args)])


def test_training_learns_to_tell_digits_apart(small, tmp_path, capsys):
    metrics = tmp_path / "metrics.jsonl"
    assert run("--steps", 300, "--lr", "0.005", "--metrics", metrics, "--memory-budget", "8MiB") == 0
    assert read_metrics(metrics)[0].keys() >= {"loss", "accuracy", "images_per_s"}
    printed = capsys.readouterr().out.splitlines()[-1]
    assert printed.endswith("of 359 unseen images recognised")
    assert float(printed.split("%")[0]) > 60


def test_a_resumed_run_goes_on_bit_by_bit(small, tmp_path):
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert run("--steps", 6, "--metrics", whole) == 0
    assert run("--steps", 3, "--metrics", parts, "--save", tmp_path / "saved") == 0
    assert run("--steps", 6, "--metrics", parts, "--resume", tmp_path / "saved") == 0
    assert read_losses(whole) == read_losses(parts)


def test_bad_input_is_one_line_and_status_2(capsys):
    assert run("--size", "huge") == 2
    error = capsys.readouterr().err
    assert error == "error: --size must be one of tiny, base, large, got huge\n"
