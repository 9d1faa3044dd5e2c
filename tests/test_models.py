"""Every model of the registry trains to the losses of plain Optax, cut as its author would cut it."""

import importlib
import importlib.metadata
import json
from pathlib import Path

import pytest

from models import registry
from models.compare import NUM_STEPS, compare
from tolerances import LOSS_RTOL

ROOT = Path(__file__).parent.parent
model_table = importlib.import_module("benchmarks.model_table")

# Numbers of segments and programs; equal blocks share one program. Other tests cover scans and frozen parameters.
EXPECTED = {
    "gpt": (8, 5),
    "nnx_net": (5, 3),
    "linen_remat": (7, 5),
    "nnx_remat": (5, 3),
    "whole_model_checkpoint": (1, 1),
    "gpt_dropout": (7, 5),
    "linen_streams": (7, 5),
    "nnx_dropout": (5, 3),
    "linen_resnet": (7, 6),
    "nnx_resnet": (5, 4),
    "linen_unet": (15, 15),
    "linen_collections": (4, 4),
    "linen_translator": (10, 6),
    "nnx_perceiver": (6, 5),
    "linen_albert": (8, 5),
    "linen_universal_transformer": (10, 8),
    "nnx_tied": (6, 3),
    "linen_dense_experts": (5, 4),
    "linen_routed_experts": (5, 4),
    "nnx_switch": (2, 2),
    "linen_multi_task": (9, 5),
    "linen_custom_vjp": (6, 4),
    "nnx_pallas": (4, 3),
    "linen_lstm": (5, 4),
    "nnx_lstm": (4, 3),
    "linen_mixed_dtypes": (5, 3),
    "bert": (10, 8),
    "albert": (10, 8),
    "gpt2": (7, 5),
    "llama": (6, 4),
    "bart": (12, 10),
    "vit": (6, 4),
    "resnet": (9, 8),
    "attnax_decoder": (5, 4),
    "attnax_vit": (8, 6),
    "mamba": (6, 4),
    "graph_attention": (7, 4),
}

# Segments that run whole where tiles are asked for: queries learned for all rows, counts over the batch, a loss of row
# pairs, Pallas kernels, nodes of a graph.
NOT_TILED = {
    "nnx_perceiver": {"latents"},
    "linen_routed_experts": {"block_0", "block_1"},
    "linen_multi_task": {"contrast_head"},
    "nnx_pallas": {"blocks/0", "blocks/1", "blocks/2"},
    "graph_attention": {*(f"convs/{i}" for i in range(4)), *(f"norms/{i}" for i in range(3))},
}


def name_of(model):
    return model.make.__name__


def installed(model):
    if model.package is not None:
        try:
            importlib.metadata.version(model.package)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{model.package} is not installed: pip install 'jaxferry[models]'")
    return model


def without_most():
    """All models; most are marked slow."""
    often = {"nnx_lora"}
    for model in registry.MODELS:
        yield pytest.param(model, marks=[] if name_of(model) in often else [pytest.mark.slow], id=name_of(model))


@pytest.mark.parametrize("model", list(without_most()))
def test_losses_are_those_of_plain_optax_and_segments_those_of_its_blocks(model):
    comparison = compare(installed(model).make())
    assert len(set(comparison.losses)) > 1, "nothing was trained"
    assert len(comparison.losses) == len(comparison.plain_losses) == NUM_STEPS
    assert comparison.max_relative_difference <= LOSS_RTOL
    if name_of(model) in EXPECTED:
        parts = comparison.partition
        assert (len(parts.segments), parts.num_programs) == EXPECTED[name_of(model)]


@pytest.mark.parametrize("model", list(without_most()))
def test_losses_in_tiles_are_those_of_plain_optax(model):
    comparison = compare(installed(model).make(), tiles=2)
    assert comparison.max_relative_difference <= LOSS_RTOL
    whole = {segment.name for segment in comparison.partition.segments if segment.tiling is None}
    assert whole == NOT_TILED.get(name_of(model), set())


def test_every_expected_cut_is_of_a_model_that_is_trained():
    assert EXPECTED.keys() <= {name_of(model) for model in registry.MODELS}


def test_the_page_of_models_is_what_the_script_writes_and_has_every_model():
    result = json.loads((ROOT / "benchmarks/results/models.json").read_text())
    assert (ROOT / "docs/models.md").read_text() == model_table.page(result)
    rows = [(row["name"], row["source"].split()[0], row["style"]) for row in result["models"]]
    assert rows == [(model.name, model.origin, model.style) for model in registry.MODELS]
    assert all(row["max_relative_difference"] <= LOSS_RTOL for row in result["models"])
