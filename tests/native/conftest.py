"""The CPU's native library, as `pip install` or `jaxferry build-native` left it."""

import ctypes
import pathlib

import pytest

from jaxferry.native import library
from native import emulated_cuda

FOLDER = pathlib.Path(__file__).parent


def pytest_collection_modifyitems(items):
    """These tests are of the CPU's library, or of the CUDA one on a CPU; those of a GPU are in tests/gpu."""
    for item in items:
        if item.path.parent == FOLDER:
            item.add_marker("cpu_device")


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


# XLA takes each name once in a process, and worksteal may come back to this module.
@pytest.fixture(scope="session")
def emulated_library():
    """The CUDA library on an emulated device."""
    library = emulated_cuda.load()
    library.emulation_num_queued.restype = ctypes.c_long
    library.emulation_fail.restype = library.emulation_num_events.restype = ctypes.c_long
    return library
