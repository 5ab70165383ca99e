"""One weight transfer as a worker sees it: its emergency stop, and what is reported of it. No torch.

Owns `Cut`, which joins the event loop that orders a stop with the thread that is blocked in the transfer, and
`TransportSettings`. An order that comes before the thread has anything to stop is kept and obeyed then.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hybridsched.config.schema import RunConfig
from hybridsched.errors import WeightSyncError
from hybridsched.runtime import messages as m


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """What sender and receivers of a run agree on, and where this process stands."""

    run_id: str
    secret: str  #: of the run; part of every key
    bucket_bytes: int
    bucket_s: float  #: bound of one bucket, and of every meeting before and after the buckets
    verify: bool  #: checksums on the wire
    backend: Literal["gloo", "nccl"]
    device: str
    interface: str | None
    bind_host: str  #: where the sender's store listens
    advertise_host: str | None  #: what receivers connect to, when it is another name
    wire_dtype: str  #: floating-point tensors travel as what the engines hold
    scratch: Path
    handover_folder: Path | None = None  #: None: shared memory of the node

    @staticmethod
    def of(
        config: RunConfig, *, run_id: str, secret: str, device: str, hostname: str, scratch: Path
    ) -> TransportSettings:
        """device: "cpu" or "cuda", resolved. hostname: how other nodes reach this one."""
        sync, local = config.weight_sync, config.launcher == "local"
        # Processes of one machine may share a GPU, which NCCL refuses; gloo moves the same bytes through the host.
        auto: Literal["gloo", "nccl"] = "nccl" if device == "cuda" and not local else "gloo"
        return TransportSettings(
            run_id=run_id,
            secret=secret,
            bucket_bytes=sync.bucket_bytes,
            bucket_s=config.deadlines.bucket_s * config.deadlines.scale,
            verify=sync.verify != "off",
            backend=auto if sync.backend == "auto" else sync.backend,
            device=device,
            interface=sync.interface,
            bind_host="127.0.0.1" if local else "0.0.0.0",
            advertise_host=None if local else hostname,
            wire_dtype=config.actor_rollout_ref.rollout.dtype,
            scratch=scratch,
        )


class Cut:
    """The emergency stop of one transfer. ``order`` comes from the event loop, the rest is the thread's."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._act: Callable[[str], None] | None = None

    def order(self, reason: str) -> None:
        """Stop, now or as soon as there is something to stop. The first reason stays. Never blocks."""
        with self._lock:
            self._reason = self._reason or reason
            act = self._act
        if act is not None:
            act(reason)

    @contextmanager
    def stops(self, act: Callable[[str], None]) -> Iterator[None]:
        """While the block runs, an order (also an earlier one) is passed to ``act``."""
        with self._lock:
            self._act = act
        try:
            self.check()
            yield
        finally:
            with self._lock:
                self._act = None

    def check(self) -> None:
        """Raises WeightSyncError when a stop was ordered."""
        with self._lock:
            reason = self._reason
        if reason is not None:
            raise WeightSyncError(f"{self.what} aborted: {reason}")


def sync_done(seconds: Mapping[str, float], n_bytes: int, checksums: Sequence[int]) -> m.SyncDone:
    """The reply for one finished transfer. ``checksum`` is one number for all buckets; "" when they are off."""
    phases = {phase: spent for phase, spent in seconds.items() if phase != "total"}
    combined = ""
    if checksums:
        packed = struct.pack(f"<{len(checksums)}Q", *checksums)
        combined = hashlib.blake2b(packed, digest_size=8).hexdigest()
    return m.SyncDone(seconds.get("total", sum(phases.values())), n_bytes, phases, combined)
