"""Models with kernels of their own: derivative rules written by hand, and Pallas (interpreted where it must be)."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import pallas as pl

from models import BlockNet, Task, first_columns, language_model, nnx_task


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """RMSNorm with the derivative that its kernels have: the inverse root is kept, the rest computed again."""
    return _rms_norm_forward(x, scale, epsilon)[0]


def _rms_norm_forward(x: jax.Array, scale: jax.Array, epsilon: float) -> Any:
    inverse = jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + epsilon)
    return x * inverse * scale, (x, scale, inverse)


def _rms_norm_backward(epsilon: float, residuals: Any, g: jax.Array) -> Any:
    x, scale, inverse = residuals
    normed, scaled = x * inverse, g * scale
    to_x = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdims=True))
    return to_x, (g * normed).sum(range(g.ndim - 1))


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


class RmsNormed(nn.Module):
    """The norm with its parameter."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.param("scale", nn.initializers.ones, x.shape[-1:]), 1e-6)


class GatedBlock(nn.Module):
    """A norm by hand and a gated MLP."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = RmsNormed(name="norm")(x)
        gate, h = jnp.split(nn.Dense(64, use_bias=False, name="up")(h), 2, axis=-1)
        return x + nn.Dense(x.shape[-1], use_bias=False, name="down")(nn.silu(gate) * h)


def linen_custom_vjp() -> Task:
    """Norms whose derivative is written by hand."""
    return language_model(BlockNet(GatedBlock, norm=RmsNormed))


def _matmul_kernel(x_ref: Any, w_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...] @ w_ref[...]


def _pallas_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """`x @ w` by columns of 16."""
    rows, inner = x.shape
    return pl.pallas_call(
        _matmul_kernel,
        grid=(w.shape[1] // 16,),
        in_specs=[pl.BlockSpec((rows, inner), lambda j: (0, 0)), pl.BlockSpec((inner, 16), lambda j: (0, j))],
        out_specs=pl.BlockSpec((rows, 16), lambda j: (0, j)),
        out_shape=jax.ShapeDtypeStruct((rows, w.shape[1]), x.dtype),
        interpret=jax.default_backend() == "cpu",
    )(x, w)


@jax.custom_vjp
def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """A product by a Pallas kernel, forward and backward."""
    return _pallas_matmul(x, w)


matmul.defvjp(
    lambda x, w: (_pallas_matmul(x, w), (x, w)),
    lambda kept, g: (_pallas_matmul(g, kept[1].T), _pallas_matmul(kept[0].T, g)),
)


class PallasBlock(nnx.Module):
    """A residual MLP whose products are Pallas kernels on its own parameters."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Param(jax.random.normal(rngs.params(), (width, 2 * width)) / width**0.5)
        self.down = nnx.Param(jax.random.normal(rngs.params(), (2 * width, width)) / width**0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + matmul(nnx.gelu(matmul(self.norm(x), self.up[...])), self.down[...])


class PallasNet(nnx.Module):
    """A regression by blocks of Pallas kernels."""

    def __init__(self, width: int, depth: int, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([PallasBlock(width, rngs) for _ in range(depth)])
        self.head = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def nnx_pallas() -> Task:
    """Pallas kernels that read parameters."""
    return nnx_task(
        lambda: PallasNet(16, 3, nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (16, 16)), first_columns
    )
