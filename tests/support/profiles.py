"""Profiles and plans for tests. Times are eighths of a second, so that sums are exact whatever their order."""

import dataclasses
import random

import hypothesis
import hypothesis.strategies as st

from jaxferry.modes import GradientPlace, Mode, Remat
from jaxferry.plan.records import LayerPlan, Loads, Plan, Updates
from jaxferry.profiling.records import LayerProfile, Profile

deterministic = hypothesis.settings(derandomize=True, deadline=None, max_examples=60)

seconds = st.integers(0, 40).map(lambda eighths: eighths / 8)
positive_bytes = st.integers(1, 60)


@st.composite
def profiles(draw, min_layers=1, max_layers=6, tied=None, recomputing=False):
    """Profiles with any times; where `tied`, the last layer shares the first one's parameters.

    Where `recomputing`, some layers say what recomputation costs.
    """
    size = draw(st.integers(min_layers, max_layers))
    shares = draw(st.booleans()) if tied is None else tied
    layers = []
    for index in range(size):
        last = shares and index == size - 1 and size > 1
        again = {}
        if recomputing and draw(st.booleans()):
            again = {"recompute_s": draw(seconds), "recompute_activation_bytes": draw(st.integers(0, 60))}
        layers.append(
            LayerProfile(
                name=f"layer{index}",
                param_bytes=layers[0].param_bytes if last else draw(positive_bytes),
                grad_bytes=draw(positive_bytes),
                activation_bytes=draw(st.integers(0, 60)),
                parameters="layer0" if last else f"layer{index}",
                **again,
                **{
                    key: draw(seconds)
                    for key in (
                        *("load_s", "forward_s", "forward_dha_s", "backward_s", "backward_dha_s", "backward_go_s"),
                        *("offload_s", "update_s", "inter_forward_s", "inter_backward_s"),
                    )
                },
            )
        )
    return Profile({"name": "any"}, tuple(layers))


@st.composite
def plans(draw, profile, modes=tuple(Mode)):
    """Any plans for a profile, whether good or bad, over the given modes."""
    layers = tuple(
        LayerPlan(
            layer.name,
            draw(st.sampled_from(modes)),
            draw(st.sampled_from(tuple(GradientPlace))),
            draw(st.sampled_from(tuple(Remat))) if layer.can_recompute else Remat.NONE,
        )
        for layer in profile.layers
    )
    loads = draw(st.sampled_from(tuple(Loads)))
    if any(layer.mode is Mode.RELOAD for layer in layers):
        loads = Loads.LAYERWISE
    return Plan("any", 1.0, layers, loads, draw(st.sampled_from(tuple(Updates))))


@st.composite
def planned(draw, modes=tuple(Mode), **kwargs):
    """A profile and a plan for it."""
    profile = draw(profiles(**kwargs))
    return profile, draw(plans(profile, modes))


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


def with_modes(profile, modes, gradients=None, **kwargs):
    """A plan with these modes."""
    gradients = gradients or [GradientPlace.DEVICE] * len(modes)
    layers = zip(profile.layers, modes, gradients, strict=True)
    return Plan("any", 1.0, tuple(LayerPlan(layer.name, mode, place) for layer, mode, place in layers), **kwargs)


def recomputing(profile, seconds_of_forward=1.0, share=0.25):
    """The profile, of which every layer but the last may recompute: its forward once more, for a share of the bytes."""
    layers = [
        dataclasses.replace(
            layer,
            recompute_s=layer.forward_s * seconds_of_forward,
            recompute_activation_bytes=int(layer.activation_bytes * share),
        )
        for layer in profile.layers[:-1]
    ]
    return Profile(profile.machine, (*layers, profile.layers[-1]))
