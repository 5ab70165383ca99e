"""Deterministic simulation: short virtual runs with faults drawn from a seed, and the invariants of every one of them.

Processes die, hang and slow down, disks fill, segments rot, and the network repeats messages, delays announcements and
loses them. Losing anything else is more than MPI does: a run with such a loss may end with an error, within its
deadlines, and the next start has to go on where it was.

python tests/fast/misfortune.py 0 5000      # seeds 0..4999; a failing seed prints the command that replays it
python tests/fast/misfortune.py 17          # one seed, with its event log
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sim_tools import config, verdicts

from hybridsched.errors import FaultError, WorkerDied
from hybridsched.model import Tenant
from hybridsched.runtime import messages as m
from hybridsched.runtime.cycle_record import RunSummary
from hybridsched.scheduling.lifecycle import ReplicaState
from hybridsched.simulation.clock import run_virtual
from hybridsched.simulation.world import SimulatedRun

SAMPLES = 64
LIMIT_S = 1e6


@dataclass(frozen=True)
class Deed:
    """One misfortune."""

    at: float
    kind: str
    luck: float  #: in [0, 1): which worker, how much


def overrides(draw: random.Random) -> list[str]:
    """A random small cluster and configuration."""
    partial = draw.choice(["true", "true", "false"])
    modes = ["abort", "abort", "keep", "wait"] if partial == "true" else ["abort", "wait"]
    return [
        f"trainer.save_freq={draw.choice([1, 2, 3])}",
        f"trainer.n_gpus_per_node={draw.choice([1, 1, 2, 3])}",
        f"trainer.test_freq={draw.choice([-1, 2])}",
        f"rollout.nnodes={draw.choice([0, 1, 1, 2])}",
        f"rollout.n_gpus_per_node={draw.choice([1, 2])}",
        f"rollout.sync_mode={draw.choice(modes)}",
        f"async_training.partial_rollout={partial}",
        f"async_training.dynamic_schedule_policy={draw.choice(['default', 'fixed_ratio', 'static_fully_async'])}",
        f"async_training.max_off_policy_threshold={draw.choice(['null', '1'])}",
        f"algorithm.filter_groups.enable={draw.choice(['true', 'false'])}",
        f"emulated.reward_failed_fraction={draw.choice([0, 0.1])}",
        "emulated.reward_equal_fraction=0.2",
        "faults.worker_restarts=50",
        "faults.trainer_restarts=50",
        "deadlines.decode_s=60",
        "deadlines.sync_s=100",
        "deadlines.bucket_s=50",
    ]


def deeds(draw: random.Random) -> list[Deed]:
    """Up to eight misfortunes within the run."""
    kinds = ["kill", "kill", "kill", "hang", "full", "slow", "damage"]
    made = [Deed(draw.uniform(4.0, 400.0), draw.choice(kinds), draw.random()) for _ in range(draw.randint(1, 8))]
    return sorted(made, key=lambda deed: deed.at)


#: Share lost at most of messages whose loss a run survives by itself: of announcements (the disk is listed) half, of
#: beats fewer (the next one comes; a node that is silent for long is taken for lost, rightly).
SPARE = {m.SegmentSealed: 1.0, m.Beat: 1.0, m.AgentBeat: 0.1}


class Weather:
    """What the network does to messages, drawn from the seed."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(f"weather {seed}")
        self.repeated = self._draw.choice([0.0, 0.0, 0.02, 0.2])
        self.late = self._draw.choice([0.0, 0.0, 0.3])
        self.lost = self._draw.choice([0.0, 0.0, 0.1, 0.5])
        #: The so many-th message that is not spare is lost, whatever it is.
        self.loses = self._draw.randint(1, 1500) if self._draw.random() < 0.25 else 0
        self.took = ""

    def __call__(self, src: int, dst: int, envelope: m.Envelope) -> Sequence[float]:
        """Delays of the copies that arrive."""
        spare = SPARE.get(type(envelope.body))
        if spare is not None and self._draw.random() < spare * self.lost:
            return ()
        if spare is None and self.loses:
            self.loses -= 1
            if not self.loses:
                self.took = f"{type(envelope.body).__name__} from {envelope.src} to {envelope.dst}"
                return ()
        copies = [0.0]
        if isinstance(envelope.body, m.SegmentSealed) and self._draw.random() < self.late:
            copies = [self._draw.uniform(0.0, 200.0)]
        if self._draw.random() < self.repeated:
            copies.append(copies[0] + self._draw.choice([0.0, 0.0, self._draw.uniform(0.0, 30.0)]))
        return copies


