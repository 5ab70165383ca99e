"""Workers as real processes: implements `supervision.Spawner` and `WorkerHandle`.

Owns: the private socket workers connect to, starting them (environment, cores, GPUs, log), and telling how they ended.

Invariants
    Start from the main thread only: a worker dies with the *thread* that forked it.
    A connection counts as a worker only with the secret of the attempt and the name, incarnation and pid of a process
    this spawner started and has no connection of; everything else is refused with a reason, and logged.
    A worker is a session of its own. What is left of that session when the worker ends is killed with it.
    `wait` returns after the last frame of the worker was delivered, and never later than ``_DRAIN_S`` after its death.

Does not: restart (the node agent does), judge liveness, or know what travels.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import msgspec

from hybridsched.errors import DeadlineExceeded, FaultError, WorkerDied
from hybridsched.runtime.adapters.channel import (
    Channel,
    Hello,
    Refused,
    Welcome,
    decode_greeting,
    encode_greeting,
)
from hybridsched.runtime.adapters.lifeline import RUN_ID_VARIABLE, without_launcher
from hybridsched.runtime.context import RunContext
from hybridsched.runtime.messages import Envelope
from hybridsched.runtime.plan import WorkerSpec
from hybridsched.runtime.supervision import WorkerExit
from hybridsched.runtime.wire import decode, encode
from hybridsched.runtime.workers.process import SECRET_VARIABLE

MODULE = "hybridsched.runtime.workers.process"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

_GREETING_S = 30.0  # somebody who connects and says nothing is hung up on
_DRAIN_S = 5.0  # the socket of a dead process ends at once, unless a child of it holds it open
_REAP_S = 10.0  # a killed process is gone within milliseconds; this bounds a machine in trouble
_LINGER_S = 20.0  # between the end of the connection and the end of the process
_TAIL_LINES = 20
_TAIL_BYTES = 16 << 10
_MAX_SOCKET_PATH = 107  # of struct sockaddr_un

_log = logging.getLogger(__name__)


class ProcessHandle:
    """One worker process. Made by `ProcessSpawner.spawn`."""

    def __init__(
        self,
        spec: WorkerSpec,
        incarnation: str,
        process: subprocess.Popen[bytes],
        log: Path,
        deliver: Callable[[Envelope], None],
        on_exit: Callable[[], object],
    ) -> None:
        self.spec = spec
        self.incarnation = incarnation
        self.pid = process.pid
        self.log = log
        self.connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._process = process
        self._deliver = deliver
        self._on_exit = on_exit
        self._channel: Channel | None = None
        self._kill_reason: str | None = None
        self._ended: asyncio.Future[WorkerExit] = asyncio.get_running_loop().create_future()
        self._timers: list[asyncio.TimerHandle] = []
        self._fd = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._fd, self._exited)

    # --- supervision.WorkerHandle ---------------------------------------------------------------------------------

    def send(self, envelope: Envelope) -> None:
        """Queue an envelope for the worker."""
        self.send_raw(encode(envelope))

    def send_raw(self, frame: bytes) -> None:
        """Queue an encoded envelope for the worker."""
        if self._channel is not None:
            self._channel.send(frame)

    async def wait(self) -> WorkerExit:
        """How it ended, once everything it sent is delivered. May be awaited by several."""
        return await asyncio.shield(self._ended)

    def kill(self, reason: str) -> None:
        """SIGKILL to the worker and what it started. The first reason stays."""
        if self._process.returncode is not None:
            return
        self._kill_reason = self._kill_reason or reason
        self._kill_session()

    # --- connection -----------------------------------------------------------------------------------------------

    @property
    def has_connection(self) -> bool:
        """Somebody was welcomed as this worker."""
        return self._channel is not None

    def adopt(self, channel: Channel) -> None:
        """This connection is the worker's."""
        self._channel = channel
        channel.on_frame = lambda frame: self._deliver(decode(frame))
        channel.on_lost = self._hung_up
        self.connected.set_result(None)

    def _hung_up(self, reason: str) -> None:
        if self._process.returncode is not None:
            self._finish()
            return
        if reason:  # our side ended it: foreign bytes, or a worker that does not read
            self.kill(f"its connection failed: {reason}")
        else:
            self._later(
                _LINGER_S, lambda: self.kill(f"it closed its connection and did not end within {_LINGER_S:g} s")
            )

    # --- the end --------------------------------------------------------------------------------------------------

    def _exited(self) -> None:
        """The process is a zombie. Its session is killed before it is reaped: until then its number is not reused."""
        asyncio.get_running_loop().remove_reader(self._fd)
        self._kill_session()
        self._process.wait()
        os.close(self._fd)
        self._on_exit()
        channel = self._channel
        if channel is None or channel.lost is not None:
            self._finish()
        else:
            self._later(_DRAIN_S, lambda: channel.abort("its process is dead"))

    def _finish(self) -> None:
        for timer in self._timers:
            timer.cancel()
        if not self._ended.done():
            self._ended.set_result(WorkerExit(self._reason(), self._process.returncode == 0))
        if not self.connected.done():
            self.connected.set_exception(WorkerDied(f"{self.spec.worker} ended before it connected: {self._reason()}"))

    def _reason(self) -> str:
        code = self._process.returncode
        if code == 0:
            return "ended by itself (exit code 0)"
        if self._kill_reason is not None:
            what = f"killed by its agent: {self._kill_reason}"
        elif code < 0:
            name = _signal_name(-code)
            hint = " (by somebody else; or the machine is out of memory: see dmesg)" if name == "SIGKILL" else ""
            what = f"killed by {name}{hint}"
        else:
            what = f"exit code {code}"
        return f"{what}; {tail_of(self.log)}"

    def _kill_session(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # nothing is left of it

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, act))


