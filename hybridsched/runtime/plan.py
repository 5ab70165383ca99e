"""Where everything runs: ranks, nodes, workers, cores. A pure function of configuration and derived values.

Ranks: trainer nodes first (0 is the controller's), then rollout nodes. Workers of a trainer node: one trainer worker
per GPU and one hybrid worker per replica on the same GPUs; of a rollout node: standalone workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hybridsched.errors import ConfigError
from hybridsched.model import ReplicaKind

CONTROLLER = "controller"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker process. ``gpus`` are indices within its node; ``cores`` its CPU affinity (local mode)."""

    worker: str
    kind: str  #: trainer | hybrid | standalone
    index: int  #: among workers of its kind, over all nodes
    node: int  #: agent rank
    gpus: tuple[int, ...]
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RunPlan:
    """All agents and workers of a run."""

    world_size: int
    trainer_nodes: int
    rollout_nodes: int
    workers: tuple[WorkerSpec, ...]
    #: Looked up for every replica of a switch: a search through thousands of workers each time would be quadratic.
    _by_name: dict[str, WorkerSpec] = field(init=False, repr=False, compare=False)
    _first_trainer: dict[int, str] = field(init=False, repr=False, compare=False)  #: by node

    def __post_init__(self) -> None:
        trainers = [w for w in reversed(self.workers) if w.kind == "trainer"]
        object.__setattr__(self, "_by_name", {w.worker: w for w in self.workers})
        object.__setattr__(self, "_first_trainer", {w.node: w.worker for w in trainers})

    def on_cores(self, rank: int, cores: Sequence[int], *, oversubscribe: bool) -> RunPlan:
        """The plan with the workers of one node bound to that node's own cores, one a GPU.

        Raises ConfigError when there are fewer cores than GPUs and sharing is not allowed.
        """
        gpus = 1 + max((gpu for w in self.of_node(rank) for gpu in w.gpus), default=-1)
        if len(cores) < gpus and not oversubscribe:
            raise ConfigError(
                f"rank {rank}: {gpus} GPUs (one CPU core each, for the node has no GPU driver) are asked for, but only "
                f"{len(cores)} cores may be used there; raise cpus_per_task of the component, or set "
                "local.allow_oversubscribe: true"
            )

        def bound(worker: WorkerSpec) -> WorkerSpec:
            if worker.node != rank:
                return worker
            return replace(worker, cores=tuple(cores[gpu % len(cores)] for gpu in worker.gpus))

        return replace(self, workers=tuple(bound(worker) for worker in self.workers))

    def of_kind(self, kind: str) -> tuple[WorkerSpec, ...]:
        """Workers of one kind, by index."""
        return tuple(w for w in self.workers if w.kind == kind)

    def of_node(self, rank: int) -> tuple[WorkerSpec, ...]:
        """Workers of one node."""
        return tuple(w for w in self.workers if w.node == rank)

    def spec(self, worker: str) -> WorkerSpec:
        """The worker of that name."""
        return self._by_name[worker]

    def rank_of(self, endpoint: str) -> int:
        """The agent rank that serves an endpoint name."""
        if endpoint == CONTROLLER:
            return 0
        if endpoint.startswith("agent."):
            return int(endpoint.removeprefix("agent."))
        return self.spec(endpoint).node

    def handover_writer(self, hybrid: str) -> str:
        """The trainer worker that publishes weights for a hybrid: the first one of its node."""
        return self._first_trainer[self.spec(hybrid).node]


def replica_kind(worker: str) -> ReplicaKind:
    """standalone.3 -> STANDALONE."""
    return ReplicaKind(worker.split(".")[0])


def build_plan(
    *,
    trainer_nodes: int,
    trainer_gpus_per_node: int,
    rollout_nodes: int,
    rollout_gpus_per_node: int,
    gpus_per_replica: int,
    lending: bool,
    cores: Sequence[int] = (),
    oversubscribe: bool = False,
) -> RunPlan:
    """Lay out workers. ``cores``: local mode, one core per GPU, in rank order; empty: no binding.

    Raises ConfigError when there are fewer cores than GPUs asked for and sharing is not allowed.
    """
    total = trainer_nodes * trainer_gpus_per_node + rollout_nodes * rollout_gpus_per_node
    if cores and len(cores) < total and not oversubscribe:
        raise ConfigError(
            f"local mode: {total} GPUs (one CPU core each) are asked for, but only {len(cores)} cores may be used; "
            "lower trainer/rollout nnodes x n_gpus_per_node, or set local.allow_oversubscribe: true"
        )
    workers: list[WorkerSpec] = []
    counts = {"trainer": 0, "hybrid": 0, "standalone": 0}
    next_gpu = 0

    def add(kind: str, node: int, gpus: range, base: int) -> None:
        bound = tuple(cores[(base + g) % len(cores)] for g in gpus) if cores else ()
        workers.append(WorkerSpec(f"{kind}.{counts[kind]}", kind, counts[kind], node, tuple(gpus), bound))
        counts[kind] += 1

    for node in range(trainer_nodes):
        for gpu in range(trainer_gpus_per_node):
            add("trainer", node, range(gpu, gpu + 1), next_gpu)
        if lending:
            for first in range(0, trainer_gpus_per_node - gpus_per_replica + 1, gpus_per_replica):
                add("hybrid", node, range(first, first + gpus_per_replica), next_gpu)
        next_gpu += trainer_gpus_per_node
    for node in range(trainer_nodes, trainer_nodes + rollout_nodes):
        for first in range(0, rollout_gpus_per_node - gpus_per_replica + 1, gpus_per_replica):
            add("standalone", node, range(first, first + gpus_per_replica), next_gpu)
        next_gpu += rollout_gpus_per_node
    return RunPlan(trainer_nodes + rollout_nodes, trainer_nodes, rollout_nodes, tuple(workers))
