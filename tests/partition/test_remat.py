"""Values that segments keep: policies as in `jax.checkpoint`, and a choice for each segment."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas

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


def deep(least):
    """A policy of JAX's kind: products whose results are sums of so many terms."""

    def policy(primitive, *avals, **params):
        if primitive.name != "dot_general":
            return False
        axes = params["dimension_numbers"][0][0]
        return math.prod(avals[0].shape[axis] for axis in axes) >= least

    return policy


def block_with(tokens, width, hidden, heads):
    """A transformer block's segment, without biases."""

    def block(params, x):
        q, k, v = (jnp.reshape(x @ params[name], (2, tokens, heads, width // heads)) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        x = x + jnp.reshape(jnp.einsum("bhts,bshd->bthd", weights, v), x.shape) @ params["o"]
        return x + jax.nn.gelu(x @ params["up"]) @ params["down"]

    def loss_fn(params, x):
        for name in ("a", "b"):
            x = block(params[name], x)
        return jnp.mean(x**2)

    shapes = dict.fromkeys("qkvo", (width, width)) | {"up": (width, hidden), "down": (hidden, width)}
    params = {name: {k: jnp.ones(shape) for k, shape in shapes.items()} for name in ("a", "b")}
    parts = partition(loss_fn, params, (jnp.ones((2, tokens, width)),))
    return parts.graph, parts.segments[0]


@pytest.mark.parametrize(("width", "hidden", "least"), [(32, 128, 16), (1024, 2048, 512), (4096, 16384, 1024)])
def test_products_keep_the_results_that_are_sums_of_many_terms_however_narrow_the_model(width, hidden, least):
    """Not scores, nor sums over the few tokens: those are recomputed from what is kept."""
    graph, segment = block_with(8, width, hidden, heads=width // 8)
    products, full = (differentiate(graph, segment, remat) for remat in ("products", "full"))
    assert shapes(products.saved) == shapes(differentiate(graph, segment, deep(least)).saved)
    assert shapes(products.saved) == sorted([(2, 8, width)] * 4 + [(2, 8, hidden)])
    assert products.is_worth_it(differentiate(graph, segment, "none"))
    assert not full.saved and not products.is_worth_it(products)


def test_products_keep_the_results_of_loops_around_large_ones():
    def loss_fn(params, x):
        x, _ = jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ params["a"]["w"]), carry), x, length=3)
        x = jnp.sin(jnp.sin(x))
        return jnp.mean(x @ params["b"]["w"])

    params = {name: {"w": jnp.ones((16, 16))} for name in "ab"}
    parts = partition(loss_fn, params, (jnp.ones((4, 16)),))
    loop = parts.segments[0]
    saved = differentiate(parts.graph, loop, "products").saved
    assert (3, 4, 16) in shapes(saved)  # what each iteration keeps
    assert differentiate(parts.graph, loop, lambda *_, **__: False).saved == ()


def test_products_keep_the_results_of_kernels_whose_work_is_not_known():
    @jax.custom_vjp
    def squared(x):
        return kernel(x)

    def kernel(x):
        def body(source, target):
            target[...] = source[...] ** 2

        return pallas.pallas_call(body, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    def forward(x):
        made = kernel(jnp.sin(x))
        return made, made

    squared.defvjp(forward, lambda made, cotangent: (made * cotangent,))

    def loss_fn(params, x):
        x = squared(x @ params["a"]["w"])
        return jnp.mean(jnp.sum(jnp.sin(x), axis=1, keepdims=True) * params["b"]["w"])

    params = {"a": {"w": jnp.ones((16, 16))}, "b": {"w": jnp.ones(16)}}
    parts = partition(loss_fn, params, (jnp.ones((4, 16)),))
    kept, again = (differentiate(parts.graph, parts.segments[0], remat) for remat in ("products", deep(0)))
    runs = [str(jax.make_jaxpr(each.backward)(*each.backward_arguments(parts.graph))) for each in (kept, again)]
    assert ["pallas_call" in text for text in runs] == [False, True]


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
    with pytest.raises(InputError, match=r"remat\('wte'\) must be one of none, products, full, auto.* got None"):
        remat_of(gpt, lambda name: None)
    with pytest.raises(
        InputError, match=r"remat\['h_0'\] must be one of none, products, full, auto, a policy.* got 'some'"
    ):
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
