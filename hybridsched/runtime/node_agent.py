"""The node agent: starts and watches the workers of its node, routes envelopes, and never does heavy work.

Owns: the worker handles of one node, their restarts, and judging their liveness by progress per phase. Invariants: a
worker's death is reported to the controller once, after everything it sent was delivered; a worker never takes the
agent with it; an agent that has not heard of the controller for too long ends non-zero by itself. Does not know what
the messages mean, except supervision. Imports neither torch nor vllm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridsched.errors import AgentSilent, FaultError, HybridschedError
from hybridsched.runtime import messages as m
from hybridsched.runtime.clock import Clock
from hybridsched.runtime.endpoint import Endpoint
from hybridsched.runtime.plan import CONTROLLER, RunPlan, WorkerSpec
from hybridsched.runtime.supervision import RewardPool, Spawner, Transport, WorkerHandle


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Bounds of supervision, in seconds. ``phase_deadline_s``: how long a phase may go without progress."""

    host: str
    pid: int
    beat_s: float
    silence_s: float
    start_s: float
    stop_s: float
    restarts: int
    backoff_s: float
    phase_deadline_s: Mapping[str, float] = field(default_factory=dict)


class _Watched:
    """One worker and what it last said."""

    def __init__(self, handle: WorkerHandle, now: float) -> None:
        self.handle = handle
        self.phase = "starting"
        self.progress = -1
        self.moved_at = now
        self.beat_at = now


