"""These tests need a GPU: elsewhere they are not collected, so none is skipped. benchmarks/gpu/check.sh runs them."""

import os

import jax
import pytest

from native import gpu_library


def _has_gpu():
    # Asking for a backend that JAX_PLATFORMS leaves out would be an error, and starting one takes seconds.
    if "cuda" not in os.environ.get("JAX_PLATFORMS", ""):
        return False
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


collect_ignore_glob = [] if _has_gpu() else ["test_*.py"]


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return gpu_library.find(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="session")
def operations(library):
    return gpu_library.register(library)
