"""Bad input is refused before anything is started: one message with file, key and cure, exit code 2, nothing written.

Everything goes through `hybridsched run` as a user types it; the launch loop is replaced by one that fails the test.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridsched.cli import main as cli
from hybridsched.cli.templates import template_text
from hybridsched.demo import inputs
from hybridsched.models.config import ModelConfig, weight_shapes
from hybridsched.models.folder_check import check_model
from hybridsched.models.hf_folder import save_hf, weight_specs
from hybridsched.models.qwen3 import empty_model
from hybridsched.runtime.run_identity import FIXED_KEYS
from hybridsched.sample_queue.owner import OwnerFence, identity_of_this_process

GOOD_ROW = {
    "prompt": [{"role": "user", "content": "count on from 1"}],
    "data_source": "count_on",
    "reward_model": {"ground_truth": "1"},
}
Mutation = Callable[[Path], object]


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> inputs.DemoInputs:
    """The demo's model and data, hardly trained and few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "WARM_START_STEPS", 2)
        patch.setattr(inputs, "N_TRAIN", 64)
        return inputs.make_inputs(tmp_path_factory.mktemp("inputs"), 0)


class Desk:
    """A user's folder with model/, data/ and run.yaml; runs go to run/."""

    def __init__(self, folder: Path, capsys) -> None:
        self.folder, self.capsys = folder, capsys
        self.started = 0

    def run(self, *overrides: str, flags: tuple[str, ...] = ()) -> tuple[int, str]:
        """(exit code, stderr) of `hybridsched run`."""
        arguments = ["run", "run.yaml", "--quiet", *flags, "local.allow_oversubscribe=true", *overrides]
        return self.call(*arguments)

    def call(self, *arguments: str) -> tuple[int, str]:
        code = cli.main(arguments)
        return code, self.capsys.readouterr().err

    def launch(self, prepared, **_) -> int:
        self.started += 1
        return 0

    def files(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted((self.folder / "run").rglob("*")) if path.is_file()}


@pytest.fixture
def desk(tmp_path, monkeypatch, capsys, originals) -> Desk:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(originals.model, tmp_path / "model")
    shutil.copytree(originals.train.parent, tmp_path / "data")
    data = tmp_path / "data"
    here = inputs.DemoInputs(tmp_path / "model", data / "train.parquet", data / "val.parquet")
    inputs.write_run_yaml(tmp_path, template_text("demo.yaml"), here, tmp_path / "run")
    desk = Desk(tmp_path, capsys)
    monkeypatch.setattr("hybridsched.slurm.launch_loop.run_local", desk.launch)
    return desk


def refused(desk: Desk, *overrides: str, says: tuple[str, ...], flags: tuple[str, ...] = ()) -> None:
    """Exit code 2, one message with these words, nothing started or left behind."""
    before = desk.files()
    code, err = desk.run(*overrides, flags=flags)
    assert (2, 0) == (code, desk.started), err
    assert err.startswith("hybridsched: error: ")
    assert "Traceback" not in err
    for words in says:
        assert words in err
    assert before == desk.files()
    if not before:
        assert not (desk.folder / "run").is_dir()


def test_the_untouched_desk_starts(desk):
    code, err = desk.run()
    assert (0, 1) == (code, desk.started), err


# -- keys and sizes


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.nnods=2", "did you mean trainer.nnodes?"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=0", "ppo_mini_batch_size: is a number (0)"),
        ("trainer.n_gpus_per_node=true", "write a number"),
        ("trainer.default_local_dir=" + "x" * 300, "File name too long"),
        ("trainer.default_local_dir=run.yaml/run", "cannot be written: Not a directory"),
        ("actor_rollout_ref.actor.strategy=torhc", "did you mean torch?"),
    ],
)
def test_keys_and_sizes_that_cannot_be(desk, override, says):
    refused(desk, override, says=(says,))


