"""With JAXFERRY_TESTS_DEVICE=accelerator, the tests of the engine train on the emulated accelerator."""

import pytest

from accelerator import IS_DEFAULT, emulate
from jaxferry.settings import own_settings
from jaxferry.step import streaming


@pytest.fixture(autouse=True)
def on_device(request, monkeypatch):
    """The device of every test: a CPU unless the environment asks for the emulated accelerator."""
    if IS_DEFAULT and not request.node.get_closest_marker("cpu_device"):
        emulate(monkeypatch)


@pytest.fixture
def accelerator(monkeypatch):
    """The emulated accelerator, on which everything runs."""
    return emulate(monkeypatch)


@pytest.fixture
def in_parts(monkeypatch):
    """Subgroups of about one parameter, of which few are on the device at once."""
    monkeypatch.setattr(streaming, "SUBGROUP_BYTES", 400)


@pytest.fixture
def engine_settings():
    """JAX's settings as inside a step, for tests that call parts of the engine by themselves."""
    with own_settings():
        yield
