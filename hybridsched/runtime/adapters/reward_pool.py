"""Scores responses in processes of their own, beside the agent. Implements `runtime.supervision.RewardPool`.

Owns the reward processes of a node (`workers.reward`): starting, feeding, timing out, replacing and ending them.

Invariants
    A bad reward function never raises here and never becomes a zero: each response gets a reward or a failure.
    A response that hangs or kills its process costs that response and that process, nothing else; the process is
    replaced when the next response needs it.
    Every process is in a session of its own and is killed with everything it started; none is left after `close`.

Does not: retry (the rollout worker generates a failed response again), shape rewards, or judge how many may fail.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec
import numpy as np

from hybridsched.config.schema import RunConfig
from hybridsched.errors import DataError, DeadlineExceeded, FaultError, HybridschedError, InternalError
from hybridsched.runtime import messages as m
from hybridsched.runtime.workers import settings
from hybridsched.runtime.workers.reward import Answer, Job, Setup, frame, one_line

_MODULE = "hybridsched.runtime.workers.reward"
_LAUNCHER_VARIABLES = ("PMI", "PMIX", "OMPI", "MPI", "HYDRA", "SLURM")
_REAP_S = 10.0  # a killed process is gone within milliseconds; this bounds a machine in trouble
_LOG_TAIL = 5  # lines of the log in a message

Scored = tuple[float | None, str | None]


class _Lost(FaultError):
    """The process is gone; the message says why, for the response it was scoring."""


class _Process:
    """One place of the pool: a process, or none until the next response needs it."""

    def __init__(self, setup: Setup, log: Path, start_s: float) -> None:
        self._setup = setup
        self._log = log
        self._start_s = start_s
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @property
    def up(self) -> bool:
        """True while it can score."""
        return self._process is not None

    async def start(self) -> None:
        """Start and wait until everything is imported. Raises DataError, DeadlineExceeded, FaultError."""
        what = f"starting a reward process for reward.function {self._setup.function!r}"
        try:
            async with asyncio.timeout(self._start_s):
                answer = await self._launch()
        except TimeoutError:
            await self.end()
            raise DeadlineExceeded(
                f"{what}: it was not ready within {self._start_s:g} s (deadlines.start_s); does importing it hang? "
                f"See {self._log}"
            ) from None
        except _Lost as gone:
            raise DataError(f"{what}: it ended while importing ({gone}). {self._tail()}") from gone
        except OSError as error:
            await self.end()
            raise FaultError(
                f"{what}: {error.strerror or error}; is the machine out of memory or processes?"
            ) from error
        except BaseException:
            self._kill()
            raise
        if answer.failure is not None:
            await self.end()
            if answer.kind == "DataError":
                raise DataError(answer.failure)
            raise DataError(f"{what} failed with {answer.kind}: {answer.failure}. {self._tail()}")

    async def score(self, job: bytes, timeout_s: float) -> Answer:
        """The answer to one job frame. Raises _Lost; then the process is gone."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(job)
        except TimeoutError:
            await self.end()
            raise _Lost(f"timed out after {timeout_s:g} s (reward.timeout_s)") from None
        except _Lost:
            raise
        except BaseException:  # cancelled: an answer nobody waits for must not meet the next job
            self._kill()
            raise

    async def end(self) -> str:
        """Kill it and everything it started; returns how it ended. Nothing happens when it is not there."""
        process = self._process
        if process is None:
            return "it was not running"
        self._kill()
        try:
            async with asyncio.timeout(_REAP_S):
                code = await process.wait()
        except TimeoutError:
            return f"killed, but not gone after {_REAP_S:g} s (stuck in the kernel?)"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    async def _launch(self) -> Answer:
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._open_log() as log:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    _MODULE,
                    str(theirs.fileno()),
                    str(os.getpid()),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env=_environment(),
                )
            self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        return await self._exchange(frame(self._setup))

    async def _exchange(self, message: bytes) -> Answer:
        try:
            self._writer.write(message)
            await self._writer.drain()
            length = int.from_bytes(await self._reader.readexactly(4), "big")
            return msgspec.msgpack.decode(await self._reader.readexactly(length), type=Answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            process = self._process
            # It hung up, so it is dead or dying: let it finish dying of its own cause, which is what people ask for.
            if process is not None:
                try:
                    async with asyncio.timeout(1.0):
                        await process.wait()
                except TimeoutError:
                    raise _Lost(f"the reward process closed its connection ({await self.end()})") from None
            raise _Lost(f"the reward process died: {await self.end()}") from None

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it left nothing behind
        if hasattr(self, "_writer"):
            self._writer.close()

    def _open_log(self) -> BinaryIO:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        return open(self._log, "ab")  # handed to the child and closed by the caller

    def _tail(self) -> str:
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL:]
        except OSError as error:
            return f"Its log {self._log} cannot be read: {error.strerror or error}"
        return f"End of {self._log}: " + " | ".join(lines) if lines else f"Its log {self._log} is empty"