def test_more_gpus_than_cores(desk):
    says = ("trainer.n_gpus_per_node: asks for 64 + 1 GPUs", "local.allow_oversubscribe: true")
    refused(desk, "trainer.n_gpus_per_node=64", "local.allow_oversubscribe=false", says=says)


@pytest.mark.parametrize(("logger", "package"), [("tensorboard", "tensorboard"), ("wandb_offline", "wandb")])
def test_a_logger_without_its_package(desk, monkeypatch, logger, package):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(desk, f"trainer.logger=[console,{logger}]", says=(f"trainer.logger: {logger}", f"pip install {package}"))


# -- model and tokenizer


def set_config(**changes: object) -> Mutation:
    def mutate(folder: Path) -> None:
        file = folder / "model" / "config.json"
        values = json.loads(file.read_text(encoding="utf-8")) | changes
        file.write_text(json.dumps({k: v for k, v in values.items() if v is not None}), encoding="utf-8")

    return mutate


def remove(name: str) -> Mutation:
    return lambda folder: (folder / name).unlink()


def change_tensors(change: Callable[[dict], dict]) -> Mutation:
    def mutate(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        file = folder / "model" / "model.safetensors"
        save_file(change(load_file(file)), file)

    return mutate


def as_int8(tensors: dict) -> dict:
    import torch

    return {name: tensor.to(torch.int8) for name, tensor in tensors.items()}


def grow_tokenizer(folder: Path) -> None:
    """The digit 7 gets an id that the model does not have."""
    file = folder / "model" / "tokenizer.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    values["model"]["vocab"]["7"] = 4711
    file.write_text(json.dumps(values), encoding="utf-8")


def drop_chat_template(folder: Path) -> None:
    file = folder / "model" / "tokenizer_config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    del values["chat_template"]
    file.write_text(json.dumps(values), encoding="utf-8")


MODELS: dict[str, tuple[Mutation, tuple[str, ...]]] = {
    "no folder": (lambda folder: shutil.rmtree(folder / "model"), ("model.path", "does not exist", "hub")),
    "no config": (remove("model/config.json"), ("has no config.json",)),
    "no weights": (remove("model/model.safetensors"), ("has no *.safetensors",)),
    "cut weights": (lambda folder: os.truncate(folder / "model/model.safetensors", 5000), ("has 5000 bytes instead",)),
    "cut header": (lambda folder: os.truncate(folder / "model/model.safetensors", 20), ("is damaged",)),
    "no json": (lambda folder: (folder / "model/config.json").write_text("{"), ("config.json is damaged",)),
    "architecture": (set_config(model_type="mamba"), ("'mamba' is not supported", "qwen3")),
    "size missing": (set_config(hidden_size=None), ("'hidden_size' is missing",)),
    "size is text": (set_config(hidden_size="big"), ("wrong type",)),
    "no heads": (set_config(num_attention_heads=0, head_dim=None), ("config.json", "num_attention_heads is 0")),
    "rope is text": (set_config(rope_parameters="linear"), ("config.json: a value has the wrong type",)),
    "eos is text": (set_config(eos_token_id="end"), ("config.json", "wrong type")),
    "more layers": (set_config(num_hidden_layers=9), ("lack model.layers.", "num_hidden_layers?")),
    "fewer layers": (set_config(num_hidden_layers=1), ("model.layers.1.", "does not belong")),
    "vocabulary": (set_config(vocab_size=7), ("embed_tokens.weight has shape", "config.json says [7, 64]")),
    "wrong dtype": (change_tensors(as_int8), ("is stored as I8", "floating point")),
    "tensor missing": (
        change_tensors(lambda all_: {k: v for k, v in all_.items() if k != "model.norm.weight"}),
        ("lack model.norm.weight",),
    ),
    "no tokenizer": (remove("model/tokenizer.json"), ("has no tokenizer.json",)),
    "tokenizer damaged": (lambda folder: (folder / "model/tokenizer.json").write_text("{}"), ("is damaged",)),
    "tokenizer of another model": (grow_tokenizer, ("gives token 4711", "do not belong together")),
    "no chat template": (drop_chat_template, ("has no chat template", "chat_template.jinja")),
}


@pytest.mark.parametrize("name", MODELS)
def test_model_folders_that_cannot_be_used(desk, name):
    mutate, says = MODELS[name]
    mutate(desk.folder)
    refused(desk, says=says)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False},
        {"qk_norm": False, "attention_bias": True},
        {"qk_norm": False, "attention_bias": True, "attention_out_bias": True},
        {"attention_bias": True, "attention_out_bias": True},
    ],
)
def test_the_expected_tensors_are_those_of_the_module(tmp_path, changes):
    config = ModelConfig(13, 16, 24, 2, 4, 2, 8, **changes)
    model = empty_model(config)
    assert {spec.name: spec.shape for spec in weight_specs(model)} == weight_shapes(config)
    save_hf(model, tmp_path)
    assert weight_shapes(config) == weight_shapes(check_model(tmp_path))


