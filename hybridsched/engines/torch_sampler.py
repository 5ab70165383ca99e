"""Sampling of the torch engine: counter-based draws and one vectorised inverse-CDF sampler.

Owns: `draw_key` and `uniforms` (the random numbers), `sample_tokens` (logits to tokens and log-probs).

Invariants: a draw is a function of (seed, sample_uid, response index, position) alone, so neither the batch a sequence
happens to be in, nor the replica, nor an interruption changes it; log-probs are those of softmax(logits / temperature)
before any truncation; no generator state exists.

Does not: know sequences, stop tokens or budgets (torch_batch.py does).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """The finaliser of splitmix64 on a Python integer (a bijection of 64-bit words)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def draw_key(seed: int, sample_uid: int, response_index: int) -> int:
    """64-bit key of one response's stream of draws."""
    key = 0
    for part in (seed, sample_uid, response_index):
        key = _mix(key + _GOLDEN + _mix((part & _MASK) ^ _GOLDEN))
    return key


def uniforms(keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number strictly inside (0, 1) per (key, response position): ``keys [B]``, ``positions [B]`` to ``[B]``."""
    x = keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    out: npt.NDArray[np.float64] = ((x >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return out


@dataclass(frozen=True, slots=True)
class Truncation:
    """Per-row limits, neutral values included: top_k ``[B]`` int64 (vocab = off), top_p and min_p ``[B]`` float64."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


def sample_tokens(
    logits: Tensor, temperature: Tensor, u: Tensor, truncation: Truncation | None, any_greedy: bool
) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    logits ``[B, V]``; temperature float ``[B, 1]``, 0 = greedy; u float64 ``[B, 1]`` in (0, 1).
    Returns tokens int64 ``[B]`` and their log-probs float32 ``[B]`` under softmax(logits / temperature), not truncated
    (a greedy row: at temperature 1).
    """
    greedy = None
    if any_greedy:
        greedy = temperature[:, 0] <= 0
        temperature = torch.where(temperature > 0, temperature, torch.ones_like(temperature))
    logp = torch.log_softmax(logits / temperature, dim=-1)
    mass = logp.double().exp_()
    if truncation is not None:
        mass = _truncate(mass, truncation)
    cdf = mass.cumsum_(dim=-1)
    tokens = torch.searchsorted(cdf, u * cdf[:, -1:], right=False)
    tokens.clamp_(max=logits.shape[-1] - 1)
    if greedy is not None:
        tokens = torch.where(greedy[:, None], logits.argmax(dim=-1, keepdim=True), tokens)
    return tokens[:, 0], logp.gather(1, tokens)[:, 0].float()


def _truncate(mass: Tensor, truncation: Truncation) -> Tensor:
    """Zero the mass outside min_p, top_k and top_p (applied in this order); at least the likeliest token stays."""
    ordered, index = mass.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(mass.shape[-1], device=mass.device)[None]
    keep = (rank < truncation.top_k[:, None]) & (ordered >= truncation.min_p[:, None] * ordered[:, :1])
    ordered = ordered * keep
    before = ordered.cumsum(dim=-1) - ordered
    keep = keep & (before < truncation.top_p[:, None] * ordered.sum(dim=-1, keepdim=True))
    keep[:, 0] = True
    return torch.zeros_like(mass).scatter_(1, index, ordered * keep)
