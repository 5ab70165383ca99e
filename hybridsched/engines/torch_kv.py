"""KV cache of the torch engine: a fixed budget of tokens, cut into equal rows.

Owns: the two preallocated tensors and their geometry (rows x stride). Row r of the running batch owns the tokens
``[r * stride, (r + 1) * stride)`` of every layer.

Invariants: rows * stride never exceeds the budget; a row is wide enough for the whole worst case of its sequence, so
nothing that runs is ever preempted; memory is always finite (zeros at first), because attention multiplies masked
values by zero and zero times NaN is NaN.

Does not: decide who is admitted (torch_batch.py asks `fits`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridsched.engines.torch_weights import Attend
from hybridsched.models.qwen3 import ModelConfig


class KVCache:
    """Keys and values ``[layers, budget, kv_heads, head_dim]`` each."""

    def __init__(
        self, config: ModelConfig, budget: int, max_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.num_hidden_layers, budget, config.num_key_value_heads, config.head_dim)
        self.budget, self.max_rows, self.device = budget, min(max_rows, budget), device
        self._k = torch.zeros(shape, dtype=dtype, device=device)
        self._v = torch.zeros(shape, dtype=dtype, device=device)
        self._cut(budget // self.max_rows)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return int(self._k.nbytes + self._v.nbytes)

    def zero(self) -> None:
        """Forget everything (after a fault: no NaN may stay behind)."""
        self._k.zero_()
        self._v.zero_()

    def fits(self, rows: int, need: int) -> bool:
        """Could ``rows`` sequences of at most ``need`` tokens run together?"""
        return rows <= min(self.max_rows, self.budget // need)

    def make_room(self, rows: int, need: int, used: int, longest: int) -> None:
        """Change the geometry so that ``rows`` sequences of ``need`` tokens fit; call only when `fits` says so.

        The first ``used`` rows hold at most ``longest`` tokens each; they are kept.
        """
        if rows <= self.rows and need <= self.stride:
            return
        k, v = self.k, self.v
        # As wide as the number of rows allows: the next, longer prompt then needs no move.
        self._cut(self.budget // min(self.max_rows, self.budget // need))
        for old, new in ((k, self.k), (v, self.v)):
            for layer in range(old.shape[0] if used and longest else 0):
                # Old and new rows overlap in memory, hence the copy, one layer at a time.
                new[layer, :used, :longest] = old[layer, :used, :longest].clone()

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of a row into another one."""
        self.k[:, target, :length] = self.k[:, source, :length]
        self.v[:, target, :length] = self.v[:, source, :length]

    def store(self, rows: Tensor) -> _Store:
        """A writer of prefilled keys and values into ``rows [b]`` from position 0 (see causal_attend)."""
        return _Store(self, rows)

    def decode_attend(self, rows: int, positions: Tensor, longest: int) -> Attend:
        """Attention of one new token per row for the first ``rows`` rows.

        positions ``[rows]``: where the new token's key and value go; ``longest``: largest position.
        """
        length = longest + 1
        columns = torch.arange(length, device=self.device)
        hidden = torch.full((), float("-inf"), dtype=self._k.dtype, device=self.device)
        bias = torch.where(columns <= positions[:, None], hidden.new_zeros(()), hidden)[:, None, None]
        slot = torch.arange(rows, device=self.device) * self.stride + positions
        k_flat, v_flat = self._k, self._v
        # [layers, rows, kv_heads, length, hd]
        keys, values = (t[:, :rows, :length].transpose(2, 3) for t in (self.k, self.v))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k_flat[layer].index_copy_(0, slot, k)
            v_flat[layer].index_copy_(0, slot, v)
            # The query heads that share a key head become the rows of one small matrix product.
            shared = q.reshape(rows, k.shape[1], -1, q.shape[2])
            out = F.scaled_dot_product_attention(shared, keys[layer], values[layer], attn_mask=bias)
            return out.reshape(rows, -1)

        return attend

    def _cut(self, stride: int) -> None:
        """Set the geometry: as many rows of ``stride`` tokens as the budget holds, at most max_rows."""
        self.stride, self.rows = stride, min(self.max_rows, self.budget // stride)
        used = self.rows * stride
        self.k = self._k[:, :used].unflatten(1, (self.rows, stride))
        self.v = self._v[:, :used].unflatten(1, (self.rows, stride))


class _Store:
    """Callable handed to causal_attend: ``k, v [b, T, kv_heads, hd]`` go to positions 0..T-1 of the rows."""

    def __init__(self, cache: KVCache, rows: Tensor) -> None:
        self._cache, self._rows = cache, rows

    def __call__(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._cache.k[layer, :, : k.shape[1]].index_copy_(0, self._rows, k)
        self._cache.v[layer, :, : v.shape[1]].index_copy_(0, self._rows, v)
