"""Entry of a node agent, one per node, started by mpiexec or srun:

    python -m hybridsched.runtime.agent_main --run RUN_FOLDER --attempt K [--resume]

Owns: this process: signals, cores, MPI, building agent, spawner and reward pool, and how the end becomes an exit code
and `exit-<rank>.json`. Rank 0 also carries the controller (`runtime.build.run_rank0`). In a Slurm step the rank follows
from the node (`adapters.attempt`), sockets lie on the node's own disk, and `adapters.slurm_step` looks after a job
whose batch script is gone.

Invariants: signal handlers only set a flag; the process dies with its parent and with the launcher of its host; it
imports neither torch nor vllm; every way out is bounded. An orderly end says goodbye to the other ranks before
MPI_Finalize (`transport.mpi`); a rank that fails leaves at once (``os._exit``), and the launcher ends the step.

Does not: decide (controller), restart the step (launch loop), or read data, models and prompts.

HYBRIDSCHED_TEST_RANK0=module:function replaces ``runtime.build.run_rank0`` (a seam for tests of agents that need no
controller); it takes the same arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import importlib
import itertools
import os
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hybridsched.errors import AgentSilent, FaultError, HybridschedError, InternalError
from hybridsched.runtime.adapters.attempt import (
    BEAT_LINE,
    AttemptInfo,
    Ending,
    read_attempt,
    read_result,
    read_wish,
    write_agent,
    write_exit,
)
from hybridsched.runtime.adapters.lifeline import (
    LAUNCH_VARIABLE,
    RUN_ID_VARIABLE,
    SPARED_VARIABLE,
    die_with,
    make_private_folder,
    open_tag,
    sweep,
    tag_of,
)
from hybridsched.runtime.adapters.slurm_step import LoopWatch, node_rank, save_orphaned_job
from hybridsched.runtime.stop import StopRequest
from hybridsched.sample_queue.files import lists_late

if TYPE_CHECKING:
    from hybridsched.config import RunConfig
    from hybridsched.runtime.context import RunContext
    from hybridsched.runtime.node_agent import AgentSettings, NodeAgent
    from hybridsched.runtime.plan import RunPlan
    from hybridsched.runtime.transport.mpi import MpiTransport

TEST_RANK0_VARIABLE = "HYBRIDSCHED_TEST_RANK0"
BEAT_S = 0.5  #: between two beats of an agent

_GOODBYE_AFTER_FAULT_S = 5.0
_GOODBYE_TO_THE_LOST_S = 1.0  # the ranks that are left hear of the end by a message
_GOODBYE_S = 15.0  # more than deadlines.stop_s, for the other agents to end their workers
_SIGNALS: dict[signal.Signals, Literal["stop", "requeue"]] = {
    signal.SIGINT: "stop",
    signal.SIGTERM: "stop",
    signal.SIGUSR2: "requeue",
}
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_EXIT_S = 30.0  # between the end of the event loop's work and the end of the process
_SWEEP_S = 10.0
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")
_FORBIDDEN = ("torch", "vllm")  # would cost hundreds of megabytes per node, and a GPU context


class Agent:
    """This process: everything of it that lives outside the event loop."""

    def __init__(self, run_folder: Path, folder: Path, info: AttemptInfo, stop: StopRequest, *, resume: bool) -> None:
        """folder: of the attempt."""
        self.run_folder = run_folder
        self.folder = folder
        self.info = info
        self.stop = stop
        self.resume = resume
        self.rank = 0
        self.finalized = False  #: MPI wants to be left through sys.exit
        self.config_path = run_folder / info.config
        self.socket_dir = _socket_folder(info)
        self._lifeline: int | None = None

    def main(self) -> Ending:
        """From the configuration to the end of the run. Never raises."""
        try:
            if self.info.launcher:
                self._hold_lifeline(self.info.launcher)
            config, plan, transport = self._prepare()
            self.rank = transport.rank
            self._redirect()
            plan = self._bind(config, plan)
            write_agent(self.folder, self.rank, tag_of(os.getpid()))
            return asyncio.run(self._serve(config, plan, transport))
        except BaseException as error:  # noqa: BLE001 - becomes the exit code
            ending = ending_of(error, self.rank)
            if ending.suspects:
                write_exit(self.folder, ending)  # before the question, which takes its time
                save_orphaned_job(self.info)
            return ending
        finally:
            shutil.rmtree(self.socket_dir, ignore_errors=True)

    # --- before the event loop ------------------------------------------------------------------------------------

    def _hold_lifeline(self, tag: str) -> None:
        self._lifeline = open_tag(tag)
        if self._lifeline is None:
            raise FaultError(f"the launcher (process {tag.partition(':')[0]}) is gone")

    def _prepare(self) -> tuple[RunConfig, RunPlan, MpiTransport]:
        from hybridsched.config import derive, load_config
        from hybridsched.runtime.prepare import plan_of
        from hybridsched.runtime.transport.mpi import open_world

        config = load_config(self.config_path)
        plan = plan_of(config, derive(config))
        bells = Path(self.info.socket_dir) if self.info.socket_dir else None
        rank = node_rank(self.info.nodes, os.environ) if self.info.nodes else None
        if rank is not None:
            self.rank = rank
            self._end_predecessors()
        return config, plan, open_world(plan.world_size, bells=bells, rank=rank)

    def _end_predecessors(self) -> None:
        """What an earlier attempt left on this node: its step was killed by Slurm, its workers may still be dying."""
        marks, own = {RUN_ID_VARIABLE: self.info.run_id}, {LAUNCH_VARIABLE: self.info.launch}
        _killed, left = sweep(marks, _SWEEP_S, spared=own)
        if left:
            raise FaultError(f"processes of an earlier attempt would not die on {socket.gethostname()}: {left}")

    def _redirect(self) -> None:
        """stderr, and of all ranks but 0 also stdout, into the agent's log; rank 0's stdout is read by the launcher."""
        log = os.open(self.folder / "logs" / f"agent-{self.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 2)
        if self.rank != 0:
            os.dup2(log, 1)
        os.close(log)

    def _bind(self, config: RunConfig, plan: RunPlan) -> RunPlan:
        """A node is the set of its workers' cores; the agent may run on any of them.

        In a Slurm step which cores there are shows only here. With GPUs, and where nothing computes, nothing is bound.
        """
        if self.info.nodes and _computes_on_cores(config):
            own = sorted(os.sched_getaffinity(0))
            plan = plan.on_cores(self.rank, own, oversubscribe=config.local.allow_oversubscribe)
        cores = {core for worker in plan.of_node(self.rank) for core in worker.cores}
        if cores:
            os.sched_setaffinity(0, cores)
        return plan

    # --- in the event loop ----------------------------------------------------------------------------------------

    async def _serve(self, config: RunConfig, plan: RunPlan, transport: MpiTransport) -> Ending:
        if self._lifeline is not None:
            asyncio.get_running_loop().add_reader(self._lifeline, self._orphaned)
        watch = LoopWatch(self._silence_s(config), lambda stood: self._stuck(plan, stood)) if self.info.nodes else None
        beating = asyncio.ensure_future(self._beat(watch)) if watch is not None else None
        ending = await self._run(config, plan, transport)
        if beating is not None:
            beating.cancel()
        forbidden = [name for name in _FORBIDDEN if name in sys.modules]
        if forbidden:
            ending = ending_of(InternalError(f"the agent of rank {self.rank} imported {forbidden}"), self.rank)
        if ending.exit_code and self.rank != 0:
            return ending  # the launcher ends the step
        write_exit(self.folder, ending)  # before MPI has a chance to hold or kill this process
        if watch is not None:
            watch.stop()
        if await transport.leave(self._goodbye_s(config, ending)):
            transport.finalize()
            self.finalized = True
        else:
            print(f"rank {self.rank}: another rank did not leave; ending without MPI_Finalize", file=sys.stderr)
            faulthandler.dump_traceback_later(_EXIT_S, exit=True)  # asyncio.run waits for threads, however long
        return ending

    @staticmethod
    def _silence_s(config: RunConfig) -> float:
        return config.deadlines.agent_silence_s * config.deadlines.scale

    async def _beat(self, watch: LoopWatch) -> None:
        """The launcher of a Slurm step can neither see nor signal rank 0 alone.

        What is printed shows it that the event loop turns; what it asks for stands in a file. (srun passes signals on
        to every process of the step, and its standard input only to the first component.)
        """
        late = lists_late(self.folder)
        while True:
            watch.turn()
            if self.rank == 0:
                sys.stdout.write(BEAT_LINE + "\n")
                sys.stdout.flush()
                if read_wish(self.folder, late=late):
                    self.stop.ask("requeue")
            await asyncio.sleep(BEAT_S)

    def _stuck(self, plan: RunPlan, stood_s: float) -> None:
        """In the watching thread: say so, look after the job, and end, for the event loop cannot."""
        others = tuple(rank for rank in range(plan.world_size) if rank != self.rank)
        text = (
            f"agent {self.rank} on {socket.gethostname()}: its event loop stands still for {stood_s:.0f} s "
            "(deadlines.agent_silence_s), probably in an MPI call that waits for a lost node"
        )
        faulthandler.dump_traceback(sys.stderr)
        ending = Ending(FaultError.exit_code, AgentSilent.__name__, text, rank=self.rank, suspects=others)
        write_exit(self.folder, ending)
        save_orphaned_job(self.info)
        os._exit(FaultError.exit_code)

    @staticmethod
    def _goodbye_s(config: RunConfig, ending: Ending) -> float:
        """After a fault the rank that is missing may be the reason, and the next attempt waits for this one's end."""
        if ending.exit_code in (1, FaultError.exit_code, InternalError.exit_code):
            return _GOODBYE_TO_THE_LOST_S if ending.suspects else _GOODBYE_AFTER_FAULT_S
        return config.deadlines.stop_s * config.deadlines.scale + _GOODBYE_S

    async def _run(self, config: RunConfig, plan: RunPlan, transport: MpiTransport) -> Ending:
        from hybridsched.runtime.adapters.processes import ProcessSpawner
        from hybridsched.runtime.adapters.reward_pool import ProcessRewardPool
        from hybridsched.runtime.clock import RealClock
        from hybridsched.runtime.context import RunContext
        from hybridsched.runtime.node_agent import NodeAgent

        name = f"agent.{self.rank}"
        context = RunContext(
            run_id=self.info.run_id,
            run_folder=str(self.run_folder),
            attempt=self.info.attempt,
            attempt_folder=str(self.folder),
            secret=self.info.secret,
            agent=name,
        )
        threads = config.local.threads_per_worker
        spawner = ProcessSpawner(context, self.config_path, self.socket_dir, threads=threads)
        rewards = ProcessRewardPool(config, context, name)
        if any(worker.kind != "trainer" for worker in plan.of_node(self.rank)):
            await rewards.check()  # a reward function that does not import ends the run here, with its reason
        settings = agent_settings(config)
        incarnations = incarnation_names(self.info.attempt)
        agent = NodeAgent(self.rank, plan, transport, spawner, rewards, RealClock(), incarnations, settings)
        try:
            return await self._to_the_end(agent, config, plan, context)
        finally:
            await spawner.close()

    async def _to_the_end(self, agent: NodeAgent, config: RunConfig, plan: RunPlan, context: RunContext) -> Ending:
        if self.rank == 0:
            code = await _rank0()(agent, config, plan, context, self.stop, resume=self.resume)
            result = read_result(self.folder)
            suspects = result.suspects if result is not None else ()
            if suspects:
                await asyncio.to_thread(save_orphaned_job, self.info)
            return Ending(code, rank=0, suspects=suspects)  # its reason is in result.json
        await agent.run()
        return Ending(0, rank=self.rank)

    def _orphaned(self) -> None:
        """The launcher of this host is dead: nobody reads our results or would start us again."""
        shutil.rmtree(self.socket_dir, ignore_errors=True)
        os._exit(FaultError.exit_code)  # workers and reward processes follow by their parent-death signal


