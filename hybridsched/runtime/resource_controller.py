"""DynamicResourceController: lends the trainer's GPUs to hybrid replicas and takes them back.

Owns: the pool machine STANDALONE_ONLY <-> HYBRID_ACTIVE, the tenancy of every trainer GPU, and the order of the calls.
Activation:   offload trainer -> hybrids map weights -> hand-over -> trainer drops parameters -> hybrids map KV
              -> add_replicas -> resume_generation_replicas
Deactivation: remove_replicas -> abort_replicas -> sleep_replicas (proven) -> trainer loads back
Invariants: a transition ends in one of the two states, with an event; routing is cut before anything is aborted; the
trainer loads back only onto GPUs whose release is proven (measured, or the process is dead). Decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hybridsched.errors import InternalError
from hybridsched.model import ReplicaKind, Tenant, WeightVersion
from hybridsched.runlog.base import EventSink
from hybridsched.runtime import messages as m
from hybridsched.runtime.clock import Clock
from hybridsched.runtime.endpoint import Endpoint
from hybridsched.runtime.gather import all_or_raise, outcomes
from hybridsched.runtime.plan import RunPlan
from hybridsched.runtime.pool import Pool
from hybridsched.scheduling.lifecycle import (
    GpuTenancy,
    PoolEvent,
    PoolLifecycle,
    PoolState,
    ReplicaEvent,
    ReplicaState,
    TenancyEvent,
    advance,
)

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class SwitchSettings:
    """Bounds of a switch, in seconds."""

    switch_s: float
    start_s: float
    drain_s: float
    partial_rollout: bool
    sharded: tuple[str, ...] = ()  #: trainers that gather their weights together


class DynamicResourceController:
    """Owner of lending."""

    def __init__(
        self,
        endpoint: Endpoint,
        plan: RunPlan,
        pool: Pool,
        clock: Clock,
        log: EventSink,
        settings: SwitchSettings,
        kill: Callable[[str, str], None],
        on_moved: Callable[[], None],
    ) -> None:
        self._endpoint = endpoint
        self._plan = plan
        self._pool = pool
        self._clock = clock
        self._log = log
        self._settings = settings
        self._kill = kill
        self._on_moved = on_moved
        self._machine = PoolLifecycle()
        self._tenancy = {w.worker: GpuTenancy(w.worker) for w in plan.of_kind("trainer")}
        self._handovers = 0
        self._reviving: asyncio.Task[None] | None = None
        self.on_tenancy: Callable[[str, Tenant], None] | None = None
        self.lent: list[str] = []
        self.last_activate_s = 0.0
        self.last_deactivate_s = 0.0
        self.activations = 0
        self.deactivations = 0

    @property
    def is_active(self) -> bool:
        """True while hybrids are lent."""
        return self._machine.state is PoolState.HYBRID_ACTIVE

    def lendable(self) -> list[str]:
        """Hybrids that could be lent now: asleep, or dead with a new process waiting to be started."""
        asleep = self._pool.names(ReplicaKind.HYBRID, (ReplicaState.ASLEEP, ReplicaState.FAILED))
        return [name for name in asleep if self._pool.is_up(name)]

    def tenants(self) -> dict[str, Tenant]:
        """Tenant of the GPU of every trainer worker."""
        return {gpu: tenancy.state for gpu, tenancy in self._tenancy.items()}

    def require_trainer(self) -> None:
        """Training refuses to start unless every trainer GPU is the trainer's."""
        wrong = {gpu: t.state.value for gpu, t in self._tenancy.items() if t.state is not Tenant.TRAINER}
        if wrong:
            raise InternalError(f"training was about to start on GPUs that are not the trainer's: {wrong}")

    def trainer_restarted(self) -> None:
        """The trainer group is a new one: after a deactivation every GPU is the trainer's, whatever died."""
        self.require_trainer()

    # --- lend -----------------------------------------------------------------------------------------------------

    async def activate(self, version: WeightVersion, count: int | None, reason: str, *, record: bool = True) -> bool:
        """Lend ``count`` hybrids (None: all that can be). True when at least one (or all of none) generates.

        record False: not part of the policy's history (validation). Raises what killed a trainer worker, after the
        hybrids are back asleep.
        """
        self._step(PoolEvent.ACTIVATE_BEGUN, reason)
        began = self._clock.now()
        able = self.lendable()
        dead = [name for name in able if self._pool[name].state is ReplicaState.FAILED]
        chosen = [name for name in able if name not in dead][: len(able) if count is None else max(0, count)]
        try:
            ready = await self._hand_over(version, chosen, dead) if chosen or dead else []
        except Exception as error:
            await self._undo(chosen, f"{type(error).__name__}: {error}")
            raise
        if not ready and self._plan.of_kind("hybrid"):
            await self._undo(chosen, "no hybrid replica could be lent")
            return False
        self.lent = ready
        self._step(PoolEvent.ACTIVATED, f"{len(ready)} of {len(self._plan.of_kind('hybrid'))} hybrids")
        seconds = self._clock.now() - began
        if record:
            self.last_activate_s = seconds
            self.activations += 1
        self._log.event("switch", "pool", new="activated", reason=reason, seconds=seconds, lent=ready)
        self._on_moved()
        return True

    async def _hand_over(self, version: WeightVersion, chosen: list[str], dead: list[str]) -> list[str]:
        """``dead``: hybrids with a new process; they load beside the lending, unless there is nobody else to lend."""
        trainers = self._trainers_under([*chosen, *dead])
        self._tenant(trainers, TenancyEvent.HANDOVER_BEGUN)
        self._activity(trainers, "switch")
        await self._trainers(trainers, m.OffloadTrainer(keep_parameters=True), "offloading the trainer")
        if not chosen:
            await self._revive(dead)
            chosen, dead = [name for name in dead if self._pool[name].state is ReplicaState.ASLEEP], []
        for name in chosen:
            self._pool.advance(name, ReplicaEvent.SYNC_BEGUN, f"hand-over of {version}")
        chosen = await self._each(chosen, m.WakeEngine("weights"), m.MemoryReport, "waking weights")
        chosen = await self._publish(version, chosen)
        await self._trainers(trainers, m.OffloadTrainer(keep_parameters=False), "dropping the trainer's parameters")
        self._tenant(trainers, TenancyEvent.WEIGHTS_HANDED)
        if dead:
            self._reviving = self._endpoint.spawn(self._revive(dead), "reviving hybrids beside the lending")
        chosen = await self._each(chosen, m.WakeEngine("kv"), m.MemoryReport, "mapping KV cache")
        for name in chosen:
            self._pool.advance(name, ReplicaEvent.WEIGHTS_LOADED, f"holds version {version}")
            self._pool_note(name, "add_replicas")
        chosen = await self._each(chosen, m.ResumeGeneration(), m.Ok, "resuming generation")
        for name in chosen:
            self._pool.advance(name, ReplicaEvent.ADMITTED, f"holds version {version}")
            self._pool_note(name, "resume_generation_replicas")
        if not chosen:
            for name in trainers:
                self._log.event("tenancy", name, reason="every hybrid of the hand-over failed")
        return chosen

    async def _revive(self, dead: list[str]) -> None:
        """Dead hybrids whose process is back load while the GPUs are handed over, then sleep until the next time."""
        for name in dead:
            self._pool.advance(name, ReplicaEvent.RESTARTED, "inside the hand-over")
        await asyncio.gather(*(self.load_and_sleep(name) for name in dead))

    async def _end_revival(self) -> None:
        """Before the trainer gets its GPUs back, whoever still loads there has to be done (bounded by start_s)."""
        reviving, self._reviving = self._reviving, None
        if reviving is not None:
            await asyncio.gather(reviving, return_exceptions=True)

    async def load_and_sleep(self, name: str) -> None:
        """Start a hybrid's engine and let it go of the GPU; a failure leaves it FAILED."""
        try:
            await self._endpoint.call(
                name, m.StartEngine(), m.MemoryReport, deadline_s=self._settings.start_s, what="starting the engine"
            )
            self._pool.advance(name, ReplicaEvent.STARTED)
            await self._sleep_one(name)
        except Exception as error:  # noqa: BLE001 - one hybrid less; the switch goes on without it
            self._lose(name, f"{type(error).__name__}: {error}")

    async def _publish(self, version: WeightVersion, chosen: list[str]) -> list[str]:
        """Weights through shared memory, one writer per node; returns the hybrids that hold them."""
        self._handovers += 1
        by_writer: dict[str, list[str]] = {}
        for name in chosen:
            by_writer.setdefault(self._plan.handover_writer(name), []).append(name)
        writes: list[Awaitable[m.SyncDone]] = []
        reads: list[Awaitable[m.SyncDone]] = []
        readers: list[str] = []
        for writer, names in by_writer.items():
            key = f"handover-{self._handovers}-{writer}"
            order = m.WriteHandover(version, key, names)
            writes.append(self._call(writer, order, m.SyncDone, "publishing weights"))
            for name in names:
                readers.append(name)
                reads.append(self._call(name, m.ReadHandover(version, key, []), m.SyncDone, "taking weights"))
        others = [name for name in self._settings.sharded if name not in by_writer]
        gathers = [self._call(name, m.JoinGather(), m.Ok, "gathering weights") for name in others]
        results = await outcomes([*reads, *writes, *gathers])
        written, gathered = results[len(reads) : len(reads) + len(writes)], results[len(reads) + len(writes) :]
        for result, writer in zip(written, by_writer, strict=True):
            if isinstance(result, BaseException) and not self._pool_only_failure(by_writer[writer]):
                raise result
        for outcome in gathered:
            if isinstance(outcome, BaseException):
                raise outcome
        return self._survivors(readers, results[: len(reads)], "taking weights")

    def _pool_only_failure(self, readers: list[str]) -> bool:
        """True when a writer failed because a reader is gone (the writer itself is fine)."""
        return any(not self._pool.is_up(name) or self._pool[name].state is ReplicaState.FAILED for name in readers)

    async def _undo(self, chosen: list[str], reason: str) -> None:
        """A failed activation goes back the whole way."""
        await self._release(
            [n for n in chosen if self._pool[n].state not in (ReplicaState.ASLEEP, ReplicaState.FAILED)]
        )
        self._step(PoolEvent.ACTIVATE_FAILED, reason)
        self._log.event("fault", "pool", new="activation failed", reason=reason)
        await self._load_back()
        self.lent = []

    # --- take back ------------------------------------------------------------------------------------------------

    async def deactivate(self, reason: str, *, load_trainer: bool = True, record: bool = True) -> None:
        """Take all lent hybrids back; afterwards every trainer GPU is the trainer's. ``record``: see activate."""
        self._step(PoolEvent.DEACTIVATE_BEGUN, reason)
        began = self._clock.now()
        forced = await self._release(self.lent)
        self._step(PoolEvent.DEACTIVATE_FORCED if forced else PoolEvent.DEACTIVATED, reason)
        await self._load_back(load=load_trainer)
        seconds = self._clock.now() - began
        if record:
            self.last_deactivate_s = seconds
            self.deactivations += 1
        self._log.event("switch", "pool", new="deactivated", reason=reason, seconds=seconds)
        self.lent = []

    async def _release(self, names: list[str]) -> bool:
        """remove -> abort -> sleep; returns True when a process had to be killed."""
        await self._end_revival()
        alive = [n for n in names if self._pool.can(n, ReplicaEvent.DRAIN_BEGUN)]
        self._activity(self._trainers_under(names), "switch")
        for name in alive:
            self._pool_note(name, "remove_replicas")
            self._pool.advance(name, ReplicaEvent.DRAIN_BEGUN, "taken back")
        drain = 0.0 if self._settings.partial_rollout else self._settings.drain_s
        for name in alive:
            self._pool_note(name, "abort_replicas")
        order = m.AbortLeases(None, drain, discard=not self._settings.partial_rollout)
        aborted = await outcomes([self._call(n, order, m.Ok, "aborting requests", extra_s=drain) for n in alive])
        self._on_moved()  # their partial responses go on elsewhere at once
        alive_after = self._survivors(alive, aborted, "aborting requests")
        for name in alive_after:
            self._pool_note(name, "sleep_replicas")
        slept = await outcomes([self._sleep_one(n) for n in alive_after])
        kept = self._survivors(alive_after, slept, "falling asleep")
        return len(kept) < len(alive)

    async def _sleep_one(self, name: str) -> None:
        report = await self._call(name, m.SleepEngine(), m.MemoryReport, "falling asleep")
        if report.weights_bytes or report.kv_bytes:
            raise InternalError(
                f"{name} still maps {report.weights_bytes} B of weights and {report.kv_bytes} B of KV after sleep"
            )
        self._pool.advance(name, ReplicaEvent.SLEPT, f"released {report.freed_bytes} bytes, measured")

    async def _load_back(self, *, load: bool = True) -> None:
        away = [name for name, tenancy in self._tenancy.items() if tenancy.state is not Tenant.TRAINER]
        for name in away:
            event = (
                TenancyEvent.RELEASE_PROVEN
                if self._tenancy[name].state is Tenant.HYBRID
                else TenancyEvent.HANDOVER_UNDONE
            )
            self._tenant([name], event)
        if load:
            await self._trainers(away, m.OnloadTrainer(), "loading the trainer back")
        self._activity(away, "wait")

    # --- helpers --------------------------------------------------------------------------------------------------

    def _trainers_under(self, hybrids: list[str]) -> list[str]:
        """Trainer workers whose GPU a hybrid of this list uses."""
        used = {(self._plan.spec(h).node, gpu) for h in hybrids for gpu in self._plan.spec(h).gpus}
        return [w.worker for w in self._plan.of_kind("trainer") if (w.node, w.gpus[0]) in used]

    async def _trainers(self, names: list[str], order: m.AnyMessage, what: str) -> None:
        await all_or_raise([self._call(name, order, m.MemoryReport, what) for name in names])

    async def _call(self, name: str, order: m.AnyMessage, reply: type[R], what: str, *, extra_s: float = 0.0) -> R:
        return await self._endpoint.call(name, order, reply, deadline_s=self._settings.switch_s + extra_s, what=what)

    async def _each(self, names: list[str], order: m.AnyMessage, reply: type[R], what: str) -> list[str]:
        """Ask every hybrid; those that fail are lost, the rest goes on."""
        return self._survivors(names, await outcomes([self._call(n, order, reply, what) for n in names]), what)

    def _survivors(self, names: Sequence[str], results: Sequence[object], what: str) -> list[str]:
        good = []
        for name, result in zip(names, results, strict=True):
            if isinstance(result, BaseException):
                self._lose(name, f"{what}: {result}")
            elif self._pool[name].state is not ReplicaState.FAILED:
                good.append(name)
        return good

    def _lose(self, name: str, reason: str) -> None:
        self._log.event("fault", name, new="cut out", reason=reason)
        self._kill(name, reason)
        if self._pool.can(name, ReplicaEvent.DIED):
            self._pool.advance(name, ReplicaEvent.DIED, reason)

    def _step(self, event: PoolEvent, reason: str) -> None:
        before = self._machine.state
        self._machine, _effects = advance(self._machine, event, reason)
        self._log.event("pool", "hybrids", old=before.value, new=self._machine.state.value, reason=reason)

    def _tenant(self, trainers: list[str], event: TenancyEvent) -> None:
        for name in trainers:
            before = self._tenancy[name]
            after, _effects = advance(before, event)
            self._tenancy[name] = after
            self._log.event("tenancy", name, old=before.state.value, new=after.state.value, reason=event.value)
            if self.on_tenancy is not None:
                self.on_tenancy(name, after.state)

    def _pool_note(self, name: str, call: str) -> None:
        self._log.event("switch", name, new=call)

    def _activity(self, trainers: list[str], what: str) -> None:
        for name in trainers:
            self._log.event("activity", name, new=what)
