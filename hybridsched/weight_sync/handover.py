"""Weights to the hybrids of the same node, through shared memory. Owns the writer, the reader and the clean-up.

A ring of two buckets in anonymous shared memory (memfd; a nameless file in the scratch folder where memory is short),
whose descriptor the writer passes to each reader over a Unix socket; the same socket carries "bucket i is there,
checksum c" and the answer "loaded". So memory is two buckets whatever the model's size, the kernel frees it when the
last process dies, the death of either side is seen at once (end of file), and only a private folder with a socket is
left over by a crash: `sweep` removes it by run id.

Invariants: a slot is rewritten only after every living reader has answered for it; a reader that dies, refuses or
stays silent for ``bucket_timeout_s`` is cut out and the others go on ("a switch completes without it"); a reader
returns only after the last bucket, so an incomplete version is always an error. Peers must run under the same user.
Device tensors are copied through the host here; CUDA IPC is not used.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from hybridsched.errors import WeightSyncError
from hybridsched.model import TensorSpec, WeightVersion
from hybridsched.weight_sync.channel import Channel, PeerGone
from hybridsched.weight_sync.plan import Bucket, bucket_names, check_offer, make_offer, plan_buckets
from hybridsched.weight_sync.shared_ring import (
    Ring,
    connect,
    make_ring,
    private_folder,
    require_own,
    run_folder,
    safe_name,
    slot_bytes,
    via_folder,
)
from hybridsched.weight_sync.wire import (
    Load,
    LoadSlice,
    Packer,
    Progress,
    Stopwatch,
    SyncReport,
    Unpacker,
    checksum,
)

Accept = Callable[[Sequence[TensorSpec]], None]
"""Called with what the writer offers, before the reader agrees; raises WeightSyncError to refuse it."""

_READY = struct.Struct("<IQ")  # bucket index, checksum


@dataclass(frozen=True, slots=True)
class HandoverReport:
    """The writer's side: its figures, who has the weights, and who was cut out and why."""

    sync: SyncReport
    loaded: tuple[str, ...]
    lost: dict[str, str] = field(default_factory=dict)


