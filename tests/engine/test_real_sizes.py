"""Steps of published models at their real sizes, compiled for an H200: the memory that the engine counts is XLA's."""

import dataclasses

import pytest

from native import compiled_steps
from native.compiled_steps import compare_step
from native.cuda_library import cuda_library
from native.real_steps import PLANS, SETTINGS, RealModel, check_program, check_step, check_transport

pytestmark = pytest.mark.slow


def check_plans(model, plans):
    for plan in plans:
        prepared, programs = model.prepare(plan)
        check_step(compare_step(model, prepared, programs))
    for key, program in model.compiled.items():
        check_program(program, key)
    layers = prepared.partition.layers
    programs, staging_bytes = model.transport(layers)
    check_transport(programs, layers, staging_bytes)


@pytest.fixture(scope="module")
def medium():
    cuda_library()
    return RealModel(SETTINGS["GPT-2 medium"])


@pytest.fixture(scope="module")
def mixed(medium):
    """A step whose layers are loaded once, loaded twice, or read in place."""
    return medium.prepare("mixed")


def test_a_step_of_gpt2_medium_needs_the_memory_that_is_counted(medium, mixed):
    check_step(compare_step(medium, *mixed))


def test_its_programs_leave_host_memory_to_operations_and_write_gradients_in_place(medium, mixed):
    for key, program in medium.compiled.items():
        check_program(program, key)
    assert any(program.stats.host_alias_size_in_bytes for program in medium.compiled.values())


def test_its_transfers_need_no_memory_that_is_not_counted(medium, mixed):
    layers = mixed[0].partition.layers
    programs, staging_bytes = medium.transport(layers)
    check_transport(programs, layers, staging_bytes)


@pytest.mark.parametrize("part", ["copies", "gradients", "values", "temporaries"])
def test_a_count_that_is_wrong_by_a_twentieth_is_noticed(medium, mixed, monkeypatch, part):
    counted = compiled_steps.footprints

    def wrong(*args, **kwargs):
        found = counted(*args, **kwargs)
        return [dataclasses.replace(each, **{part: round(1.05 * getattr(each, part))}) for each in found]

    monkeypatch.setattr(compiled_steps, "footprints", wrong)
    with pytest.raises(AssertionError, match=part):
        check_step(compare_step(medium, *mixed))


@pytest.mark.parametrize("name", SETTINGS)
def test_every_program_of_real_models_is_as_counted(name):
    cuda_library()
    check_plans(RealModel(SETTINGS[name]), PLANS)
