"""The validator rejects a violation of each single rule: an accepted schedule with one change."""

import dataclasses

import pytest

from jaxferry.weights import Event, Instance, Schedule, greedy
from weight_schedules import ScheduleError, validate

INSTANCE = Instance((5, 5, 5), (0, 1, 1, 1), (4, 4, 4), (6, 6, 6), 14, 1)


@pytest.fixture
def schedule() -> Schedule:
    found = greedy(INSTANCE).schedule
    assert found is not None
    validate(INSTANCE, found)
    return found


def _first(schedule: Schedule, kind: str) -> Event:
    return next(event for event in schedule.events if event.kind == kind)


def _replace(schedule: Schedule, old: Event, *new: Event) -> Schedule:
    events = [event for event in schedule.events if event is not old]
    return Schedule(schedule.duration_s, (*events, *new))


def _shift(event: Event, by_s: float) -> Event:
    return dataclasses.replace(event, start_s=event.start_s + by_s, end_s=event.end_s + by_s)


@pytest.mark.parametrize("kind", ["forward", "backward", "prefetch", "offload", "delete"])
def test_nothing_may_be_left_out(schedule: Schedule, kind: str) -> None:
    with pytest.raises(ScheduleError):
        validate(INSTANCE, _replace(schedule, _first(schedule, kind)))


@pytest.mark.parametrize("kind", ["forward", "backward", "prefetch", "offload"])
def test_nothing_may_take_less_than_its_time(schedule: Schedule, kind: str) -> None:
    event = _first(schedule, kind)
    with pytest.raises(ScheduleError, match="should take"):
        validate(INSTANCE, _replace(schedule, event, dataclasses.replace(event, end_s=event.end_s - 0.5)))


@pytest.mark.parametrize("kind", ["prefetch", "offload"])
def test_a_direction_carries_one_transfer_at_a_time(schedule: Schedule, kind: str) -> None:
    event = _first(schedule, kind)
    other = dataclasses.replace(event, layer=(event.layer + 1) % 3)
    with pytest.raises(ScheduleError, match="link is busy"):
        validate(INSTANCE, _replace(schedule, event, event, other))


def test_operations_keep_their_order(schedule: Schedule) -> None:
    first = _first(schedule, "forward")
    last_backward = [event for event in schedule.events if event.kind == "backward"][-1]
    early = _shift(first, last_backward.end_s - 1 - first.start_s)
    with pytest.raises(ScheduleError, match="before the previous operation ends"):
        validate(INSTANCE, _replace(schedule, first, early))


def test_weights_are_loaded_before_use(schedule: Schedule) -> None:
    prefetch = _first(schedule, "prefetch")
    used = next(e for e in schedule.events if e.layer == prefetch.layer and e.start_s >= prefetch.end_s)
    late = _shift(prefetch, used.start_s - prefetch.start_s)
    with pytest.raises(ScheduleError):
        validate(INSTANCE, _replace(schedule, prefetch, late))


def test_a_weight_is_deleted_only_with_a_copy_on_the_host(schedule: Schedule) -> None:
    offload = _first(schedule, "offload")
    with pytest.raises(ScheduleError, match="without a copy on the host"):
        validate(INSTANCE, _replace(schedule, offload))


def test_a_weight_is_not_sent_while_its_backward_changes_it() -> None:
    instance = Instance((4, 4), (0, 0, 0), (8, 8), (8, 8), 100, 1)
    quiet = greedy(instance).schedule
    assert quiet is not None
    backward = next(event for event in quiet.events if (event.kind, event.layer) == ("backward", 0))
    sent = Event("offload", 0, backward.start_s + 1, backward.start_s + 5)
    with pytest.raises(ScheduleError, match="overlaps the backward"):
        validate(instance, Schedule(quiet.duration_s, (*quiet.events, sent)))
    after = _shift(sent, backward.end_s - sent.start_s)
    validate(instance, Schedule(quiet.duration_s, (*quiet.events, after)))


def test_one_byte_less_memory_is_noticed(schedule: Schedule) -> None:
    with pytest.raises(ScheduleError, match="bytes in use"):
        validate(dataclasses.replace(INSTANCE, memory_bytes=12), schedule)


def test_the_period_covers_every_event(schedule: Schedule) -> None:
    with pytest.raises(ScheduleError, match="inside the period"):
        validate(INSTANCE, Schedule(schedule.duration_s - 1, schedule.events))


def test_unknown_events_are_refused(schedule: Schedule) -> None:
    with pytest.raises(ScheduleError, match="unknown kind"):
        validate(INSTANCE, Schedule(schedule.duration_s, (*schedule.events, Event("copy", 0, 0, 1))))
