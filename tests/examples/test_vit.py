"""examples/vit: its model against NumPy and the published sizes, its images, its command line from end to end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

import jaxferry
import small_examples
from examples.common import digits
from examples.vit import model, train
from jaxferry.errors import InputError
from small_examples import attend, dense, exact, gelu, norm

pytestmark = pytest.mark.slow

SMALL = small_examples.SMALL["vit"]


@pytest.fixture(scope="module")
def params():
    return small_examples.params_of("vit")


def numpy_logits(config, params, image):
    """A ViT for one image, patch by patch."""
    p, size, epsilon = exact(params), config.patch, config.epsilon
    cut = [
        image[row : row + size, column : column + size]
        for row in range(0, config.image_size, size)
        for column in range(0, config.image_size, size)
    ]
    patches = [np.tensordot(patch, p["patches"]["kernel"], axes=3) + p["patches"]["bias"] for patch in cut]
    x = np.stack([p["class_token"][0, 0], *patches]) + p["positions"][0]
    for layer in (p[f"block_{i}"] for i in range(config.num_layers)):
        q, k, v = np.split(dense(norm(x, layer["ln_1"], epsilon), layer["qkv"]), 3, axis=-1)
        x = x + dense(attend(q, k, v, config.num_heads), layer["proj"])
        x = x + dense(gelu(dense(norm(x, layer["ln_2"], epsilon), layer["up"])), layer["down"])
    return dense(norm(x, p["ln"], epsilon)[0], p["head"])


def test_losses_and_hits_are_those_of_a_numpy_vit(params):
    batch = small_examples.batches_of("vit", None)(0)
    logits = np.stack([numpy_logits(SMALL, params, image) for image in batch["images"].astype(np.float64)])
    loss, told = jax.jit(model.make_loss(SMALL))(params, batch)
    expected = -np.take_along_axis(log_softmax(logits, axis=-1), batch["labels"][:, None], axis=-1).mean()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(told["accuracy"], (logits.argmax(-1) == batch["labels"]).mean())
    np.testing.assert_allclose(model.make_predict(SMALL)(params, batch["images"]), logits, atol=1e-5)


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


def test_accuracy_is_the_share_of_all_images_that_are_recognised(params):
    _, unseen = digits.load()
    few = digits.Digits(unseen.images[:50], unseen.labels[:50])
    step = jaxferry.train_step(model.make_loss(SMALL), train.make_optimizer(1e-3))
    predict = model.make_predict(SMALL)
    accuracy = digits.accuracy_of(step, step.init(params), predict, few, SMALL, 16)
    guesses = jnp.argmax(predict(params, few.images[..., None]), -1)
    assert accuracy == int((guesses == few.labels).sum()) / 50
