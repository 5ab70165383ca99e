"""Frames over unix sockets: whole, in order, bounded, and what happens when the other side goes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridsched.errors import DeadlineExceeded, FaultError
from hybridsched.runtime.adapters.channel import (
    Channel,
    FrameSplitter,
    Hello,
    Refused,
    Welcome,
    attach,
    connect,
    decode_greeting,
    encode_greeting,
)

HELLO = Hello("secret", "standalone.0", "a001.1", 123)
WELCOME = Welcome("config.yaml", {"worker": "standalone.0"}, {})
LONG_S = 30.0


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(LONG_S):
            await test

    asyncio.run(bounded())


async def pair(
    folder: Path, on_frame: Callable[[bytes], None], on_lost: Callable[[str], None], **options: Any
) -> tuple[Channel, Channel, asyncio.Server]:
    """(client, server end, server); the callbacks are the server end's."""
    loop = asyncio.get_running_loop()
    made: asyncio.Future[Channel] = loop.create_future()

    class Accepted(Channel):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            made.set_result(self)

    server = await loop.create_unix_server(lambda: Accepted(on_frame, on_lost), str(folder / "s"))
    client = Channel(lambda _frame: None, **options)
    await loop.create_unix_connection(lambda: client, str(folder / "s"))
    return client, await made, server


@given(st.lists(st.binary(max_size=300), max_size=20), st.lists(st.integers(1, 50), min_size=1, max_size=30))
def test_frames_come_out_whole_however_the_stream_is_cut(frames: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(len(f).to_bytes(4, "big") + f for f in frames)
    splitter, out, at, turn = FrameSplitter(), [], 0, 0
    while at < len(stream):
        step = cuts[turn % len(cuts)]
        out += list(splitter.feed(stream[at : at + step]))
        at, turn = at + step, turn + 1

    assert frames == out


def test_a_frame_that_is_announced_too_long_is_refused() -> None:
    splitter = FrameSplitter(limit=10)

    with pytest.raises(FaultError, match="frame of 11 bytes"):
        list(splitter.feed((11).to_bytes(4, "big")))


def test_frames_of_all_sizes_arrive_in_order_before_the_end_is_told(tmp_path: Path) -> None:
    async def test() -> None:
        got: list[bytes | str] = []
        over = asyncio.Event()
        frames = [os.urandom(i % 50) for i in range(1000)] + [os.urandom(8 << 20), b"", b"last"]
        client, end, server = await pair(tmp_path, got.append, lambda reason: (got.append(reason), over.set())[1])
        for frame in frames:
            client.send(frame)
        await client.flush(LONG_S)
        client.close()
        await over.wait()
        server.close()

        assert [*frames, ""] == got
        assert end.lost == ""

    run(test())


def test_what_is_sent_to_a_peer_that_has_gone_is_dropped(tmp_path: Path) -> None:
    async def test() -> None:
        client, end, server = await pair(tmp_path, lambda _frame: None, lambda _reason: None)
        lost = asyncio.Event()
        client.on_lost = lambda _reason: lost.set()
        end.close()
        await lost.wait()
        client.send(b"into the void")
        await client.flush(LONG_S)
        server.close()

        assert client.lost == ""

    run(test())


def test_a_peer_that_does_not_read_ends_the_channel_instead_of_filling_the_memory(tmp_path: Path) -> None:
    async def test() -> None:
        client, end, server = await pair(tmp_path, lambda _frame: None, lambda _reason: None, max_unsent=1 << 20)
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        client.on_lost = lost.set_result
        assert end._transport is not None
        end._transport.pause_reading()
        for _ in range(64):
            client.send(bytes(64 << 10))
        reason = await lost
        server.close()

        assert reason.startswith("the other side does not read: more than 1048576 bytes")

    run(test())


def test_flush_is_bounded(tmp_path: Path) -> None:
    async def test() -> None:
        client, end, server = await pair(tmp_path, lambda _frame: None, lambda _reason: None)
        assert end._transport is not None
        end._transport.pause_reading()
        client.send(bytes(8 << 20))
        with pytest.raises(DeadlineExceeded, match="did not read"):
            await client.flush(0.1)
        client.abort("done")
        server.close()

    run(test())


def test_a_frame_nobody_understands_ends_the_channel_with_the_reason(tmp_path: Path) -> None:
    async def test() -> None:
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def refuse(frame: bytes) -> None:
            raise ValueError(f"foreign {frame!r}")

        client, _end, server = await pair(tmp_path, refuse, lost.set_result)
        client.send(b"bytes")
        reason = await lost
        server.close()

        assert reason == "ValueError: foreign b'bytes'"

    run(test())


def test_a_refused_worker_is_told_why(tmp_path: Path) -> None:
    async def test() -> None:
        server = await greeting_server(tmp_path, lambda channel: channel.send(encode_greeting(Refused("wrong secret"))))
        with pytest.raises(FaultError, match=r"standalone\.0: refused by the agent: wrong secret"):
            await connect(tmp_path / "s", HELLO, LONG_S)
        server.close()

    run(test())


def test_an_agent_that_hangs_up_instead_of_answering_is_an_error(tmp_path: Path) -> None:
    async def test() -> None:
        server = await greeting_server(tmp_path, lambda channel: channel.close())
        with pytest.raises(FaultError, match="hung up before it answered"):
            await connect(tmp_path / "s", HELLO, LONG_S)
        server.close()

    run(test())


def test_an_agent_that_does_not_answer_is_not_waited_for_without_a_bound(tmp_path: Path) -> None:
    async def test() -> None:
        server = await greeting_server(tmp_path, lambda _channel: None)
        with pytest.raises(DeadlineExceeded, match=r"did not answer within 0\.1 s"):
            await connect(tmp_path / "s", HELLO, 0.1)
        server.close()

    run(test())


def test_a_socket_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FaultError, match=str(tmp_path / "s")):
        run(_connect_only(tmp_path / "s"))


async def _connect_only(path: Path) -> None:
    await connect(path, HELLO, LONG_S)


def test_frames_right_after_the_welcome_wait_for_the_worker_to_listen(tmp_path: Path) -> None:
    async def test() -> None:
        def welcome(channel: Channel) -> None:
            channel.send(encode_greeting(WELCOME))
            channel.send(b"early")
            channel.close()

        server = await greeting_server(tmp_path, welcome)
        channel, answer = await connect(tmp_path / "s", HELLO, LONG_S)
        over = asyncio.Event()
        channel.on_lost = lambda _reason: over.set()
        if channel.lost is None:
            await over.wait()  # everything has arrived before anybody listens
        got: list[bytes] = []
        reasons: list[str] = []
        attach(channel, got.append, reasons.append)
        server.close()

        assert (WELCOME, [b"early"], [""]) == (answer, got, reasons)

    run(test())


async def greeting_server(folder: Path, answer: Callable[[Channel], None]) -> asyncio.Server:
    """Answers the first frame, which must be HELLO."""

    def accept() -> Channel:
        def greet(frame: bytes) -> None:
            assert decode_greeting(frame) == HELLO
            answer(channel)

        channel = Channel(greet)
        return channel

    return await asyncio.get_running_loop().create_unix_server(accept, str(folder / "s"))
