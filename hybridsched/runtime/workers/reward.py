"""A reward process: decodes responses and scores them, one after the other, until its agent hangs up.

    python -m hybridsched.runtime.workers.reward FD PARENT      FD: its end of a socket pair, PARENT: the agent's pid

Owns the user's reward function of one process, and the few frames it exchanges with `adapters.reward_pool`: `Setup`,
answered by one `Answer` when everything is imported; then `Job`, `Answer`, `Job`, `Answer`, ... Invariants: one answer
per job; whatever the function prints goes to the log file, never into the frames; the process dies with its agent
(parent-death signal, and the end of the socket). Imports no torch; tokenizer and function only once it runs.

Does not: time out or survive its own function (the pool kills and replaces it), retry, or shape rewards.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from typing import Any

import msgspec
import numpy as np

from hybridsched.runtime.adapters.lifeline import spare_signals

_PR_SET_PDEATHSIG = 1
_LENGTH_BYTES = 4
_LOGGED_TRACEBACKS = 100  # of one process; a function that fails always must not fill the disk
_REASON_CHARS = 500


class Setup(msgspec.Struct, frozen=True, array_like=True):
    """What the process is to load."""

    function: str
    kwargs: dict[str, Any]
    tokenizer: str


class Job(msgspec.Struct, frozen=True, array_like=True):
    """One response to score. ``tokens``: int32 in native byte order."""

    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    tokens: bytes


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """A reward, or why there is none; to a Setup: neither, or what went wrong (``kind``: exception class)."""

    reward: float | None = None
    failure: str | None = None
    kind: str = ""


def frame(message: Setup | Job | Answer) -> bytes:
    """A message as it travels: length (4 bytes, big-endian) and msgpack. TypeError for what msgpack cannot hold."""
    body = msgspec.msgpack.encode(message, enc_hook=_plain)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def one_line(text: str) -> str:
    """For people, in a table: white space folded, cut to a readable length."""
    line = " ".join(text.split())
    return line if len(line) <= _REASON_CHARS else line[: _REASON_CHARS - 1] + "…"


def _plain(value: Any) -> Any:
    """numpy scalars and arrays in a data set's columns."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent to a reward process")


class Scorer:
    """Tokenizer and reward function of this process. Raises DataError when one of them cannot be loaded."""

    def __init__(self, setup: Setup) -> None:
        from hybridsched.data.tokenizer import Tokenizer
        from hybridsched.rewards import resolve_reward

        self._tokenizer = Tokenizer.from_folder(setup.tokenizer)
        self._function = resolve_reward(setup.function, setup.kwargs)
        self._logged = 0

    def score(self, job: Job) -> Answer:
        """The answer to one job; failures of the function are logged with their traceback."""
        from hybridsched.rewards import RewardFailure, score_one

        text = self._tokenizer.decode(np.frombuffer(job.tokens, np.int32))
        try:
            reward = score_one(self._function, job.data_source, text, job.ground_truth, job.extra_info)
        except RewardFailure as failure:
            self._log(failure.detail or f"{failure.reason}\n")
            return Answer(failure=one_line(failure.reason))
        return Answer(reward)

    def _log(self, text: str) -> None:
        self._logged += 1
        if self._logged <= _LOGGED_TRACEBACKS:
            print(text, file=sys.stderr, end="", flush=True)
        if self._logged == _LOGGED_TRACEBACKS:
            print("(further failures of this process are not logged)", file=sys.stderr, flush=True)


def die_with(parent: int) -> None:
    """Be killed when the parent dies; end at once when it already has."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _receive(sock: socket.socket) -> bytes | None:
    """The body of the next frame; None when the agent hung up."""
    head = _exactly(sock, _LENGTH_BYTES)
    return None if head is None else _exactly(sock, int.from_bytes(head, "big"))


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            return None
        data += part
    return bytes(data)


def serve(sock: socket.socket) -> None:
    """Setup, then jobs until the end of the connection."""
    first = _receive(sock)
    if first is None:
        return
    try:
        scorer = Scorer(msgspec.msgpack.decode(first, type=Setup))
    except Exception as error:  # noqa: BLE001 - reported to the pool, which says it at the start of the run
        sock.sendall(frame(Answer(failure=str(error), kind=type(error).__name__)))
        return
    sock.sendall(frame(Answer()))
    jobs = msgspec.msgpack.Decoder(Job)
    while (body := _receive(sock)) is not None:
        sock.sendall(frame(scorer.score(jobs.decode(body))))


def main(argv: list[str]) -> None:
    """Entry point of the process."""
    die_with(int(argv[2]))
    spare_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's to handle
    with socket.socket(fileno=int(argv[1])) as sock:
        try:
            serve(sock)
        except ConnectionError:  # the agent died in the middle of an answer
            return


if __name__ == "__main__":
    main(sys.argv)
