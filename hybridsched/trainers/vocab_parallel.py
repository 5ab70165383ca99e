"""Log-probabilities and entropies of actions when every tensor-parallel rank holds a slice of the vocabulary.

Owns the one autograd function for it. No rank ever holds logits of the whole vocabulary: three numbers per action cross
the group (maximum, sum of exponentials, target's logit) and one more for the entropy. Without a group it is the plain
log-softmax. Rows that pad the vocabulary to a multiple of the group take no part in the distribution.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def action_terms(
    logits: Tensor, targets: Tensor, vocab_size: int, group: dist.ProcessGroup | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """(log-probs [A], entropies [A]) at ``temperature``, float32, or float64 for float64 logits; both with gradient.

    logits: [A, V / ranks], the slice of this rank (all slices equally long); targets: int64 [A], ids of the whole
    vocabulary. Collective over ``group``, in forward only: the gradient needs nothing from the other ranks.
    """
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    width = logits.shape[-1]
    result: tuple[Tensor, Tensor] = _ActionTerms.apply(
        logits, targets, width * rank, min(width, vocab_size - width * rank), group if size > 1 else None
    )
    return result


class _ActionTerms(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped to mypy here
    """With z the logits, p = softmax(z) and H its entropy:

    d logp_t / dz_j = [j = t] - p_j   and   dH / dz_j = -p_j (log p_j + H).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, first: int, real: int, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        """``first``: vocabulary id of column 0; ``real``: columns that are no padding, maybe none or negative."""

        def combined(value: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
            if group is not None:
                dist.all_reduce(value, op=operation, group=group)
            return value

        mine = logits[:, : max(0, real)]
        floor = torch.finfo(logits.dtype).min
        top = mine.amax(dim=-1) if mine.shape[1] else logits.new_full(logits.shape[:1], floor)
        top = combined(top, dist.ReduceOp.MAX)
        log_total = combined((mine - top[:, None]).exp().sum(dim=-1)).log() + top
        log_all = mine - log_total[:, None]
        held = (targets >= first) & (targets < first + mine.shape[1])
        column = torch.where(held, targets - first, 0)
        picked = torch.zeros_like(top)
        if mine.shape[1]:
            picked = torch.where(held, log_all.gather(1, column[:, None])[:, 0], 0.0)
        logp = combined(picked)
        entropy = combined(-(log_all.exp() * log_all).sum(dim=-1))
        ctx.save_for_backward(log_all, entropy, held, column)
        ctx.width = logits.shape[-1]
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Gradient of this rank's slice; zero in padding columns."""
        log_all, entropy, held, column = ctx.saved_tensors
        p = log_all.exp()
        gradient = -p * (grad_logp[:, None] + grad_entropy[:, None] * (log_all + entropy[:, None]))
        if gradient.shape[1]:
            gradient.scatter_add_(1, column[:, None], (grad_logp * held)[:, None])
        padding = ctx.width - gradient.shape[1]
        if padding:
            gradient = torch.nn.functional.pad(gradient, (0, padding))
        return gradient, None, None, None, None
