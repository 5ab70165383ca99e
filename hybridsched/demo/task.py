"""The demo's task ``count_on``: vocabulary, chat template, prompts, and the noisy counts the model starts from.

A prompt says ``count on from 418``; a good response goes on ``901234...``, digit after digit, mod 10, for as long as it
can. Generation dominates (responses grow to the budget), a model of 0.1M parameters can learn it in minutes on one
core, and the reward (``hybridsched.rewards.count_on``) tells how far it is.

Owns: everything that has to agree between data files, tokenizer, warm start and reward. Invariants: token ids never
change; text round-trips through the tokenizer exactly; all randomness comes from raw generator bits of a given seed.
Does not: import torch, or write files other than the tokenizer's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

DATA_SOURCE = "count_on"
MAX_START = 9999  #: largest start number
MAX_NEW_TOKENS = 128  #: response budget, the end token included

PAD, BOS, EOS, UNK, USER, ASSISTANT = range(6)
_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>")
_DIGITS = tuple("0123456789")
_WORDS = ("count", " on", " from", " ")
DIGIT_0 = len(_SPECIAL)  #: id of "0"; the other digits follow
VOCAB_SIZE = 32  #: a round number divides among tensor-parallel ranks; the rest is reserved
_RESERVED = tuple(f"<reserved_{i}>" for i in range(VOCAB_SIZE - len(_SPECIAL) - len(_DIGITS) - len(_WORDS)))
VOCABULARY = (*_SPECIAL, *_DIGITS, *_WORDS, *_RESERVED)

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<user>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<assistant>' + message.content + eos_token }}
    {%- else %}
        {{- raise_exception('this model knows the roles user and assistant, not ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<assistant>' }}
{%- endif %}
"""

#: What a warm-start label adds to the digit before it, and how often. Only 1 is right, and it is no likelier than the
#: others: a greedy response starts out wrong as well.
STEP_PROBABILITIES = {1: 1 / 3, 2: 1 / 3, 3: 1 / 3}
STOP_PROBABILITY = 1 / 25  #: that a warm-start label is the end instead of a further digit


def prompt_text(start: int) -> str:
    """The user's message."""
    return f"count on from {start}"


def row(start: int, split: str, index: int) -> dict[str, Any]:
    """One row of the data set in the peer's layout."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": prompt_text(start)}],
        "ability": "counting",
        "reward_model": {"style": "rule", "ground_truth": str(start)},
        "extra_info": {"split": split, "index": index},
    }


def prompt_ids(start: int) -> list[int]:
    """Token ids of the prompt as the tokenizer and chat template make them (a test holds the two together)."""
    words = range(DIGIT_0 + len(_DIGITS), DIGIT_0 + len(_DIGITS) + len(_WORDS))
    return [BOS, USER, *words, *(DIGIT_0 + int(digit) for digit in str(start)), ASSISTANT]


class RawUniform:
    """Uniform numbers in [0, 1) from raw generator bits: the same on every platform and numpy release."""

    def __init__(self, *entropy: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence([value % 2**64 for value in entropy]))

    def __call__(self, n: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The next `n` numbers, float64 [n]."""
        raw = np.asarray(self._bits.random_raw(n), dtype=np.uint64)
        return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def integers(self, n: int, high: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The next `n` integers in [0, high), int64 [n]."""
        return (self(n) * high).astype(np.int64)


def noisy_count(start: int, uniform: RawUniform) -> list[int]:
    """Token ids of one warm-start response: a walk of digits with ``STEP_PROBABILITIES``, then EOS.

    A third of the steps is right, and the wrong ones are wrong in a learnable way, so that a short supervised phase
    leaves a model with a reward of about 0.3 that reinforcement learning has to make choose. The length is geometric
    with ``STOP_PROBABILITY``, at least one digit, and at most ``MAX_NEW_TOKENS`` tokens with the end.
    """
    stops = np.flatnonzero(uniform(MAX_NEW_TOKENS - 2) < STOP_PROBABILITY)
    n_digits = 1 + int(stops[0] if stops.size else MAX_NEW_TOKENS - 2)
    which = np.searchsorted(np.cumsum(list(STEP_PROBABILITIES.values()))[:-1], uniform(n_digits), side="right")
    walk = (start + np.cumsum(np.array(list(STEP_PROBABILITIES))[which])) % 10
    return [*(DIGIT_0 + int(digit) for digit in walk), EOS]


def write_tokenizer(folder: str | Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json of the demo's model into `folder`."""
    # Imported here: the data set can be made without it.
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(VOCABULARY)}, unk_token=_SPECIAL[UNK]))
    # Words keep the space before them and digits stand alone, so that fusing the pieces gives back the text.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s?[a-z]+|\d|\s|."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    special = [AddedToken(text, special=True, normalized=False) for text in (*_SPECIAL, *_RESERVED)]
    tokenizer.add_special_tokens(special)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 256,
        "bos_token": _SPECIAL[BOS],
        "eos_token": _SPECIAL[EOS],
        "pad_token": _SPECIAL[PAD],
        "unk_token": _SPECIAL[UNK],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", config)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": True, "temperature": 1.0},
    )


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
