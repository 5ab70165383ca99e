"""The demo: data, tokenizer, noisy counts and starting model agree with each other and are made equal every time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hybridsched.config.schema import DataConfig
from hybridsched.data import PromptSet, Tokenizer, load_rows, stop_token_ids
from hybridsched.demo import make_data as make_data_module
from hybridsched.demo import task
from hybridsched.demo.make_data import make_data
from hybridsched.errors import DataError
from hybridsched.rewards import count_on


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("demo")
    task.write_tokenizer(folder)
    return Tokenizer.from_folder(folder)


def test_the_vocabulary_has_the_ids_the_constants_say(tokenizer: Tokenizer) -> None:
    assert len(task.VOCABULARY) == len(set(task.VOCABULARY)) == task.VOCAB_SIZE
    ids = [task.PAD, task.BOS, task.EOS, task.UNK, task.USER, task.ASSISTANT]
    assert tokenizer.encode("<pad><bos><eos><unk><user><assistant>") == ids
    assert tokenizer.encode("0123456789") == list(range(task.DIGIT_0, task.DIGIT_0 + 10))


@pytest.mark.parametrize("start", [0, 7, 10, 418, 9999])
def test_prompts_are_as_the_chat_template_makes_them(tokenizer: Tokenizer, start: int) -> None:
    messages = task.row(start, "train", 0)["prompt"]
    assert tokenizer.apply_chat_template(messages) == task.prompt_ids(start)
    assert tokenizer.decode(task.prompt_ids(start)) == task.prompt_text(start) == f"count on from {start}"
    assert (
        tokenizer.decode(task.prompt_ids(start), skip_special_tokens=False)
        == f"<bos><user>count on from {start}<assistant>"
    )


def test_what_the_model_does_not_know_becomes_unknown(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("ß count") == [task.UNK, task.UNK]


def test_noisy_counts_have_the_stated_shape() -> None:
    uniform = task.RawUniform(5)
    lengths, steps = [], []
    for start in range(2000):
        ids = task.noisy_count(start, uniform)
        digits = np.array([start % 10, *(i - task.DIGIT_0 for i in ids[:-1])])
        assert ids[-1] == task.EOS
        assert 2 <= len(ids) <= task.MAX_NEW_TOKENS
        assert digits.min() >= 0 and digits.max() <= 9
        lengths.append(len(ids))
        steps.extend(np.diff(digits) % 10)
    assert set(steps) == set(task.STEP_PROBABILITIES)
    for step, probability in task.STEP_PROBABILITIES.items():
        assert np.mean(np.array(steps) == step) == pytest.approx(probability, abs=0.01)
    assert np.mean(lengths) == pytest.approx(1 / task.STOP_PROBABILITY, rel=0.1)


def test_the_reward_of_noisy_counts_is_where_learning_should_start(tokenizer: Tokenizer) -> None:
    uniform = task.RawUniform(6)
    rewards = [count_on("", tokenizer.decode(task.noisy_count(s, uniform)), str(s)) for s in range(1000)]
    assert np.mean(rewards) == pytest.approx(0.30, abs=0.02)


def test_data_files_hold_the_same_rows_twice(tmp_path: Path) -> None:
    paths = make_data(tmp_path / "out", n_train=20, n_val=5, seed=3)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(paths)
    for split, n in (("train", 20), ("val", 5)):
        rows, _ = load_rows([paths[f"{split}.jsonl"]])
        twins, _ = load_rows([paths[f"{split}.parquet"]])
        assert [(r.prompt_uid, r.prompt, r.ground_truth) for r in rows] == [
            (r.prompt_uid, r.prompt, r.ground_truth) for r in twins
        ]
        assert [r.prompt_uid for r in rows] == [f"count_on/{i}" for i in range(n)]


def test_data_is_equal_for_equal_seeds_only(tmp_path: Path) -> None:
    texts = [make_data(tmp_path / str(i), 50, 5, seed)["train.jsonl"].read_text() for i, seed in enumerate((1, 1, 2))]
    assert texts[0] == texts[1] != texts[2]


def test_no_start_number_is_in_both_splits(tmp_path: Path) -> None:
    paths = make_data(tmp_path, n_train=9000, n_val=1000)
    starts = {
        split: [json.loads(line)["reward_model"]["ground_truth"] for line in paths[f"{split}.jsonl"].open()]
        for split in ("train", "val")
    }
    assert len(set(starts["train"]) | set(starts["val"])) == 10_000


@pytest.mark.parametrize(("n_train", "n_val"), [(0, 1), (1, 0), (10_000, 1)])
def test_impossible_sizes_are_refused(tmp_path: Path, n_train: int, n_val: int) -> None:
    with pytest.raises(DataError, match="prompts cannot be made"):
        make_data(tmp_path / "never", n_train, n_val)
    assert not (tmp_path / "never").exists()


def test_the_data_set_loads_with_the_demo_tokenizer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    paths = make_data(tmp_path)
    config = DataConfig(train_files=[str(paths["train.parquet"])], val_files=[str(paths["val.jsonl"])])
    assert len(PromptSet.build(config, tokenizer, "train")) == 2048
    assert len(PromptSet.build(config, tokenizer, "val")) == 128


def test_the_command_line_writes_and_prints_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make_data_module.main([str(tmp_path), "--train", "3", "--val", "2", "--seed", "9"]) == 0
    assert [Path(line).name for line in capsys.readouterr().out.split()] == [
        "train.jsonl",
        "train.parquet",
        "val.jsonl",
        "val.parquet",
    ]


def test_the_command_line_ends_with_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as end:
        make_data_module.main([str(tmp_path / "file" / "out")])
    assert end.value.code == 2
    assert "cannot be written" in capsys.readouterr().err


# -- the starting model -----------------------------------------------------------------------------------------------


def test_the_model_folder_is_complete_and_equal_for_equal_seeds(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from hybridsched.demo.warm_start import make_demo_model
    from hybridsched.models.hf_folder import load_hf

    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    calls: list[tuple[int, int]] = []
    stats = make_demo_model(
        tmp_path / "a", seed=4, steps=3, progress=lambda done, steps, _: calls.append((done, steps))
    )
    assert calls == [(1, 3), (2, 3), (3, 3)]
    assert 90_000 < stats["parameters"] < 110_000
    assert (torch.get_num_threads(), torch.equal(torch.random.get_rng_state(), state)) == (threads, True)

    assert make_demo_model(tmp_path / "b", seed=4, steps=3) == stats
    assert make_demo_model(tmp_path / "c", seed=5, steps=3) != stats
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]

    model, tokenizer = load_hf(tmp_path / "a"), Tokenizer.from_folder(tmp_path / "a")
    assert model.config.vocab_size == tokenizer.vocab_size
    assert stop_token_ids(tmp_path / "a", tokenizer) == (task.EOS,)
    assert {"config.json", "generation_config.json"} <= {p.name for p in (tmp_path / "a").iterdir()}


def test_a_short_warm_start_learns_to_write_digits(tmp_path: Path) -> None:
    from hybridsched.demo.warm_start import make_demo_model

    few, more = (make_demo_model(tmp_path / str(n), steps=n) for n in (1, 30))
    assert more["loss"] < few["loss"] - 0.5
    assert more["p_other"] < 0.25 < few["p_other"]


def test_transformers_reads_the_model_folder(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, GenerationConfig

    from hybridsched.demo.warm_start import make_demo_model
    from hybridsched.models.hf_folder import load_hf

    make_demo_model(tmp_path, steps=2)
    tokens = torch.tensor([task.prompt_ids(418)])
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(str(tmp_path), local_files_only=True)(tokens).logits
        ours = load_hf(tmp_path)(tokens)
    assert torch.allclose(theirs, ours, atol=1e-4)
    assert GenerationConfig.from_pretrained(str(tmp_path)).eos_token_id == task.EOS


def test_an_unwritable_model_folder_is_found_before_the_training(tmp_path: Path) -> None:
    from hybridsched.demo.warm_start import make_demo_model

    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        make_demo_model(tmp_path / "file" / "model", progress=lambda *_: pytest.fail("trained in vain"))
