"""The threads that run task lists: start times, failures, agreement with the simulator."""

import functools
import itertools
import threading
import time

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jaxferry.engine import ONE_EACH, Lanes, TaskList
from jaxferry.engine import lanes as lanes_of_engine
from jaxferry.errors import StateError
from jaxferry.modes import Mode
from jaxferry.settings import ThreadPool
from jaxferry.step import Kind, Lane, leading_loads, schedule_step
from profiles import deterministic, lowered, planned, transformer, with_modes

TOGETHER = [(Lane.H2D, Lane.D2H, Lane.GPU), (Lane.HOST,)]


def chain(lanes, schedule, num_steps, action):
    """Runs consecutive steps as the engine does, each with prefetched loads; returns all of them."""
    tasks, loads = TaskList(schedule), leading_loads(schedule)
    works = [lanes.make(tasks, functools.partial(action, 0))]
    for step in range(num_steps):
        lanes.submit(works[-1])
        if step < num_steps - 1:
            works.append(lanes.begin_ahead(tasks, functools.partial(action, step + 1), works[-1], loads))
            works[-2].wait((Lane.GPU, Lane.D2H))
            works[-1].open(functools.partial(action, step + 1))
    works[-1].wait()
    return works


def assert_stopping_waits(work, may_end):
    """Stops work of which a thread waits for `may_end`: only then has stopping ended, and the work."""
    stopping = threading.Thread(target=work.stop, daemon=True)
    stopping.start()
    assert not work.is_over()
    may_end.set()
    stopping.join(60)
    assert not stopping.is_alive() and work.is_over()


def loaded_once(num_layers):
    """The tasks of a step that loads each of so many layers once."""
    profile = transformer(num_layers)
    return lowered(profile, with_modes(profile, [Mode.GFGB] * num_layers))


def times(works):
    starts = [work.starts_s for work in works]
    return starts, [work.ends_s for work in works]


@settings(deterministic, max_examples=25)
@given(planned(), st.sampled_from([ONE_EACH, TOGETHER]), st.randoms(use_true_random=False), st.booleans())
def test_whatever_the_delays_tasks_follow_what_they_wait_for_and_lanes_their_order(case, threads, draw, by_need):
    profile, plan = case
    schedule = lowered(profile, plan) if by_need else schedule_step(profile, plan)
    delays = [draw.random() * 1e-3 for _ in range(97)]

    def action(step, index):
        time.sleep(delays[(7 * step + index) % 97])

    starts, ends = times(chain(Lanes(threads), schedule, 3, action))
    for step in range(3):
        for index, task in enumerate(schedule.tasks):
            assert all(ends[step][earlier] <= starts[step][index] for earlier in task.after)
            if step:
                assert all(ends[step - 1][earlier] <= starts[step][index] for earlier in task.after_previous)
        for lane in set(Lane) - {Lane.HOST}:
            order = [index for index, task in enumerate(schedule.tasks) if task.lane is lane]
            assert all(ends[step][a] <= starts[step][b] for a, b in itertools.pairwise(order))
        host = sorted(starts[step][i] for i, task in enumerate(schedule.tasks) if task.lane is Lane.HOST)
        assert host == sorted(set(host))


@pytest.mark.parametrize("threads", [ONE_EACH, TOGETHER])
def test_trivial_tasks_are_nobodys_and_end_with_the_last_that_they_wait_for(threads):
    """On the GPU's lane that is also the task before, so that what follows it on the lane starts no earlier."""
    schedule = loaded_once(6)
    backwards = [i for i, task in enumerate(schedule.tasks) if task.kind is Kind.BACKWARD]
    trivial = [backwards[0], *(i for i, task in enumerate(schedule.tasks) if task.kind is Kind.OFFLOAD)]
    tasks, lanes, done = TaskList(schedule, trivial), Lanes(threads), []
    work = lanes.make(tasks, done.append)
    successor = lanes.make(tasks, done.append, work)
    for each in (work, successor):
        lanes.submit(each)
        each.wait()
        assert each.is_over() and each.failure is None
    assert sorted(done) == sorted(2 * [index for index in range(len(schedule.tasks)) if index not in trivial])
    order = [index for index, task in enumerate(schedule.tasks) if task.lane is Lane.GPU]
    before = dict(zip(order[1:], order, strict=False))
    for index, task in enumerate(schedule.tasks):
        assert all(work.ends_s[earlier] <= work.starts_s[index] for earlier in task.after)
        if index in trivial:
            awaited = [*task.after, *([before[index]] if index in before else [])]
            assert work.starts_s[index] == work.ends_s[index] == max(work.ends_s[earlier] for earlier in awaited)
    assert work.ends_s[backwards[0]] <= work.starts_s[backwards[1]]


