"""Frames between an agent and a worker over a unix socket: length (4 bytes, big-endian), then that many bytes.

Owns: framing, the greeting (`Hello`, answered by `Welcome` or `Refused`), and what happens when the other side goes.

Invariants
    Frames arrive whole, in order, each once; a partial frame at the end of the connection is dropped.
    `send` never blocks and never raises because of the other side. What is not yet sent is bounded by ``MAX_UNSENT``:
    a peer that lets so much pile up does not read any more, and the channel ends with that reason.
    `on_lost` is called once, after the last frame was handed on.

Back-pressure: reading is not paused. A frame is handed on in the call that received it and nothing is queued here;
who passes it on (another channel, the transport) has a bound of its own.

Does not: know what is in a frame (`runtime.wire` does), reconnect, or start processes (`processes`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from hybridsched.errors import DeadlineExceeded, FaultError, InternalError

MAX_FRAME = 1 << 30  #: bytes; a longer one is a foreign or damaged stream
MAX_UNSENT = 256 << 20  #: bytes waiting for a peer that does not read

_LENGTH = 4


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A worker's first frame."""

    secret: str
    worker: str
    incarnation: str
    pid: int


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Answer to a Hello: what the worker is. Plain containers, so that nothing has to be imported to read it."""

    config: str  #: path of the resolved configuration
    spec: dict[str, Any]  #: plan.WorkerSpec
    context: dict[str, Any]  #: context.RunContext


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """Answer to a Hello that does not belong here; the connection ends."""

    reason: str


encode_greeting = msgspec.msgpack.encode
_greetings: msgspec.msgpack.Decoder[Hello | Welcome | Refused] = msgspec.msgpack.Decoder(Hello | Welcome | Refused)


def decode_greeting(frame: bytes) -> Hello | Welcome | Refused:
    """Raises msgspec.DecodeError on foreign bytes."""
    return _greetings.decode(frame)


class FrameSplitter:
    """Cuts a stream of bytes into frames, however it arrives."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Frames that are complete now. Raises FaultError when one is announced longer than the limit."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _LENGTH:
                length = int.from_bytes(self._buffer[start : start + _LENGTH], "big")
                if length > self._limit:
                    raise FaultError(f"a frame of {length} bytes is announced, {self._limit} are allowed")
                if len(self._buffer) - start < _LENGTH + length:
                    break
                begin, start = start + _LENGTH, start + _LENGTH + length
                yield bytes(self._buffer[begin:start])
        finally:
            del self._buffer[:start]


class Channel(asyncio.Protocol):
    """One end of a connection. Made by the event loop's create_unix_connection or create_unix_server."""

    def __init__(
        self,
        on_frame: Callable[[bytes], None],
        on_lost: Callable[[str], None] = lambda _reason: None,
        *,
        max_unsent: int = MAX_UNSENT,
    ) -> None:
        """on_frame: gets every frame, may be replaced at any time. on_lost: gets the reason, "" for a plain end."""
        self.on_frame = on_frame
        self.on_lost = on_lost
        self.lost: str | None = None  #: why the connection is over, "" for a plain end, None while it is not
        self._max_unsent = max_unsent
        self._splitter = FrameSplitter()
        self._transport: asyncio.Transport | None = None
        self._written = asyncio.Event()
        self._written.set()
        self._reason = ""

    # --- sending ---------------------------------------------------------------------------------------------------

    def send(self, frame: bytes) -> None:
        """Queue a frame. Dropped when the connection is over."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if len(frame) > MAX_FRAME:
            raise InternalError(f"a frame of {len(frame)} bytes cannot be sent, {MAX_FRAME} are allowed")
        transport.write(len(frame).to_bytes(_LENGTH, "big") + frame)
        if transport.get_write_buffer_size() > self._max_unsent:
            self.abort(f"the other side does not read: more than {self._max_unsent} bytes wait for it")

    async def flush(self, deadline_s: float) -> None:
        """Wait until everything sent has left this process. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._written.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"the other side of a channel did not read for {deadline_s:g} s") from None

    def close(self) -> None:
        """End the connection after what was sent has left."""
        if self._transport is not None:
            self._transport.close()

    def abort(self, reason: str) -> None:
        """End the connection at once."""
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.abort()

    # --- called by the event loop ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the connection is there."""
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=0)  # pause_writing and resume_writing tell when all has left
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes arrived."""
        try:
            for frame in self._splitter.feed(data):
                self.on_frame(frame)
        except Exception as error:  # noqa: BLE001 - the reason the connection ends with, reported by on_lost
            self.abort(f"{type(error).__name__}: {error}")

    def pause_writing(self) -> None:
        """asyncio: something waits to be sent."""
        self._written.clear()

    def resume_writing(self) -> None:
        """asyncio: everything has left."""
        self._written.set()

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio: the end. A reset connection is the plain end of a process that was killed."""
        reset = isinstance(error, ConnectionResetError | BrokenPipeError)
        self.lost = self._reason or ("" if error is None or reset else str(error))
        self._written.set()
        self.on_lost(self.lost)


async def connect(socket_path: Path, hello: Hello, deadline_s: float) -> tuple[Channel, Welcome]:
    """A worker's side of the greeting. Frames that come right after the Welcome are kept until `attach`.

    Raises FaultError when refused or hung up on, DeadlineExceeded when nothing comes.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[bytes] = loop.create_future()
    channel = Channel(lambda frame: _first(answer, frame, channel), lambda reason: _hung_up(answer, reason))
    try:
        async with asyncio.timeout(deadline_s):
            await loop.create_unix_connection(lambda: channel, str(socket_path))
            channel.send(encode_greeting(hello))
            greeting = decode_greeting(await answer)
    except TimeoutError:
        channel.abort("no answer")
        raise DeadlineExceeded(f"{hello.worker}: the agent did not answer within {deadline_s:g} s") from None
    except OSError as error:
        raise FaultError(f"{hello.worker}: the agent's socket {socket_path} cannot be reached: {error}") from error
    if isinstance(greeting, Welcome):
        return channel, greeting
    channel.abort("not welcome")
    reason = greeting.reason if isinstance(greeting, Refused) else f"it answered with a {type(greeting).__name__}"
    raise FaultError(f"{hello.worker}: refused by the agent: {reason}")


def attach(channel: Channel, on_frame: Callable[[bytes], None], on_lost: Callable[[str], None]) -> None:
    """Hand on what arrived since the greeting and everything from now on; a connection already over is told at once."""
    early, channel.on_frame, channel.on_lost = channel.on_frame, on_frame, on_lost
    if isinstance(early, _Kept):
        for frame in early.frames:
            on_frame(frame)
    if channel.lost is not None:
        on_lost(channel.lost)


class _Kept:
    """Keeps frames for somebody who does not listen yet."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def __call__(self, frame: bytes) -> None:
        self.frames.append(frame)


def _first(answer: asyncio.Future[bytes], frame: bytes, channel: Channel) -> None:
    channel.on_frame = _Kept()
    if not answer.done():
        answer.set_result(frame)


def _hung_up(answer: asyncio.Future[bytes], reason: str) -> None:
    if not answer.done():
        answer.set_exception(FaultError(f"the agent hung up before it answered {reason}".rstrip()))
