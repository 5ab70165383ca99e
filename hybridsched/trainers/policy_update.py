"""The gradient of one mini-batch: micro-batches forward and backward, gradients and sums left for the caller.

Owns the loss as a whole: surrogate x importance weight, entropy bonus, KL to the reference. It takes no optimizer step
and talks to no other rank: its results are sums, and sums over ranks are the results of the whole mini-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybridsched.config.schema import RunConfig
from hybridsched.models.qwen3 import CausalLM
from hybridsched.trainers.batching import micro_batches
from hybridsched.trainers.forward import PaddedRows, action_logprobs, pad_rows
from hybridsched.trainers.losses import (
    AggMode,
    ClipRange,
    KlType,
    MiniBatchSize,
    clipped_surrogate,
    kl_penalty,
    sequence_weights,
)
from hybridsched.trainers.trajectories import Trajectory

#: Columns of the sums: the first three are weighted (already normalised), the others plain sums over actions.
SUMS = ("loss", "pg_loss", "kl_loss", "entropy", "ppo_kl", "clipped", "clipped_lower", "actions")


@dataclass(frozen=True, slots=True)
class LossSettings:
    """What of the configuration the loss needs. ``kl_coef`` None: no reference model."""

    clip: ClipRange
    agg_mode: AggMode
    entropy_coeff: float
    kl_coef: float | None
    kl_type: KlType
    temperature: float
    max_tokens: int

    @staticmethod
    def of(config: RunConfig) -> LossSettings:
        """From run.yaml."""
        actor = config.actor_rollout_ref.actor
        low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
        high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
        return LossSettings(
            ClipRange(low, high, actor.clip_ratio_c),
            actor.loss_agg_mode,
            actor.entropy_coeff,
            actor.kl_loss_coef if actor.use_kl_loss else None,
            actor.kl_loss_type,
            config.actor_rollout_ref.rollout.temperature,
            actor.ppo_max_token_len_per_gpu,
        )


@dataclass(frozen=True, slots=True)
class GradientPass:
    """``sums``: float64 [len(SUMS)] of this rank; ``logprobs[i]``: float [A] of trajectory i in this pass."""

    sums: npt.NDArray[np.float64]
    logprobs: list[npt.NDArray[np.floating]]


def accumulate_gradients(
    model: CausalLM,
    trajectories: Sequence[Trajectory],
    size: MiniBatchSize,
    settings: LossSettings,
    after_micro_batch: Callable[[], None],
) -> GradientPass:
    """Add this rank's share of the mini-batch gradient to the parameters' ``grad``. ``size`` is that of all ranks."""
    device = next(model.parameters()).device
    logprobs: list[npt.NDArray[np.floating]] = [np.zeros(0, np.float32)] * len(trajectories)
    totals: list[Tensor] = []
    seen: list[tuple[list[int], Tensor]] = []
    for group in active_micro_batches(trajectories, settings.max_tokens):
        members = [trajectories[index] for index in group]
        sums, logp = _micro_batch(model, members, size, settings, device)
        sums[0].backward()
        totals.append(sums.detach())
        seen.append((group, logp))
        after_micro_batch()
    for group, logp in seen:
        pieces = np.split(logp.cpu().numpy(), np.cumsum([trajectories[index].n_actions for index in group])[:-1])
        for index, piece in zip(group, pieces, strict=True):
            logprobs[index] = piece
    if not totals:
        return GradientPass(np.zeros(len(SUMS)), logprobs)
    return GradientPass(torch.stack(totals).double().sum(dim=0).cpu().numpy(), logprobs)


def active_micro_batches(trajectories: Sequence[Trajectory], max_tokens: int) -> list[list[int]]:
    """Micro-batches of the trajectories that have actions at all."""
    active = [index for index, trajectory in enumerate(trajectories) if trajectory.n_actions]
    lengths = [int(trajectories[index].tokens.shape[0]) - 1 for index in active]
    return [[active[i] for i in group] for group in micro_batches(lengths, max_tokens)]


def _micro_batch(
    model: CausalLM,
    members: Sequence[Trajectory],
    size: MiniBatchSize,
    settings: LossSettings,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """(sums [len(SUMS)], the first with gradient; log-probs [A] without) of one micro-batch."""
    rows = pad_rows([(t.tokens, t.actions) for t in members], device)
    logp, entropy = action_logprobs(model, rows, settings.temperature, entropy_gradient=settings.entropy_coeff != 0)
    return loss_sums(logp, entropy, members, size, settings), logp.detach()


def loss_sums(
    logp: Tensor, entropy: Tensor, members: Sequence[Trajectory], size: MiniBatchSize, settings: LossSettings
) -> Tensor:
    """The loss of one micro-batch and what is said about it: [len(SUMS)], the first with gradient.

    logp (with gradient), entropy: [A] over the actions of ``members``, in order. ``size`` is that of all ranks.
    """

    def flat(parts: Sequence[npt.NDArray[np.float32]]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device=logp.device, dtype=logp.dtype)

    counts = [t.n_actions for t in members]
    per_action = np.repeat(np.array(sequence_weights(counts, settings.agg_mode, size), np.float64), counts)
    weights = torch.from_numpy(per_action).to(device=logp.device, dtype=logp.dtype)
    terms = clipped_surrogate(
        logp, flat([t.old_logprobs for t in members]), flat([t.advantages for t in members]), settings.clip
    )
    pg_loss = (weights * flat([t.is_weights for t in members]) * terms.loss).sum()
    loss, kl_loss = pg_loss, torch.zeros_like(pg_loss)
    if settings.entropy_coeff != 0:
        loss = loss - settings.entropy_coeff * (weights * entropy).sum()
    if settings.kl_coef is not None:
        reference = flat([t.ref_logprobs for t in members if t.ref_logprobs is not None])
        kl_loss = (weights * kl_penalty(logp, reference, settings.kl_type)).sum()
        loss = loss + settings.kl_coef * kl_loss
    plain = [entropy.sum(), -terms.log_ratio.sum(), terms.clipped.sum(), terms.clipped_lower.sum()]
    actions = torch.full_like(pg_loss, float(sum(counts)))
    return torch.stack([loss, pg_loss, kl_loss, *(p.to(logp.dtype) for p in plain), actions])


def compute_logprobs(
    model: CausalLM,
    rows: Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]],
    temperature: float,
    max_tokens: int,
    after_micro_batch: Callable[[], None],
) -> list[npt.NDArray[np.float32]]:
    """Teacher-forced log-probs, float32 [A] for each (tokens [P + T], indices of actions [A])."""
    device = next(model.parameters()).device
    out: list[npt.NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(rows)
    active = [index for index, (_, actions) in enumerate(rows) if actions.shape[0]]
    for group in micro_batches([int(rows[index][0].shape[0]) - 1 for index in active], max_tokens):
        indices = [active[i] for i in group]
        padded: PaddedRows = pad_rows([rows[index] for index in indices], device)
        with torch.no_grad():
            logp = action_logprobs(model, padded, temperature)[0].float().cpu().numpy()
        ends = np.cumsum([rows[index][1].shape[0] for index in indices])[:-1]
        for index, piece in zip(indices, np.split(logp, ends), strict=True):
            out[index] = piece
        after_micro_batch()
    return out


def find_culprits(
    model: CausalLM,
    trajectories: Sequence[Trajectory],
    size: MiniBatchSize,
    settings: LossSettings,
    after_micro_batch: Callable[[], None],
) -> list[int]:
    """sample_uids whose own loss or gradient is not finite. Slow: one pass per sample; leaves no gradient behind."""
    culprits = []
    for uid in dict.fromkeys(t.sample_uid for t in trajectories):
        model.zero_grad(set_to_none=True)
        own = [t for t in trajectories if t.sample_uid == uid]
        sums = accumulate_gradients(model, own, size, settings, after_micro_batch).sums
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if not math.isfinite(sums[0]) or not all(bool(torch.isfinite(g).all()) for g in gradients):
            culprits.append(uid)
    model.zero_grad(set_to_none=True)
    return culprits
