"""run.yaml -> RunConfig: dialect, layers, messages with file, line, key and cure, and the way back to YAML."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridsched.config import RunConfig, load_config, render_template, resolved_yaml, save_resolved
from hybridsched.config.keys import all_keys, literal_values, suggest
from hybridsched.config.peer_keys import REFUSED_KEYS, REFUSED_VALUES
from hybridsched.config.yaml_source import dump_yaml, inline_yaml, parse_value, parse_yaml
from hybridsched.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
EMULATED = {"actor_rollout_ref": {"actor": {"strategy": "emulated"}, "rollout": {"name": "emulated"}}}


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "run.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refused(path: Path | None, *overrides: str) -> list[str]:
    """The lines of the error message, without numbering and without the folder of the file."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, base=EMULATED)
    message = str(caught.value)
    if path is not None:
        message = message.replace(f"{path.parent}/", "")
    lines = message.splitlines()
    if len(lines) == 1:
        return lines
    assert lines[0] == f"{len(lines) - 1} problems in the configuration:"
    return [line.split(". ", 1)[1] for line in lines[1:]]


def refused_text(folder: Path, text: str | bytes, *overrides: str) -> list[str]:
    return refused(write(folder, text), *overrides)


# --- layers -----------------------------------------------------------------------------------------------------------


def test_file_lies_over_base_and_overrides_over_the_file(tmp_path: Path) -> None:
    base = {**EMULATED, "trainer": {"nnodes": 2, "total_epochs": 5, "seed": 7}}
    path = write(tmp_path, "trainer:\n  total_epochs: 6\n  seed: 8\n")
    config = load_config(path, ["trainer.seed=9"], base=base)
    assert (2, 6, 9) == (config.trainer.nnodes, config.trainer.total_epochs, config.trainer.seed)


def test_nothing_but_base_gives_the_defaults() -> None:
    assert RunConfig.model_validate(EMULATED) == load_config(None, base=EMULATED)


def test_base_is_not_changed(tmp_path: Path) -> None:
    base: dict[str, Any] = {**EMULATED, "reward": {"kwargs": {"a": [1]}}}
    config = load_config(None, ["reward.kwargs.b=2"], base=base)
    assert {"a": [1], "b": 2} == config.reward.kwargs
    assert {"a": [1]} == base["reward"]["kwargs"]


def test_configuration_is_frozen() -> None:
    config = load_config(None, base=EMULATED)
    with pytest.raises(Exception, match="frozen"):
        config.trainer.nnodes = 3  # type: ignore[misc]


def test_section_with_all_keys_commented_out_is_empty(tmp_path: Path) -> None:
    assert load_config(None, base=EMULATED) == load_config(write(tmp_path, "data:\ntrainer:\n"), base=EMULATED)


def test_empty_file_and_comments_only_give_the_defaults(tmp_path: Path) -> None:
    for text in ("", "\n\n", "# nothing yet\n"):
        assert load_config(None, base=EMULATED) == load_config(write(tmp_path, text), base=EMULATED)


def test_override_values_are_yaml() -> None:
    overrides = ["trainer.logger=[console, tensorboard]", "reward.kwargs={scale: 0.5}", "reward.kwargs.deep.er=x"]
    overrides += ["actor_rollout_ref.actor.optim.lr=1e-4", "weight_sync.verify=off", "rollout.total_rollout_steps=null"]
    config = load_config(None, overrides, base=EMULATED)
    assert ["console", "tensorboard"] == config.trainer.logger
    assert {"scale": 0.5, "deep": {"er": "x"}} == config.reward.kwargs
    assert 1e-4 == config.actor_rollout_ref.actor.optim.lr
    assert "off" == config.weight_sync.verify
    assert config.rollout.total_rollout_steps is None


def test_override_of_a_section_is_merged_into_it() -> None:
    config = load_config(None, ["trainer={seed: 4}"], base={**EMULATED, "trainer": {"nnodes": 2}})
    assert (4, 2) == (config.trainer.seed, config.trainer.nnodes)


