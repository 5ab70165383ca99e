"""Segments, logs, checkpoints and run log in memory: the files' semantics, and the faults a disk is told to have."""

from __future__ import annotations

import asyncio
import enum
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridsched.config.schema import EmulatedConfig
from hybridsched.errors import NoSpace, QueueError, RunFolderError, SegmentDamaged
from hybridsched.model import FinishReason, Response, RowRef, Sample, SegmentId, VersionRun, WeightVersion
from hybridsched.runlog.base import EventSink
from hybridsched.runtime.checkpoints import CheckpointStore, ControllerState, LogPosition
from hybridsched.sample_queue.base import ChainedLog, SegmentStore
from hybridsched.sample_queue.log import FileChainedLog
from hybridsched.sample_queue.store import FileSegmentStore
from hybridsched.simulation.checkpoints import MemoryCheckpointStore
from hybridsched.simulation.clock import VirtualClock, run_virtual
from hybridsched.simulation.runlog import MemoryRunLog, canonical
from hybridsched.simulation.storage import (
    MemoryChainedLog,
    MemoryDisk,
    MemorySegmentStore,
    newest_incarnation,
    payload_bytes,
)
from hybridsched.trainers.base import TrainerGroup
from hybridsched.trainers.emulated import EmulatedTrainer


def segment(seq: int, producer: str = "standalone.0") -> SegmentId:
    return SegmentId(producer, "i1", seq)


def sample(uid: int, rewards: tuple[float | None, ...] = (1.0, None, 0.0)) -> Sample:
    runs = (VersionRun(WeightVersion(0, 3), 0, 2), VersionRun(WeightVersion(1, 2), 2, 5))
    responses = tuple(
        Response(np.arange(5, dtype=np.int32), np.zeros(5, np.float32), runs[: 1 + i % 2], FinishReason.STOP, reward=r)
        for i, r in enumerate(rewards)
    )
    return Sample(uid, f"p{uid}", np.arange(7, dtype=np.int32), responses)


class Time:
    def __init__(self) -> None:
        self.t = 0.0

    def __call__(self) -> float:
        return self.t


# --- segments -----------------------------------------------------------------------------------------------------


def test_what_is_sealed_is_read_back_all_or_by_row() -> None:
    store: SegmentStore = MemorySegmentStore(MemoryDisk())
    samples = [sample(uid) for uid in range(4)]
    info = store.write(segment(0), samples)
    assert store.read(segment(0)) == samples
    assert store.read(segment(0), [3, 1, 3]) == [samples[3], samples[1], samples[3]]
    assert store.info(segment(0)) == info
    assert info.n_bytes == payload_bytes(samples)


def test_rows_are_announced_as_the_file_store_announces_them(tmp_path: Path) -> None:
    samples = [sample(0), sample(1, (None, None)), Sample(2, "p2", np.arange(3, dtype=np.int32), (Response.empty(),))]
    there = FileSegmentStore(tmp_path, "run").write(segment(0), samples).rows
    here = MemorySegmentStore(MemoryDisk()).write(segment(0), samples).rows
    assert [repr(row) for row in here] == [repr(row) for row in there]  # repr: NaN equals NaN
    assert here[0].ref == RowRef(segment(0), 0)


def test_a_name_is_used_once_and_the_same_content_again_is_a_repeat() -> None:
    disk = MemoryDisk()
    store = MemorySegmentStore(disk)
    samples = [sample(0)]
    info = store.write(segment(0), samples)
    used = disk.used
    assert (store.write(segment(0), samples), disk.used) == (info, used)
    with pytest.raises(QueueError, match="name is taken"):
        store.write(segment(0), [sample(1)])


def test_an_empty_segment_and_rows_outside_are_refused() -> None:
    store = MemorySegmentStore(MemoryDisk())
    with pytest.raises(QueueError, match="without samples"):
        store.write(segment(0), [])
    store.write(segment(0), [sample(0)])
    with pytest.raises(QueueError, match=r"rows \[1, -1\] do not exist"):
        store.read(segment(0), [0, 1, -1])


