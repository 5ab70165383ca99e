"""The demo's starting model: 0.10M parameters, a short supervised phase on noisy counts, saved as a model folder.

A third of the steps in the labels is right (``task.noisy_count``), so the model has learnt what the task is about and
reinforcement learning has to find out which of its habits pays.

Owns: sizes, recipe and files of that model. Invariants: equal (seed, steps) on one machine give equal bytes; one
compute thread; the caller's thread setting and random state are left as they were.
Does not: sample or score with the run's engine and rewards (``mean_probabilities`` measures by teacher forcing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F

from hybridsched.demo import task
from hybridsched.errors import DataError
from hybridsched.models.hf_folder import save_hf
from hybridsched.models.qwen3 import CausalLM, ModelConfig, seeded_init

BATCH = 32  #: sequences of one supervised step
PEAK_LR = 3e-3
WARMUP_STEPS = 20  #: then constant; falls to zero over the second half, or the last batches would show in the reward
_IGNORED = -100  #: label of positions without a loss
_TRAIN, _PROBE = 0, 1  #: streams of random numbers

MODEL = ModelConfig(
    vocab_size=task.VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    tie_word_embeddings=True,
    max_position_embeddings=256,
    bos_token_id=task.BOS,
    eos_token_ids=(task.EOS,),
    pad_token_id=task.PAD,
)

Progress = Callable[[int, int, float], None]  #: (steps done, steps in all, loss of the last one)


def make_demo_model(
    folder: str | Path, seed: int = 0, steps: int = 150, progress: Progress | None = None
) -> dict[str, float]:
    """Train the starting model and write a complete Hugging Face folder (weights, config, tokenizer, generation).

    Returns ``parameters`` (count), ``loss`` (nats per label, mean of the last tenth of the steps) and the figures of
    ``mean_probabilities``. Raises DataError when `folder` cannot be written. About a quarter of a minute on one core.
    """
    if steps < 1:
        raise DataError(f"the demo's model needs at least one supervised step, not {steps}.")
    try:
        task.write_tokenizer(folder)  # first, so that an unwritable folder is found before the training
        with _one_thread():
            model, losses = _train(seed, steps, progress)
            probabilities = mean_probabilities(model, seed)
        save_hf(model, folder)
    except OSError as error:
        raise DataError(f"the demo's model cannot be written to {folder}: {error.strerror or error}.") from error
    tail = losses[-max(1, steps // 10) :]
    parameters = sum(p.numel() for p in model.parameters())
    return {"parameters": float(parameters), "loss": sum(tail) / len(tail), **probabilities}


def mean_probabilities(model: CausalLM, seed: int, n: int = 128) -> dict[str, float]:
    """What the model would do at temperature 1 after each token of `n` fresh noisy counts, on average.

    ``p_right``: probability of the right next digit (the reward it starts from, nearly); ``p_stop``: of the end (the
    inverse of the mean length, nearly); ``p_other``: of anything but a digit or the end.
    """
    tokens, labels = _batch(task.RawUniform(seed, _PROBE), n)
    with torch.no_grad():
        probabilities = model(tokens).softmax(-1)
    # Right is the digit after the last one: the token itself, or the last digit of the prompt behind <assistant>.
    last = torch.where(tokens == task.ASSISTANT, tokens.roll(1, dims=1), tokens) - task.DIGIT_0
    right = (last.clamp(0, 9) + 1) % 10 + task.DIGIT_0
    mask = labels != _IGNORED
    p_right = probabilities.gather(2, right[..., None])[..., 0][mask].mean()
    p_stop = probabilities[..., task.EOS][mask].mean()
    p_digit = probabilities[..., task.DIGIT_0 : task.DIGIT_0 + 10].sum(-1)[mask].mean()
    return {"p_right": float(p_right), "p_stop": float(p_stop), "p_other": float(1 - p_digit - p_stop)}


def _train(seed: int, steps: int, progress: Progress | None) -> tuple[CausalLM, list[float]]:
    model = seeded_init(MODEL, seed)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.99), weight_decay=0.01)
    uniform = task.RawUniform(seed, _TRAIN)
    losses: list[float] = []
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min(1.0, step / WARMUP_STEPS, 2 * (1 - (step - 1) / steps))
        tokens, labels = _batch(uniform, BATCH)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=_IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        if progress is not None:
            progress(step, steps, losses[-1])
    model.eval()
    return model, losses


def _batch(uniform: task.RawUniform, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`n` prompts with noisy counts: tokens and next-token labels, int64 [n, T], right-padded; no loss on prompts."""
    sequences: list[tuple[list[int], list[int]]] = []
    for start in uniform.integers(n, task.MAX_START + 1).tolist():
        prompt, response = task.prompt_ids(start), task.noisy_count(start, uniform)
        ignored = [_IGNORED] * (len(prompt) - 1)
        sequences.append((prompt + response[:-1], ignored + response))
    longest = max(len(tokens) for tokens, _ in sequences)
    tokens = torch.full((n, longest), task.PAD)
    labels = torch.full((n, longest), _IGNORED)
    for i, (ids, wanted) in enumerate(sequences):
        tokens[i, : len(ids)] = torch.tensor(ids)
        labels[i, : len(wanted)] = torch.tensor(wanted)
    return tokens, labels


@contextmanager
def _one_thread() -> Iterator[None]:
    """One compute thread: other cores may belong to somebody, and sums come out the same everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
