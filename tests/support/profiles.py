"""Profiles and plans for tests. Times are eighths of a second, so that sums are exact whatever their order."""

import dataclasses
import random

import hypothesis
import hypothesis.strategies as st

from jaxferry.costs import NO_CONTENTION, SHARING, Contention, LayerProfile, Profile
from jaxferry.modes import ActivationPlace, GradientPlace, Mode
from jaxferry.step import LayerPlan, Loads, Plan, UpdateOrder, Updates, schedule_step

INSTANCE = {
    "weights": [5, 5, 5, 5],
    "activations": [0, 1, 1, 1, 1],
    "forward_s": [4, 4, 4, 4],
    "backward_s": [6, 6, 6, 6],
    "memory_bytes": 19,
    "bandwidth_bytes_per_s": 2,
}
"""Weights to offload, as `jaxferry weights` reads them."""


def examples(most):
    """Settings for this many examples; fewer in runs without the slow tests (tests/conftest.py)."""
    return hypothesis.settings(max_examples=min(most, hypothesis.settings.default.max_examples))


deterministic = examples(60)

seconds = st.integers(0, 40).map(lambda eighths: eighths / 8)
positive_bytes = st.integers(1, 60)
few_bytes = st.integers(0, 30)
UNLIMITED_BYTES = 2**53


@st.composite
def profiles(
    draw, min_layers=1, max_layers=6, tied=None, recomputing=False, programs=False, links=None, offloading=False
):
    """Profiles with any times; where `tied`, the last layer shares the first one's parameters.

    Where `recomputing`, some layers say what recomputation costs. Where `offloading`, plans of some layers may let
    activations wait in host memory. Where `programs`, some say more of their programs.
    Where `links`, programs share the links with transfers; by default some profiles do, and lanes of some of them
    contend for host memory.
    """
    contention = draw(contentions()) if links is None and draw(st.booleans()) else NO_CONTENTION
    links = draw(st.booleans()) if links is None else links
    size = draw(st.integers(min_layers, max_layers))
    shares = draw(st.booleans()) if tied is None else tied
    layers = []
    for index in range(size):
        last = shares and index == size - 1 and size > 1
        again = {}
        if recomputing and draw(st.booleans()):
            again = {"recompute_s": draw(seconds), "recompute_activation_bytes": draw(st.integers(0, 60))}
        if recomputing and draw(st.booleans()):
            again |= {"products_recompute_s": draw(seconds), "products_activation_bytes": draw(st.integers(0, 60))}
        layers.append(
            LayerProfile(
                name=f"layer{index}",
                param_bytes=layers[0].param_bytes if last else draw(positive_bytes),
                grad_bytes=draw(positive_bytes),
                activation_bytes=draw(st.integers(0, 60)),
                parameters="layer0" if last else f"layer{index}",
                **again,
                **(draw(program_facts(index, size, shares and index == 0)) if programs else {}),
                **{
                    key: draw(seconds)
                    for key in (
                        *("load_s", "forward_s", "forward_dha_s", "backward_s", "backward_dha_s", "backward_go_s"),
                        *("offload_s", "update_s", "inter_forward_s", "inter_backward_s"),
                    )
                },
            )
        )
    if links:
        layers = [draw(link_shares(layer)) for layer in layers]
    if offloading:
        layers[:-2] = [draw(with_offloading(layer)) for layer in layers[:-2]]
    if programs and shares and size > 1:
        layers[0] = dataclasses.replace(layers[0], has_gradient=layers[-1].has_gradient)
    profile = Profile({"name": "any"}, tuple(layers), contention=contention)
    if programs and draw(st.booleans()):
        return with_programs(profile, lambda: draw(st.booleans()))
    return profile


@st.composite
def contentions(draw):
    """Any contention between lanes, with shares whose products with any times are exact."""
    share = st.integers(0, 8).map(lambda eighths: eighths / 8)
    return Contention({lane: {other: draw(share) for other in SHARING if other != lane} for lane in SHARING})


@st.composite
def with_offloading(draw, layer):
    """The layer, if drawn, with parts of what it keeps that may leave."""
    sizes = {str(remat): draw(st.integers(0, layer.kept_bytes(remat))) for remat in layer.levels}
    return dataclasses.replace(layer, offloadable_bytes=sizes if draw(st.booleans()) else {})


@st.composite
def link_shares(draw, layer):
    """The layer, with what its programs take of the links; no more than they last."""
    most = {
        "forward_read_s": layer.forward_dha_s,
        "backward_read_s": layer.backward_dha_s,
        "backward_write_s": layer.backward_go_s,
    }
    shares = {key: draw(st.integers(0, int(8 * seconds))) / 8 for key, seconds in most.items()}
    return dataclasses.replace(layer, **shares)


