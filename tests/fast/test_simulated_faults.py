"""Deaths, hangs, full disks, stops and resumes under virtual time: nothing lost, nothing doubled, every wait ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sim_tools import config, events, verdicts

from hybridsched.errors import DeadlineExceeded, FaultError, Interrupted, RequeueRequested, RunStalled
from hybridsched.runtime import messages as m
from hybridsched.runtime.cycle_record import RunSummary
from hybridsched.simulation.clock import run_virtual
from hybridsched.simulation.world import SimulatedRun

Deed = Callable[[SimulatedRun], None]


def run_with(
    *deeds: tuple[float, Deed], overrides: tuple[str, ...] = (), **kwargs: Any
) -> tuple[SimulatedRun, RunSummary]:
    """Run; at each time do the deed."""
    run = SimulatedRun(config(*overrides), **kwargs)

    async def main() -> RunSummary:
        async def misfortune() -> None:
            for at, deed in deeds:
                await asyncio.sleep(max(0.0, at - run.clock.now()))
                deed(run)

        task = asyncio.ensure_future(misfortune())
        try:
            return await run.main()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    return run, run_virtual(main(), limit_s=1e6)


def kill(worker: str) -> Deed:
    return lambda run: run.workers[worker].kill("test")


def hang(worker: str) -> Deed:
    def deed(run: SimulatedRun) -> None:
        engine = run.workers[worker].engine
        assert engine is not None
        engine.fault("hang")

    return deed


@pytest.mark.parametrize("at", [3, 10, 31, 33, 35, 60, 61, 62])
def test_a_killed_standalone_replica_loses_nothing(at: float) -> None:
    run, summary = run_with((at, kill("standalone.0")))
    assert verdicts(run) == {"trained": 64}
    assert summary.reason == "end of data"


@pytest.mark.parametrize("at", [2, 3, 4, 5, 6, 7, 10, 25, 31, 33, 35, 60, 61, 62])
def test_a_killed_hybrid_loses_nothing_at_any_moment_of_a_switch(at: float) -> None:
    run, _summary = run_with((at, kill("hybrid.0")))
    assert verdicts(run) == {"trained": 64}


def test_a_hybrid_that_dies_when_told_to_hand_over_loses_nothing() -> None:
    """The lease counts for its new replica already, which never gets it."""
    dropped: list[Any] = []

    def die_at_the_handoff(run: SimulatedRun) -> None:
        handle = run.workers["hybrid.0"]
        deliver = handle.send

        def send(envelope: m.Envelope) -> None:
            if isinstance(envelope.body, m.Handoff) and envelope.body.dst != "hybrid.0":
                dropped.append(envelope.body)
                handle.kill("test")
            else:
                deliver(envelope)

        handle.send = send  # type: ignore[method-assign]

    run, summary = run_with((1, die_at_the_handoff))
    assert dropped
    assert verdicts(run) == {"trained": 64}
    assert summary.reason == "end of data"


def refuse(worker: str) -> Deed:
    """From now on every generation there ends with an error at once, as with weights that hold NaN."""

    def deed(run: SimulatedRun) -> None:
        async def generate(_request: Any) -> Any:
            raise FaultError("logits are not finite")

        run.workers[worker].engine.generate = generate  # type: ignore[union-attr, method-assign]

    return deed


def test_replicas_that_can_generate_nothing_stall_the_run_at_once() -> None:
    with pytest.raises(RunStalled, match="no replica can generate it: FaultError: logits are not finite"):
        run_with((12, refuse("standalone.0")), (12, refuse("hybrid.0")))


def test_a_dead_hybrid_is_lent_again_after_the_next_hand_over() -> None:
    run, summary = run_with((10, kill("hybrid.0")))
    deaths = [e.t for e in run.log.of("replica", "hybrid.0") if e.new == "failed"]
    later = [e for e in run.log.of("replica", "hybrid.0") if e.new == "ready" and e.t > deaths[0]]
    assert later
    assert summary.trained == 64


@pytest.mark.parametrize("at", [5, 7, 10, 25, 27, 31, 33, 35, 60, 61, 62])
def test_a_killed_trainer_rolls_back_to_the_checkpoint_on_a_new_lineage(at: float) -> None:
    run, summary = run_with((at, kill("trainer.0")), overrides=("trainer.save_freq=1",))
    assert verdicts(run) == {"trained": 64}
    assert summary.version.lineage == 1


def test_a_trainer_may_die_twice() -> None:
    run, summary = run_with((40, kill("trainer.0")), (80, kill("trainer.0")), overrides=("trainer.save_freq=2",))
    assert verdicts(run) == {"trained": 64}
    assert summary.version.lineage == 2


def test_one_dead_rank_takes_its_group_along() -> None:
    run, _summary = run_with((40, kill("trainer.1")), overrides=("trainer.n_gpus_per_node=2",))
    assert verdicts(run) == {"trained": 64}
    restarted = {e.entity for e in events(run, "worker", "exited")}
    assert {"trainer.0", "trainer.1"} <= restarted


def test_the_trainer_group_gives_up_after_the_configured_restarts() -> None:
    deeds = [(20.0 + 10 * i, kill("trainer.0")) for i in range(20)]
    with pytest.raises(FaultError, match="trainer_restarts"):
        run_with(*deeds, overrides=("faults.trainer_restarts=1", "faults.worker_restarts=50"))


@pytest.mark.parametrize("worker", ["standalone.0", "hybrid.0"])
def test_a_hanging_replica_is_noticed_by_its_progress_and_replaced(worker: str) -> None:
    run, _summary = run_with((40, hang(worker)))
    assert verdicts(run) == {"trained": 64}
    # While it generates, its progress stands still; while it sleeps, it does not answer the next hand-over.
    reasons = [e.reason for e in events(run, "worker", "exited")]
    assert any("no progress" in reason or "did not answer" in reason for reason in reasons), reasons


def test_both_replicas_dying_at_once() -> None:
    run, _summary = run_with((40, kill("standalone.0")), (40, kill("hybrid.0")))
    assert verdicts(run) == {"trained": 64}


@pytest.mark.parametrize("worker", ["hybrid.0", "trainer.0"])
def test_colocated_mode_survives_a_death(worker: str) -> None:
    run, _summary = run_with((40, kill(worker)), overrides=("rollout.nnodes=0",))
    assert verdicts(run) == {"trained": 64}


def test_a_full_disk_stops_admission_and_loses_nothing() -> None:
    def fill(run: SimulatedRun) -> None:
        run.disk.capacity = run.disk.used

    def empty(run: SimulatedRun) -> None:
        run.disk.capacity = float("inf")

    run, _summary = run_with((40, fill), (200, empty))
    assert verdicts(run) == {"trained": 64}
    assert events(run, "fault", "disk full")
    assert events(run, "fault", "space again")


def test_a_disk_that_stays_full_ends_the_run_with_the_reason() -> None:
    def fill(run: SimulatedRun) -> None:
        run.disk.capacity = run.disk.used

    with pytest.raises(DeadlineExceeded, match="bytes needed"):
        run_with((40, fill), overrides=("deadlines.collect_s=300",))


def test_a_damaged_segment_is_quarantined_and_its_prompts_are_issued_again() -> None:
    damaged: list[Any] = []

    def damage(run: SimulatedRun) -> None:
        if damaged:
            return
        rows = run.parts.intake.queue if run.parts else ()
        for row in rows:
            run.disk.damage(row.ref.segment)
            damaged.append(row.ref.segment)
            return

    run, _summary = run_with(*[(t, damage) for t in range(20, 60)])
    assert damaged
    assert verdicts(run) == {"trained": 64}
    assert events(run, "segment", "quarantined")


class Stop:
    """A stop flag."""

    kind = ""


def ask_to_stop(kind: str) -> Deed:
    def deed(run: SimulatedRun) -> None:
        run.stop.kind = kind

    return deed


@pytest.mark.parametrize("at", [3, 8, 20, 33, 45, 61, 90, 150])
@pytest.mark.parametrize(("kind", "error"), [("stop", Interrupted), ("requeue", RequeueRequested)])
def test_a_stopped_run_resumes_without_gap_or_repeat(at: float, kind: str, error: type[Exception]) -> None:
    run = SimulatedRun(config())
    run.stop = Stop()

    async def main() -> None:
        async def later() -> None:
            await asyncio.sleep(at)
            run.stop.kind = kind

        task = asyncio.ensure_future(later())
        try:
            await run.main()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    with pytest.raises(error):
        run_virtual(main(), limit_s=1e6)
    assert run.parts is not None
    stopped_at = run.parts.version.number
    again = SimulatedRun(config(), disk=run.disk, checkpoints=run.checkpoints, start=1)
    summary = again.run(limit_s=1e6, resume=True)
    assert verdicts(again) == {"trained": 64}
    assert summary.version.number >= stopped_at


@pytest.mark.parametrize("at", [20, 33, 61, 90, 150])
def test_a_crashed_run_resumes_from_its_last_checkpoint(at: float) -> None:
    run = SimulatedRun(config("trainer.save_freq=2"))

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(at):
                await run.main()

    run_virtual(main(), limit_s=1e6)
    again = SimulatedRun(config("trainer.save_freq=2"), disk=run.disk, checkpoints=run.checkpoints, start=1)
    again.run(limit_s=1e6, resume=True)
    assert verdicts(again) == {"trained": 64}
