"""The virtual loop: asyncio unchanged, time that jumps, the same order every time, and an end in every case."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from hybridsched.errors import DeadlineExceeded, InternalError
from hybridsched.runtime.clock import Clock, RealClock
from hybridsched.simulation.clock import EPOCH_BASE, VirtualClock, run_virtual

WEEK_S = 7 * 86400.0


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_week_of_sleep_ends_at_exactly_a_week() -> None:
    async def main() -> float:
        await asyncio.sleep(WEEK_S)
        return now()

    assert run_virtual(main()) == WEEK_S


@pytest.mark.parametrize("start", [0.0, 1e-9, 1.0, 86400.0 * 365, 1e12])
def test_short_timers_fire_at_any_magnitude_of_time(start: float) -> None:
    async def main() -> bool:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(start)
        before = now()
        fired = loop.create_future()
        loop.call_at(math.nextafter(before, math.inf), fired.set_result, True)
        return bool(await fired)

    assert run_virtual(main()) is True


def test_sleeps_run_side_by_side() -> None:
    async def main() -> tuple[list[str], float]:
        order: list[str] = []

        async def nap(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            order.append(f"{name}@{now():g}")

        async with asyncio.TaskGroup() as group:
            for name, seconds in (("c", 3), ("a", 1), ("b", 2)):
                group.create_task(nap(name, seconds))
        return order, now()

    assert run_virtual(main()) == (["a@1", "b@2", "c@3"], 3.0)


def test_timers_due_together_fire_in_the_order_they_were_set() -> None:
    async def main() -> list[int]:
        order: list[int] = []
        loop = asyncio.get_running_loop()
        for i in range(50):
            loop.call_at(5.0, order.append, i)
            loop.call_at(1.0 + i / 100, int)  # other timers must not disturb the ties
        await asyncio.sleep(6)
        return order

    assert run_virtual(main()) == list(range(50))


def test_timeout_and_wait_for_end_at_their_virtual_time() -> None:
    async def main() -> list[float]:
        ends = []
        for wait in (_under_timeout, _under_wait_for):
            begin = now()
            with pytest.raises(TimeoutError):
                await wait(2.5)
            ends.append(now() - begin)
        return ends

    assert run_virtual(main()) == [2.5, 2.5]


async def _under_timeout(seconds: float) -> None:
    async with asyncio.timeout(seconds):
        await asyncio.sleep(WEEK_S)


async def _under_wait_for(seconds: float) -> None:
    await asyncio.wait_for(asyncio.sleep(WEEK_S), seconds)


def test_queue_event_and_condition_work_unchanged() -> None:
    async def main() -> list[tuple[int, float]]:
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=1)
        got = []

        async def produce() -> None:
            for i in range(3):
                await asyncio.sleep(1)
                await queue.put(i)

        async with asyncio.TaskGroup() as group:
            group.create_task(produce())
            for _ in range(3):
                got.append((await queue.get(), now()))
        return got

    assert run_virtual(main()) == [(0, 1.0), (1, 2.0), (2, 3.0)]


def test_a_deadlock_raises_and_names_who_waits_and_where() -> None:
    async def waits_for_nothing() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.sleep(3)
        await asyncio.create_task(waits_for_nothing(), name="the-lost-one")

    with pytest.raises(InternalError, match=r"deadlock: at virtual time 3\.0.*the-lost-one \(in .*wait at locks\.py"):
        run_virtual(main())


def test_a_sleep_without_end_is_a_deadlock() -> None:
    with pytest.raises(InternalError, match="deadlock"):
        run_virtual(asyncio.sleep(math.inf))


def test_time_that_stands_still_is_a_livelock() -> None:
    async def poll() -> None:
        while True:  # noqa: ASYNC110 - the mistake under test
            await asyncio.sleep(0)

    with pytest.raises(InternalError, match=r"livelock: virtual time stands at 0\.0.*task-0"):
        run_virtual(poll(), spin_limit=1000)


def test_the_time_limit_is_a_deadline_that_names_the_unfinished() -> None:
    async def main() -> None:
        while True:  # noqa: ASYNC110 - has no end on purpose
            await asyncio.sleep(10)

    with pytest.raises(DeadlineExceeded, match=r"limit of 95 s.*100\.0.*task-0"):
        run_virtual(main(), limit_s=95)


def test_a_run_within_the_limit_does_not_notice_it() -> None:
    assert run_virtual(asyncio.sleep(95, "done"), limit_s=95) == "done"


def test_tasks_left_behind_are_cancelled_and_finish_their_cleanup() -> None:
    ended: list[tuple[str, float]] = []

    async def left(name: str) -> None:
        try:
            await asyncio.sleep(WEEK_S)
        finally:
            await asyncio.sleep(2)
            ended.append((name, now()))

    async def main() -> str:
        for name in ("first", "second"):
            asyncio.create_task(left(name))  # noqa: RUF006 - left behind on purpose
        await asyncio.sleep(1)
        return "result"

    assert run_virtual(main()) == "result"
    assert ended == [("first", 3.0), ("second", 3.0)]


def test_a_task_that_will_not_end_is_reported() -> None:
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue

    async def main() -> None:
        asyncio.create_task(stubborn(), name="stubborn")  # noqa: RUF006 - left behind on purpose
        await asyncio.sleep(1)

    with pytest.raises(InternalError, match=r"did not end after being cancelled.*stubborn"):
        run_virtual(main())


def test_an_exception_passes_through() -> None:
    async def main() -> None:
        await asyncio.sleep(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_virtual(main())


async def _executor() -> None:
    await asyncio.get_running_loop().run_in_executor(None, int)


async def _thread() -> None:
    await asyncio.to_thread(int)


async def _subprocess() -> None:
    await asyncio.create_subprocess_exec("true")


async def _socket() -> None:
    await asyncio.open_connection("127.0.0.1", 1)


async def _server() -> None:
    await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)


@pytest.mark.parametrize("outside", [_executor, _thread, _subprocess, _socket, _server])
def test_the_world_outside_is_refused(outside: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await outside()

    with pytest.raises(InternalError, match="under virtual time"):
        run_virtual(main())


def test_a_call_from_another_thread_is_refused() -> None:
    import threading

    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        seen: list[str] = []

        def other() -> None:
            try:
                loop.call_soon_threadsafe(int)
            except InternalError as error:
                seen.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        loop.call_soon_threadsafe(int)  # from the loop's own thread: fine
        return seen

    assert ["another thread" in text for text in run_virtual(main())] == [True]


def test_a_timer_at_nan_is_refused() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_at(math.nan, int)

    with pytest.raises(InternalError, match="NaN"):
        run_virtual(main())


def test_virtual_clock_reads_loop_time_and_its_epoch() -> None:
    async def main() -> tuple[float, float]:
        clock: Clock = VirtualClock()
        await asyncio.sleep(12.5)
        return clock.now(), clock.wall()

    assert run_virtual(main()) == (12.5, EPOCH_BASE + 12.5)


def test_real_clock_is_on_the_axis_of_the_real_loop() -> None:
    async def main() -> list[bool]:
        clock: Clock = RealClock()
        before, between, after = asyncio.get_running_loop().time(), clock.now(), asyncio.get_running_loop().time()
        return [before <= between <= after, clock.wall() > EPOCH_BASE]

    assert asyncio.run(main()) == [True, True]


PROGRAM = """
import asyncio, hashlib
from hybridsched.simulation.clock import run_virtual

