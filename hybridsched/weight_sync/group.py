"""A broadcast group that can be thrown away: rendezvous, bounded broadcasts, abort, and who is to blame.

Owns the membership of one attempt (one sync, or many while it goes well) and the story told when it breaks. Invariants:
no state outside the objects here; every wait has a deadline and is polled, so that `abort` from another thread, a
failure noted by another rank, and the death of the store each end it within a fraction of a second; after a failure
a group is only good for `close`, and the next attempt makes a new one (same store, next attempt number). Does not
know what travels.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from hybridsched.errors import WeightSyncError
from hybridsched.weight_sync.backends import Backend, GlooBackend, NcclBackend
from hybridsched.weight_sync.rendezvous import RendezvousStore, first_line, open_store, split_address

__all__ = ["BroadcastGroup", "RendezvousStore", "WeightSyncBroken", "open_store"]

_SLICE_S = 0.1  # how long a waiting thread does not look around
_PEER_LOOK_S = 0.25  # how often it asks the store whether another rank has failed
_GRACE_S = 2.0  # how long the first to fail waits for the others' word


class WeightSyncBroken(WeightSyncError):
    """A group broke. ``failed``: rank -> its own words; ``missing``: ranks that said nothing (dead or hung)."""

    def __init__(
        self, message: str, *, missing: Iterable[int] = (), failed: Mapping[int, str] | None = None, rank: int = -1
    ) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.failed = dict(failed or {})
        self.rank = rank


class BroadcastGroup:
    """One attempt: ``world_size`` ranks, rank 0 sends. Make it, `join`, transfer, `close`; `abort` from any thread.

    labels: what people call the ranks ("trainer-0", "rollout-3"); used in messages.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        secret: str,
        attempt: int,
        backend: Literal["gloo", "nccl"] = "gloo",
        device: Any = "cpu",
        host: str | None = None,
        interface: str | None = None,
        labels: Sequence[str] = (),
    ) -> None:
        if not 0 <= rank < world_size:
            raise WeightSyncError(f"rank {rank} is outside the weight-sync group of {world_size}")
        if labels and len(labels) != world_size:
            raise WeightSyncError(f"{len(labels)} labels for a weight-sync group of {world_size}")
        self.rank = rank
        self.world_size = world_size
        self.attempt = attempt
        self.device = device
        self.scratch: list[Any] = []  #: the transfer's two buffers, kept from sync to sync; freed by close
        self._prefix = f"{secret}/{attempt}"
        self._kind = backend
        self._host = host
        self._interface = interface
        self._labels = tuple(labels)
        self._backend: Backend | None = None
        self._store: Any = None
        self._address = ""
        self._abort_reason: str | None = None
        self._noted = False
        self._last_done = 0.0  # monotonic time the newest transfer ended; a queued one's deadline runs from there
        self._round = 0  # one sync each; both sides count alike, so one round's small messages never meet another's

    @property
    def receivers(self) -> range:
        """All ranks but the sender."""
        return range(1, self.world_size)

    @property
    def cuts_at_once(self) -> bool:
        """After `close` nothing writes to a buffer any more. False where a failed transfer cannot be cut."""
        return self._backend is not None and self._backend.cuts_at_once

    def label(self, rank: int) -> str:
        """``rank 2 (rollout-1)``."""
        return f"rank {rank} ({self._labels[rank]})" if self._labels else f"rank {rank}"

    # ---- membership

    def join(self, store: RendezvousStore | str, timeout_s: float) -> None:
        """Meet the others within ``timeout_s``. Rank 0 gives its RendezvousStore, the others its address.

        Raises WeightSyncBroken naming the ranks that did not arrive.
        """
        deadline = time.monotonic() + timeout_s
        host = self._enter_store(store, timeout_s)
        self.put(f"here/{self.rank}", f"{socket.gethostname()}:{os.getpid()}".encode())
        self.collect("here", range(self.world_size), deadline - time.monotonic(), "arrive")
        try:
            if self._kind == "gloo":
                self._join_gloo(self._host or host, deadline)
            else:
                nccl = NcclBackend(self.device)
                nccl.connect(self._store, self.rank, self.world_size)
                self._backend = nccl
        except RuntimeError as error:
            raise self.broken(f"the {self._kind} group could not be connected: {first_line(error)}") from error

    def _join_gloo(self, host: str, deadline: float) -> None:
        gloo = GlooBackend(host, self._interface)
        self._backend = gloo
        self.put(f"gloo/{self.rank}", json.dumps(gloo.endpoint).encode())
        answers = self.collect("gloo", range(self.world_size), deadline - time.monotonic(), "open their gloo device")
        endpoints: dict[int, tuple[str, int]] = {}
        for rank, raw in answers.items():
            at = json.loads(raw)
            if at is not None:
                endpoints[rank] = (at[0], at[1])
        left = max(0.1, deadline - time.monotonic())
        gloo.connect(self._store, self.rank, self.world_size, endpoints, left)

    def _enter_store(self, store: RendezvousStore | str, timeout_s: float) -> str:
        """Connect; returns this node's address on the way to the store (or the store's own host for rank 0)."""
        if isinstance(store, RendezvousStore):
            self._address = store.address
            base, own = store.store, split_address(store.address)[0]
        else:
            self._address = store
            host, port = split_address(store)
            try:
                # First a plain connection: refused is refused at once, where TCPStore would retry and shout.
                with socket.create_connection((host, port), timeout=timeout_s) as probe:
                    own = str(probe.getsockname()[0])
                base = dist.TCPStore(host, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
            except (OSError, RuntimeError) as error:
                raise WeightSyncBroken(
                    f"weight sync attempt {self.attempt}: {self.label(self.rank)} cannot reach the store of "
                    f"{self.label(0)} at {store}: {first_line(error)}; the sender is gone or its interface is wrong",
                    missing=(0,),
                    rank=self.rank,
                ) from error
        self._store = dist.PrefixStore(self._prefix, base)
        return own

    # ---- small messages through the store

    def begin_round(self) -> None:
        """One sync begins. Every rank calls it once per sync; a healthy group serves any number of them."""
        self._round += 1

    def end_round(self, keys: Iterable[str]) -> None:
        """The sender, when all are done: take these messages of the round, from every rank, off the store."""
        try:
            for key in keys:
                for rank in range(self.world_size):
                    self._store.delete_key(self._key(f"{key}/{rank}"))
        except RuntimeError as error:
            raise self._store_gone(error) from error

    def _key(self, key: str) -> str:
        return f"{self._round}/{key}"

    def put(self, key: str, value: bytes) -> None:
        """Publish a small value in this round. Raises WeightSyncBroken when the store is gone."""
        try:
            self._store.set(self._key(key), value)
        except RuntimeError as error:
            raise self._store_gone(error) from error

    def collect(self, key: str, ranks: Iterable[int], timeout_s: float, doing: str) -> dict[int, bytes]:
        """Wait until every rank has put ``key/<rank>``. Raises WeightSyncBroken naming those that did not."""
        start, ranks = time.monotonic(), list(ranks)
        pending, pause, look = ranks, 0.0005, 0.0
        while True:
            try:
                pending = [r for r in pending if not self._store.check([self._key(f"{key}/{r}")])]
            except RuntimeError as error:
                raise self._store_gone(error) from error
            if not pending:
                return {r: bytes(self._store.get(self._key(f"{key}/{r}"))) for r in ranks}
            now = time.monotonic()
            if now >= look:
                self._look_around(f"waiting for {_list(self.label(r) for r in pending)} to {doing}")
                look = now + _PEER_LOOK_S
            if now - start >= timeout_s:
                late = _list(self.label(r) for r in pending)
                raise self.broken(f"{late} did not {doing} within {timeout_s:.1f} s", missing=pending)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    # ---- bulk

    def start(self, buffer: Any, timeout_s: float, what: str) -> Any:
        """Post the broadcast of a flat uint8 tensor from rank 0; `wait` for the handle before touching it.

        Several may be posted; they run in order, and each deadline runs from the end of the one before.
        """
        if self._backend is None:
            raise WeightSyncError("BroadcastGroup.start before join or after close")
        self._raise_if_aborted(what)
        if buffer.numel() == 0:  # a bucket of empty tensors: both sides know without a word
            return None
        try:
            handle = self._backend.start(buffer, timeout_s)
        except RuntimeError as error:
            raise self.broken(f"{what}: {first_line(error)}") from error
        return (handle, buffer, what, time.monotonic(), timeout_s)

    def wait(self, handle: Any) -> None:
        """Until the bytes are there. Raises WeightSyncBroken: deadline, abort, a peer's failure or death."""
        if self._backend is None:
            raise WeightSyncError("BroadcastGroup.wait before join or after close")
        if handle is None:
            return
        work, _buffer, what, start, timeout_s = handle
        start = max(start, self._last_done)
        look = time.monotonic() + _PEER_LOOK_S
        while True:
            try:
                if self._backend.poll(work, _SLICE_S):
                    self._last_done = time.monotonic()
                    return
            except RuntimeError as error:
                self._raise_if_aborted(what)
                after = f"after {time.monotonic() - start:.1f} s"
                raise self.broken(f"{what}: the transfer failed {after}: {first_line(error)}") from error
            now = time.monotonic()
            self._raise_if_aborted(what)
            if now - start >= timeout_s:
                raise self.broken(f"{what}: not transferred within {timeout_s:g} s")
            if now >= look:
                self._look_around(what)
                look = now + _PEER_LOOK_S

    def broadcast(self, buffer: Any, timeout_s: float, what: str = "broadcast") -> None:
        """`start` and `wait`."""
        self.wait(self.start(buffer, timeout_s, what))

    # ---- failing

    def abort(self, reason: str) -> None:
        """From any thread: the blocked call of this rank raises within a fraction of a second. Returns at once."""
        if self._abort_reason is None:
            self._abort_reason = reason
        if self._backend is not None:
            self._backend.cut()

    def broken(self, what: str, *, missing: Iterable[int] = ()) -> WeightSyncBroken:
        """Tell the others, cut the transfers, gather everybody's word, and return the error to raise."""
        self._note_failure(what)
        if self._backend is not None:
            self._backend.cut()
        words, silent = self._gather_words()
        missing = sorted({*missing} | set(silent))
        story = [f"{self.label(r)}: {word}" for r, word in sorted(words.items()) if r != self.rank]
        story += [f"{self.label(r)}: no word (dead, hung, or busy loading)" for r in missing]
        rest = f" Others: {'; '.join(story)}." if story else ""
        return WeightSyncBroken(
            f"weight sync attempt {self.attempt}: {self.label(self.rank)}: {what}.{rest}",
            missing=missing,
            failed=words,
            rank=self.rank,
        )

    def close(self) -> None:
        """Release everything. Idempotent; bounded."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()
        self.scratch.clear()
        self._store = None

    def _note_failure(self, what: str) -> None:
        if self._noted or self._store is None:
            return
        self._noted = True
        try:
            self._store.set(f"failed/{self.rank}", what.encode())
            self._store.set("failed", str(self.rank).encode())
        except RuntimeError:
            self._store = None  # rank 0 is gone; the others learn it the same way

    def _gather_words(self) -> tuple[dict[int, str], list[int]]:
        """What every rank says within the grace time, and the ranks that say nothing."""
        words: dict[int, str] = {}
        silent = list(range(self.world_size))
        deadline = time.monotonic() + _GRACE_S
        while self._store is not None and silent:
            try:
                for r in list(silent):
                    for key, word in ((f"failed/{r}", None), (self._key(f"done/{r}"), "done")):
                        if self._store.check([key]):
                            words[r] = word or self._store.get(key).decode(errors="replace")
                            silent.remove(r)
                            break
            except RuntimeError:
                self._store = None
                break
            if time.monotonic() >= deadline:
                break
            time.sleep(0.02)
        if self._store is None:  # it lived in rank 0; of the rest nothing can be known
            return words, [0] if self.rank != 0 else []
        return words, [r for r in silent if r != self.rank]

    def _look_around(self, what: str) -> None:
        self._raise_if_aborted(what)
        try:
            failed = self._store.check(["failed"])
        except RuntimeError as error:
            raise self._store_gone(error) from error
        if failed:
            first = int(self._store.get("failed"))
            raise self.broken(f"{what}: stopped because {self.label(first)} failed")

    def _raise_if_aborted(self, what: str) -> None:
        if self._abort_reason is not None:
            raise self.broken(f"{what}: aborted: {self._abort_reason}")

    def _store_gone(self, error: Exception) -> WeightSyncBroken:
        self._store = None
        return self.broken(f"the store of {self.label(0)} at {self._address} is gone: {first_line(error)}")


def _list(words: Iterable[str]) -> str:
    return ", ".join(words)
