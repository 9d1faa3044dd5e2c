"""What holds for every policy for weights, on random instances."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxferry.errors import BudgetError, InputError
from jaxferry.weights import (
    POLICIES,
    Choice,
    Instance,
    bound,
    greedy,
    schedule_transfers,
    solve,
    transfer_bound_s,
)
from weight_schedules import validate

ROUNDING = 1e-9
SOLVER = 1e-6
SCHEDULED = sorted(set(POLICIES) - {"bound"})


@st.composite
def instances(draw: st.DrawFn, max_layers: int = 7) -> Instance:
    """Instances with a memory between the smallest feasible and all that could be used; zeros and equals are common."""
    num_layers = draw(st.integers(1, max_layers))
    sizes = st.one_of(st.just(0), st.just(8), st.integers(1, 30))
    times = st.one_of(st.just(0), st.just(3), st.integers(1, 20), st.floats(0.1, 5.0))

    def tuples(elements: st.SearchStrategy, length: int) -> tuple:
        return tuple(draw(st.lists(elements, min_size=length, max_size=length)))

    instance = Instance(
        weights=tuples(sizes, num_layers),
        activations=tuples(st.integers(0, 6), num_layers + 1),
        forward_s=tuples(times, num_layers),
        backward_s=tuples(times, num_layers),
        memory_bytes=10**9,
        bandwidth_bytes_per_s=draw(st.sampled_from([0.5, 1, 3, 10])),
    )
    smallest = int(instance.smallest_memory_bytes)
    roomiest = int(sum(instance.weights) + max(instance.weights) + sum(instance.activations))
    return dataclasses.replace(instance, memory_bytes=draw(st.integers(smallest, max(smallest, roomiest))))


@settings(derandomize=True, deadline=None, max_examples=100)
@given(instances())
def test_every_schedule_keeps_to_the_model_and_takes_at_least_the_computation(instance: Instance) -> None:
    for policy in SCHEDULED:
        outcome = solve(instance, policy)
        assert outcome.policy == policy
        assert outcome.duration_s >= instance.compute_s * (1 - ROUNDING)
        assert outcome.overhead is None or outcome.overhead >= -ROUNDING
        if outcome.schedule is None:
            assert policy == "l2l" and outcome.note
        else:
            validate(instance, outcome.schedule)
            assert outcome.duration_s == pytest.approx(outcome.schedule.duration_s, rel=ROUNDING)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(instances(max_layers=5))
def test_no_schedule_is_shorter_than_the_bound(instance: Instance) -> None:
    lower = bound(instance)
    assert lower.duration_s >= instance.compute_s * (1 - ROUNDING)
    for policy in SCHEDULED:
        assert solve(instance, policy).duration_s >= lower.duration_s * (1 - SOLVER) - SOLVER


@settings(derandomize=True, deadline=None, max_examples=80)
@given(instances())
def test_no_schedule_is_shorter_than_its_transfers(instance: Instance) -> None:
    for policy in sorted(set(POLICIES) - {"bound"}):
        assert transfer_bound_s(instance) <= solve(instance, policy).duration_s * (1 + 1e-9)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(instances(max_layers=3))
def test_no_selection_at_all_beats_the_bound(instance: Instance) -> None:
    lower = bound(instance).duration_s
    everything = [Choice(k, way) for k, way in itertools.product(range(instance.num_layers), (False, True))]
    useful = [c for c in everything if c not in (Choice(0, False), Choice(instance.num_layers - 1, True))]
    shortest = float("inf")
    for size in range(len(useful) + 1):
        for choices in itertools.combinations(useful, size):
            if _fits(instance, choices):
                schedule = schedule_transfers(instance, choices)
                validate(instance, schedule)
                shortest = min(shortest, schedule.duration_s)
    assert lower * (1 - SOLVER) - SOLVER <= shortest <= greedy(instance).duration_s * (1 + ROUNDING)


def _fits(instance: Instance, choices: tuple[Choice, ...]) -> bool:
    """Whether every operation fits once the chosen weights are offloaded: section 3, written out."""
    for now in range(instance.num_layers):
        away = {c.layer for c in choices if (c.layer < now if c.before_backward else c.layer > now)}
        others = sum(w for k, w in enumerate(instance.weights) if k != now and k not in away)
        kept = sum(instance.activations[: now + 2])
        if 2 * instance.weights[now] + kept + others > instance.memory_bytes:
            return False
    return True


@settings(derandomize=True, deadline=None, max_examples=50)
@given(instances())
def test_less_than_the_smallest_memory_is_refused_with_the_smallest(instance: Instance) -> None:
    smallest = instance.smallest_memory_bytes
    for policy in POLICIES:
        if smallest > 0:
            with pytest.raises(BudgetError) as caught:
                solve(dataclasses.replace(instance, memory_bytes=smallest - 1), policy)
            assert caught.value.smallest_bytes == smallest
        solve(dataclasses.replace(instance, memory_bytes=smallest), policy)


def test_an_unknown_policy_is_answered_with_the_known_ones() -> None:
    instance = Instance((1,), (0, 0), (1,), (1,), 10, 1)
    with pytest.raises(InputError, match="greedy, greedy-no-discount, greedy-best, l2l, bound, got 'best'"):
        solve(instance, "best")
