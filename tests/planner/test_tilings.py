"""The numbers of tiles among which a plan is chosen."""

import dataclasses

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jaxferry.errors import BudgetError
from jaxferry.modes import Remat
from jaxferry.partition import partition
from jaxferry.planner import Request, levels_of_tiles, numbers_to_try, plan_for, plan_in_tiles
from jaxferry.step import needed_bytes
from profiles import examples, profiles, transformer

NUMBERS = (1, 2, 4)
PROGRAMS = ("forward", "forward_dha", "backward", "backward_dha", "backward_go", "backward_dha_go")


def in_tiles(profile, sizes, seconds_a_tile=0.0):
    """The layers in each number of tiles: temporaries are shared out, and each tile more takes time."""
    found = {}
    for number in NUMBERS:
        layers = [
            dataclasses.replace(
                layer,
                temporary_bytes=dict.fromkeys(PROGRAMS, size // number),
                tiles=number if size else 1,
                forward_s=layer.forward_s + seconds_a_tile * (number - 1) * (size > 0),
            )
            for layer, size in zip(profile.layers, sizes, strict=True)
        ]
        found[number] = dataclasses.replace(profile, layers=tuple(layers))
    return found


def peaks(level):
    """What each program needs: the activations kept so far, and its temporaries."""
    kept = np.cumsum([0, *(sum(level.layers[i].kept_bytes(Remat.FULL) for i in members) for members in level.programs)])
    sizes = [level.layers[members[0]].temporary_bytes.get("forward", 0) for members in level.programs]
    return kept[:-1] + sizes


@pytest.mark.parametrize(
    ("rows", "length", "most"),
    [(8, 4, 8), (1, 16, 1), (1, 1024, 16), (4, 512, 32), (48, 64, 32), (500, 1, 64), (6, 1, 4)],
)
def test_tiles_to_try_have_64_tokens_at_least_or_are_64_rows_at_most(rows, length, most):
    def loss_fn(params, batch):
        x = jnp.tanh(batch @ params["in"]["w"])
        return (x @ params["out"]["w"]).mean()

    shape = jax.ShapeDtypeStruct
    params = {"in": {"w": shape((8, 4), jnp.float32)}, "out": {"w": shape((4, 2), jnp.float32)}}
    numbers = numbers_to_try(partition(loss_fn, params, (shape((rows, length, 8), jnp.float32),)))
    powers = {2**power for power in range(most.bit_length())}
    assert numbers == tuple(sorted(powers | {min(rows, 64)}))


@examples(60)
@given(profiles(programs=True, recomputing=True), st.data())
def test_levels_lower_the_highest_peak_as_far_as_tiles_can(profile, data):
    sizes = [4 * data.draw(st.integers(0, 3)) for _ in profile.layers]
    found = in_tiles(profile, sizes)
    levels, firsts = levels_of_tiles(found), [members[0] for members in profile.programs]
    assert levels[0] == found[1]
    tiles = [[level.layers[first].tiles for first in firsts] for level in levels]
    for before, after, level, other in zip(tiles, tiles[1:], levels, levels[1:], strict=False):
        changed = [sizes[first] for first, a, b in zip(firsts, before, after, strict=True) if b > a]
        assert len(set(changed)) == 1 and changed == [sizes[first] for first in firsts if sizes[first] in changed]
        may_change = [
            peak for peak, first, b in zip(peaks(level), firsts, before, strict=True) if sizes[first] and b < 4
        ]
        assert any(peaks(level)[i] == max(may_change) for i, first in enumerate(firsts) if sizes[first] in changed)
        assert max(peaks(other)) <= max(peaks(level))
    assert tiles[-1] == [4 if sizes[first] else 1 for first in firsts]


def test_where_more_tiles_need_more_memory_there_are_fewer():
    """Tiles of a lookup, say, carry a sum of their own."""
    profile = transformer(3)
    found = in_tiles(profile, [0] * len(profile.layers))
    worse = tuple(dataclasses.replace(layer, temporary_bytes={"backward": 7}, tiles=2) for layer in profile.layers)
    assert levels_of_tiles({**found, 2: dataclasses.replace(profile, layers=worse)}) == [found[1]]


def plan(level, budget):
    return plan_for(level, "auto", Request(memory_budget_bytes=budget))


def least_bytes(level):
    with pytest.raises(BudgetError) as raised:
        plan(level, 1)
    return raised.value.smallest_bytes


def chosen(levels, budget):
    return plan_in_tiles(levels, budget, lambda index: plan(levels[index], budget))


@pytest.fixture(scope="module")
def levels():
    """The last layer's temporaries are ten times as large as all layers."""
    profile = transformer(4)
    total = sum(layer.param_bytes + layer.grad_bytes + layer.activation_bytes for layer in profile.layers)
    sizes = [0] * (len(profile.layers) - 1) + [10 * total]
    return levels_of_tiles(in_tiles(profile, sizes, seconds_a_tile=1e-9))


def test_with_room_a_plan_has_one_tile(levels):
    unlimited = plan(levels[0], None)
    budget = needed_bytes(levels[0], unlimited)
    assert chosen(levels, budget) == (0, plan(levels[0], budget))


@pytest.mark.parametrize("index", range(2))
def test_a_budget_that_only_tiles_fit_takes_the_fewest_that_are_as_fast(levels, index):
    budget = least_bytes(levels[index]) - 1
    found, made = chosen(levels, budget)
    assert found > index and needed_bytes(levels[found], made) <= budget
    fitting = [level for level in levels if least_bytes(level) <= budget]
    assert fitting and made.predicted.steady_step_s < 1.02 * min(
        plan(level, budget).predicted.steady_step_s for level in fitting
    )


def test_too_small_a_budget_names_the_least_need_of_all_levels(levels):
    with pytest.raises(BudgetError) as raised:
        chosen(levels, 1)
    assert raised.value.smallest_bytes == least_bytes(levels[-1])