def test_override_value_may_contain_equals_signs() -> None:
    assert "a=b" == load_config(None, ["trainer.experiment_name=a=b"], base=EMULATED).trainer.experiment_name


def test_one_data_file_needs_no_brackets() -> None:
    assert ["x.jsonl"] == load_config(None, ["data.train_files=x.jsonl"], base=EMULATED).data.train_files


def test_aliases_and_merge_keys_work(tmp_path: Path) -> None:
    text = "trainer: &t\n  nnodes: 2\nrollout:\n  <<: *t\n  sync_mode: keep\n"
    config = load_config(write(tmp_path, text), base=EMULATED)
    assert (2, 2, "keep") == (config.trainer.nnodes, config.rollout.nnodes, config.rollout.sync_mode)


def test_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, b"\xef\xbb\xbftrainer: {seed: 3}\n"), base=EMULATED)
    assert 3 == config.trainer.seed


# --- the dialect ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("5E3", 5000.0),
        (".5", 0.5),
        ("-.inf", float("-inf")),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("1_000", 1000),
        ("true", True),
        ("~", None),
        ("off", "off"),
        ("no", "no"),
        ("24:00:00", "24:00:00"),
        ("2024-01-01", "2024-01-01"),
        ("1.2.3", "1.2.3"),
        ("'1'", "1"),
    ],
)
def test_plain_values_follow_yaml_1_2(text: str, value: object) -> None:
    parsed = parse_value(text)
    assert (type(value), value) == (type(parsed), parsed)


# --- files that cannot be read ----------------------------------------------------------------------------------------


def test_missing_file(tmp_path: Path) -> None:
    lines = refused(tmp_path / "run.yaml")
    assert ["run.yaml: no such file -> check the path, or make one with: hybridsched init NAME"] == lines


def test_folder_instead_of_file(tmp_path: Path) -> None:
    lines = refused(tmp_path)
    assert 1 == len(lines)
    assert "is a folder, not a file" in lines[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    path.chmod(0)
    assert "cannot be read (Permission denied)" in refused(path)[0]


def test_wrong_encoding_names_line_and_byte(tmp_path: Path) -> None:
    lines = refused_text(tmp_path, "trainer:\n  experiment_name: Köln\n".encode("latin1"))
    assert lines[0].startswith("run.yaml:2: is not UTF-8 (byte 0xf6) -> save it as UTF-8")


def test_utf16_is_recognised(tmp_path: Path) -> None:
    assert "run.yaml: is UTF-16" in refused_text(tmp_path, "trainer:\n".encode("utf-16"))[0]


def test_binary_file_is_refused_with_its_line(tmp_path: Path) -> None:
    lines = refused_text(tmp_path, b"trainer:\n  seed: \x01\n")
    assert ["run.yaml:2: has a control character (#x0001) -> remove it; is this a text file?"] == lines


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("- a\n- b\n", "run.yaml:1: must be a mapping of sections"),
        ("just text\n", "run.yaml:1: must be a mapping of sections"),
        ("trainer:\n\tseed: 1\n", "run.yaml:2: is indented with a tab -> indent with spaces"),
        ("trainer:\n  seed: [1\nx: 2\n", "run.yaml:3: is not valid YAML"),
        ("trainer: {}\n---\ntrainer: {}\n", "run.yaml:2: is not valid YAML"),
        (
            "reward: {kwargs: !!python/name:os.system x}\n",
            "run.yaml:1: reward.kwargs: has the tag !!python/name:os.system",
        ),
        ("reward: {kwargs: {1: a}}\n", "run.yaml:1: reward.kwargs: has the key 1, which is not text -> quote it"),
        ("reward: {kwargs: &a {x: *a}}\n", "run.yaml:1: reward.kwargs.x: contains itself"),
        ('trainer: {experiment_name: "\\ud800"}\n', "run.yaml:1: trainer.experiment_name: contains half a character"),
        ("trainer: {seed: " + "9" * 5000 + "}\n", "run.yaml: has a number that cannot be read"),
        ("[" * 5000, "run.yaml: is nested too deeply"),
    ],
)
def test_what_is_no_mapping_of_plain_values_is_refused(tmp_path: Path, text: str, start: str) -> None:
    line = refused_text(tmp_path, text)[0]
    assert start == line[: len(start)]


