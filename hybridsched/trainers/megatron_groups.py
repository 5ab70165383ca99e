"""Megatron's parallel groups around the collectives of a trainer: who holds what, who gets which samples.

Owns the process group and Megatron's global parallel state of this process (one trainer at a time). Every group has the
trainer group's timeout, so that no collective of any of them waits longer.

Invariants: sums go over the ranks with different samples (data parallel), so ranks that share samples get equal results
by themselves; maxima, barriers and agreements go over all ranks. Rank r of the world gets the samples of data-parallel
rank ``config.derived.data_parallel_rank(config, r)``: `join` checks that Megatron agrees.
"""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from hybridsched.config.derived import data_parallel_rank
from hybridsched.config.schema import RunConfig
from hybridsched.errors import InternalError
from hybridsched.trainers.base import TrainerGroup
from hybridsched.trainers.trainer_group import Collectives, Rendezvous, gloo_interface


class MegatronGroups(Collectives):
    """The ranks of a Megatron trainer. Sizes are those of the configuration; sizes of 1 cost no communication."""

    def __init__(self, group: TrainerGroup, device: torch.device, config: RunConfig) -> None:
        super().__init__(group, device)
        self._config = config
        self.sizes = config.actor_rollout_ref.actor.megatron
        self.tp, self.pp = self.sizes.tensor_model_parallel_size, self.sizes.pipeline_model_parallel_size
        self.cp = self.sizes.context_parallel_size
        self.ep = self.sizes.expert_model_parallel_size
        self.etp = self.sizes.expert_tensor_parallel_size or self.tp
        self.dp = group.world_size // (self.tp * self.pp * self.cp)

    @property
    def gathers(self) -> bool:
        """Whether no rank holds the whole model, so that handing out weights is collective."""
        return max(self.tp, self.pp, self.ep, self.etp) > 1

    def join(self, group: TrainerGroup, rendezvous: Rendezvous | None, interface: str | None) -> None:
        """Meet the other ranks and make Megatron's groups; Megatron wants a process group even for one rank."""
        if dist.is_initialized():
            raise InternalError("this process is already in a trainer group; shut that trainer down first")
        if self.world_size == 1:
            dist.init_process_group(
                self.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=group.timeout_s)
            )
            self._joined = True
        else:
            super().join(group, rendezvous, interface)
        from megatron.core import parallel_state

        with self._explained("making the model-parallel groups"), gloo_interface(interface):
            parallel_state.initialize_model_parallel(
                self.tp,
                self.pp,
                context_parallel_size=self.cp,
                expert_model_parallel_size=self.ep,
                expert_tensor_parallel_size=self.etp,
                distributed_timeout_minutes=group.timeout_s / 60.0,
            )
        self.data_rank = parallel_state.get_data_parallel_rank()
        if self.data_rank != data_parallel_rank(self._config, self.rank):
            raise InternalError(
                f"rank {self.rank} is data-parallel rank {self.data_rank} to Megatron, but gets the samples of "
                f"{data_parallel_rank(self._config, self.rank)}"
            )
        self.tp_rank = parallel_state.get_tensor_model_parallel_rank()
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        self.ep_rank = parallel_state.get_expert_model_parallel_rank()
        self.etp_rank = parallel_state.get_expert_tensor_parallel_rank()
        self.cp_rank = parallel_state.get_context_parallel_rank()
        self.cp_group = parallel_state.get_context_parallel_group() if self.cp > 1 else None
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.pp_group = parallel_state.get_pipeline_model_parallel_group()
        self.ep_group = parallel_state.get_expert_model_parallel_group()
        self.etp_group = parallel_state.get_expert_tensor_parallel_group()
        self._data_group = parallel_state.get_data_parallel_group()

    @property
    def first_stage(self) -> bool:
        """Whether this rank embeds tokens."""
        return bool(self.stage == 0)

    @property
    def last_stage(self) -> bool:
        """Whether this rank computes logits and losses."""
        return bool(self.stage == self.pp - 1)

    def leave(self) -> None:
        if self._joined:
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
        super().leave()

    def sum_array(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Element-wise sum over ranks with different samples."""
        if self.dp == 1:
            return values
        return self._reduced(values, lambda tensor: dist.all_reduce(tensor, group=self._data_group))

    def data_extremes(self, value: float) -> tuple[float, float]:
        """The smallest and largest of a value among the ranks that hold the same pieces with different samples."""
        if self.dp == 1:
            return value, value
        both = np.array([value, -value])
        high, low = self._reduced(
            both, lambda tensor: dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._data_group)
        )
        return float(-low), float(high)

    # -- inside the model ---------------------------------------------------------------------------------------------

    def from_last_stage(self, values: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
        """What the last pipeline stage has, on every stage. Shapes and dtypes are equal on all of them."""
        if self.pp == 1:
            return values
        with self._explained("handing results back along the pipeline"):
            tensor = torch.from_numpy(np.ascontiguousarray(values)).to(self._device)
            dist.broadcast(tensor, group=self.pp_group, group_src=self.pp - 1)
            result: npt.NDArray[np.floating] = tensor.cpu().numpy()
            return result

    def same_micro_batches(self, count: int) -> int:
        """How many micro-batches to run: data-parallel ranks that share experts have to run equally many."""
        if self.ep == 1:
            return count
        return int(self.max_array(np.array([float(count)]))[0])

    def gather_pieces(self, piece: Tensor, *, expert: bool) -> list[Tensor]:
        """The tensor-parallel pieces of one parameter, in rank order, on every rank of that group."""
        group, size = (self.etp_group, self.etp) if expert else (self.tp_group, self.tp)
        if size == 1:
            return [piece]
        pieces = [torch.empty_like(piece) for _ in range(size)]
        with self._explained("gathering weights"):
            dist.all_gather(pieces, piece, group=group)
        return pieces

    def share_expert(self, tensor: Tensor, owner: int) -> None:
        """From expert-parallel rank ``owner`` to all of its group, in place."""
        if self.ep > 1:
            with self._explained("gathering experts"):
                dist.broadcast(tensor, group=self.ep_group, group_src=owner)

    def share_stage(self, tensor: Tensor, owner: int) -> None:
        """From pipeline stage ``owner`` to all stages, in place."""
        if self.pp > 1:
            with self._explained("gathering weights of pipeline stages"):
                dist.broadcast(tensor, group=self.pp_group, group_src=owner)