class ProcessSpawner:
    """Starts the workers of one node."""

    def __init__(
        self,
        context: RunContext,
        config: Path,
        socket_dir: Path,
        *,
        threads: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """context: the agent's. config: resolved configuration. socket_dir: private (0700) and of short path.

        threads: compute threads of a worker. environment: what workers inherit, None: that of this process.
        """
        self._context = context
        self._config = config
        self._socket = socket_dir / "agent.sock"
        self._threads = threads
        self._environment = dict(os.environ if environment is None else environment)
        self._server: asyncio.Server | None = None
        self._listening = asyncio.Lock()
        self._running: dict[int, ProcessHandle] = {}
        if len(os.fsencode(self._socket)) > _MAX_SOCKET_PATH:
            raise FaultError(
                f"{self._socket}: longer than the {_MAX_SOCKET_PATH} bytes of a socket; set a shorter TMPDIR"
            )

    async def spawn(
        self, spec: WorkerSpec, incarnation: str, deliver: Callable[[Envelope], None], deadline_s: float
    ) -> ProcessHandle:
        """Start a worker and wait until it is connected. Raises WorkerDied, DeadlineExceeded, FaultError."""
        await self._listen()
        handle = self._start(spec, incarnation, deliver)
        try:
            async with asyncio.timeout(deadline_s):
                await handle.connected
        except TimeoutError:
            handle.kill("not connected in time")
            await handle.wait()
            raise DeadlineExceeded(
                f"{spec.worker} (pid {handle.pid}) did not connect within {deadline_s:g} s (deadlines.start_s); "
                f"{tail_of(handle.log)}"
            ) from None
        except BaseException:
            handle.kill("its agent ends")
            raise
        return handle

    async def close(self) -> None:
        """Kill what still runs and take the socket away."""
        handles = list(self._running.values())
        for handle in handles:
            handle.kill("its agent ends")
        try:
            async with asyncio.timeout(_REAP_S):
                for handle in handles:
                    await handle.wait()
        except TimeoutError:
            _log.warning("killed workers did not die within %g s: pids %s", _REAP_S, sorted(self._running))
        if self._server is not None:
            self._server.close()
            self._socket.unlink(missing_ok=True)

    # --- starting -------------------------------------------------------------------------------------------------

    def _start(self, spec: WorkerSpec, incarnation: str, deliver: Callable[[Envelope], None]) -> ProcessHandle:
        log = Path(self._context.attempt_folder) / "logs" / f"{spec.worker}-{incarnation}.log"
        command = [sys.executable, "-m", MODULE, "--socket", str(self._socket), "--worker", spec.worker]
        command += ["--incarnation", incarnation, "--parent", str(os.getpid())]
        if spec.cores:
            command += ["--cores", ",".join(map(str, spec.cores))]
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with open(log, "ab") as output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=self._child_environment(spec),
                    start_new_session=True,
                )
        except OSError as error:
            raise FaultError(f"{spec.worker} cannot be started ({shlex.join(command)}): {error}") from error
        handle = ProcessHandle(spec, incarnation, process, log, deliver, lambda: self._running.pop(process.pid, None))
        self._running[process.pid] = handle
        return handle

    def _child_environment(self, spec: WorkerSpec) -> dict[str, str]:
        environment = without_launcher(self._environment)
        environment |= dict.fromkeys(THREAD_VARIABLES, str(self._threads))
        environment |= {
            RUN_ID_VARIABLE: self._context.run_id,
            SECRET_VARIABLE: self._context.secret,
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if not spec.cores:  # in local mode a "GPU" is a core
            environment["CUDA_VISIBLE_DEVICES"] = visible_gpus(spec, environment.get("CUDA_VISIBLE_DEVICES"))
        return environment

    # --- greeting -------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        async with self._listening:
            if self._server is None:
                loop = asyncio.get_running_loop()
                self._server = await loop.create_unix_server(self._visitor, path=str(self._socket), backlog=256)

    def _visitor(self) -> Channel:
        channel = Channel(lambda frame: self._greet(channel, frame))
        loop = asyncio.get_running_loop()
        patience = loop.call_later(_GREETING_S, lambda: self._refuse(channel, "it said nothing"))
        channel.on_lost = lambda _reason: patience.cancel()
        greet = channel.on_frame

        def first(frame: bytes) -> None:
            patience.cancel()
            greet(frame)

        channel.on_frame = first
        return channel

    def _greet(self, channel: Channel, frame: bytes) -> None:
        try:
            hello = decode_greeting(frame)
        except msgspec.DecodeError:
            self._refuse(channel, "its first frame is no greeting")
            return
        if not isinstance(hello, Hello):
            self._refuse(channel, "its first frame is no Hello")
            return
        handle = self._running.get(hello.pid)
        if not hmac.compare_digest(hello.secret.encode(), self._context.secret.encode()):
            self._refuse(channel, f"pid {hello.pid} has not the secret of this attempt")
        elif handle is None or (handle.spec.worker, handle.incarnation) != (hello.worker, hello.incarnation):
            self._refuse(channel, f"{hello.worker} {hello.incarnation} (pid {hello.pid}) was not started by this agent")
        elif handle.has_connection or handle.connected.done():
            self._refuse(channel, f"{hello.worker} {hello.incarnation} is connected already, or came too late")
        else:
            context = asdict(self._context.for_worker(hello.worker, hello.incarnation))
            channel.send(encode_greeting(Welcome(str(self._config), asdict(handle.spec), context)))
            handle.adopt(channel)

    def _refuse(self, channel: Channel, reason: str) -> None:
        _log.warning("connection to %s refused: %s", self._socket, reason)
        channel.on_frame = lambda _frame: None
        channel.send(encode_greeting(Refused(reason)))
        channel.close()


def visible_gpus(spec: WorkerSpec, offered: str | None) -> str:
    """CUDA_VISIBLE_DEVICES of a worker: its GPUs among those ``offered`` to the agent (None: all, by index)."""
    if offered is None:
        return ",".join(map(str, spec.gpus))
    names = [name for name in offered.split(",") if name]
    if spec.gpus and max(spec.gpus) >= len(names):
        raise FaultError(
            f"{spec.worker} is planned on GPUs {list(spec.gpus)} of its node, but CUDA_VISIBLE_DEVICES={offered!r} "
            "there; ask for as many GPUs as trainer.n_gpus_per_node or rollout.n_gpus_per_node says"
        )
    return ",".join(names[gpu] for gpu in spec.gpus)


def tail_of(log: Path) -> str:
    """The last lines of a log, for a message."""
    try:
        with open(log, "rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = stream.read().decode("utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError as error:
        return f"its log {log} cannot be read: {error.strerror or error}"
    if not lines:
        return f"its log {log} is empty"
    return f"end of its log {log}:\n" + "\n".join(f"    {line}" for line in lines)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
