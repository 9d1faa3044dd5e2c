"""L2L against the published column of Table 1, and its memory."""

import pytest

from jaxferry.weights import Instance, l2l
from weight_schedules import validate

HIDDEN = 3072
BLOCK_BYTES = (12 * HIDDEN**2 + 13 * HIDDEN) * 4
EMBEDDING_BYTES = (50257 + 1024) * HIDDEN * 4

TABLE_1 = [
    # depth, batch size, sum of u in ms, L2L in ms
    (74, 64, 47421, 52707),
    (56, 64, 35553, 39542),
    (38, 64, 23694, 26387),
    (74, 32, 23697, 28983),
    (56, 32, 17762, 21751),
    (38, 32, 11840, 14533),
    (74, 16, 11612, 16898),
    (56, 16, 8697, 12686),
    (38, 16, 5794, 8487),
]


@pytest.mark.parametrize(("depth", "batch", "compute_ms", "expected_ms"), TABLE_1)
def test_table_1_of_gpt_2_to_the_millisecond(depth: int, batch: int, compute_ms: int, expected_ms: int) -> None:
    blocks = depth - 2
    share_s = compute_ms / 1000 / (4 * blocks)
    activation = 20 * 2**20 * batch // 16
    instance = Instance(
        weights=(EMBEDDING_BYTES, *[BLOCK_BYTES] * blocks, 0),
        activations=(0, 0, *[activation] * blocks, 0),
        forward_s=(0, *[share_s] * blocks, 0),
        backward_s=(0, *[3 * share_s] * blocks, 0),
        memory_bytes=16 * 2**30,
        bandwidth_bytes_per_s=12000 * 2**20,
    )
    outcome = l2l(instance)
    assert abs(outcome.duration_s * 1000 - expected_ms) < 1
    assert outcome.schedule is not None
    validate(instance, outcome.schedule)


def test_offloads_that_fall_behind_use_the_time_that_the_formula_charges_for_nothing() -> None:
    """Paced by the formula the last load would end at 25; the first wait moves nothing and can be used instead."""
    instance = Instance((1, 5, 1, 5), (0,) * 5, (0,) * 4, (0,) * 4, 10, 1)
    outcome = l2l(instance)
    assert outcome.duration_s == 24
    assert outcome.schedule is not None
    validate(instance, outcome.schedule)


def test_a_formula_without_a_schedule_says_so() -> None:
    instance = Instance((1, 8, 1, 8, 1), (0,) * 6, (0,) * 5, (0,) * 5, 16, 1)
    outcome = l2l(instance)
    assert outcome.duration_s == 38
    assert outcome.schedule is None
    assert "no schedule of this length is known" in outcome.note
