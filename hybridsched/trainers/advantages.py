"""From rewards to advantages. Owns the formulas, on plain float64 arrays; knows nothing of samples, tokens or devices.

Only responses that have a reward take part: a response without one is neither a member of its group nor trained on.
The estimators that look beyond one sample get a ``reduce`` hook (element-wise sum over data-parallel ranks), so the
result does not depend on how the mini-batch is spread over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Reduce = Callable[[FloatArray], FloatArray]  #: element-wise sum over all ranks; every rank calls it equally often

GRPO_EPSILON = 1e-6
WHITEN_EPSILON = 1e-8


def one_rank(values: FloatArray) -> FloatArray:
    """The reduce hook of a group of one."""
    return values


def grpo(rewards: FloatArray, *, norm_by_std: bool = True) -> FloatArray:
    """Group-relative advantages of one sample: A_i = (r_i - mean(r)) / (std(r) + 1e-6), std with ddof 1.

    Source: Shao et al., "DeepSeekMath" (GRPO), 2024. ``norm_by_std=False`` leaves the division out, as proposed by
    Liu et al., "Understanding R1-Zero-Like Training" (Dr. GRPO), 2025. A group of one has no baseline and teaches
    nothing: its advantage is 0.

    rewards: float64 [n], of the valid responses; returns float64 [n].
    """
    if rewards.size < 2:
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    scale = float(rewards.std(ddof=1)) + GRPO_EPSILON if norm_by_std else 1.0
    return np.asarray(centred / scale, dtype=np.float64)


def rloo(rewards: FloatArray) -> FloatArray:
    """Leave-one-out advantages of one sample: A_i = r_i - mean of the other rewards.

    Source: Kool et al., "Buy 4 REINFORCE samples, get a baseline for free!", 2019; Ahmadian et al., "Back to Basics"
    (RLOO), 2024. A group of one has no baseline and teaches nothing: its advantage is 0.

    rewards: float64 [n], of the valid responses; returns float64 [n].
    """
    if rewards.size < 2:
        return np.zeros_like(rewards)
    others = (rewards.sum() - rewards) / (rewards.size - 1)
    return np.asarray(rewards - others, dtype=np.float64)


def discounted_returns(reward: float, n_actions: int, gamma: float) -> FloatArray:
    """Return of each of a response's own tokens when the reward arrives with the last: G_t = gamma^(A-1-t) r.

    Source: Hu, "REINFORCE++", 2025, without the KL term in the reward (the KL is a loss here). Only tokens the policy
    sampled are steps; tokens of a tool or an environment in between neither discount nor cut the return.

    Returns float64 [n_actions].
    """
    return reward * np.power(gamma, np.arange(n_actions - 1, -1, -1, dtype=np.float64))


def whiten(values: Sequence[FloatArray], reduce: Reduce = one_rank) -> list[FloatArray]:
    """Whiten tokens over the whole mini-batch: (x - mean) / sqrt(var + 1e-8), var with ddof 1.

    Source: Hu, "REINFORCE++", 2025 (global batch normalisation of the advantage). Two passes, because the sum of
    squares alone loses the variance of large equal rewards. ``reduce`` is called exactly twice on every rank, also on
    one without values. Fewer than two tokens in all: zeros.
    """
    flat = np.concatenate([np.zeros(0), *values])
    count, total = reduce(np.array([flat.size, flat.sum()], dtype=np.float64))
    mean = total / max(count, 1.0)
    (squares,) = reduce(np.array([np.square(flat - mean).sum()], dtype=np.float64))
    if count < 2:
        return [np.zeros_like(part) for part in values]
    scale = 1.0 / np.sqrt(squares / (count - 1.0) + WHITEN_EPSILON)
    return [(part - mean) * scale for part in values]
