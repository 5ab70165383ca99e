"""What a trainer is. One instance per trainer worker process; the processes of all GPUs form one group.

Methods are synchronous: the worker calls them through its `offload` (a thread, or inline under virtual time), so that
its event loop keeps beating. ``progress`` grows with every micro-batch. The learning code knows nothing of the
control plane.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridsched.model import Sample, TensorSpec, TokenArray, WeightVersion


@dataclass(frozen=True, slots=True)
class TrainerGroup:
    """Where this rank stands and how the group meets. ``rendezvous`` is host:port of a TCPStore rank 0 opened
    (rank 0 binds port 0 first: see Trainer.open_rendezvous)."""

    rank: int
    world_size: int
    rendezvous: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One collection, as one rank gets it.

    ``mini_batches[k]`` are this rank's samples of the k-th optimizer step (ppo_mini_batch_size samples over all
    ranks); a rank may have none. ``collection`` counts from 0 within the cycle.
    """

    mini_batches: tuple[tuple[Sample, ...], ...]
    version: WeightVersion
    collection: int


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Metrics (already reduced over ranks; equal on every rank) and timings in seconds by peer's names.

    timing keys: adv, old_log_prob, ref, update_actor. metrics e.g. actor/pg_loss, actor/grad_norm, actor/entropy,
    actor/pg_clipfrac, actor/ppo_kl, actor/lr, critic/rewards/mean, critic/advantages/mean, rollout_corr/kl,
    rollout_corr/ess, response_length/mean, optimizer_steps.
    """

    metrics: dict[str, float]
    timing_s: dict[str, float]
    n_tokens: int
    lag_kl: dict[int, float] = field(default_factory=dict)  #: KL(rollout||trainer) by version lag


class Trainer(ABC):
    """One rank of the training engine."""

    name: str = "base"

    @abstractmethod
    def open_rendezvous(self) -> str:
        """Rank 0 only: bind a TCPStore on a port the system chooses; returns host:port."""

    @abstractmethod
    def start(self, group: TrainerGroup) -> None:
        """Join the group, load the model, build the optimizer."""

    @abstractmethod
    def shutdown(self) -> None:
        """Leave the group. Idempotent."""

    @abstractmethod
    def train(self, batch: TrainBatch) -> TrainResult:
        """Advantages, optional recomputed log-probs, loss, one optimizer step per mini-batch and ppo epoch.

        Raises when a sample has no valid response or the loss is not finite (names the sample). Collective.
        """

    @abstractmethod
    def begin_cycle(self, version: WeightVersion) -> None:
        """Weights were just synced as ``version``: snapshot for decoupled correction if configured."""

    @abstractmethod
    def offload(self, *, keep_parameters: bool) -> int:
        """Free gradients and optimizer state (and parameters unless kept). Returns bytes freed on the device."""

    @abstractmethod
    def onload(self) -> None:
        """Bring everything back."""

    @abstractmethod
    def weight_specs(self) -> list[TensorSpec]:
        """Names, shapes, dtypes in sending order (Hugging Face names)."""

    @abstractmethod
    def iter_weights(self) -> Iterator[tuple[str, Any]]:
        """Full tensors in the order of weight_specs. Collective where parameters are sharded.

        An iterator that is given up is closed (``close()``, where it has one): it then still does its part of the rest.
        """

    def join_gather(self) -> None:
        """Do what this rank has to do while other ranks iterate over the weights. Collective where sharded."""
        for _ in self.iter_weights():
            pass

    @abstractmethod
    def logprobs(self, sequences: Sequence[tuple[TokenArray, TokenArray]], temperature: float) -> list[Any]:
        """Teacher-force (prompt, response) pairs: float32 [T] per pair (truth test). Collective if sharded."""

    @abstractmethod
    def save_checkpoint(self, folder: Path) -> None:
        """Write model (Hugging Face layout), optimizer, schedule and random state into an existing folder.

        Collective. Files are fsynced; the caller renames the folder.
        """

    @abstractmethod
    def load_checkpoint(self, folder: Path) -> None:
        """Restore bit for bit what save_checkpoint wrote. Collective."""

    @property
    @abstractmethod
    def progress(self) -> int:
        """Micro-batches (and other units of work) done so far."""
