"""Values that segments keep: policies as in `jax.checkpoint`, and a choice for each segment."""

import jax
import pytest

import models
from jaxferry.errors import InputError
from jaxferry.partition import check_remat, differentiate, partition, remat_of, with_remat

POLICIES = jax.checkpoint_policies


@pytest.fixture(scope="module")
def gpt():
    task = models.mlp()
    return partition(task.loss_fn, task.params, (task.batch,))


def block_of(parts):
    return next(segment for segment in parts.segments if segment.name == "h_1")


def shapes(values):
    return sorted(tuple(value.shape) for value in values)


def test_a_policy_keeps_what_it_says_and_no_more(gpt):
    block = block_of(gpt)
    kept = {
        name: differentiate(gpt.graph, block, getattr(POLICIES, name))
        for name in ("nothing_saveable", "dots_saveable", "everything_saveable")
    }
    nothing = kept["nothing_saveable"]
    assert nothing.saved == () and nothing.inputs_read == (0,)
    products = {
        tuple(gpt.graph.avals[v].shape)
        for equation in block.equations
        if equation.primitive.name == "dot_general"
        for v in equation.outputs
    }
    assert 0 < kept["dots_saveable"].saved_bytes < kept["everything_saveable"].saved_bytes
    assert set(shapes(kept["dots_saveable"].saved)) <= products


def test_a_policy_that_offloads_is_refused(gpt):
    policy = POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host")
    with pytest.raises(InputError, match=r"remat: a policy must return True \(keep\) or False"):
        differentiate(gpt.graph, block_of(gpt), policy)


def test_choices_are_made_by_name_of_segment_or_layer_or_by_a_function(gpt):
    names = [segment.name for segment in gpt.segments]
    assert "wte#2" in names
    policy = POLICIES.dots_saveable
    by_name = dict(zip(names, remat_of(gpt, {"wte": "full", "wte#2": "none", "h_1": policy}), strict=True))
    assert (by_name["wte"], by_name["wte#2"], by_name["h_1"], by_name["h_0"]) == ("full", "none", policy, "none")
    assert remat_of(gpt, lambda name: "full" if name == "h_2" else "auto") == tuple(
        "full" if name == "h_2" else "auto" for name in names
    )
    for choice in ("none", "full", "auto", policy, POLICIES.save_only_these_names("x")):
        assert remat_of(gpt, check_remat(choice)) == (choice,) * len(names)


def test_names_that_are_not_there_and_answers_that_are_no_choice_are_refused(gpt):
    with pytest.raises(InputError, match="remat names 'h_9', which is not a segment; use one of wte, "):
        remat_of(gpt, {"h_9": "full"})
    with pytest.raises(InputError, match=r"remat\('wte'\) must be one of none, full, auto.* got None"):
        remat_of(gpt, lambda name: None)
    with pytest.raises(InputError, match=r"remat\['h_0'\] must be one of none, full, auto, a policy.* got 'some'"):
        check_remat({"h_0": "some"})


def test_segments_of_one_program_share_it_only_if_they_keep_the_same(gpt):
    names = [segment.name for segment in gpt.segments]
    base = {segment.name: segment.program for segment in gpt.segments}
    assert base["h_0"] == base["h_1"] == base["h_3"]
    policy = POLICIES.dots_saveable
    made = with_remat(gpt, remat_of(gpt, {"h_1": "full", "h_2": policy, "h_3": "auto"}))
    programs = {segment.name: segment.program for segment in made.segments}
    assert programs["h_0"] == programs["h_3"] == base["h_0"]
    assert len({programs[name] for name in ("h_0", "h_1", "h_2")}) == 3
    other = with_remat(gpt, ["full" if name == "h_0" else "none" for name in names])
    assert other.segments[names.index("h_0")].program == programs["h_1"]
    assert other.layers is gpt.layers
