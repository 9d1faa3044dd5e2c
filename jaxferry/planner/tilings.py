"""Chooses in how many tiles the programs of each layer run.

profiles by number of tiles --more tiles where the most memory is in use--> levels --bounds--> the likeliest --> plans

One program runs at a time, so the temporaries of the one with the highest peak decide what fits. A level takes more
tiles for that program, and for all that are equal to it, than the level before.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from jaxferry.costs import LayerProfile, Profile, backward_variant, forward_variant
from jaxferry.errors import BudgetError
from jaxferry.modes import Remat
from jaxferry.partition import Partition
from jaxferry.planner.place_bound import any_plan_lower_bound_s
from jaxferry.planner.preference import longest_equal_s
from jaxferry.step import LayerPlan, Plan

_LEAST_TOKENS, _MOST_OF_FEWER = 64, 64
"""Of a tile: products with fewer rows are slow; and how many tiles of fewer tokens, a row each, are tried."""

_NEAR = 1.01
"""A level with a bound this near to the least one may do as well with fewer tiles."""


def numbers_to_try(parts: Partition) -> tuple[int, ...]:
    """The numbers of tiles among which a level chooses for each program.

    Args:
      parts: the segments. Each of more than 64 tiles, and each along the tokens, has 64 tokens of all rows at least.

    Returns:
      The powers of two, and tiles of one row each, in ascending order.
    """
    graph = parts.graph
    num_devices = graph.num_devices if graph.batch_size else 1
    shapes = [graph.avals[value].shape for segment in parts.segments for value in segment.inputs]
    num_tokens = max((math.prod(shape[:-1]) for shape in shapes if shape[:1] == (graph.num_rows,)), default=0)
    of_rows = min(graph.num_rows // num_devices, _MOST_OF_FEWER)
    most = max(1, of_rows, num_tokens // num_devices // _LEAST_TOKENS)
    return tuple(sorted({max(1, of_rows), *(2**power for power in range(most.bit_length()))}))


def levels_of_tiles(profiles: Mapping[int, Profile]) -> list[Profile]:
    """Returns profiles with less and less memory in use at the highest peak, the first one in one tile.

    Args:
      profiles: the layers with all programs in so many tiles, as far as they can be tiled. 1 is among the numbers.
    """
    whole, held_bytes = profiles[1], 0
    most_held = dict[tuple[tuple[int, int], ...], int]()
    choices = list[tuple[tuple[int, int], ...]]()
    for members in whole.programs:
        sizes = {number: _temporary_bytes(profiles[number].layers[members[0]]) for number in sorted(profiles)}
        before = [min((sizes[m] for m in sizes if m < n), default=math.inf) for n in sizes]
        choice = tuple(each for each, least in zip(sizes.items(), before, strict=True) if each[1] < least)
        choices += [choice] * len(members)
        most_held[choice] = held_bytes  # equal programs that run later have more beside them
        held_bytes += sum(layer.kept_bytes(Remat.FULL) for layer in (whole.layers[member] for member in members))
    taken, levels = dict.fromkeys(most_held, 0), [whole]
    while open_choices := [choice for choice in taken if taken[choice] + 1 < len(choice)]:
        highest = max(open_choices, key=lambda choice: most_held[choice] + choice[taken[choice]][1])
        taken[highest] += 1
        numbers = [choice[taken[choice]][0] for choice in choices]
        layers = tuple(profiles[number].layers[index] for index, number in enumerate(numbers))
        levels.append(dataclasses.replace(whole, layers=layers))
    return levels


def _temporary_bytes(layer: LayerProfile) -> int:
    """The temporaries of its programs that load parameters: in tiles, others copy what they read and write."""
    names = [name for remat in Remat for name in (forward_variant(False, remat), backward_variant(False, False, remat))]
    return max(layer.temporary_bytes.get(name, 0) for name in names)


def tiles_of(parts: Partition, layers: Sequence[LayerProfile | LayerPlan]) -> tuple[int, ...]:
    """Returns the number of tiles of each segment, as the layers of a profile or of a plan for these parts state it."""
    return tuple(layers[uses[0]].tiles for uses in parts.uses_of)


def plan_in_tiles(levels: Sequence[Profile], budget_bytes: int, plan: Callable[[int], Plan]) -> tuple[int, Plan]:
    """Chooses a level: of the likeliest ones, the fastest, or the first that counts as equal.

    Args:
      levels: from `levels_of_tiles`.
      budget_bytes: the memory budget.
      plan: plans for a level, given by its index, within the budget; raises BudgetError if no plan fits.

    Returns:
      The index of the level, and its plan.

    Raises:
      BudgetError: if no level has a plan that fits; it names the smallest need.
    """
    if len(levels) == 1:
        return 0, plan(0)
    bounds = [any_plan_lower_bound_s(profile, budget_bytes) for profile in levels]
    first_near = next(index for index, bound in enumerate(bounds) if bound <= _NEAR * min(bounds))
    # The bound knows little of gradients that wait on the device, to which the last level leaves the most memory.
    likely = [0, first_near, len(levels) - 1, *sorted(range(len(levels)), key=bounds.__getitem__)]
    if any(layer.offloadable_bytes for layer in levels[0].layers):  # nor of activations on their way to the host
        likely.insert(2, len(levels) // 2)
    planned, errors = dict[int, Plan](), list[BudgetError]()
    for number, index in enumerate(dict.fromkeys(likely)):
        if number > 2 and planned:
            break
        try:
            planned[index] = plan(index)
        except BudgetError as error:
            errors.append(error)
    if not planned:
        raise min(errors, key=lambda error: error.smallest_bytes)
    seconds = {index: _step_s(made) for index, made in planned.items()}
    longest_s = longest_equal_s(min(seconds.values()))
    chosen = min(index for index, own_s in seconds.items() if own_s <= longest_s)
    return chosen, planned[chosen]


def _step_s(plan: Plan) -> float:
    return math.inf if plan.predicted is None else plan.predicted.steady_step_s
