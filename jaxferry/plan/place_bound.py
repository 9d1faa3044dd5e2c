"""A proven lower bound on plans that choose everything for each layer, within a memory budget.

The work of each lane in a step fits into one period T, and what a plan holds at some place of the step fits into the
budget. Each group takes one of these options, each with its least seconds on the four lanes and its bytes there:

- its layers are held from forward to backward, loaded twice, or read in host memory, with or without recomputation;
  their gradients leave by the link or by the backward itself, and the host updates them;
- likewise, but the update streams through the GPU: state up and down, no gradient leaves;
- all of it stays on the device.

Programs by DHA and GO take time of the links as well (`jaxferry.simulate.shared_links`). **Bytes** count at up to two
places: the last forward, and the forward that needs the most if all layers recompute. A forward needs the copies that
are held across it, the kept activations of all layers so far, and its own workspace.

For any weights w of the lanes that add up to 1, and any prices p of a byte at the places,

    T  >=  sum over groups of the cheapest option's (w . seconds + p . bytes)  -  p . budgets

(Lagrange's relaxation). Good weights are found by multiplicative updates: what the cheapest options use most becomes
dearer. The bound follows from the weights alone, so it holds however good they are.
"""

import itertools

import numpy as np

from jaxferry.plan.device_updates import updatable_groups
from jaxferry.plan.effort import fewer
from jaxferry.profiling.records import LayerProfile, Profile

_HELD, _AGAIN, _READ = "held", "loaded twice", "read in host memory"
_BOTH = (True, False)
_ROUNDS = 1500
_LEAST_ROUNDS = 50
_LANES = 4
_MOST_TOGETHER = 512
"""The most combinations of the options of layers that share parameters."""


def place_lower_bound_s(profile: Profile, budget_bytes: int | None = None) -> float:
    """No plan within the budget has a smaller `steady_step_s`, wherever its groups are updated."""
    may_update = frozenset(updatable_groups(profile))
    places = () if budget_bytes is None else _places(profile)
    options = [_options(profile, group, group in may_update, places) for group in range(len(profile.groups))]
    most = max(len(each) for each in options)
    table = np.stack([np.concatenate([each, np.repeat(each[:1], most - len(each), axis=0)]) for each in options])
    total_bytes = table[:, :, _LANES:].max(axis=1).sum(axis=0)
    left_bytes = np.array([_left_bytes(profile, place, budget_bytes or 0) for place in places])
    budgets = np.maximum(left_bytes, 1e-6 * total_bytes + 1.0)  # no price of a byte is without limit
    return _best_bound_s(table, budgets)


def _best_bound_s(table: np.ndarray, budgets: np.ndarray) -> float:
    """The largest bound of all weights that are tried.

    Args:
      table: (groups, options, lanes and places), seconds and bytes.
      budgets: (places,), bytes.
    """
    found_s = float(table[:, :, :_LANES].sum(axis=2).min(axis=1).sum()) / _LANES
    scale = np.append(np.ones(_LANES), found_s / budgets)
    most_s = float(table[:, :, :_LANES].sum(axis=2).max(axis=1).sum())
    rows, logs = np.arange(len(table)), np.zeros(len(scale))
    for number in range(fewer(_ROUNDS, len(table), _LEAST_ROUNDS)):
        weights = np.exp(logs - logs.max())
        weights /= weights[:_LANES].sum()
        costs = table @ (weights * scale)
        bound_s = float(costs.min(axis=1).sum() - (weights * scale)[_LANES:] @ budgets)
        if bound_s > found_s:
            found_s, scale[_LANES:] = bound_s, bound_s / budgets
        if found_s > most_s:  # even one task after another is faster: nothing fits
            break
        used = table[rows, costs.argmin(axis=1)].sum(axis=0) * scale
        logs += used / max(used.max(), 1e-300) * (4.0 / (4.0 + number) ** 0.5)
    return max(found_s, 0.0)


def _places(profile: Profile) -> tuple[int, ...]:
    """The layers at whose forward bytes count."""
    least = np.cumsum([min(layer.kept_bytes(again) for again in _choices(layer)) for layer in profile.layers])
    needs = [int(kept) + _own_bytes(profile, place) for place, kept in enumerate(least)]
    return tuple({len(needs) - 1, int(np.argmax(needs))})


def _choices(layer: LayerProfile) -> tuple[bool, ...]:
    return (False, True) if layer.can_recompute else (False,)


