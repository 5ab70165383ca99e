"""Doorbells wake agents of one host; a ring nobody hears is no error."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hybridsched.runtime.adapters.doorbell import Doorbell


def test_a_ring_wakes_the_other_rank(tmp_path: Path) -> None:
    async def test() -> None:
        mine, other = Doorbell(tmp_path, 0), Doorbell(tmp_path, 1)
        woken = asyncio.Event()
        other.answer(woken.set)
        mine.ring(1)
        async with asyncio.timeout(30):
            await woken.wait()
        asyncio.get_running_loop().remove_reader(other._socket)
        mine.close()
        other.close()

    asyncio.run(test())


def test_many_rings_are_one_wake(tmp_path: Path) -> None:
    async def test() -> None:
        bell = Doorbell(tmp_path, 0)
        wakes: list[None] = []
        bell.answer(lambda: wakes.append(None))
        for _ in range(5):
            bell.ring(0)
        await asyncio.sleep(0.05)
        asyncio.get_running_loop().remove_reader(bell._socket)
        bell.close()

        assert [None] == wakes

    asyncio.run(test())


def test_ringing_at_nobody_and_at_somebody_who_sleeps_does_not_fail(tmp_path: Path) -> None:
    bell, sleeper = Doorbell(tmp_path, 0), Doorbell(tmp_path, 1)
    bell.ring(7)
    for _ in range(10_000):  # far more than the socket holds
        bell.ring(1)
    sleeper.close()
    bell.ring(1)
    bell.close()
