"""The queue after a rollback: order, what has to be entered in the accept log again, and what came meanwhile."""

from __future__ import annotations

import asyncio

from hybridsched.model import RowRef, SampleRow, SegmentId, Verdict, WeightVersion
from hybridsched.runtime.clock import RealClock
from hybridsched.runtime.frontier import Frontier
from hybridsched.runtime.intake import Intake
from hybridsched.runtime.signal import Signal
from hybridsched.sample_queue.ledger import accepted_ref, verify_chain
from hybridsched.simulation.runlog import MemoryRunLog
from hybridsched.simulation.storage import MemoryChainedLog, MemoryDisk, MemorySegmentStore, read_chain

V0 = WeightVersion(0, 0)


def row(uid: int) -> SampleRow:
    """The only row of segment ``uid``."""
    ref = RowRef(SegmentId("standalone.0", "a", uid), 0)
    return SampleRow(uid, f"p{uid}", ref, 10, V0, V0, 0.5, 4)


def make_intake(disk: MemoryDisk) -> Intake:
    async def inline(function, *arguments):
        return function(*arguments)

    return Intake(
        MemorySegmentStore(disk),
        MemoryChainedLog(disk, "accept", "one"),
        MemoryChainedLog(disk, "ledger", "one"),
        Frontier(),
        inline,
        MemoryRunLog(RealClock()),
        Signal(),
        describe=lambda uid: (f"p{uid}", 0),
        when=lambda: (V0, 0),
    )


async def roll_back(intake: Intake, disk: MemoryDisk, accepted: int, listed: list[int]) -> None:
    """To a checkpoint with so many accepted rows and no verdict; ``listed``: segments seen when the disk was read."""
    order = [accepted_ref(entry)[1] for entry in read_chain(disk, "accept", "one")]
    intake.accept_log = MemoryChainedLog(disk, "accept", "two", ("one", accepted))
    intake.ledger = MemoryChainedLog(disk, "ledger", "two", ("one", 0))
    intake.frontier = Frontier()
    intake.restore({row(uid).ref.segment: [row(uid)] for uid in listed}, order, accepted)
    scribe = asyncio.ensure_future(intake.scribe(1.0))
    await intake.settled(10.0, 10.0)
    scribe.cancel()


async def after_rollback(accepted: int, listed: list[int]) -> tuple[Intake, MemoryDisk]:
    disk = MemoryDisk()
    intake = make_intake(disk)
    scribe = asyncio.ensure_future(intake.scribe(1.0))
    for uid in (2, 0, 1, 3):
        intake.on_sealed(row(uid).ref.segment, [row(uid)])
        await intake.settled(10.0, 10.0)
    scribe.cancel()
    await roll_back(intake, disk, accepted, listed)
    return intake, disk


def accepted_uids(disk: MemoryDisk) -> list[int]:
    return [accepted_ref(entry)[0] for entry in read_chain(disk, "accept", "two")]


def test_rows_accepted_behind_the_checkpoint_are_entered_again_in_their_order() -> None:
    intake, disk = asyncio.run(after_rollback(2, [0, 1, 2, 3]))

    assert [2, 0, 1, 3] == [r.sample_uid for r in intake.queue]
    assert [2, 0, 1, 3] == accepted_uids(disk)


def test_everything_trained_after_a_rollback_was_accepted_along_its_chain() -> None:
    async def main() -> MemoryDisk:
        intake, disk = await after_rollback(1, [0, 1, 2, 3])
        for r in intake.take(4):
            intake.verdict(r.sample_uid, Verdict.TRAINED, row=r)
        scribe = asyncio.ensure_future(intake.scribe(1.0))
        await intake.settled(10.0, 10.0)
        scribe.cancel()
        return disk

    disk = asyncio.run(main())
    report = verify_chain(read_chain(disk, "ledger", "two"), accepted=read_chain(disk, "accept", "two"), complete=True)
    assert () == report.problems


def test_a_segment_sealed_while_the_disk_was_read_stays_in_the_queue() -> None:
    intake, disk = asyncio.run(after_rollback(2, [0, 1, 2]))

    assert [2, 0, 1, 3] == [r.sample_uid for r in intake.queue]
    assert [2, 0, 1, 3] == accepted_uids(disk)


def test_a_verdict_of_the_abandoned_history_does_not_reach_the_new_ledger() -> None:
    async def main() -> MemoryDisk:
        disk = MemoryDisk()
        intake = make_intake(disk)
        intake.verdict(7, Verdict.FILTERED)  # and the scribe has not come to it
        await roll_back(intake, disk, 0, [])
        return disk

    assert [] == read_chain(asyncio.run(main()), "ledger", "two")
