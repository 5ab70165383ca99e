"""The torch trainer: data-parallel policy optimisation of a small or middle-sized model in plain torch.

Owns one rank: model, optimizer, reference model, process group. Every rank holds the whole model and the same bits of
it; gradients are summed after the last micro-batch, metrics once per collection.

Does not: shard parameters (the Megatron trainer does), or order the phases of a collection (policy_trainer does).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybridsched.config.schema import RunConfig
from hybridsched.errors import FaultError, HybridschedError, InternalError
from hybridsched.model import TensorSpec
from hybridsched.models import hf_folder
from hybridsched.models.qwen3 import CausalLM
from hybridsched.trainers import torch_checkpoint
from hybridsched.trainers.base import TrainerGroup
from hybridsched.trainers.losses import MiniBatchSize
from hybridsched.trainers.optimizer import PolicyOptimizer
from hybridsched.trainers.policy_trainer import LogProbs, PolicyTrainer, Row
from hybridsched.trainers.policy_update import accumulate_gradients, compute_logprobs, find_culprits
from hybridsched.trainers.train_metrics import BatchTally
from hybridsched.trainers.trainer_group import Collectives
from hybridsched.trainers.trajectories import Trajectory
from hybridsched.trainers.version_history import VersionHistory


class TorchTrainer(PolicyTrainer):
    """See the module and `PolicyTrainer`."""

    name = "torch"

    def __init__(
        self, config: RunConfig, *, device: str = "cpu", scratch: Path, log: Callable[[str], None] = print
    ) -> None:
        super().__init__(config, device=device, scratch=scratch, log=log)
        self._reference: CausalLM | None = None
        self._model: CausalLM
        self._optimizer: PolicyOptimizer

    def start(self, group: TrainerGroup) -> None:
        actor = self._config.actor_rollout_ref.actor
        self._join(group, Collectives(group, self._device))
        self._model = hf_folder.load_hf(self._model_folder, actor.dtype, self._device)
        self._optimizer = PolicyOptimizer(self._model, actor.optim, actor.grad_clip, self._schedule)
        if actor.use_kl_loss:
            self._reference = hf_folder.load_hf(self._model_folder, actor.dtype, self._device).requires_grad_(False)
        self._started = True
        self._check_equal_weights()

    # -- training -----------------------------------------------------------------------------------------------------

    @property
    def _steps(self) -> int:
        return self._optimizer.steps

    @property
    def _has_reference(self) -> bool:
        return self._reference is not None

    def _policy_parameters(self) -> Iterable[Tensor]:
        parameters: Iterable[Tensor] = self._model.parameters()
        return parameters

    def _logprobs(self, rows: Sequence[Row], temperature: float, *, reference: bool = False) -> LogProbs:
        model = self._model
        if reference:
            assert self._reference is not None
            model = self._reference
        return compute_logprobs(model, rows, temperature, self._settings.max_tokens, self._tick)

    def _optimizer_step(
        self, mini: list[Trajectory], size: MiniBatchSize, observer: BatchTally | None
    ) -> tuple[npt.NDArray[np.float64], float, float]:
        """(this rank's sums, gradient norm before clipping, learning rate). Changes nothing when it raises."""

        def after_micro_batch() -> None:
            self._optimizer.absorb()
            self._tick()

        done = accumulate_gradients(self._model, mini, size, self._settings, after_micro_batch)
        if observer is not None:
            self._observe(mini, done.logprobs, observer)
        loss = torch.tensor([done.sums[0]], dtype=torch.float32, device=self._device)
        self._group.sum_tensors([*self._optimizer.gradients(), loss])
        norm = self._optimizer.clip()
        if not (math.isfinite(norm) and math.isfinite(float(loss))):
            self._refuse_step(mini, size, float(loss), norm)
        rate = self._optimizer.step()
        self._tick()
        return done.sums, norm, rate

    def _refuse_step(self, mini: list[Trajectory], size: MiniBatchSize, loss: float, norm: float) -> None:
        """Name the samples behind a loss or gradient that is not finite, and raise on every rank."""
        self._optimizer.zero_grad()
        culprits = find_culprits(self._model, mini, size, self._settings, self._tick)
        self._refuse(mini, culprits, loss, norm)

    # -- memory -------------------------------------------------------------------------------------------------------

    def offload(self, *, keep_parameters: bool) -> int:
        if not self._started:
            raise InternalError("offload: the trainer is not started")
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        freed = sum(int(g.numel() * g.element_size()) for g in gradients)
        self._optimizer.zero_grad()
        del gradients
        tensors = [*self._optimizer.state_tensors()]
        if self._reference is not None:
            tensors += self._reference.parameters()
        if self._snapshot is not None:  # host memory; on CPU that is the device
            tensors += self._snapshot.tensors
        if not keep_parameters:
            tensors += self._model.parameters()
        freed += self._parking.park(tensors)
        self._tick()
        return freed

    # -- weights ------------------------------------------------------------------------------------------------------

    def weight_specs(self) -> list[TensorSpec]:
        return hf_folder.weight_specs(self._model)

    def iter_weights(self) -> Iterator[tuple[str, Any]]:
        if any(self._parking.is_parked(p) for p in self._model.parameters()):
            raise InternalError("iter_weights: the trainer's parameters are offloaded; onload it first")
        return hf_folder.named_weights(self._model)

    def _check_equal_weights(self) -> None:
        """All ranks must hold the same model: compare a checksum."""
        if self._group.world_size == 1:
            return
        with torch.no_grad():
            digest = sum(float(p.double().sum()) * (i + 1) for i, p in enumerate(self._model.parameters()))
        high, low = self._group.max_array(np.array([digest, -digest]))
        if high != -low:
            raise FaultError(
                f"trainer ranks hold different weights (checksums from {-low!r} to {high!r}); "
                f"is {self._model_folder} the same on every trainer node?"
            )

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(self, folder: Path) -> None:
        self._require_resident("save_checkpoint")
        problem: HybridschedError | None = None
        try:
            if self._group.rank == 0:
                state = {**self._optimizer.state_dict(), "versions": self._history.entries()}
                torch_checkpoint.write_shared(folder, self._model, state, self._model_folder)
            torch_checkpoint.write_rng(folder, self._group.rank, self._device)
        except HybridschedError as error:
            problem = error
        self._fail_together(problem)
        self._tick()

    def load_checkpoint(self, folder: Path) -> None:
        self._require_resident("load_checkpoint")
        problem: HybridschedError | None = None
        try:
            state = torch_checkpoint.read_shared(folder, self._model)
            self._optimizer.load_state_dict(state)
            self._history = VersionHistory([tuple(entry) for entry in state["versions"]])
            torch_checkpoint.read_rng(folder, self._group.rank, self._device, self._log)
        except HybridschedError as error:
            problem = error
        self._fail_together(problem)
        self._take_snapshot()  # checkpoints are written right after a sync: these are the weights the cycle starts with
        self._check_equal_weights()
        self._tick()
