"""Wait for several calls at once and keep every outcome, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def outcomes(calls: Sequence[Awaitable[T]]) -> list[T | BaseException]:
    """Every result or exception, in the order of ``calls``. Cancellation of the caller cancels all."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    return list(results)


async def all_or_raise(calls: Sequence[Awaitable[T]]) -> list[T]:
    """All results; the first exception (by position) after every call has ended."""
    results = await outcomes(calls)
    good: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        good.append(result)
    return good


async def break_on_failure(calls: Sequence[Awaitable[T]], on_failure: Callable[[], None]) -> list[T | BaseException]:
    """Like outcomes(), but ``on_failure`` is called once, as soon as the first call fails."""
    told = False

    async def watched(call: Awaitable[T]) -> T:
        nonlocal told
        try:
            return await call
        except BaseException:
            if not told:
                told = True
                on_failure()
            raise

    return await outcomes([watched(call) for call in calls])