@st.composite
def program_facts(draw, index, size, is_shared):
    """Optional keys of a layer. What leaves for host memory comes back for the same layer, if that can be."""
    facts = {"backward_reads": draw(st.booleans()), "gradient_rows": draw(st.booleans())}
    facts["row_gradient_bytes"] = draw(few_bytes)
    facts |= {f"{key}_workspace_bytes": draw(few_bytes) for key in ("forward", "backward")}
    variants = st.sampled_from(
        ["forward", "forward_dha", "backward", "backward_dha_go", "backward_recompute", "backward_products"]
    )
    facts["temporary_bytes"] = draw(st.dictionaries(variants, few_bytes))
    if index == size - 1:
        return facts | {"fused_backward": draw(st.booleans())}
    if not is_shared:
        facts["has_gradient"] = draw(st.booleans())
        facts["has_backward"] = facts["has_gradient"] or draw(st.booleans())
    if index < size - 2 and facts.get("has_backward", True) and draw(st.booleans()):
        facts["save_bytes"] = facts["fetch_bytes"] = draw(few_bytes)
    return facts


@st.composite
def plans(draw, profile, modes=tuple(Mode), plain=False):
    """Any plans for a profile, whether good or bad, over the given modes.

    Where `plain`, updates come in backward order, and no backward waits for room.
    """
    layers = tuple(
        LayerPlan(
            layer.name,
            draw(st.sampled_from(modes)),
            draw(st.sampled_from(tuple(GradientPlace))),
            draw(st.sampled_from(layer.levels)),
            activations=draw(st.sampled_from(tuple(ActivationPlace))) if layer.offloadable_bytes else "device",
        )
        for layer in profile.layers
    )
    loads = draw(st.sampled_from(tuple(Loads)))
    if any(layer.mode is Mode.RELOAD for layer in layers):
        loads = Loads.LAYERWISE
    plan = Plan("any", 1.0, layers, loads, draw(st.sampled_from(tuple(Updates))))
    if plain:
        return dataclasses.replace(plan, memory_bytes=UNLIMITED_BYTES)
    memory_bytes = draw(st.one_of(st.none(), st.integers(0, 1000), st.just(UNLIMITED_BYTES)))
    return dataclasses.replace(plan, update_order=draw(st.sampled_from(UpdateOrder)), memory_bytes=memory_bytes)


@st.composite
def planned(draw, modes=tuple(Mode), plain=False, **kwargs):
    """A profile and a plan for it."""
    profile = draw(profiles(**kwargs))
    return profile, draw(plans(profile, modes, plain))


def with_programs(profile, draw):
    """The profile with layers that share the programs of the layers before them where that may be and `draw` says so.

    The last program is fused if its last layer is.
    """
    programs = [[profile.layers[0]]]
    for layer in profile.layers[1:]:
        before = programs[-1]
        moves = layer.save_bytes or layer.fetch_bytes or layer.can_recompute or layer.offloadable_bytes
        alike = before[-1].has_backward == layer.has_backward
        if alike and not moves and layer.parameters not in {x.parameters for x in before} and draw():
            before.append(dataclasses.replace(layer, shares_program=True, activation_bytes=0))
        else:
            programs.append([layer])
    is_fused = profile.layers[-1].fused_backward
    programs[-1] = [dataclasses.replace(layer, fused_backward=is_fused) for layer in programs[-1]]
    return dataclasses.replace(profile, layers=tuple(layer for program in programs for layer in program))


def drawn(number, seed=0, modes=tuple(Mode), programs=True, loads=tuple(Loads), updates=tuple(Updates), together=False):
    """Profiles and plans for them: far more cases a second than hypothesis draws. Layers share parameters in pairs.

    Where `together`, some layers share programs.
    """
    draw = random.Random(seed)

    def time_s(most=24):
        return draw.randint(0, most) / 8

    for _ in range(number):
        size = draw.randint(2, 5)
        layers, group_of = [], [draw.choice([index, draw.randrange(index + 1)]) for index in range(size)]
        for index in range(size):
            first = group_of[index] = group_of[group_of[index]]
            facts = {}
            if programs:
                facts = {
                    "backward_reads": draw.random() < 0.8,
                    "fused_backward": index == size - 1 and draw.random() < 0.5,
                }
                facts["has_gradient"] = layers[first].has_gradient if first < index else draw.random() < 0.8
                facts["has_backward"] = facts["has_gradient"] or draw.random() < 0.5
            if index == size - 1:
                facts |= {"has_backward": True}
            layers.append(
                LayerProfile(
                    name=f"layer{index}",
                    parameters=f"layer{first}",
                    param_bytes=layers[first].param_bytes if first < index else draw.randint(1, 60),
                    grad_bytes=draw.randint(1, 60),
                    activation_bytes=draw.choice([0, draw.randint(0, 40)]),
                    load_s=time_s(),
                    forward_s=time_s(8),
                    forward_dha_s=time_s(16),
                    backward_s=time_s(16),
                    backward_dha_s=time_s(),
                    backward_go_s=time_s(),
                    offload_s=time_s(40),
                    update_s=time_s(40),
                    inter_backward_s=time_s(2),
                    **facts,
                )
            )
        if not any(layer.has_gradient for layer in layers):
            continue
        profile = Profile({}, tuple(layers))
        if together:
            profile = with_programs(profile, lambda: draw.random() < 0.4)
        chosen = [draw.choice(modes) for _ in layers]
        how = {"loads": draw.choice(loads), "updates": draw.choice(updates)}
        if Mode.RELOAD in chosen:
            how["loads"] = Loads.LAYERWISE
        how |= {"update_order": draw.choice(tuple(UpdateOrder)), "memory_bytes": draw.choice([None, 100, 200])}
        yield profile, with_modes(profile, chosen, [draw.choice(tuple(GradientPlace)) for _ in layers], **how)


