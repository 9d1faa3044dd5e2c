"""Adam's state in fewer bits: `optax.scale_by_adam`, whose state has 4 or 2.03 bytes a parameter in place of 8.

Arithmetic is that of fp32. Moments change by a part of 1 - b1 and 1 - b2 in a step, often less than half the distance
of two numbers that few bits hold: to nearest, they would not change at all. They are rounded up or down at random, so
that the mean is kept (stochastic rounding, Gupta et al. 2015, "Deep learning with limited numerical precision").
Chance is a hash of an element's gradient, its moments before the step and the number of the step, in int8 also of its
place in its block: the same bits in every run and under every plan that only moves data. The native library has the
same hash and the same codes (`xla_ffi/cpu/host_step_kernel.inc`).

bfloat16: the upper 16 bits of each moment.

int8: a code of 8 bits for each element, in blocks of 256 elements of the flattened parameter, each with an fp32 scale
(Dettmers et al. 2022, "8-bit optimizers via block-wise quantization"; torchao has the same block). A code is the
exponent and 3 bits of the mantissa of a number, below those of the block's largest one:

    first moment     sign, 7 bits: 127 numbers of each sign, within 2^-16 of the largest. Below, 0 or the least one,
                     at random, so that the mean is kept there too
    second moment    8 bits: 255 numbers, within 2^-32 of the largest. Below, the least one

The second moment's range is the square of the first one's, so no update is large because its divisor was cut off:
linear codes round small second moments to zero, and the update is divided by eps. Codes are spaced like a float's
(FP8 moments: Fishman et al. 2024, "Scaling FP8 training to trillion-token LLMs", and torchao's `AdamWFp8`), so that
every element has the same relative precision, which is what Adam's quotient needs; Dettmers' dynamic map is finer
near the largest number alone. Codes and scales are parts of fp32 numbers: no rounding takes part in reading them.

Masters in bfloat16 are rounded in the same way (Zamirai et al. 2020, "Revisiting BFloat16 training"): a step changes a
parameter by less than half the distance of two such numbers. Here chance is a hash of gradient, parameter and step.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxferry.errors import InputError
from jaxferry.native import MOMENT_BLOCK as BLOCK
from jaxferry.partition import evaluate, trace

_OF_SEED, _FIRST_FACTOR, _SECOND_FACTOR = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35
_CUT = 20  # bits of an fp32 mantissa that codes of 8 bits lack
_NAN = 0x7FC00000
_SIGN = 0x80  # the bit of a code


class BlockwiseAdamState(NamedTuple):
    """The state of `scale_by_adam_in_int8`: codes in the parameters' shapes, uint8, and the blocks' scales, fp32."""

    count: Any
    mu: Any
    nu: Any
    mu_scale: Any
    nu_scale: Any


def scale_by_adam_in_bfloat16(*args: Any, **options: Any) -> optax.GradientTransformation:
    """`optax.scale_by_adam`, with its arguments, and moments in bfloat16."""
    wide = optax.scale_by_adam(*args, **options)

    def init(params: Any) -> optax.ScaleByAdamState:
        _check_real(params, "bfloat16")
        state = wide.init(params)
        return state._replace(**{name: _cast(getattr(state, name), jnp.bfloat16) for name in ("mu", "nu")})

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:
        own = {name: _cast(getattr(state, name), jnp.float32) for name in ("mu", "nu")}
        updates, new = wide.update(gradients, state._replace(**own), params)
        seed = state.count.astype(jnp.uint32) * jnp.uint32(_OF_SEED)
        noise = jax.tree.map(functools.partial(_noise, seed), gradients, own["mu"], own["nu"])
        mu = jax.tree.map(lambda moment, both: _dithered(moment, both & 0xFFFF), new.mu, noise)
        nu = jax.tree.map(lambda moment, both: _dithered(moment, both >> 16), new.nu, noise)
        return updates, new._replace(mu=mu, nu=nu)

    return optax.GradientTransformation(init, update)


def scale_by_adam_in_int8(
    b1: Any = 0.9, b2: Any = 0.999, eps: Any = 1e-8, eps_root: Any = 0.0, *, nesterov: bool = False
) -> optax.GradientTransformation:
    """`optax.scale_by_adam`, with these arguments, and moments in codes of 8 bits.

    It computes what the native library does, bit by bit: products are rounded before they are added
    (`with_rounded_products`), and corrections of the bias are multiplied.
    """

    def init(params: Any) -> BlockwiseAdamState:
        _check_real(params, "int8")
        codes, scales = (
            jax.tree.map(lambda p, shape=shape, dtype=dtype: jnp.zeros(shape(jnp.shape(p)), dtype), params)
            for shape, dtype in ((tuple, jnp.uint8), (scale_shape, jnp.float32))
        )
        return BlockwiseAdamState(jnp.zeros([], jnp.int32), codes, codes, scales, scales)

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, BlockwiseAdamState]:
        count = optax.safe_increment(state.count)
        first, second = (1 / _bias(decay, count) for decay in (b1, b2))
        gradient = jnp.float32(1)
        if nesterov:
            gradient, first = (1 - b1) * first, b1 / _bias(b1, optax.safe_increment(count))
        constants = [jnp.asarray(x, jnp.float32) for x in (b1, 1 - b1, b2, 1 - b2, eps, eps_root)]
        numbers = (state.count, first, gradient, second, *constants)
        tree: Any = jax.tree.structure(gradients)
        of_leaves = zip(jax.tree.leaves(gradients), *map(tree.flatten_up_to, state[1:]), strict=True)
        made = [BLOCKWISE_ADAM.bind(*arrays, *numbers, nesterov=nesterov) for arrays in of_leaves]
        updates, *new = (tree.unflatten([of_leaf[i] for of_leaf in made]) for i in range(5))
        return updates, BlockwiseAdamState(count, *new)

    return optax.GradientTransformation(init, update)


def with_masters_in_bfloat16(plain: Any) -> optax.GradientTransformation:
    """The same updates, of parameters that are rounded to bf16, up or down, before each step and after it.

    Sums of parameters and updates are numbers that bf16 holds, whatever dtype they have: those of the last step are
    not rounded again before the next.
    """

    def init(params: Any) -> Any:
        dtypes = [jnp.result_type(leaf) for leaf in jax.tree.leaves(params)]
        if not all(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 4 for dtype in dtypes):
            raise InputError(
                'masters="bfloat16" needs real parameters of at most 32 bits: take masters="float32" for others'
            )
        return plain.init(params)

    def update(gradients: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        if params is None:
            raise InputError('masters="bfloat16" needs the parameters: pass them to update')
        near = jax.tree.map(lambda p: jax.lax.reduce_precision(p.astype(jnp.float32), 8, 7), params)
        updates, new = plain.update(gradients, state, near, **extra_args)
        seed = ~(state[0].count.astype(jnp.uint32)) * jnp.uint32(_OF_SEED)

        def rounded(gradient: jax.Array, param: jax.Array, own: jax.Array, update: jax.Array) -> jax.Array:
            noise = _noise(seed, gradient, own, jnp.zeros_like(own))
            return _dithered(own + update, noise & 0xFFFF).astype(jnp.float32) - param

        return jax.tree.map(rounded, gradients, params, near, updates), new

    return optax.GradientTransformation(init, update)


def moments_of(state: Any) -> tuple[Any, Any]:
    """Returns both moments in fp32 of the Optax state of `jaxferry.adam` or `adamw`, in whatever form it has them."""
    adam = state[0]
    if not isinstance(adam, BlockwiseAdamState):
        return _cast(adam.mu, jnp.float32), _cast(adam.nu, jnp.float32)

    def wide(codes: jax.Array, scale: jax.Array, sign: int) -> jax.Array:
        return _decoded(codes, scale, sign).reshape(-1)[: codes.size].reshape(codes.shape)

    pairs = ((adam.mu, adam.mu_scale, _SIGN), (adam.nu, adam.nu_scale, 0))
    mu, nu = (jax.tree.map(functools.partial(wide, sign=sign), *trees) for *trees, sign in pairs)
    return mu, nu


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a parameter's scales; with a row for each index of the first axis, if blocks do not cross it."""
    inner = math.prod(shape[1:])
    return (shape[0], inner // BLOCK) if len(shape) > 1 and inner % BLOCK == 0 else (-(-math.prod(shape) // BLOCK),)


def with_rounded_products(plain: Any) -> optax.GradientTransformation:
    """A chain that begins with `scale_by_adam_in_int8`, each of whose fp32 products is rounded before it is added.

    XLA's compilers add it unrounded where they can, in whichever operation they have fused, and the native library
    never does. An exclusive or with a zero that is not known when they compile keeps the two apart.
    """

    def update(gradients: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        given = (gradients, state, params)
        graph = trace(lambda own: plain.update(*own, **extra_args), given, (), {})
        values = dict(graph.constants) | dict(zip(graph.parameters, jax.tree.leaves(given), strict=True))
        for equation in graph.equations:
            evaluate([equation], values)
            [made, *_] = equation.outputs
            if equation.primitive.name == "mul" and values[made].dtype == jnp.float32:
                values[made] = _rounded(values[made], state[0].count)
        leaves = [values[atom] if isinstance(atom, int) else atom.val for atom in graph.outputs]
        return jax.tree.unflatten(graph.out_tree, leaves)

    return optax.GradientTransformation(plain.init, update)


def _rounded(product: jax.Array, count: jax.Array) -> jax.Array:
    return _number(_bits(product) ^ (count < 0).astype(jnp.uint32))


def _bias(decay: Any, count: jax.Array) -> jax.Array:
    return (1 - decay**count).astype(jnp.float32)


def _check_real(params: Any, moments: str) -> None:
    if any(jnp.iscomplexobj(leaf) for leaf in jax.tree.leaves(params)):
        raise InputError(f'moments="{moments}" needs real parameters: take moments="float32" for complex ones')


def _cast(moments: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda moment: moment.astype(dtype), moments)


def _bits(numbers: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(numbers.astype(jnp.float32), jnp.uint32)


def _number(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _noise(seed: jax.Array, gradient: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """Two random numbers of 16 bits for each element, in one of 32."""
    noise = _bits(gradient) ^ _bits(second) ^ (_bits(first) >> 16) ^ seed
    noise = (noise ^ (noise >> 16)) * jnp.uint32(_FIRST_FACTOR)
    return (noise ^ (noise >> 13)) * jnp.uint32(_SECOND_FACTOR)


def _dithered(moment: jax.Array, noise: jax.Array) -> jax.Array:
    """Rounds fp32 numbers to bf16, up or down by random numbers of 16 bits."""
    bits = _bits(moment)
    rounded = jnp.where(jnp.isnan(moment), (bits >> 16) | 0x40, (bits + noise) >> 16)
    return jax.lax.bitcast_convert_type(rounded.astype(jnp.uint16), jnp.bfloat16)


def _in_blocks(array: jax.Array) -> jax.Array:
    flat = array.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)


def _decoded(codes: jax.Array, scales: jax.Array, sign: int) -> jax.Array:
    """Numbers of codes, in blocks; `sign` is the bit of a code for it, 0 of those that have none."""
    codes, largest = _in_blocks(codes), 0x7F if sign else 0xFF
    size = (codes & largest).astype(jnp.uint32)
    bits = (size + (_bits(scales).reshape(-1, 1) >> _CUT) - largest) << _CUT
    return _number(jnp.where(size == 0, 0, bits | (codes & sign).astype(jnp.uint32) << 24))


def _encoded(numbers: jax.Array, noise: jax.Array, sign: int) -> tuple[jax.Array, jax.Array]:
    """Codes of numbers in blocks, rounded by random numbers of 20 bits, and the blocks' scales."""
    largest = 0x7F if sign else 0xFF
    sizes = jnp.minimum(_bits(numbers) & 0x7FFFFFFF, _NAN)
    top = (sizes.max(1, keepdims=True) + (2**_CUT - 1)) >> _CUT
    codes = (((sizes + noise) >> _CUT) - top + largest).astype(jnp.int32)
    if not sign:
        return jnp.maximum(codes, (sizes > 0).astype(jnp.int32)).astype(jnp.uint8), _number(top << _CUT)
    least = _number((top - (largest - 1)) << _CUT)
    is_up = _number(sizes) > noise.astype(jnp.float32) * 2**-_CUT * least
    codes = jnp.where(codes < 1, is_up, codes).astype(jnp.uint8)
    signs = jnp.where(jnp.isnan(numbers), 0, _bits(numbers) >> 24 & sign)  # of a NaN, either one
    return codes | signs.astype(jnp.uint8), _number(top << _CUT)


def _blockwise_adam(
    gradient: jax.Array,
    mu: jax.Array,
    nu: jax.Array,
    mu_scale: jax.Array,
    nu_scale: jax.Array,
    count: jax.Array,
    first: jax.Array,
    of_gradient: jax.Array,
    second: jax.Array,
    *constants: jax.Array,
    nesterov: bool,
) -> list[jax.Array]:
    """The update of a parameter before decay and learning rate, and its state after the step."""
    b1, one_minus_b1, b2, one_minus_b2, eps, eps_root = constants

    def times(x: jax.Array, y: jax.Array) -> jax.Array:
        return _rounded(x * y, count)

    g = _in_blocks(gradient.astype(jnp.float32))
    old = [_decoded(mu, mu_scale, _SIGN), _decoded(nu, nu_scale, 0)]
    m = times(one_minus_b1, g) + times(b1, old[0])
    v = times(one_minus_b2, times(g, g)) + times(b2, old[1])
    mean = times(first, m) + times(of_gradient, g) if nesterov else times(first, m)
    update = mean / (jnp.sqrt(times(second, v) + eps_root) + eps)
    seed = count.astype(jnp.uint32) * jnp.uint32(_OF_SEED) ^ jnp.arange(BLOCK, dtype=jnp.uint32)
    noise = _noise(seed, g, *old)
    new_mu, new_mu_scale = _encoded(m, noise & (2**_CUT - 1), _SIGN)
    new_nu, new_nu_scale = _encoded(v, noise >> (32 - _CUT), 0)
    shaped = [x.reshape(-1)[: gradient.size].reshape(gradient.shape) for x in (update, new_mu, new_nu)]
    return [*shaped, new_mu_scale.reshape(mu_scale.shape), new_nu_scale.reshape(nu_scale.shape)]


BLOCKWISE_ADAM = Primitive("blockwise_adam")
"""`_blockwise_adam` as one operation, which `replay` runs on parts of whole blocks alone."""
BLOCKWISE_ADAM.multiple_results = True
BLOCKWISE_ADAM.def_impl(jax.jit(_blockwise_adam, static_argnames="nesterov"))
mlir.register_lowering(BLOCKWISE_ADAM, mlir.lower_fun(_blockwise_adam, multiple_results=True))


@BLOCKWISE_ADAM.def_abstract_eval
def _results(gradient: Any, *operands: Any, **_: Any) -> list[Any]:
    update = jax.core.ShapedArray(gradient.shape, np.dtype(np.float32))
    return [update, *(jax.core.ShapedArray(x.shape, x.dtype) for x in operands[:4])]
