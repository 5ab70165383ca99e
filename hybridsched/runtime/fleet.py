"""The processes of a run as the controller knows them: who is up, who died, and bringing engines and trainers to life.

Owns: worker incarnations, liveness of agents, the trainer group's start, and what a death means: a replica is cut out
and its work starts again elsewhere; a trainer worker takes its whole group down (`trainer_down`); an agent, or a
worker out of restarts, ends the run. Does not decide about training or lending.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridsched.errors import AgentSilent, DeadlineExceeded, FaultError, WorkerDied
from hybridsched.model import ReplicaKind
from hybridsched.runlog.base import EventSink
from hybridsched.runtime import messages as m
from hybridsched.runtime.clock import Clock
from hybridsched.runtime.endpoint import Endpoint
from hybridsched.runtime.gather import all_or_raise
from hybridsched.runtime.plan import RunPlan
from hybridsched.runtime.pool import Pool
from hybridsched.runtime.resource_controller import DynamicResourceController
from hybridsched.runtime.signal import Signal
from hybridsched.scheduling.lifecycle import ReplicaEvent, ReplicaState

LossHandler = Callable[[str, str, str], None]  #: (replica, incarnation, reason)


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Bounds of starting and liveness, in seconds."""

    start_s: float
    silence_s: float
    beat_s: float
    trainer_restarts: int


