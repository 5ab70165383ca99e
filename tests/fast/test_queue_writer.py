"""The segment writer: when it seals, in which order, and what a full disk does to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from queue_helpers import make_sample, make_samples, plain, segment_id

from hybridsched.errors import InternalError, NoSpace
from hybridsched.model import Sample, SegmentId
from hybridsched.sample_queue.base import SegmentInfo, SegmentStore
from hybridsched.sample_queue.store import FileSegmentStore
from hybridsched.sample_queue.writer import SegmentWriter, newest_version, payload_bytes


class MemoryStore:
    """Keeps segments in a dict; can be full."""

    def __init__(self) -> None:
        self.segments: dict[SegmentId, list[Sample]] = {}
        self.full = False
        self.refused: list[tuple[SegmentId, tuple[int, ...]]] = []

    def write(self, segment: SegmentId, samples: Sequence[Sample]) -> SegmentInfo:
        if self.full:
            self.refused.append((segment, tuple(s.sample_uid for s in samples)))
            raise NoSpace("full")
        assert segment not in self.segments
        self.segments[segment] = list(samples)
        return SegmentInfo(segment, (), len(samples))

    def read(self, segment: SegmentId, rows: Sequence[int] | None = None) -> list[Sample]:
        return self.segments[segment]

    def info(self, segment: SegmentId) -> SegmentInfo:
        return SegmentInfo(segment, (), 0)

    def list(self) -> list[SegmentId]:
        return sorted(self.segments)

    def quarantine(self, segment: SegmentId, reason: str) -> None:
        raise NotImplementedError

    def remove(self, segments: Iterable[SegmentId]) -> int:
        raise NotImplementedError

    def free_bytes(self) -> int:
        return 0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(store: SegmentStore, clock: Clock, *, seal_bytes: int = 10**9, seal_samples: int = 10**9) -> SegmentWriter:
    return SegmentWriter(
        store, "node0.0", "7.0.123", seal_bytes=seal_bytes, seal_samples=seal_samples, seal_age_s=5.0, now=clock
    )


def uids(samples: Iterable[Sample]) -> list[int]:
    return [sample.sample_uid for sample in samples]


def test_nothing_is_due_while_nothing_is_pending() -> None:
    writer = make(MemoryStore(), Clock())
    assert (writer.due(), writer.pending, writer.pending_bytes, writer.oldest_age()) == (None, 0, 0, 0.0)
    with pytest.raises(InternalError, match="nothing to seal"):
        writer.seal("drain")


def test_it_is_due_by_count() -> None:
    store = MemoryStore()
    writer = make(store, Clock(), seal_samples=3)
    assert [writer.add(sample) for sample in make_samples(range(3))] == [[], [], ["samples"]]
    assert writer.due() == "samples"
    assert segment_id(0) == writer.seal("samples").segment
    assert (uids(store.segments[segment_id(0)]), writer.pending, writer.due()) == ([0, 1, 2], 0, None)


def test_it_is_due_by_bytes() -> None:
    size = payload_bytes(make_sample(0))
    writer = make(MemoryStore(), Clock(), seal_bytes=2 * size)
    assert [writer.add(sample) for sample in make_samples(range(2))] == [[], ["bytes"]]
    assert ("bytes", 2 * size) == (writer.due(), writer.pending_bytes)


def test_it_is_due_by_age_of_the_oldest_sample() -> None:
    clock = Clock()
    writer = make(MemoryStore(), clock)
    writer.add(make_sample(0))
    clock.now += 4.9
    writer.add(make_sample(1))
    assert None is writer.due()
    assert writer.due(clock.now + 0.1) == "age"
    clock.now += 1.0
    assert ("age", pytest.approx(5.9)) == (writer.due(), writer.oldest_age())


def test_a_newer_version_closes_the_batch_before_it() -> None:
    store = MemoryStore()
    writer = make(store, Clock())
    assert writer.add(make_sample(0, version=(0, 1))) == []
    assert writer.add(make_sample(1, version=(0, 2))) == ["version"]
    assert writer.add(make_sample(2, version=(0, 2))) == []
    assert (writer.due(), writer.pending_batches, writer.pending) == ("version", 2, 3)
    writer.seal("version")
    assert (writer.due(), uids(store.segments[segment_id(0)])) == (None, [0])
    writer.seal("drain")
    assert uids(store.segments[segment_id(1)]) == [1, 2]


def test_one_sample_can_be_due_for_two_reasons() -> None:
    writer = make(MemoryStore(), Clock(), seal_bytes=payload_bytes(make_sample(0)) + 1)
    writer.add(make_sample(0, version=(0, 1)))
    assert writer.add(make_sample(1, version=(0, 2), length=50)) == ["version", "bytes"]


def test_newest_version_is_over_all_tokens_of_all_responses() -> None:
    assert newest_version(make_sample(0)) == (0, 1)
    assert None is newest_version(make_sample(0, n=0))


def test_a_full_disk_keeps_content_and_number_for_the_next_attempt() -> None:
    store = MemoryStore()
    writer = make(store, Clock())
    writer.add(make_sample(0))
    store.full = True
    for _ in range(2):
        with pytest.raises(NoSpace):
            writer.seal("age")
        writer.add(make_sample(1 + len(store.refused)))
    assert [(segment_id(0), (0,))] * 2 == store.refused
    assert writer.pending == 3
    assert writer.due() == "age", "what failed once stays due"
    store.full = False
    while writer.pending:
        writer.seal("drain")
    assert {segment_id(0): [0], segment_id(1): [2, 3]} == {k: uids(v) for k, v in store.segments.items()}


def test_two_seals_at_once_are_refused() -> None:
    writers: list[SegmentWriter] = []

    class Nested(MemoryStore):
        def write(self, segment: SegmentId, samples: Sequence[Sample]) -> SegmentInfo:
            with pytest.raises(InternalError, match="already running"):
                writers[0].seal("again")
            return super().write(segment, samples)

    writers.append(make(Nested(), Clock()))
    writers[0].add(make_sample(0))
    writers[0].seal("drain")
    assert writers[0].pending == 0


def test_samples_added_while_a_seal_runs_go_into_the_next_segment() -> None:
    class Slow(MemoryStore):
        def write(self, segment: SegmentId, samples: Sequence[Sample]) -> SegmentInfo:
            if not self.segments:
                writer.add(make_sample(9))
            return super().write(segment, samples)

    store = Slow()
    writer = make(store, Clock())
    writer.add(make_sample(0))
    writer.seal("age")
    assert writer.pending == 1
    writer.seal("drain")
    assert [uids(store.segments[segment_id(seq)]) for seq in (0, 1)] == [[0], [9]]


def test_with_files_behind_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    store = FileSegmentStore(tmp_path_factory.mktemp("run"), "run-1")
    writer = make(store, Clock(), seal_samples=2)
    content = make_samples(range(3))
    for sample in content:
        writer.add(sample)
    while writer.pending:
        writer.seal("drain")
    assert [plain(s) for s in content] == [plain(s) for segment in store.list() for s in store.read(segment)]


class WriterMachine(RuleBasedStateMachine):
    """Any mixture of adding, sealing, full disk and time: order, completeness and one version per segment hold."""

    def __init__(self) -> None:
        super().__init__()
        self.store, self.clock, self.added = MemoryStore(), Clock(), 0
        self.writer = make(self.store, self.clock, seal_samples=4)

    @rule(version=st.integers(0, 2))
    def add(self, version: int) -> None:
        self.writer.add(make_sample(self.added, version=(0, version)))
        self.added += 1

    @rule(full=st.booleans(), seconds=st.floats(0, 3))
    def world(self, full: bool, seconds: float) -> None:
        self.store.full = full
        self.clock.now += seconds

    @precondition(lambda self: self.writer.pending > 0)
    @rule()
    def seal(self) -> None:
        try:
            self.writer.seal("test")
        except NoSpace:
            assert self.store.full

    @invariant()
    def nothing_is_lost_or_reordered(self) -> None:
        sealed = [sample for segment in self.store.list() for sample in self.store.segments[segment]]
        assert list(range(len(sealed))) == uids(sealed)
        assert self.added == len(sealed) + self.writer.pending
        assert [segment_id(seq) for seq in range(len(self.store.segments))] == self.store.list()

    @invariant()
    def segments_are_pure_and_bounded(self) -> None:
        for samples in self.store.segments.values():
            assert 1 <= len(samples) <= 4
            assert len({newest_version(sample) for sample in samples}) == 1

    @invariant()
    def due_means_full_or_old_or_tried(self) -> None:
        if self.writer.pending and self.writer.due() is None:
            assert self.writer.oldest_age() < 5.0


WriterMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
test_any_history_of_a_writer = WriterMachine.TestCase
