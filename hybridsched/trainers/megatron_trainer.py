"""The Megatron Core trainer: policy optimisation of models that need tensor, pipeline, expert or data parallelism.

Owns one rank: its piece of the model, Megatron's optimizer, the frozen reference, the parallel groups. What is done
with a collection, and the losses, are the torch trainer's (policy_trainer, policy_update): on the same batch both take
the same step, whatever the sizes.

Invariants: a rank reads and holds only its piece; `iter_weights` and `logprobs` are collective where the model is
sharded; gradients are dropped, everything else comes back bit for bit after an offload.

Does not: patch Megatron (megatron_cpu does, only where there is no CUDA), or support interleaved pipelines.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybridsched.config.schema import RunConfig
from hybridsched.errors import ConfigError, FaultError, HybridschedError, InternalError
from hybridsched.model import TensorSpec
from hybridsched.models import hf_folder
from hybridsched.trainers import megatron_checkpoint, megatron_cpu
from hybridsched.trainers.base import TrainerGroup
from hybridsched.trainers.losses import MiniBatchSize
from hybridsched.trainers.megatron_bridge import BridgeWeights
from hybridsched.trainers.megatron_groups import MegatronGroups
from hybridsched.trainers.megatron_memory import DroppedBuffers, whole_storages
from hybridsched.trainers.megatron_model import PolicyModel, require_sizes
from hybridsched.trainers.megatron_optimizer import MegatronOptimizer
from hybridsched.trainers.megatron_pass import MegatronPass, culprits
from hybridsched.trainers.megatron_weights import WeightMap
from hybridsched.trainers.policy_trainer import LogProbs, PolicyTrainer, Row
from hybridsched.trainers.train_metrics import BatchTally
from hybridsched.trainers.trajectories import Trajectory
from hybridsched.trainers.version_history import VersionHistory


class MegatronTrainer(PolicyTrainer):
    """See the module and `PolicyTrainer`. Sizes come from `actor_rollout_ref.actor.megatron`."""

    name = "megatron"

    def __init__(
        self, config: RunConfig, *, device: str = "cpu", scratch: Path, log: Callable[[str], None] = print
    ) -> None:
        super().__init__(config, device=device, scratch=scratch, log=log)
        _require_megatron(self._device.type)
        self._groups: MegatronGroups
        self._policy: PolicyModel
        self._weights: WeightMap | BridgeWeights
        self._optimizer: MegatronOptimizer
        self._pass: MegatronPass
        self._reference: PolicyModel | None = None
        self._dropped = DroppedBuffers()
        self._parameters_away = False

    def start(self, group: TrainerGroup) -> None:
        actor = self._config.actor_rollout_ref.actor
        model = hf_folder.load_config(self._model_folder)
        require_sizes(model, actor.megatron)
        self._groups = MegatronGroups(group, self._device, self._config)
        self._join(group, self._groups)
        self._seed()
        self._policy = PolicyModel(model, self._groups, actor.dtype, self._device)
        self._weights = self._weights_of(self._policy)
        self._load_weights(self._weights)
        self._check_equal_weights()
        self._optimizer = MegatronOptimizer(self._policy, actor, self._schedule)
        self._pass = MegatronPass(self._groups, self._device, self._tick)
        if actor.use_kl_loss:
            self._reference = PolicyModel(model, self._groups, actor.dtype, self._device)
            self._reference.gpt.requires_grad_(False)
            self._load_weights(self._weights_of(self._reference))
        self._started = True

    def _seed(self) -> None:
        """Random states differ between tensor- and expert-parallel ranks, and agree between data-parallel ones."""
        groups, seed = self._groups, self._config.trainer.seed * 1_000_003
        megatron_cpu.finish(seed + 2718 + groups.tp_rank, seed + 1024 + 100 * groups.ep_rank + groups.etp_rank)
        if self._device.type == "cuda":
            from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

            model_parallel_cuda_manual_seed(seed)

    def _weights_of(self, model: PolicyModel) -> WeightMap | BridgeWeights:
        """The configured converter between Hugging Face and this rank's piece."""
        if self._config.actor_rollout_ref.actor.megatron.weight_source == "megatron-bridge":
            return BridgeWeights(model.gpt, model.config, self._model_folder)
        return WeightMap(model.gpt, model.config, self._groups)

    def _load_weights(self, weights: WeightMap | BridgeWeights) -> None:
        problem: HybridschedError | None = None
        try:
            weights.load(self._model_folder)
        except HybridschedError as error:
            problem = error
        self._fail_together(problem)

    def _check_equal_weights(self) -> None:
        """Data-parallel ranks must hold the same weights: compare a checksum of what is not shared out to experts."""
        with torch.no_grad():
            shared = [p for p in self._policy_parameters() if getattr(p, "allreduce", True)]
            digest = sum(float(p.double().sum()) * (i + 1) for i, p in enumerate(shared))
        low, high = self._groups.data_extremes(digest)
        if low != high:
            raise FaultError(
                f"trainer ranks hold different weights (checksums from {low!r} to {high!r}); "
                f"is {self._model_folder} the same on every trainer node?"
            )

    # -- training -----------------------------------------------------------------------------------------------------

    @property
    def _steps(self) -> int:
        return self._optimizer.steps

    @property
    def _has_reference(self) -> bool:
        return self._reference is not None

    def _policy_parameters(self) -> Iterable[Tensor]:
        parameters: Iterable[Tensor] = self._policy.gpt.parameters()
        return parameters

    def _logprobs(self, rows: Sequence[Row], temperature: float, *, reference: bool = False) -> LogProbs:
        model = self._policy
        if reference:
            assert self._reference is not None
            model = self._reference
        return self._pass.logprobs(model, rows, temperature, self._settings.max_tokens)

    def _optimizer_step(
        self, mini: list[Trajectory], size: MiniBatchSize, observer: BatchTally | None
    ) -> tuple[npt.NDArray[np.float64], float, float]:
        self._optimizer.zero_grad()
        done = self._pass.accumulate_gradients(self._policy, mini, size, self._settings)
        if observer is not None:
            self._observe(mini, done.logprobs, observer)
        loss = float(self._groups.sum_array(done.sums[:1].copy())[0])
        norm = self._optimizer.norm()
        if not (math.isfinite(norm) and math.isfinite(loss)):
            self._optimizer.zero_grad()
            self._refuse(mini, culprits(mini, done.logprobs), loss, norm)
        rate = self._optimizer.step()
        self._tick()
        return done.sums, norm, rate

    # -- memory -------------------------------------------------------------------------------------------------------

    def offload(self, *, keep_parameters: bool) -> int:
        if not self._started:
            raise InternalError("offload: the trainer is not started")
        parameters: set[int] = set()
        model = whole_storages(self._policy_parameters(), parameters)
        freed = self._dropped.drop(whole_storages(self._optimizer.gradient_tensors(), set(parameters)))
        frozen: list[Tensor] = [] if self._reference is None else list(self._reference.gpt.parameters())
        snapshot = [] if self._snapshot is None else self._snapshot.tensors  # host memory; on CPU that is the device
        state = whole_storages([*self._optimizer.state_tensors(), *frozen, *snapshot], parameters)
        freed += self._parking.park(state if keep_parameters else [*state, *model])
        self._parameters_away = not keep_parameters
        self._tick()
        return freed

    def onload(self) -> None:
        super().onload()
        self._dropped.restore()
        self._parameters_away = False

    # -- weights ------------------------------------------------------------------------------------------------------

    def weight_specs(self) -> list[TensorSpec]:
        return self._weights.specs()

    def iter_weights(self) -> Iterator[tuple[str, Any]]:
        if self._parameters_away:
            raise InternalError("iter_weights: the trainer's parameters are offloaded; onload it first")
        return self._weights.gather(self._tick)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(self, folder: Path) -> None:
        self._require_resident("save_checkpoint")
        rank = self._groups.rank
        megatron_checkpoint.save_shards(folder, self._optimizer, rank, self._fail_together)
        problem: HybridschedError | None = None
        try:
            megatron_checkpoint.save_model(folder, self._weights, rank, self._model_folder)
            megatron_checkpoint.save_random_states(folder, rank, self._device)
            if rank == 0:
                sizes = self._config.actor_rollout_ref.actor.megatron.model_dump()
                state = {"steps": self._steps, "versions": self._history.entries(), "sizes": sizes}
                megatron_checkpoint.save_state(folder, state)
        except HybridschedError as error:
            problem = error
        self._fail_together(problem)
        self._tick()

    def load_checkpoint(self, folder: Path) -> None:
        self._require_resident("load_checkpoint")
        problem: HybridschedError | None = None
        state: dict[str, Any] = {}
        try:
            state = megatron_checkpoint.load_state(folder, self._groups.sizes)
        except HybridschedError as error:
            problem = error
        self._fail_together(problem)
        megatron_checkpoint.load_shards(folder, self._optimizer, int(state["steps"]))
        self._history = VersionHistory([tuple(entry) for entry in state["versions"]])
        try:
            megatron_checkpoint.load_random_states(folder, self._groups.rank, self._device, self._log)
        except HybridschedError as error:
            problem = error
        self._fail_together(problem)
        self._take_snapshot()  # checkpoints are written right after a sync: these are the weights the cycle starts with
        self._tick()


def _require_megatron(device: str) -> None:
    """Import Megatron Core, with its stand-ins for CUDA where there is none.

    Raises ConfigError when it is missing, and for CPU on a machine with a GPU: Megatron would use that.
    """
    if device == "cpu" and torch.cuda.is_available():
        raise ConfigError(
            "trainer.device: cpu with strategy megatron works only where no GPU is visible; set trainer.device: cuda, "
            "or start with CUDA_VISIBLE_DEVICES= (empty)"
        )
    try:
        if importlib.util.find_spec("megatron") is not None:
            megatron_cpu.prepare()  # before the import, and only where there is something to import
        import megatron.core  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"actor_rollout_ref.actor.strategy is megatron, but Megatron Core cannot be imported ({error}); "
            "install it with pip install 'hybridsched[megatron]', or use strategy: torch"
        ) from error
