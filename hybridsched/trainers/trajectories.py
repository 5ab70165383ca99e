"""Samples as the loss sees them: one trajectory per valid response, with arrays over its *actions*.

An action is a token the policy sampled itself (`response_mask` 1). Owns the way from samples to trajectories including
advantages; a response without a reward never becomes a trajectory. Pure numpy; ranks meet only in the ``reduce`` hook.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridsched.config.schema import AlgorithmConfig
from hybridsched.model import Response, Sample, WeightVersion
from hybridsched.trainers.advantages import FloatArray, Reduce, discounted_returns, grpo, rloo, whiten

Float32s = npt.NDArray[np.float32]
Lags = Callable[[WeightVersion], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One valid response. P prompt tokens, T response tokens, A actions.

    tokens: int32 [P + T]; actions: int64 [A], index of each action in ``tokens``; everything else is over actions:
    rollout_logprobs, advantages float32; version_lags, step_lags int64 (age of the weights that sampled the action, in
    versions and in optimizer steps). old_logprobs: what the surrogate's ratio is taken against (of the rollout, or of
    the proximal policy in decoupled mode); is_weights: multiplies the loss; ref_logprobs: of the reference model.
    """

    sample_uid: int
    tokens: npt.NDArray[np.int32]
    prompt_length: int
    actions: npt.NDArray[np.int64]
    rollout_logprobs: Float32s
    version_lags: npt.NDArray[np.int64]
    step_lags: npt.NDArray[np.int64]
    reward: float
    advantages: Float32s
    old_logprobs: Float32s
    is_weights: Float32s
    ref_logprobs: Float32s | None = None

    @property
    def n_actions(self) -> int:
        """Actions that take part in the loss."""
        return int(self.actions.shape[0])

    def keeping(self, keep: npt.NDArray[np.bool_]) -> Trajectory:
        """The same response with fewer actions."""
        return Trajectory(
            self.sample_uid,
            self.tokens,
            self.prompt_length,
            self.actions[keep],
            self.rollout_logprobs[keep],
            self.version_lags[keep],
            self.step_lags[keep],
            self.reward,
            self.advantages[keep],
            self.old_logprobs[keep],
            self.is_weights[keep],
            None if self.ref_logprobs is None else self.ref_logprobs[keep],
        )


def sample_problem(sample: Sample) -> str | None:
    """Why a sample cannot be trained on, naming it; None when it can."""
    name = f"sample {sample.sample_uid} (prompt {sample.prompt_uid})"
    if not sample.valid_responses:
        failures = sorted({r.failure for r in sample.responses if r.failure})
        why = f": {'; '.join(failures)}" if failures else ""
        return f"{name} has no response with a reward and cannot be trained on{why}"
    if sample.prompt_tokens.shape[0] == 0:
        return f"{name} has an empty prompt: its first response token has nothing it could be predicted from"
    for index, response in enumerate(sample.responses):
        if response.reward is None:
            continue
        if not math.isfinite(response.reward):
            return f"{name}, response {index}: reward is {response.reward}; rewards must be finite numbers"
        mask_length = response.n_tokens if response.response_mask is None else response.response_mask.shape[0]
        if response.logprobs.shape[0] != response.n_tokens or mask_length != response.n_tokens:
            return (
                f"{name}, response {index}: {response.n_tokens} tokens but {response.logprobs.shape[0]} log-probs and "
                f"a mask of {mask_length}; all three must be equally long"
            )
        if not np.isfinite(response.logprobs).all():
            return f"{name}, response {index}: log-probs of the sampler are not finite; its weights are damaged"
    return None


def build_trajectories(
    samples: Sequence[Sample], algorithm: AlgorithmConfig, lags: Lags, reduce: Reduce
) -> list[Trajectory]:
    """This rank's trajectories of one mini-batch, in order of samples and responses.

    Collective through ``reduce`` for estimators that look at the whole mini-batch (the same on every rank).
    """
    responses = [(sample, response) for sample in samples for response in sample.valid_responses]
    actions = [_actions(response) for _, response in responses]
    advantages = _advantages(samples, [int(a.shape[0]) for a in actions], algorithm, reduce)
    cache: dict[WeightVersion, tuple[int, int]] = {}
    out = []
    for (sample, response), positions, advantage in zip(responses, actions, advantages, strict=True):
        version_lags, step_lags = _token_lags(response, lags, cache)
        logprobs = response.logprobs[positions].astype(np.float32, copy=False)
        prompt_length = int(sample.prompt_tokens.shape[0])
        out.append(
            Trajectory(
                sample_uid=sample.sample_uid,
                tokens=np.concatenate([sample.prompt_tokens, response.token_ids]).astype(np.int32, copy=False),
                prompt_length=prompt_length,
                actions=positions + prompt_length,
                rollout_logprobs=logprobs,
                version_lags=version_lags[positions],
                step_lags=step_lags[positions],
                reward=float(response.reward or 0.0),
                advantages=advantage.astype(np.float32),
                old_logprobs=logprobs,
                is_weights=np.ones(positions.shape[0], np.float32),
            )
        )
    return out


def _actions(response: Response) -> npt.NDArray[np.int64]:
    """Positions of the tokens the policy sampled."""
    if response.response_mask is None:
        return np.arange(response.n_tokens, dtype=np.int64)
    return np.flatnonzero(response.response_mask).astype(np.int64, copy=False)


def _advantages(
    samples: Sequence[Sample], n_actions: Sequence[int], algorithm: AlgorithmConfig, reduce: Reduce
) -> list[FloatArray]:
    """Per-action advantages of every valid response."""
    if algorithm.adv_estimator == "reinforce_plus_plus":
        rewards = [float(r.reward or 0.0) for s in samples for r in s.valid_responses]
        returns = [discounted_returns(r, count, algorithm.gamma) for r, count in zip(rewards, n_actions, strict=True)]
        return whiten(returns, reduce)
    per_response: list[float] = []
    for sample in samples:
        rewards_of_one = np.array([r.reward for r in sample.valid_responses], dtype=np.float64)
        if algorithm.adv_estimator == "grpo":
            group = grpo(rewards_of_one, norm_by_std=algorithm.norm_adv_by_std_in_grpo)
        else:
            group = rloo(rewards_of_one)
        per_response.extend(group.tolist())
    return [np.full(count, value) for value, count in zip(per_response, n_actions, strict=True)]


def _token_lags(
    response: Response, lags: Lags, cache: dict[WeightVersion, tuple[int, int]]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Version lag and optimizer-step lag of every token of a response, each int64 [T]."""
    versions = np.zeros(response.n_tokens, np.int64)
    steps = np.zeros(response.n_tokens, np.int64)
    for run in response.version_runs:
        if run.version not in cache:
            cache[run.version] = lags(run.version)
        versions[run.start : run.end], steps[run.start : run.end] = cache[run.version]
    return versions, steps
