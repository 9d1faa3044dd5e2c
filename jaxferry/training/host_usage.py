"""What a training step keeps in host memory, by what it is for."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from jaxferry.costs import ADAMW, UpdateBytes
from jaxferry.engine import groups_backward, groups_with_buffers
from jaxferry.optimizer import MasterForm, init_of, master_bytes, master_form
from jaxferry.partition import Layer, Ownership, Partition, aval_bytes, layers_by_path, result_shapes

MASTERS, STATE, GRADIENTS, SUMS = "master parameters", "optimizer state", "gradients", "sums of gradients"
FEW_BUFFERS = (32, 16, 8, 4, 2)
"""Numbers of gradient buffers to try where host memory does not hold all gradients."""


class TrainedShapes:
    """The shapes of parameters, all trained, and of their optimizer's state, found once; no update is traced."""

    def __init__(self, params: Any, optimizer: optax.GradientTransformation, compute_dtype: Any) -> None:
        self._layers = layers_by_path(params, compute_dtype)
        dtypes, (leaves, tree) = master_dtypes(self._layers), jax.tree.flatten(params)
        masters = [jax.ShapeDtypeStruct(leaf.shape, dtypes[i]) for i, leaf in enumerate(leaves)]
        state = result_shapes(init_of(optimizer), jax.tree.unflatten(tree, masters))
        self._state, self._form = jax.tree.leaves(state), master_form(optimizer, state)

    def host_bytes(
        self,
        layers: Sequence[Layer],
        widened: Mapping[int, int],
        streamed: Collection[int] = (),
        with_buffers: Collection[int] | None = None,
    ) -> dict[str, int]:
        """`Model.host_bytes` of these groups of the parameters."""
        with_buffers = range(len(layers)) if with_buffers is None else with_buffers
        forms = forms_of(self._form, layers, streamed)
        return bytes_by_use(layers, self._state, Ownership(), widened, False, forms, with_buffers)

    def update_bytes(self) -> UpdateBytes:
        """The bytes of the optimizer's step."""
        return update_bytes_of(self._layers, self._state, forms_of(self._form, self._layers, ()))


def update_bytes_of(
    layers: Sequence[Layer],
    state: Iterable[Any],
    forms: Sequence[MasterForm],
    is_joined: bool = False,
) -> UpdateBytes:
    """The bytes of an update of these groups' trained parameters; `state` are the shapes of the optimizer's state."""
    placed = [(Ownership().placed(layer.trained), form) for layer, form in zip(layers, forms, strict=True)]
    sizes = [(leaf, master_bytes(leaf, form, pieces)) for own, form in placed for leaf, pieces in own]
    num = sum(leaf.size for leaf, _ in sizes)
    if not num:
        return ADAMW
    totals = sum(leaf.size * leaf.dtype.itemsize for leaf, _ in sizes), sum(own for _, own in sizes)
    copy, masters, kept = (total / num for total in (*totals, sum(map(aval_bytes, state))))
    return UpdateBytes.of_sizes(copy, masters, kept, is_joined)


def forms_of(form: MasterForm, layers: Sequence[Layer], streamed: Collection[int]) -> list[MasterForm]:
    """The form of each group's masters: whole ones if updates stream through the GPU."""
    return [MasterForm.WHOLE if group in streamed else form for group in range(len(layers))]


def bytes_by_use(
    layers: Sequence[Layer],
    state: Iterable[Any],
    ownership: Ownership,
    widened: Mapping[int, int],
    is_cpu: bool,
    forms: Sequence[MasterForm],
    with_buffers: Collection[int],
) -> dict[str, int]:
    """`Model.host_bytes` without what depends on a plan; `state` are the shapes of the optimizer's state."""
    # The compute copy of a frozen parameter is its only copy if the dtypes agree.
    masters = [
        master_bytes(leaf, form, pieces)
        for layer, form in zip(layers, forms, strict=True)
        for leaf, pieces in ownership.placed(layer)
        if leaf.is_trained or leaf.master_dtype != leaf.dtype
    ]
    trained = [layer.trained for layer in layers]
    # Where gradients of fewer bits are summed, these arrive in memory of their own: all of a step, unless a CPU adds
    # each at once.
    sums = sum(
        ownership.of(layer.wide).num_bytes
        for group, layer in enumerate(trained)
        if group in widened and layer.wide is not layer
    )
    num_arriving = [(1 if is_cpu else widened.get(group, 1)) * (group in with_buffers) for group in range(len(trained))]
    return {
        MASTERS: sum(masters),
        STATE: sum(map(aval_bytes, state)),
        "compute copy": sum(map(ownership.num_host_bytes, layers)),
        GRADIENTS: sum(map(operator.mul, num_arriving, map(ownership.num_host_bytes, trained))),
        **({SUMS: sums} if sums else {}),
    }


def buffered_groups(parts: Partition, num: int | None) -> frozenset[int]:
    """The groups whose gradients have memory of their own on the host: see `Plan.gradient_buffers`."""
    return groups_with_buffers(parts.layers, groups_backward(parts), num)


def few_buffers(fits: Callable[[int | None], bool]) -> int | None:
    """The most gradient buffers, None for all, with which training fits into host memory; the fewest if none does."""
    return next(filter(fits, (None, *FEW_BUFFERS)), FEW_BUFFERS[-1])


def master_dtypes(layers: Sequence[Layer]) -> dict[int, np.dtype]:
    """The dtype of each master, by index in the flattened tree."""
    return {leaf.index: leaf.master_dtype for layer in layers for leaf in layer.leaves}
