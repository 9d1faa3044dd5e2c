"""Optimizers whose step the native library runs in one pass over host memory: Adam, AdamW, Lion, SGD.

    jaxferry.adamw(3e-4)  =  optax.adamw(3e-4)  +  a description of its arithmetic (HostRule)

Each is the Optax transformation of the same name, with the same arguments, state and results, and works wherever that
one does. `train_step` reads the description and, where possible, lets the library run the step: it reads the gradient
(any dtype), applies loss scale and clip factor, updates fp32 master and moments in place, and writes the compute copy.
ZeRO-Offload's CPU Adam does this in three passes; a single pass is the limit of memory bandwidth.

    counts, norm, scale --a program, once a step--> factors
    factors, gradient vectors, masters, moments, compute copy --HostStep--> all in place

JAX's arrays stay where they are and take new values, as pinned memory does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxferry.errors import InputError
from jaxferry.native import DTYPES, StepRule, is_available
from jaxferry.optimizer.moments import (
    BlockwiseAdamState,
    scale_by_adam_in_bfloat16,
    scale_by_adam_in_int8,
    with_masters_in_bfloat16,
    with_rounded_products,
)
from jaxferry.optimizer.split_masters import MasterForm
from jaxferry.partition import Layer

Schedule = Callable[[Any], Any]

_MOMENT_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "int8": jnp.uint8}

_MOMENTS = {
    "adam": (optax.ScaleByAdamState, ("mu", "nu")),
    "nadam": (optax.ScaleByAdamState, ("mu", "nu")),
    "lion": (optax.ScaleByLionState, ("mu",)),
    "sgd": (optax.EmptyState, ()),
    "momentum": (optax.TraceState, ("trace",)),
    "nesterov": (optax.TraceState, ("trace",)),
}


@dataclasses.dataclass(frozen=True)
class HostRule:
    """The arithmetic of an Optax chain of update rule, weight decay and learning rate.

    `learning_rate` and `weight_decay` (None without) are numbers, or functions of the number of steps taken. `mask`
    says which parameters decay, in Optax's format; None for all. `moment_dtype` is that of moments, uint8 for codes.
    """

    step: StepRule
    learning_rate: float | Schedule
    weight_decay: float | Schedule | None = None
    mask: Any = None
    moment_dtype: np.dtype = dataclasses.field(default_factory=lambda: np.dtype(np.float32))

    def fits(self, state: Any) -> bool:
        """Whether a state (arrays or shapes) belongs to this rule, with moments of its dtype."""
        kind, names = self._form
        if not (isinstance(state, tuple) and len(state) == (2 if self.weight_decay is None else 3)):
            return False
        if not isinstance(state[0], kind):
            return False
        pairs = zip(names, self.moments(state), strict=True)
        is_known = all(
            leaf.dtype == (np.float32 if name.endswith("_scale") else self.moment_dtype)
            for name, tree in pairs
            for leaf in jax.tree.leaves(tree)
        )
        return is_known and all(leaf.shape == () and leaf.dtype == jnp.int32 for leaf in jax.tree.leaves(state[1:]))

    def moments(self, state: Any) -> list[Any]:
        """Returns the trees of the rule's moments in a state, those of codes followed by those of their scales."""
        return [getattr(state[0], name) for name in self._form[1]]

    @property
    def _form(self) -> tuple[type, tuple[str, ...]]:
        if self.moment_dtype == np.uint8:
            return BlockwiseAdamState, BlockwiseAdamState._fields[1:]
        return _MOMENTS[self.step.kind]

    def decays(self, params: Any) -> list[bool]:
        """Returns for each parameter of a tree whether weight decay applies."""
        if self.weight_decay is None or (not callable(self.weight_decay) and self.weight_decay == 0):
            return [False] * len(jax.tree.leaves(params))
        mask = self.mask(params) if callable(self.mask) else True if self.mask is None else self.mask
        spread = jax.tree.map(lambda chosen, part: jax.tree.map(lambda _: bool(chosen), part), mask, params)
        return jax.tree.leaves(spread)

    def factors(self, state: Any) -> dict[str, jax.Array]:
        """Returns the factors of a step from this state, see `jaxferry.native.host_steps.FACTORS`."""
        one = jnp.float32(1)
        found = {"rate": -_at(self.learning_rate, state[-1]), "first": one, "gradient": one, "second": one}
        found["decay"] = _at(0.0 if self.weight_decay is None else self.weight_decay, state[1])
        if self.step.kind in ("adam", "nadam"):
            count = optax.safe_increment(state[0].count)
            found["first"] = 1 / _bias(self.step.b1, count)
            found["second"] = 1 / _bias(self.step.b2, count)
        if self.step.kind == "nadam":
            found["gradient"] = (1 - self.step.b1) * found["first"]
            found["first"] = self.step.b1 / _bias(self.step.b1, optax.safe_increment(count))
        return found


