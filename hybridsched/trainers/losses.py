"""Per-token losses of the policy and how they become one number. Pure tensor functions.

Every function works on flat arrays over *actions*: the tokens the policy sampled itself, of all responses of a
micro-batch behind each other, without padding. A micro-batch's loss is ``sum(weight * token_loss)``; the weights carry
the normaliser of the WHOLE mini-batch over all ranks, so gradients of micro-batches and ranks are simply summed and do
not depend on how the mini-batch was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

AggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
KlType = Literal["kl", "abs", "mse", "low_var_kl"]

LOG_RATIO_BOUND = 20.0  #: exp() of a log-ratio beyond this says nothing and may overflow
KL_BOUND = 10.0


@dataclass(frozen=True, slots=True)
class ClipRange:
    """The ratio is kept in [1 - low, 1 + high]; ``dual`` bounds the loss of negative advantages."""

    low: float
    high: float
    dual: float


@dataclass(frozen=True, slots=True)
class Surrogate:
    """Per-action results, each [A]: the loss (with gradient), where clipping was active, and log(pi / pi_old)."""

    loss: Tensor
    clipped: Tensor
    clipped_lower: Tensor
    log_ratio: Tensor


def clipped_surrogate(logp: Tensor, old_logp: Tensor, advantages: Tensor, clip: ClipRange) -> Surrogate:
    """PPO's clipped surrogate with a dual clip.

    With r = exp(logp - old_logp): L = max(-A r, -A clip(r, 1 - low, 1 + high)), and for A < 0 also L <= -A c.
    Sources: Schulman et al., "Proximal Policy Optimization", 2017; separate low and high: Yu et al., "DAPO", 2025;
    dual clip: Ye et al., "Mastering Complex Control in MOBA Games" (2020).

    logp (with gradient), old_logp, advantages: [A].
    """
    log_ratio = (logp - old_logp).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    clipped = torch.maximum(plain, bounded)
    ceiling = -advantages * clip.dual
    negative = advantages < 0
    loss = torch.where(negative, torch.minimum(clipped, ceiling), clipped)
    return Surrogate(loss, bounded > plain, negative & (clipped > ceiling), log_ratio.detach())


def kl_penalty(logp: Tensor, ref_logp: Tensor, kind: KlType) -> Tensor:
    """Per-action estimate of KL(pi || pi_ref) from the sampled token, with d = logp - ref_logp.

    kl: d (k1). abs: |d|. mse: d^2 / 2 (k2). low_var_kl: exp(-d) + d - 1 (k3), bounded to [-10, 10].
    Source: Schulman, "Approximating KL Divergence", 2020.
    """
    d = logp - ref_logp
    if kind == "kl":
        return d
    if kind == "abs":
        return d.abs()
    if kind == "mse":
        return 0.5 * d.square()
    d = d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (torch.exp(-d) + d - 1.0).clamp(-KL_BOUND, KL_BOUND)


@dataclass(frozen=True, slots=True)
class MiniBatchSize:
    """What the loss is divided by: actions, and responses with at least one action, over all ranks."""

    actions: int
    sequences: int


def sequence_weights(n_actions: Sequence[int], mode: AggMode, size: MiniBatchSize) -> list[float]:
    """The weight of each action of each response, so that the loss is ``sum(weight * token_loss)``.

    With N actions and S responses in the whole mini-batch, and A actions in a response: token-mean 1/N
    (Yu et al., "DAPO", 2025); seq-mean-token-sum 1/S (Liu et al., "Dr. GRPO", 2025); seq-mean-token-mean 1/(S A)
    (Shao et al., "DeepSeekMath", 2024). A response is never split over micro-batches, so A is known locally.
    A response without actions weighs nothing.
    """
    if mode == "token-mean":
        return [1.0 / size.actions if count else 0.0 for count in n_actions]
    if mode == "seq-mean-token-sum":
        return [1.0 / size.sequences if count else 0.0 for count in n_actions]
    return [1.0 / (size.sequences * count) if count else 0.0 for count in n_actions]
