"""MemFerry's algorithms against slow implementations from the text, and the literal reading by hand."""

import dataclasses
import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import assume, given

from benchmarks.papers.memferry_printed import MemFerryPrinted
from benchmarks.papers.paper_models import known_models
from jaxferry.costs import MACHINES, LayerProfile, Profile, estimate_profile
from jaxferry.modes import Mode
from jaxferry.planner import MemFerry, make_plan, search, with_dfgb
from jaxferry.step import DFGB, DHA, GFGB, MODES, simulate
from oracle import Oracle
from profiles import deterministic, profiles, with_modes

many = hypothesis.settings(max_examples=60)


def run(layers, modes):
    """Link's and GPU's end after the layers, and before the last inter_forward."""
    link = gpu = end = 0.0
    for layer, mode in zip(layers, modes, strict=True):
        if mode is Mode.GFGB:
            link += layer.load_s
            end = max(gpu, link) + layer.forward_s
        else:
            link += layer.forward_read_s
            end = gpu + layer.forward_dha_s
        gpu = end + layer.inter_forward_s
    return link, gpu, end


def algorithm_1(layers):
    modes = []
    for number, layer in enumerate(layers):
        link, gpu, _ = run(layers[:number], modes)
        if layer.forward_dha_s <= layer.forward_s + max(layer.load_s - (gpu - link), 0):
            modes.append(Mode.DHA)
            continue
        modes.append(Mode.GFGB)
        for earlier in range(number):
            link, gpu, _ = run(layers[:number], modes[:number])
            if link + layer.load_s <= gpu:
                break
            if modes[earlier] is Mode.GFGB:
                trial = [*modes[:earlier], Mode.DHA, *modes[earlier + 1 :]]
                if run(layers[: number + 1], trial)[2] < run(layers[: number + 1], modes)[2]:
                    modes = trial
    return modes


def dfgb_greedy(profile, modes):
    gains = {index: x.backward_dha_s - x.backward_s for index, x in enumerate(profile.layers[:-1])}
    for index in sorted(gains, key=lambda index: (-gains[index], index)):
        if modes[index] is Mode.DHA and gains[index] > 0:
            trial = [*modes[:index], Mode.DFGB, *modes[index + 1 :]]
            if Oracle(profile, with_modes(profile, trial)).keeps_window():
                modes = trial
    return modes


@many
@given(profiles(max_layers=9, tied=False))
def test_memferry_is_algorithm_1_as_its_text_means_then_the_greedy(profile):
    plan = make_plan(profile, "memferry")
    assert list(plan.modes) == dfgb_greedy(profile, algorithm_1(profile.layers))


@many
@given(profiles(max_layers=9))
def test_the_greedy_leaves_no_gain_that_fits(profile):
    plan = make_plan(profile, "memferry")
    assert dfgb_greedy(profile, list(plan.modes)) == list(plan.modes)


@deterministic
@given(profiles(max_layers=7, tied=True))
def test_a_table_on_the_device_already_makes_its_other_entry_dfgb_for_nothing(profile):
    size = len(profile.layers)
    modes = np.array([DHA] * (size - 1) + [GFGB])
    lookup = profile.layers[0]
    assume(size > 1 and lookup.backward_dha_s > lookup.backward_s)
    assert MODES[int(with_dfgb(profile, modes, [False] * size)[0])] is Mode.DFGB


def layer(name, load_s, forward_s, forward_dha_s):
    rest = dict.fromkeys(("backward_s", "backward_dha_s", "backward_go_s", "offload_s", "update_s"), 1.0)
    sizes = {"param_bytes": 1, "grad_bytes": 1}
    return LayerProfile(name=name, load_s=load_s, forward_s=forward_s, forward_dha_s=forward_dha_s, **sizes, **rest)


def test_backtracking_makes_an_earlier_layer_dha_and_stops_without_a_stall():
    profile = Profile({}, (layer("a", 2, 1, 3.5), layer("b", 3, 1, 9), layer("c", 3, 1, 9)))
    # a and b stall: making a DHA lets b start at 3.5 in place of 5; c's load ends at 6, b at 4.5: it stalls, alone
    assert list(make_plan(profile, "memferry").modes) == [Mode.DHA, Mode.GFGB, Mode.GFGB]


def test_printed_has_no_candidates_until_a_load_was_hidden():
    profile = Profile({}, (layer("a", 2, 1, 3.5), layer("b", 3, 1, 9), layer("c", 3, 1, 9)))
    assert list(MemFerryPrinted().plan(profile).modes) == [Mode.GFGB] * 3


def test_printed_by_hand():
    """a is DHA: T_all = T_res = 4. b: 1 < 4, tag = 2, T_all 5, T_res 4. c: 6 >= 4, backtrack from b.

    base = 5 + 6 + 1 - 4 = 8; b: gain 1 + 9 - 1 = 9, T_all^b = 0 + 5 + 8 + 1 = 14: no. c itself: gain 6 + 8 - 1 = 13,
    T_all^c = 0 + 5 + 7 + 1 = 13: no. So T_all = 5 + 8 = 13, T_res = 4 + 0 + 1 = 5. d: 4.5 < 5.
    """
    profile = Profile({}, (layer("a", 4, 1, 4), layer("b", 1, 1, 9), layer("c", 6, 1, 8), layer("d", 4.5, 1, 9)))
    assert list(MemFerryPrinted().plan(profile).modes) == [Mode.DHA, Mode.GFGB, Mode.GFGB, Mode.GFGB]