def _own_bytes(profile: Profile, place: int) -> int:
    """The least memory of a forward besides copies and kept activations; the last layer's backward follows at once."""
    layer, is_last = profile.layers[place], place == len(profile.layers) - 1
    flags = list(itertools.product(_BOTH, _BOTH, _choices(layer)))
    forward_bytes = min(layer.forward_bytes(by_dha, again) for by_dha, _, again in flags)
    return max(forward_bytes, min(layer.backward_bytes(*each) for each in flags)) if is_last else forward_bytes


def _left_bytes(profile: Profile, place: int, budget_bytes: int) -> float:
    """What a budget leaves for copies and kept activations; values that wait in host memory do not count."""
    saved = sum(layer.save_bytes for layer in profile.layers[: place + 1])
    return float(budget_bytes + saved - _own_bytes(profile, place))


def _options(profile: Profile, group: int, may_update: bool, places: tuple[int, ...]) -> np.ndarray:
    """The options of a group: seconds on GPU, H2D, D2H and host, and bytes at each place; (options, 4 + places)."""
    members = profile.groups[group]
    first = profile.layers[members[0]]

    def programs(leaves: bool, stays: bool = False) -> np.ndarray:
        moves_alone, loadings = len(members) == 1 and not stays, (_HELD,) if stays else (_HELD, _AGAIN, _READ)
        each = [_of_layer(profile, member, moves_alone, leaves, loadings, places) for member in members]
        if np.prod([len(options) for options in each]) > _MOST_TOGETHER:
            each = [options.min(axis=0, keepdims=True) for options in each]
        return np.array([sum(chosen) for chosen in itertools.product(*each)])

    def others(*seconds: float, num_bytes: float = 0.0) -> np.ndarray:
        return np.array([*seconds, *[num_bytes] * len(places)])

    found = [programs(first.has_gradient) + others(0.0, 0.0, 0.0, profile.group_update_s[group])]
    if may_update:
        gpu_s, up_s, down_s = first.update_gpu_s or 0.0, first.state_up_s, first.state_down_s
        if up_s is not None and down_s is not None:
            found.append(programs(False) + others(gpu_s, up_s, down_s, 0.0))
        kept = others(gpu_s, 0.0, 0.0, 0.0, num_bytes=first.state_bytes + first.param_bytes)
        found.append(programs(False, stays=True) + kept)
    return np.concatenate(found)


def _of_layer(
    profile: Profile, index: int, alone: bool, leaves: bool, loadings: tuple[str, ...], places: tuple[int, ...]
) -> np.ndarray:
    """The options of a layer's programs and transfers, (options, 4 + places).

    Layers that share parameters may share one copy, so only one `alone` needs a load and memory for it. Without a
    gradient its copy can stay for ever.
    """
    layer = profile.layers[index]
    by_backward = () if not leaves or layer.gradient_rows else (True,)
    found = []
    for loading, again, is_go in itertools.product(loadings, _choices(layer), (False, *by_backward)):
        gpu_s, up_s = _seconds(layer, loading, again, is_go)
        down_s = 0.0 if not leaves else layer.backward_write_s if is_go else layer.offload_s
        held = layer.param_bytes if loading == _HELD and alone and layer.has_backward else 0
        kept = [held + layer.kept_bytes(again) if index <= place else 0 for place in places]
        moves = loading == _READ or (alone and (loading == _AGAIN or layer.has_gradient))
        found.append(np.array([gpu_s, up_s if moves else 0.0, down_s, 0.0, *kept]))
    return np.array(found)


def _seconds(layer: LayerProfile, loading: str, again: bool, is_go: bool) -> tuple[float, float]:
    """The least time of a layer's programs, and what they or their loads take of the link up."""
    inter_s, runs_back = layer.inter_forward_s, layer.has_backward
    inter_s += layer.inter_backward_s if runs_back else 0.0
    loaded, read = layer.backward_for(False, is_go, again), layer.backward_for(True, is_go, again)
    if loading == _READ:
        read_s = layer.forward_read_s + (layer.backward_reads_for(again) if runs_back else 0.0)
        return layer.forward_dha_s + read + inter_s, read_s
    if loading == _HELD:
        return min(layer.forward_s, layer.forward_dha_s) + min(loaded, read) + inter_s, layer.load_s
    twice = runs_back and (layer.backward_reads or again) and not layer.fused_backward
    return layer.forward_s + loaded + inter_s, layer.load_s * (1 + twice)