# -- data


def row(content: object = "count on from 1", **changes: object) -> str:
    return json.dumps({**GOOD_ROW, "prompt": [{"role": "user", "content": content}], **changes}) + "\n"


DATA: dict[str, tuple[bytes, tuple[str, ...], tuple[str, ...]]] = {
    "empty": (b"", (), ("t.jsonl is empty",)),
    "blank": (b"\n \n", (), ("has no rows",)),
    "malformed": (row().encode() + b"{bad\n", (), ("t.jsonl:2: not JSON", "data.max_malformed_fraction")),
    "none usable": (b'{"a": 1}\n', ("data.max_malformed_fraction=1.0",), ("no usable row", "t.jsonl:1:")),
    "latin1": (row("x").encode() + '{"prompt": "\u00e9"}'.encode("latin1"), (), ("t.jsonl:2: not UTF-8", "iconv")),
    "utf16": (row().encode("utf-16"), (), ("UTF-16", "iconv")),
    "half a pair": (row("\ud800").encode(), (), ("t.jsonl:1: prompt[0].content", "surrogate", "\\ud800")),
    "half a pair as answer": (
        row(reward_model={"ground_truth": "\ud800"}).encode(),
        (),
        ("t.jsonl:1: 'reward_model.ground_truth'", "surrogates"),
    ),
    "content is a number": (row(3).encode(), (), ("prompt[0].content should be text",)),
    "all too long": (row("1" * 99).encode(), (), ("t.jsonl:1: the prompt has", "Raise data.max_prompt_length")),
    "all filtered": (
        row("1" * 99).encode(),
        ("data.filter_overlong_prompts=true",),
        ("no prompt left", "data.max_prompt_length = 16"),
    ),
    "other column": (row().encode(), ("data.prompt_key=question",), ("'question' (data.prompt_key)",)),
}


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("name", DATA)
def test_data_files_that_cannot_be_used(desk, name, split):
    content, overrides, says = DATA[name]
    if name == "other column" and split == "val":
        says = ("has no column 'question'",)  # the training file is read first
    (desk.folder / "data" / "t.jsonl").write_bytes(content)
    refused(desk, f"data.{split}_files=[data/t.jsonl]", *overrides, says=says)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nope.jsonl", "nope.jsonl does not exist"),
        ("data", "data is a folder"),
        ("t.json", "neither .jsonl nor .parquet"),
        ("t.csv", "neither .jsonl nor .parquet"),
        ("cut.parquet", "not a complete parquet file"),
        ("junk.parquet", "not a readable parquet file"),
    ],
)
def test_files_that_are_no_data(desk, name, says):
    for made in ("t.json", "t.csv"):
        (desk.folder / made).write_text(row(), encoding="utf-8")
    (desk.folder / "cut.parquet").write_bytes((desk.folder / "data" / "train.parquet").read_bytes()[:-100])
    (desk.folder / "junk.parquet").write_bytes(b"PAR1" + b"x" * 50 + b"PAR1")
    refused(desk, f"data.train_files=[{name}]", says=(says, name))


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson"])
def test_every_spelling_the_reader_knows_passes_the_check_of_paths(desk, suffix):
    (desk.folder / f"t{suffix}").write_text(row(), encoding="utf-8")
    code, err = desk.run(f"data.train_files=[t{suffix}]")
    assert (0, 1) == (code, desk.started), err


