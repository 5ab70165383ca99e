"""A trainer that only takes time: no model, no gradients. Everything it reports is labelled ``emulated``.

Owns ``EmulatedTrainer`` and its asynchronous form ``EmulatedTrainer.aio``, which the trainer worker uses wherever a
trainer has one, in virtual and in real time alike: the time of a collection is spent in ``asyncio.sleep``, and a
synchronous method cannot do that. ``train`` itself therefore refuses.

The time of one collection on one rank::

    ppo_epochs x (mini-batches x train_fixed_s  +  rank's tokens x ranks^(1 - train_efficiency) / train_tokens_per_s)

With tokens balanced over the ranks this is total tokens / (train_tokens_per_s x ranks^train_efficiency): efficiency 1
scales linearly, 0.9 loses 7 % a doubling. A rank without tokens still pays the fixed part: steps are collective.

Invariants: same batch, same numbers; a checkpoint restores every counter. It does not talk to other ranks, so the
metrics are of this rank's samples (real trainers reduce them).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from hybridsched.config.schema import EmulatedConfig
from hybridsched.errors import DataError, InternalError, RunFolderError
from hybridsched.model import Sample, TensorSpec, TokenArray, WeightVersion
from hybridsched.trainers.base import TrainBatch, Trainer, TrainerGroup, TrainResult

#: The "weights" that cross the wire where a real weight sync carries an emulated model.
EMULATED_SPECS = (TensorSpec("emulated.weight", (16,), "float32"),)
CHECKPOINT_FILE = "emulated_trainer.json"
_SCHEMA = 1


class EmulatedTrainer(Trainer):
    """One rank. Use ``trainer.aio`` for everything that takes time."""

    name = "emulated"

    def __init__(
        self,
        config: EmulatedConfig,
        *,
        ppo_epochs: int = 1,
        lr: float = 1e-6,
        parameter_bytes: int = 1 << 30,
        optimizer_bytes: int = 6 << 30,
        checkpoints: MutableMapping[str, str] | None = None,
    ) -> None:
        """parameter_bytes, optimizer_bytes: what ``offload`` says it frees (optimizer includes gradients).

        checkpoints: keep them here (by folder name) instead of in files; share it with whoever has to find them.
        """
        self._config = config
        self._ppo_epochs = ppo_epochs
        self._lr = lr
        self._bytes = {"parameters": parameter_bytes, "optimizer": optimizer_bytes}
        self._resident = {"parameters": False, "optimizer": False}
        self._memory = checkpoints
        self._unnamed: dict[str, str] = {}
        self._group: TrainerGroup | None = None
        self._version = WeightVersion(0, 0)
        self._optimizer_steps = 0
        self._tokens = 0
        self._progress = 0
        self._task: tuple[asyncio.AbstractEventLoop, float, float, int] | None = None
        self.aio = AsyncEmulatedTrainer(self)

    def open_rendezvous(self) -> str:
        """A name; there is nothing to meet at."""
        return "emulated:0"

    def start(self, group: TrainerGroup) -> None:
        """Remember the group; parameters and optimizer are resident."""
        self._group = group
        self.onload()

    def shutdown(self) -> None:
        """Forget the group. Idempotent."""
        self._group = None
        self._resident = dict.fromkeys(self._resident, False)

    def train(self, batch: TrainBatch) -> NoReturn:
        """Raises InternalError: it takes time on the event loop, use ``aio.train``."""
        raise InternalError(
            f"EmulatedTrainer.train was called for collection {batch.collection}: an emulated trainer spends its time "
            "on the event loop and has no synchronous form; await trainer.aio.train(batch)"
        )

    def seconds(self, batch: TrainBatch) -> float:
        """How long this rank trains on ``batch``; the formula is in the module's docstring."""
        ranks = self._started().world_size
        tokens = sum(sample.n_tokens for mini_batch in batch.mini_batches for sample in mini_batch)
        moving = tokens * math.pow(ranks, 1.0 - self._config.train_efficiency) / self._config.train_tokens_per_s
        return self._ppo_epochs * (len(batch.mini_batches) * self._config.train_fixed_s + moving)

    def begin_cycle(self, version: WeightVersion) -> None:
        """Weights were synced as ``version``."""
        self._version = version
        self._progress += 1

    def offload(self, *, keep_parameters: bool) -> int:
        """Mark as freed; returns the bytes a real trainer of the given size would have freed."""
        parts = ["optimizer"] if keep_parameters else ["optimizer", "parameters"]
        freed = sum(self._bytes[part] for part in parts if self._resident[part])
        self._resident.update(dict.fromkeys(parts, False))
        self._progress += 1
        return freed

    def onload(self) -> None:
        """Everything is resident again."""
        self._resident = dict.fromkeys(self._resident, True)
        self._progress += 1

    def weight_specs(self) -> list[TensorSpec]:
        """EMULATED_SPECS."""
        return list(EMULATED_SPECS)

    def iter_weights(self) -> Iterator[tuple[str, Any]]:
        """One torch tensor filled with the number of optimizer steps, so that a receiver can tell versions apart."""
        import torch  # only where weights really travel: simulations never load it

        for spec in EMULATED_SPECS:
            yield spec.name, torch.full(spec.shape, float(self._optimizer_steps), dtype=torch.float32)

    def logprobs(self, sequences: Sequence[tuple[TokenArray, TokenArray]], temperature: float) -> list[Any]:
        """Zeros, float32 [T] per pair, as the emulated engine gives."""
        return [np.zeros(response.shape[0], np.float32) for _, response in sequences]

    def save_checkpoint(self, folder: Path | None) -> None:
        """Write a small JSON (rank 0; the others hold nothing of their own).

        folder None: into this object. Otherwise into ``checkpoints`` if that was given, else an fsynced file.
        """
        state = {
            "schema": _SCHEMA,
            "emulated": True,
            "version": list(self._version),
            "optimizer_steps": self._optimizer_steps,
            "tokens": self._tokens,
        }
        text = json.dumps(state, sort_keys=True, indent=1) + "\n"
        self._progress += 1
        if folder is None:
            self._unnamed[""] = text
        elif self._started().rank != 0:
            return
        elif self._memory is not None:
            self._memory[str(folder)] = text
        else:
            _write_durably(folder / CHECKPOINT_FILE, text)

    def load_checkpoint(self, folder: Path | None) -> None:
        """Restore every counter. Raises RunFolderError when there is no such checkpoint or it is not one of ours."""
        where = "memory" if folder is None else str(folder / CHECKPOINT_FILE)
        try:
            if folder is None:
                text = self._unnamed[""]
            elif self._memory is not None:
                text = self._memory[str(folder)]
            else:
                text = (folder / CHECKPOINT_FILE).read_text(encoding="utf-8")
            state = json.loads(text)
            if state["schema"] != _SCHEMA:
                raise ValueError(f"schema {state['schema']!r}, expected {_SCHEMA}")
            lineage, number = state["version"]
            self._version = WeightVersion(lineage, number)
            self._optimizer_steps, self._tokens = int(state["optimizer_steps"]), int(state["tokens"])
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise RunFolderError(
                f"{where}: no checkpoint of the emulated trainer can be read there: {error!r}"
            ) from error
        self._progress += 1

    @property
    def progress(self) -> int:
        """Tokens trained and other units of work; grows continuously while a collection is in work."""
        if self._task is None:
            return self._progress
        loop, began, seconds, units = self._task
        share = min(1.0, (loop.time() - began) / seconds) if seconds > 0 else 1.0
        return self._progress + int(units * share)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps so far."""
        return self._optimizer_steps

    @property
    def version(self) -> WeightVersion:
        """Version of the last ``begin_cycle``."""
        return self._version

    def check(self, batch: TrainBatch) -> None:
        """Raises InternalError unless everything is resident, DataError (naming it) for an untrainable sample."""
        if not all(self._resident.values()):
            missing = [part for part, here in self._resident.items() if not here]
            raise InternalError(f"training was asked for while {' and '.join(missing)} are offloaded: onload first")
        for mini_batch in batch.mini_batches:
            for sample in mini_batch:
                if all(response.reward is None for response in sample.responses):
                    raise DataError(f"sample {sample.sample_uid} ({sample.prompt_uid}) has no response with a reward")

    def begin(self, seconds: float, units: int) -> None:
        """A collection of ``units`` tokens begins and will take ``seconds``."""
        loop = asyncio.get_running_loop()
        self._task = (loop, loop.time(), seconds, units)

    def end(self) -> None:
        """The collection ended or was broken off: what was done of it stays in ``progress``."""
        self._progress = self.progress
        self._task = None

    def result(self, batch: TrainBatch, seconds: float, units: int) -> TrainResult:
        """Count the optimizer steps of a finished collection and report."""
        samples = [sample for mini_batch in batch.mini_batches for sample in mini_batch]
        self._optimizer_steps += len(batch.mini_batches) * self._ppo_epochs
        self._tokens += units
        timing = {"adv": 0.0, "old_log_prob": 0.0, "ref": 0.0, "update_actor": seconds}
        return TrainResult(self._metrics(samples), timing, units)

    def _metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Rewards and lengths are those of the samples; what only a model could give follows a plausible course."""
        rewards = [r.reward for sample in samples for r in sample.responses if r.reward is not None]
        lengths = [r.n_tokens for sample in samples for r in sample.responses]
        decay = math.exp(-self._optimizer_steps / 1000.0)
        return {
            "emulated": 1.0,
            "actor/lr": self._lr,
            "actor/pg_loss": 0.0,
            "actor/pg_clipfrac": 0.0,
            "actor/ppo_kl": 0.0,
            "actor/entropy": 0.1 + 0.9 * decay,
            "actor/grad_norm": 0.1 + 0.4 * decay,
            "critic/rewards/mean": math.fsum(rewards) / len(rewards) if rewards else 0.0,
            "critic/advantages/mean": 0.0,
            "rollout_corr/kl": 0.0,
            "rollout_corr/ess": 1.0,
            "response_length/mean": sum(lengths) / len(lengths) if lengths else 0.0,
            "optimizer_steps": float(self._optimizer_steps),
        }

    def _started(self) -> TrainerGroup:
        if self._group is None:
            raise InternalError("the emulated trainer was used before start() or after shutdown()")
        return self._group


