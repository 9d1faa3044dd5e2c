"""Decides whether two segments are the same program: equal equations up to the numbers of their values.

Values are renumbered in order of appearance, and parameters of primitives are compared by content. A callable among
them (the rule of a `custom_vjp`) cannot be compared by content: `Canonical.is_opaque` reports it, and the caller
compares the differentiated programs instead, where such rules are resolved.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jaxferry.partition.graph import Equation, type_of_aval


def bytes_of(array: Any) -> bytes:
    """Returns the bytes of a constant; for PRNG keys, those of their key data."""
    is_key = hasattr(array, "dtype") and jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array).tobytes()


class Canonical:
    """Describes a program as nested tuples without names or addresses.

    Args:
      is_derived: whether the program is already differentiated, or never will be. Its remaining derivative rules
        then have no effect and are ignored.

    Attributes:
      is_opaque: whether some part could be compared only by identity.
    """

    def __init__(self, is_derived: bool = False) -> None:
        self.is_opaque = False
        self._is_derived = is_derived

    def digest(self, content: Any) -> str:
        """Returns a short hash of the content."""
        return hashlib.sha256(repr(content).encode()).hexdigest()[:16]

    def equations(
        self,
        equations: Iterable[Equation],
        inputs: Sequence[int],
        outputs: Sequence[Any],
        avals: Sequence[type_of_aval],
    ) -> Any:
        """Returns the content of a list of equations with numbered values."""
        names = {value: index for index, value in enumerate(inputs)}

        def read(atom: Any) -> Any:
            return names[atom] if isinstance(atom, int) else self._literal(atom)

        body = []
        for equation in equations:
            operands = [read(atom) for atom in equation.inputs]
            names |= {value: len(names) + i for i, value in enumerate(equation.outputs)}
            kinds = [str(avals[value]) for value in equation.outputs]
            body.append((equation.primitive.name, self._params(equation), operands, kinds, str(equation.context)))
        return [str(avals[value]) for value in inputs], body, [read(atom) for atom in outputs]

    def jaxpr(self, jaxpr: core.Jaxpr, constants: Sequence[Any] = ()) -> Any:
        """Returns the content of a jaxpr."""
        names: dict[Any, int] = {}
        for variable in (*jaxpr.constvars, *jaxpr.invars):
            names[variable] = len(names)

        def read(atom: Any) -> Any:
            return self._literal(atom) if isinstance(atom, core.Literal) else names[atom]

        body = []
        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            names |= {variable: len(names) + i for i, variable in enumerate(eqn.outvars)}
            kinds = [str(variable.aval) for variable in eqn.outvars]
            body.append((eqn.primitive.name, self._params(eqn), operands, kinds))
        kinds = [str(variable.aval) for variable in (*jaxpr.constvars, *jaxpr.invars)]
        return kinds, body, [read(atom) for atom in jaxpr.outvars], [self._value(value) for value in constants]

    def _literal(self, literal: core.Literal) -> Any:
        return str(literal.aval), self._value(literal.val)

    def _params(self, equation: Any) -> Any:
        params = sorted(equation.params.items())
        if self._is_derived and equation.primitive.name.startswith(("custom_jvp_call", "custom_vjp_call")):
            params = [(name, value) for name, value in params if hasattr(value, "jaxpr") or hasattr(value, "eqns")]
        if "callback" in equation.primitive.name:
            return [
                (name, self._callback(value) if name == "callback" else self._value(value)) for name, value in params
            ]
        return [(name, self._value(value)) for name, value in params]

    def _callback(self, value: Any) -> Any:
        """A callback is compared by identity: objects that print alike may differ."""
        self.is_opaque = True
        return id(getattr(value, "callback_func", value))

    def _value(self, value: Any) -> Any:
        if hasattr(value, "eqns"):
            return self.jaxpr(value, getattr(value, "consts", ()))
        if hasattr(value, "jaxpr") and hasattr(value, "consts"):
            return self.jaxpr(value.jaxpr, value.consts)
        if isinstance(value, (tuple, list)):
            return type(value).__name__, [self._value(item) for item in value]
        if isinstance(value, dict):
            return [(repr(key), self._value(item)) for key, item in value.items()]
        if hasattr(value, "__array__") and hasattr(value, "shape"):
            return str(value.dtype), value.shape, hashlib.sha256(bytes_of(value)).hexdigest()
        text = repr(value)
        is_function = hasattr(value, "call_wrapped") or inspect.isroutine(value) or isinstance(value, functools.partial)
        if is_function or " at 0x" in text:
            self.is_opaque = True
            return text, id(value)
        return text
