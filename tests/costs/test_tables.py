"""Tables of a profile's layers agree with the layers, and are made once."""

import itertools

import numpy as np
from hypothesis import given

from jaxferry.costs import LayerProfile, column, flags_of, per_choice, program_ends
from profiles import examples, profiles


@examples(20)
@given(profiles(max_layers=5, recomputing=True, programs=True))
def test_tables_say_what_the_layers_say(profile):
    size, choices = len(profile.layers), list(itertools.product((False, True), repeat=3))
    flags = np.array(choices).T[:, None].repeat(size, axis=1)
    found = per_choice(profile, LayerProfile.backward_for, *flags)
    assert found.tolist() == [[layer.backward_for(*choice) for choice in choices] for layer in profile.layers]
    assert column(profile, "load_s")[:, 0].tolist() == [layer.load_s for layer in profile.layers]
    assert flags_of(profile, "has_backward")[:, 0].tolist() == [layer.has_backward for layer in profile.layers]
    assert list(zip(*program_ends(profile), strict=True)) == list(profile.program_ends)


@examples(2)
@given(profiles(max_layers=3))
def test_a_table_is_made_once_for_a_profile(profile):
    assert column(profile, "load_s") is column(profile, "load_s")
    calls = []

    def made(profile, value):
        calls.append(value)
        return value

    assert [profile.once(made, value) for value in (1, 1, 2)] == [1, 1, 2]
    assert calls == [1, 2]