def _rank0() -> Callable[..., Awaitable[int]]:
    """`runtime.build.run_rank0`, or its stand-in."""
    if (seam := os.environ.get(TEST_RANK0_VARIABLE)) is not None:
        module, _, function = seam.partition(":")
        stand_in: Callable[..., Awaitable[int]] = getattr(importlib.import_module(module), function)
        return stand_in
    from hybridsched.runtime.build import run_rank0

    return run_rank0


def _socket_folder(info: AttemptInfo) -> Path:
    """Private, below the launcher's folder on its host, else on the node's own disk."""
    if info.socket_dir:
        return Path(tempfile.mkdtemp(prefix="hs-", dir=info.socket_dir))  # 0700
    return make_private_folder()


def _computes_on_cores(config: RunConfig) -> bool:
    """Whether a "GPU" is a CPU core here. Not asked of torch, which an agent must not import."""
    if config.actor_rollout_ref.actor.strategy == "emulated":
        return False
    device = config.trainer.device
    return device == "cpu" or (device == "auto" and not any(os.path.exists(path) for path in _GPU_DRIVERS))


def agent_settings(config: RunConfig) -> AgentSettings:
    """Bounds of supervision, from the configuration."""
    from hybridsched.runtime.node_agent import AgentSettings
    from hybridsched.runtime.workers.settings import phase_deadlines

    bounds = config.deadlines
    return AgentSettings(
        host=socket.gethostname(),
        pid=os.getpid(),
        beat_s=BEAT_S,
        silence_s=bounds.agent_silence_s * bounds.scale,
        start_s=bounds.start_s * bounds.scale,
        stop_s=bounds.stop_s * bounds.scale,
        restarts=config.faults.worker_restarts,
        backoff_s=config.faults.backoff_s,
        phase_deadline_s=phase_deadlines(config),
    )


