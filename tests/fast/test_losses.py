"""Losses by hand-worked numbers; the gradient of a mini-batch does not depend on how it is cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from trainer_kit import TINY, random_samples

from hybridsched.config.schema import AlgorithmConfig
from hybridsched.models.qwen3 import seeded_init
from hybridsched.trainers import forward
from hybridsched.trainers.advantages import one_rank
from hybridsched.trainers.batching import partition_samples
from hybridsched.trainers.losses import (
    ClipRange,
    MiniBatchSize,
    clipped_surrogate,
    kl_penalty,
    sequence_weights,
)
from hybridsched.trainers.policy_update import SUMS, LossSettings, accumulate_gradients
from hybridsched.trainers.trajectories import Trajectory, build_trajectories

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "lower"),
    [
        (1.0, 2.0, -2.0, False, False),
        (1.5, 1.0, -1.3, True, False),  # above 1 + high = 1.3
        (0.5, 1.0, -0.5, False, False),  # a worse ratio of a good action is not clipped
        (0.5, -1.0, 0.8, True, False),  # below 1 - low = 0.8
        (1.5, -1.0, 1.5, False, False),
        (4.0, -1.0, 3.0, False, True),  # dual clip: never above c = 3
        (4.0, 1.0, -1.3, True, False),  # the dual clip is for negative advantages only
    ],
)
def test_clipped_surrogate(ratio, advantage, loss, clipped, lower):
    terms = clipped_surrogate(
        torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64),
        torch.tensor([-1.0], dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        ClipRange(0.2, 0.3, 3.0),
    )
    assert loss == pytest.approx(terms.loss.item(), abs=1e-12)
    assert (clipped, lower) == (bool(terms.clipped), bool(terms.clipped_lower))


def test_a_clipped_action_has_no_gradient():
    logp = torch.tensor([math.log(1.5), math.log(1.1)], requires_grad=True)
    clipped_surrogate(logp, torch.zeros(2), torch.ones(2), ClipRange(0.2, 0.2, 3.0)).loss.sum().backward()
    assert [0.0, pytest.approx(-1.1)] == logp.grad.tolist()


def test_an_absurd_log_ratio_stays_finite():
    terms = clipped_surrogate(torch.tensor([0.0]), torch.tensor([-500.0]), torch.tensor([1.0]), ClipRange(0.2, 0.2, 3))
    assert torch.isfinite(terms.loss).all()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("kl", math.log(2)),
        ("abs", math.log(2)),
        ("mse", 0.5 * math.log(2) ** 2),
        ("low_var_kl", 0.5 + math.log(2) - 1),
    ],
)
def test_kl_estimators(kind, expected):
    logp = torch.tensor([-1.0], dtype=torch.float64)
    assert expected == pytest.approx(kl_penalty(logp, logp - math.log(2), kind).item(), abs=1e-12)


@pytest.mark.parametrize(("kind", "expected"), [("kl", -0.5), ("abs", 0.5), ("low_var_kl", math.exp(0.5) - 1.5)])
def test_kl_estimators_below_the_reference(kind, expected):
    logp = torch.tensor([-1.0], dtype=torch.float64)
    assert expected == pytest.approx(kl_penalty(logp, logp + 0.5, kind).item(), abs=1e-12)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [1 / 10, 1 / 10]),
        ("seq-mean-token-sum", [1 / 4, 1 / 4]),
        ("seq-mean-token-mean", [1 / 4, 1 / 12]),
    ],
)
def test_weights_carry_the_normaliser_of_the_whole_mini_batch(mode, expected):
    assert [*expected, 0.0] == sequence_weights([1, 3, 0], mode, MiniBatchSize(actions=10, sequences=4))


def trajectories() -> list[Trajectory]:
    built = build_trajectories(random_samples(4), AlgorithmConfig(), lambda version: (0, 0), one_rank)
    rng = np.random.default_rng(5)
    for t in built:
        t.is_weights[:] = rng.uniform(0.5, 1.5, t.n_actions)
    ref = [rng.normal(-2.5, 0.3, t.n_actions).astype(np.float32) for t in built]
    return [
        Trajectory(*(getattr(t, name) for name in Trajectory.__slots__ if name != "ref_logprobs"), ref_logprobs=r)
        for t, r in zip(built, ref, strict=True)
    ]


def settings(mode: str, max_tokens: int = 100_000) -> LossSettings:
    return LossSettings(ClipRange(0.2, 0.28, 3.0), mode, 0.01, 0.1, "low_var_kl", 0.7, max_tokens)


def gradient(shares: list[list[Trajectory]], mode: str, max_tokens: int) -> tuple[list[torch.Tensor], np.ndarray, int]:
    """Gradients and sums added over emulated ranks, and the number of micro-batches."""
    everything = [t for share in shares for t in share]
    size = MiniBatchSize(sum(t.n_actions for t in everything), len(everything))
    total, sums, ticks = None, np.zeros(len(SUMS)), []
    for share in shares:
        model = seeded_init(TINY, seed=3, dtype="float64", std=0.12)
        sums += accumulate_gradients(model, share, size, settings(mode, max_tokens), lambda: ticks.append(1)).sums
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        total = own if total is None else [a + b for a, b in zip(total, own, strict=True)]
    assert total is not None
    return total, sums, len(ticks)


@pytest.mark.parametrize("mode", MODES)
def test_gradient_does_not_depend_on_ranks_micro_batches_or_padding(mode):
    everything = trajectories()
    one, one_sums, one_count = gradient([everything], mode, 100_000)
    parts = partition_samples([t.n_actions for t in everything], 2)
    two, two_sums, two_count = gradient([[everything[i] for i in part] for part in parts] + [[]], mode, 24)
    assert (one_count, True) == (1, two_count >= 4)
    assert max(float(g.abs().max()) for g in one) > 1e-3
    for a, b in zip(one, two, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-10)
    assert one_sums.tolist() == pytest.approx(two_sums.tolist(), abs=1e-10)


@pytest.mark.parametrize("mode", MODES)
def test_gradient_equals_a_plain_loop_over_responses(mode):
    everything = trajectories()
    model = seeded_init(TINY, seed=3, dtype="float64", std=0.12)
    loss = torch.zeros((), dtype=torch.float64)
    n_tokens = sum(t.n_actions for t in everything)
    for t in everything:
        logits = model(torch.from_numpy(t.tokens.astype(np.int64))[None])[0] / 0.7
        log_all = torch.log_softmax(logits, -1)[t.actions - 1]
        logp = log_all[torch.arange(t.n_actions), torch.from_numpy(t.tokens[t.actions].astype(np.int64))]
        ratio = torch.exp(logp - torch.from_numpy(t.old_logprobs))
        a, w = torch.from_numpy(t.advantages).double(), torch.from_numpy(t.is_weights).double()
        token = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.28))
        token = w * torch.where(a < 0, torch.minimum(token, -3 * a), token)
        d = logp - torch.from_numpy(t.ref_logprobs).double()
        token = token + 0.01 * (log_all.exp() * log_all).sum(-1) + 0.1 * (torch.exp(-d) + d - 1).clamp(-10, 10)
        scale = {
            "token-mean": 1 / n_tokens,
            "seq-mean-token-sum": 1 / len(everything),
            "seq-mean-token-mean": 1 / (len(everything) * t.n_actions),
        }[mode]
        loss = loss + scale * token.sum()
    loss.backward()
    ours, sums, _ = gradient([everything], mode, 64)
    assert loss.item() == pytest.approx(sums[SUMS.index("loss")], abs=1e-10)
    for parameter, grad in zip(model.parameters(), ours, strict=True):
        assert torch.allclose(parameter.grad, grad, rtol=0, atol=1e-10)


def test_computing_the_head_in_pieces_changes_nothing(monkeypatch):
    whole, whole_sums, _ = gradient([trajectories()], "token-mean", 100_000)
    monkeypatch.setattr(forward, "LOGIT_BYTES", 4 * TINY.vocab_size * 5)  # five positions at a time
    pieces, piece_sums, _ = gradient([trajectories()], "token-mean", 100_000)
    assert whole_sums.tolist() == pytest.approx(piece_sums.tolist(), abs=1e-10)
    for a, b in zip(whole, pieces, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-10)


def test_a_large_entropy_bonus_flattens_the_distribution():
    everything = trajectories()
    size = MiniBatchSize(sum(t.n_actions for t in everything), len(everything))
    model = seeded_init(TINY, seed=3, std=0.12)
    bonus = LossSettings(ClipRange(0.2, 0.2, 3.0), "token-mean", 5.0, None, "kl", 1.0, 100_000)
    entropies = []
    for _ in range(5):
        model.zero_grad()
        sums = accumulate_gradients(model, everything, size, bonus, lambda: None).sums
        entropies.append(sums[SUMS.index("entropy")])
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.02 * p.grad
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0] + 1.0
