"""Sizes as text."""

import pytest

from jaxferry.units import format_apart, format_bytes, parse_bytes


@pytest.mark.parametrize("num_bytes", [7, 2**10, 10**6, 1288490189, 5 * 2**40 // 3])
@pytest.mark.parametrize("less", [1, 1000, 2**20])
def test_sizes_that_a_reader_compares_differ_unless_they_are_equal(num_bytes, less):
    other = max(num_bytes - less, 0)
    shown = format_apart(num_bytes, other)
    assert len(set(shown)) == 2
    assert parse_bytes(shown[0]) >= parse_bytes(shown[1])
    assert format_apart(num_bytes, num_bytes) == [format_bytes(num_bytes)] * 2


def test_sizes_that_differ_already_have_few_digits():
    assert format_apart(2**30, 2**29) == ["1.00 GiB", "512.0 MiB"]
    assert format_apart(2**30 + 2**20, 2**30) == ["1.001 GiB", "1.000 GiB"]
