"""A checkpoint that tests change."""

import shutil

import pytest

from checkpoints import content
from jaxferry import checkpoint


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("once")
    checkpoint.save(content(), folder / "saved")
    return folder / "saved"


@pytest.fixture
def saved(saved_once, tmp_path):
    return shutil.copytree(saved_once, tmp_path / "saved")