def test_multiplying_aliases_are_refused(tmp_path: Path) -> None:
    levels = ["a0: &a0 [x,x,x,x,x,x,x,x,x,x]"] + [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 7)]
    assert "too many values" in refused_text(tmp_path, "\n".join(levels))[0]


def test_duplicate_keys_are_all_reported_with_both_lines(tmp_path: Path) -> None:
    lines = refused_text(tmp_path, "trainer:\n  seed: 1\n  nnodes: 1\n  seed: 2\ndata: {}\ntrainer: {}\n")
    assert [
        "run.yaml:4: trainer.seed: is written twice (first on line 2) -> keep one of the two",
        "run.yaml:6: trainer: is written twice (first on line 1) -> keep one of the two",
    ] == lines


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("async_training.stalenes_threshold", "did you mean async_training.staleness_threshold?"),
        ("asynch_training", "did you mean async_training?"),
        ("actor_rollout_ref.rollout.ppo_mini_batch_size", "did you mean actor_rollout_ref.actor.ppo_mini_batch_size?"),
        ("ppo_mini_batchsize", "did you mean actor_rollout_ref.actor.ppo_mini_batch_size?"),
        ("actor", "did you mean actor_rollout_ref.actor?"),
        ("trainer.temperature", "did you mean actor_rollout_ref.rollout.temperature or"),
        ("runlog.zzzzz", "keys of runlog: flush_s, rows_per_file"),
        ("nowhere.zzzzz", "see: hybridsched config"),
    ],
)
def test_unknown_keys_get_the_nearest_right_name(path: str, advice: str) -> None:
    assert advice in suggest(tuple(path.split(".")))


def test_all_problems_of_file_and_overrides_are_told_at_once_in_order(tmp_path: Path) -> None:
    text = "trainer:\n  nnodes: 0\n  critic_warmup: 1\n  loger: [console]\nweight_sync: {verify: cheksum}\n"
    lines = refused_text(tmp_path, text, "queue.seal_bytes=0", "runlog.flush=1")
    assert [
        "run.yaml:2: trainer.nnodes: is a number (0) -> it must be int >= 1",
        "run.yaml:3: trainer.critic_warmup: is a key of the peer that is not honoured here -> there is no critic: "
        "algorithm.adv_estimator grpo, rloo or reinforce_plus_plus needs none; remove it",
        "run.yaml:4: trainer.loger: unknown key -> did you mean trainer.logger?",
        "run.yaml:5: weight_sync.verify: is text (cheksum) -> did you mean checksum? it must be one of off, checksum, "
        "probe",
        "override 'queue.seal_bytes=0': queue.seal_bytes: is a number (0) -> it must be int >= 1",
        "override 'runlog.flush=1': runlog.flush: unknown key -> did you mean runlog.flush_s?",
    ] == lines


def test_several_line_values_keep_their_own_lines(tmp_path: Path) -> None:
    lines = refused_text(tmp_path, "trainer:\n  logger:\n  - console\n  - wandb\n")
    assert lines[0].startswith("run.yaml:4: trainer.logger.1: wandb is not available here -> use wandb_offline")


@pytest.mark.parametrize(
    ("key", "cure"),
    [
        ("critic.optim.lr", "there is no critic"),
        ("reward_model.enable", "score with reward.function"),
        ("reward_model.overlong_buffer.enable", "use reward.overlong_buffer"),
        ("actor_rollout_ref.model.lora_rank", "LoRA is not available yet"),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size", "megatron.context_parallel_size"),
        ("actor_rollout_ref.actor.fsdp_config.param_offload", "strategy: megatron"),
        ("algorithm.kl_ctrl.kl_coef", "actor_rollout_ref.actor.use_kl_loss"),
        ("algorithm.use_kl_in_reward", "actor_rollout_ref.actor.use_kl_loss"),
        ("actor_rollout_ref.rollout.mode", "always asynchronous"),
        ("data.image_key", "only text prompts"),
        ("trainer.esi_redundant_time", "slurm.signal_before_end_s"),
        ("rollout.n", "use actor_rollout_ref.rollout.n"),
        ("rollout.test_freq", "use trainer.test_freq"),
        ("async_training.compute_prox_log_prob", "bypass_mode: false"),
    ],
)
def test_keys_of_the_peer_are_refused_with_what_to_use(key: str, cure: str) -> None:
    (line,) = refused(None, f"{key}=1")
    named = line.split(": ")[1]
    assert key == named or key.startswith(f"{named}.")
    assert "is a key of the peer that is not honoured here" in line
    assert cure in line


