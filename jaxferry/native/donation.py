"""Checks that programs give the native operations the memory of their arguments, which these write or wait for.

    argument --donated--> operand of a native call --in place--> result --returned--> output with the argument's memory

XLA copies an operand that it may not overwrite, and hands the copy to the call: there, argument and result are one
buffer as they should be, and the caller's buffer is another. A copy in flight to or from the caller's buffer then goes
on while nobody knows of it. So each program is checked once, when it is made, by what JAX tells XLA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jaxlib.mlir.dialects import stablehlo

from jaxferry.errors import NativeError

_PREFIX = "jaxferry_"
_ASYNCHRONOUS = "jaxferry_ferry_"
"""Calls whose copies go on after the program: their results must be in the very memory of their arguments."""

_ALIAS, _DONOR = "tf.aliasing_output", "jax.buffer_donor"
_MOVES_NOTHING = ("stablehlo.reshape", "stablehlo.optimization_barrier")


def check_donated(lowered: Any, name: str) -> None:
    """Checks a program before it is compiled.

    Raises:
      NativeError: if an argument that a native operation works on in place is not donated, or if the operation's result
        leaves in the memory of another argument.
    """
    module = lowered.compiler_ir("stablehlo")
    main = next(op for op in module.body.operations if op.operation.attributes["sym_name"].value == "main")
    block, attributes = main.regions[0].blocks[0], main.operation.attributes["arg_attrs"]
    for call in block.operations:
        for operand, result in _pairs(call.operation):
            argument = _argument(call.operation.operands[operand])
            if argument is None:
                continue  # memory of the program's own
            attribute = attributes[argument]
            if _ALIAS not in attribute and _DONOR not in attribute:
                raise NativeError(
                    f"{name} does not donate its argument {argument}, as the native library needs: a setting of JAX "
                    'keeps donation away; find it, or use transport="device_put"'
                )
            if not _target(call.operation).startswith(_ASYNCHRONOUS):
                continue
            if _ALIAS not in attribute or attribute[_ALIAS].value not in _outputs(call.operation.results[result]):
                raise NativeError(
                    f"{name} returns its argument {argument} in other memory, while the native library copies: use "
                    'transport="device_put", and report this'
                )


class Donating:
    """A jitted function whose first argument is a sequence, checked before its first call."""

    def __init__(self, jitted: Callable[..., Any], name: str) -> None:
        self._jitted: Any = jitted
        self._name = name
        self._checked: set[tuple[int, int]] = set()
        self._compiled: set[Any] = set()

    def trace(self, *args: Any) -> Any:
        """As of a jitted function: `jax.stages.Traced`."""
        return self._jitted.trace(*args)

    def __call__(self, *args: Any) -> Any:
        """Calls the function; raises NativeError as `check_donated` does, before anything has run."""
        kind = len(args), len(args[0])
        if kind not in self._checked:
            # JAX keeps the lowered program for the call.
            self._lowered(*args)
            self._checked.add(kind)
        return self._jitted(*args)

    def compile(self, *args: Any) -> None:
        """Compiles the function, once, for later calls with such arguments, by threads with the same settings."""
        leaves, structure = jax.tree.flatten(args)
        kind = structure, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)
        if kind not in self._compiled:
            self._lowered(*args).compile()
            self._compiled.add(kind)

    def _lowered(self, *args: Any) -> Any:
        lowered = self.trace(*args).lower()
        check_donated(lowered, self._name)
        return lowered


def _target(operation: Any) -> str:
    if operation.name != "stablehlo.custom_call":
        return ""
    return str(operation.attributes["call_target_name"].value)


def _pairs(operation: Any) -> list[tuple[int, int]]:
    """The operands of a native call that it works on in place, each with its result."""
    if not _target(operation).startswith(_PREFIX) or "output_operand_aliases" not in operation.attributes:
        return []
    found = []
    for attribute in operation.attributes["output_operand_aliases"]:
        alias = stablehlo.OutputOperandAlias(attribute)
        places = list(alias.output_tuple_indices)
        found.append((alias.operand_index, places[0] if places else 0))
    return found


def _argument(value: Any) -> int | None:
    """The program's argument that a value is in the memory of; None if it is none."""
    owner = value.owner
    if not hasattr(owner, "opview"):  # a block, whose argument it is
        if hasattr(value, "arg_number"):
            return int(value.arg_number)
        return next((number for number, each in enumerate(owner.arguments) if each == value), None)
    operation = owner.operation
    number = next(number for number, each in enumerate(operation.results) if each == value)
    place = _operand_of(operation, number)
    return None if place is None else _argument(operation.operands[place])


def _operand_of(operation: Any, result: int) -> int | None:
    """The operand whose memory a result has; None if it has its own."""
    if operation.name in _MOVES_NOTHING or _target(operation) == "annotate_device_placement":
        return result
    return next((operand for operand, each in _pairs(operation) if each == result), None)


def _outputs(value: Any) -> Iterator[int]:
    """The program's outputs that a value leaves as."""
    for use in value.uses:
        operation, operand = use.owner.operation, use.operand_number
        if operation.name == "func.return":
            yield operand
            continue
        for result, each in enumerate(operation.results):
            if _operand_of(operation, result) == operand:
                yield from _outputs(each)