def _at(value: float | Schedule, state: Any) -> jax.Array:
    """Returns a number, or a schedule's value at the count in its part of the state."""
    return jnp.asarray(value(jax.tree.leaves(state)[0]) if callable(value) else value, jnp.float32)


def _bias(decay: float, count: jax.Array) -> jax.Array:
    # Optax's formula; with x64 enabled its result has 64 bits.
    bias: jax.Array = (1 - decay**count).astype(jnp.float32)
    return bias


class FusedTransformation(optax.GradientTransformationExtraArgs):
    """An Optax transformation that describes its arithmetic in `rule`; None if the library does not support it."""

    rule: HostRule | None = None  # the default also covers copies made by `_replace`

    def __new__(cls, init: Any, update: Any, rule: HostRule | None = None) -> FusedTransformation:
        """Adds the rule that describes Optax's functions."""
        made: FusedTransformation = super().__new__(cls, init, update)
        made.rule = rule
        return made


def adam(
    learning_rate: Any,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
    moments: str = "float32",
    masters: str = "float32",
) -> FusedTransformation:
    """`optax.adam`, which documents the arguments, in one pass over host memory by the native library, if available.

    Optax runs the step unless `mu_dtype` is fp32 or None. `moments` is the dtype of both moments: "float32",
    "bfloat16", which halves them, or "int8", which keeps 8 bits of each and a scale for 256 of them; both with
    stochastic rounding (`jaxferry.optimizer.moments`). With `masters` "bfloat16" in place of "float32", parameters are
    rounded to bfloat16 after each step, likewise: where the device computes in it, host memory has no other copy of
    them. Raises `InputError` for another dtype, or if `mu_dtype` is given with `moments`.
    """
    scale = _scale_by_adam(moments, mu_dtype, b1=b1, b2=b2, eps=eps, eps_root=eps_root, nesterov=nesterov)
    plain = optax.chain(scale, optax.scale_by_learning_rate(learning_rate))
    step = _step_rule("nadam" if nesterov else "adam", b1, b2, eps, eps_root)
    return _fused(plain, step, learning_rate, moments=moments, masters=masters)


def adamw(
    learning_rate: Any,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any = None,
    weight_decay: Any = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
    moments: str = "float32",
    masters: str = "float32",
) -> FusedTransformation:
    """`optax.adamw`, which documents the arguments, in one pass over host memory by the native library, if available.

    Optax runs the step unless `mu_dtype` is fp32 or None. `moments` and `masters` as for `adam`.
    """
    scale = _scale_by_adam(moments, mu_dtype, b1=b1, b2=b2, eps=eps, eps_root=eps_root, nesterov=nesterov)
    decay = optax.add_decayed_weights(weight_decay, mask)
    plain = optax.chain(scale, decay, optax.scale_by_learning_rate(learning_rate))
    step = _step_rule("nadam" if nesterov else "adam", b1, b2, eps, eps_root)
    return _fused(plain, step, learning_rate, weight_decay, mask, moments, masters)


def lion(
    learning_rate: Any, b1: Any = 0.9, b2: Any = 0.99, mu_dtype: Any = None, weight_decay: Any = 1e-3, mask: Any = None
) -> FusedTransformation:
    """`optax.lion`, which documents the arguments, in one pass over host memory by the native library, if available.

    Optax runs the step unless `mu_dtype` is fp32 or None.
    """
    plain = optax.lion(learning_rate, b1, b2, mu_dtype, weight_decay, mask)
    return _fused(plain, _step_rule("lion", b1, b2), learning_rate, weight_decay, mask)


