"""What the timers measure: with a clock that the calls advance, and once with real programs."""

import jax
import jax.numpy as jnp
import pytest

from jaxferry.errors import InputError
from jaxferry.settings import own_settings
from jaxferry.training import Effort, median_s, timed_call


class Bench:
    """A clock, and calls that take the given seconds, the last of them for ever."""

    def __init__(self, *durations, preparing=0.0, emptying=0.0):
        self.now, self.durations, self.preparing, self.emptying = 0.0, list(durations), preparing, emptying
        self.num_calls, self.emptied_before = 0, set()

    def prepare(self):
        self.now += self.preparing
        return (self.num_calls,)

    def run(self, argument):
        assert argument == self.num_calls
        self.now += self.durations[min(self.num_calls, len(self.durations) - 1)]
        self.num_calls += 1

    def empty_caches(self):
        self.now += self.emptying
        self.emptied_before.add(self.num_calls)

    def clock(self):
        return self.now

    def median_s(self, **effort):
        once = timed_call(self.run, self.prepare, self.clock, self.empty_caches)
        return median_s(once, Effort(**effort), self.clock)


@pytest.mark.parametrize(
    ("bench", "effort", "expected"),
    [
        pytest.param(Bench(100.0, 1.0), {}, 1.0, id="the first call"),
        pytest.param(Bench(0.25, preparing=50.0), {}, 0.25, id="what makes the arguments"),
        pytest.param(Bench(1.0, 1.0, 77.0, 1.0, 1.0, 99.0, 1.0), {"min_repetitions": 6}, 1.0, id="what disturbs some"),
    ],
)
def test_the_median_does_not_count(bench, effort, expected):
    assert bench.median_s(**effort) == expected


@pytest.mark.parametrize(
    ("bench", "effort", "expected"),
    [
        *((Bench(1000.0), {"min_repetitions": number, "budget_s": 0.0}, number) for number in (1, 3, 7)),
        (Bench(0.01), {"min_total_s": 0.1}, pytest.approx(10, abs=1)),
        (Bench(1e-9), {"max_repetitions": 20}, 20),
        # The budget counts what is not timed too.
        (Bench(0.001, preparing=1.0), {"budget_s": 6.5, "min_total_s": 1.0}, 6),
    ],
)
def test_calls_are_repeated_as_often_as_the_effort_says(bench, effort, expected):
    bench.median_s(**effort)
    assert bench.num_calls - 1 == expected


def test_caches_are_emptied_before_every_call_and_that_is_not_timed():
    bench = Bench(0.25, emptying=50.0)
    assert bench.median_s(max_repetitions=4) == 0.25
    assert bench.emptied_before == set(range(bench.num_calls))


def test_every_call_has_arguments_of_its_own_which_it_may_destroy():
    program = jax.jit(lambda x: x + 1, donate_argnums=0)
    made = []

    def prepare():
        made.append(jnp.zeros(1000))
        return made[-1:]

    with own_settings():  # jax_debug_nans would take donation away
        assert median_s(timed_call(program, prepare), Effort(max_repetitions=4)) > 0
    assert len(made) == 5 and all(array.is_deleted() for array in made)


def test_the_end_of_a_result_is_timed_not_its_issue():
    class Result:
        """What JAX waits for: it is ready four seconds after it was issued."""

        def block_until_ready(self):
            bench.now += 4.0
            return self

    bench = Bench(1.0)
    run = lambda argument: (bench.run(argument), Result())[1]  # noqa: E731
    assert median_s(timed_call(run, bench.prepare, bench.clock), Effort(), bench.clock) == 5.0


@pytest.mark.parametrize(("asked", "found"), [(15, 15), (50, 20), (1, 3)])
def test_an_effort_is_lowered_to_no_less_than_its_minimum(asked, found):
    assert Effort(max_repetitions=20).at_most(asked) == Effort(max_repetitions=found)


@pytest.mark.parametrize("effort", [{"min_repetitions": 0}, {"min_repetitions": 9, "max_repetitions": 8}])
def test_no_repetition_is_no_measurement(effort):
    with pytest.raises(InputError, match=r"min_repetitions must lie in 1 \.\."):
        Effort(**effort)
