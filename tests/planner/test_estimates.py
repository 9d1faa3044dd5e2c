"""What the search takes a plan to cost before it is simulated."""

import dataclasses

import numpy as np
import pytest

from jaxferry.costs import Contention
from jaxferry.planner import AutoSearch, Request
from jaxferry.step import Lane, with_shared_work
from profiles import recomputing, transformer


def with_copies(profile):
    """The profile with each layer once more, and updates on the device: classes of two layers."""
    layers = [
        dataclasses.replace(x, update_gpu_s=0.25, state_bytes=6, state_up_s=0.5, state_down_s=0.75)
        for x in profile.layers
    ]
    copies = [dataclasses.replace(x, name=f"{x.name}-copy", parameters=f"{x.parameters}-copy") for x in layers]
    return dataclasses.replace(profile, layers=(*layers, *copies))


@pytest.mark.parametrize("lost", [{}, {"H2D": {"host": 0.25}, "D2H": {"host": 0.125}, "host": {"H2D": 0.5}}])
def test_the_first_rows_are_the_work_of_the_lanes(lost):
    profile = with_copies(recomputing(transformer(5), seconds_of_forward=0.5, share=0.5))
    search = AutoSearch(dataclasses.replace(profile, contention=Contention(lost)), Request()).search
    draw = np.random.default_rng(0)
    for _ in range(20):
        codes = np.array([draw.choice(np.flatnonzero(may)) for may in search.columns.allowed], dtype=np.int8)
        work_s = dict.fromkeys(Lane, 0.0)
        for task in with_shared_work(search.judge.schedules(codes).within(None)).tasks:
            work_s[task.lane] += task.duration_s
        np.testing.assert_allclose(search.estimates.seconds(codes)[: len(Lane)], list(work_s.values()), rtol=1e-9)


def test_moves_add_what_they_change_to_every_row_and_every_place():
    """Bytes are estimates, but their changes add up."""
    profile = with_copies(recomputing(transformer(5), seconds_of_forward=0.5, share=0.5))
    search = AutoSearch(profile, Request()).search
    codes = search.leanest
    moves, before_s = search.estimates.moves(codes), search.estimates.seconds(codes)
    held = search.estimates.bytes[:, np.arange(len(codes)), codes].sum(axis=1)
    for move in range(0, len(moves.part), 7):
        made = moves.taken(search.columns, codes, move)
        assert made is not None and (made != codes).any()
        np.testing.assert_allclose(
            search.estimates.seconds(made) - before_s, moves.seconds[:, move], rtol=1e-9, atol=1e-12
        )
        after = search.estimates.bytes[:, np.arange(len(made)), made].sum(axis=1)
        np.testing.assert_allclose(after - held, moves.num_bytes[:, move])
