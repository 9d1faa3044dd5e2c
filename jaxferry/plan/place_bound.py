"""A proven lower bound on plans that choose where each group is updated, within a memory budget.

The work of each lane in a step fits into one period T, and what stays on the device fits into the budget. Each group
takes one of these options, each with its least seconds on the four lanes and its bytes of memory:

- its layers are loaded or read in host memory, their gradients leave by the link or by the backward itself, and the
  host updates them;
- likewise loaded or read, and the update streams through the GPU: state up and down, no gradient leaves;
- all of it stays on the device.

For any weights w of the lanes that add up to 1, and any price p of a byte,

    T  >=  sum over groups of the cheapest option's (w . seconds + p * bytes)  -  p * budget

(Lagrange's relaxation). Good weights are found by multiplicative updates: what the cheapest options use most becomes
dearer. The bound follows from the weights alone, so it holds however good they are.
"""

import numpy as np

from jaxferry.plan.device_updates import updatable_groups
from jaxferry.profiling.records import LayerProfile, Profile

_BOTH = (True, False)
_ROUNDS = 1500


def place_lower_bound_s(profile: Profile, budget_bytes: int | None = None) -> float:
    """No plan within the budget has a smaller `steady_step_s`, wherever its groups are updated."""
    may_update = frozenset(updatable_groups(profile))
    options = [_options(profile, group, group in may_update) for group in range(len(profile.groups))]
    most = max(len(each) for each in options)
    table = np.stack([np.concatenate([each, np.repeat(each[:1], most - len(each), axis=0)]) for each in options])
    if budget_bytes is None:
        table[:, :, -1] = 0.0
    return _best_bound_s(table, max(float(budget_bytes or 0), 1.0))


def _best_bound_s(table: np.ndarray, budget_bytes: float) -> float:
    """The largest bound of all weights that are tried; `table`: (groups, options, lanes and bytes)."""
    found_s = float(table[:, :, :-1].sum(axis=2).min(axis=1).sum()) / (table.shape[2] - 1)
    scale = np.append(np.ones(table.shape[2] - 1), found_s / budget_bytes)
    rows, logs = np.arange(len(table)), np.zeros(len(scale))
    for number in range(_ROUNDS):
        weights = np.exp(logs - logs.max())
        weights /= weights[:-1].sum()
        costs = (table * (weights * scale)).sum(axis=2)
        bound_s = float(costs.min(axis=1).sum() - weights[-1] * scale[-1] * budget_bytes)
        if bound_s > found_s:
            found_s, scale[-1] = bound_s, bound_s / budget_bytes
        used = table[rows, costs.argmin(axis=1)].sum(axis=0) * scale
        logs += used / max(used.max(), 1e-300) * (4.0 / (4.0 + number) ** 0.5)
    return max(found_s, 0.0)


def _options(profile: Profile, group: int, may_update: bool) -> np.ndarray:
    """The options of a group: seconds on GPU, H2D, D2H and host, and bytes; (options, 5)."""
    layers = [profile.layers[member] for member in profile.groups[group]]
    first, alone = layers[0], len(layers) == 1
    by_host = np.array([0.0, 0.0, 0.0, profile.group_update_s[group], 0.0])
    found = [_read(layers, alone, loaded, leaves) + by_host for loaded in _BOTH for leaves in _BOTH]
    if may_update:
        gpu_s, up_s, down_s = first.update_gpu_s or 0.0, first.state_up_s or 0.0, first.state_down_s or 0.0
        if first.state_up_s is not None and first.state_down_s is not None:
            through = np.array([gpu_s, up_s, down_s, 0.0, 0.0])
            found += [_read(layers, alone, loaded, None) + through for loaded in _BOTH]
        kept = np.array([gpu_s, 0.0, 0.0, 0.0, first.state_bytes + first.param_bytes])
        found.append(_read(layers, False, True, None) + kept)
    return np.array(found)


def _read(layers: list[LayerProfile], alone: bool, loaded: bool, leaves: bool | None) -> np.ndarray:
    """The least work of programs and transfers; `leaves`: by the link, or else by the backward; None: not at all.

    Layers that share parameters may share one copy, so only one alone needs a load. Without a gradient it needs none in
    every step.
    """
    gpu_s = load_s = offload_s = 0.0  # the last two: the links' time for transfers and for programs
    for layer in layers:
        forward_s, backward_s = layer.forward_dha_s, layer.backward_dha_s
        if not loaded:
            load_s += layer.forward_read_s + layer.backward_read_s
        else:
            forward_s, backward_s = min(forward_s, layer.forward_s), min(backward_s, layer.backward_s)
            load_s += layer.load_s * (alone and layer.has_gradient)
        more_s = layer.backward_go_s - layer.backward_s
        if leaves is not None and layer.has_gradient:
            offload_s += layer.offload_s if leaves else layer.backward_write_s
            backward_s = backward_s if leaves else max(backward_s + more_s, 0.0)
        gpu_s += forward_s + backward_s + layer.inter_forward_s + layer.inter_backward_s
    return np.array([gpu_s, load_s, offload_s, 0.0, 0.0])
