"""A run.yaml as a scenario: the same sizes, engine and trainer emulated, played to its end in virtual time.

Owns: what is replaced in a configuration so that it can be simulated (`load_scenario`), other splits of the same GPUs
(`splits`, `with_split`), and the figures of a finished simulation (`play`, `Played`). The run itself is
`simulation.world`: the real controller. Invariant: nothing of a file that decides about scheduling is changed: nodes,
GPUs, samples, windows, policy and deadlines stay as written.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridsched.config import load_config
from hybridsched.config.derived import derive
from hybridsched.config.schema import EmulatedConfig, RunConfig
from hybridsched.errors import ConfigError
from hybridsched.scheduling.policy import DynamicSchedulePolicyBase
from hybridsched.simulation.world import SimulatedRun

#: Cycles of a scenario that names no end.
DEFAULT_CYCLES = 20
#: What a simulation has instead of models, files, machines and earlier checkpoints.
_REPLACED = (
    "launcher=local",
    "actor_rollout_ref.actor.strategy=emulated",
    "actor_rollout_ref.rollout.name=emulated",
    "data.train_files=[]",
    "data.val_files=[]",
    "local.cores=null",
    "local.allow_oversubscribe=true",
    "trainer.resume_mode=disable",
    "weight_sync.verify=off",
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A configuration ready to be simulated. ``notes``: what the reader should know about it."""

    config: RunConfig
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Played:
    """Figures of a finished simulation. Times in virtual seconds, utilizations in [0, 1]."""

    policy: str
    trainer_gpus: int
    rollout_gpus: int
    wall_clock_s: float
    cycles: int
    trained: int
    activations: int
    skipped_syncs: int
    cycle_s: tuple[float, ...]
    utilization: float  #: of all GPUs, exact, over the cycles' time
    train_utilization: float
    rollout_utilization: float
    waiting_s: float  #: time in which training waited for samples (also while hybrids were lent)
    training_s: float
    switching_s: float

    @property
    def label(self) -> str:
        """Split and policy."""
        return f"{self.trainer_gpus}+{self.rollout_gpus} {self.policy}"

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def load_scenario(
    path: str | os.PathLike[str] | None,
    overrides: Sequence[str] = (),
    *,
    cycles: int | None = None,
    base: Mapping[str, Any] | None = None,
) -> Scenario:
    """Read a run.yaml and switch its engine and trainer to emulated ones.

    cycles: sync cycles to play; None: as the file says, or DEFAULT_CYCLES when it names no end. Raises ConfigError.
    """
    more = [*overrides, *_REPLACED]
    if cycles is not None:
        more.append(f"trainer.total_training_steps={cycles}")
    config = load_config(path, more, base=base)
    notes: list[str] = []
    if _endless(config):
        config = load_config(path, [*more, f"trainer.total_training_steps={DEFAULT_CYCLES}"], base=base)
        notes.append(f"the configuration names no end: {DEFAULT_CYCLES} cycles are played (--cycles)")
    untouched = EmulatedConfig()
    if config.emulated.model_dump(exclude={"dataset_size"}) == untouched.model_dump(exclude={"dataset_size"}):
        notes.append("no timing under emulated: is set: all times are those of the defaults, not of your model")
    _check_names(config)
    return Scenario(config, tuple(notes))


def splits(config: RunConfig) -> list[tuple[int, int]]:
    """(trainer GPUs, rollout GPUs) with the same sum that make whole replicas on both sides, trainer side first.

    In steps of a node where both sides have nodes of one size and several of them in all, else of a replica.
    """
    derived = derive(config)
    total = derived.n_trainer_gpus + derived.n_rollout_gpus
    step = _step(config)
    return [(a, total - a) for a in range(step, total, step)]