def test_both_readings_by_hand_whatever_the_gradients():
    """By DHA a layer takes 2.5, loaded 1 after a load of 2. As printed 2.5 <= 1 + 2 holds for every layer.

    As the text means it, the link is 2.5 and then 5 ahead once two layers are DHA: from then on loads are hidden.
    """
    profile = Profile({}, tuple(layer(f"l{index}", 2, 1, 2.5) for index in range(6)))
    expected = {MemFerry: [Mode.DHA] * 2 + [Mode.GFGB] * 4, MemFerryPrinted: [Mode.DHA] * 6}
    for policy, host in itertools.product(expected, (False, True)):
        assert [MODES[int(code)] for code in policy().modes(profile, [host] * 6)] == expected[policy]


def window_profile(load_s):
    """DHA for the first layer, whose backward by DHA costs more than any load; the window closes after 4.5 seconds."""
    first = dataclasses.replace(layer("a", load_s, 1, 1.5), backward_dha_s=50.0)
    return Profile({}, (first, layer("b", 1, 1, 9)))


def test_dfgb_loads_end_before_the_first_gradient_leaves():
    """a runs 0 to 1.5, b to 2.5, and b's backward to 3.5; the load of a starts at 1.5."""
    for load_s, mode in ((2.0, Mode.DFGB), (2.1, Mode.DHA)):
        assert make_plan(window_profile(load_s), "memferry").modes[0] is mode
        profile = window_profile(load_s)
        assert Oracle(profile, with_modes(profile, [Mode.DFGB, Mode.GFGB])).keeps_window() == (mode is Mode.DFGB)


@pytest.mark.parametrize(
    ("mode", "in_host_memory", "changes", "longest_s"),
    [
        pytest.param(GFGB, False, {}, 2.0, id="its backward"),
        pytest.param(GFGB, False, {"inter_backward_s": 0.75}, 2.75, id="what precedes it"),
        pytest.param(DHA, False, {"forward_dha_s": 1.0, "backward_dha_s": 2.0}, 3.0, id="by direct host access"),
        pytest.param(GFGB, True, {"backward_go_s": 1.5}, 2.5, id="a gradient in host memory"),
    ],
)
def test_the_window_closes_with_the_backward_of_the_last_layer(mode, in_host_memory, changes, longest_s):
    """a runs to 1.5 and b to 2.5; a's load starts at 1.5 and may take until the end of b's backward."""
    for load_s, expected in ((longest_s, DFGB), (longest_s + 0.125, DHA)):
        first, last = window_profile(load_s).layers
        profile = Profile({}, (first, dataclasses.replace(last, **changes)))
        assert with_dfgb(profile, np.array([DHA, mode]), np.array([False, in_host_memory]))[0] == expected


def test_a_copy_that_is_on_the_device_is_not_loaded_again():
    """The table's load takes far longer than the window; the other use of the table loads it anyway."""
    lookup = dataclasses.replace(layer("lookup", 100, 1, 1.0), backward_dha_s=50.0, parameters="table")
    head = dataclasses.replace(layer("head", 100, 1, 900), parameters="table")
    profile = Profile({}, (lookup, layer("b", 1, 1, 9), head))
    assert list(with_dfgb(profile, np.array([DHA, GFGB, GFGB]), np.zeros(3, bool))) == [DFGB, GFGB, GFGB]
    again = dataclasses.replace(layer("again", 5, 1, 1.5), parameters="first")
    profile = Profile({}, (dataclasses.replace(layer("first", 1, 1, 9), parameters="first"), again))
    assert list(make_plan(profile, "memferry").modes) == [Mode.GFGB, Mode.GFGB]


@pytest.mark.parametrize("larger", [0, 1])
def test_the_largest_gain_takes_the_window_first(larger):
    """Both first layers are DHA. The window is open from 1 to 4, which is long enough for one load of 1.75."""
    gains = [20.0, 20.0]
    gains[larger] = 50.0
    layers = [
        dataclasses.replace(layer(name, 1.75, 1, 1.0), backward_dha_s=gain)
        for name, gain in zip(("a", "b"), gains, strict=True)
    ]
    profile = Profile({}, (*layers, layer("c", 1, 1, 9)))
    modes = make_plan(profile, "memferry").modes
    assert modes[larger] is Mode.DFGB and modes[1 - larger] is Mode.DHA


@pytest.mark.parametrize("objective", ["step", "steady"])
def test_no_search_breaks_the_window(objective, monkeypatch):
    """Outside the window, DFGB would be the fastest mode for the first layer."""
    profile = Profile({}, (*window_profile(30.0).layers, *(layer(f"l{i}", 0.25, 0.5, 9) for i in range(2))))
    outside = with_modes(profile, [Mode.DFGB, *[Mode.GFGB] * 3])
    assert not Oracle(profile, outside).keeps_window()
    outside_s = simulate(profile, dataclasses.replace(outside, memory_bytes=2**53)).step_s
    for most_enumerated in (1024, 0):
        monkeypatch.setattr(search, "MOST_ENUMERATED", most_enumerated)
        plan = make_plan(profile, "exact", objective=objective, reserve_factor=1.0)
        assert Mode.DFGB not in plan.modes
        assert outside_s < plan.predicted.step_s or Mode.GFGB is plan.modes[0]


@pytest.mark.parametrize(
    "model",
    [pytest.param(model, id=model.name, marks=[pytest.mark.slow] * (i > 1)) for i, model in enumerate(known_models())],
)
def test_room_costs_nothing_on_the_papers_models(model):
    """Without a budget, at the peak that the step has anyway, MemFerry takes the time that it takes with any memory."""
    profile = estimate_profile(model.layers(), MACHINES["a100-pcie3"], {})
    plan = make_plan(profile, "memferry")
    unlimited = dataclasses.replace(plan, memory_bytes=2**53)
    assert plan.memory_bytes is None
    assert plan.predicted.steady_step_s <= 1.001 * simulate(profile, unlimited).steady_step_s