def test_the_host_takes_the_update_that_is_needed_first():
    schedule = loaded_once(6)
    has_begun, all_landed, order = threading.Event(), threading.Event(), []

    def action(step, index):
        task = schedule.tasks[index]
        if task.kind is Kind.UPDATE:
            has_begun.set()
            all_landed.wait()
            order.append(task.segment)
        if task.kind is Kind.OFFLOAD and task.segment == 4:
            has_begun.wait()
        if task.kind is Kind.OFFLOAD and task.segment == 0:
            threading.Timer(0.05, all_landed.set).start()

    chain(Lanes(), schedule, 1, action)
    assert order[0] == 5  # the only one that can start
    assert order[1:] == [0, 1, 2, 3, 4]


def test_stopped_work_does_nothing_more_and_committed_work_does_not_stop():
    schedule = loaded_once(6)
    for commits in (False, True):
        lanes, seen = Lanes(), threading.Event()

        works = []

        def action(index, commits=commits, seen=seen, works=works):
            time.sleep(1e-3)
            if commits and index == 0:
                works[0].commit()
            seen.set()

        work = lanes.make(TaskList(schedule), action)
        works.append(work)
        lanes.submit(work)
        work.wait(should_stop=seen.is_set)
        assert work.is_stopped != commits and work.is_over()
        assert (min(work.ends_s) > 0) == commits
        assert work.commit() == commits


@pytest.mark.parametrize("threads", [ONE_EACH, TOGETHER])
def test_tasks_that_an_action_begins_end_when_their_wait_returns(threads):
    """Other tasks start meanwhile, those that depend on one only after its end."""
    schedule = loaded_once(8)
    ended, is_awaited = {}, [task.kind is Kind.OFFLOAD for task in schedule.tasks]

    def action(index):
        def wait():
            time.sleep(1e-3)
            ended[index] = time.perf_counter()

        return wait if is_awaited[index] else None

    lanes = Lanes(threads)
    work = lanes.make(TaskList(schedule), action)
    lanes.submit(work)
    work.wait()
    assert work.failure is None and work.is_over() and len(ended) == sum(is_awaited)
    for index, task in enumerate(schedule.tasks):
        assert all(work.starts_s[index] >= ended.get(earlier, work.ends_s[earlier]) for earlier in task.after)
        assert work.ends_s[index] >= ended.get(index, 0)


def test_a_wait_that_fails_fails_its_task_and_stopping_waits_for_it():
    schedule = loaded_once(4)
    first = next(i for i, task in enumerate(schedule.tasks) if task.kind is Kind.OFFLOAD)
    begun, may_end, lanes = threading.Event(), threading.Event(), Lanes(TOGETHER)

    def wait():
        begun.set()
        may_end.wait(60)
        raise RuntimeError("the copy failed")

    work = lanes.make(TaskList(schedule), lambda index: wait if index == first else None)
    lanes.submit(work)
    assert begun.wait(60)
    assert_stopping_waits(work, may_end)
    assert work.failure.index == first and "the copy failed" in str(work.failure.error)


def test_an_arrival_that_fails_is_left_to_the_update_and_stopping_waits_for_one_that_hangs():
    schedule = loaded_once(4)
    begun, may_end, lanes, done = threading.Event(), threading.Event(), Lanes(TOGETHER), []

    def failing(index):
        raise RuntimeError("the copy failed")

    work = lanes.make(TaskList(schedule), done.append, arrival=failing)
    lanes.submit(work)
    work.wait()
    assert work.failure is None and sorted(done) == [*range(len(schedule.tasks))]

    def hanging(index):
        begun.set()
        assert may_end.wait(60)

    work = lanes.make(TaskList(schedule), done.append, arrival=hanging)
    lanes.submit(work)
    assert begun.wait(60)
    assert_stopping_waits(work, may_end)


def test_work_that_threads_do_not_take_any_more_is_refused_and_nobody_waits_for_it(monkeypatch):
    threads = []

    def made(*args, **kwargs):
        threads.append(ThreadPool(*args, **kwargs))
        return threads[-1]

    monkeypatch.setattr(lanes_of_engine, "ThreadPool", made)
    profile = transformer(2)
    schedule = schedule_step(profile, with_modes(profile, [Mode.GFGB] * 2))
    for closed in range(len(ONE_EACH)):
        threads.clear()
        lanes = Lanes()
        threads[closed].shutdown()  # as Python does at its end
        work = lanes.make(TaskList(schedule), lambda index: None)
        with pytest.raises(StateError, match="the process is ending"):
            lanes.submit(work)
        waiting = threading.Thread(target=work.wait, daemon=True)
        waiting.start()
        waiting.join(10)
        assert not waiting.is_alive() and work.is_over()
