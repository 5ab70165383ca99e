"""An endpoint: one name that can tell, call and be called. The same class serves controller, agents and workers.

Owns: correlation of calls and replies, deadlines of calls, handler tasks. Invariants: every call ends (reply, remote
failure, lost peer, deadline); messages from one peer are handled in order of arrival (a handler that is a coroutine
function is started in order), and none of them twice (once.py). Does not know how envelopes travel: `post` is handed
in.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from hybridsched import errors
from hybridsched.errors import DeadlineExceeded, FaultError, HybridschedError, InternalError, UserError, WorkerDied
from hybridsched.runtime.messages import AnyMessage, Envelope, Failure, Ok
from hybridsched.runtime.once import Numbering, Seen

M = TypeVar("M")
Handler = Callable[[Any, str], Any]


class RemoteError(FaultError):
    """The other side raised while handling a call. ``kind`` is its exception class."""

    def __init__(self, kind: str, text: str, where: str) -> None:
        super().__init__(f"{where}: {text}")
        self.kind = kind
        self.text = text
        self.where = where


class Endpoint:
    """One named party."""

    def __init__(self, name: str, post: Callable[[Envelope], None], life: str = "") -> None:
        """life: the incarnation, where a name may live again."""
        self.name = name
        self._numbering = Numbering(life)
        self._seen = Seen()
        self._post = post
        self._handlers: dict[type, Handler] = {}
        self._calls: dict[int, tuple[str, str, asyncio.Future[Any]]] = {}
        self._next_call = 1
        self._gone: dict[str, str] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._next_task = 1
        self.on_error: Callable[[BaseException, str], None] | None = None

    def on(self, kind: type[M], handler: Callable[[M, str], Any]) -> None:
        """Handle messages of this type: ``handler(message, source)``, plain or coroutine function.

        For calls the returned message is the reply (None: Ok); an exception becomes a Failure reply.
        """
        if kind in self._handlers:
            raise InternalError(f"endpoint {self.name}: two handlers for {kind.__name__}")
        self._handlers[kind] = handler

    def tell(self, dst: str, message: AnyMessage) -> None:
        """Send without waiting for a reply."""
        self._post(Envelope(self.name, dst, 0, False, message, self._numbering.next(dst)))

    async def call(self, dst: str, message: AnyMessage, reply: type[M], *, deadline_s: float, what: str) -> M:
        """Send and wait for a reply of type ``reply``, at most ``deadline_s`` seconds.

        Raises DeadlineExceeded, WorkerDied (peer lost before or meanwhile), RemoteError, and the FaultErrors and
        UserErrors of the other side as they are.
        """
        if dst in self._gone:
            raise WorkerDied(f"{what}: {dst} is gone ({self._gone[dst]})")
        number = self._next_call
        self._next_call += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = (dst, what, future)
        try:
            self._post(Envelope(self.name, dst, number, False, message, self._numbering.next(dst)))
            async with asyncio.timeout(deadline_s):
                answer = await future
        except TimeoutError:
            raise DeadlineExceeded(
                f"{what}: {dst} did not answer {type(message).__name__} within {deadline_s:g} s; "
                f"if the machine is only slow, raise deadlines.scale"
            ) from None
        finally:
            self._calls.pop(number, None)
        if isinstance(answer, Failure):
            raise _from_failure(answer, f"{what}: {dst}")
        if not isinstance(answer, reply):
            raise InternalError(f"{what}: {dst} answered {type(answer).__name__}, expected {reply.__name__}")
        return answer

    def deliver(self, envelope: Envelope) -> None:
        """An envelope for this endpoint arrived."""
        if self._seen.again(envelope.src, envelope.serial):
            return
        if envelope.reply:
            waiting = self._calls.get(envelope.call)
            if waiting is not None and not waiting[2].done():
                waiting[2].set_result(envelope.body)
            return
        handler = self._handlers.get(type(envelope.body))
        if handler is None:
            self._reply(
                envelope,
                Failure("InternalError", f"{self.name} has no handler for {type(envelope.body).__name__}"),
            )
            return
        if inspect.iscoroutinefunction(handler):
            self.spawn(self._run(handler, envelope), f"{self.name} handles {type(envelope.body).__name__}")
            return
        try:
            answer = handler(envelope.body, envelope.src)
        except Exception as error:  # noqa: BLE001 - becomes the reply, or the endpoint's error report
            self._failed(envelope, error)
        else:
            self._reply(envelope, answer)

    def peer_lost(self, name: str, reason: str) -> None:
        """Fail every call that waits for ``name``, and those made before it is back (peer_back)."""
        self._gone[name] = reason
        for dst, what, future in list(self._calls.values()):
            if dst == name and not future.done():
                future.set_exception(WorkerDied(f"{what}: {name} is gone ({reason})"))

    def peer_back(self, name: str) -> None:
        """``name`` can be called again."""
        self._gone.pop(name, None)

    def spawn(self, coroutine: Awaitable[None], name: str) -> asyncio.Task[None]:
        """Run a task that this endpoint owns (cancelled by close); errors go to ``on_error``."""
        number = self._next_task
        self._next_task += 1
        task: asyncio.Task[None] = asyncio.ensure_future(coroutine)  # type: ignore[assignment]
        task.set_name(name)
        self._tasks[number] = task
        task.add_done_callback(lambda done: self._reap(number, done))
        return task

    async def close(self) -> None:
        """Cancel handler tasks and fail waiting calls."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _dst, what, future in list(self._calls.values()):
            if not future.done():
                future.set_exception(WorkerDied(f"{what}: {self.name} is closing"))

    async def _run(self, handler: Callable[[Any, str], Awaitable[Any]], envelope: Envelope) -> None:
        try:
            answer = await handler(envelope.body, envelope.src)
        except Exception as error:  # noqa: BLE001 - becomes the reply, or the endpoint's error report
            self._failed(envelope, error)
        else:
            self._reply(envelope, answer)

    def _failed(self, envelope: Envelope, error: Exception) -> None:
        if envelope.call:
            data = getattr(error, "data", None)
            self._reply(envelope, Failure(type(error).__name__, str(error), data if isinstance(data, dict) else {}))
        else:
            self._report(error, f"{self.name} handling {type(envelope.body).__name__} from {envelope.src}")

    def _reply(self, envelope: Envelope, answer: Any) -> None:
        if envelope.call:
            serial = self._numbering.next(envelope.src)
            self._post(
                Envelope(self.name, envelope.src, envelope.call, True, Ok() if answer is None else answer, serial)
            )
        elif isinstance(answer, Failure):
            self._report(InternalError(answer.text), f"message from {envelope.src}")

    def _reap(self, number: int, task: asyncio.Task[None]) -> None:
        self._tasks.pop(number, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._report(error, task.get_name())

    def _report(self, error: BaseException, where: str) -> None:
        if self.on_error is not None:
            self.on_error(error, where)
            return
        asyncio.get_running_loop().call_exception_handler({"message": where, "exception": error})


def _from_failure(failure: Failure, where: str) -> HybridschedError:
    """Failures that callers distinguish come back as their own class; wrong input too, since no retry can mend it."""
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, FaultError | UserError):
        error: HybridschedError = kind(f"{where}: {failure.text}")
        return error
    return RemoteError(failure.kind, failure.text, where)