def test_tables_of_the_peer_do_not_shadow_the_schema_and_end_in_plain_sentences() -> None:
    names = {pattern.removesuffix(".*") for pattern in REFUSED_KEYS}
    assert set() == names & set(all_keys())
    for key, value in REFUSED_VALUES:
        assert key in all_keys()
        assert value not in literal_values(all_keys()[key])
    for sentence in [*REFUSED_KEYS.values(), *REFUSED_VALUES.values()]:
        assert sentence == sentence.strip()


def test_every_key_that_a_refusal_recommends_exists() -> None:
    sections = {name.split(".")[0] for name in all_keys()}
    for sentence in [*REFUSED_KEYS.values(), *REFUSED_VALUES.values()]:
        for word in sentence.replace(",", " ").replace(":", " ").replace(";", " ").replace("(", " ").split():
            parts = word.strip(".)").split(".")
            if len(parts) > 1 and parts[0] in sections:
                assert ".".join(parts) in all_keys(), sentence


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("trainer.seed", "is not key=value"),
        ("=3", "is not key=value"),
        ("trainer..seed=3", "empty part between dots"),
        ("+trainer.seed=3", "leave out '+'"),
        ("~trainer.seed=3", "leave out '~'"),
        ("trainer.seed=", "has no value"),
        ("trainer.seed=[1", "is not valid YAML"),
        ("data.train_files.0=x", "give the whole value: data.train_files=..."),
        ("trainer.seed.x=1", "trainer.seed is int, it has no keys"),
        ("reward.kwargs.a.b=1", "reward.kwargs.a is a number (3), it has no keys"),
        ("trainer=3", "trainer: is a section, but has a number (3)"),
        ("trainer.nnodes=true", "is a boolean (true) -> write a number: int >= 1"),
        ("trainer.nnodes=1.5", "is a number (1.5) -> it must be int >= 1"),
        ("async_training.staleness_threshold=.inf", "must be float >= 0"),
        ("async_training.staleness_threshold=.nan", "must be float >= 0"),
        ("trainer.experiment_name=42", 'is a number (42), but must be text -> quote it: "42"'),
        ("actor_rollout_ref.actor.strategy=fsdp", "use torch (data-parallel) or megatron (sharded)"),
        ("algorithm.adv_estimator=gae", "gae needs a critic"),
        ("data.gen_batch_size=4", "it must be always 1"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=0", "it must be int >= 1"),
        ("actor_rollout_ref.actor.optim.betas=[0.9]", "it must be list of 2 x float"),
    ],
)
def test_bad_overrides_are_refused(override: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override], base={**EMULATED, "reward": {"kwargs": {"a": 3}}})
    assert part in str(caught.value)
    assert f"override {override!r}" in str(caught.value)


def test_an_override_takes_the_blame_from_the_line_it_replaces(tmp_path: Path) -> None:
    path = write(tmp_path, "trainer: {logger: [console]}\n")
    (line,) = refused(path, "trainer.logger=[wandb]")
    assert line.startswith("override 'trainer.logger=[wandb]': trainer.logger.0:")


def test_relations_are_reported_at_the_line_that_causes_them(tmp_path: Path) -> None:
    (line,) = refused_text(tmp_path, "data: {}\nactor_rollout_ref:\n  rollout:\n    n: 1\n")
    assert line.startswith("run.yaml:4: algorithm.adv_estimator: grpo compares the responses of one prompt")


