"""The two wires under a broadcast group: gloo between CPUs, NCCL between GPUs. One small interface over both.

Owns what differs between them: how an operation is started, polled and, above all, cut. Nothing here is global and
nothing touches torch.distributed's default group. Rank 0 is always the root.

Cutting gloo: in torch 2.13 ``ProcessGroupGloo.abort()`` and ``shutdown()`` do nothing for an operation that waits for
its peer, and the destructor joins until the operation's own timeout. Closing its TCP connections does work: the
waiting operation fails within milliseconds on both ends and the destructor returns at once. So the connections are
found in /proc/self/fd by the listening ports of this group's gloo devices (published by every rank), never by
guessing, and shut down. Two ways remain for an operation to outlive the cut until its own timeout: no /proc, and a
cut that falls between gloo's taking up an operation and its first send (seen about once in a hundred on a busy
machine). Nobody waits for it: the transferring thread polls, and `close` leaves such a group to a thread of its own.

The NCCL half follows the same interface and has not run on a GPU yet (see "what has been run on GPUs" in the docs).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_PROC_FD = "/proc/self/fd"
_CLOSE_S = 0.5  # how long close waits for a cut operation to end
_DEVICE_LOCK = threading.Lock()  # a device's listening port is found by looking before and after


class Backend(ABC):
    """One communicator. Methods are called by the transferring thread, except `cut`."""

    @property
    def cuts_at_once(self) -> bool:
        """After `close` no operation writes to its buffer any more."""
        return True

    @abstractmethod
    def start(self, buffer: Any, timeout_s: float) -> Any:
        """Begin a broadcast of a flat uint8 tensor from rank 0; returns a handle for `poll`."""

    @abstractmethod
    def poll(self, handle: Any, slice_s: float) -> bool:
        """Wait at most about ``slice_s``; True when done. Raises RuntimeError when the operation failed."""

    @abstractmethod
    def cut(self) -> None:
        """Make running operations fail, from any thread. Returns at once."""

    @abstractmethod
    def close(self) -> None:
        """Release the communicator. Idempotent; bounded."""


class GlooBackend(Backend):
    """gloo over TCP. ``host`` or ``interface`` choose the address it binds (the interface wins)."""

    def __init__(self, host: str, interface: str | None) -> None:
        with _DEVICE_LOCK:
            before = _listening()
            if interface:
                self._device = dist.ProcessGroupGloo.create_device(interface=interface)
            else:
                self._device = dist.ProcessGroupGloo.create_device(hostname=host)
            new = _listening() - before
        self.endpoint = next(iter(new)) if len(new) == 1 else None
        """(address, port) this rank's gloo listens on; None where it cannot be told (then `cut` has no effect)."""
        self._peers: frozenset[tuple[str, int]] = frozenset()
        self._group: Any = None
        self._last: Any = None  # newest operation; they run in order, so it completes last

    @property
    def cuts_at_once(self) -> bool:
        return self.endpoint is not None

    def connect(
        self, store: Any, rank: int, world_size: int, endpoints: Mapping[int, tuple[str, int]], timeout_s: float
    ) -> None:
        """Connect to all ranks; ``endpoints`` are their listening addresses. Raises RuntimeError after the timeout."""
        self._peers = frozenset(at for peer, at in endpoints.items() if peer != rank)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [self._device]
        options._threads = 1  # operations run in the order they were posted
        options._timeout = timedelta(seconds=timeout_s)
        self._group = dist.ProcessGroupGloo(store, rank, world_size, options)

    def start(self, buffer: Any, timeout_s: float) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=timeout_s)
        self._last = self._group.broadcast([buffer], options)
        return self._last

    def poll(self, handle: Any, slice_s: float) -> bool:
        try:
            handle.wait(timedelta(seconds=slice_s))
        except RuntimeError:
            if not handle.is_completed():
                return False  # only the slice is over
            handle.wait()  # the outcome: returns, or raises what really went wrong
        return True

    def cut(self) -> None:
        if self.endpoint is None:
            return
        for sock in _sockets():
            with sock:
                try:
                    local, remote = sock.getsockname()[:2], sock.getpeername()[:2]
                except OSError:  # listening, or closed meanwhile
                    continue
                if local == self.endpoint or remote in self._peers:
                    try:
                        sock.shutdown(socket.SHUT_RDWR)
                    except OSError:  # the peer was faster
                        continue

    def close(self) -> None:
        if self._group is not None:
            self.cut()
            remains = [self._group, self._last]
            self._group = self._last = None
            end = time.monotonic() + _CLOSE_S
            while not _completed(remains[1]) and time.monotonic() < end:
                time.sleep(0.002)
            if not _completed(remains[1]):  # the destructor would join until the operation's timeout
                threading.Thread(target=remains.clear, name="gloo-undertaker", daemon=True).start()
        self._device = None


class NcclBackend(Backend):
    """NCCL on one CUDA device."""

    def __init__(self, device: Any) -> None:
        self._device = torch.device(device)
        self._group: Any = None

    def connect(self, store: Any, rank: int, world_size: int) -> None:
        """Make the communicator; it meets its peers at the first operation."""
        # torch's own watchdog would end the whole process at a timeout; deadlines are ours (poll + cut).
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(days=1)
        with torch.cuda.device(self._device):
            self._group = dist.ProcessGroupNCCL(store, rank, world_size, options)

    def start(self, buffer: Any, timeout_s: float) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.asyncOp = True
        with torch.cuda.device(self._device):
            return self._group.broadcast([buffer], options)

    def poll(self, handle: Any, slice_s: float) -> bool:
        deadline = time.monotonic() + slice_s
        while not handle.is_completed():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.0005)
        with torch.cuda.device(self._device):
            handle.wait()  # raises the error of a failed operation; orders the current stream behind it
            torch.cuda.current_stream().synchronize()  # done means: the bytes are there
        return True

    def cut(self) -> None:
        group = self._group
        if group is not None:
            # ncclCommAbort may take its time; whoever orders the cut must not wait for it.
            threading.Thread(target=group.abort, name="nccl-abort", daemon=True).start()

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def _completed(handle: Any) -> bool:
    return handle is None or bool(handle.is_completed())


def _sockets() -> list[socket.socket]:
    """Duplicates of this process's TCP sockets (closing one leaves the original alone)."""
    found: list[socket.socket] = []
    if not os.path.isdir(_PROC_FD):
        return found
    for entry in os.listdir(_PROC_FD):
        try:
            if not os.readlink(f"{_PROC_FD}/{entry}").startswith("socket:"):
                continue
            sock = socket.socket(fileno=os.dup(int(entry)))
        except OSError:  # closed while we looked
            continue
        if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
            found.append(sock)
        else:
            sock.close()
    return found


def _listening() -> set[tuple[str, int]]:
    """Addresses of the listening TCP sockets of this process."""
    found: set[tuple[str, int]] = set()
    for sock in _sockets():
        with sock:
            try:
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(sock.getsockname()[:2])
            except OSError:
                continue
    return found