class HandoverWriter:
    """Listens under ``address`` from construction on; `send` serves one version to the expected readers.

    run_id and name: letters, digits, ``.``, ``_``, ``-`` (at most 80). scratch: folder on disk for the ring where
    shared memory is short. Raises WeightSyncError when the private folder cannot be made or is not ours.
    """

    def __init__(self, run_id: str, name: str, *, folder: Path | None = None, scratch: Path | None = None) -> None:
        self._scratch = scratch or Path(tempfile.gettempdir())
        self._name = safe_name("name", name)
        self._folder = private_folder(run_folder(run_id, folder))
        path = self._folder / f"{self._name}.sock"
        path.unlink(missing_ok=True)  # of a dead writer of this name
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        via_folder(path, self._listener.bind)
        self._listener.listen(64)
        self.address = str(path)
        self._channels: dict[str, Channel] = {}
        self._aborted: str | None = None

    def __enter__(self) -> HandoverWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def send(
        self,
        specs: Sequence[TensorSpec],
        tensors: Iterable[tuple[str, Any]],
        *,
        readers: Sequence[str],
        version: WeightVersion,
        bucket_bytes: int,
        join_timeout_s: float,
        bucket_timeout_s: float,
        on_progress: Progress | None = None,
    ) -> HandoverReport:
        """Hand one version to ``readers`` (their names). Raises WeightSyncError when none of them got it all."""
        watch = Stopwatch()
        lost: dict[str, str] = {}
        plan = plan_buckets(specs, bucket_bytes)
        if not plan:
            raise WeightSyncError("there is nothing to hand over: the list of weight specs is empty")
        slot = slot_bytes(plan)
        packer = Packer(specs, tensors)
        sums: list[int] = []
        with make_ring(2 * slot, self._scratch) as ring:
            try:
                with watch.phase("handshake"):
                    offer = make_offer(specs, version, bucket_bytes, True)
                    self._admit(readers, offer, ring.fd, slot, join_timeout_s, lost)
                for bucket in plan:
                    if bucket.index >= 2:
                        self._await_acks(bucket.index - 2, plan, specs, bucket_timeout_s, watch, lost)
                    self._fill(bucket, ring.view(bucket), packer, watch, sums, bucket_timeout_s, lost)
                    if on_progress is not None:
                        on_progress(bucket.index + 1, len(plan))
                for bucket in plan[-2:]:
                    self._await_acks(bucket.index, plan, specs, bucket_timeout_s, watch, lost)
                loaded = tuple(self._channels)
            finally:
                self._hang_up()
        report = SyncReport(0, str(version), sum(b.nbytes for b in plan), len(plan), watch.total(), tuple(sums))
        return HandoverReport(report, loaded, lost)

    def abort(self, reason: str) -> None:
        """From any thread: a blocked `send` raises at once."""
        self._aborted = reason
        for channel in list(self._channels.values()):
            channel.cut()

    def close(self) -> None:
        """Stop listening and remove the socket (and the folder when it is empty). Idempotent."""
        self._hang_up()
        self._listener.close()
        Path(self.address).unlink(missing_ok=True)
        try:
            self._folder.rmdir()
        except OSError:  # another hand-over of this run still uses it, or it is gone
            return

    def _admit(
        self,
        readers: Sequence[str],
        offer: bytes,
        ring_fd: int,
        slot: int,
        timeout_s: float,
        lost: dict[str, str],
    ) -> None:
        deadline = time.monotonic() + timeout_s
        hello = len(offer).to_bytes(4, "little") + slot.to_bytes(8, "little")
        while len(self._channels) + len(lost) < len(readers):
            self._raise_if_aborted()
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._listener.settimeout(min(left, 0.1))
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            channel = Channel(sock)
            try:
                channel.require_same_user()
                name = channel.receive_blob(left).decode()
                if name not in readers or name in self._channels or name in lost:
                    channel.close()
                    continue
                channel.send_with_descriptor(hello, ring_fd, left)
                channel.send(offer, left)
                refusal = channel.receive_blob(left).decode()
            except PeerGone:
                channel.close()
                continue
            if refusal:
                lost[name] = refusal
                channel.close()
            else:
                self._channels[name] = channel
        for name in readers:
            if name not in self._channels and name not in lost:
                lost[name] = f"did not join within {timeout_s:g} s"
        self._raise_if_alone(lost)

    def _fill(
        self,
        bucket: Bucket,
        view: Any,
        packer: Packer,
        watch: Stopwatch,
        sums: list[int],
        timeout_s: float,
        lost: dict[str, str],
    ) -> None:
        with watch.phase("pack"):
            packer.pack(bucket, view)
        with watch.phase("checksum"):
            sums.append(checksum(view))
        for name, channel in list(self._channels.items()):
            try:
                channel.send(_READY.pack(bucket.index, sums[-1]), timeout_s)
            except PeerGone as error:
                self._lose(name, _last_words(channel) or f"bucket {bucket.index}: {error}", lost)
        self._raise_if_alone(lost)

    def _await_acks(
        self,
        index: int,
        plan: Sequence[Bucket],
        specs: Sequence[TensorSpec],
        timeout_s: float,
        watch: Stopwatch,
        lost: dict[str, str],
    ) -> None:
        deadline = time.monotonic() + timeout_s
        with watch.phase("transfer"):
            for name, channel in list(self._channels.items()):
                try:
                    complaint = channel.receive_blob(max(0.001, deadline - time.monotonic())).decode()
                except PeerGone as error:
                    complaint = f"{error} at bucket {index} ({bucket_names(plan[index], specs)})"
                if complaint:
                    self._lose(name, complaint, lost)
        self._raise_if_alone(lost)

    def _lose(self, name: str, why: str, lost: dict[str, str]) -> None:
        self._channels.pop(name).close()
        lost[name] = why

    def _raise_if_alone(self, lost: dict[str, str]) -> None:
        self._raise_if_aborted()
        if not self._channels:
            story = "; ".join(f"{name}: {why}" for name, why in lost.items())
            raise WeightSyncError(f"hand-over {self._name}: no reader is left ({story or 'none was expected'})")

    def _raise_if_aborted(self) -> None:
        if self._aborted is not None:
            raise WeightSyncError(f"hand-over {self._name} aborted: {self._aborted}")

    def _hang_up(self) -> None:
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()


