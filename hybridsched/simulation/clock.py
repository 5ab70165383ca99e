"""Virtual time for asyncio: the real runtime runs unchanged, and a day passes in a second.

Owns ``VirtualLoop`` (an event loop that never blocks: when nothing is ready, time jumps to the next timer),
``run_virtual`` (runs one coroutine on such a loop and leaves nothing behind) and ``VirtualClock``.

Invariants:
  - ``loop.time()`` changes only by jumping to the exact due time of the earliest timer; callbacks take no time.
  - Timers due at the same instant fire in the order in which they were set.
  - Same program, same order, every time. Tasks hash by their birth number, so that code iterating a *set of tasks*
    (``TaskGroup`` cancelling its children, the result of ``asyncio.wait``) sees the same order in every process.
    Sets of other objects (plain futures, strings under hash randomization) are the program's own business.
  - It always ends: nothing ready and no timer left is a deadlock and raises, naming the waiting tasks; so does time
    that stands still for ``spin_limit`` rounds; so does a time limit.

It does not do I/O: threads, subprocesses, sockets and file descriptors have no place in virtual time and raise.

The loop builds on ``asyncio.BaseEventLoop`` and on four of its internals (``_scheduled``, ``_selector``,
``_clock_resolution``, ``_process_events``), the same in CPython 3.11 to 3.14; ``tests/fast/test_virtual_clock.py``
notices if that ends.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import math
import threading
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, NoReturn, TypeVar

from hybridsched.errors import DeadlineExceeded, InternalError
from hybridsched.runtime.garbage import RARELY

T = TypeVar("T")

#: Wall clock at virtual time 0: 2025-01-01 00:00:00 UTC. A constant, so that event logs compare byte for byte.
EPOCH_BASE = 1_735_689_600.0
#: Rounds of the loop without time moving before it counts as a livelock (tens of seconds of real time).
SPIN_LIMIT = 10_000_000
#: Virtual seconds cancelled tasks get for their clean-up at the end of ``run_virtual``.
DRAIN_S = 3600.0
_DRAIN_ROUNDS = 3
_NAMED_AT_MOST = 20


class VirtualTask(asyncio.Task[Any]):
    """A task whose hash, and so its place in a set, is its birth number on its loop."""

    def __init__(self, coro: Any, loop: VirtualLoop, name: str, context: Context | None, birth: int) -> None:
        self.birth = birth  # first: the base class puts the task into asyncio's weak set of all tasks
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self.birth


class _FifoTimer(asyncio.TimerHandle):
    """A timer that, among timers due at the same instant, keeps the order in which they were set."""

    __slots__ = ("_due", "_order")
    _due: float
    _order: int

    def __lt__(self, other: _FifoTimer) -> bool:  # type: ignore[override]  # the loop's heap holds nothing else
        due, others = self._due, other._due
        return self._order < other._order if due == others else due < others


class _JumpSelector:
    """Stands where a selector would: instead of waiting for a file descriptor it moves the loop's time."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        """Called once a round; ``timeout`` is 0 when something is ready, None when nothing will ever be."""
        self._loop.jump(timeout)
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time. See the module's docstring for what holds."""

    _scheduled: list[_FifoTimer]
    _clock_resolution: float
    _stopping: bool

    def __init__(self, *, limit_s: float | None = None, spin_limit: int = SPIN_LIMIT) -> None:
        super().__init__()
        self._now = 0.0
        self._births = 0
        self._timers = 0
        self._spins = 0
        self._spin_limit = spin_limit
        self._owner = threading.get_ident()
        self._limit_s = limit_s
        self._selector = _JumpSelector(self)
        self._clock_resolution = math.ulp(1.0)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def allow(self, seconds: float) -> None:
        """Set the time limit ``seconds`` from now and forget how long time has stood still (for a clean-up)."""
        self._limit_s = self._now + seconds
        self._spins = 0

    def jump(self, timeout: float | None) -> None:
        """One round begins: move time if nothing is ready.

        Raises InternalError for a deadlock or livelock, DeadlineExceeded at the time limit.
        """
        head = self._scheduled[0]._due if self._scheduled else math.inf
        due = self._now if timeout == 0 else head
        if due <= self._now:
            self._spins += 1
            if self._spins > self._spin_limit:
                raise InternalError(
                    f"livelock: virtual time stands at {self._now:.6f} s for {self._spins} rounds of the event loop; "
                    f"something polls without sleeping. Unfinished: {self.waiting()}"
                )
            return
        if due == math.inf:
            raise InternalError(
                f"deadlock: at virtual time {self._now:.6f} s nothing is ready and no timer is set, so nothing can "
                f"ever happen again. Waiting: {self.waiting()}"
            )
        if self._limit_s is not None and due > self._limit_s:
            raise DeadlineExceeded(
                f"virtual time limit of {self._limit_s:g} s reached (next timer at {due:.6f} s). "
                f"Unfinished: {self.waiting()}. Raise limit_s, or find what does not end"
            )
        self._spins = 0
        self._now = due
        # asyncio runs timers due before time() + resolution; it must exceed one step of the float at any magnitude.
        self._clock_resolution = math.ulp(due)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As asyncio's, with first-set-first-fired among equal times. Raises InternalError for NaN."""
        self._check_closed()
        if math.isnan(when):
            raise InternalError(f"a timer for {callback!r} was set to NaN seconds")
        timer = _FifoTimer(when, callback, args, self, context)
        timer._due = when
        timer._order = self._timers
        self._timers += 1
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def create_task(  # type: ignore[override]
        self, coro: Generator[Any, None, T] | Coroutine[Any, Any, T], *, name: object = None, context: Any = None
    ) -> asyncio.Task[T]:
        """A task that hashes, and unless named is named, by its birth number on this loop."""
        self._check_closed()
        birth = self._births
        self._births += 1
        return VirtualTask(coro, self, f"task-{birth}" if name is None else str(name), context, birth)

    def unfinished_tasks(self) -> list[VirtualTask]:
        """Tasks that are not done, oldest first."""
        return sorted((t for t in asyncio.all_tasks(self) if isinstance(t, VirtualTask)), key=lambda t: t.birth)

    def waiting(self) -> str:
        """The unfinished tasks and where each stands, for an error message."""
        tasks = self.unfinished_tasks()
        named = [f"{t.get_name()} ({_where(t)})" for t in tasks[:_NAMED_AT_MOST]]
        more = len(tasks) - len(named)
        return ", ".join(named) + (f" and {more} more" if more > 0 else "") if tasks else "no task"

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Allowed from the loop's own thread only. Raises InternalError from another."""
        if threading.get_ident() != self._owner:
            raise InternalError(f"{callback!r} was scheduled from another thread; virtual time knows only one")
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> NoReturn:  # type: ignore[override]
        """Raises InternalError: there are no threads in virtual time."""
        _refuse(f"run_in_executor({getattr(func, '__qualname__', func)!s})", "use the `offload` that was handed in")

    async def create_connection(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        """Raises InternalError."""
        _refuse("create_connection", "use the in-memory transport")

    async def create_server(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        """Raises InternalError."""
        _refuse("create_server", "use the in-memory transport")

    async def create_datagram_endpoint(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        """Raises InternalError."""
        _refuse("create_datagram_endpoint", "use the in-memory transport")

    async def subprocess_exec(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        """Raises InternalError."""
        _refuse("subprocess_exec", "use the `spawn` that was handed in")

    async def subprocess_shell(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        """Raises InternalError."""
        _refuse("subprocess_shell", "use the `spawn` that was handed in")

    def add_reader(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        """Raises InternalError."""
        _refuse("add_reader", "use the in-memory transport")

    def add_writer(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        """Raises InternalError."""
        _refuse("add_writer", "use the in-memory transport")

    def _process_events(self, event_list: list[Any]) -> None:
        """Nothing: the jump selector never reports one."""

    def _write_to_self(self) -> None:
        """Nothing: nobody sleeps in a selector that would have to be woken."""

    def _check_closed(self) -> None:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")


class VirtualClock:
    """The clock of a virtual loop: ``now`` is loop time, ``wall`` is ``epoch`` plus loop time.

    Without a loop it binds to the running one at its first reading.
    """

    __slots__ = ("_loop", "epoch")

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None, *, epoch: float = EPOCH_BASE) -> None:
        self._loop = loop
        self.epoch = epoch

    def now(self) -> float:
        """Virtual seconds."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop.time()

    def wall(self) -> float:
        """Seconds since the Unix epoch, as the virtual world has it."""
        return self.epoch + self.now()


def run_virtual(coro: Coroutine[Any, Any, T], *, limit_s: float | None = None, spin_limit: int = SPIN_LIMIT) -> T:
    """Run ``coro`` in virtual time from 0 and return its result; every task it left behind is cancelled and drained.

    limit_s: virtual seconds after which DeadlineExceeded is raised. Raises InternalError for a deadlock, for a
    livelock, and for tasks that do not end within DRAIN_S after being cancelled; whatever ``coro`` raises passes
    through (with a note when the drain found something too).
    """
    loop = VirtualLoop(limit_s=limit_s, spin_limit=spin_limit)
    thresholds = gc.get_threshold()
    gc.set_threshold(*RARELY)  # the log of a run only grows, too
    try:
        try:
            result = loop.run_until_complete(coro)
        except BaseException as error:
            leftover = _drain(loop)
            if leftover:
                error.add_note(leftover)
            raise
        leftover = _drain(loop)
        if leftover:
            raise InternalError(leftover)
        return result
    finally:
        gc.set_threshold(*thresholds)
        loop.close()


def _drain(loop: VirtualLoop) -> str:
    """Cancel all tasks, oldest first, until none is left. Returns a complaint, empty when all is well."""
    complaint = ""
    for _ in range(_DRAIN_ROUNDS):
        tasks = loop.unfinished_tasks()
        if not tasks:
            break
        for task in tasks:
            task.cancel()
        loop.allow(DRAIN_S)
        try:
            loop.run_until_complete(_settle(tasks))
        except (InternalError, DeadlineExceeded) as error:
            complaint = f"tasks did not end after being cancelled: {error}"
    tasks = loop.unfinished_tasks()
    if tasks:
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # said below, once and in order
        return complaint or f"tasks did not end after {_DRAIN_ROUNDS} cancellations: {loop.waiting()}"
    loop.allow(DRAIN_S)
    loop.run_until_complete(loop.shutdown_asyncgens())
    return ""


async def _settle(tasks: list[VirtualTask]) -> None:
    """Wait until all are done; one that fails while being cancelled is reported as asyncio.run reports it."""
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for task, outcome in zip(tasks, outcomes, strict=True):
        if isinstance(outcome, Exception):
            message = f"{task.get_name()}, left behind by run_virtual, failed while being cancelled"
            context = {"message": message, "exception": outcome, "task": task}
            asyncio.get_running_loop().call_exception_handler(context)


def _where(task: asyncio.Task[Any]) -> str:
    """Function, file and line of the innermost frame of a waiting task."""
    coro: Any = task.get_coro()
    frame = None
    while coro is not None and getattr(coro, "cr_frame", None) is not None:
        frame = coro.cr_frame
        coro = coro.cr_await
    if frame is None:
        return "not started"
    file = frame.f_code.co_filename.rsplit("/", 1)[-1]
    return f"in {frame.f_code.co_qualname} at {file}:{frame.f_lineno}"


def _refuse(what: str, instead: str) -> NoReturn:
    raise InternalError(f"{what} was called under virtual time, where nothing outside the program exists; {instead}")