class Fleet:
    """All agents and workers."""

    def __init__(
        self,
        endpoint: Endpoint,
        plan: RunPlan,
        pool: Pool,
        clock: Clock,
        log: EventSink,
        settings: FleetSettings,
        changed: Signal,
        on_replica_lost: LossHandler,
    ) -> None:
        self._endpoint = endpoint
        self._plan = plan
        self._pool = pool
        self._clock = clock
        self._log = log
        self._settings = settings
        self._changed = changed
        self._on_replica_lost = on_replica_lost
        self.resources: DynamicResourceController | None = None
        self.up: dict[str, str] = {}
        self._agents: dict[int, float] = {}
        self.trainer_down: str | None = None
        self.trainer_restarts = 0
        self.fatal: BaseException | None = None
        self._engines_started = False
        self.deaths = 0
        endpoint.on(m.AgentUp, self._on_agent_up)
        endpoint.on(m.AgentBeat, self._on_agent_beat)
        endpoint.on(m.WorkerUp, self._on_worker_up)
        endpoint.on(m.WorkerExited, self._on_worker_exited)

    # --- being there ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what ends the run, or that the trainer group is down."""
        if self.fatal is not None:
            raise self.fatal
        if self.trainer_down is not None:
            raise WorkerDied(f"trainer group: {self.trainer_down}")

    async def wait_up(self, workers: Sequence[str], what: str) -> None:
        """Wait until these workers are connected. Raises DeadlineExceeded naming the missing ones."""
        deadline = self._clock.now() + self._settings.start_s
        while missing := [w for w in workers if w not in self.up]:
            if self.fatal is not None:
                raise self.fatal
            left = deadline - self._clock.now()
            if left <= 0 or not await self._changed.wait(left):
                silent = [r for r in range(self._plan.world_size) if r not in self._agents]
                raise DeadlineExceeded(
                    f"{what}: {', '.join(missing)} not up after {self._settings.start_s:g} s (deadlines.start_s); "
                    f"agents not heard of: {silent or 'none'}; look into the logs folder of the attempt"
                )

    async def watch(self) -> None:
        """Beat to the agents and notice silent ones, until cancelled."""
        while True:
            await asyncio.sleep(self._settings.beat_s)
            for rank in range(self._plan.world_size):
                self._endpoint.tell(f"agent.{rank}", m.AgentBeat(0))
            now = self._clock.now()
            for rank, seen in self._agents.items():
                if now - seen > self._settings.silence_s and self.fatal is None:
                    silent = tuple(r for r, last in self._agents.items() if now - last > self._settings.silence_s)
                    self._die(
                        AgentSilent(
                            f"agent {rank} has been silent for {now - seen:.0f} s (deadlines.agent_silence_s): "
                            "its node is lost; the step ends and the launch loop starts it again",
                            ranks=silent,
                        )
                    )

    def kill(self, worker: str, reason: str) -> None:
        """End a worker's process; its exit is reported as usual."""
        self._endpoint.tell(f"agent.{self._plan.rank_of(worker)}", m.KillWorker(worker, reason))

    # --- starting -------------------------------------------------------------------------------------------------

    async def start_engines(self) -> None:
        """Standalone replicas load; hybrids load and let go of the GPU, before any trainer allocates."""
        names = self._pool.names()
        await self.wait_up(names, "starting replicas")
        hybrids = self._pool.names(ReplicaKind.HYBRID)
        await asyncio.gather(*(self._start_standalone(n) for n in self._pool.names(ReplicaKind.STANDALONE)))
        assert self.resources is not None
        await asyncio.gather(*(self.resources.load_and_sleep(n) for n in hybrids))
        awake = [n for n in hybrids if self._pool[n].state is not ReplicaState.ASLEEP]
        if awake and len(awake) == len(names):
            raise FaultError(f"no replica came up; look into the logs of {', '.join(awake)}")
        self._engines_started = True

    async def _start_standalone(self, name: str) -> None:
        try:
            await self._endpoint.call(
                name, m.StartEngine(), m.MemoryReport, deadline_s=self._settings.start_s, what="starting the engine"
            )
        except WorkerDied as error:
            self._log.event("fault", name, new="engine did not start", reason=str(error))
            return
        self._pool.advance(name, ReplicaEvent.STARTED)

    async def start_trainers(self, checkpoint: str | None) -> None:
        """Form the trainer group; with a checkpoint, restore from it. Raises what a rank raised."""
        ranks = self._plan.of_kind("trainer")
        await self.wait_up([w.worker for w in ranks], "starting the trainer")
        bound = self._settings.start_s
        meeting = await self._endpoint.call(
            ranks[0].worker, m.OpenRendezvous(), m.Rendezvous, deadline_s=bound, what="opening the trainer group"
        )
        calls = [
            self._endpoint.call(
                w.worker,
                m.StartTrainer(w.index, len(ranks), meeting.address, checkpoint),
                m.MemoryReport,
                deadline_s=bound,
                what="starting the trainer",
            )
            for w in ranks
        ]
        await all_or_raise(calls)
        for w in ranks:
            self._log.event("activity", w.worker, new="wait")

    async def restart_trainers(self, checkpoint: str) -> None:
        """After a trainer worker died: end the rest of the group, wait for new processes, restore."""
        reason = self.trainer_down or "asked for"
        self.trainer_restarts += 1
        if self.trainer_restarts > self._settings.trainer_restarts:
            self._die(
                FaultError(
                    f"the trainer group went down {self.trainer_restarts} times (faults.trainer_restarts is "
                    f"{self._settings.trainer_restarts}); last: {reason}"
                )
            )
        if self.fatal is not None:
            raise self.fatal
        names = [w.worker for w in self._plan.of_kind("trainer")]
        old = {name: self.up[name] for name in names if name in self.up}
        fresh = [n for n in names if n in self.up and n == (self._died_last or "")]
        for name in names:
            if name in old and name not in fresh:
                self.kill(name, f"trainer group restarts: {reason}")
        await self._wait_replaced({n: i for n, i in old.items() if n not in fresh})
        self.trainer_down = None
        await self.start_trainers(checkpoint)

    async def _wait_replaced(self, old: dict[str, str]) -> None:
        deadline = self._clock.now() + self._settings.start_s
        while any(self.up.get(name) == incarnation for name, incarnation in old.items()):
            left = deadline - self._clock.now()
            if left <= 0 or not await self._changed.wait(left):
                raise DeadlineExceeded(f"trainer workers did not end within {self._settings.start_s:g} s: {list(old)}")

    _died_last: str | None = None

    # --- events ---------------------------------------------------------------------------------------------------

    def _on_agent_up(self, up: m.AgentUp, _src: str) -> None:
        self._agents[up.rank] = self._clock.now()
        self._log.event("agent", f"agent.{up.rank}", new="up", reason=f"{up.host} pid {up.pid}")
        self._changed.notify()

    def _on_agent_beat(self, beat: m.AgentBeat, _src: str) -> None:
        self._agents[beat.rank] = self._clock.now()

    def _on_worker_up(self, up: m.WorkerUp, _src: str) -> None:
        self.up[up.worker] = up.incarnation
        self._endpoint.peer_back(up.worker)
        self._log.event("worker", up.worker, new="up", incarnation=up.incarnation, pid=up.pid)
        if up.worker in self._pool:
            self._pool.process_up(up.worker, up.incarnation)
            if self._engines_started and self._pool[up.worker].kind is ReplicaKind.STANDALONE:
                self._pool.advance(up.worker, ReplicaEvent.RESTARTED)
                self._endpoint.spawn(self._start_standalone_and_tell(up.worker), f"restart of {up.worker}")
        self._changed.notify()

    async def _start_standalone_and_tell(self, name: str) -> None:
        await self._start_standalone(name)
        self._changed.notify()

    def _on_worker_exited(self, end: m.WorkerExited, _src: str) -> None:
        self.up.pop(end.worker, None)
        self.deaths += 1
        self._endpoint.peer_lost(end.worker, end.reason)
        self._log.event("worker", end.worker, new="exited", reason=end.reason, incarnation=end.incarnation)
        if end.worker in self._pool:
            self._pool.process_gone(end.worker)
            if self._pool.can(end.worker, ReplicaEvent.DIED):
                self._pool.advance(end.worker, ReplicaEvent.DIED, end.reason)
            self._on_replica_lost(end.worker, end.incarnation, end.reason)
        else:
            if self.trainer_down is None:
                self._died_last = end.worker
            self.trainer_down = self.trainer_down or f"{end.worker} is gone ({end.reason})"
        if not end.restarting:
            self._out_of_restarts(end)
        self._changed.notify()

    def _out_of_restarts(self, end: m.WorkerExited) -> None:
        others = [n for n in self._pool.names() if n != end.worker and self._pool[n].state is not ReplicaState.FAILED]
        if end.worker not in self._pool or not others:
            self._die(FaultError(f"{end.worker} is out of restarts (faults.worker_restarts); last: {end.reason}"))
        else:
            self._log.event("fault", end.worker, new="given up", reason=f"out of restarts; last: {end.reason}")

    def _die(self, error: BaseException) -> None:
        self.fatal = self.fatal or error
        self._log.event("fault", "run", new="fatal", reason=str(error))
        self._changed.notify()
