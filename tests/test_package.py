"""What `import jaxferry` offers, and what it imports for that."""

import importlib
import subprocess
import sys
from unittest import mock

import pytest

import jaxferry
from jaxferry.processes import distributed


@pytest.mark.parametrize(
    ("code", "is_light"),
    [
        ("import jaxferry; jaxferry.Mode.DHA, jaxferry.InputError, jaxferry.__version__", True),
        ("import jaxferry; jaxferry.units.parse_bytes, jaxferry.modes.Mode", True),
        (
            "import jaxferry.train_step\nassert callable(jaxferry.train_step)\n"
            "from jaxferry import *\nassert train_step is jaxferry.train_step and callable(list_checkpoints)",
            False,
        ),
    ],
)
def test_jax_is_imported_with_the_first_name_that_needs_it(tmp_path, code, is_light):
    code += (
        f"\nimport sys; assert ({{'jax', 'scipy', 'matplotlib', 'orbax'}} & set(sys.modules) == set()) == {is_light}"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_modules_of_rooms_have_other_names_in_the_package():
    other = importlib.import_module("jaxferry.distributed")
    assert other is distributed is jaxferry.distributed and other.__spec__.name == other.__name__
    assert importlib.import_module("jaxferry.train_step").TrainStep is jaxferry.TrainStep
    assert importlib.import_module("jaxferry.pretrained").open_safetensors is jaxferry.pretrained.open_safetensors
    with mock.patch("jaxferry.distributed.is_first", return_value="patched"):
        assert jaxferry.distributed.is_first() == distributed.is_first() == "patched"


def test_all_public_names_are_there():
    assert set(jaxferry.__all__) <= set(dir(jaxferry))
    assert all(getattr(jaxferry, name) is not None for name in jaxferry.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trainstep'"):
        jaxferry.trainstep  # noqa: B018