async def main():
    log = []
    async def work(i):
        try:
            for k in range(5):
                await asyncio.sleep((i * 7919 + k * 104729) % 13 / 4)
                log.append((i, k, asyncio.get_running_loop().time(), asyncio.current_task().get_name()))
            await asyncio.sleep(10_000)
        except asyncio.CancelledError:
            log.append(("cancelled", i))
            raise
    async def fail():
        await asyncio.sleep(40)
        raise ValueError
    junk = [object() for _ in range(int(__import__("sys").argv[1]))]
    try:
        async with asyncio.TaskGroup() as group:
            for i in range(40):
                group.create_task(work(i))
            group.create_task(fail())
    except* ValueError:
        pass
    done, _ = await asyncio.wait([asyncio.create_task(asyncio.sleep(1, i)) for i in range(40)])
    log.append([task.result() for task in done])
    return log

print(hashlib.sha256(repr(run_virtual(main())).encode()).hexdigest())
"""


def test_same_program_same_order_in_every_process_also_when_sets_of_tasks_are_iterated() -> None:
    digests: set[Any] = set()
    for junk in (0, 1, 777):  # moves objects in memory, so that hashes by address would differ
        done = subprocess.run([sys.executable, "-c", PROGRAM, str(junk)], capture_output=True, text=True, timeout=60)
        assert done.stderr == ""
        digests.add(done.stdout)
    assert len(digests) == 1


def test_garbage_collection_is_as_before_after_a_run_however_it_ended() -> None:
    import gc

    async def fails() -> None:
        raise ValueError("as planned")

    before = gc.get_threshold()
    with pytest.raises(ValueError, match="as planned"):
        run_virtual(fails())
    assert before == gc.get_threshold()
