"""Greedy selection of the weights to offload: "Weight Offloading Strategies", section 5, Algorithm 1.

Not optimal: the selection considers memory, not time. The printed algorithm counts an operation's own weight twice
(once in M_o, once in the sum over all weights) and so offloads more than the memory requires; here it counts once. A
negative excess counts as zero; otherwise an operation with spare room would argue against a choice.
"""

import numpy as np

from jaxferry.weights.instance import Instance
from jaxferry.weights.records import Choice, Outcome
from jaxferry.weights.scheduling import schedule_transfers


def greedy(instance: Instance, discount: bool = True) -> Outcome:
    """Runs Algorithms 1 and 2: the selection, then the schedule of the transfers.

    Args:
      instance: the problem.
      discount: whether a weight that is offloaded twice per cycle is sent to the host only once (section 3).

    Raises:
      BudgetError: if no schedule exists.
    """
    instance.check_feasible()
    choices = select(instance, instance.memory_bytes, discount)
    name = "greedy" if discount else "greedy-no-discount"
    return Outcome.of(name, instance, choices, schedule_transfers(instance, choices, discount))


def select(instance: Instance, memory_bytes: float, discount: bool = True) -> tuple[Choice, ...]:
    """Runs Algorithm 1: takes the most profitable choice until all operations fit into `memory_bytes`.

    Ties go to the largest weight, then to the last layer, then to choice (b) before (a). If `memory_bytes` is too small
    for some operation, every choice that relieves it is taken.
    """
    excess = _excess_bytes(instance, memory_bytes)
    weights = np.array(instance.weights, dtype=float)
    covers = _covered_operations(instance.num_layers)
    selected = np.zeros((instance.num_layers, 2), dtype=bool)
    selected[weights == 0] = True
    chosen: list[Choice] = []
    while True:
        benefit = np.where(covers, np.minimum(excess, weights[:, None, None]), 0.0).sum(axis=2)
        benefit[selected] = 0.0
        if not benefit.any():
            return tuple(chosen)
        layer, before_backward = _most_profitable(benefit, weights, selected, discount)
        selected[layer, before_backward] = True
        chosen.append(Choice(layer, bool(before_backward)))
        excess[covers[layer, before_backward]] -= weights[layer]
        np.maximum(excess, 0.0, out=excess)


def _excess_bytes(instance: Instance, memory_bytes: float) -> np.ndarray:
    """Returns E_o without offloading: for the forwards of layers 0 to L-1, then for their backwards in that order."""
    total = sum(instance.weights)
    layers = range(instance.num_layers)
    needs = [instance.forward_bytes(k) for k in layers] + [instance.backward_bytes(k) for k in layers]
    others = [total - instance.weights[k] for k in layers] * 2
    return np.maximum(np.array(needs, dtype=float) + np.array(others, dtype=float) - memory_bytes, 0.0)


def _covered_operations(num_layers: int) -> np.ndarray:
    """Returns which operations run while a weight is absent: shape (L, 2, 2 L); the second axis is d."""
    layers = np.arange(num_layers)
    later = layers[None, :] > layers[:, None]
    earlier = layers[None, :] < layers[:, None]
    covers: np.ndarray = np.stack([np.tile(earlier, 2), np.tile(later, 2)], axis=1)
    return covers


def _most_profitable(benefit: np.ndarray, weights: np.ndarray, selected: np.ndarray, discount: bool) -> tuple[int, int]:
    num_layers = len(weights)
    cost = np.full((num_layers, 2), 2.0)
    if discount:
        cost[selected[:, ::-1]] = 1.0
    with np.errstate(invalid="ignore", divide="ignore"):
        profit = np.where(benefit > 0, benefit / (cost * weights[:, None]), -1.0)
    # Different divisions may round equal profits differently.
    candidates = np.argwhere(profit >= profit.max() * (1 - 1e-12))
    layer, before_backward = max(candidates, key=lambda c: (weights[c[0]], c[0], -c[1]))
    return int(layer), int(before_backward)