class PoolContext(Protocol):
    """What the pool needs of a RunContext."""

    @property
    def attempt_folder(self) -> str | Path: ...


class ProcessRewardPool:
    """The reward processes of one node."""

    def __init__(self, config: RunConfig, context: PoolContext, name: str | None = None) -> None:
        """Logs are ``<attempt folder>/logs/<name>.reward.<i>.log``.

        name: of this node, e.g. "agent.2" (None: host and pid).
        """
        name = name or f"{socket.gethostname()}.{os.getpid()}"
        model = config.actor_rollout_ref.model
        tokenizer = model.tokenizer_path or model.path
        setup = Setup(config.reward.function, dict(config.reward.kwargs), tokenizer or "")
        start_s = config.deadlines.start_s * config.deadlines.scale
        self._needed = tokenizer is not None  # emulated engines score by themselves
        self._timeout_s = config.reward.timeout_s
        self._queue_s = settings.reward_queue_s(config)
        self._processes = [
            _Process(setup, Path(context.attempt_folder) / "logs" / f"{name}.reward.{i}.log", start_s)
            for i in range(config.reward.workers)
        ]
        self._idle: asyncio.Queue[_Process] = asyncio.Queue()
        for process in self._processes:
            self._idle.put_nowait(process)
        self._closed = False

    async def check(self) -> None:
        """Before the first `score`: start all processes, so that a function that does not import ends the run now.

        Raises DataError (what the user has to correct), DeadlineExceeded, FaultError; then no process is left.
        """
        if not self._needed:
            return
        results = await asyncio.gather(*[process.start() for process in self._processes], return_exceptions=True)
        problems = [result for result in results if isinstance(result, BaseException)]
        if problems:
            await self.close()
            raise problems[0]

    async def score(self, request: m.Envelope) -> m.Envelope:
        """Answer a RewardRequest with a RewardReply: one (reward, failure) per response, in order."""
        body = request.body
        if not isinstance(body, m.RewardRequest):
            raise InternalError(f"the reward pool was handed a {type(body).__name__}")
        scored = await asyncio.gather(*[self._score_one(body, tokens) for tokens in body.responses])
        return m.Envelope(request.dst, request.src, request.call, True, m.RewardReply(list(scored)))

    async def close(self) -> None:
        """End the processes; responses being scored fail. Idempotent."""
        self._closed = True
        await asyncio.gather(*[process.end() for process in self._processes])

    @property
    def pids(self) -> Sequence[int]:
        """Processes that are up (tests, status)."""
        return [p._process.pid for p in self._processes if p._process is not None]

    async def _score_one(self, request: m.RewardRequest, tokens: np.ndarray[Any, Any]) -> Scored:
        try:
            data = np.ascontiguousarray(tokens, np.int32).tobytes()
            job = frame(Job(request.data_source, request.ground_truth, request.extra_info, data))
        except (TypeError, ValueError) as error:
            return None, one_line(f"the sample cannot be sent to a reward process: {error}")
        try:
            async with asyncio.timeout(self._queue_s):
                process = await self._idle.get()
        except TimeoutError:
            return None, f"no reward process was free within {self._queue_s:g} s; raise reward.workers"
        try:
            return await self._on(process, job)
        finally:
            self._idle.put_nowait(process)

    async def _on(self, process: _Process, job: bytes) -> Scored:
        if self._closed:
            return None, "the reward pool is closed"
        try:
            if not process.up:
                await process.start()
            answer = await process.score(job, self._timeout_s)
        except HybridschedError as error:
            return None, "the reward pool was closed" if self._closed else one_line(str(error))
        return answer.reward, answer.failure


def _environment() -> dict[str, str]:
    """The agent's, without what would draw a child into the MPI job; one compute thread; output at once."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER_VARIABLES)}
    kept.setdefault("OMP_NUM_THREADS", "1")
    kept.setdefault("TOKENIZERS_PARALLELISM", "false")
    return {**kept, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
