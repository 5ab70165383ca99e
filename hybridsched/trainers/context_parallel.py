"""Long sequences shared out to ranks: who holds which positions, and attention that sees all of them.

Owns the cut of a micro-batch (`share`), the way back to one value per action (`assemble`), and `GatheredAttention`, for
where Transformer Engine's own context-parallel attention is not there (CPU).

A row is cut into 2 C chunks for C ranks, and rank r holds chunks r and 2 C - 1 - r: with causal attention every rank
then has the same work. Megatron's rotary embeddings and Transformer Engine expect exactly this cut.

Invariant: losses are computed from all actions on every rank of the group, but gradients flow only into the log-probs a
rank computed itself, so gradients of the ranks are summed like those of data-parallel ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hybridsched.trainers.forward import PaddedRows


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a micro-batch. ``held``: int64, which of the micro-batch's ``n_actions`` actions are in it."""

    rows: PaddedRows
    held: Tensor
    n_actions: int


def positions(rank: int, size: int, length: int) -> Tensor:
    """Positions within a row of ``length`` (a multiple of 2 x size) that a rank holds, in its order: int64."""
    chunk = length // (2 * size)
    first, second = rank * chunk, (2 * size - 1 - rank) * chunk
    return torch.cat([torch.arange(first, first + chunk), torch.arange(second, second + chunk)])


def share(rows: PaddedRows, rank: int, size: int) -> Share:
    """This rank's positions of every row, and the actions predicted from them."""
    if size == 1:
        return Share(rows, torch.arange(rows.targets.shape[0], device=rows.targets.device), rows.targets.shape[0])
    width = rows.tokens.shape[1]
    length = -(-width // (2 * size)) * 2 * size
    tokens = F.pad(rows.tokens, (0, length - width))
    held_positions = positions(rank, size, length).to(tokens.device)
    local = torch.full((length,), -1, dtype=torch.int64, device=tokens.device)
    local[held_positions] = torch.arange(held_positions.shape[0], device=tokens.device)
    row, position = rows.sources // width, rows.sources % width
    here = local[position]
    held = torch.nonzero(here >= 0)[:, 0]
    sources = row[held] * held_positions.shape[0] + here[held]
    return Share(PaddedRows(tokens[:, held_positions], sources, rows.targets[held]), held, rows.targets.shape[0])


def assemble(values: Tensor, part: Share, group: dist.ProcessGroup | None) -> Tensor:
    """One value per action of the micro-batch, [n_actions], from each rank's own; the gradient is of these only."""
    if group is None:
        return values
    own = values.new_zeros(part.n_actions).index_copy(0, part.held, values)
    everyone = own.detach().clone()
    dist.all_reduce(everyone, group=group)
    return own + (everyone - own.detach())


class _GatherSequence(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped to mypy here
    """[S, ...] of every rank behind each other, [size x S, ...]; backward sums what all ranks send for this one."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Collective."""
        ctx.group, ctx.length = group, local.shape[0]
        pieces = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, local.contiguous(), group=group)
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Collective."""
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.narrow(0, dist.get_rank(ctx.group) * ctx.length, ctx.length), None


class GatheredAttention(nn.Module):  # type: ignore[misc]  # torch is untyped to mypy here
    """Causal attention of this rank's queries to the keys of all ranks, in the place of Megatron's core attention."""

    def __init__(self, config: Any, *unused: Any, softmax_scale: float | None = None, **more: Any) -> None:
        super().__init__()
        self._scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *unused: Any, **more: Any) -> Tensor:
        """query [S, B, heads, D]; key, value [S, B, groups, D] of this rank; returns [S, B, heads x D]. Collective."""
        from megatron.core import parallel_state

        group = parallel_state.get_context_parallel_group()
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        length = query.shape[0] * size
        mine = positions(rank, size, length)
        theirs = torch.cat([positions(other, size, length) for other in range(size)])
        visible = (theirs[None, :] <= mine[:, None]).to(query.device)
        repeats = query.shape[2] // key.shape[2]
        keys, values = (
            _GatherSequence.apply(part, group).permute(1, 2, 0, 3).repeat_interleave(repeats, dim=1)
            for part in (key, value)
        )
        out = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3), keys, values, attn_mask=visible, scale=self._scale
        )
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)
