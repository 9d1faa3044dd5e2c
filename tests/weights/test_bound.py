"""The MILP against the paper's formulation, written out and solved by enumerating all binaries."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
import scipy.optimize

from jaxferry.weights import Instance, bound, transfer_bound_s


def _dense_bound(instance: Instance) -> float:
    """Equations (2) to (8) as printed, misprints mended, with one linear programme for each choice of the binaries."""
    num_layers, beta = instance.num_layers, instance.bandwidth_bytes_per_s
    operations = range(2 * num_layers)
    size = 3 * num_layers * 2 * num_layers + 2 * num_layers

    def column(kind: int, layer: int, interval: int) -> int:
        return (kind * num_layers + layer) * 2 * num_layers + interval % (2 * num_layers)

    def row(*terms: tuple[int, float]) -> np.ndarray:
        values = np.zeros(size)
        for where, value in terms:
            values[where] += value
        return values

    idle = size - 2 * num_layers
    offload, prefetch, delete = 0, 1, 2
    length_s = [*reversed(instance.backward_s), *instance.forward_s]
    upper: list[tuple[np.ndarray, float]] = []
    for j in operations:
        for kind in (offload, prefetch):
            terms = [(column(kind, i, j), 1 / beta) for i in range(num_layers)]
            upper.append((row(*terms, (idle + j, -1)), length_s[j]))
    for i in range(num_layers):
        upper.append((row((column(offload, i, num_layers - 1 - i), 1 / beta), (idle + num_layers - 1 - i, -1)), 0))
    for k in operations:
        own = num_layers - 1 - k if k < num_layers else k - num_layers
        needs = instance.backward_bytes(own) if k < num_layers else instance.forward_bytes(own)
        total, room = np.zeros(size), instance.memory_bytes - needs
        for i in set(range(num_layers)) - {own}:
            start = num_layers - 1 - i
            passed = [start + n for n in range((k - start) % (2 * num_layers))]
            total += row(*[(column(prefetch, i, j), 1) for j in passed], *[(column(delete, i, j), -1) for j in passed])
            room -= instance.weights[i]
        upper.append((total, room))
    for i in range(num_layers):
        start = num_layers - 1 - i
        for length in range(1, 2 * num_layers):
            span = range(start, start + length)
            moved = [(column(prefetch, i, j), 1) for j in span] + [(column(delete, i, j), -1) for j in span]
            upper.append((row(*moved), 0))
            known = [(column(offload, i, j), 1) for j in span]
            upper.append((-row(*moved, *known), 0))
    cost = np.zeros(size)
    cost[idle:] = 1
    best = np.inf
    matrix, limits = np.array([terms for terms, _ in upper]), [limit for _, limit in upper]
    for binaries in itertools.product((0, 1), repeat=3 * num_layers):
        equal: list[tuple[np.ndarray, float]] = []
        for i in range(num_layers):
            back, forth = num_layers - 1 - i, num_layers + i
            leaves, after_forward, after_backward = binaries[3 * i : 3 * i + 3]
            weight = instance.weights[i]
            for span in (range(back, back + 2 * num_layers), range(back, forth)):
                moved = [(column(prefetch, i, j), 1) for j in span] + [(column(delete, i, j), -1) for j in span]
                equal.append((row(*moved), 0))
            equal.append((row(*[(column(offload, i, j), 1) for j in operations]), weight * leaves))
            later, sooner = range(forth, back + 2 * num_layers), range(back, forth)
            equal.append((row(*[(column(delete, i, j), 1) for j in later]), weight * after_forward))
            equal.append((row(*[(column(delete, i, j), 1) for j in sooner]), weight * after_backward))
        result = scipy.optimize.linprog(
            cost, matrix, limits, np.array([terms for terms, _ in equal]), [value for _, value in equal]
        )
        if result.status == 0:
            best = min(best, float(result.fun or 0.0))
    return instance.compute_s + best


@pytest.mark.parametrize("seed", range(8))
def test_the_bound_is_that_of_the_printed_formulation(seed: int) -> None:
    rng = random.Random(seed)
    num_layers = 1 if seed == 0 else 2
    instance = Instance(
        weights=tuple(rng.randint(1, 9) for _ in range(num_layers)),
        activations=tuple(rng.randint(0, 3) for _ in range(num_layers + 1)),
        forward_s=tuple(rng.randint(0, 2) for _ in range(num_layers)),
        backward_s=tuple(rng.randint(0, 4) for _ in range(num_layers)),
        memory_bytes=0,
        bandwidth_bytes_per_s=2,
    )
    instance = dataclasses.replace(instance, memory_bytes=instance.smallest_memory_bytes + rng.randint(0, 3))
    assert bound(instance).duration_s == pytest.approx(_dense_bound(instance), rel=1e-6)


def test_on_a_slow_link_the_transfers_alone_are_a_good_bound() -> None:
    """Six weights, room for the operation and two others: at both turns three are absent and have to come back."""
    instance = Instance((10,) * 6, (0,) * 7, (1,) * 6, (1,) * 6, 40, 1)
    assert transfer_bound_s(instance) == (50 - (40 - 20)) + (50 - (40 - 10))
    assert transfer_bound_s(instance) <= bound(instance).duration_s <= 1.3 * transfer_bound_s(instance)
    assert bound(instance, time_limit_s=0.0).duration_s >= transfer_bound_s(instance)
