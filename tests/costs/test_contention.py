"""Contention for host memory: shares from measured speeds and from bandwidths, in files, and in profiles of devices."""

import dataclasses

import numpy as np
import pytest

from example_costs import COSTS, MACHINE
from jaxferry.costs import DOWN, HOST, SHARING, UP, Contention, Profile, estimate_profile, shared_by
from jaxferry.errors import InputError
from profiles import transformer


def test_two_lanes_that_are_always_busy_have_no_time_left():
    """Each works at its speed beside the other, and loses the rest of each second."""
    contention = Contention.between({(HOST, UP): 0.8, (UP, HOST): 0.5})
    work_s = np.array([0.5, 0.0, 0.8])  # in the order of `SHARING`
    assert work_s + contention.lost_s(work_s) == pytest.approx([1.0, 0.0, 1.0])
    assert contention.shares[HOST] == {UP: pytest.approx(0.2 / 0.5)}
    assert contention.shares[UP] == {HOST: pytest.approx(0.5 / 0.8)}


def test_lanes_that_are_faster_together_lose_nothing_and_none_loses_more_than_all_of_a_second():
    assert not Contention.between({(HOST, UP): 1.01, (UP, HOST): 1.02})
    for speed in (0.3, 0.0):
        slow = Contention.between({(UP, DOWN): speed, (DOWN, UP): speed})
        assert slow.shares == {UP: {DOWN: 1.0}, DOWN: {UP: 1.0}}


def test_bytes_of_host_memory_are_conserved_in_estimates():
    profile = estimate_profile([COSTS], MACHINE)
    share = MACHINE.link_bytes_per_s / MACHINE.host_bytes_per_s
    assert profile.contention.shares == {HOST: {UP: share, DOWN: share}}
    slow = dataclasses.replace(MACHINE, host_bytes_per_s=MACHINE.link_bytes_per_s / 2)
    assert estimate_profile([COSTS], slow).contention.shares == {HOST: {UP: 1.0, DOWN: 1.0}}


@pytest.mark.parametrize("num_processes", [1, 2])
def test_all_devices_of_a_process_take_host_memory(num_processes):
    """A machine whose devices exchange for nothing: what leaves host memory is that of all links."""
    machine = dataclasses.replace(MACHINE, interconnect_bytes_per_s=1e30, network_bytes_per_s=1e30)
    share = machine.link_bytes_per_s / machine.host_bytes_per_s
    num_devices = 2 * num_processes
    found = estimate_profile([COSTS], machine, None, num_devices, num_processes)
    assert found.contention.shares[HOST] == {UP: pytest.approx(2 * share), DOWN: pytest.approx(2 * share)}
    alike = shared_by(estimate_profile([COSTS], machine), num_devices, num_processes)
    assert alike.contention == found.contention
    alone = dataclasses.replace(estimate_profile([COSTS], machine), contention=Contention())
    assert not shared_by(alone, num_devices, num_processes).contention
    slow = dataclasses.replace(MACHINE, interconnect_bytes_per_s=MACHINE.link_bytes_per_s)
    exchanging = estimate_profile([COSTS], slow, None, num_devices, num_processes)
    assert exchanging.contention.shares[HOST][UP] < found.contention.shares[HOST][UP]


def test_files_have_it_only_where_lanes_contend():
    profile = transformer(3)
    assert "contention" not in profile.to_json()
    contended = dataclasses.replace(profile, contention=Contention({HOST: {UP: 0.25, DOWN: 0.0}}))
    assert contended.to_json()["contention"] == {HOST: {UP: 0.25}}
    assert Profile.from_json(contended.to_json()) == contended
    assert hash(contended.contention) == hash(Profile.from_json(contended.to_json()).contention)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([0.5], "contention must be a JSON object"),
        ({"GPU": {UP: 0.5}}, 'contention: unknown key "GPU"; known are H2D, D2H, host'),
        ({HOST: 0.5}, "contention of host must be a JSON object, got 0.5"),
        ({HOST: {HOST: 0.5}}, 'contention of host: unknown key "host"'),
        ({HOST: {UP: 1.5}}, r"contention of host: H2D must lie in \[0, 1\], got 1.5"),
        ({HOST: {UP: "half"}}, "contention of host: H2D must lie in"),
    ],
)
def test_what_is_not_acceptable_is_named(shares, message):
    with pytest.raises(InputError, match=message):
        Profile.from_json({**transformer(3).to_json(), "contention": shares})


def test_the_matrix_has_the_order_of_the_lanes():
    contention = Contention({UP: {DOWN: 0.1, HOST: 0.2}, HOST: {UP: 0.3}})
    assert SHARING == (UP, DOWN, HOST)
    assert contention.matrix.tolist() == [[0, 0.1, 0.2], [0, 0, 0], [0.3, 0, 0]]