class NodeAgent:
    """One per node; rank 0 also carries the controller (attach_controller)."""

    def __init__(
        self,
        rank: int,
        plan: RunPlan,
        transport: Transport,
        spawner: Spawner,
        rewards: RewardPool,
        clock: Clock,
        new_incarnation: Callable[[str], str],
        settings: AgentSettings,
    ) -> None:
        self.rank = rank
        self._plan = plan
        self._transport = transport
        self._spawner = spawner
        self._rewards = rewards
        self._clock = clock
        self._new_incarnation = new_incarnation
        self._settings = settings
        self._watched: dict[str, _Watched] = {}
        self._restarts: dict[str, int] = {}
        self._ranks = {w.worker: w.node for w in plan.workers}
        self._controller: Callable[[m.Envelope], None] | None = None
        self._controller_seen = clock.now()
        self._stopping: str | None = None
        self._failure: BaseException | None = None
        self._stop = asyncio.Event()
        self._empty = asyncio.Event()  # no worker is running
        self._empty.set()
        self.endpoint = Endpoint(f"agent.{rank}", self.route)
        self.endpoint.on(m.Beat, self._on_beat)
        self.endpoint.on(m.AgentBeat, self._on_controller_beat)
        self.endpoint.on(m.KillWorker, self._on_kill)
        self.endpoint.on(m.Shutdown, self._on_shutdown)
        self.endpoint.on(m.RewardRequest, self._on_reward)

    def attach_controller(self, deliver: Callable[[m.Envelope], None]) -> None:
        """Rank 0: envelopes for the controller go here."""
        self._controller = deliver

    async def run(self) -> None:
        """Serve until told to shut down. Raises FaultError when the controller is lost."""
        self.endpoint.on_error = self._on_error
        carrier = asyncio.ensure_future(self._transport.run(self.route))
        try:
            self.endpoint.tell(
                CONTROLLER,
                m.AgentUp(
                    self.rank,
                    self._settings.host,
                    self._settings.pid,
                    [w.worker for w in self._plan.of_node(self.rank)],
                ),
            )
            for spec in self._plan.of_node(self.rank):
                self.endpoint.spawn(self._keep(spec), f"keeper of {spec.worker}")
            watch = self.endpoint.spawn(self._watch(), "watch")
            stop = asyncio.ensure_future(self._stop.wait())
            await _first_of(stop, carrier, watch)
            stop.cancel()
            if carrier.done() and not carrier.cancelled() and carrier.exception() is not None:
                raise FaultError(f"agent {self.rank}: transport failed: {carrier.exception()}") from carrier.exception()
            await self._end_workers()
            if self._failure is not None:
                raise self._failure
        finally:
            await self.endpoint.close()
            for watched in list(self._watched.values()):
                watched.handle.kill("agent ends")
            await self._rewards.close()
            carrier.cancel()
            await asyncio.gather(carrier, return_exceptions=True)

    # --- routing --------------------------------------------------------------------------------------------------

    def route(self, envelope: m.Envelope) -> None:
        """Bring an envelope one hop nearer to its destination."""
        dst = envelope.dst
        if dst == self.endpoint.name:
            self.endpoint.deliver(envelope)
            return
        rank = self._ranks.get(dst)
        if rank is None:
            rank = self._plan.rank_of(dst)
        if rank != self.rank:
            self._transport.send(rank, envelope)
        elif dst == CONTROLLER:
            if self._controller is not None:
                self._controller(envelope)
        elif (watched := self._watched.get(dst)) is not None:
            watched.handle.send(envelope)

    # --- workers --------------------------------------------------------------------------------------------------

    async def _keep(self, spec: WorkerSpec) -> None:
        """Start a worker, wait for its end, start it again: up to the configured number of restarts."""
        while self._stopping is None:
            incarnation = self._new_incarnation(spec.worker)
            reason = await self._live_once(spec, incarnation)
            if self._stopping is not None:
                return
            used = self._restarts[spec.worker] = self._restarts.get(spec.worker, 0) + 1
            again = used <= self._settings.restarts
            self.endpoint.tell(CONTROLLER, m.WorkerExited(spec.worker, incarnation, reason, again))
            if not again:
                return
            await asyncio.sleep(self._settings.backoff_s * min(8, 2 ** (used - 1)))

    async def _live_once(self, spec: WorkerSpec, incarnation: str) -> str:
        try:
            handle = await self._spawner.spawn(spec, incarnation, self.route, self._settings.start_s)
        except HybridschedError as error:
            return f"did not start: {error}"
        self._watched[spec.worker] = _Watched(handle, self._clock.now())
        self._empty.clear()
        self.endpoint.tell(CONTROLLER, m.WorkerUp(spec.worker, incarnation, handle.pid))
        end = await handle.wait()
        self._watched.pop(spec.worker, None)
        if not self._watched:
            self._empty.set()
        self.endpoint.peer_lost(spec.worker, end.reason)
        self.endpoint.peer_back(spec.worker)
        return end.reason

    def _on_beat(self, beat: m.Beat, src: str) -> None:
        watched = self._watched.get(src)
        if watched is None:
            return
        watched.beat_at = self._clock.now()
        if beat.phase != watched.phase or beat.progress != watched.progress:
            watched.phase, watched.progress, watched.moved_at = beat.phase, beat.progress, watched.beat_at
        if beat.unfinished:
            self.route(m.Envelope(src, CONTROLLER, 0, False, m.Beat(beat.phase, beat.progress, beat.unfinished)))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._settings.beat_s)
            self.endpoint.tell(CONTROLLER, m.AgentBeat(self.rank, {name: w.phase for name, w in self._watched.items()}))
            now = self._clock.now()
            for name, watched in list(self._watched.items()):
                self._judge(name, watched, now)
            silent = now - self._controller_seen
            if self.rank != 0 and silent > self._settings.silence_s and self._stopping is None:
                self._fail(
                    AgentSilent(
                        f"agent {self.rank} on {self._settings.host}: nothing heard of the controller for"
                        f" {silent:.0f} s (deadlines.agent_silence_s); the launch loop starts the step again",
                        ranks=(0,),
                    )
                )

    def _judge(self, name: str, watched: _Watched, now: float) -> None:
        limit = self._settings.phase_deadline_s.get(watched.phase)
        if limit is None:
            return
        still = now - watched.moved_at
        if watched.phase == "idle":
            still = now - watched.beat_at  # idle means no work: only silence counts
        if still > limit:
            watched.handle.kill(f"no progress in phase '{watched.phase}' for {still:.0f} s (limit {limit:g} s)")

    def _on_kill(self, order: m.KillWorker, _src: str) -> None:
        watched = self._watched.get(order.worker)
        if watched is not None:
            watched.handle.kill(order.reason)

    async def _on_reward(self, request: m.RewardRequest, src: str) -> m.RewardReply:
        answer = await self._rewards.score(m.Envelope(src, self.endpoint.name, 0, False, request))
        assert isinstance(answer.body, m.RewardReply)
        return answer.body

    # --- end ------------------------------------------------------------------------------------------------------

    def _on_controller_beat(self, _beat: m.AgentBeat, _src: str) -> None:
        self._controller_seen = self._clock.now()

    def _on_shutdown(self, order: m.Shutdown, _src: str) -> None:
        self._stopping = order.reason
        self._stop.set()

    def _on_error(self, error: BaseException, where: str) -> None:
        self._fail(FaultError(f"agent {self.rank}: {where}: {type(error).__name__}: {error}"))

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self._stopping = str(error)
        self._stop.set()

    async def _end_workers(self) -> None:
        for name, watched in list(self._watched.items()):
            watched.handle.send(m.Envelope(self.endpoint.name, name, 0, False, m.Shutdown(self._stopping or "end")))
        try:
            async with asyncio.timeout(self._settings.stop_s):
                await self._empty.wait()
        except TimeoutError:
            pass  # the rest is killed below
        for watched in list(self._watched.values()):
            watched.handle.kill("did not leave in time")


async def _first_of(*tasks: asyncio.Future[Any]) -> None:
    """Wait until one of the tasks is done (order of the arguments does not matter)."""
    done = asyncio.Event()
    for task in tasks:
        task.add_done_callback(lambda _t: done.set())
    await done.wait()
