"""The validator rejects a violation of each single rule: an accepted schedule with one change."""

import dataclasses
from typing import Any

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


def _early(schedule: Schedule) -> Schedule:
    first, last = _first(schedule, "forward"), [event for event in schedule.events if event.kind == "backward"][-1]
    return _replace(schedule, first, _shift(first, last.end_s - 1 - first.start_s))


def _late(schedule: Schedule) -> Schedule:
    prefetch = _first(schedule, "prefetch")
    used = next(e for e in schedule.events if e.layer == prefetch.layer and e.start_s >= prefetch.end_s)
    return _replace(schedule, prefetch, _shift(prefetch, used.start_s - prefetch.start_s))


def _without(schedule: Schedule, kind: str) -> Schedule:
    return _replace(schedule, _first(schedule, kind))


def _shorter(schedule: Schedule, kind: str) -> Schedule:
    event = _first(schedule, kind)
    return _replace(schedule, event, dataclasses.replace(event, end_s=event.end_s - 0.5))


def _twice(schedule: Schedule, kind: str) -> Schedule:
    event = _first(schedule, kind)
    return _replace(schedule, event, event, dataclasses.replace(event, layer=(event.layer + 1) % 3))


CHANGES: list[Any] = [
    *((_without, kind, None) for kind in ("forward", "backward", "prefetch", "delete")),
    (_without, "offload", "without a copy on the host"),
    *((_shorter, kind, "should take") for kind in ("forward", "backward", "prefetch", "offload")),
    *((_twice, kind, "link is busy") for kind in ("prefetch", "offload")),
    (_early, None, "before the previous operation ends"),
    (_late, None, None),
    (lambda schedule: Schedule(schedule.duration_s - 1, schedule.events), None, "inside the period"),
    (lambda schedule: Schedule(schedule.duration_s, (*schedule.events, Event("copy", 0, 0, 1))), None, "unknown kind"),
]


@pytest.mark.parametrize(("change", "kind", "match"), CHANGES)
def test_a_schedule_with_one_change_is_refused(
    schedule: Schedule, change: Any, kind: str | None, match: str | None
) -> None:
    with pytest.raises(ScheduleError, match=match):
        validate(INSTANCE, change(schedule) if kind is None else change(schedule, kind))


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
