"""A whole run in one process under virtual time: the real controller, agents and workers, emulated engine and trainer.

Owns: the wiring of a simulated run (`SimulatedRun`) and starting workers as tasks. Nothing here is a second
implementation of anything: `runtime/` is handed a virtual clock, the memory transport, memory storage and emulated
engines, and does what it always does.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

from hybridsched.config.derived import Derived, derive
from hybridsched.config.schema import RunConfig
from hybridsched.data.stream import PromptStream, synthetic_prompts
from hybridsched.engines.emulated import EmulatedEngine
from hybridsched.errors import WorkerDied
from hybridsched.model import Prompt
from hybridsched.runtime import messages as m
from hybridsched.runtime import wire
from hybridsched.runtime.controller import Controller
from hybridsched.runtime.cycle_record import RunSummary
from hybridsched.runtime.endpoint import Endpoint
from hybridsched.runtime.node_agent import AgentSettings, NodeAgent
from hybridsched.runtime.parts import Parts
from hybridsched.runtime.plan import CONTROLLER, RunPlan, WorkerSpec, build_plan
from hybridsched.runtime.policy_loader import load_policy
from hybridsched.runtime.services import Services
from hybridsched.runtime.supervision import RewardPool, WorkerExit
from hybridsched.runtime.transport.memory import Faults, MemoryNetwork
from hybridsched.runtime.workers.build import build_emulated_worker
from hybridsched.runtime.workers.rollout import RolloutWorker
from hybridsched.runtime.workers.settings import phase_deadlines
from hybridsched.runtime.workers.trainer import TrainerWorker
from hybridsched.scheduling.policy import DynamicSchedulePolicyBase
from hybridsched.simulation.chains import memory_chains
from hybridsched.simulation.checkpoints import MemoryCheckpointStore
from hybridsched.simulation.clock import VirtualClock, run_virtual
from hybridsched.simulation.runlog import MemoryRunLog
from hybridsched.simulation.storage import MemoryDisk, MemorySegmentStore


async def inline(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Offload of virtual time: at once, at no cost."""
    return function(*args, **kwargs)


class SimulatedWorker:
    """A worker as a task; `kill` is a SIGKILL: nothing it holds survives, nothing more is sent."""

    def __init__(
        self, spec: WorkerSpec, incarnation: str, pid: int, deliver: Callable[[m.Envelope], None], world: SimulatedRun
    ) -> None:
        self.spec = spec
        self.incarnation = incarnation
        self.pid = pid
        self._deliver = deliver
        self._dead = asyncio.Event()
        self._exit = WorkerExit("ended", True)
        self.endpoint = Endpoint(spec.worker, self._out, incarnation)
        self.worker: RolloutWorker | TrainerWorker = world.build_worker(spec, incarnation, self.endpoint)
        self.endpoint.on(m.Shutdown, self._shutdown)
        self._task = asyncio.ensure_future(self.worker.run())
        self._task.set_name(f"{spec.worker} runs")

    @property
    def alive(self) -> bool:
        """True until it ended or was killed."""
        return not self._dead.is_set()

    @property
    def engine(self) -> EmulatedEngine | None:
        """The emulated engine of a replica (faults are put there); None for trainers and real engines."""
        engine = getattr(self.worker, "_engine", None)
        return engine if isinstance(engine, EmulatedEngine) else None

    def send(self, envelope: m.Envelope) -> None:
        """Deliver in the next turn of the loop."""
        if self.alive:
            asyncio.get_running_loop().call_soon(self._in, envelope)

    def send_raw(self, frame: bytes) -> None:
        """The same for encoded envelopes."""
        self.send(wire.decode(frame))

    async def wait(self) -> WorkerExit:
        """Until it is dead."""
        await self._dead.wait()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.endpoint.close()
        engine = self.engine
        if engine is not None and isinstance(self.worker, RolloutWorker) and self.worker.started:
            engine.fault("die")
        return self._exit

    def kill(self, reason: str) -> None:
        """SIGKILL."""
        if self.alive:
            self._exit = WorkerExit(f"killed: {reason}", False)
            self._dead.set()

    def _in(self, envelope: m.Envelope) -> None:
        if self.alive:
            self.endpoint.deliver(envelope)

    def _out(self, envelope: m.Envelope) -> None:
        if self.alive:
            self._deliver(envelope)

    async def _shutdown(self, _order: m.Shutdown, _src: str) -> None:
        await self.worker.drain(60.0)
        self._exit = WorkerExit("shut down", True)
        self._dead.set()


