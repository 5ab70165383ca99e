"""The staleness window, the age of samples, and the rules of strategy `wait`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hybridsched.errors import InternalError
from hybridsched.model import Verdict, WeightVersion
from hybridsched.scheduling.staleness import (
    Place,
    StalenessWindow,
    WindowError,
    admit_for_wait,
    due_before_sync,
    max_required_samples,
    sample_age,
    too_old,
)

V = WeightVersion


@pytest.mark.parametrize(
    ("s", "threshold", "bound"),
    [(512, 0.1, 563), (64, 0.5, 96), (512, 0.0, 512), (20, 0.15, 23), (1, 0.9, 1), (4, 1, 8)],
)
def test_the_bound_is_the_integer_part_of_s_times_one_plus_threshold(s: int, threshold: float, bound: int) -> None:
    assert max_required_samples(s, threshold) == bound


def test_a_sample_is_counted_once_from_admission_to_the_sync_after_its_training() -> None:
    window = StalenessWindow(4)
    seen = []
    for event in (
        lambda: window.admitted(7),
        lambda: window.completed(7),
        lambda: window.taken(7),
        lambda: window.verdict(7, Verdict.TRAINED),
        window.synced,
    ):
        event()
        window.validate()
        seen.append((window.in_flight, window.queued, window.consumed, window.room()))
    assert seen == [(1, 0, 0, 3), (0, 1, 0, 3), (0, 0, 1, 3), (0, 0, 1, 3), (0, 0, 0, 4)]


@pytest.mark.parametrize("verdict", [v for v in Verdict if v is not Verdict.TRAINED])
@pytest.mark.parametrize("place", list(Place))
def test_a_sample_that_is_not_trained_gives_its_place_back_at_once(verdict: Verdict, place: Place) -> None:
    window = StalenessWindow(1)
    window.admitted(1)
    if place is not Place.IN_FLIGHT:
        window.completed(1)
    if place is Place.CONSUMED:
        window.taken(1)
    window.verdict(1, verdict)
    assert (window.counted, window.room()) == (0, 1)


def test_nothing_is_admitted_without_room() -> None:
    window = StalenessWindow(2)
    window.admitted(1)
    window.admitted(2)
    with pytest.raises(WindowError, match="no room"):
        window.admitted(3)
    assert window.counted == 2


def test_a_sample_issued_again_is_not_counted_twice() -> None:
    window = StalenessWindow(3)
    window.admitted(1)
    window.reissued(1)
    window.completed(1)
    window.reissued(1)  # its segment was damaged
    assert (window.in_flight, window.queued, window.counted) == (1, 0, 1)


def test_contradictions_are_refused_and_change_nothing() -> None:
    window = StalenessWindow(3)
    window.admitted(1)
    wrongs: list[Callable[[], object]] = [
        lambda: window.admitted(1),
        lambda: window.completed(2),
        lambda: window.taken(1),
        lambda: window.verdict(1, Verdict.TRAINED),
        lambda: window.verdict(2, Verdict.STALE),
        lambda: window.reissued(2),
        lambda: window.restored(in_flight=[1], queued=[1]),
    ]
    for wrong in wrongs:
        with pytest.raises(WindowError):
            wrong()
        assert (window.in_flight, window.counted) == (1, 1)
    with pytest.raises(WindowError, match="nothing could ever be admitted"):
        StalenessWindow(0)


def test_a_late_trained_verdict_after_the_sync_is_no_error() -> None:
    window = StalenessWindow(3)
    window.admitted(1)
    window.completed(1)
    window.taken(1)
    assert window.synced() == 1
    window.verdict(1, Verdict.TRAINED)
    assert window.counted == 0


def test_a_rollback_may_bring_back_more_than_the_bound_and_then_nothing_is_admitted() -> None:
    window = StalenessWindow(2)
    window.restored(in_flight=[9], queued=[1, 2, 3])
    assert (window.counted, window.room(), window.place(9)) == (4, 0, Place.IN_FLIGHT)
    for uid in (1, 2, 3):
        window.taken(uid)
    window.synced()
    assert window.room() == 1


def test_forty_percent_filtered_never_uses_the_window_up() -> None:
    window, uid = StalenessWindow(96), 0
    for _ in range(1000):
        ready: list[int] = []
        while len(ready) < 64:
            window.admitted(uid)
            if uid % 5 < 2:
                window.verdict(uid, Verdict.FILTERED)
            else:
                window.completed(uid)
                ready.append(uid)
            uid += 1
        for done in ready:
            window.taken(done)
        assert window.synced() == 64
    assert (window.counted, window.room()) == (0, 96)


class WindowMachine(RuleBasedStateMachine):
    """Any order of legal events: bound, signs and conservation hold."""

    def __init__(self) -> None:
        super().__init__()
        self.window = StalenessWindow(5)
        self.model: dict[int, Place] = {}
        self.next = 0
        self.ended = 0
        self.released = 0

    def some(self, data: st.DataObject, place: Place | None = None) -> int | None:
        uids = sorted(u for u, p in self.model.items() if place is None or p is place)
        return data.draw(st.sampled_from(uids)) if uids else None

    @precondition(lambda self: self.window.room() > 0)
    @rule()
    def admit(self) -> None:
        self.window.admitted(self.next)
        self.model[self.next] = Place.IN_FLIGHT
        self.next += 1

    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        if (uid := self.some(data, Place.IN_FLIGHT)) is not None:
            self.window.completed(uid)
            self.model[uid] = Place.QUEUED

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        if (uid := self.some(data, Place.QUEUED)) is not None:
            self.window.taken(uid)
            self.model[uid] = Place.CONSUMED

    @rule(data=st.data(), verdict=st.sampled_from([v for v in Verdict if v is not Verdict.TRAINED]))
    def drop(self, data: st.DataObject, verdict: Verdict) -> None:
        if (uid := self.some(data)) is not None:
            self.window.verdict(uid, verdict)
            del self.model[uid]
            self.ended += 1

    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        if (uid := self.some(data, Place.CONSUMED)) is not None:
            self.window.verdict(uid, Verdict.TRAINED)

    @rule(data=st.data())
    def reissue(self, data: st.DataObject) -> None:
        if (uid := self.some(data)) is not None:
            self.window.reissued(uid)
            self.model[uid] = Place.IN_FLIGHT

    @rule()
    def sync(self) -> None:
        gone = [u for u, p in self.model.items() if p is Place.CONSUMED]
        assert self.window.synced() == len(gone)
        for uid in gone:
            del self.model[uid]
        self.released += len(gone)

    @invariant()
    def counts_agree(self) -> None:
        self.window.validate()
        window = self.window
        places = list(self.model.values())
        assert [window.in_flight, window.queued, window.consumed] == [places.count(p) for p in Place]
        assert 0 <= window.counted <= 5 and window.room() == 5 - window.counted
        assert self.next == window.counted + self.ended + self.released


TestWindow = WindowMachine.TestCase
TestWindow.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


# -- age


@pytest.mark.parametrize(
    ("oldest", "current", "age"),
    [
        (V(0, 3), V(0, 3), 0),
        (V(0, 1), V(0, 3), 2),
        (V(0, 3), V(1, 6), 3),  # before the fork at 5: an ancestor, counted as it is
        (V(0, 8), V(1, 6), 1),  # beyond the fork: rolled back, counted at the fork
        (V(0, 5), V(1, 5), 0),
        (V(0, 8), V(2, 4), 0),  # two rollbacks: the earlier point counts
        (V(1, 6), V(2, 7), 3),
        (V(0, 2), V(2, 7), 5),
    ],
)
def test_age_counts_versions_since_the_newest_common_ancestor(oldest: V, current: V, age: int) -> None:
    assert sample_age(oldest, current, {1: 5, 2: 4}) == age


def test_a_token_from_the_future_or_an_unknown_fork_is_a_bug() -> None:
    with pytest.raises(InternalError, match="newer than"):
        sample_age(V(0, 4), V(0, 3), {})
    with pytest.raises(InternalError, match="fork of lineage 1"):
        sample_age(V(0, 4), V(1, 5), {})


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=5), st.data())
def test_age_is_never_negative_and_grows_by_one_with_each_sync(
    hops: list[tuple[int, int]], data: st.DataObject
) -> None:
    forks: dict[int, int] = {}
    versions, number = [V(0, 0)], 0
    for lineage, (syncs, back) in enumerate(hops):
        for _ in range(syncs):
            number += 1
            versions.append(V(lineage, number))
        number = max(0, number - back)
        forks[lineage + 1] = number
        versions.append(V(lineage + 1, number))
    current = versions[-1]
    oldest = data.draw(st.sampled_from(versions))
    age = sample_age(oldest, current, forks)
    assert 0 <= age <= current.number
    assert sample_age(oldest, V(current.lineage, current.number + 1), forks) == age + 1


def test_too_old_only_above_the_threshold() -> None:
    assert [too_old(2, 2), too_old(3, 2), too_old(10**6, None)] == [False, True, False]


@pytest.mark.parametrize(
    ("ahead", "consumed", "max_age", "admit"),
    [(0, 0, 0, True), (63, 0, 0, True), (64, 0, 0, False), (10, 53, 0, True), (10, 54, 0, False), (64, 0, 1, True),
     (9999, 0, None, True)],
)  # fmt: skip
def test_a_prompt_is_admitted_when_its_turn_comes_in_time(
    ahead: int, consumed: int, max_age: int | None, admit: bool
) -> None:
    assert admit_for_wait(ahead, consumed, 64, max_age) is admit


def test_due_before_a_sync_are_those_it_would_make_too_old_oldest_first() -> None:
    oldest = {1: V(0, 6), 2: V(0, 5), 3: V(0, 3), 4: V(0, 4), 5: V(0, 4)}
    assert due_before_sync(oldest, V(0, 6), {}, 2) == [3, 4, 5]
    assert due_before_sync(oldest, V(0, 6), {}, 0) == [3, 4, 5, 2, 1]
    assert due_before_sync(oldest, V(0, 6), {}, None) == []


@given(st.integers(0, 3), st.integers(1, 6), st.integers(0, 40))
def test_samples_admitted_by_the_rule_and_taken_in_order_are_never_too_old(max_age: int, s: int, steps: int) -> None:
    version, consumed = 0, 0
    queue: list[int] = []
    for _ in range(steps):
        while admit_for_wait(len(queue), consumed, s, max_age):
            queue.append(version)
        assert not too_old(version - queue.pop(0), max_age)
        consumed += 1
        if consumed == s:
            version, consumed = version + 1, 0
