"""One weight sync over a joined BroadcastGroup: the sender's half and the receivers' half. A group serves many.

Owns the order of things on the wire: offer and agreement (specs, bucket size, version), buckets, checksums, done.
Invariants: at most two buckets of memory on either side beside the model (plus one tensor longer than a bucket where
the loader takes only complete tensors); the checksum is over the bytes of the bucket as it lies in the buffer, taken
one bucket behind the transfer; `send_weights` returns only when every receiver has loaded and verified everything.
Both functions block; workers run them in their ``offload`` thread. Any failure is a WeightSyncError, is told to the
other ranks, and leaves the group good for nothing but ``close``; what a receiver has loaded by then is not to be
used: it stays SYNCING and repeats the whole sync on a new group.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hybridsched.errors import WeightSyncError
from hybridsched.model import TensorSpec, WeightVersion
from hybridsched.weight_sync.group import BroadcastGroup, WeightSyncBroken
from hybridsched.weight_sync.plan import Bucket, bucket_names, check_offer, make_offer, plan_buckets
from hybridsched.weight_sync.wire import (
    Into,
    Load,
    LoadSlice,
    Packer,
    Progress,
    Stopwatch,
    SyncReport,
    Unpacker,
    checksum,
    destination,
)


def send_weights(
    group: BroadcastGroup,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, Any]],
    *,
    version: WeightVersion,
    bucket_bytes: int,
    bucket_timeout_s: float,
    verify: bool = True,
    on_progress: Progress | None = None,
) -> SyncReport:
    """Rank 0: send named tensors, in the order of ``specs``, to all receivers.

    bucket_timeout_s bounds each bucket, the receivers' agreement before the first and their word after the last.
    Raises WeightSyncError naming the bucket, the seconds, and the ranks that failed or fell silent.
    """
    if group.rank != 0:
        raise WeightSyncError(f"only rank 0 sends weights; this is {group.label(group.rank)}")
    watch = Stopwatch()
    group.begin_round()
    with _told_to_others(group):
        plan = _plan(specs, bucket_bytes)
        packer = Packer(specs, tensors)
        ring = _Ring(group, plan)
        sums: list[int] = []
        with watch.phase("handshake"):
            group.put("offer/0", make_offer(specs, version, bucket_bytes, verify))
            group.collect("agree", group.receivers, bucket_timeout_s, "agree to the weight specs")

        # Two buckets are posted at any time: the wire goes on with the next one without waiting for this thread.
        posted: deque[tuple[Bucket, Any, Any]] = deque()
        for bucket in [*plan, None]:
            if bucket is not None:
                with watch.phase("pack"):
                    buffer = packer.direct(bucket, group.device)
                    if buffer is None:
                        buffer = ring.buffer(bucket)
                        packer.pack(bucket, buffer)
                posted.append((bucket, buffer, _start(group, bucket, buffer, bucket_timeout_s, plan, specs)))
            while len(posted) == 2 or (bucket is None and posted):
                sent, data, handle = posted.popleft()
                if verify:
                    with watch.phase("checksum"):
                        sums.append(checksum(data))
                with watch.phase("transfer"):
                    group.wait(handle)
                if on_progress is not None:
                    on_progress(sent.index + 1, len(plan))
        with watch.phase("finish"):
            group.put("checksums/0", json.dumps(sums).encode())
            group.collect("done", group.receivers, bucket_timeout_s, "load and verify the weights")
            group.end_round(("offer", "agree", "checksums", "done"))
    return SyncReport(0, str(version), sum(b.nbytes for b in plan), len(plan), watch.total(), tuple(sums))


def receive_weights(
    group: BroadcastGroup,
    specs: Sequence[TensorSpec],
    *,
    version: WeightVersion,
    bucket_bytes: int,
    bucket_timeout_s: float,
    load: Load,
    load_slice: LoadSlice | None = None,
    into: Into | None = None,
    fresh_buffers: bool = False,
    on_progress: Progress | None = None,
) -> SyncReport:
    """A receiver: take what rank 0 sends and hand it to ``load`` as dictionaries of complete named tensors.

    The tensors are views of a reused buffer and die when ``load`` returns; ``fresh_buffers`` gives every bucket its
    own memory for loaders that keep them. A tensor longer than a bucket is put together first (that much extra
    memory) unless ``load_slice`` takes its parts. ``into`` saves the copy for tensors of at least half a bucket: they
    are received where it says, and neither ``load`` nor ``load_slice`` sees them. Raises WeightSyncError, also when a
    checksum does not match: it names bucket and tensors, and the loaded weights must not be used.
    """
    watch = Stopwatch()
    group.begin_round()
    with _told_to_others(group):
        plan = _plan(specs, bucket_bytes)
        ring = _Ring(group, plan, fresh=fresh_buffers)
        unpacker = Unpacker(specs, load, load_slice)
        sums: list[int] = []
        with watch.phase("handshake"):
            verify = _agree(group, specs, version, bucket_bytes, bucket_timeout_s)

        def start(bucket: Bucket) -> tuple[Bucket, Any, Any, bool]:
            place = None
            if into is not None and group.cuts_at_once:  # else a failed transfer might write there much later
                place = destination(bucket, specs, into, group.device)
            buffer = ring.buffer(bucket) if place is None else place
            handle = _start(group, bucket, buffer, bucket_timeout_s, plan, specs)
            return bucket, buffer, handle, place is not None

        posted = deque(start(bucket) for bucket in plan[:2])
        for i in range(len(plan)):
            bucket, buffer, handle, in_place = posted.popleft()
            with watch.phase("transfer"):
                group.wait(handle)
            if verify:
                with watch.phase("checksum"):
                    sums.append(checksum(buffer))
            if not in_place:
                with watch.phase("load"):
                    unpacker.unpack(bucket, buffer)
            if i + 2 < len(plan):  # this buffer is free again; the next bucket is already on the wire
                posted.append(start(plan[i + 2]))
            if on_progress is not None:
                on_progress(i + 1, len(plan))
        with watch.phase("finish"):
            sent = group.collect("checksums", [0], bucket_timeout_s, "send its checksums")[0]
            if verify:
                _compare(json.loads(sent), sums, plan, specs)
            group.put(f"done/{group.rank}", b"1")
    return SyncReport(group.rank, str(version), sum(b.nbytes for b in plan), len(plan), watch.total(), tuple(sums))


class _Ring:
    """Two buffers in turn, each as long as the longest bucket, kept by the group; or a new one each time."""

    def __init__(self, group: BroadcastGroup, plan: Sequence[Bucket], *, fresh: bool = False) -> None:
        self._group = group
        self._longest = max(b.nbytes for b in plan)
        self._fresh = fresh
        self._turn = 0

    def buffer(self, bucket: Bucket) -> Any:
        if self._fresh:
            return self._new(bucket.nbytes)
        self._turn ^= 1
        kept = self._group.scratch
        while len(kept) <= self._turn:
            kept.append(self._new(self._longest))
        if kept[self._turn].numel() < self._longest:
            kept[self._turn] = self._new(self._longest)
        return kept[self._turn][: bucket.nbytes]

    def _new(self, nbytes: int) -> Any:
        # zeros, not empty: the padding between tensors travels too, and must not carry what was in memory before
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._group.device)


def _plan(specs: Sequence[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    plan = plan_buckets(specs, bucket_bytes)
    if not plan:
        raise WeightSyncError("there is nothing to sync: the list of weight specs is empty")
    return plan


def _start(
    group: BroadcastGroup, bucket: Bucket, buffer: Any, timeout_s: float, plan: Sequence[Bucket], specs: Any
) -> Any:
    what = f"bucket {bucket.index} of {len(plan)} ({bucket_names(bucket, specs)})"
    return group.start(buffer, timeout_s, what)


def _agree(
    group: BroadcastGroup, specs: Sequence[TensorSpec], version: WeightVersion, bucket_bytes: int, timeout_s: float
) -> bool:
    raw = group.collect("offer", [0], timeout_s, "offer the weights")[0]
    verify = check_offer(raw, specs, version, bucket_bytes)
    group.put(f"agree/{group.rank}", b"1")
    return verify


def _compare(sent: list[int], got: list[int], plan: Sequence[Bucket], specs: Sequence[TensorSpec]) -> None:
    bad = [bucket for bucket, a, b in zip(plan, sent, got, strict=True) if a != b]
    if bad:
        first = bad[0]
        raise WeightSyncError(
            f"{len(bad)} of {len(plan)} buckets arrived damaged; first bucket {first.index} "
            f"({bucket_names(first, specs)}): xxh3 {sent[first.index]:016x} sent, {got[first.index]:016x} received"
        )


@contextmanager
def _told_to_others(group: BroadcastGroup) -> Iterator[None]:
    """Whatever goes wrong on this rank ends the wait of the others, and comes out as a WeightSyncError."""
    try:
        yield
    except WeightSyncBroken:
        raise
    except Exception as error:
        what = str(error) if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"
        raise group.broken(what) from error
