"""Steps that an interrupt or a failed task ends: committed, rolled back, or damaged."""

import optax
import pytest

import jaxferry
import models
from jaxferry.step import Operation
from planned import assert_same_bits, step_of, train, trained
from slowly import slow
from steps import fail

SGD = optax.sgd(0.1)


@pytest.fixture(scope="module")
def whole_gpt():
    """The same model with more blocks, for tests that depend on their number."""
    return models.mlp()


PROGRAMS = (Operation.FORWARD, Operation.LOSS, Operation.BACKWARD)


@pytest.mark.parametrize("options", [{}, *slow({"clip_norm": 1.0}, {"skip_nonfinite": True})])
@pytest.mark.parametrize("operations", [PROGRAMS, (Operation.OFFLOAD,), (Operation.UPDATE,)], ids=lambda o: o[0].value)
@pytest.mark.parametrize("after", [0, *slow(2), 6])
def test_a_failed_task_is_rolled_back_or_damages_the_state_and_names_its_layer(
    whole_gpt, monkeypatch, tmp_path, operations, after, options
):
    gpt, step = whole_gpt, step_of(whole_gpt, SGD, **options)
    expected = [trained(gpt, SGD, num_steps, **options)[0] for num_steps in (1, 2, 3)]
    state, _ = train(step, gpt, 1)
    step.save(state, tmp_path / "saved")
    names = {segment.name for segment in step.prepare(gpt.batch).partition.segments}
    with monkeypatch.context() as patch:
        fail(patch, operations, after)
        with pytest.raises(jaxferry.JaxFerryError, match="ran out of memory") as caught:
            step(state, gpt.batch)
            step(state, gpt.batch)
    if state.damage is None:
        assert caught.value.layer in names and state.step == 1
        assert_same_bits(state.params, expected[0])
    else:
        # An update had begun: without `need all gradients`, or in the updates themselves.
        assert not options or operations == (Operation.UPDATE,)
        for use in (lambda: step(state, gpt.batch), lambda: state.params, lambda: step.save(state, tmp_path / "more")):
            with pytest.raises(jaxferry.StateError, match=r"ran out of memory.*between two steps: restore .*saved"):
                use()
        state = step.restore(tmp_path / "saved")
    while state.step < 3:
        state, _ = step(state, gpt.batch)
    assert_same_bits(state.params, expected[2])
