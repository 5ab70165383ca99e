"""The metrics of one collection: local sums and extremes, reduced over ranks in two calls, then named.

Owns names and definitions of everything that describes the data (`critic/*`, `response_length/*`, `prompt_length/*`,
`rollout_corr/*`); all ranks get equal numbers. Does not time anything and takes no part in the loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from hybridsched.model import FinishReason, Sample
from hybridsched.trainers.correction import LAG_BINS, GapStatistics
from hybridsched.trainers.policy_update import SUMS
from hybridsched.trainers.trajectories import Trajectory

ArrayReduce = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]

#: Metrics that are means; weighted by what they count.
MEANS = (
    "critic/rewards/mean",
    "critic/advantages/mean",
    "response_length/mean",
    "response_length/clip_ratio",
    "prompt_length/mean",
    "rollout_corr/rejected_fraction",
    "rollout_corr/truncated_fraction",
    "rollout_corr/version_lag/mean",
    "rollout_corr/step_lag/mean",
)
#: Metrics that are extremes; minima are kept negated.
MAXIMA = (
    "critic/rewards/max",
    "critic/advantages/max",
    "response_length/max",
    "prompt_length/max",
    "rollout_corr/version_lag/max",
    "rollout_corr/step_lag/max",
)
MINIMA = ("critic/rewards/min", "critic/advantages/min", "response_length/min")
TIMINGS = ("adv", "old_log_prob", "ref", "update_actor")


class Stopwatch:
    """Seconds by name, for the four phases of training (0.0 where a phase did not happen)."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(TIMINGS, 0.0)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time spent inside to ``name``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - started


class BatchTally:
    """What this rank saw of a collection."""

    def __init__(self) -> None:
        self._totals = np.zeros((len(MEANS), 2))
        self._extremes = np.full(len(MAXIMA) + len(MINIMA), -np.inf)
        self._tokens = 0
        self.gap = GapStatistics.empty()

    def add_samples(self, samples: Sequence[Sample]) -> None:
        """Rewards and lengths of the valid responses."""
        valid = [(sample, response) for sample in samples for response in sample.valid_responses]
        rewards = np.array([response.reward for _, response in valid], dtype=np.float64)
        lengths = np.array([response.n_tokens for _, response in valid], dtype=np.float64)
        prompts = np.array([sample.prompt_tokens.shape[0] for sample, _ in valid], dtype=np.float64)
        ended = np.array([response.finish is FinishReason.LENGTH for _, response in valid], dtype=np.float64)
        self._tokens += int(lengths.sum() + prompts.sum())
        self._enter("critic/rewards", rewards)
        self._enter("response_length", lengths)
        self._enter("prompt_length", prompts)
        self._mean("response_length/clip_ratio", ended.sum(), ended.size)

    def add_trajectories(self, trajectories: Sequence[Trajectory]) -> None:
        """Advantages and ages of the actions (before any is rejected)."""
        if not trajectories:
            return
        self._enter("critic/advantages", np.concatenate([t.advantages for t in trajectories]).astype(np.float64))
        self._enter("rollout_corr/version_lag", np.concatenate([t.version_lags for t in trajectories]))
        self._enter("rollout_corr/step_lag", np.concatenate([t.step_lags for t in trajectories]))

    def add_correction(self, actions: int, rejected: int, truncated: int) -> None:
        """What the correction did to ``actions`` actions."""
        self._mean("rollout_corr/rejected_fraction", rejected, actions)
        self._mean("rollout_corr/truncated_fraction", truncated, actions)

    def reduce(
        self, stopwatch: Stopwatch, sum_ranks: ArrayReduce, max_ranks: ArrayReduce
    ) -> tuple[dict[str, float], dict[str, float], int, dict[int, float]]:
        """(metrics, timings of the slowest rank, prompt and response tokens, KL by version lag), over all ranks."""
        local = [self._totals.ravel(), np.array([float(self._tokens)]), self.gap.sums, self.gap.by_lag.ravel()]
        flat = sum_ranks(np.concatenate(local))
        cuts = np.cumsum([self._totals.size, 1, self.gap.sums.size])
        totals, tokens, gap_sums, by_lag = np.split(flat, cuts)
        seconds = np.array([stopwatch.seconds[name] for name in TIMINGS])
        peaks = max_ranks(np.concatenate([self._extremes, seconds]))
        extremes, slowest = peaks[: self._extremes.size], peaks[self._extremes.size :]
        metrics = {
            name: float(total / count)
            for name, (total, count) in zip(MEANS, totals.reshape(len(MEANS), 2), strict=True)
            if count
        }
        signs = [1.0] * len(MAXIMA) + [-1.0] * len(MINIMA)
        for name, sign, value in zip((*MAXIMA, *MINIMA), signs, extremes, strict=True):
            if np.isfinite(value):
                metrics[name] = float(sign * value)
        gap = GapStatistics(gap_sums, by_lag.reshape(2, LAG_BINS))
        metrics.update(gap.metrics())
        timing = dict(zip(TIMINGS, slowest.tolist(), strict=True))
        return metrics, timing, int(tokens[0]), gap.lag_kl()

    def _enter(self, prefix: str, values: npt.NDArray[np.floating] | npt.NDArray[np.int64]) -> None:
        """Mean and extremes of one quantity, under whichever of the names exist."""
        if not values.size:
            return
        self._mean(f"{prefix}/mean", float(values.sum()), values.size)
        if f"{prefix}/max" in MAXIMA:
            index = MAXIMA.index(f"{prefix}/max")
            self._extremes[index] = max(self._extremes[index], float(values.max()))
        if f"{prefix}/min" in MINIMA:
            index = len(MAXIMA) + MINIMA.index(f"{prefix}/min")
            self._extremes[index] = max(self._extremes[index], -float(values.min()))

    def _mean(self, name: str, total: float, count: int) -> None:
        self._totals[MEANS.index(name)] += (total, count)


def actor_metrics(
    sums: Sequence[npt.NDArray[np.float64]], norms: Sequence[float], rates: Sequence[float], *, with_kl: bool
) -> dict[str, float]:
    """Means over the optimizer steps of a collection, from the sums of all ranks of each step.

    actor/pg_loss and actor/kl_loss: as they entered the loss (kl_loss without its coefficient). actor/entropy,
    actor/ppo_kl (-log(pi/pi_old)), actor/pg_clipfrac, actor/pg_clipfrac_lower: means over actions. actor/lr: the last.
    """
    if not sums:
        return {}
    table = np.stack(list(sums))
    column = {name: table[:, index] for index, name in enumerate(SUMS)}
    per_action = {
        "actor/entropy": "entropy",
        "actor/ppo_kl": "ppo_kl",
        "actor/pg_clipfrac": "clipped",
        "actor/pg_clipfrac_lower": "clipped_lower",
    }
    out = {name: float((column[source] / column["actions"]).mean()) for name, source in per_action.items()}
    out["actor/loss"] = float(column["loss"].mean())
    out["actor/pg_loss"] = float(column["pg_loss"].mean())
    if with_kl:
        out["actor/kl_loss"] = float(column["kl_loss"].mean())
    out["actor/grad_norm"] = float(np.mean(norms))
    out["actor/lr"] = rates[-1]
    return out