def do(run: SimulatedRun, deed: Deed) -> None:
    """Let it happen."""
    alive = [worker for worker in run.workers.values() if worker.alive]
    if not alive:
        return
    victim = alive[int(deed.luck * len(alive))]
    if deed.kind == "kill":
        victim.kill("misfortune")
    elif deed.kind in ("hang", "slow") and victim.engine is not None and victim.worker.started:  # type: ignore[union-attr]
        victim.engine.fault("hang" if deed.kind == "hang" else "slow", 0.3)
    elif deed.kind == "full":
        run.disk.capacity = run.disk.used + int(deed.luck * 3000)
        asyncio.get_running_loop().call_later(50 + 50 * deed.luck, setattr, run.disk, "capacity", float("inf"))
    elif deed.kind == "damage" and run.parts is not None and run.parts.intake.queue:
        queued = list(run.parts.intake.queue)
        run.disk.damage(queued[int(deed.luck * len(queued))].ref.segment)


def watch(run: SimulatedRun) -> None:
    """Invariants that hold after every event."""

    def look(event: object) -> None:
        parts = run.parts
        if parts is None or getattr(event, "kind", "") not in ("lease", "replica", "tenancy", "segment", "sample"):
            return
        ready = set(parts.pool.ready())
        for name, load in parts.balancer.loads().items():
            if load.admitted:
                assert name in ready, f"{name} may be chosen but is {parts.pool[name].state}"
        training = {e.entity for e in run.log.events[-1:] if e.kind == "activity" and e.new == "train"}
        for worker in training:
            assert parts.resources.tenants()[worker] is Tenant.TRAINER

    run.log.observe(look)


def audit(run: SimulatedRun) -> None:
    """Invariants at the end of every cycle."""
    parts = run.parts
    assert parts is not None
    parts.window.validate()
    assert parts.rollouter.in_flight() == parts.window.in_flight
    assert parts.resources.is_active or all(t is Tenant.TRAINER for t in parts.resources.tenants().values())
    hybrids = [n for n in parts.pool.names() if n.startswith("hybrid") and parts.pool[n].state is ReplicaState.READY]
    assert parts.resources.is_active or not hybrids


def play(seed: int) -> tuple[SimulatedRun, str]:
    """One run; returns it and how it ended. Raises what must not happen."""
    draw = random.Random(seed)
    settings, plan, weather = config(*overrides(draw)), deeds(draw), Weather(seed)
    run = SimulatedRun(settings, validation_prompts=5, on_step=audit, network_faults=weather)
    watch(run)

    async def main() -> RunSummary:
        async def fate() -> None:
            for deed in plan:
                await asyncio.sleep(max(0.0, deed.at - run.clock.now()))
                do(run, deed)

        task = asyncio.ensure_future(fate())
        try:
            return await run.main()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    try:
        summary = run_virtual(main(), limit_s=LIMIT_S)
    except FaultError as error:
        if not weather.took:
            # A trainer that dies before checkpoint 0 ends the attempt; the launch loop starts it again.
            assert isinstance(error, WorkerDied) and not run.checkpoints.complete(), error
            return run, f"before the first checkpoint: {error}"
        run = SimulatedRun(settings, disk=run.disk, checkpoints=run.checkpoints, start=1, on_step=audit)
        summary = run.run(limit_s=LIMIT_S, resume=True)
    counts = verdicts(run)
    assert sum(counts.values()) == SAMPLES, counts
    lost = f", {weather.took} was lost" if weather.took else ""
    return run, f"{summary.cycles} cycles, version {summary.version}, {dict(counts)}{lost}"


def main(arguments: list[str]) -> int:
    """Command line."""
    first = int(arguments[0]) if arguments else 0
    last = int(arguments[1]) if len(arguments) > 1 else first + 1
    failed = 0
    report: Callable[[str], None] = print
    for seed in range(first, last):
        try:
            run, ending = play(seed)
        except Exception as error:  # any failure of any seed is reported with its replay command
            failed += 1
            report(f"seed {seed}: {type(error).__name__}: {error}\n  replay: python tests/fast/misfortune.py {seed}")
            if last == first + 1:
                raise
            continue
        if last == first + 1:
            report(run.log.dump())
            report(ending)
    report(f"{last - first - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