# --- back to YAML -----------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [
        "off",
        "no",
        "1e5",
        "24:00:00",
        "0o7",
        "0x1f",
        "~",
        "",
        " ",
        "null",
        "1_0",
        ".5",
        ".nan",
        "<<",
        "=",
        "2024-01-01",
        "#",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(TEXT, JSON, max_size=4))
def test_yaml_written_is_yaml_read(values: dict[str, Any]) -> None:
    assert (values, values) == (parse_yaml(dump_yaml(values), "x")[0], parse_value(inline_yaml(values)))


@given(
    kwargs=st.dictionaries(TEXT, JSON, max_size=3),
    files=st.lists(TEXT, max_size=3),
    folder=st.none() | TEXT.filter(lambda text: text.strip()),
    name=TEXT.filter(lambda text: text.strip() and text.isprintable() and text not in (".", "..") and "/" not in text),
    lr=st.floats(min_value=1e-12, max_value=10, exclude_min=True),
    staleness=st.floats(min_value=0, max_value=8),
    seed=st.integers(),
    steps=st.none() | st.integers(1, 10**12),
    n=st.integers(2, 64),
)
@settings(max_examples=40, deadline=None)
def test_resolved_yaml_loads_to_an_equal_configuration(
    tmp_path_factory: pytest.TempPathFactory,
    kwargs: dict[str, Any],
    files: list[str],
    folder: str | None,
    name: str,
    lr: float,
    staleness: float,
    seed: int,
    steps: int | None,
    n: int,
) -> None:
    config = RunConfig.model_validate(
        {
            "data": {"train_files": files},
            "reward": {"kwargs": kwargs},
            "trainer": {
                "experiment_name": name,
                "default_local_dir": folder,
                "seed": seed,
                "total_training_steps": steps,
            },
            "async_training": {"staleness_threshold": staleness},
            "actor_rollout_ref": {
                "actor": {"strategy": "emulated", "optim": {"lr": lr}},
                "rollout": {"name": "emulated", "n": n},
            },
        }
    )
    path = tmp_path_factory.getbasetemp() / "resolved.yaml"
    save_resolved(config, path)
    assert config == load_config(path)


def test_resolved_file_names_every_key_and_shows_derived_values_as_comments(tmp_path: Path) -> None:
    text = resolved_yaml(load_config(None, base=EMULATED))
    values = parse_yaml(text, "x")[0]
    for key in all_keys().values():
        inner: Any = values
        for part in key.path:
            inner = inner[part]
    assert "# sync cycle S             64 samples" in text


def test_failed_save_leaves_the_old_file_and_no_temporary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "resolved.yaml"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_resolved(load_config(None, base=EMULATED), path)
    assert ["resolved.yaml"] == [entry.name for entry in tmp_path.iterdir()]
    assert "old" == path.read_text()


# --- the repository ---------------------------------------------------------------------------------------------------


def run_yaml_files(root: Path) -> list[Path]:
    """Configurations of runs in the repository: every run*.yaml, and every YAML directly in templates/."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in ("runs", "shared")]
        in_templates = Path(folder) == root / "templates"
        for name in names:
            if name.endswith((".yaml", ".yml")) and (name.startswith("run") or in_templates):
                found.append(Path(folder) / name)
    return sorted(found)


def test_every_run_configuration_in_the_repository_loads(tmp_path: Path) -> None:
    (tmp_path / "run-template.yaml").write_text(
        render_template({"actor_rollout_ref.rollout.name": "emulated", "actor_rollout_ref.actor.strategy": "emulated"})
    )
    files = run_yaml_files(tmp_path) + run_yaml_files(REPOSITORY)
    assert tmp_path / "run-template.yaml" in files
    failures: dict[str, str] = {}
    for path in files:
        try:
            load_config(path)
        except ConfigError as error:
            failures[str(path)] = str(error)
    assert {} == failures


def test_importing_the_configuration_costs_no_heavy_library() -> None:
    script = "import sys, hybridsched.config; print(sorted({'torch', 'h5py', 'numpy', 'pyarrow'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "[]" == done.stdout.strip()
