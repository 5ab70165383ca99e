"""A Unix socket with deadlines: exact reads, length-prefixed blobs, descriptors. Owns one connection.

Every call is bounded; the end of the peer, a cut and a passed deadline all come out as PeerGone with the reason.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import time

from hybridsched.errors import WeightSyncError

_MAX_BLOB = 1 << 20


class PeerGone(WeightSyncError):
    """The other side died, hung up, is of another user, or did not answer in time."""


class Channel:
    """One connected SOCK_STREAM Unix socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def require_same_user(self) -> None:
        """Raises PeerGone when the process at the other end runs under another user (Linux)."""
        if not hasattr(socket, "SO_PEERCRED"):
            return
        raw = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", raw)
        if uid != os.getuid():
            raise PeerGone(f"process {pid} of another user ({uid}) is at the other end")

    def send(self, data: bytes, timeout_s: float) -> None:
        """Send all of it within ``timeout_s``."""
        try:
            self._sock.settimeout(timeout_s)
            self._sock.sendall(data)
        except OSError as error:
            raise _gone(error, timeout_s) from error

    def receive(self, nbytes: int, timeout_s: float) -> bytes:
        """Exactly ``nbytes`` within ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        data = bytearray()
        while len(data) < nbytes:
            try:
                self._sock.settimeout(max(0.001, deadline - time.monotonic()))
                part = self._sock.recv(nbytes - len(data))
            except OSError as error:
                raise _gone(error, timeout_s) from error
            if not part:
                raise PeerGone("closed the connection (it died or gave up)")
            data += part
        return bytes(data)

    def send_blob(self, data: bytes, timeout_s: float) -> None:
        """Length and bytes."""
        data = data[:_MAX_BLOB]
        self.send(len(data).to_bytes(4, "little") + data, timeout_s)

    def receive_blob(self, timeout_s: float) -> bytes:
        """What `send_blob` sent."""
        nbytes = int.from_bytes(self.receive(4, timeout_s), "little")
        if nbytes > _MAX_BLOB:
            raise PeerGone(f"does not speak this protocol (a message of {nbytes} bytes)")
        return self.receive(nbytes, timeout_s)

    def send_with_descriptor(self, data: bytes, fd: int, timeout_s: float) -> None:
        """Send a few bytes together with an open file descriptor."""
        try:
            self._sock.settimeout(timeout_s)
            socket.send_fds(self._sock, [data], [fd])
        except OSError as error:
            raise _gone(error, timeout_s) from error

    def receive_with_descriptor(self, nbytes: int, timeout_s: float) -> tuple[bytes, int]:
        """What `send_with_descriptor` sent; the descriptor is the caller's to close (close-on-exec)."""
        try:
            self._sock.settimeout(timeout_s)
            size = array.array("i").itemsize
            data, ancillary, _, _ = self._sock.recvmsg(nbytes, socket.CMSG_SPACE(size))
        except OSError as error:
            raise _gone(error, timeout_s) from error
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(payload[: len(payload) - len(payload) % size])
        if len(data) != nbytes or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            raise PeerGone("closed the connection before it passed its memory")
        os.set_inheritable(fds[0], False)
        return data, fds[0]

    def cut(self) -> None:
        """From any thread: a blocked call of this side ends at once."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # not connected any more
            return

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._sock.close()


def _gone(error: OSError, timeout_s: float) -> PeerGone:
    if isinstance(error, TimeoutError):
        return PeerGone(f"did not answer within {timeout_s:g} s")
    return PeerGone(f"connection lost ({error.strerror or error})")