class AsyncEmulatedTrainer:
    """The asynchronous form of every method of ``Trainer``; ``train`` is the only one that takes time."""

    def __init__(self, trainer: EmulatedTrainer) -> None:
        self._trainer = trainer

    async def open_rendezvous(self) -> str:
        """See Trainer."""
        return self._trainer.open_rendezvous()

    async def start(self, group: TrainerGroup) -> None:
        """See Trainer."""
        self._trainer.start(group)

    async def shutdown(self) -> None:
        """See Trainer."""
        self._trainer.shutdown()

    async def train(self, batch: TrainBatch) -> TrainResult:
        """Sleep for ``EmulatedTrainer.seconds(batch)`` on the loop's clock. Raises as ``EmulatedTrainer.check``."""
        trainer = self._trainer
        trainer.check(batch)
        seconds = trainer.seconds(batch)
        units = sum(sample.n_tokens for mini_batch in batch.mini_batches for sample in mini_batch)
        trainer.begin(seconds, units)
        try:
            await asyncio.sleep(seconds)
        finally:
            trainer.end()
        return trainer.result(batch, seconds, units)

    async def begin_cycle(self, version: WeightVersion) -> None:
        """See Trainer."""
        self._trainer.begin_cycle(version)

    async def offload(self, *, keep_parameters: bool) -> int:
        """See Trainer."""
        return self._trainer.offload(keep_parameters=keep_parameters)

    async def onload(self) -> None:
        """See Trainer."""
        self._trainer.onload()

    async def weight_specs(self) -> list[TensorSpec]:
        """See Trainer."""
        return self._trainer.weight_specs()

    async def iter_weights(self) -> Iterator[tuple[str, Any]]:
        """See Trainer."""
        return self._trainer.iter_weights()

    async def logprobs(self, sequences: Sequence[tuple[TokenArray, TokenArray]], temperature: float) -> list[Any]:
        """See Trainer."""
        return self._trainer.logprobs(sequences, temperature)

    async def save_checkpoint(self, folder: Path | None) -> None:
        """See EmulatedTrainer; a few hundred bytes, written inline."""
        self._trainer.save_checkpoint(folder)

    async def load_checkpoint(self, folder: Path | None) -> None:
        """See EmulatedTrainer."""
        self._trainer.load_checkpoint(folder)


def _write_durably(path: Path, text: str) -> None:
    """Write and fsync; the caller renames and syncs the folder."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
