"""AdamW with clipping and schedule over one rank's parameters; float32 master copies for half-precision models.

Owns the optimizer state and the number of steps taken. Gradients are summed over ranks by the caller between
``absorb`` and ``step``. Half-precision parameters would swallow small updates, so they get float32 masters, which also
collect the gradients of the micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hybridsched.config.schema import OptimConfig
from hybridsched.trainers.schedule import LearningRate


class PolicyOptimizer:
    """Decoupled weight decay on matrices only (norms and biases are left alone).

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
    """

    def __init__(self, model: nn.Module, optim: OptimConfig, grad_clip: float, schedule: LearningRate) -> None:
        self._parameters: list[nn.Parameter] = list(model.parameters())
        self._has_masters = any(p.dtype not in (torch.float32, torch.float64) for p in self._parameters)
        self._trained: list[Tensor] = (
            [p.detach().float().clone() for p in self._parameters] if self._has_masters else list(self._parameters)
        )
        groups = [
            {"params": [p for p in self._trained if p.dim() >= 2], "weight_decay": optim.weight_decay},
            {"params": [p for p in self._trained if p.dim() < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self._adam = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, foreach=True)
        self._grad_clip = grad_clip
        self._schedule = schedule
        self.steps = 0  #: optimizer steps taken

    def zero_grad(self) -> None:
        """Drop all gradients and their memory."""
        for tensor in (*self._parameters, *self._trained):
            tensor.grad = None

    def absorb(self) -> None:
        """After a micro-batch: move half-precision gradients into the masters' float32 ones."""
        if not self._has_masters:
            return
        for parameter, master in zip(self._parameters, self._trained, strict=True):
            if parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        """The gradients the step will use, made zero where this rank had none; in the order of the parameters."""
        out = []
        for tensor in self._trained:
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
            out.append(tensor.grad)
        return out

    def clip(self) -> float:
        """Scale the gradients to the configured global norm; returns the norm before, maybe not finite."""
        gradients = self.gradients()
        norm = torch.nn.utils.get_total_norm(gradients)
        torch.nn.utils.clip_grads_with_norm_(self._trained, self._grad_clip, norm)
        return float(norm)

    def step(self) -> float:
        """Update parameters, drop gradients; returns the learning rate used."""
        rate = self._schedule.at(self.steps)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        if self._has_masters:
            with torch.no_grad():
                for parameter, master in zip(self._parameters, self._trained, strict=True):
                    parameter.copy_(master)
        self.zero_grad()
        self.steps += 1
        return rate

    def state_tensors(self) -> Iterator[Tensor]:
        """Everything but the model's own parameters, for offloading."""
        for state in self._adam.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        if self._has_masters:
            yield from self._trained

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values only, so that it loads with ``weights_only=True``."""
        masters = [master.cpu() for master in self._trained] if self._has_masters else []
        return {"adam": self._adam.state_dict(), "masters": masters, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what state_dict gave; the parameters themselves must have been restored already."""
        self._adam.load_state_dict(state["adam"])
        if self._has_masters:
            with torch.no_grad():
                for master, saved in zip(self._trained, state["masters"], strict=True):
                    master.copy_(saved)
        self.steps = int(state["steps"])
        self.zero_grad()
