"""Weights from the trainer to all standalone replicas: pause once, broadcast, verify, resume as soon as they hold them.

Owns: the attempts of one sync. Invariants: one sync at a time; a replica generates again only with the weights of the
new version; whoever died or does not acknowledge is cut out and the survivors repeat the whole sync on a new group;
after the configured attempts the run ends. The transfer itself is the workers' (`weight_sync/`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hybridsched.errors import FaultError, WeightSyncError, WorkerDied
from hybridsched.model import ReplicaKind, WeightVersion
from hybridsched.runlog.base import EventSink
from hybridsched.runtime import messages as m
from hybridsched.runtime.clock import Clock
from hybridsched.runtime.endpoint import Endpoint
from hybridsched.runtime.gather import break_on_failure, outcomes
from hybridsched.runtime.pool import Pool
from hybridsched.scheduling.lifecycle import ReplicaEvent, ReplicaState
from hybridsched.weight_sync.probe import compare_logprobs

TRAINER = "trainer.0"


@dataclass(frozen=True, slots=True)
class SyncSettings:
    """The part of the configuration the synchronizer acts on."""

    mode: str  #: abort | keep | wait
    keep_kv: bool
    partial_rollout: bool
    attempts: int
    verify_probe: bool
    probe_tolerance: float
    temperature: float
    call_s: float
    sync_s: float
    drain_s: float
    double_abort: bool = False  #: compat: peer
    sharded: tuple[str, ...] = ()  #: trainers that gather their weights (and compute probes) together


@dataclass(slots=True)
class SyncStats:
    """One sync, for metrics."""

    seconds: float = 0.0
    pause_s: float = 0.0
    transfer_s: float = 0.0
    resume_s: float = 0.0
    n_bytes: int = 0
    attempts: int = 0
    receivers: int = 0
    probe_max_diff: float = float("nan")
    phases: dict[str, float] = field(default_factory=dict)


class WeightSynchronizer:
    """Controller side of a weight sync."""

    def __init__(
        self,
        endpoint: Endpoint,
        pool: Pool,
        clock: Clock,
        log: EventSink,
        settings: SyncSettings,
        kill: Callable[[str, str], None],
        on_resumed: Callable[[], None],
    ) -> None:
        self._endpoint = endpoint
        self._pool = pool
        self._clock = clock
        self._log = log
        self._settings = settings
        self._kill = kill
        self._on_resumed = on_resumed
        self._lock = asyncio.Lock()
        self._group: list[str] = []
        self._attempt = 0
        self.probe_set: list[tuple[np.ndarray, np.ndarray]] = []

    def forget_group(self) -> None:
        """The trainer restarted: the broadcast group is gone."""
        self._group = []

    async def sync(self, version: WeightVersion) -> SyncStats:
        """Bring ``version`` to every standalone replica. Raises WeightSyncError after the last attempt."""
        async with self._lock:
            stats = SyncStats()
            began = self._clock.now()
            self._log.event("sync", str(version), new="begun", reason=self._settings.mode)
            targets = await self._pause(str(version))
            stats.pause_s = self._clock.now() - began
            if targets:
                await self._transfer(version, targets, stats)
            resumed = self._clock.now()
            await self._resume(str(version))
            stats.resume_s = self._clock.now() - resumed
            stats.seconds = self._clock.now() - began
            self._log.event(
                "sync",
                str(version),
                new="done",
                reason=f"{stats.receivers} receivers, attempt {stats.attempts}",
                seconds=stats.seconds,
                n_bytes=stats.n_bytes,
                phases=stats.phases,
            )
            return stats

    async def _pause(self, version: str) -> list[str]:
        """Stop generation on all replicas that can take weights; returns them."""
        able = self._pool.names(
            ReplicaKind.STANDALONE, (ReplicaState.READY, ReplicaState.HELD, ReplicaState.ASLEEP, ReplicaState.SYNCING)
        )
        for name in able:
            self._pool.advance(name, ReplicaEvent.SYNC_BEGUN, f"version {version}")
        mode = self._settings.mode if self._settings.partial_rollout else "wait"
        order = m.PauseGeneration(mode, self._settings.drain_s, discard=not self._settings.partial_rollout)
        bound = self._settings.call_s + (self._settings.drain_s if mode == "wait" else 0.0)
        rounds = 2 if self._settings.double_abort else 1
        for _ in range(rounds):
            ended = await outcomes(
                [self._endpoint.call(name, order, m.Ok, deadline_s=bound, what="pausing generation") for name in able]
            )
            for name, result in zip(able, ended, strict=True):
                if isinstance(result, BaseException):
                    self._cut_out(name, f"did not pause: {result}")
        return [name for name in able if self._pool[name].state is ReplicaState.SYNCING]

    async def _transfer(self, version: WeightVersion, targets: Sequence[str], stats: SyncStats) -> None:
        began = self._clock.now()
        last = "no receiver"
        for attempt in range(1, self._settings.attempts + 1):
            alive = [t for t in targets if self._pool[t].state is ReplicaState.SYNCING and self._pool.is_up(t)]
            if not alive:
                break
            stats.attempts, stats.receivers = attempt, len(alive)
            failure = await self._attempt_once(version, alive, stats)
            if failure is None:
                for name in alive:
                    if self._pool[name].state is ReplicaState.SYNCING:
                        self._pool.advance(name, ReplicaEvent.WEIGHTS_LOADED, f"version {version}")
                stats.transfer_s = self._clock.now() - began
                return
            last = failure
            self._log.event("fault", str(version), new="sync attempt failed", reason=failure, attempt=attempt)
        if any(self._pool[t].state is ReplicaState.SYNCING and self._pool.is_up(t) for t in targets):
            raise WeightSyncError(
                f"weight sync of version {version} failed {self._settings.attempts} times; last: {last}. "
                "Look at the logs of the named worker; raise deadlines.sync_s if it is only slow"
            )

    async def _attempt_once(self, version: WeightVersion, alive: list[str], stats: SyncStats) -> str | None:
        """One attempt; None when every receiver holds the weights, else what failed."""
        self._attempt += 1
        attempt, members = self._attempt, [TRAINER, *alive]
        # A restarted worker has its old name but knows no group: incarnations are part of the comparison.
        group = [f"{name}@{self._pool.incarnation_of(name)}" for name in members]
        opened = m.OpenSync(attempt, members, fresh=group != self._group)
        address = await self._endpoint.call(
            TRAINER, opened, m.SyncAddress, deadline_s=self._settings.sync_s, what="opening the sync group"
        )
        self._group = group
        calls: list[Awaitable[m.AnyMessage]] = [
            self._endpoint.call(
                TRAINER,
                m.SendWeights(attempt, version, members),
                m.SyncDone,
                deadline_s=self._settings.sync_s,
                what="sending weights",
            )
        ]
        for rank, name in enumerate(alive, start=1):
            order = m.ReceiveWeights(attempt, version, members, rank, address, self._settings.keep_kv)
            calls.append(
                self._endpoint.call(name, order, m.SyncDone, deadline_s=self._settings.sync_s, what="receiving weights")
            )

        others = [name for name in self._settings.sharded if name != TRAINER]
        calls += [
            self._endpoint.call(name, m.JoinGather(), m.Ok, deadline_s=self._settings.sync_s, what="gathering weights")
            for name in others
        ]

        def broken() -> None:
            for name in members:
                self._endpoint.tell(name, m.AbortSync(attempt, "another member failed"))

        ended = await break_on_failure(calls, broken)
        named = zip([*members, *others], ended, strict=True)
        failed = {name: e for name, e in named if isinstance(e, BaseException)}
        if not failed:
            done = ended[0]
            assert isinstance(done, m.SyncDone)
            stats.n_bytes, stats.phases = done.n_bytes, done.phases
            return await self._probe(alive, stats)
        self._group = []
        for name in (TRAINER, *others):
            if isinstance(failed.get(name), WorkerDied):
                raise failed[name]
        for name in alive:
            error = failed.get(name)
            if isinstance(error, FaultError) and type(error).__name__ == "DeadlineExceeded":
                self._cut_out(name, f"did not acknowledge the sync: {error}")
        return "; ".join(f"{name}: {error}" for name, error in failed.items())

    async def _probe(self, alive: list[str], stats: SyncStats) -> str | None:
        """Truth test: trainer and receivers must agree on the log-probs of the probe set."""
        if not self._settings.verify_probe:
            return None
        order = m.Probe(self.probe_set, self._settings.temperature)
        others = [name for name in self._settings.sharded if name != TRAINER]
        calls = [
            self._endpoint.call(name, order, m.ProbeResult, deadline_s=self._settings.sync_s, what="probing weights")
            for name in [TRAINER, *alive, *others]
        ]
        ended = await outcomes(calls)
        reference = ended[0]
        if isinstance(reference, BaseException):
            raise reference
        for name, result in zip([*alive, *others], ended[1:], strict=True):
            if isinstance(result, BaseException):
                return f"{name}: {result}"
            verdict = compare_logprobs(reference.logprobs, result.logprobs, self._settings.probe_tolerance)
            stats.probe_max_diff = max(np.nan_to_num(stats.probe_max_diff, nan=0.0), verdict.max_abs_diff)
            if not verdict.ok:
                return f"{name}: truth test failed: {verdict.reason}"
        return None

    async def _resume(self, version: str) -> None:
        held = self._pool.names(ReplicaKind.STANDALONE, (ReplicaState.HELD,))
        ended = await outcomes(
            [
                self._endpoint.call(
                    name, m.ResumeGeneration(), m.Ok, deadline_s=self._settings.call_s, what="resuming generation"
                )
                for name in held
            ]
        )
        for name, result in zip(held, ended, strict=True):
            if isinstance(result, BaseException):
                self._cut_out(name, f"did not resume: {result}")
            elif self._pool[name].state is ReplicaState.HELD:
                self._pool.advance(name, ReplicaEvent.ADMITTED, f"holds version {version}")
        self._on_resumed()

    def _cut_out(self, name: str, reason: str) -> None:
        """A replica that does not answer counts as dead; its process is killed so that it is."""
        self._log.event("fault", name, new="cut out", reason=reason)
        self._kill(name, reason)
        if self._pool.can(name, ReplicaEvent.DIED):
            self._pool.advance(name, ReplicaEvent.DIED, reason)
