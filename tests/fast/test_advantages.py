"""Advantages by hand-worked numbers, and how samples become trajectories."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from trainer_kit import response, sample

from hybridsched.config.schema import AlgorithmConfig
from hybridsched.trainers.advantages import discounted_returns, grpo, one_rank, rloo, whiten
from hybridsched.trainers.trajectories import build_trajectories, sample_problem


def no_lag(version):
    return (0, 0)


def test_grpo_divides_by_the_sample_standard_deviation():
    # mean 2, deviations -2 0 2 0, ddof 1: sqrt(8 / 3)
    std = (8 / 3) ** 0.5
    expected = [-2 / (std + 1e-6), 0.0, 2 / (std + 1e-6), 0.0]
    assert expected == pytest.approx(grpo(np.array([0.0, 2.0, 4.0, 2.0])).tolist(), abs=1e-12)


def test_grpo_without_std_only_subtracts_the_mean():
    assert [-1.0, 0.0, 1.0] == grpo(np.array([1.0, 2.0, 3.0]), norm_by_std=False).tolist()


@pytest.mark.parametrize("estimator", [grpo, rloo])
def test_a_group_of_one_has_advantage_zero(estimator):
    assert [0.0] == estimator(np.array([0.7])).tolist()


def test_grpo_of_equal_rewards_is_zero():
    assert [0.0, 0.0] == grpo(np.array([0.5, 0.5])).tolist()


def test_rloo_subtracts_the_mean_of_the_others():
    # others' means: (2+6)/2, (1+6)/2, (1+2)/2
    assert [-3.0, -1.5, 4.5] == rloo(np.array([1.0, 2.0, 6.0])).tolist()


def test_returns_are_discounted_back_from_the_last_action():
    assert [0.5, 1.0, 2.0] == discounted_returns(2.0, 3, 0.5).tolist()
    assert [2.0, 2.0, 2.0] == discounted_returns(2.0, 3, 1.0).tolist()
    assert [0.0, 2.0] == discounted_returns(2.0, 2, 0.0).tolist()


def test_whitening_uses_mean_and_variance_of_all_tokens():
    # mean 2, variance with ddof 1: 1
    first, second = whiten([np.array([1.0, 2.0]), np.array([3.0])])
    scale = (1 + 1e-8) ** -0.5
    assert [-scale, 0.0] == pytest.approx(first.tolist(), abs=1e-15)
    assert [scale] == pytest.approx(second.tolist(), abs=1e-15)


def test_whitening_of_a_single_token_is_zero():
    assert [[0.0]] == [part.tolist() for part in whiten([np.array([5.0])])]


def test_whitening_keeps_the_variance_of_large_nearly_equal_values():
    (whitened,) = whiten([np.array([1e8, 1e8 + 1.0, 1e8 + 2.0])])
    assert [-1.0, 0.0, 1.0] == pytest.approx(whitened.tolist(), abs=1e-6)


def test_whitening_does_not_depend_on_how_tokens_are_spread_over_ranks():
    values = [np.array([1.0, 4.0]), np.array([2.0, -3.0, 0.5]), np.array([9.0])]
    shares = [values[:1], values[1:], []]
    meeting = threading.Barrier(3, timeout=20)
    boxes: list[np.ndarray] = [np.zeros(0)] * 3
    results: list[list[np.ndarray]] = [[], [], []]

    def rank(index):
        def reduce(local):
            boxes[index] = local
            meeting.wait()
            total = np.sum(boxes, axis=0)
            meeting.wait()
            return total

        results[index] = whiten(shares[index], reduce)

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    together = np.concatenate([part for share in results for part in share])
    assert np.concatenate(whiten(values)).tolist() == pytest.approx(together.tolist(), abs=1e-12)


def test_a_response_without_reward_is_left_out_of_its_group_and_of_training():
    group = sample(7, [response([5, 6], 1.0), response([5, 6, 7], None), response([8], 3.0)])
    trajectories = build_trajectories([group], AlgorithmConfig(norm_adv_by_std_in_grpo=False), no_lag, one_rank)
    assert [[-1.0, -1.0], [1.0]] == [t.advantages.tolist() for t in trajectories]
    assert [[1, 2, 3, 5, 6], [1, 2, 3, 8]] == [t.tokens.tolist() for t in trajectories]


def test_actions_are_the_tokens_the_policy_sampled():
    group = sample(1, [response([5, 6, 7, 8], 1.0, mask=[1, 0, 0, 1]), response([9], 0.0)])
    algorithm = AlgorithmConfig(adv_estimator="reinforce_plus_plus", gamma=0.5)
    first, second = build_trajectories([group], algorithm, no_lag, one_rank)
    assert [3, 6] == first.actions.tolist()
    # returns 0.5, 1 (the masked tokens do not discount) and 0: mean 0.5, variance 0.25
    scale = (0.25 + 1e-8) ** -0.5
    assert [0.0, 0.5 * scale] == pytest.approx(first.advantages.tolist(), abs=1e-6)
    assert [-0.5 * scale] == pytest.approx(second.advantages.tolist(), abs=1e-6)


def test_rloo_is_chosen_by_configuration():
    group = sample(1, [response([5], 1.0), response([6], 2.0), response([7], 6.0)])
    trajectories = build_trajectories([group], AlgorithmConfig(adv_estimator="rloo"), no_lag, one_rank)
    assert [-3.0, -1.5, 4.5] == [float(t.advantages[0]) for t in trajectories]


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        (sample(4, [response([5], None)]), "no response with a reward"),
        (sample(4, [response([5], float("nan"))]), "reward is nan"),
        (sample(4, [response([5], 1.0)], prompt=()), "empty prompt"),
        (sample(4, [response([5, 6], 1.0, mask=[1])]), "a mask of 1"),
        (sample(4, [response([5], 1.0), response([5], 1.0, logprob=float("nan"))]), "response 1: log-probs"),
    ],
)
def test_what_cannot_be_trained_on_is_named(bad, part):
    problem = sample_problem(bad)
    assert problem is not None
    assert "sample 4 (prompt p4)" in problem
    assert part in problem


def test_a_good_sample_has_no_problem():
    assert sample_problem(sample(4, [response([5], 1.0), response([6], None)])) is None
