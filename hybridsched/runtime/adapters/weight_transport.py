"""Weights between real trainers and engines: the workers' side of `weight_sync`, for a broadcast and for a hand-over.

Owns `GroupSender` (in trainer workers) and `GroupReceiver` (in rollout workers): their broadcast groups, kept from sync
to sync while the members stay the same, and the thread in which a transfer blocks.

Invariants
    A group is used only by the members that made it together: the sender names it in SyncAddress.secret, and a
    receiver that does not hold the group of that name makes it anew, or says at once that it cannot.
    After any failure a group is closed and forgotten; the next attempt makes a new one.
    The engine is called on its event loop only; it gets a version only after all bytes arrived and were verified.
    Everything ends: each bucket within its deadline, and `abort` within a fraction of a second (a few seconds where
    the other members do not answer either).

Does not: decide who takes part, repeat an attempt, or judge the result (the controller's synchronizer does).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from hybridsched.engines.base import GenerationEngine
from hybridsched.errors import HybridschedError, WeightSyncError
from hybridsched.model import TensorSpec
from hybridsched.runtime import messages as m
from hybridsched.runtime.adapters.transfer import Cut, TransportSettings, sync_done
from hybridsched.trainers.base import Trainer
from hybridsched.weight_sync.broadcast import receive_weights, send_weights
from hybridsched.weight_sync.group import BroadcastGroup
from hybridsched.weight_sync.handover import HandoverReader, HandoverWriter
from hybridsched.weight_sync.rendezvous import RendezvousStore, open_store
from hybridsched.weight_sync.shared_ring import run_folder, safe_name
from hybridsched.weight_sync.watchdog import BucketWatchdog
from hybridsched.weight_sync.wire import SyncReport, torch_dtype

Offload = Callable[..., Awaitable[Any]]

_FLOATING = frozenset(("float16", "bfloat16", "float32", "float64"))
_LOOK_S = 0.1  # how long a thread waiting for the event loop does not look for an abort
#: The watchdog is for what hangs outside the wire (a gather, a loader). Waits on the wire end at bucket_s by
#: themselves and say more, so they come first.
_WATCHDOG_BUCKETS = 2.0


class GroupSender:
    """Rank 0 of every sync (trainer.0), and the writer of hand-overs (the first trainer of a node)."""

    def __init__(self, name: str, trainer: Trainer, offload: Offload, settings: TransportSettings) -> None:
        self._name = name
        self._trainer = trainer
        self._offload = offload
        self._settings = settings
        self._store: RendezvousStore | None = None
        self._group: BroadcastGroup | None = None
        self._members: list[str] = []
        self._address: m.SyncAddress | None = None
        self._cut: Cut | None = None

    async def open(self, order: m.OpenSync) -> m.SyncAddress:
        """Where to meet, under which name, and what will be sent. Keeps the group unless it has to be a new one."""
        self._cut = Cut(f"{self._name}: weight sync attempt {order.attempt}")  # an abort may come before `send` does
        address: m.SyncAddress = await self._offload(self._open, order)
        return address

    async def send(self, order: m.SendWeights) -> m.SyncDone:
        """Send this trainer's weights as ``order.version``. Raises WeightSyncError."""
        cut = self._cut or Cut(f"{self._name}: weight sync attempt {order.attempt}")
        return await self._blocking(cut, partial(self._send, order, cut))

    async def write_handover(self, order: m.WriteHandover) -> m.SyncDone:
        """Publish the weights for the hybrids of this node. Raises WeightSyncError when none of them got them."""
        cut = Cut(f"{self._name}: hand-over {order.name}")
        return await self._blocking(cut, partial(self._write, order, cut))

    def abort(self, reason: str) -> None:
        """End what runs, or what was opened and is about to run. Returns at once."""
        if self._cut is not None:
            self._cut.order(reason)

    def close(self) -> None:
        """Leave the group and stop serving its store. Not while a transfer runs."""
        self._forget()
        if self._store is not None:
            self._store.close()
            self._store = None

    async def _blocking(self, cut: Cut, transfer: Callable[[], m.SyncDone]) -> m.SyncDone:
        self._cut = cut
        try:
            done: m.SyncDone = await self._offload(transfer)
            return done
        except asyncio.CancelledError:
            cut.order("the worker is ending")  # nobody waits for the thread any more
            raise
        finally:
            if self._cut is cut:
                self._cut = None

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _open(self, order: m.OpenSync) -> m.SyncAddress:
        settings = self._settings
        if self._store is None:
            self._store = open_store(settings.bind_host, settings.bucket_s, advertise_host=settings.advertise_host)
        if order.fresh or self._group is None or self._address is None or order.members != self._members:
            self._forget()
            self._members = list(order.members)
            name = f"{settings.secret}.{order.attempt}"
            self._address = m.SyncAddress(self._store.address, name, self._specs())
        return self._address

    def _send(self, order: m.SendWeights, cut: Cut) -> m.SyncDone:
        # The other ranks of a sharded trainer gather with this one from now on: whatever fails, the walk is finished.
        with _walk(self._trainer) as weights:
            return self._send_to_group(order, cut, weights)

    def _send_to_group(self, order: m.SendWeights, cut: Cut, weights: Iterator[tuple[str, Any]]) -> m.SyncDone:
        address = self._address
        if address is None or order.members != self._members:
            raise WeightSyncError(f"{self._name}: attempt {order.attempt} was not opened for {order.members}")
        kept = self._group is not None
        group = self._group or _new_group(0, order.members, order.attempt, address.secret, self._settings)
        self._group = group
        try:
            with cut.stops(group.abort), self._watchdog(group.abort) as dog:
                if not kept:
                    assert self._store is not None  # opened with the address
                    group.join(self._store, self._settings.bucket_s)
                report = send_weights(
                    group,
                    address.specs,
                    self._on_the_wire(weights),
                    version=order.version,
                    bucket_bytes=self._settings.bucket_bytes,
                    bucket_timeout_s=self._settings.bucket_s,
                    verify=self._settings.verify,
                    on_progress=dog.progress,
                )
        except BaseException:
            self._forget()
            raise
        return _done(report)

    def _write(self, order: m.WriteHandover, cut: Cut) -> m.SyncDone:
        settings = self._settings
        with (
            _walk(self._trainer) as weights,
            HandoverWriter(
                settings.run_id, order.name, folder=settings.handover_folder, scratch=settings.scratch
            ) as writer,
            cut.stops(writer.abort),
            self._watchdog(writer.abort) as dog,
        ):
            report = writer.send(
                self._specs(),
                self._on_the_wire(weights),
                readers=order.readers,
                version=order.version,
                bucket_bytes=settings.bucket_bytes,
                join_timeout_s=settings.bucket_s,
                bucket_timeout_s=settings.bucket_s,
                on_progress=dog.progress,
            )
        return _done(report.sync)

    def _watchdog(self, act: Callable[[str], None]) -> BucketWatchdog:
        return BucketWatchdog(_WATCHDOG_BUCKETS * self._settings.bucket_s, act)

    def _specs(self) -> list[TensorSpec]:
        """What travels: the trainer's tensors in its order, in the engines' dtype."""
        wire = self._settings.wire_dtype
        return [replace(s, dtype=wire) if s.dtype in _FLOATING else s for s in self._trainer.weight_specs()]

    def _on_the_wire(self, weights: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        dtype = torch_dtype(self._settings.wire_dtype)
        for name, tensor in weights:
            yield name, tensor.detach().to(dtype) if tensor.is_floating_point() else tensor

    def _forget(self) -> None:
        group, self._group = self._group, None
        self._address = None
        if group is not None:
            group.close()


@contextmanager
def _walk(trainer: Trainer) -> Iterator[Iterator[tuple[str, Any]]]:
    """The trainer's weights, given up properly when the block ends early."""
    weights = trainer.iter_weights()
    try:
        yield weights
    finally:
        close = getattr(weights, "close", None)
        if close is not None:
            close()


class GroupReceiver:
    """One replica's end of broadcasts and hand-overs."""

    def __init__(self, name: str, engine: GenerationEngine, offload: Offload, settings: TransportSettings) -> None:
        self._name = name
        self._engine = engine
        self._offload = offload
        self._settings = settings
        self._one = asyncio.Lock()
        self._cut: Cut | None = None
        self._group: BroadcastGroup | None = None
        self._made_by: tuple[Any, ...] = ()

    async def receive(self, order: m.ReceiveWeights) -> m.SyncDone:
        """Hold ``order.version`` afterwards. Raises WeightSyncError, or what the engine says to the weights."""
        async with self._transfer(f"weight sync attempt {order.attempt}") as cut:
            await self._engine.begin_update(order.address.specs)
            work = partial(self._receive, order, cut, asyncio.get_running_loop())
            report: SyncReport = await self._offload(work)
            await self._engine.finish_update(order.version, keep_kv=order.keep_kv)
            return _done(report)

    async def read_handover(self, order: m.ReadHandover) -> m.SyncDone:
        """The same from the node's trainer; empty ``order.specs``: what it offers, if the engine takes it."""
        async with self._transfer(f"hand-over {order.name}") as cut:
            work = partial(self._read, order, cut, asyncio.get_running_loop())
            report: SyncReport = await self._offload(work)
            await self._engine.finish_update(order.version, keep_kv=False)
            return _done(report)

    def abort(self, reason: str) -> None:
        """End what runs; returns at once. Nothing happens when nothing runs."""
        if self._cut is not None:
            self._cut.order(reason)

    def close(self) -> None:
        """Leave the group. Not while a transfer runs."""
        self._forget()

    @asynccontextmanager
    async def _transfer(self, what: str) -> AsyncIterator[Cut]:
        """One at a time: a newer order ends the one that still runs."""
        self.abort(f"{what} was ordered meanwhile")
        async with self._one:
            cut = self._cut = Cut(f"{self._name}: {what}")
            try:
                yield cut
            except asyncio.CancelledError:
                cut.order("the worker is ending")  # nobody waits for the thread any more
                raise
            finally:
                self._cut = None

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _receive(self, order: m.ReceiveWeights, cut: Cut, loop: asyncio.AbstractEventLoop) -> SyncReport:
        settings = self._settings
        group, joined = self._group_for(order)
        dog = BucketWatchdog(_WATCHDOG_BUCKETS * settings.bucket_s, group.abort)
        try:
            with cut.stops(group.abort), dog:
                if not joined:
                    group.join(order.address.address, settings.bucket_s)
                return receive_weights(
                    group,
                    order.address.specs,
                    version=order.version,
                    bucket_bytes=settings.bucket_bytes,
                    bucket_timeout_s=settings.bucket_s,
                    load=partial(self._load, cut, loop),
                    into=self._engine.destination,
                    on_progress=dog.progress,
                )
        except BaseException:
            self._forget()
            raise

    def _group_for(self, order: m.ReceiveWeights) -> tuple[BroadcastGroup, bool]:
        """The group of this order, and whether it is joined already."""
        made_by = (order.address.address, order.address.secret, tuple(order.members), order.rank)
        if self._group is not None and made_by == self._made_by:
            return self._group, True
        self._forget()
        if not order.address.secret.endswith(f".{order.attempt}"):
            raise WeightSyncError(
                f"{self._name}: attempt {order.attempt} goes on with a group that this process did not join (it was "
                "started later); the next attempt makes a new one"
            )
        group = _new_group(order.rank, order.members, order.attempt, order.address.secret, self._settings)
        self._group, self._made_by = group, made_by
        return group, False

    def _read(self, order: m.ReadHandover, cut: Cut, loop: asyncio.AbstractEventLoop) -> SyncReport:
        settings = self._settings
        folder = run_folder(safe_name("run id", settings.run_id), settings.handover_folder)
        reader = HandoverReader(str(folder / f"{order.name}.sock"), self._name)
        with cut.stops(reader.abort):
            return reader.receive(
                order.specs or None,
                version=order.version,
                bucket_bytes=settings.bucket_bytes,
                join_timeout_s=settings.bucket_s,
                bucket_timeout_s=settings.bucket_s,
                load=partial(self._load, cut, loop),
                accept=partial(self._accept, cut, loop),
            )

    def _accept(self, cut: Cut, loop: asyncio.AbstractEventLoop, specs: Sequence[TensorSpec]) -> None:
        try:
            self._on_loop(self._engine.begin_update(specs), cut, loop)
        except WeightSyncError:
            raise
        except HybridschedError as error:  # the writer is to hear of it too
            raise WeightSyncError(f"{self._name} cannot take weights now: {error}") from error

    def _load(self, cut: Cut, loop: asyncio.AbstractEventLoop, tensors: dict[str, Any]) -> None:
        self._on_loop(self._engine.load_bucket(tensors), cut, loop)

    def _on_loop(self, call: Coroutine[Any, Any, None], cut: Cut, loop: asyncio.AbstractEventLoop) -> None:
        """Let the event loop do it; at most bucket_s, and not beyond an abort."""
        future = asyncio.run_coroutine_threadsafe(call, loop)
        left = self._settings.bucket_s
        while not future.done():
            concurrent.futures.wait([future], timeout=_LOOK_S)
            left -= _LOOK_S
            try:
                cut.check()
                if left <= 0 and not future.done():
                    raise WeightSyncError(
                        f"{self._name}: the engine did not take a bucket in {self._settings.bucket_s:g} s"
                    )
            except WeightSyncError:
                future.cancel()
                raise
        future.result()

    def _forget(self) -> None:
        group, self._group = self._group, None
        self._made_by = ()
        if group is not None:
            group.close()


def _new_group(
    rank: int, members: Sequence[str], attempt: int, secret: str, settings: TransportSettings
) -> BroadcastGroup:
    return BroadcastGroup(
        rank=rank,
        world_size=len(members),
        secret=secret,
        attempt=attempt,
        backend=settings.backend,
        device=settings.device if settings.backend == "nccl" else "cpu",
        interface=settings.interface,
        labels=members,
    )


def _done(report: SyncReport) -> m.SyncDone:
    return sync_done(report.seconds, report.wire_bytes, report.checksums)