def transformer(num_layers, seed=0, tied=False):
    """A profile shaped like a transformer: embedding, then norm, attention, norm, MLP in turn, and a head."""
    draw = random.Random(seed)
    link, update = draw.choice([8e9, 16e9]), draw.choice([15e9, 40e9])
    width = draw.choice([768, 1024, 2048])
    layers = []
    for index in range(num_layers):
        ends = index in (0, num_layers - 1)
        kind = "table" if ends else ("norm", "attention", "norm", "mlp")[(index - 1) % 4]
        elements = {"table": 30_000, "norm": 2, "attention": 4 * width, "mlp": 8 * width}[kind] * width
        size = 2 * elements
        work_s = {"norm": 2e-4}.get(kind, elements * 5e-11 * draw.uniform(0.9, 1.1))
        work_s = 3e-4 if index == 0 else work_s
        dha_s = work_s * 1.02 + (5e-4 if index == 0 else size / link * draw.uniform(0.9, 1.4))
        layers.append(
            LayerProfile(
                name=f"{kind}{index}",
                param_bytes=size,
                grad_bytes=size,
                activation_bytes=8_000_000,
                load_s=size / link + 1e-5,
                forward_s=work_s,
                forward_dha_s=dha_s,
                backward_s=2 * work_s,
                backward_dha_s=2 * work_s + 0.3 * (dha_s - work_s),
                backward_go_s=2 * work_s + 0.6 * size / link,
                offload_s=size / link + 1e-5,
                update_s=14 * elements / update,
                inter_forward_s=1e-5,
                inter_backward_s=1e-5,
                parameters="table" if tied and ends else f"{kind}{index}",
            )
        )
    return Profile({"name": "transformer"}, tuple(layers))


def unit_layer(name, **values):
    """A layer whose times are 1 s each, with 10 bytes of parameters and 1 of gradient."""
    keys = ("load_s", "forward_s", "forward_dha_s", "backward_s", "backward_dha_s", "backward_go_s", "offload_s")
    times = dict.fromkeys((*keys, "update_s"), 1.0)
    return LayerProfile(name=name, **{"param_bytes": 10, "grad_bytes": 1, **times, **values})


def with_modes(profile, modes, gradients=None, **kwargs):
    """A plan with these modes."""
    gradients = gradients or [GradientPlace.DEVICE] * len(modes)
    layers = zip(profile.layers, modes, gradients, strict=True)
    return Plan("any", 1.0, tuple(LayerPlan(layer.name, mode, place) for layer, mode, place in layers), **kwargs)


def recomputing(profile, seconds_of_forward=1.0, share=0.25):
    """The profile in which every layer except the last may recompute its forward, for a share of the bytes."""
    layers = [
        dataclasses.replace(
            layer,
            recompute_s=layer.forward_s * seconds_of_forward,
            recompute_activation_bytes=int(layer.activation_bytes * share),
        )
        for layer in profile.layers[:-1]
    ]
    return Profile(profile.machine, (*layers, profile.layers[-1]))


def fused(profile):
    """The profile with a last layer whose forward and backward are one program, as the engine's are."""
    last = dataclasses.replace(profile.layers[-1], fused_backward=True)
    return dataclasses.replace(profile, layers=(*profile.layers[:-1], last))


def lowered(profile, plan, order=UpdateOrder.NEED, **facts):
    """The tasks of a step with the engine's last program and updates by need; `facts` gives a value for each layer."""
    profile = fused(profile)
    layers = list(profile.layers)
    for key, values in facts.items():
        layers = [dataclasses.replace(layer, **{key: x}) for layer, x in zip(layers, values, strict=True)]
    profile = dataclasses.replace(profile, layers=tuple(layers))
    return schedule_step(profile, dataclasses.replace(plan, update_order=order))


def smallest_peak_bytes(profile):
    """A bound on the memory of any plan: all activations, which every plan holds between last forward and backward.

    Each layer that can recompute counts with what it then keeps. Without workspaces and temporaries, a plan with all
    layers DHA and all gradients GO reaches it.
    """
    return sum(min(map(layer.kept_bytes, layer.levels)) for layer in profile.layers)
