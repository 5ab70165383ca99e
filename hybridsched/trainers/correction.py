"""Off-policy correction: the gap between the policy that sampled (pi_rollout) and the one that is trained.

Owns the importance weights, the rejection rule and the statistics of the gap. Two modes:

- *bypass*: the surrogate's ratio is pi / pi_rollout; nothing else is needed unless rejection is on.
- *decoupled*: pi_prox are the weights at the start of the cycle; the surrogate's ratio is pi / pi_prox and the loss of
  each action is multiplied by stop_grad(min(pi_prox / pi_rollout, threshold)).
  Source: Hilton et al., "Batch size-invariance for policy optimization", 2021; for language models Fu et al.,
  "AReaL", 2025; truncation: Espeholt et al., "IMPALA", 2018.

Rejected actions leave the mini-batch altogether: they count neither in the loss nor in its normaliser.
Everything here is numpy on one response or on flat arrays; no model, no ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from hybridsched.config.schema import RolloutCorrectionConfig

Level = Literal["token", "sequence"]
Floats = npt.NDArray[np.floating]
LAG_BINS = 64  #: version lags are counted one by one up to this; the last bin holds all larger ones
LOG_WEIGHT_BOUND = 20.0


def importance_weights(prox: Floats, rollout: Floats, level: Level) -> npt.NDArray[np.float64]:
    """pi_prox / pi_rollout of each action of one response.

    token: of the action itself. sequence: the product over the response, the same for all its actions.
    prox, rollout: log-probs [A]; returns float64 [A]. Logarithms are bounded to +-20.
    """
    gap = prox.astype(np.float64) - rollout.astype(np.float64)
    if level == "sequence":
        gap = np.full_like(gap, gap.sum())
    return np.exp(np.clip(gap, -LOG_WEIGHT_BOUND, LOG_WEIGHT_BOUND))


@dataclass(frozen=True, slots=True)
class Correction:
    """What the correction says about one response: loss weights float32 [A] (ones in bypass), actions kept bool [A]."""

    weights: npt.NDArray[np.float32]
    keep: npt.NDArray[np.bool_]
    truncated: int  #: actions whose weight met the upper threshold


def needs_prox(config: RolloutCorrectionConfig) -> bool:
    """Whether log-probs of the trainer's weights are needed before the first optimizer step of a collection."""
    return not config.bypass_mode or config.rollout_rs is not None


def correct(prox: Floats, rollout: Floats, config: RolloutCorrectionConfig) -> Correction:
    """Weights and rejection of one response from its log-probs [A] (pi_prox; in bypass mode the current weights).

    Rejection looks at the untruncated weight and keeps [lower, upper]; lower is 1/upper unless configured.
    """
    weights = np.ones(prox.shape[0], np.float32)
    keep = np.ones(prox.shape[0], np.bool_)
    truncated = 0
    if not config.bypass_mode and config.rollout_is is not None:
        raw = importance_weights(prox, rollout, config.rollout_is)
        truncated = int((raw > config.rollout_is_threshold).sum())
        weights = np.minimum(raw, config.rollout_is_threshold).astype(np.float32)
    if config.rollout_rs is not None:
        raw = importance_weights(prox, rollout, config.rollout_rs)
        upper = config.rollout_rs_threshold
        lower = config.rollout_rs_threshold_lower
        keep = ~((raw < (1.0 / upper if lower is None else lower)) | (raw > upper))  # NaN stays: the loss must show it
    return Correction(weights, keep, truncated)


@dataclass(slots=True)
class GapStatistics:
    """Sums over actions from which the gap is reported; adding two gives those of both together.

    With d = log pi_rollout - log pi_trainer and w = exp(-d), float64 throughout: ``sums`` [5]: actions, sum of d, of
    w - 1 + d, of w, of w^2; ``by_lag`` [2, LAG_BINS]: actions and sum of d by version lag.
    """

    sums: npt.NDArray[np.float64]
    by_lag: npt.NDArray[np.float64]

    @staticmethod
    def empty() -> GapStatistics:
        """No action seen."""
        return GapStatistics(np.zeros(5), np.zeros((2, LAG_BINS)))

    def add(self, trainer: Floats, rollout: Floats, lags: npt.NDArray[np.int64]) -> None:
        """Enter actions: log-probs [A] of the trainer and the sampler, and their version lags [A] (>= 0)."""
        d = rollout.astype(np.float64) - trainer.astype(np.float64)
        bounded = np.clip(d, -LOG_WEIGHT_BOUND, LOG_WEIGHT_BOUND)
        w = np.exp(-bounded)
        self.sums += (d.size, d.sum(), (w - 1.0 + bounded).sum(), w.sum(), np.square(w).sum())
        bins = np.minimum(lags, LAG_BINS - 1)
        self.by_lag[0] += np.bincount(bins, minlength=LAG_BINS)
        self.by_lag[1] += np.bincount(bins, weights=d, minlength=LAG_BINS)

    def metrics(self) -> dict[str, float]:
        """The gap in four numbers; empty without actions.

        rollout_corr/kl: mean of d, the plain estimate of KL(pi_rollout || pi_trainer), as actions were drawn from
        pi_rollout. rollout_corr/k3_kl: the low-variance one. rollout_corr/ess: (sum w)^2 / (A sum w^2), the effective
        sample size as a share of the A actions (Kish, "Survey Sampling", 1965). rollout_corr/weight_mean: mean of w,
        near 1 when the log-probs of both sides belong together.
        """
        count, d, k3, w, w2 = self.sums
        if count == 0:
            return {}
        return {
            "rollout_corr/kl": float(d / count),
            "rollout_corr/k3_kl": float(k3 / count),
            "rollout_corr/ess": float(w * w / (count * w2)),
            "rollout_corr/weight_mean": float(w / count),
        }

    def lag_kl(self) -> dict[int, float]:
        """Mean of d by version lag, for the lags that occur."""
        count, d = self.by_lag
        return {int(lag): float(d[lag] / count[lag]) for lag in np.flatnonzero(count)}