def incarnation_names(attempt: int) -> Callable[[str], str]:
    """Names of the starts of a worker: unique in a run, for attempts are numbered and a worker has one agent."""
    counter = itertools.count(1)
    return lambda _worker: f"a{attempt:03d}.{next(counter)}"


def ending_of(error: BaseException, rank: int) -> Ending:
    """What an error means for the launcher. A traceback only for what is no error of ours."""
    kind, text = type(error).__name__, str(error)
    if isinstance(error, HybridschedError) and not isinstance(error, InternalError):
        suspects = error.ranks if isinstance(error, AgentSilent) else ()
        return Ending(error.exit_code, kind, text, rank=rank, suspects=suspects)
    code = error.exit_code if isinstance(error, InternalError) else 1
    return Ending(code, kind, text, "".join(traceback.format_exception(error)), rank)


def install_handlers(stop: StopRequest) -> None:
    """Signals ask, the controller obeys. A handler that printed could interrupt a print and kill the rank.

    In a Slurm step SIGTERM may mean that the job ends, or only that another agent failed (--kill-on-bad-exit). The
    launch loop knows which: it gets a signal of its own, asks for an orderly end by a file, or ends the step.
    """
    for number in _SIGNALS:
        signal.signal(number, lambda received, _frame: stop.ask(_SIGNALS[signal.Signals(received)]))
    if "SLURM_PROCID" in os.environ:
        os.environ[SPARED_VARIABLE] = "1"
        signal.signal(signal.SIGTERM, lambda _received, _frame: None)


def main(argv: list[str] | None = None) -> None:
    """Entry point. Never returns."""
    parser = argparse.ArgumentParser(prog="hybridsched.runtime.agent_main", description="Started by the launch loop.")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args(argv)
    os.environ |= dict.fromkeys(_THREAD_VARIABLES, "1")  # an agent computes nothing; numpy must not start threads
    stop = StopRequest()
    install_handlers(stop)
    die_with(os.getppid())
    run_folder = arguments.run.resolve()
    folder = run_folder / "attempts" / str(arguments.attempt)
    finalized = False
    try:
        agent = Agent(run_folder, folder, read_attempt(folder), stop, resume=arguments.resume)
        ending = agent.main()
        finalized = agent.finalized
        write_exit(folder, ending)
    except (HybridschedError, OSError) as error:
        ending = ending_of(error, 0)
    if ending.text:
        print(f"rank {ending.rank}: {ending.kind}: {ending.text}\n{ending.traceback}", file=sys.stderr)
    if finalized:
        sys.exit(ending.exit_code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ending.exit_code)


if __name__ == "__main__":
    main()
