"""Forward and backward through a Megatron model: micro-batches along the pipeline, log-probs and sums for every stage.

Owns the use of Megatron's schedules. The loss is `policy_update.loss_sums`, the torch trainer's; its weights carry the
normaliser of the whole mini-batch, so Megatron is told to sum gradients and to divide nothing.

Invariants: all ranks of a pipeline, and all that share experts, run the same number of micro-batches (empty ones are
added where a rank has fewer); results are the same on every rank that got the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybridsched.trainers.batching import micro_batches
from hybridsched.trainers.context_parallel import assemble, share
from hybridsched.trainers.forward import PaddedRows, pad_rows
from hybridsched.trainers.losses import MiniBatchSize
from hybridsched.trainers.megatron_groups import MegatronGroups
from hybridsched.trainers.megatron_model import PolicyModel
from hybridsched.trainers.policy_trainer import LogProbs, Row
from hybridsched.trainers.policy_update import SUMS, GradientPass, LossSettings, active_micro_batches, loss_sums
from hybridsched.trainers.trajectories import Trajectory
from hybridsched.trainers.vocab_parallel import action_terms

#: What the last stage makes of a micro-batch: (its number, log-probs [A], entropies [A]) -> the loss, a scalar.
Consume = Callable[[int, Tensor, Tensor], Tensor]


class MegatronPass:
    """Runs micro-batches on this rank. ``tick`` is called once per micro-batch, on every stage."""

    def __init__(self, groups: MegatronGroups, device: torch.device, tick: Callable[[], None]) -> None:
        self._groups = groups
        self._device = device
        self._tick = tick

    def accumulate_gradients(
        self, model: PolicyModel, trajectories: Sequence[Trajectory], size: MiniBatchSize, settings: LossSettings
    ) -> GradientPass:
        """Add the gradient of the mini-batch to the model's buffers, summed over all ranks. Collective.

        ``size`` is that of all ranks; the sums are those of this rank's samples.
        """
        groups = active_micro_batches(trajectories, settings.max_tokens)
        totals: list[Tensor] = []
        pieces: list[Tensor] = []

        def consume(number: int, logp: Tensor, entropy: Tensor) -> Tensor:
            members = [trajectories[index] for index in groups[number]]
            sums = loss_sums(logp, entropy, members, size, settings)
            totals.append(sums.detach())
            pieces.append(logp.detach())
            return sums[0]

        batches = [self._rows([(t.tokens, t.actions) for t in (trajectories[i] for i in group)]) for group in groups]
        self._run(model, batches, settings.temperature, consume, forward_only=False)
        actions = sum(t.n_actions for t in trajectories)
        sums = torch.stack(totals).double().sum(dim=0).cpu().numpy() if totals else np.zeros(len(SUMS))
        flat = self._shared(np.concatenate([sums, _joined(pieces)]), len(SUMS) + actions)
        counts = [[trajectories[index].n_actions for index in group] for group in groups]
        logprobs = _scattered(flat[len(SUMS) :], groups, counts, len(trajectories))
        return GradientPass(flat[: len(SUMS)], list(logprobs))

    def logprobs(self, model: PolicyModel, rows: Sequence[Row], temperature: float, max_tokens: int) -> LogProbs:
        """Teacher-forced log-probs, float32 [A] per row. Collective where the model is sharded."""
        active = [index for index, (_, actions) in enumerate(rows) if actions.shape[0]]
        lengths = [int(rows[index][0].shape[0]) - 1 for index in active]
        groups = [[active[i] for i in group] for group in micro_batches(lengths, max_tokens)]
        pieces: list[Tensor] = []

        def consume(number: int, logp: Tensor, entropy: Tensor) -> Tensor:
            pieces.append(logp)
            return logp.sum()

        batches = [self._rows([rows[index] for index in group]) for group in groups]
        with torch.no_grad():
            self._run(model, batches, temperature, consume, forward_only=True)
        counts = [[int(rows[index][1].shape[0]) for index in group] for group in groups]
        flat = self._shared(_joined(pieces), sum(map(sum, counts)))
        return _scattered(flat, groups, counts, len(rows))

    def _rows(self, rows: Sequence[Row]) -> PaddedRows:
        return pad_rows(rows, self._device)

    def _shared(self, values: npt.NDArray[np.float64], length: int) -> npt.NDArray[np.float64]:
        """float64 [length] from the last stage, on every stage."""
        result = self._groups.from_last_stage(values if self._groups.last_stage else np.zeros(length))
        return result.astype(np.float64, copy=False)

    def _run(
        self,
        model: PolicyModel,
        batches: Sequence[PaddedRows],
        temperature: float,
        consume: Consume,
        *,
        forward_only: bool,
    ) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        count = self._groups.same_micro_batches(max(1, len(batches)))
        numbers = iter(range(count))

        def forward(source: Any, chunk: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            number = next(source)
            rows = batches[number] if number < len(batches) else self._nothing()
            part = share(rows, self._groups.cp_rank, self._groups.cp)
            output = model.forward(part.rows)
            self._tick()

            def loss(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
                terms = action_terms(
                    logits, part.rows.targets, model.config.vocab_size, self._groups.tp_group, temperature
                )
                logp, entropy = (assemble(values, part, self._groups.cp_group) for values in terms)
                value = consume(number, logp, entropy) if number < len(batches) else logp.sum()
                return value, torch.zeros((), dtype=torch.int, device=value.device), {}

            return output, loss

        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=numbers,
            model=[model.chunk],
            num_microbatches=count,
            seq_length=1,  # sizes travel with the tensors (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _nothing(self) -> PaddedRows:
        """A micro-batch without actions, for a rank that has to keep step with the others."""
        tokens = torch.zeros((1, 1), dtype=torch.int64, device=self._device)
        none = torch.zeros(0, dtype=torch.int64, device=self._device)
        return PaddedRows(tokens, none, none)


def _joined(pieces: Sequence[Tensor]) -> npt.NDArray[np.float64]:
    if not pieces:
        return np.zeros(0)
    joined: npt.NDArray[np.float64] = torch.cat(list(pieces)).double().cpu().numpy()
    return joined


def _scattered(
    flat: npt.NDArray[np.float64], groups: Sequence[Sequence[int]], counts: Sequence[Sequence[int]], n_rows: int
) -> LogProbs:
    """Back from micro-batch order to one float32 array per row."""
    out: LogProbs = [np.zeros(0, np.float32)] * n_rows
    start = 0
    for group, lengths in zip(groups, counts, strict=True):
        for index, length in zip(group, lengths, strict=True):
            out[index] = flat[start : start + length].astype(np.float32)
            start += length
    return out


def culprits(trajectories: Sequence[Trajectory], logprobs: Sequence[npt.NDArray[np.floating]]) -> list[int]:
    """sample_uids of which a log-prob, or what multiplies it in the loss, is not finite."""
    found = []
    for trajectory, logp in zip(trajectories, logprobs, strict=True):
        inputs = (logp, trajectory.advantages, trajectory.old_logprobs, trajectory.is_weights)
        if not all(math.isfinite(float(np.abs(values).sum())) for values in inputs):
            found.append(trajectory.sample_uid)
    return list(dict.fromkeys(found))
