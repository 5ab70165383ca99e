"""The learning rate of an optimizer step, as a pure function of its number. Nothing to save but the step counter."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybridsched.config.schema import RunConfig
from hybridsched.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LearningRate:
    """Linear warm-up, then constant or a half cosine down to ``floor`` x peak at ``total`` steps."""

    peak: float
    warmup: int
    cosine: bool
    floor: float
    total: int | None  #: None where the shape does not need it

    def at(self, step: int) -> float:
        """Learning rate of optimizer step ``step`` (from 0). The first warm-up step is 1/warmup of the peak, not 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if not self.cosine or self.total is None:
            return self.peak
        done = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        return self.peak * (self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * done)))


def total_optimizer_steps(config: RunConfig) -> int | None:
    """Optimizer steps of the run as far as the configuration alone tells; None when only the data would.

    optim.total_training_steps if given; else the shorter of trainer.total_training_steps (sync cycles) and
    rollout.total_rollout_steps (samples), in optimizer steps including ppo_epochs.
    """
    actor = config.actor_rollout_ref.actor
    if actor.optim.total_training_steps > 0:
        return actor.optim.total_training_steps
    candidates = []
    if config.trainer.total_training_steps is not None:
        mini_batches = config.async_training.trigger_parameter_sync_step * config.async_training.require_batches
        candidates.append(config.trainer.total_training_steps * mini_batches)
    if config.rollout.total_rollout_steps is not None:
        candidates.append(math.ceil(config.rollout.total_rollout_steps / actor.ppo_mini_batch_size))
    return min(candidates) * actor.ppo_epochs if candidates else None


def build_schedule(config: RunConfig) -> LearningRate:
    """The schedule the configuration asks for. Raises ConfigError when its shape needs a length nobody gave."""
    optim = config.actor_rollout_ref.actor.optim
    total = total_optimizer_steps(config)
    by_ratio = optim.lr_warmup_steps < 0 and optim.lr_warmup_steps_ratio > 0
    if total is None and (optim.lr_scheduler_type == "cosine" or by_ratio):
        reason = "lr_scheduler_type: cosine" if optim.lr_scheduler_type == "cosine" else "lr_warmup_steps_ratio"
        raise ConfigError(
            f"actor_rollout_ref.actor.optim: {reason} needs the number of optimizer steps; set "
            "actor_rollout_ref.actor.optim.total_training_steps, trainer.total_training_steps or "
            "rollout.total_rollout_steps"
        )
    warmup = optim.lr_warmup_steps
    if warmup < 0:
        warmup = int(optim.lr_warmup_steps_ratio * (total or 0))
    return LearningRate(optim.lr, warmup, optim.lr_scheduler_type == "cosine", optim.min_lr_ratio, total)