class SimulatedSpawner:
    """Starts workers as tasks."""

    def __init__(self, world: SimulatedRun) -> None:
        self._world = world

    async def spawn(
        self, spec: WorkerSpec, incarnation: str, deliver: Callable[[m.Envelope], None], deadline_s: float
    ) -> SimulatedWorker:
        """Start at once. Raises WorkerDied for a worker that is lost for good (``emulated.worker_lost_at_s``)."""
        del deadline_s
        lost_at = self._world.config.emulated.worker_lost_at_s.get(spec.worker, math.inf)
        if self._world.clock.now() >= lost_at:
            raise WorkerDied(f"{spec.worker} is lost since {lost_at:g} s (emulated.worker_lost_at_s)")
        worker = SimulatedWorker(spec, incarnation, self._world.next_pid(), deliver, self._world)
        self._world.workers[spec.worker] = worker
        return worker


class NoRewards:
    """Emulated workers score by themselves."""

    async def score(self, request: m.Envelope) -> m.Envelope:
        """Nobody asks."""
        raise WorkerDied(f"{request.src} asked for a reward in a simulation")

    async def close(self) -> None:
        """Nothing to close."""


class NoStop:
    """Nobody presses Ctrl-C."""

    kind = ""


class SimulatedRun:
    """One simulated run. After `run()` look at `log`, `disk` and `controller`."""

    def __init__(
        self,
        config: RunConfig,
        *,
        policy: DynamicSchedulePolicyBase | None = None,
        disk: MemoryDisk | None = None,
        checkpoints: MemoryCheckpointStore | None = None,
        network_faults: Faults | None = None,
        beat_s: float = 5.0,
        validation_prompts: int = 0,
        start: int = 0,
        on_step: Callable[[SimulatedRun], None] | None = None,
    ) -> None:
        self.config = config
        self.derived: Derived = derive(config)
        self.plan: RunPlan = build_plan(
            trainer_nodes=config.trainer.nnodes,
            trainer_gpus_per_node=config.trainer.n_gpus_per_node,
            rollout_nodes=config.rollout.nnodes,
            rollout_gpus_per_node=config.rollout.n_gpus_per_node,
            gpus_per_replica=self.derived.gpus_per_replica,
            lending=self.derived.n_hybrid_replicas > 0,
        )
        self.policy = policy or load_policy(config.async_training, only_hybrid=self.derived.only_hybrid)
        self.clock = VirtualClock()
        self.log = MemoryRunLog(self.clock)
        self.disk = disk or MemoryDisk(self._now)
        self.disk.now = self._now
        self.checkpoints = checkpoints or MemoryCheckpointStore(self.disk)
        self.beat_s = beat_s
        self.workers: dict[str, SimulatedWorker] = {}
        self._network_faults = network_faults
        self._validation_prompts = validation_prompts
        self._start = start
        self._pids = 0
        self._incarnations = 0
        self._on_step = on_step
        self.stop: Any = NoStop()
        self.controller: Controller | None = None
        self.parts: Parts | None = None

    def _now(self) -> float:
        return self.clock.now()

    def next_pid(self) -> int:
        """A number nobody had before."""
        self._pids += 1
        return self._pids

    def new_incarnation(self, who: str = "controller") -> str:
        """Unique over all starts that share a disk."""
        self._incarnations += 1
        return f"sim{self._start}.{who}.{self._incarnations:04d}"

    def run(self, *, limit_s: float | None = None, resume: bool = False) -> RunSummary:
        """Run to the end in virtual time. Raises what ended the run."""
        return run_virtual(self.main(resume), limit_s=limit_s)

    async def main(self, resume: bool = False) -> RunSummary:
        """The run as a coroutine (on a virtual loop)."""
        network = MemoryNetwork(self.plan.world_size, faults=self._network_faults)
        agents = [self._agent(rank, network) for rank in range(self.plan.world_size)]
        endpoint = Endpoint(CONTROLLER, agents[0].route)
        agents[0].attach_controller(endpoint.deliver)
        parts = Parts(self._services(endpoint))
        self.parts, self.controller = parts, Controller(parts)
        endpoint.on_error = self.controller.fail
        tasks = [asyncio.ensure_future(agent.run()) for agent in agents]
        losses = [asyncio.ensure_future(self._lose(*loss)) for loss in self.config.emulated.worker_lost_at_s.items()]
        resume_from = None
        if resume:
            complete = self.checkpoints.complete()
            resume_from = complete[-1].folder if complete else None
        try:
            return await self.controller.run(resume_from)
        finally:
            for loss in losses:
                loss.cancel()
            for rank in range(self.plan.world_size):
                endpoint.tell(f"agent.{rank}", m.Shutdown("run ended"))
            await endpoint.close()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _lose(self, worker: str, at_s: float) -> None:
        """A worker's node is lost at ``at_s``; the spawner refuses to start it again."""
        await asyncio.sleep(at_s - self.clock.now())
        if worker in self.workers:
            self.workers[worker].kill("its node is lost (emulated.worker_lost_at_s)")

    def _agent(self, rank: int, network: MemoryNetwork) -> NodeAgent:
        deadlines, faults = self.config.deadlines, self.config.faults
        settings = AgentSettings(
            host=f"node{rank}",
            pid=rank + 1,
            beat_s=self.beat_s,
            silence_s=deadlines.agent_silence_s * deadlines.scale,
            start_s=deadlines.start_s * deadlines.scale,
            stop_s=deadlines.stop_s * deadlines.scale,
            restarts=faults.worker_restarts,
            backoff_s=faults.backoff_s,
            phase_deadline_s=phase_deadlines(self.config),
        )
        return NodeAgent(
            rank,
            self.plan,
            network.transport(rank),
            SimulatedSpawner(self),
            self.reward_pool(),
            self.clock,
            self.new_incarnation,
            settings,
        )

    def reward_pool(self) -> RewardPool:
        """Emulated workers score by themselves; runs with real rewards override this."""
        return NoRewards()

    def build_worker(self, spec: WorkerSpec, incarnation: str, endpoint: Endpoint) -> RolloutWorker | TrainerWorker:
        """The real worker class around an emulated engine or trainer."""
        return build_emulated_worker(
            spec,
            self.config,
            self.derived,
            endpoint,
            self.clock,
            inline,
            MemorySegmentStore(self.disk),
            incarnation,
            beat_s=self.beat_s,
            checkpoints=self.checkpoints.trainer_parts,
        )

    def _services(self, endpoint: Endpoint) -> Services:
        return Services(
            config=self.config,
            derived=self.derived,
            plan=self.plan,
            run_id="simulated",
            endpoint=endpoint,
            clock=self.clock,
            log=self.log,
            offload=inline,
            store=MemorySegmentStore(self.disk),
            chains=memory_chains(self.disk, self.new_incarnation),
            checkpoints=self.checkpoints,
            prompts=self._prompts(),
            validation_prompts=self._validation(),
            stop_token_ids=(),
            policy=self.policy,
            stop=self.stop,
            check_owner=lambda: None,
            on_status=lambda _status: None,
            beat_s=self.beat_s,
            audit=self._audit,
        )

    def _audit(self) -> None:
        if self._on_step is not None:
            self._on_step(self)

    def _prompts(self) -> PromptStream:
        emulated, trainer = self.config.emulated, self.config.trainer
        prompts = synthetic_prompts(emulated.dataset_size, emulated.prompt_tokens)
        return PromptStream(
            prompts,
            shuffle=False,
            seed=self.config.data.seed,
            total_epochs=trainer.total_epochs,
            limit=self.derived.total_samples,
        )

    def _validation(self) -> list[Prompt]:
        if not self._validation_prompts:
            return []
        held_out = synthetic_prompts(self._validation_prompts, self.config.emulated.prompt_tokens)
        return [held_out[i] for i in range(self._validation_prompts)]
