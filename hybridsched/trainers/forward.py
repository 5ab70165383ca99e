"""Log-probabilities of actions under a model: padding, one forward pass, the head only where it is needed.

The head is applied to the positions that predict an action and to nothing else (no logits for prompts or padding), in
pieces when a large vocabulary would make them big. Log-probs are of the sampling temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hybridsched.models.qwen3 import CausalLM

LOGIT_BYTES = 256 << 20  #: logits held at a time; beyond it they are computed in pieces and again in the backward pass


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Right-padded input: tokens int64 [B, L]; sources int64 [A] into B x L, the position that predicts each action;
    targets int64 [A], the actions' token ids. Actions are ordered by row, then position."""

    tokens: Tensor
    sources: Tensor
    targets: Tensor


def pad_rows(rows: Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]], device: torch.device) -> PaddedRows:
    """From (tokens [P + T], indices of actions [A]) per row. The last token of a row predicts nothing and is left out.

    An action's index must be at least 1.
    """
    width = max(1, max(tokens.shape[0] for tokens, _ in rows) - 1)
    padded = np.zeros((len(rows), width), np.int64)
    sources, targets = [], []
    for row, (tokens, actions) in enumerate(rows):
        padded[row, : tokens.shape[0] - 1] = tokens[:-1]
        sources.append(actions + (row * width - 1))
        targets.append(tokens[actions])
    return PaddedRows(
        torch.from_numpy(padded).to(device),
        torch.from_numpy(np.concatenate(sources)).to(device),
        torch.from_numpy(np.concatenate(targets).astype(np.int64)).to(device),
    )


def action_logprobs(
    model: CausalLM, rows: PaddedRows, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """(log-probs [A], entropies [A]) of the actions' distributions at ``temperature``.

    float32, or float64 for a float64 model. The entropy carries a gradient only with ``entropy_gradient``.
    """
    hidden = model.hidden(rows.tokens)
    picked = hidden.reshape(-1, hidden.shape[-1]).index_select(0, rows.sources)

    def piece(states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = model.head(states)
        if temperature != 1.0:
            logits = logits / temperature
        logp = -F.cross_entropy(logits, targets, reduction="none")
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
            logits = logits if entropy_gradient else logits.detach()
            log_all = torch.log_softmax(logits, dim=-1)
            entropy = -(log_all.exp() * log_all).sum(dim=-1)
        return logp, entropy

    step = max(1, LOGIT_BYTES // (4 * model.config.vocab_size))
    if rows.targets.shape[0] <= step:
        return piece(picked, rows.targets)
    pieces = [
        checkpoint(piece, states, targets, use_reentrant=False, preserve_rng_state=False)
        for states, targets in zip(picked.split(step), rows.targets.split(step), strict=True)
    ]
    return torch.cat([logp for logp, _ in pieces]), torch.cat([entropy for _, entropy in pieces])