# -- reward function and policy

REWARDS = {
    "def f(:\n": "r.py:1: invalid syntax",
    "import nosuchmodule\n": "No module named 'nosuchmodule'",
    "raise RuntimeError('boom [b]')\n": "r.py:1: boom [b]",
    "import sys; sys.exit(3)\n": "ends with SystemExit",
    "def g(): pass\n": "r.py has no 'f'",
    "def f(x): return 1\n": "does not take the call it gets",
    "f = 3\n": "is int, not a function",
    "async def f(**k): return 1\n": "is async",
    "": "r.py is empty",
}


@pytest.mark.parametrize("code", REWARDS)
def test_reward_functions_that_do_not_import(desk, code):
    (desk.folder / "r.py").write_text(code, encoding="utf-8")
    refused(desk, "reward.function=r.py:f", says=("reward.function", REWARDS[code]))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("count_onn", "Did you mean 'count_on'?"),
        ("nosuch.module:f", "there is no module 'nosuch.module'"),
        ("r.py:f", "r.py does not exist"),
        ("r.py:", "is incomplete"),
    ],
)
def test_reward_names_that_lead_nowhere(desk, name, says):
    if name == "r.py:":
        (desk.folder / "r.py").write_text("x = 1\n", encoding="utf-8")
    refused(desk, f"reward.function='{name}'", says=("reward.function", says))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("p.py", "x =\n", "p.py:1: not valid Python"),
        ("p.py", "x = 1\n", "must define one policy"),
        ("p.py", "raise OSError('hi')\n", "cannot be imported: OSError: hi"),
        ("p.yaml", "- 1\n", "a policy file is a mapping"),
        ("gone.py", None, "gone.py does not exist"),
        ("defualt", None, "did you mean 'default'?"),
    ],
)
def test_policies_that_do_not_load(desk, name, content, says):
    if content is not None:
        (desk.folder / name).write_text(content, encoding="utf-8")
    refused(desk, f"async_training.dynamic_schedule_policy={name}", says=(says,))


# -- run folder


def test_a_run_folder_that_is_a_file(desk):
    (desk.folder / "run").write_text("x", encoding="utf-8")
    refused(desk, says=("run: is not a folder",))
    assert "x" == (desk.folder / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("flags", [(), ("--force",), ("--resume",)])
def test_a_folder_that_is_not_ours_is_left_alone(desk, flags):
    (desk.folder / "run").mkdir()
    (desk.folder / "run" / "thesis.tex").write_text("years of work", encoding="utf-8")
    refused(desk, flags=flags, says=(str(desk.folder / "run"),))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "run.json: is damaged"),
        ("[]", "has no run_id"),
        ('{"run_id": 3}', "has no run_id"),
        ('{"run_id": "x-1", "format": 99, "hybridsched": "9.9"}', "use the version that made it (9.9)"),
    ],
)
def test_a_run_json_that_cannot_be_used(desk, content, says):
    (desk.folder / "run").mkdir()
    (desk.folder / "run" / "run.json").write_text(content, encoding="utf-8")
    refused(desk, flags=("--resume",), says=(says,))
    refused(desk, says=(says,))


def test_resume_where_there_is_nothing(desk):
    refused(desk, flags=("--resume",), says=("there is no run to resume", "without --resume"))