def with_split(config: RunConfig, trainer_gpus: int, rollout_gpus: int, **training: Any) -> RunConfig:
    """The configuration with other numbers of GPUs, in nodes as `splits` takes them. ``training``: async_training keys.

    Replica names of `emulated.replica_speed` and `worker_lost_at_s` that do not exist any more have no effect.
    """
    step = _step(config)
    same = derive(config)
    if (trainer_gpus, rollout_gpus) != (same.n_trainer_gpus, same.n_rollout_gpus):
        if trainer_gpus % step or rollout_gpus % step:
            raise ConfigError(f"{trainer_gpus}+{rollout_gpus} GPUs are no whole multiples of {step}")
        trainer = config.trainer.model_copy(update={"nnodes": trainer_gpus // step, "n_gpus_per_node": step})
        nodes = config.rollout.model_copy(update={"nnodes": rollout_gpus // step, "n_gpus_per_node": step})
        config = config.model_copy(update={"trainer": trainer, "rollout": nodes})
    return config.model_copy(update={"async_training": config.async_training.model_copy(update=training)})


def with_policy(config: RunConfig, policy: str, **kwargs: Any) -> RunConfig:
    """The configuration under another policy, with that policy's own knobs (lending switched on unless static)."""
    changed: dict[str, Any] = {"dynamic_schedule_policy": policy, "dynamic_schedule_policy_kwargs": dict(kwargs)}
    if policy == "static_fully_async":
        changed["use_dynamic_resource_scheduling"] = False
    else:
        changed["use_dynamic_resource_scheduling"] = True
    return config.model_copy(update={"async_training": config.async_training.model_copy(update=changed)})


def play(config: RunConfig, *, policy: DynamicSchedulePolicyBase | None = None, name: str = "") -> Played:
    """Simulate to the end and sum up. Raises what ended the run (FaultError, RunStalled, ...)."""
    run = SimulatedRun(config, policy=policy)
    return played(run, run.run(), name or config.async_training.dynamic_schedule_policy)


def played(run: SimulatedRun, summary: Any, name: str) -> Played:
    """Figures of a simulation that has ended with ``summary`` (a RunSummary)."""
    rows = [row.values for row in run.log.rows if "timing_s/step" in row.values]
    spans = [row["timing_s/step"] for row in rows]

    def weighted(metric: str) -> float:
        whole = math.fsum(spans)
        return math.fsum(row[metric] * s for row, s in zip(rows, spans, strict=True)) / whole if whole > 0 else 0.0

    def total(*metrics: str) -> float:
        return math.fsum(row.get(metric, 0.0) for row in rows for metric in metrics)

    return Played(
        policy=name,
        trainer_gpus=run.derived.n_trainer_gpus,
        rollout_gpus=run.derived.n_rollout_gpus,
        wall_clock_s=summary.wall_clock_s,
        cycles=summary.cycles,
        trained=summary.trained,
        activations=summary.activations,
        skipped_syncs=summary.skipped_syncs,
        cycle_s=tuple(spans),
        utilization=weighted("dynamic_resource/resource_utilization_exact"),
        train_utilization=weighted("dynamic_resource/train_resource_utilization"),
        rollout_utilization=weighted("dynamic_resource/rollout_resource_utilization"),
        waiting_s=total("timing_s/gen", "timing_s/seal_wait", "timing_s/wait_for_enough_samples"),
        training_s=total("timing_s/update_actor"),
        switching_s=total("timing_s/activate", "timing_s/deactivate", "timing_s/param_sync"),
    )


def _endless(config: RunConfig) -> bool:
    chosen = config.emulated.dataset_size != EmulatedConfig().dataset_size
    return config.trainer.total_training_steps is None and config.rollout.total_rollout_steps is None and not chosen


def _step(config: RunConfig) -> int:
    """GPUs by which a split can move."""
    trainer, nodes = config.trainer, config.rollout
    replica = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    several = trainer.nnodes + nodes.nnodes > 2
    same = nodes.nnodes == 0 or trainer.n_gpus_per_node == nodes.n_gpus_per_node
    return trainer.n_gpus_per_node if several and same else replica


def _check_names(config: RunConfig) -> None:
    """Every worker a scenario speaks of exists. Raises ConfigError."""
    derived = derive(config)
    known = {f"standalone.{i}" for i in range(derived.n_standalone_replicas)}
    known |= {f"hybrid.{i}" for i in range(derived.n_hybrid_replicas)}
    for key in ("replica_speed", "worker_lost_at_s"):
        values: dict[str, float] = getattr(config.emulated, key)
        for worker, value in values.items():
            if worker not in known:
                raise ConfigError(
                    f"emulated.{key}: there is no replica {worker!r}; there are {', '.join(sorted(known))}"
                )
            if not value > 0:
                raise ConfigError(f"emulated.{key}: {worker} has {value:g}; it must be above 0")
