"""Tolerances for results that cannot be bit-identical, in one place."""

LOSS_RTOL = 1e-5
"""fp32 losses against a plain jitted Optax loop (DESIGN: exact numerics)."""

PARAMS_RTOL = 2e-4
"""fp32 parameters against a plain jitted SGD loop, whose sums XLA orders in another way."""

FUSED_RTOL = 5e-6
"""Masters and moments after 100 steps of the native library, against those of plain Optax: XLA fuses multiplications
with additions and divides where the library multiplies by a reciprocal."""