def test_a_disk_that_is_full_at_the_start_leaves_no_folder(desk, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hybridsched.runtime.prepare.save_resolved", full)
    refused(desk, says=("cannot be written: No space left on device", "make room"))
    monkeypatch.undo()


def test_a_run_that_is_going_on_is_neither_resumed_nor_replaced(desk):
    assert 0 == desk.run()[0]
    fence = OwnerFence.claim(desk.folder / "run", identity_of_this_process())
    before = desk.files()
    for flag in ("--resume", "--force"):
        code, err = desk.run("trainer.total_training_steps=7", flags=(flag,))
        assert (3, 1) == (code, desk.started), err
        assert f"process {os.getpid()}" in err
        assert before == desk.files()
    fence.release()
    assert (0, 2) == (desk.run(flags=("--resume",))[0], desk.started)


# -- resume


def test_a_resume_may_change_what_does_not_change_the_samples(desk):
    assert 0 == desk.run()[0]
    code, err = desk.run("trainer.total_training_steps=99", "reward.function=exact_match", flags=("--resume",))
    assert (0, 2) == (code, desk.started), err


def test_a_resume_with_moved_but_equal_data_goes_on(desk):
    assert 0 == desk.run()[0]
    (desk.folder / "data" / "train.parquet").rename(desk.folder / "moved.parquet")
    code, err = desk.run("data.train_files=[moved.parquet]", flags=("--resume",))
    assert (0, 2) == (code, desk.started), err


def test_a_resume_with_other_prompts_is_refused(desk):
    (desk.folder / "t.jsonl").write_text(row() + row("count on from 2"), encoding="utf-8")
    assert 0 == desk.run("data.train_files=[t.jsonl]")[0]
    desk.started = 0
    (desk.folder / "t.jsonl").write_text(row("count on from 2") + row(), encoding="utf-8")
    says = ("data.train_files", "positions in the checkpoint would mean other prompts", "--force")
    refused(desk, "data.train_files=[t.jsonl]", flags=("--resume",), says=says)


def test_a_resume_with_another_model_is_refused(desk):
    assert 0 == desk.run()[0]
    desk.started = 0
    set_config(rope_theta=77.0, rope_parameters=None)(desk.folder)
    refused(desk, flags=("--resume",), says=("model.path: config.json there describes another model",))


OTHERS = {
    "data.seed": "99",
    "data.shuffle": "false",
    "actor_rollout_ref.rollout.n": "4",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "8",
}


@pytest.mark.parametrize("key", OTHERS)
def test_a_resume_with_another_fixed_key_is_refused(desk, key):
    assert key in FIXED_KEYS
    assert 0 == desk.run()[0]
    desk.started = 0
    refused(desk, f"{key}={OTHERS[key]}", flags=("--resume",), says=(f"{key} was ", FIXED_KEYS[key]))


def test_a_resume_that_emulates_is_refused(desk):
    assert 0 == desk.run()[0]
    desk.started = 0
    overrides = ("actor_rollout_ref.actor.strategy=emulated", "actor_rollout_ref.rollout.name=emulated")
    refused(desk, *overrides, flags=("--resume",), says=("strategy was 'torch'", "name was 'torch'"))


# -- looking at what is no run


@pytest.mark.parametrize("folder", ["nowhere", "data", "run.yaml"])
@pytest.mark.parametrize(
    "command",
    [
        ("report", "{}"),
        ("report", "{}", "--json"),
        ("explain", "{}", "run"),
        ("status", "{}"),
        ("queue", "ls", "{}"),
        ("queue", "head", "{}"),
        ("queue", "stat", "{}"),
        ("queue", "fsck", "{}"),
        ("compare", "{}", "{}"),
    ],
)
def test_commands_that_look_at_a_folder_that_is_no_run(desk, command, folder):
    before = sorted(desk.folder.rglob("*"))
    code, err = desk.call(*(part.format(folder) for part in command))
    assert 2 == code, err
    assert folder in err
    assert "Traceback" not in err
    assert before == sorted(desk.folder.rglob("*"))