def sgd(
    learning_rate: Any, momentum: Any = None, nesterov: bool = False, accumulator_dtype: Any = None
) -> FusedTransformation:
    """`optax.sgd`, which documents the arguments, in one pass over host memory by the native library, if available.

    Optax runs the step unless `accumulator_dtype` is fp32 or None.
    """
    plain = optax.sgd(learning_rate, momentum, nesterov, accumulator_dtype)
    kind = "sgd" if momentum is None else "nesterov" if nesterov else "momentum"
    return _fused(plain, _step_rule(kind, 0.0 if momentum is None else momentum), learning_rate)


def _scale_by_adam(moments: str, mu_dtype: Any, **options: Any) -> Any:
    _check_name("moments", moments, _MOMENT_DTYPES)
    if moments == "float32":
        return optax.scale_by_adam(**options, mu_dtype=mu_dtype)
    if mu_dtype is not None:
        raise InputError(f"moments={moments!r} is the dtype of both moments: leave out mu_dtype={mu_dtype!r}")
    return scale_by_adam_in_bfloat16(**options) if moments == "bfloat16" else scale_by_adam_in_int8(**options)


def _step_rule(kind: str, *numbers: Any) -> StepRule | None:
    constants = [c for c in map(_constant, numbers) if c is not None]
    b1, b2, eps, eps_root = (*constants, 0.0, 0.0, 0.0, 0.0)[:4]
    return StepRule(kind, b1, b2, eps, eps_root) if len(constants) == len(numbers) else None


def _fused(
    plain: Any,
    step: StepRule | None,
    learning_rate: Any,
    weight_decay: Any = None,
    mask: Any = None,
    moments: str = "float32",
    masters: str = "float32",
) -> FusedTransformation:
    _check_name("masters", masters, ("float32", "bfloat16"))
    rate = learning_rate if callable(learning_rate) else _constant(learning_rate)
    decay = weight_decay if weight_decay is None or callable(weight_decay) else _constant(weight_decay)
    is_known = step is not None and rate is not None and (decay is not None or weight_decay is None)
    dtype, rule = np.dtype(_MOMENT_DTYPES[moments]), None
    if is_known and step is not None and rate is not None:
        rule = HostRule(step, rate, decay, mask, dtype)
    if moments == "int8":
        plain = with_rounded_products(plain)
    if masters == "bfloat16":
        plain = with_masters_in_bfloat16(plain)
        rule = rule and dataclasses.replace(rule, step=dataclasses.replace(rule.step, rounds_masters=True))
    return FusedTransformation(plain.init, plain.update, rule)


def _check_name(name: str, given: Any, names: Collection[str]) -> None:
    if not isinstance(given, str) or given not in names:
        raise InputError(f"{name} must be a name, one of {', '.join(names)}, got {given!r}")


def _constant(value: Any) -> float | None:
    """Returns a constant as a float, None if traced (`inject_hyperparams`) or missing; raises InputError for others."""
    if value is None or isinstance(value, jax.core.Tracer) or np.ndim(value) != 0:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InputError(f"an optimizer takes numbers and functions of the number of steps, got {value!r}") from None


def fused_rule(optimizer: Any, state: Any, layers: Sequence[Layer], reads: Sequence[bool]) -> HostRule | None:
    """Returns the library's rule for the update of these layers; None if Optax has to do it."""
    rule = optimizer.rule if isinstance(optimizer, FusedTransformation) else None
    if rule is None or not all(reads) or not rule.fits(state):
        return None
    leaves = [leaf for layer in layers for leaf in layer.leaves]
    if not all(leaf.master_dtype == np.float32 and leaf.dtype in DTYPES for leaf in leaves):
        return None
    return rule if is_available("cpu") else None


def master_form(optimizer: Any, state: Any) -> MasterForm:
    """The form of masters that the native library updates with this state, if it writes compute copies in place."""
    rule = fused_rule(optimizer, state, [], [])
    if rule is None:
        return MasterForm.WHOLE
    return MasterForm.COPY if rule.step.rounds_masters else MasterForm.SPLIT
