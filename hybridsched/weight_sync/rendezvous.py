"""The store where the ranks of a group meet. Owns its binding and its address; knows nothing of groups.

The store is TCP without authentication: ``secret`` keeps runs and attempts apart, it is no protection against a
hostile host on the same network. Bind it to the cluster's own interface.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hybridsched.errors import WeightSyncError


class RendezvousStore:
    """The store rank 0 keeps for all attempts. ``address`` ("host:port") is what the others are told."""

    def __init__(self, address: str, store: Any) -> None:
        self.address = address
        self._store: Any = store

    @property
    def store(self) -> Any:
        """The TCPStore. Raises WeightSyncError after close."""
        if self._store is None:
            raise WeightSyncError(f"the rendezvous store {self.address} was closed")
        return self._store

    def close(self) -> None:
        """Stop serving (ranks that still wait on it fail at once). Idempotent."""
        self._store = None


def open_store(bind_host: str, timeout_s: float, *, advertise_host: str | None = None) -> RendezvousStore:
    """Rank 0: bind a TCPStore to ``bind_host`` on a port the system chooses.

    ``advertise_host`` is what others connect to when it differs (bind_host "0.0.0.0"). Raises WeightSyncError when
    the address cannot be bound.
    """
    try:
        family, _, _, _, sockaddr = socket.getaddrinfo(bind_host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind(sockaddr)
            listener.listen(1024)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise WeightSyncError(
            f"cannot bind the weight-sync rendezvous to {bind_host!r}: {error}; "
            "set weight_sync.interface to an interface of this node"
        ) from error
    port = int(listener.getsockname()[1])
    host = advertise_host or bind_host
    store = dist.TCPStore(
        host,
        port,
        None,
        True,
        timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return RendezvousStore(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", store)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port". Raises WeightSyncError when it is none."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise WeightSyncError(f"weight-sync store address {address!r} is not host:port")
    return host.strip("[]"), int(port)


def first_line(error: BaseException) -> str:
    """The first line of an error without the source position torch puts in front."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.partition("] ")[2] or line if line.startswith("[/") else line
