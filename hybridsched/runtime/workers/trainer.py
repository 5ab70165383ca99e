"""The trainer worker: one rank of the trainer group, driven by the controller.

Owns: the loaded collection and the order of trainer operations (one at a time). A collection is read in a first phase
on every rank, so that a damaged segment never breaks a collective. Does not decide: what to train on, when to offload
and when to sync is the controller's. Trainer, queue store, weight sender and offload are handed in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hybridsched.errors import QueueError, SegmentDamaged
from hybridsched.model import Sample, SegmentId, WeightVersion
from hybridsched.runtime import messages as m
from hybridsched.runtime.clock import Clock
from hybridsched.runtime.endpoint import Endpoint
from hybridsched.sample_queue.base import SegmentStore
from hybridsched.trainers.base import TrainBatch, Trainer, TrainerGroup


class WeightSender(Protocol):
    """How weights leave the trainer (gloo/nccl broadcast, shared memory, or emulated)."""

    async def open(self, order: m.OpenSync) -> m.SyncAddress: ...
    async def send(self, order: m.SendWeights) -> m.SyncDone: ...
    async def write_handover(self, order: m.WriteHandover) -> m.SyncDone: ...
    def abort(self, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """The part of the configuration this worker acts on."""

    agent: str
    beat_s: float
    group_timeout_s: float


class TrainerWorker:
    """One rank."""

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        trainer: Trainer,
        store: SegmentStore,
        sender: WeightSender,
        clock: Clock,
        offload: Callable[..., Awaitable[Any]],
        rss_bytes: Callable[[], int],
        settings: TrainerSettings,
    ) -> None:
        self.name = name
        self._endpoint = endpoint
        self._trainer = trainer
        self._store = store
        self._sender = sender
        self._clock = clock
        self._offload = offload
        self._rss = rss_bytes
        self._settings = settings
        self._phase = "idle"
        self._busy = asyncio.Lock()
        self._loaded: tuple[int, tuple[tuple[Sample, ...], ...]] | None = None
        handlers: tuple[tuple[type, Any], ...] = (
            (m.OpenRendezvous, self._open_rendezvous),
            (m.StartTrainer, self._start),
            (m.LoadCollection, self._load),
            (m.TrainCollection, self._train),
            (m.BeginCycle, self._begin_cycle),
            (m.OffloadTrainer, self._offload_trainer),
            (m.OnloadTrainer, self._onload_trainer),
            (m.SaveCheckpoint, self._save),
            (m.OpenSync, self._open_sync),
            (m.SendWeights, self._send),
            (m.WriteHandover, self._write_handover),
            (m.JoinGather, self._join_gather),
            (m.AbortSync, self._abort_sync),
            (m.Probe, self._probe),
        )
        for kind, handler in handlers:
            endpoint.on(kind, handler)

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            await asyncio.sleep(self._settings.beat_s)
            self._endpoint.tell(self._settings.agent, m.Beat(self._phase, self._trainer.progress))

    async def drain(self, deadline_s: float) -> None:
        """Orderly end."""
        async with asyncio.timeout(deadline_s):
            await self._do("shutdown", "shutdown")

    async def _do(self, phase: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a trainer method in its asynchronous form, or through offload; one at a time."""
        async with self._busy:
            self._phase = phase
            try:
                aio = getattr(self._trainer, "aio", None)
                if aio is not None:
                    return await getattr(aio, method)(*args, **kwargs)
                return await self._offload(getattr(self._trainer, method), *args, **kwargs)
            finally:
                self._phase = "idle"

    async def _open_rendezvous(self, _order: m.OpenRendezvous, _src: str) -> m.Rendezvous:
        return m.Rendezvous(await self._do("starting", "open_rendezvous"))

    async def _start(self, order: m.StartTrainer, _src: str) -> m.MemoryReport:
        group = TrainerGroup(order.rank, order.world_size, order.rendezvous, self._settings.group_timeout_s)
        await self._do("starting", "start", group)
        if order.checkpoint is not None:
            await self._do("starting", "load_checkpoint", Path(order.checkpoint))
        return m.MemoryReport(0, 0, self._rss())

    async def _load(self, order: m.LoadCollection, _src: str) -> m.CollectionLoaded:
        began = self._clock.now()
        damaged: list[tuple[SegmentId, str]] = []
        samples: dict[tuple[SegmentId, int], Sample] = {}
        wanted: dict[SegmentId, list[int]] = {}
        for mini_batch in order.mini_batches:
            for segment, row in mini_batch:
                wanted.setdefault(SegmentId(*segment), []).append(row)
        for segment, rows in wanted.items():
            try:
                found = await self._offload(self._store.read, segment, rows)
            except (SegmentDamaged, QueueError) as error:
                damaged.append((segment, str(error)))
                continue
            samples.update({(segment, row): sample for row, sample in zip(rows, found, strict=True)})
        if not damaged:
            batches = tuple(
                tuple(samples[SegmentId(*segment), row] for segment, row in batch) for batch in order.mini_batches
            )
            self._loaded = (order.collection_id, batches)
        return m.CollectionLoaded(damaged, self._clock.now() - began)

    async def _train(self, order: m.TrainCollection, _src: str) -> m.Trained:
        if self._loaded is None or self._loaded[0] != order.collection_id:
            raise QueueError(f"{self.name}: collection {order.collection_id} was not loaded on this rank")
        batch = TrainBatch(self._loaded[1], WeightVersion(*order.version), order.collection)
        self._loaded = None
        result = await self._do("train", "train", batch)
        return m.Trained(result.metrics, result.timing_s, result.n_tokens, result.lag_kl)

    async def _begin_cycle(self, order: m.BeginCycle, _src: str) -> None:
        await self._do("sync", "begin_cycle", WeightVersion(*order.version))

    async def _offload_trainer(self, order: m.OffloadTrainer, _src: str) -> m.MemoryReport:
        freed = await self._do("switch", "offload", keep_parameters=order.keep_parameters)
        return m.MemoryReport(0, 0, self._rss(), freed)

    async def _onload_trainer(self, _order: m.OnloadTrainer, _src: str) -> m.MemoryReport:
        await self._do("switch", "onload")
        return m.MemoryReport(0, 0, self._rss())

    async def _save(self, order: m.SaveCheckpoint, _src: str) -> None:
        await self._do("checkpoint", "save_checkpoint", Path(order.folder))

    async def _open_sync(self, order: m.OpenSync, _src: str) -> m.SyncAddress:
        async with self._busy:
            return await self._sender.open(order)

    async def _send(self, order: m.SendWeights, _src: str) -> m.SyncDone:
        async with self._busy:
            self._phase = "sync"
            try:
                return await self._sender.send(order)
            finally:
                self._phase = "idle"

    async def _write_handover(self, order: m.WriteHandover, _src: str) -> m.SyncDone:
        async with self._busy:
            self._phase = "switch"
            try:
                return await self._sender.write_handover(order)
            finally:
                self._phase = "idle"

    async def _join_gather(self, _order: m.JoinGather, _src: str) -> m.Ok:
        await self._do("sync", "join_gather")
        return m.Ok()

    def _abort_sync(self, order: m.AbortSync, _src: str) -> None:
        self._sender.abort(order.reason)

    async def _probe(self, order: m.Probe, _src: str) -> m.ProbeResult:
        return m.ProbeResult(await self._do("sync", "logprobs", order.sequences, order.temperature))