def test_a_full_disk_raises_no_space_leaves_nothing_and_works_again_when_space_returns() -> None:
    samples = [sample(0)]
    size = payload_bytes(samples)
    disk = MemoryDisk(capacity=2 * size - 1)
    store = MemorySegmentStore(disk)
    store.write(segment(0), samples)
    with pytest.raises(NoSpace, match=f"{size} bytes needed, {size - 1} free"):
        store.write(segment(1), samples)
    assert (store.list(), store.free_bytes()) == ([segment(0)], size - 1)
    assert store.remove([segment(0), segment(9)]) == size
    store.write(segment(1), samples)
    assert store.list() == [segment(1)]


def test_others_see_a_segment_late_its_writer_at_once() -> None:
    time = Time()
    disk = MemoryDisk(time, listing_delay_s=30, open_delay_s=10)
    writer, reader = MemorySegmentStore(disk), MemorySegmentStore(disk)
    writer.write(segment(1), [sample(0)])
    assert (writer.list(), reader.list(), len(writer.read(segment(1)))) == ([segment(1)], [], 1)
    with pytest.raises(QueueError, match="not there \\(yet\\)"):
        reader.read(segment(1))
    time.t = 10
    assert (len(reader.read(segment(1))), reader.list()) == (1, [])
    time.t = 30
    assert reader.list() == [segment(1)]


def test_segments_are_listed_sorted() -> None:
    store = MemorySegmentStore(MemoryDisk())
    names = [segment(2, "b"), segment(10, "a"), segment(9, "a")]
    for name in names:
        store.write(name, [sample(0)])
    assert store.list() == sorted(names)


def test_damage_is_noticed_by_readers_and_quarantined_with_its_first_reason() -> None:
    disk = MemoryDisk()
    store = MemorySegmentStore(disk)
    store.write(segment(0), [sample(0)])
    disk.damage(segment(0), "torn")
    for read in (store.read, store.info):
        with pytest.raises(SegmentDamaged, match="torn"):
            read(segment(0))
    assert store.list() == [segment(0)]
    store.quarantine(segment(0), "torn")
    store.quarantine(segment(0), "again")
    assert (store.list(), store.quarantined()) == ([], {segment(0): "torn"})
    with pytest.raises(QueueError, match="not there"):
        store.read(segment(0))
    with pytest.raises(QueueError, match="cannot be moved"):
        store.quarantine(segment(5), "never was")


def test_a_lost_segment_is_gone_and_frees_its_bytes() -> None:
    disk = MemoryDisk(capacity=10**6)
    store = MemorySegmentStore(disk)
    store.write(segment(0), [sample(0)])
    disk.lose(segment(0))
    assert (store.list(), store.free_bytes()) == ([], 10**6)
    with pytest.raises(QueueError, match="not on the simulated disk"):
        disk.damage(segment(0))


# --- logs ---------------------------------------------------------------------------------------------------------


def entries(*numbers: int) -> list[dict[str, Any]]:
    return [{"n": n} for n in numbers]


