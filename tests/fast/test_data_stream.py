"""Length policy and order of prompts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridsched.config.schema import DataConfig
from hybridsched.data import PromptSet, PromptStream, Tokenizer, synthetic_prompts
from hybridsched.data.stream import stable_permutation
from hybridsched.demo import task
from hybridsched.errors import DataError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("demo")
    task.write_tokenizer(folder)
    return Tokenizer.from_folder(folder)


def data(folder: Path, *starts: int, **settings: Any) -> DataConfig:
    file = folder / "rows.jsonl"
    rows = [task.row(start, "train", index) for index, start in enumerate(starts)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(**({"train_files": [str(file)]} | settings))


def test_a_prompt_carries_what_the_row_says(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (prompt,) = PromptSet.build(data(tmp_path, 41), tokenizer)
    assert prompt.prompt_uid == "count_on/0"
    assert prompt.tokens.tolist() == task.prompt_ids(41)
    assert prompt.tokens.dtype == np.int32
    assert (prompt.data_source, prompt.ground_truth) == ("count_on", "41")
    assert prompt.extra_info == {"split": "train", "index": 0}


def test_nobody_can_write_into_shared_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for prompts in (PromptSet.build(data(tmp_path, 41), tokenizer), synthetic_prompts(1, 3)):
        with pytest.raises(ValueError, match="read-only"):
            prompts[0].tokens[0] = 5


def test_the_validation_split_reads_its_own_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = data(tmp_path, 1, 2, 3)
    config = config.model_copy(update={"val_files": config.train_files, "train_files": []})
    assert len(PromptSet.build(config, tokenizer, "val")) == 3


# 1 has 8 tokens, 21 has 9, 4321 has 11.
LONG = task.prompt_ids(4321)


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [("left", LONG[2:]), ("right", LONG[:9]), ("middle", LONG[:4] + LONG[6:])],
)
def test_truncation_of_the_long_ones_only(
    tmp_path: Path, tokenizer: Tokenizer, truncation: str, expected: list[int]
) -> None:
    prompts = PromptSet.build(data(tmp_path, 21, 4321, max_prompt_length=9, truncation=truncation), tokenizer)
    assert [p.tokens.tolist() for p in prompts] == [task.prompt_ids(21), expected]
    assert (prompts.n_filtered, prompts.n_truncated) == (0, 1)


def test_a_long_prompt_is_an_error_by_default(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = data(tmp_path, 1, 321, 4321, max_prompt_length=9)
    with pytest.raises(DataError, match=r"rows.jsonl:2: the prompt has 10 tokens, .* is 9 \(2 of 3 .*longest has 11"):
        PromptSet.build(config, tokenizer)


def test_filtering_comes_before_truncation(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = data(tmp_path, 4321, 1, max_prompt_length=9, filter_overlong_prompts=True)
    prompts = PromptSet.build(config, tokenizer)
    assert [p.ground_truth for p in prompts] == ["1"]
    assert (prompts.n_filtered, prompts.n_truncated) == (1, 0)
    assert "1 prompts of 8 to 8 tokens, 1 too long and filtered" in prompts.summary()


def test_a_filter_that_leaves_nothing_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = data(tmp_path, 1, max_prompt_length=3, filter_overlong_prompts=True)
    with pytest.raises(DataError, match=r"all 1 are longer than data\.max_prompt_length = 3"):
        PromptSet.build(config, tokenizer)


def test_a_row_the_template_refuses_is_malformed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = data(tmp_path, 1)
    file = Path(config.train_files[0])
    bad = task.row(2, "train", 1) | {"prompt": [{"role": "tool", "content": "x"}]}
    file.write_text(file.read_text() + json.dumps(bad) + "\n")
    with pytest.raises(DataError, match=r"1 of 2 rows are malformed.*\n.*rows\.jsonl:2: .*not tool"):
        PromptSet.build(config, tokenizer)
    prompts = PromptSet.build(config.model_copy(update={"max_malformed_fraction": 0.5}), tokenizer)
    assert (len(prompts), prompts.report.n_usable) == (1, 1)


def test_wrong_template_arguments_are_one_error_not_one_a_row(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = data(tmp_path, 1, apply_chat_template_kwargs={"truncation": True}, max_malformed_fraction=1.0)
    with pytest.raises(DataError, match=r"^data\.apply_chat_template_kwargs: truncation"):
        PromptSet.build(config, tokenizer)


def test_template_arguments_reach_the_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = data(tmp_path, 1, apply_chat_template_kwargs={"add_generation_prompt": False})
    assert PromptSet.build(config, tokenizer)[0].tokens.tolist() == task.prompt_ids(1)[:-1]


def test_the_fingerprint_tells_data_sets_apart(tmp_path: Path, tokenizer: Tokenizer) -> None:
    first, same, other = (PromptSet.build(data(tmp_path, *s), tokenizer).fingerprint for s in [(1, 2), (1, 2), (2, 1)])
    assert first == same != other


# -- the stream -------------------------------------------------------------------------------------------------------

streams = st.builds(
    lambda n, epochs, limit, shuffle, seed: (
        n,
        epochs,
        PromptStream(synthetic_prompts(n, 1), shuffle=shuffle, seed=seed, total_epochs=epochs, limit=limit),
    ),
    st.integers(0, 20),
    st.integers(0, 4),
    st.none() | st.integers(0, 100),
    st.booleans(),
    st.integers(-(2**70), 2**70),
)


@given(streams)
def test_every_epoch_holds_every_prompt_once(case: tuple[int, int, PromptStream]) -> None:
    n, _, stream = case
    seen: dict[int, list[str]] = {}
    for position in range(len(stream)):
        seen.setdefault(stream.epoch_of(position), []).append(stream[position].prompt_uid)
    for epoch, uids in seen.items():
        complete = (epoch + 1) * n <= len(stream)
        assert max(Counter(uids).values()) == 1
        assert len(uids) == (n if complete else len(stream) - epoch * n)


@given(streams, st.randoms(use_true_random=False))
def test_access_in_any_order_gives_the_same_prompts(case: tuple[int, int, PromptStream], random: Any) -> None:
    stream = case[2]
    in_order = [prompt.prompt_uid for prompt in stream]
    positions = list(range(len(stream)))
    random.shuffle(positions)
    assert {p: stream[p].prompt_uid for p in positions} == dict(enumerate(in_order))


@pytest.mark.parametrize(
    ("n", "epochs", "limit", "expected"),
    [(5, 2, None, 10), (5, 2, 7, 7), (5, 2, 99, 10), (0, 3, None, 0), (5, 0, 9, 0)],
)
def test_length(n: int, epochs: int, limit: int | None, expected: int) -> None:
    assert len(PromptStream(synthetic_prompts(n, 1), total_epochs=epochs, limit=limit)) == expected


@pytest.mark.parametrize("position", [-1, 10, 10**9])
def test_positions_outside_the_stream_are_refused(position: int) -> None:
    stream = PromptStream(synthetic_prompts(5, 1), total_epochs=2)
    for ask in (stream.epoch_of, stream.index_of, stream.__getitem__):
        with pytest.raises(IndexError, match="outside the prompt stream of 10 samples"):
            ask(position)


def test_without_shuffling_the_file_order_repeats() -> None:
    stream = PromptStream(synthetic_prompts(3, 1), shuffle=False, total_epochs=2)
    assert [p.prompt_uid[-1] for p in stream[1:6]] == ["1", "2", "0", "1", "2"]


def test_epochs_and_seeds_have_their_own_order() -> None:
    n = 50
    first, second = (PromptStream(synthetic_prompts(n, 1), seed=seed, total_epochs=2) for seed in (1, 2))
    orders = [[s.index_of(e * n + i) for i in range(n)] for s in (first, second) for e in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_the_order_is_pinned() -> None:
    # A resumed run asks for the same positions: this order may never change, whatever numpy does.
    assert stable_permutation(8, 1, 0).tolist() == [2, 4, 7, 5, 0, 6, 3, 1]
    assert stable_permutation(3, -1).tolist() == stable_permutation(3, 2**64 - 1).tolist()


def test_a_million_synthetic_prompts_cost_nothing() -> None:
    prompts = synthetic_prompts(1_000_000, 64)
    assert prompts[999_999].prompt_uid == "synthetic/999999"
    assert prompts[0].tokens is prompts[7].tokens
    assert prompts[0].tokens.tolist() == [0] * 64
    assert len({synthetic_prompts(n, length).fingerprint for n, length in ((1, 2), (2, 1), (2, 2))}) == 3
    with pytest.raises(IndexError):
        prompts[1_000_000]


@pytest.mark.parametrize(("n", "length"), [(-1, 1), (1, 0)])
def test_impossible_synthetic_prompts_are_refused(n: int, length: int) -> None:
    with pytest.raises(DataError, match="synthetic prompts need"):
        synthetic_prompts(n, length)
