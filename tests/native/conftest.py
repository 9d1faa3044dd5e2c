"""The CPU's native library, as `pip install` or `jaxferry build-native` left it."""

import pytest

from jaxferry.native import library


@pytest.fixture
def cpu():
    """The library; before and after each test its link is as fast as memory, and nothing is delayed."""
    found = library("cpu")
    reset(found)
    yield found
    found.synchronize()
    reset(found)


def reset(found):
    found.set_bandwidth("load", 0)
    found.set_bandwidth("store", 0)
    found.set_bandwidth("host", 0)
    found.set_delay(0)
