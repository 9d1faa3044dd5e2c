"""The model of XLA's allocator, against a plain list of bytes, and what it leaves for unsplit chunks."""

import dataclasses
import warnings

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given

import jaxferry
import models
from jaxferry.engine import Lifetimes
from jaxferry.modes import Mode
from jaxferry.transport import Allocator, BestFit, Buffer, Placement, unsplit_bytes
from planned import plan_of, prepared

MIB = 2**20
SIZES = st.one_of(st.integers(1, 4000).map(lambda size: size * 256), st.integers(100, 400).map(lambda size: size * MIB))


@dataclasses.dataclass
class Plain:
    """The same rules over a sorted list of (address, size, is free), searched from end to end."""

    chunks: list

    def allocate(self, size):
        fitting = [chunk for chunk in self.chunks if chunk[2] and chunk[1] >= size]
        chosen = min(fitting, key=lambda chunk: (chunk[1], chunk[0]))
        place = self.chunks.index(chosen)
        address, whole, _ = chosen
        if whole >= 2 * size or whole - size >= 128 * MIB:
            self.chunks[place : place + 1] = [(address, size, False), (address + size, whole - size, True)]
        else:
            self.chunks[place] = (address, whole, False)
        return address

    def free(self, address):
        self.chunks = [(a, n, is_free or a == address) for a, n, is_free in self.chunks]
        joined = []
        for a, n, is_free in self.chunks:
            if joined and is_free and joined[-1][2]:
                joined[-1] = (joined[-1][0], joined[-1][1] + n, True)
            else:
                joined.append((a, n, is_free))
        self.chunks = joined

    @property
    def in_use(self):
        return sum(size for _, size, is_free in self.chunks if not is_free)


@given(st.lists(st.one_of(SIZES, st.integers(0, 30).map(lambda place: -1 - place)), max_size=60))
def test_it_hands_out_the_chunks_that_the_rules_say(moves):
    """Positive numbers ask for so many bytes, negative ones free one of what is held."""
    model, plain, held = BestFit(), Plain([(0, 1 << 62, True)]), []
    for move in moves:
        if move > 0:
            held.append((model.allocate(move), plain.allocate(move)))
        elif held:
            ours, theirs = held.pop(-1 - move if -1 - move < len(held) else 0)
            model.free(ours)
            plain.free(theirs)
        assert model.in_use == plain.in_use >= model.requested


def test_regions_that_grow_are_handed_out_whole_too():
    model = BestFit(Allocator.GROWING)
    model.allocate(MIB + 256)  # of the first region, 2 MiB
    assert model.in_use == 2 * MIB
    model.allocate(5 * MIB)  # of the next one, 4 MiB doubled
    assert model.in_use == (2 + 8) * MIB


def test_memory_is_left_for_a_smaller_buffer_that_takes_the_place_of_a_larger_one():
    def at(size, start, end):
        return Buffer(size, (start, start), (end, end))

    fence = at(256, 0, 20)
    same = unsplit_bytes([at(3 * MIB, 0, 4), fence, at(3 * MIB, 5, 9)], 30, Allocator.PREALLOCATED)
    smaller = unsplit_bytes([at(3 * MIB, 0, 4), fence, at(2 * MIB, 5, 9)], 30, Allocator.PREALLOCATED)
    assert same < MIB // 2 and smaller >= 2 * MIB


def test_memory_is_left_for_a_region_that_one_request_takes_whole():
    """As on a device in software, where a step that asks for 1.4 MB took the 2 MiB of its first region."""
    buffers = [Buffer(970_000, (0, 0), (4, 4)), Buffer(256, (2, 2), (20, 20)), Buffer(1_290_000, (5, 5), (9, 9))]
    assert unsplit_bytes(buffers, 30, Allocator.GROWING) >= 2 * MIB - 1_290_000
    assert unsplit_bytes([Buffer(MIB, (0, 0), (4, 4))], 30, Allocator.GROWING) < MIB // 2


def test_times_that_vary_are_tried():
    """Where the smaller buffer comes first or last decides whether it takes the larger one's place."""
    fence, late = Buffer(256, (0, 0), (20, 20)), Buffer(2 * MIB, (5, 5), (9, 9))
    early = Buffer(3 * MIB, (0, 0), (6, 6))
    apart = unsplit_bytes([early, fence, late], 30, Allocator.PREALLOCATED)
    varying = unsplit_bytes([dataclasses.replace(early, end=(4, 6)), fence, late], 30, Allocator.PREALLOCATED)
    assert varying > apart


@pytest.mark.parametrize("modes", [[Mode.GFGB], [Mode.RELOAD], [Mode.RESIDENT, Mode.DHA, Mode.RELOAD], [Mode.DHA]])
@pytest.mark.parametrize("options", [{}, {"remat": "full", "offload_activations": True}, {"remat": "full"}])
def test_the_buffers_of_a_step_add_up_to_what_is_counted(modes, options):
    gpt = models.mlp()
    found = prepared(gpt, optax.adamw(1e-3), plan=plan_of(gpt, modes), **options)
    counted, runnable, program = found.peak.counted, found.runner.runnable, found.program
    temporary_bytes = {key: runnable.programs.temporary_bytes[key] for key in program.keys}
    found = Lifetimes(program, temporary_bytes, runnable.loads_ahead, joins_vectors=False)
    layers, graph = program.partition.layers, program.partition.graph
    now = sum(layers[group].num_bytes for group in program.resident) + graph.held_bytes(*graph.constants)
    most, steps = now, range(3)
    starts = [(b.start[0] + s * found.end, 1, b.num_bytes) for b in found.buffers for s in steps]
    ends = [(b.end[1] + s * found.end, 0, -b.num_bytes) for b in found.buffers for s in steps]
    for _, _, num_bytes in sorted(starts + ends):
        now += num_bytes
        most = max(most, now)
    # A few flags of one byte may stand for more.
    assert most == pytest.approx(counted, abs=8 * len(program.programs))


@pytest.mark.parametrize("budget", ["200MiB", "2GiB"])
def test_a_policy_measures_only_within_its_budget(budget, monkeypatch):
    monkeypatch.setattr(Placement, "allocator", Allocator.PREALLOCATED)
    step = jaxferry.train_step(
        lambda params, x: jnp.mean(jnp.tanh(x @ params["w"]) ** 2), optax.sgd(1e-3), policy="auto", memory_budget=budget
    )
    step.declare({"w": np.ones((8, 8), np.float32)})
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step.prepare(np.ones((2, 8), np.float32))
    told = [str(warning.message) for warning in found if "measuring takes" in str(warning.message)]
    assert len(told) == (budget == "200MiB")
    assert all("planning with an estimated profile" in text and "memory_budget is 200.0 MiB" in text for text in told)
