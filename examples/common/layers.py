"""Layers that the models share, in addition to Flax's own."""

import warnings

import jax
import jax.numpy as jnp

from jaxferry.errors import InputError

_FIRST_CAPABILITY = 8.0  # Ampere: cuDNN's flash attention takes no older GPU


def attention(q, k, v, *, is_causal=False, is_token=None, implementation=None):
    """Returns the attention of queries to keys and values: softmax(q k / sqrt(D)) v.

    cuDNN's flash attention computes no [T, S] scores in memory, but takes 16 bits only: in float32, as where `init` is
    traced, XLA's attention computes. The device's own implementation is cuDNN's if the model is traced for CUDA (Ampere
    or later), else XLA's; also, with a warning, where cuDNN is missing or does not take the shape. The device is
    `jax.default_device`, which JaxFerry sets to that of the training step, or JAX's first.

    Gradients by cuDNN may differ in their last bits from run to run unless XLA_FLAGS has
    --xla_gpu_exclude_nondeterministic_ops.

    Args:
      q: [B, T, N, D].
      k, v: [B, S, K, D], where K divides N.
      is_causal: whether position t attends to positions up to t only.
      is_token: bool [B, S], False at keys that are padding, at the end of a row; None for no padding.
      implementation: "xla", "cudnn", or None for the device's own.

    Returns:
      An array like q.

    Raises:
      InputError: if `implementation` is anything else.
    """
    if implementation not in (None, "xla", "cudnn"):
        raise InputError(f'attention must be "xla", "cudnn", or None for the device\'s own, got {implementation!r}')
    is_narrow = q.dtype in (jnp.bfloat16, jnp.float16)
    if is_narrow and implementation == "cudnn":
        return _by_cudnn(q, k, v, is_causal, is_token)
    if is_narrow and implementation is None and _computes_on_cuda():
        try:
            return _by_cudnn(q, k, v, is_causal, is_token)
        except RuntimeError as error:
            warnings.warn(f"attention by XLA, which takes more memory and time than cuDNN's: {error}", stacklevel=2)
    mask = None if is_token is None else is_token[:, None, None]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=is_causal, implementation="xla")


def _by_cudnn(q, k, v, is_causal, is_token):
    """JAX differentiates it for even numbers of queries and keys only; odd ones are padded."""
    T, S = q.shape[1], k.shape[1]
    lengths = None
    if is_token is not None:
        lengths = jnp.maximum(1, is_token.sum(1, dtype=jnp.int32))  # a softmax of nothing is no number
    elif S % 2:
        lengths = jnp.full(len(k), S, jnp.int32)
    q, k, v = (_padded(z) if z.shape[1] % 2 else z for z in (q, k, v))
    options = {"is_causal": is_causal, "key_value_seq_lengths": lengths, "implementation": "cudnn"}
    return jax.nn.dot_product_attention(q, k, v, **options)[:, :T]


def _padded(z):
    return jnp.pad(z, ((0, 0), (0, 1), (0, 0), (0, 0)))


def _computes_on_cuda():
    """Whether the trace is for a CUDA device that cuDNN's attention takes."""
    device = jax.config.jax_default_device or jax.default_backend()
    if isinstance(device, str):
        if device != "gpu":
            return False
        try:
            device = jax.local_devices(backend=device)[0]
        except RuntimeError:  # a plan for a GPU is made on a machine that has none
            return True
    is_cuda = device.platform == "gpu" and "cuda" in device.client.platform_version
    return is_cuda and float(device.compute_capability) >= _FIRST_CAPABILITY


def dropout(x, rate, key):
    """Applies dropout to x and returns it with the key for the next dropout. Without a key, x is unchanged.

    The key travels with the residual stream, so that blocks hold no constant of their own and are all the same program.
    """
    if key is None or rate == 0:
        return x, key
    key, this = jax.random.split(key)
    return jnp.where(jax.random.bernoulli(this, 1 - rate, x.shape), x / (1 - rate), 0), key
