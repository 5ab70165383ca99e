"""Log-probs and entropies over a vocabulary in slices, against torch's own log-softmax."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.multiprocessing as multiprocessing

from hybridsched.trainers.vocab_parallel import action_terms

VOCAB, ACTIONS = 13, 7


def drawn(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits [A, V] float64, targets [A], weights of log-probs and of entropies [A]."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(ACTIONS, VOCAB, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCAB, (ACTIONS,), generator=generator)
    weights = torch.randn(2, ACTIONS, generator=generator, dtype=torch.float64)
    return logits, targets, weights[0], weights[1]


def expected(temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-probs, entropies, gradient) by torch."""
    logits, targets, a, b = drawn()
    logits.requires_grad_()
    log_all = torch.log_softmax(logits / temperature, dim=-1)
    logp, entropy = log_all.gather(1, targets[:, None])[:, 0], -(log_all.exp() * log_all).sum(dim=-1)
    ((a * logp).sum() + (b * entropy).sum()).backward()
    return logp.detach(), entropy.detach(), logits.grad


def computed(first: int, width: int, group, temperature: float):
    """The same for columns first..first+width of the vocabulary, filled up beyond its end."""
    logits, targets, a, b = drawn()
    piece = torch.full((ACTIONS, width), 50.0, dtype=torch.float64)  # padding would win if it took part
    real = max(0, min(width, VOCAB - first))
    piece[:, :real] = logits[:, first : first + real]
    piece.requires_grad_()
    logp, entropy = action_terms(piece, targets, VOCAB, group, temperature)
    ((a * logp).sum() + (b * entropy).sum()).backward()
    return logp.detach(), entropy.detach(), piece.grad


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("padding", [0, 3])
def test_one_slice_is_the_plain_log_softmax_with_its_gradient(temperature, padding):
    logp, entropy, gradient = computed(0, VOCAB + padding, None, temperature)
    for ours, theirs in zip((logp, entropy, gradient[:, :VOCAB]), expected(temperature), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    assert 0 == gradient[:, VOCAB:].abs().sum()


def test_half_precision_logits_are_computed_in_float32():
    logits, targets, _, _ = drawn()
    logp, entropy = action_terms(logits.bfloat16(), targets, VOCAB, None, 1.0)
    assert torch.float32 == logp.dtype == entropy.dtype


def test_no_actions_give_nothing_but_a_gradient():
    logits = torch.zeros(0, VOCAB, requires_grad=True)
    logp, _ = action_terms(logits, torch.zeros(0, dtype=torch.int64), VOCAB, None, 1.0)
    logp.sum().backward()
    assert (0, VOCAB) == tuple(logits.grad.shape)


def rank_main(rank: int, ranks: int, width: int, port: int, results) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    results.put((rank, [t.numpy() for t in computed(rank * width, width, torch.distributed.group.WORLD, 0.7)]))
    torch.distributed.barrier()


@pytest.mark.parametrize(("ranks", "width"), [(2, 7), (2, 13)])
def test_slices_of_two_ranks_are_the_whole(ranks, width):
    """Width 7: a padded vocabulary; width 13: the second rank holds nothing but padding."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=rank_main, args=(r, ranks, width, port, results), daemon=True) for r in range(ranks)
    ]
    for process in processes:
        process.start()
    by_rank = dict(results.get(timeout=90) for _ in processes)
    for process in processes:
        process.join(timeout=30)
    logp, entropy, gradient = expected(0.7)
    for rank in range(ranks):
        assert logp.numpy() == pytest.approx(by_rank[rank][0], abs=1e-12)
        assert entropy.numpy() == pytest.approx(by_rank[rank][1], abs=1e-12)
        real = max(0, min(width, VOCAB - rank * width))
        assert gradient[:, rank * width : rank * width + real].numpy() == pytest.approx(
            by_rank[rank][2][:, :real], abs=1e-12
        )
        assert 0 == abs(by_rank[rank][2][:, real:]).sum()
