"""A worker process: connects to its agent, is told what it is, becomes that, and leaves in order.

    python -m hybridsched.runtime.workers.process --socket PATH --worker W --incarnation I --parent PID [--cores 0,1]

Owns: the process around a worker: parent-death signal, cores, channel, endpoint, threads for heavy calls, signals, and
the exit code: 0 after an orderly end, 4 when the agent is gone, 1 with a traceback in the log for everything else.
Everything heavy is imported after the agent knows the process. Invariants: the event loop is never blocked by work that
goes through ``offload``; the process always ends through ``os._exit``, so that no thread or library can hold it.

Does not: know what a worker does (`build` makes it).

HYBRIDSCHED_TEST_BUILD=module:function replaces ``workers.build.build_worker`` (a seam for tests of processes that need
no engine); the function takes (spec, config path, context, endpoint, clock, offload).
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import functools
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hybridsched.runtime.adapters.channel import Channel, Hello, Welcome, attach, connect
from hybridsched.runtime.adapters.lifeline import SPARED_VARIABLE, die_with, spare_signals

if TYPE_CHECKING:
    from hybridsched.runtime.endpoint import Endpoint

SECRET_VARIABLE = "HYBRIDSCHED_SECRET"
TEST_BUILD_VARIABLE = "HYBRIDSCHED_TEST_BUILD"

_AGENT_GONE = 4
_CONNECT_S = 60.0  # the agent listens before it starts a worker; this bounds a machine under load
_FLUSH_S = 5.0  # last words
_DRAIN_SHARE = 0.8  # of deadlines.stop_s: the agent kills at its end
_TEST_DRAIN_S = 5.0  # of a worker made by HYBRIDSCHED_TEST_BUILD, which has no configuration
_THREADS = 4  # heavy calls at once: training or generation, sealing, weights, and one to spare


class Worker(Protocol):
    """What `build_worker` returns."""

    async def run(self) -> None:
        """Work until cancelled."""
        ...

    async def drain(self, deadline_s: float) -> None:
        """Orderly end."""
        ...


class _End(Exception):
    """The process is to end with this code."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class Process:
    """The worker of this process and how it ends."""

    def __init__(self, channel: Channel, welcome: Welcome) -> None:
        self._channel = channel
        self._welcome = welcome
        self._leave = asyncio.Event()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="offload")

    async def run(self) -> None:
        """Until the orderly end. Raises _End when the agent is gone, and what breaks the worker."""
        worker, endpoint, drain_s = self._build()
        if SPARED_VARIABLE not in os.environ:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._leave.set)
        working: asyncio.Future[None] = asyncio.ensure_future(worker.run())
        leaving = asyncio.ensure_future(self._leave.wait())
        await _any_of(working, leaving, self._broken)
        self._raise_broken(working)
        draining = asyncio.ensure_future(worker.drain(drain_s))  # the beats of run() go on meanwhile
        await _any_of(working, draining, self._broken)
        self._raise_broken(working)
        draining.result()
        working.cancel()
        await asyncio.wait([working], timeout=_FLUSH_S)
        await endpoint.close()
        await self._channel.flush(_FLUSH_S)

    def _raise_broken(self, working: asyncio.Future[None]) -> None:
        if self._broken.done():
            self._broken.result()
        if working.done():
            working.result()
            raise RuntimeError("the worker's run() returned; it has to go on until it is cancelled")

    def _build(self) -> tuple[Worker, Endpoint, float]:
        import msgspec

        from hybridsched.runtime import messages as m
        from hybridsched.runtime.clock import RealClock
        from hybridsched.runtime.context import RunContext
        from hybridsched.runtime.endpoint import Endpoint
        from hybridsched.runtime.plan import WorkerSpec
        from hybridsched.runtime.wire import decode, encode

        spec = msgspec.convert(self._welcome.spec, WorkerSpec)
        context = msgspec.convert(self._welcome.context, RunContext)

        def post(envelope: m.Envelope) -> None:
            self._channel.send(encode(envelope))

        endpoint = Endpoint(spec.worker, post, context.incarnation)
        endpoint.on_error = self._on_error
        endpoint.on(m.Shutdown, lambda _order, _src: self._leave.set())
        build: Callable[..., Worker]
        if (seam := os.environ.get(TEST_BUILD_VARIABLE)) is not None:
            module, _, function = seam.partition(":")
            build, config, drain_s = getattr(importlib.import_module(module), function), self._welcome.config, None
        else:
            build, config, drain_s = _real_build(self._welcome.config)
        worker = build(spec, config, context, endpoint, RealClock(), self.offload)
        attach(self._channel, lambda frame: endpoint.deliver(decode(frame)), self._hung_up)
        return worker, endpoint, _TEST_DRAIN_S if drain_s is None else drain_s

    async def offload(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a heavy call in a thread; the event loop keeps beating."""
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def _hung_up(self, reason: str) -> None:
        text = f"the connection to the agent failed: {reason}" if reason else "the agent is gone"
        self._break(_End(_AGENT_GONE, text))

    def _on_error(self, error: BaseException, where: str) -> None:
        error.add_note(f"while: {where}")
        self._break(error)

    def _break(self, error: BaseException) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)


async def _any_of(*futures: asyncio.Future[Any]) -> None:
    """Until one of them is done. Not bounded: a worker works as long as it is let."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _real_build(path: str) -> tuple[Callable[..., Worker], Any, float]:
    from hybridsched.config import load_config
    from hybridsched.runtime.workers.build import build_worker

    config = load_config(path)
    return build_worker, config, config.deadlines.stop_s * config.deadlines.scale * _DRAIN_SHARE


async def _main(arguments: argparse.Namespace, secret: str) -> None:
    hello = Hello(secret, arguments.worker, arguments.incarnation, os.getpid())
    channel, welcome = await connect(Path(arguments.socket), hello, _CONNECT_S)
    await Process(channel, welcome).run()


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hybridsched.runtime.workers.process", description="Started by a node agent.")
    for name in ("--socket", "--worker", "--incarnation"):
        parser.add_argument(name, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--cores", type=lambda text: {int(core) for core in text.split(",")}, default=set())
    return parser.parse_args(argv)


def _run(main: Coroutine[Any, Any, None]) -> int:
    """Exit code of the process; what broke it goes to the log."""
    try:
        asyncio.run(main)
    except _End as end:
        print(f"ended: {end}", file=sys.stderr)
        return end.code
    except BaseException as error:  # noqa: BLE001 - the log gets it, the agent reports it
        traceback.print_exception(error)
        return 1
    return 0


def main() -> None:
    """Entry point. Never returns."""
    arguments = _parse(sys.argv[1:])
    die_with(arguments.parent)
    spare_signals()
    if arguments.cores:
        os.sched_setaffinity(0, arguments.cores)  # before any library counts the cores
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # kill -USR1 PID: where every thread is, into the log
    code = _run(_main(arguments, os.environ.pop(SECRET_VARIABLE, "")))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
