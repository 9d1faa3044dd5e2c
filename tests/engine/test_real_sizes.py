"""Steps of published models at their real sizes, compiled for an H200: the memory that the engine counts is XLA's."""

import pytest

from native.compiled_steps import compare_step
from native.cuda_library import cuda_library
from native.real_steps import PLANS, SETTINGS, RealModel, check_program, check_step, check_transport

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", SETTINGS)
def test_every_program_and_transfer_of_real_models_is_as_counted(name):
    cuda_library()
    model = RealModel(SETTINGS[name])
    for plan in PLANS:
        prepared, programs = model.prepare(plan)
        check_step(compare_step(model, prepared, programs))
    for key, program in model.compiled.items():
        check_program(program, key)
    assert any(program.stats.host_alias_size_in_bytes for program in model.compiled.values())
    layers = prepared.partition.layers
    programs, staging_bytes = model.transport(layers)
    check_transport(programs, layers, staging_bytes)
