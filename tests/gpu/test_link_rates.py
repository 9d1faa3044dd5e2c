"""The operations reach nine tenths of the speed of a plain copy of pinned memory, or of their computation."""

import pytest

from benchmarks.gpu import link_rates, overlap

LEAST_SHARE = 0.9


@pytest.fixture(scope="module")
def bench(operations):
    return link_rates.Bench(operations)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("rows", link_rates.ROWS)
def test_a_product_with_host_memory_fills_the_link(bench, rows, transpose):
    rate = bench.matmul(rows, transpose)
    assert rate.share >= LEAST_SHARE, rate


@pytest.mark.parametrize(("dtype", "destination"), link_rates.STORES)
def test_a_store_fills_the_link(bench, dtype, destination):
    rate = bench.store(dtype, destination)
    assert rate.share >= LEAST_SHARE, rate


@pytest.mark.parametrize("rows", link_rates.ROWS)
def test_a_gradient_of_a_product_fills_the_link(bench, rows):
    rate = bench.matmul_gradient(rows)
    assert rate.share >= LEAST_SHARE, rate


def test_a_load_by_the_ferry_hides_behind_products(bench):
    assert overlap.of_ferry(bench).hidden >= LEAST_SHARE
