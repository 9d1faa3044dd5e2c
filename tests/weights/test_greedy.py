"""The selection of Algorithm 1 and what the discount is worth."""

import dataclasses
import itertools
import random
from fractions import Fraction

import pytest

from jaxferry.weights import Choice, Instance, Outcome, greedy, greedy_best, select

EQUAL = Instance((10,) * 4, (0,) * 5, (1,) * 4, (1,) * 4, 1000, 1)


def _kinds(outcome: Outcome, layer: int) -> list[str]:
    assert outcome.schedule is not None
    return [event.kind for event in outcome.schedule.events if event.layer == layer]


def test_choice_b_comes_before_choice_a() -> None:
    """The middle layer's weight is all that can leave; (a) and (b) cover one neighbour each, both in excess."""
    instance = Instance((0, 8, 0), (0, 0, 0, 0), (1,) * 3, (1,) * 3, 1000, 1)
    assert select(instance, 7) == (Choice(1, False), Choice(1, True))


def test_a_second_departure_is_cheaper_with_the_discount() -> None:
    """A weight that has left once costs half as much the second time, so it wins over a fresh one that does less."""
    instance = Instance((1, 2, 0, 5), (0,) * 5, (1,) * 4, (1,) * 4, 1000, 1)
    with_discount, without = select(instance, 5), select(instance, 5, discount=False)
    assert with_discount[:2] == without[:2] == (Choice(0, True), Choice(1, True))
    assert (with_discount[2], without[2]) == (Choice(1, False), Choice(3, False))


def algorithm_1(instance, memory_bytes, discount):
    """The selection once more, from the paper's text, one operation after the other."""
    size, weights = instance.num_layers, instance.weights
    needs = [instance.forward_bytes(k) for k in range(size)] + [instance.backward_bytes(k) for k in range(size)]
    excess = [max(need + sum(weights) - weights[o % size] - memory_bytes, 0) for o, need in enumerate(needs)]
    chosen: list[Choice] = []
    while True:
        options = []
        for layer, before_backward in itertools.product(range(size), (False, True)):
            if Choice(layer, before_backward) in chosen or not weights[layer]:
                continue
            away = [o for o in range(2 * size) if (o % size > layer if before_backward else o % size < layer)]
            benefit = sum(min(excess[o], weights[layer]) for o in away)
            again = discount and Choice(layer, not before_backward) in chosen
            profit = Fraction(benefit) / ((1 if again else 2) * weights[layer])
            if benefit:
                options.append((profit, weights[layer], layer, not before_backward, away))
        if not options:
            return tuple(chosen)
        _, weight, layer, first, away = max(options)
        chosen.append(Choice(layer, not first))
        for o in away:
            excess[o] = max(excess[o] - weight, 0)


def test_the_selection_is_that_of_the_paper_s_text() -> None:
    """With and without the discount, which changes many of these choices."""
    differ = 0
    for seed in range(200):
        draw = random.Random(seed)
        size = draw.randint(2, 6)
        weights = tuple(draw.randint(0, 12) for _ in range(size))
        activations = tuple(draw.randint(0, 8) for _ in range(size + 1))
        instance = Instance(weights, activations, (1,) * size, (1,) * size, 1000, 1)
        memory_bytes = draw.randint(0, sum(weights) + 20)
        both = [algorithm_1(instance, memory_bytes, discount) for discount in (True, False)]
        assert [select(instance, memory_bytes, discount) for discount in (True, False)] == both
        differ += both[0] != both[1]
    assert differ > 10


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
