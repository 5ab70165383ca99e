"""Megatron's optimizer around a policy model: data-parallel gradients, optional sharded state, clipping, schedule.

Owns the data-parallel wrapper (gradient buffers in float32), the optimizer state, and the number of steps taken.
Gradients are sums over ranks with the mini-batch's own normaliser; nothing here divides them. Half-precision models get
float32 masters from Megatron.

Does not: compute gradients (megatron_pass), or know where state is parked while the GPU is lent (megatron_memory).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hybridsched.config.schema import ActorConfig
from hybridsched.trainers.megatron_model import PolicyModel
from hybridsched.trainers.schedule import LearningRate

#: How the distributed optimizer lays its state out in checkpoints, so that it loads under other sizes.
SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}


class MegatronOptimizer:
    """AdamW with decoupled weight decay on matrices only, as `PolicyOptimizer` of the torch trainer."""

    def __init__(self, model: PolicyModel, actor: ActorConfig, schedule: LearningRate) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        sharded = actor.megatron.use_distributed_optimizer
        wrapping = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=sharded, overlap_grad_reduce=False
        )
        self._ddp = DistributedDataParallel(model.megatron_config, wrapping, model.gpt)
        model.chunk = self._ddp
        model.megatron_config.finalize_model_grads_func = _sum_gradients
        self._model = model
        self._actor = actor
        self._schedule = schedule
        dtype = model.megatron_config.params_dtype
        options = OptimizerConfig(
            optimizer="adam",
            lr=actor.optim.lr,
            weight_decay=actor.optim.weight_decay,
            adam_beta1=actor.optim.betas[0],
            adam_beta2=actor.optim.betas[1],
            clip_grad=actor.grad_clip,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            use_distributed_optimizer=sharded,
        )
        self._count_padding_between_buckets()
        self._optimizer = get_megatron_optimizer(options, [self._ddp])
        self._make_state()
        self.steps = 0  #: optimizer steps taken

    def _count_padding_between_buckets(self) -> None:
        """Have checkpoints hold every parameter's own state also where a buffer has more than one bucket.

        Megatron (0.16) reads a parameter's state at its place in the padded buffer from a copy without the padding
        between buckets: with a tied embedding, which gets a bucket of its own, state of the parameters behind it would
        be shifted and its end zero. Padding that counts as content keeps both in step; at the very end it is left out.
        """
        for buffer in (*self._ddp.buffers, *self._ddp.expert_parallel_buffers):
            for bucket in buffer.buckets[:-1]:
                bucket.numel_unpadded = bucket.grad_data.numel()
            buffer.numel_unpadded = sum(bucket.numel_unpadded for bucket in buffer.buckets)

    def _make_state(self) -> None:
        """Moments exist from the start: checkpoint 0 has them too, and memory does not grow at the first step."""
        for wrapper in self._wrappers():
            wrapper.init_state_fn(wrapper.optimizer, wrapper.config)

    def zero_grad(self) -> None:
        """Before a mini-batch: empty buffers."""
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()

    def norm(self) -> float:
        """Norm of the whole model's gradient, maybe not finite; equal on every rank. Collective."""
        self._optimizer.prepare_grads()
        return float(self._optimizer.get_grad_norm())

    def step(self) -> float:
        """Clip, update parameters; returns the learning rate used. Collective with sharded state."""
        rate = self._schedule.at(self.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)
            group["weight_decay"] = self._actor.optim.weight_decay * group.get("wd_mult", 1.0)
        self._optimizer.step()
        self.steps += 1
        return rate

    # -- memory -------------------------------------------------------------------------------------------------------

    def gradient_tensors(self) -> Iterator[Tensor]:
        """The gradient buffers: their contents are needed only between a backward pass and the step."""
        for buffer in (*self._ddp.buffers, *self._ddp.expert_parallel_buffers):
            yield buffer.grad_data

    def state_tensors(self) -> Iterator[Tensor]:
        """Moments and masters; masters may be views of the model's own parameters."""
        for part in (wrapper.optimizer for wrapper in self._wrappers()):
            for state in part.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))
            for group in part.param_groups:
                yield from group["params"]

    def _wrappers(self) -> Iterator[Any]:
        """Megatron's optimizers with one of torch inside: one for dense parameters, one for experts."""
        for wrapper in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
            if wrapper.optimizer is not None and not getattr(wrapper, "is_stub_optimizer", False):
                yield wrapper

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def sharded_state(self, *, loading: bool) -> dict[str, Any]:
        """Model and optimizer as Megatron's distributed checkpoint wants them described. Collective."""
        model = self._model.gpt.sharded_state_dict()
        return {
            "model": model,
            "optimizer": self._optimizer.sharded_state_dict(model, is_loading=loading, metadata=SHARDING),
        }

    def load_sharded_state(self, state: dict[str, Any], steps: int) -> None:
        """Put back what a checkpoint described by `sharded_state` held."""
        self._model.gpt.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.steps = steps
        self.zero_grad()


def _sum_gradients(model: list[Any], num_tokens: Tensor | None = None, **options: Any) -> None:
    """Megatron's last act of a backward pass, without its division by a number of tokens."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(model, None, **options)