class HandoverReader:
    """One receiver. `receive` takes one version; `abort` ends it from another thread."""

    def __init__(self, address: str, name: str) -> None:
        self._address = Path(address)
        self._name = name
        self._channel: Channel | None = None
        self._aborted: str | None = None

    def receive(
        self,
        specs: Sequence[TensorSpec] | None,
        *,
        version: WeightVersion,
        bucket_bytes: int,
        join_timeout_s: float,
        bucket_timeout_s: float,
        load: Load,
        load_slice: LoadSlice | None = None,
        fresh_buffers: bool = False,
        on_progress: Progress | None = None,
        accept: Accept | None = None,
    ) -> SyncReport:
        """Take one version; arguments as in `receive_weights`, but ``specs`` None means whatever the writer offers and
        ``accept`` does not refuse. Raises WeightSyncError when it is not complete."""
        watch = Stopwatch()
        plan: Sequence[Bucket] = ()
        sums: list[int] = []
        try:
            with watch.phase("handshake"):
                channel = self._channel = Channel(connect(self._address, join_timeout_s))
                specs, ring = self._join(channel, specs, version, bucket_bytes, join_timeout_s, accept)
                plan = plan_buckets(specs, bucket_bytes)
                unpacker = Unpacker(specs, load, load_slice, fresh=fresh_buffers)
            with ring:
                for bucket in plan:
                    self._take(channel, bucket, ring.view(bucket), unpacker, watch, sums, bucket_timeout_s)
                    channel.send_blob(b"", bucket_timeout_s)
                    if on_progress is not None:
                        on_progress(bucket.index + 1, len(plan))
        except PeerGone as error:
            why = f"aborted: {self._aborted}" if self._aborted else f"the writer: {error}"
            raise WeightSyncError(
                f"hand-over to {self._name} at {self._address} ended after {len(sums)} of {len(plan)} buckets: {why}"
            ) from error
        except WeightSyncError as error:
            self._complain(str(error))
            raise
        finally:
            if self._channel is not None:
                self._channel.close()
                self._channel = None
        return SyncReport(0, str(version), sum(b.nbytes for b in plan), len(plan), watch.total(), tuple(sums))

    def abort(self, reason: str) -> None:
        """From any thread: a blocked `receive` raises at once."""
        self._aborted = reason
        channel = self._channel
        if channel is not None:
            channel.cut()

    def _join(
        self,
        channel: Channel,
        specs: Sequence[TensorSpec] | None,
        version: WeightVersion,
        bucket_bytes: int,
        timeout_s: float,
        accept: Accept | None,
    ) -> tuple[Sequence[TensorSpec], Ring]:
        channel.require_same_user()
        channel.send_blob(self._name.encode(), timeout_s)
        hello, fd = channel.receive_with_descriptor(12, timeout_s)
        try:
            slot = int.from_bytes(hello[4:12], "little")
            offer = channel.receive(int.from_bytes(hello[:4], "little"), timeout_s)
            if specs is None:
                specs = [TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in json.loads(offer)["specs"]]
            check_offer(offer, specs, version, bucket_bytes)
            if accept is not None:
                accept(specs)
            ring = Ring(fd, 2 * slot)
        except BaseException:
            os.close(fd)
            raise
        channel.send_blob(b"", timeout_s)
        return specs, ring

    def _take(
        self,
        channel: Channel,
        bucket: Bucket,
        view: Any,
        unpacker: Unpacker,
        watch: Stopwatch,
        sums: list[int],
        timeout_s: float,
    ) -> None:
        with watch.phase("transfer"):
            index, expected = _READY.unpack(channel.receive(_READY.size, timeout_s))
        if index != bucket.index:
            raise WeightSyncError(f"the writer announced bucket {index}, bucket {bucket.index} was due")
        with watch.phase("checksum"):
            got = checksum(view)
        if got != expected:
            raise WeightSyncError(f"bucket {index} arrived damaged: xxh3 {expected:016x} written, {got:016x} read")
        with watch.phase("load"):
            unpacker.unpack(bucket, view)
        sums.append(got)

    def _complain(self, why: str) -> None:
        if self._channel is not None:
            try:
                self._channel.send_blob(why.encode(), 1.0)
            except PeerGone:  # then the writer learns it from the end of the connection
                return


def _last_words(channel: Channel) -> str:
    """What a reader that hung up said before, if anything: its answers wait in the socket."""
    words = ""
    try:
        while not words:
            words = channel.receive_blob(0.1).decode()
    except PeerGone:
        return ""
    return words


def sweep(run_id: str, folder: Path | None = None) -> list[Path]:
    """Remove what a dead run left behind; returns what was removed.

    Only for a run none of whose processes lives (the launch loop before it starts a step). Touches nothing but this
    user's own folder of that run id.
    """
    path = run_folder(run_id, folder)
    if not os.path.lexists(path):
        return []
    require_own(path)
    found = sorted(path.iterdir())
    shutil.rmtree(path)
    return [*found, path]
