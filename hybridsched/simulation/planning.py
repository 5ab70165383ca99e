"""Which split of the GPUs, and which policy: every combination played in virtual time, ranked.

Owns `options` and the one-line reason of each. The number of GPUs stays; splits are those of `scenario.splits` (and
colocated, when asked for by the configuration). A combination that cannot run is listed last with what it said.
Does not choose for anybody: it ranks by predicted wall clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridsched.config.schema import RunConfig
from hybridsched.errors import HybridschedError
from hybridsched.simulation.bound import lower_bound
from hybridsched.simulation.scenario import Played, play, splits, with_policy, with_split

#: What is tried unless told otherwise.
POLICIES = ("static_fully_async", "default", "lookahead")


@dataclass(frozen=True, slots=True)
class Option:
    """One split with one policy. ``run`` is None when it could not be played; ``reason`` says why either way."""

    split: str
    policy: str
    run: Played | None
    bound_s: float
    reason: str
    overrides: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Predicted wall clock; inf for one that could not be played."""
        return math.inf if self.run is None else self.run.wall_clock_s

    @property
    def to_bound(self) -> str:
        """Wall clock as a ratio to the bound of this split."""
        return "-" if self.run is None or self.bound_s <= 0 else f"{self.seconds / self.bound_s:.2f}"

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "split": self.split,
            "policy": self.policy,
            "seconds": self.seconds,
            "bound_s": self.bound_s,
            "reason": self.reason,
            "overrides": list(self.overrides),
            "run": None if self.run is None else self.run.as_json(),
        }


def options(config: RunConfig, policies: Sequence[str] = POLICIES) -> list[Option]:
    """All combinations, fastest first (ties: the simpler policy, as they are listed in ``policies``)."""
    found = [_try(config, split, policy) for split in _splits(config) for policy in policies]
    return sorted(found, key=lambda one: one.seconds)


def _splits(config: RunConfig) -> list[tuple[int, int]]:
    if config.rollout.nnodes == 0:
        return [(config.trainer.nnodes * config.trainer.n_gpus_per_node, 0), *splits(config)]
    return splits(config)


def _try(config: RunConfig, split: tuple[int, int], policy: str) -> Option:
    other = with_policy(_local_names(with_split(config, *split)), policy)
    name = f"{split[0]}+{split[1]}"
    overrides = _overrides(other)
    try:
        run = play(other)
    except HybridschedError as error:
        return Option(name, policy, None, 0.0, f"cannot run: {str(error).splitlines()[0]}", overrides)
    bound = lower_bound(other, run.trained)
    return Option(name, policy, run, bound.seconds, _why(run), overrides)


def _local_names(config: RunConfig) -> RunConfig:
    """Slow and lost replicas belong to the machines of the configuration's own split; elsewhere all are alike."""
    emulated = config.emulated.model_copy(update={"replica_speed": {}, "worker_lost_at_s": {}})
    return config.model_copy(update={"emulated": emulated})


def _overrides(config: RunConfig) -> tuple[str, ...]:
    training = config.async_training
    return (
        f"trainer.nnodes={config.trainer.nnodes}",
        f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}",
        f"rollout.nnodes={config.rollout.nnodes}",
        f"rollout.n_gpus_per_node={config.rollout.n_gpus_per_node}",
        f"async_training.use_dynamic_resource_scheduling={str(training.use_dynamic_resource_scheduling).lower()}",
        f"async_training.dynamic_schedule_policy={training.dynamic_schedule_policy}",
    )


def _why(run: Played) -> str:
    """Where the time went."""
    wall = max(run.wall_clock_s, 1e-9)
    waiting, training = run.waiting_s / wall, run.training_s / wall
    if training >= 0.85:
        what = "training is the bottleneck"
    elif waiting > training:
        what = "generation is the bottleneck"
    else:
        what = "training and generation take turns"
    lending = f", lent in {run.activations} of {run.cycles} cycles" if run.activations else ""
    return f"{what}: trains {training:.0%}, waits or lends {waiting:.0%}, switches and syncs {_share(run):.0%}{lending}"


def _share(run: Played) -> float:
    return run.switching_s / max(run.wall_clock_s, 1e-9)
