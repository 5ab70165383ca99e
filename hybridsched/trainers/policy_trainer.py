"""What every real trainer does with a collection, in order; how gradients come about is the subclass's.

Owns one rank's way from samples to metrics: advantages, off-policy correction, normalisers, optimizer steps, version
history, proximal snapshot and the parking lot of an offloaded trainer. Formulas live in advantages, losses and
correction; this module only puts them in order.

Invariants: the gradient of a mini-batch does not depend on how it is cut into micro-batches or spread over ranks;
ranks that get the same samples (`runtime/collector.py` hands them out) take the same decisions; a failing rank takes
its peers along with the same message instead of leaving them waiting; while offloaded only ``onload`` is allowed.

Does not: hold a model (torch_trainer, megatron_trainer), know of the queue, versions' meaning, or when to train.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybridsched.config.schema import RunConfig
from hybridsched.errors import ConfigError, FaultError, HybridschedError, InternalError
from hybridsched.model import TokenArray, WeightVersion
from hybridsched.trainers.base import TrainBatch, Trainer, TrainerGroup, TrainResult
from hybridsched.trainers.correction import correct, needs_prox
from hybridsched.trainers.losses import MiniBatchSize
from hybridsched.trainers.memory import ParkingLot, WeightSnapshot
from hybridsched.trainers.policy_update import LossSettings
from hybridsched.trainers.schedule import build_schedule
from hybridsched.trainers.train_metrics import BatchTally, Stopwatch, actor_metrics
from hybridsched.trainers.trainer_group import Collectives, Rendezvous, reachable_host
from hybridsched.trainers.trajectories import Trajectory, build_trajectories, sample_problem
from hybridsched.trainers.version_history import VersionHistory

#: Padded tokens of a micro-batch on CPU: beyond this activations leave the caches and long rows pad short ones.
CPU_MICRO_BATCH_TOKENS = 4096
NAMED_CULPRITS = 8

Row = tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]  #: tokens [P + T], indices of actions [A]
LogProbs = list[npt.NDArray[np.float32]]


class PolicyTrainer(Trainer):
    """See the module. ``device``: "cpu" or a CUDA device; ``scratch``: folder for offloaded tensors on CPU."""

    def __init__(
        self, config: RunConfig, *, device: str = "cpu", scratch: Path, log: Callable[[str], None] = print
    ) -> None:
        path = config.actor_rollout_ref.model.path
        if path is None:
            raise ConfigError(
                f"actor_rollout_ref.model.path is null; the {self.name} trainer needs a Hugging Face folder"
            )
        self._config = config
        self._model_folder = Path(path)
        self._device = torch.device("cuda", 0) if device == "cuda" else torch.device(device)
        self._log = log
        self._parking = ParkingLot(self._device, scratch)
        self._schedule = build_schedule(config)
        self._settings = LossSettings.of(config)
        if self._device.type == "cpu":
            capped = min(self._settings.max_tokens, CPU_MICRO_BATCH_TOKENS)
            self._settings = replace(self._settings, max_tokens=capped)
        self._correction = config.algorithm.rollout_correction
        self._rendezvous: Rendezvous | None = None
        self._started = False
        self._progress = 0
        self._history = VersionHistory()
        self._snapshot: WeightSnapshot | None = None
        self._steps_at_snapshot = 0
        self._group: Collectives

    # -- what a subclass gives ----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def _steps(self) -> int:
        """Optimizer steps taken."""

    @property
    @abstractmethod
    def _has_reference(self) -> bool:
        """Whether there is a frozen reference model."""

    @abstractmethod
    def _policy_parameters(self) -> Iterable[Tensor]:
        """This rank's parameters of the trained model."""

    @abstractmethod
    def _logprobs(self, rows: Sequence[Row], temperature: float, *, reference: bool = False) -> LogProbs:
        """Teacher-forced log-probs, float32 [A] per row, of the policy or the reference. Collective if sharded."""

    @abstractmethod
    def _optimizer_step(
        self, mini: list[Trajectory], size: MiniBatchSize, observer: BatchTally | None
    ) -> tuple[npt.NDArray[np.float64], float, float]:
        """(this rank's sums, gradient norm before clipping, learning rate). Changes nothing when it raises."""

    # -- life ---------------------------------------------------------------------------------------------------------

    def open_rendezvous(self) -> str:
        host = reachable_host(self._config.trainer.nnodes)
        self._rendezvous = Rendezvous(host, self._config.deadlines.start_s * self._config.deadlines.scale)
        address: str = self._rendezvous.address
        return address

    def shutdown(self) -> None:
        self._started = False
        if hasattr(self, "_group"):
            self._group.leave()
        self._rendezvous = None

    @property
    def progress(self) -> int:
        return self._progress

    def _join(self, group: TrainerGroup, collectives: Collectives) -> None:
        """Meet the other ranks and seed this one."""
        if self._started:
            raise InternalError("this trainer is already started")
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        interface = self._config.weight_sync.interface
        if interface is None and self._config.trainer.nnodes == 1:
            interface = "lo"
        self._group = collectives
        self._group.join(group, self._rendezvous if group.rank == 0 else None, interface)
        torch.manual_seed(self._config.trainer.seed * 1_000_003 + group.rank)

    def _tick(self) -> None:
        self._progress += 1

    def _require_resident(self, what: str) -> None:
        if not self._started:
            raise InternalError(f"{what}: the trainer is not started")
        if self._parking.holds:
            raise InternalError(f"{what}: the trainer is offloaded; onload it first")

    def onload(self) -> None:
        self._parking.restore()
        self._tick()

    def logprobs(self, sequences: Sequence[tuple[TokenArray, TokenArray]], temperature: float) -> list[Any]:
        self._require_resident("logprobs")
        if temperature <= 0:
            raise InternalError(f"logprobs: temperature {temperature} has no distribution; it must be positive")
        rows = []
        for prompt, response in sequences:
            actions = np.arange(prompt.shape[0], prompt.shape[0] + response.shape[0], dtype=np.int64)
            rows.append((np.concatenate([prompt, response]).astype(np.int32, copy=False), actions))
        return list(self._logprobs(rows, temperature))

    # -- training -----------------------------------------------------------------------------------------------------

    def begin_cycle(self, version: WeightVersion) -> None:
        self._require_resident("begin_cycle")
        self._history.begin(version, self._steps)
        self._take_snapshot()

    def train(self, batch: TrainBatch) -> TrainResult:
        self._require_resident("train")
        self._check_batch(batch)
        watch, tally = Stopwatch(), BatchTally()
        with watch.measure("adv"):
            minis = [self._trajectories(index, batch, tally) for index in range(len(batch.mini_batches))]
        if needs_prox(self._correction):
            with watch.measure("old_log_prob"):
                minis = self._corrected(minis, tally)
        sizes = self._sizes(minis)
        if self._has_reference:
            with watch.measure("ref"):
                minis = [self._with_reference(mini) for mini in minis]
        sums, norms, rates = [], [], []
        with watch.measure("update_actor"):
            for epoch in range(self._config.actor_rollout_ref.actor.ppo_epochs):
                observer = tally if epoch == 0 and not needs_prox(self._correction) else None
                for mini, size in zip(minis, sizes, strict=True):
                    if size.actions == 0:  # every action was rejected: nothing to learn from, no step
                        continue
                    step_sums, norm, rate = self._optimizer_step(mini, size, observer)
                    sums.append(step_sums)
                    norms.append(norm)
                    rates.append(rate)
            totals = self._group.sum_array(np.stack(sums)) if sums else np.zeros((0, 0))
        metrics, timing, n_tokens, lag_kl = tally.reduce(watch, self._group.sum_array, self._group.max_array)
        metrics |= actor_metrics(list(totals), norms, rates, with_kl=self._has_reference)
        metrics["optimizer_steps"] = float(self._steps)
        return TrainResult(metrics, timing, n_tokens, lag_kl)

    def _check_batch(self, batch: TrainBatch) -> None:
        """The same number of optimizer steps on every rank, and nothing that cannot be trained on; else all raise."""
        problems = [sample_problem(sample) for mini in batch.mini_batches for sample in mini]
        self._group.agree(next((problem for problem in problems if problem), None))
        count = float(len(batch.mini_batches))
        most, fewest = self._group.max_array(np.array([count, -count]))
        if most != -fewest:
            raise InternalError(f"trainer ranks got between {-fewest:g} and {most:g} mini-batches; all need the same")

    def _trajectories(self, index: int, batch: TrainBatch, tally: BatchTally) -> list[Trajectory]:
        """Advantages of one mini-batch. Step lags are as of its first optimizer step."""
        samples = batch.mini_batches[index]
        steps = self._steps + index

        def lags(version: WeightVersion) -> tuple[int, int]:
            return self._history.lags(version, batch.version, steps)

        trajectories = build_trajectories(samples, self._config.algorithm, lags, self._group.sum_array)
        tally.add_samples(samples)
        tally.add_trajectories(trajectories)
        self._tick()
        return trajectories

    def _corrected(self, minis: list[list[Trajectory]], tally: BatchTally) -> list[list[Trajectory]]:
        """Importance weights and rejection from the proximal weights (bypass: the current ones)."""
        snapshot = None if self._correction.bypass_mode else self._snapshot
        if snapshot is not None and self._steps_at_snapshot != self._steps:
            with snapshot.in_place():
                prox = [self._logprobs_of(mini) for mini in minis]
        else:
            prox = [self._logprobs_of(mini) for mini in minis]
        return [self._correct_one(mini, old, tally) for mini, old in zip(minis, prox, strict=True)]

    def _correct_one(
        self, mini: list[Trajectory], prox: list[npt.NDArray[np.float32]], tally: BatchTally
    ) -> list[Trajectory]:
        out = []
        for trajectory, logp in zip(mini, prox, strict=True):
            result = correct(logp, trajectory.rollout_logprobs, self._correction)
            tally.gap.add(logp, trajectory.rollout_logprobs, trajectory.version_lags)
            tally.add_correction(trajectory.n_actions, int((~result.keep).sum()), result.truncated)
            if not self._correction.bypass_mode:
                trajectory = replace(trajectory, old_logprobs=logp, is_weights=result.weights)
            out.append(trajectory if result.keep.all() else trajectory.keeping(result.keep))
        return out

    def _sizes(self, minis: list[list[Trajectory]]) -> list[MiniBatchSize]:
        """Actions and responses of each mini-batch over all ranks: the normalisers."""
        local = [[sum(t.n_actions for t in mini), sum(t.n_actions > 0 for t in mini)] for mini in minis]
        total = self._group.sum_array(np.array(local, dtype=np.float64).reshape(-1, 2))
        return [MiniBatchSize(int(actions), int(sequences)) for actions, sequences in total]

    def _with_reference(self, mini: list[Trajectory]) -> list[Trajectory]:
        logprobs = self._logprobs_of(mini, reference=True)
        return [replace(t, ref_logprobs=logp) for t, logp in zip(mini, logprobs, strict=True)]

    def _logprobs_of(self, mini: Sequence[Trajectory], *, reference: bool = False) -> LogProbs:
        rows = [(t.tokens, t.actions) for t in mini]
        return self._logprobs(rows, self._settings.temperature, reference=reference)

    def _observe(
        self, mini: list[Trajectory], logprobs: Sequence[npt.NDArray[np.floating]], observer: BatchTally
    ) -> None:
        """The gap between sampler and trainer, as the first pass over a mini-batch sees it."""
        for trajectory, logp in zip(mini, logprobs, strict=True):
            observer.gap.add(logp, trajectory.rollout_logprobs, trajectory.version_lags)

    def _refuse(self, mini: list[Trajectory], culprits: Sequence[int], loss: float, norm: float) -> None:
        """Raise on every rank, naming the samples behind a loss or gradient that is not finite."""
        text = None
        if culprits:
            more = "" if len(culprits) <= NAMED_CULPRITS else f" and {len(culprits) - NAMED_CULPRITS} more"
            text = f"sample(s) {', '.join(map(str, culprits[:NAMED_CULPRITS]))}{more}"
        step = f"optimizer step {self._steps + 1} was not taken: loss {loss:g}, gradient norm {norm:g}"
        self._group.agree(f"{step}, from {text}" if text else None)
        uids = sorted({t.sample_uid for t in mini})
        raise FaultError(f"{step}; no single sample is to blame, only all together (here {uids[:NAMED_CULPRITS]})")

    # -- weights and checkpoints --------------------------------------------------------------------------------------

    def _take_snapshot(self) -> None:
        if self._correction.bypass_mode:
            return
        if self._snapshot is None:
            self._snapshot = WeightSnapshot(self._policy_parameters())
        else:
            self._snapshot.take()
        self._steps_at_snapshot = self._steps

    def _fail_together(self, problem: HybridschedError | None) -> None:
        """Raise on every rank when one has a problem: there the problem, elsewhere a FaultError that quotes it."""
        try:
            self._group.agree(None if problem is None else str(problem))
        except FaultError:
            if problem is not None:
                raise problem from None
            raise
