"""The local search over a pool: what it changes, and when it stops."""

import dataclasses

import numpy as np
import pytest

from jaxferry.costs import Profile
from jaxferry.planner import FEW_LAYERS, Best, Neighbours, refine
from jaxferry.step import DHA, GFGB, RESIDENT, Loads, Updates
from profiles import transformer


def equal_layers(size):
    """A profile of layers that differ in their names only."""
    layer = transformer(2).layers[1]
    layers = (dataclasses.replace(layer, name=f"layer {index}", parameters=f"layer {index}") for index in range(size))
    return Profile({}, tuple(layers))


def best_of(modes, on_device=None):
    none = np.zeros(len(modes), dtype=bool)
    modes = np.array(modes, dtype=np.int8)
    return Best(modes, none, none, Loads.LAYERWISE, Updates.OVERLAPPED, 1.0, 1, on_device=on_device)


def changed_layers(best, modes):
    return {tuple(np.flatnonzero(plan != best.modes)) for plan in modes}


def test_equal_layers_change_together_in_powers_of_two_from_either_end():
    best = best_of([GFGB, GFGB, DHA, GFGB, GFGB, GFGB])
    modes = Neighbours(equal_layers(6), np.zeros(6, dtype=bool)).of(best)[0]
    together = {(0, 1), (4, 5), (0, 1, 3, 4), (1, 3, 4, 5), (0, 1, 3, 4, 5)}
    assert changed_layers(best, modes) - {()} == together | {(layer,) for layer in range(6)}


def test_layers_of_a_long_model_change_only_with_equal_ones():
    size = 200
    best = best_of([GFGB] * size)
    modes = Neighbours(equal_layers(size), np.zeros(size, dtype=bool)).of(best)[0]
    counts = {len(changed) for changed in changed_layers(best, modes)}
    assert counts == {0, 1, 2, 4, 8, 16, 32, 64, 128, size}
    assert len(modes) < size


@pytest.mark.parametrize(("factor", "is_alike"), [(1.2, True), (1.3, False)])
def test_in_a_long_model_times_that_differ_a_little_count_as_equal(factor, is_alike):
    size = FEW_LAYERS + 2
    profile = equal_layers(size)
    half = [
        dataclasses.replace(layer, forward_s=layer.forward_s * factor ** (index % 2))
        for index, layer in enumerate(profile.layers)
    ]
    best = best_of([GFGB] * size)
    own, mixed = (
        changed_layers(best, Neighbours(x, np.zeros(size, dtype=bool)).of(best)[0])
        for x in (profile, dataclasses.replace(profile, layers=tuple(half)))
    )
    assert (own == mixed) == is_alike


def test_updates_move_to_the_device_and_back_with_modes_that_they_allow():
    on_device = np.array([True, True, False, False])
    best = best_of([RESIDENT, RESIDENT, GFGB, GFGB], on_device)
    modes, _, _, there = Neighbours(equal_layers(4), np.zeros(4, dtype=bool), range(4)).of(best)
    assert (modes[there] == RESIDENT).all()
    moved = {tuple(flags) for flags in there}
    assert {(True,) * 4, (False,) * 4, (True, True, True, False), (False, True, False, False)} <= moved


@pytest.mark.parametrize("most_work", [0, 1, 10**9])
def test_a_search_ends_when_all_are_expanded_or_the_work_is_done(most_work):
    rounds, best = [], best_of([GFGB] * 3)
    neighbours = Neighbours(equal_layers(3), np.zeros(3, dtype=bool))
    refine(lambda: [best], neighbours, lambda *plans: rounds.append(len(plans[0])), most_work)
    assert len(rounds) == (most_work > 0)