def test_a_log_chains_at_forks_and_leaves_superseded_lines_out() -> None:
    disk = MemoryDisk()
    first: ChainedLog = MemoryChainedLog(disk, "accept", "a")
    assert [first.append(entries(0, 1)), first.append(entries(2)), first.append([])] == [2, 3, 3]
    second = MemoryChainedLog(disk, "accept", "b", ("a", 2))
    assert (second.position, second.append(entries(20, 30))) == (2, 4)
    third = MemoryChainedLog(disk, "accept", "c", ("b", 3))
    assert (third.entries(), third.entries(1), third.entries(9)) == (entries(0, 1, 20), entries(1, 20), [])
    assert first.entries() == entries(0, 1, 2)
    assert (newest_incarnation(disk, "accept"), newest_incarnation(disk, "ledger")) == ("c", None)


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 12)),
        min_size=1,
        max_size=5,
    )
)
def test_any_history_of_forks_reads_like_the_file_log(history: list[tuple[int, list[int], int]]) -> None:
    import tempfile

    disk = MemoryDisk()
    with tempfile.TemporaryDirectory() as folder:
        number = 0
        for i, (back, appends, start) in enumerate(history):
            parent = None
            if i:
                name = str(max(0, i - 1 - back))
                parent = (name, newest_position(disk, name) // 2)
            logs = (
                MemoryChainedLog(disk, "accept", str(i), parent),
                FileChainedLog(Path(folder), "accept", str(i), parent, "process-crash"),
            )
            for size in appends:
                batch = entries(*range(number, number + size))
                number += size
                assert len({log.append(batch) for log in logs}) == 1
            assert logs[0].entries(start) == logs[1].entries(start)
            assert logs[0].position == logs[1].position
            logs[1].close()


def newest_position(disk: MemoryDisk, incarnation: str) -> int:
    file = disk.logs["accept"][incarnation]
    return file.parent_position + file.n_entries


def test_what_a_log_gives_back_is_a_copy() -> None:
    log = MemoryChainedLog(MemoryDisk(), "accept", "a")
    entry = {"list": [1]}
    log.append([entry])
    entry["list"].append(2)
    log.entries()[0]["list"].append(3)
    assert log.entries() == [{"list": [1]}]


def test_logs_refuse_what_files_refuse() -> None:
    disk = MemoryDisk()
    MemoryChainedLog(disk, "accept", "a").append(entries(0))
    with pytest.raises(QueueError, match="exists already"):
        MemoryChainedLog(disk, "accept", "a")
    with pytest.raises(QueueError, match="at entry 2, it has 1"):
        MemoryChainedLog(disk, "accept", "b", ("a", 2))
    with pytest.raises(QueueError, match="has none"):
        MemoryChainedLog(disk, "accept", "c", ("x", 0))
    assert list(disk.logs["accept"]) == ["a"]


def test_a_torn_last_line_is_ignored_as_a_whole() -> None:
    disk = MemoryDisk()
    log = MemoryChainedLog(disk, "accept", "a")
    log.append(entries(0))
    used = disk.used
    log.append(entries(1, 2))
    disk.tear("accept", "a")
    assert (log.entries(), log.position, disk.used) == (entries(0), 1, used)


def test_a_log_on_a_full_disk_appends_nothing() -> None:
    disk = MemoryDisk(capacity=20)
    log = MemoryChainedLog(disk, "accept", "a")
    log.append(entries(0))
    with pytest.raises(NoSpace, match="accept log"):
        log.append(entries(1, 2))
    assert (log.position, log.entries()) == (1, entries(0))


# --- checkpoints --------------------------------------------------------------------------------------------------


def state(number: int) -> ControllerState:
    at = LogPosition("a", 3)
    return ControllerState(
        "run", WeightVersion(1, number), {0: 0, 1: 2}, 4, 8, 5, [7], at, at, "default", {"ratio": [0.3]}, clock_s=1.5
    )


def saved(store: MemoryCheckpointStore, number: int) -> str:
    folder = store.begin(WeightVersion(1, number))
    trainer = EmulatedTrainer(EmulatedConfig(), checkpoints=store.trainer_parts)
    trainer.start(TrainerGroup(0, 1, "", 1.0))
    trainer.save_checkpoint(Path(folder))
    return folder


def test_a_checkpoint_is_listed_when_committed_and_restores_equal_but_not_shared() -> None:
    store = MemoryCheckpointStore(MemoryDisk())
    as_protocol: CheckpointStore = store
    folder = saved(store, 3)
    assert as_protocol.complete() == []
    original = state(3)
    ref = as_protocol.commit(folder, original)
    assert (ref.version, list(as_protocol.complete())) == (WeightVersion(1, 3), [ref])
    original.policy_state["ratio"].append(9)
    assert as_protocol.load(folder) == state(3)


def test_prune_keeps_the_newest_and_frees_space() -> None:
    disk = MemoryDisk(capacity=10**6)
    store = MemoryCheckpointStore(disk)
    refs = [store.commit(saved(store, n), state(n)) for n in range(3)]
    assert store.prune(2) == refs[1:]
    with pytest.raises(RunFolderError, match="no complete checkpoint"):
        store.load(refs[0].folder)
    store.prune(0)
    assert (store.trainer_parts, disk.used) == ({}, 0)


def test_an_incomplete_checkpoint_is_refused_and_a_full_disk_keeps_the_old() -> None:
    disk = MemoryDisk()
    store = MemoryCheckpointStore(disk)
    ref = store.commit(saved(store, 0), state(0))
    with pytest.raises(QueueError, match="trainer saved nothing"):
        store.commit(store.begin(WeightVersion(1, 1)), state(1))
    with pytest.raises(QueueError, match="not begun here"):
        store.commit(ref.folder, state(0))
    folder = saved(store, 2)
    disk.capacity = disk.used
    with pytest.raises(NoSpace):
        store.commit(folder, state(2))
    store.discard(folder)
    store.discard(ref.folder)
    assert (list(store.complete()), list(store.trainer_parts)) == ([ref], [ref.folder])


# --- run log ------------------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"


def test_the_dump_is_canonical_and_in_order() -> None:
    async def main() -> str:
        log = MemoryRunLog(VirtualClock())
        sink: EventSink = log
        sink.event("replica", "hybrid.0", old="ASLEEP", new="SYNCING", reason="lend", zeta=0.1 + 0.2, alpha={3, 1})
        await asyncio.sleep(1.5)
        sink.metrics(0, {"b": np.float32(0.5), "a": math.nan})
        sink.event("fault", "disk")
        return log.dump()

    assert run_virtual(main()) == (
        '{"detail":{"alpha":[1,3],"zeta":0.30000000000000004},"entity":"hybrid.0","kind":"replica","new":"SYNCING",'
        '"old":"ASLEEP","reason":"lend","t":0.0}\n'
        '{"metrics":0,"t":1.5,"values":{"a":NaN,"b":0.5}}\n'
        '{"entity":"disk","kind":"fault","t":1.5}\n'
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (WeightVersion(1, 2), [1, 2]),
        (Colour.RED, "red"),
        (np.float64(0.5), 0.5),
        (np.arange(3), [0, 1, 2]),
        ({1: {"x": (True, None)}}, {"1": {"x": [True, None]}}),
        ({"b", "a"}, ["a", "b"]),
        (NoSpace("full"), "NoSpace: full"),
        (object(), "<object>"),
    ],
)
def test_details_become_json_without_addresses(value: Any, expected: Any) -> None:
    assert canonical(value) == expected


def test_an_event_keeps_what_it_was_told_then() -> None:
    async def main() -> list[Any]:
        log = MemoryRunLog(VirtualClock())
        seen: list[str] = []
        log.observe(lambda event: seen.append(event.kind))
        loads = [1, 2]
        log.event("decision", "policy", loads=loads)
        loads.append(3)
        log.event("switch", "policy")
        log.event("decision", "other")
        return [
            log.events[0].detail,
            seen,
            [e.number for e in log.of("decision")],
            [e.number for e in log.of(entity="policy")],
            [e.number for e in log.of("decision", "policy")],
        ]

    assert run_virtual(main()) == [{"loads": [1, 2]}, ["decision", "switch", "decision"], [0, 2], [0, 1], [0]]


def test_a_restored_state_differs_when_the_saved_one_did() -> None:
    store = MemoryCheckpointStore(MemoryDisk())
    folder = saved(store, 3)
    store.commit(folder, replace(state(3), optimizer_steps=9))
    assert store.load(folder) != state(3)
