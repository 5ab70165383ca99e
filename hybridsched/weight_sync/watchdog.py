"""A thread that cuts a transfer that stopped moving. Owns one deadline; knows nothing of groups.

``with BucketWatchdog(timeout_s, group.abort) as dog: send_weights(..., on_progress=dog.progress)``

It covers what a waiting thread cannot cut itself: a gather or a loader that hangs between two buckets, and the
agent's order over a side channel (`order_abort`). ``on_expire`` is called at most once, from the watchdog's thread or
from the thread that ordered the abort, with the reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType


class BucketWatchdog:
    """Calls ``on_expire(reason)`` when no bucket was finished for ``timeout_s`` seconds, or when told to."""

    def __init__(self, timeout_s: float, on_expire: Callable[[str], None]) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, not {timeout_s}")
        self._timeout_s = timeout_s
        self._on_expire = on_expire
        self._changed = threading.Condition()
        self._deadline = 0.0
        self._at = "before the first bucket"
        self._running = False
        self._fired: str | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> BucketWatchdog:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    @property
    def fired(self) -> str | None:
        """Why it fired, None while it has not."""
        return self._fired

    def start(self) -> None:
        """Arm: the first deadline runs from now."""
        with self._changed:
            if self._thread is not None:
                raise RuntimeError("a BucketWatchdog is started once")
            self._running = True
            self._deadline = time.monotonic() + self._timeout_s
            self._thread = threading.Thread(target=self._watch, name="bucket-watchdog", daemon=True)
            self._thread.start()

    def progress(self, done: int, total: int) -> None:
        """A bucket is finished: the deadline starts anew (fits ``on_progress``)."""
        with self._changed:
            self._deadline = time.monotonic() + self._timeout_s
            self._at = f"after bucket {done} of {total}"

    def order_abort(self, reason: str) -> None:
        """Fire now, from any thread: the agent says so."""
        self._fire(reason)

    def stop(self) -> None:
        """Disarm and join. Idempotent."""
        with self._changed:
            self._running = False
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        with self._changed:
            while self._running and self._fired is None:
                left = self._deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            expired = self._running and self._fired is None
            at = self._at
        if expired:
            self._fire(f"no bucket finished within {self._timeout_s:g} s ({at})")

    def _fire(self, reason: str) -> None:
        with self._changed:
            if self._fired is not None:
                return
            self._fired = reason
            self._changed.notify_all()
        self._on_expire(reason)
