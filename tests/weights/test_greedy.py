"""The selection of Algorithm 1 and what the discount is worth."""

import dataclasses

import pytest

from jaxferry.weights.best import greedy_best
from jaxferry.weights.greedy import greedy, select
from jaxferry.weights.instance import Instance
from jaxferry.weights.records import Choice, Outcome

EQUAL = Instance((10,) * 4, (0,) * 5, (1,) * 4, (1,) * 4, 1000, 1)


def _kinds(outcome: Outcome, layer: int) -> list[str]:
    assert outcome.schedule is not None
    return [event.kind for event in outcome.schedule.events if event.layer == layer]


def test_the_own_weight_counts_once() -> None:
    """Forwards need all four weights, backwards the gradient as well: 50 bytes, and nothing has to leave."""
    assert select(EQUAL, 50) == ()
    assert select(EQUAL, 49) != ()


def test_the_selection_by_hand() -> None:
    """With 45 bytes each backward lacks 5, and forwards lack none.

    Choice (a) of the first layer covers three backwards, 5 bytes each; (b) of the last covers the other three. They
    tie, and the last layer goes first. That leaves the last layer's backward, for which (a) of any earlier layer would
    do; the largest, then last of them is layer 2.
    """
    assert select(EQUAL, 45) == (Choice(3, False), Choice(2, True))


def test_ties_go_to_the_largest_weight() -> None:
    """Both outer layers relieve the middle one by half of their weight, over the same forward and backward."""
    instance = Instance((8, 0, 4), (0, 10, 20, 0), (1,) * 3, (1,) * 3, 1000, 1)
    excess_free = sum(instance.weights) + 30
    assert select(instance, excess_free - 1)[0] == Choice(0, True)


def test_choice_b_comes_before_choice_a() -> None:
    """The middle layer's weight is all that can leave; (a) and (b) cover one neighbour each, both in excess."""
    instance = Instance((0, 8, 0), (0, 0, 0, 0), (1,) * 3, (1,) * 3, 1000, 1)
    assert select(instance, 7) == (Choice(1, False), Choice(1, True))


def test_a_second_departure_is_cheaper_with_the_discount() -> None:
    """A weight that has left once costs half as much the second time, so it wins over a fresh one that does less."""
    instance = Instance((6, 4, 0, 4), (0,) * 5, (1,) * 4, (1,) * 4, 1000, 1)
    with_discount, without = select(instance, 8), select(instance, 8, discount=False)
    assert len({choice.layer for choice in with_discount}) <= len({choice.layer for choice in without})


def test_the_discount_sends_a_weight_to_the_host_once() -> None:
    """Both choices for the middle layer: two prefetches in either case, one offload with the discount, else two."""
    instance = Instance((5, 5, 5), (0,) * 4, (1,) * 3, (1,) * 3, 10, 1)
    both = {discount: _kinds(greedy(instance, discount), layer=1) for discount in (True, False)}
    assert both[True].count("prefetch") == both[False].count("prefetch") == 2
    assert (both[True].count("offload"), both[False].count("offload")) == (1, 2)


def test_memory_for_a_copy_on_its_way_hides_the_transfers() -> None:
    """Slow operations on a fast link: once memory allows for buffers, nothing but the computation is left."""
    slow = dataclasses.replace(EQUAL, forward_s=(100,) * 4, backward_s=(100,) * 4)
    tight = greedy_best(dataclasses.replace(slow, memory_bytes=20))
    roomy = greedy_best(dataclasses.replace(slow, memory_bytes=45))
    assert tight.duration_s > slow.compute_s
    assert roomy.duration_s == pytest.approx(slow.compute_s)
