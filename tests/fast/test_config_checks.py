"""Cross-checks: each impossible combination is refused with its keys and cure, each sensible neighbour is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridsched.config import (
    RunConfig,
    check,
    check_cores,
    check_paths,
    load_config,
    not_available,
    notes,
    render_docs,
    render_template,
)
from hybridsched.config.keys import all_keys
from hybridsched.errors import ConfigError

EMULATED = {"actor_rollout_ref.actor.strategy": "emulated", "actor_rollout_ref.rollout.name": "emulated"}
REAL = {"actor_rollout_ref.model.path": "m", "data.train_files": ["x.jsonl"]}
MEGATRON = REAL | {"actor_rollout_ref.actor.strategy": "megatron", "trainer.n_gpus_per_node": 8}
ACTOR, ROLLOUT, SIZES = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.actor.megatron"


def build(*layers: dict[str, Any]) -> RunConfig:
    """A configuration from dotted keys, without cross-checks."""
    values: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            *sections, name = key.split(".")
            inner = values
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[name] = value
    return RunConfig.model_validate(values)


GOOD: list[dict[str, Any]] = [
    {},
    {f"{ROLLOUT}.n": 1, "algorithm.adv_estimator": "reinforce_plus_plus"},
    {f"{ROLLOUT}.top_p": 0.9, f"{ROLLOUT}.top_k": 5, f"{ROLLOUT}.min_p": 0.1, f"{ROLLOUT}.allow_biased_logprobs": True},
    {"rollout.nnodes": 0},
    {"rollout.nnodes": 0, "async_training.use_dynamic_resource_scheduling": True},
    {"rollout.nnodes": 0, "async_training.use_trainer_do_validate": True},
    {f"{ACTOR}.clip_ratio_low": 0.2, f"{ACTOR}.clip_ratio_high": 0.28},
    {f"{ROLLOUT}.tensor_model_parallel_size": 4, "rollout.n_gpus_per_node": 8, "trainer.n_gpus_per_node": 3},
    {"async_training.max_off_policy_strategy": "wait", "async_training.max_off_policy_threshold": 2},
    {"async_training.partial_rollout": False},
    {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "x"},
    {"queue.min_free_bytes": 0},
    {"launcher": "slurm", "slurm.time": "2-12:00:00"},
]

BAD: list[tuple[dict[str, Any], str]] = [
    ({f"{ROLLOUT}.n": 1}, "use reinforce_plus_plus"),
    ({f"{ROLLOUT}.n": 1, "algorithm.adv_estimator": "rloo"}, "use reinforce_plus_plus"),
    ({f"{ROLLOUT}.top_p": 0.9}, "allow_biased_logprobs: true"),
    ({f"{ROLLOUT}.top_k": 50}, "set it to -1"),
    ({f"{ROLLOUT}.min_p": 0.1}, "set it to 0.0"),
    ({f"{ROLLOUT}.top_k": 0}, "use -1 for off"),
    ({f"{ROLLOUT}.val_kwargs.top_k": 0}, "use -1 for off"),
    ({f"{ACTOR}.clip_ratio_low": 0.3, f"{ACTOR}.clip_ratio_high": 0.2}, "clip_ratio_low <= clip_ratio_high"),
    ({f"{ACTOR}.clip_ratio_high": 0.1}, "clip_ratio_low <= clip_ratio_high"),
    ({f"{ACTOR}.clip_ratio_low": 1.5, f"{ACTOR}.clip_ratio_high": 2}, "at most 1"),
    ({f"{ACTOR}.optim.betas": [0.9, 1.0]}, "outside [0, 1)"),
    ({f"{ROLLOUT}.tensor_model_parallel_size": 4, "rollout.n_gpus_per_node": 6}, "6 GPUs per rollout node"),
    (
        {
            f"{ROLLOUT}.tensor_model_parallel_size": 2,
            "rollout.n_gpus_per_node": 2,
            "trainer.n_gpus_per_node": 3,
            "async_training.use_dynamic_resource_scheduling": True,
        },
        "3 GPUs per trainer node",
    ),
    ({"reward.min_responses": 9}, "needs 9 good responses, but a sample has only 8"),
    ({"reward.min_responses": 1}, "grpo cannot use a sample with one good response"),
    ({"reward.overlong_buffer.enable": True}, "set it between 1 and data.max_response_length"),
    ({"reward.overlong_buffer.enable": True, "reward.overlong_buffer.len": 513}, "the response budget is 512"),
    ({"queue.seal_bytes": 1 << 30}, "at least queue.seal_bytes"),
    ({"queue.seal_age_s": 4000}, "deadlines.collect_s"),
    ({"async_training.max_off_policy_strategy": "wait"}, "set async_training.max_off_policy_threshold"),
    ({"async_training.partial_rollout": False, "rollout.sync_mode": "keep"}, "rollout.sync_mode: wait"),
    ({"async_training.use_trainer_do_validate": True}, "use_dynamic_resource_scheduling: true"),
    ({"trainer.n_gpus_per_node": 4, "rollout.total_rollout_steps": 3}, "nothing would be trained"),
    ({"trainer.resume_mode": "resume_path"}, "name the checkpoint folder"),
    ({"trainer.resume_from_path": "x"}, "set trainer.resume_mode: resume_path"),
    ({"trainer.experiment_name": "a/b"}, "cannot name a folder"),
    ({"trainer.experiment_name": ".."}, "cannot name a folder"),
    ({"trainer.default_local_dir": " "}, "is empty"),
    ({"launcher": "slurm", "slurm.time": "one day"}, "is not a time limit"),
    ({"deadlines.bucket_s": 400}, "set bucket_s <= sync_s"),
    ({"emulated.wake_s": 500}, "raise deadlines.switch_s"),
    ({"local.cores": [0, 0]}, "distinct core numbers"),
    ({"local.cores": []}, "distinct core numbers"),
    ({"weight_sync.backend": "nccl", "trainer.device": "cpu"}, "nccl needs CUDA devices"),
    ({"weight_sync.verify": "probe", f"{ROLLOUT}.dtype": "bfloat16"}, "cannot be met"),
    ({f"{ROLLOUT}.dtype": "float16"}, "float16 cannot hold every value"),
    ({f"{ACTOR}.strategy": "torch"} | REAL, "emulate both or neither"),
    ({f"{ROLLOUT}.name": "torch"} | REAL, "emulate both or neither"),
    ({"algorithm.rollout_correction.rollout_rs_threshold_lower": 5}, "is not below the upper"),
    ({f"{ROLLOUT}.kv_cache_tokens": 100}, "cannot hold one sequence of 1024"),
]


@pytest.mark.parametrize("values", GOOD)
def test_sensible_configurations_pass(values: dict[str, Any]) -> None:
    assert [] == check(build(EMULATED, values))


@pytest.mark.parametrize(("values", "part"), BAD, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_impossible_configurations_are_refused_with_key_and_cure(values: dict[str, Any], part: str) -> None:
    (line,) = check(build(EMULATED, values))
    assert part in line
    key, _, rest = line.partition(": ")
    assert key in all_keys()
    assert " -> " in rest


def test_filtering_groups_of_one_is_refused() -> None:
    values = {
        f"{ROLLOUT}.n": 1,
        "algorithm.adv_estimator": "reinforce_plus_plus",
        "algorithm.filter_groups.enable": True,
    }
    (line,) = check(build(EMULATED, values))
    assert "all would be filtered" in line


def test_real_engines_need_model_and_data() -> None:
    lines = check(build())
    assert ["actor_rollout_ref.model.path", "data.train_files"] == [line.split(":")[0] for line in lines]
    assert [] == check(build(REAL))


def test_torch_engine_has_no_tensor_parallelism() -> None:
    (line,) = check(build(REAL, {f"{ROLLOUT}.tensor_model_parallel_size": 2, "rollout.n_gpus_per_node": 2}))
    assert "the torch engine uses one GPU per replica" in line


def test_vllm_memory_share_leaves_room() -> None:
    (line,) = check(build(REAL, {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.gpu_memory_utilization": 1.0}))
    assert "leaves no room" in line


@pytest.mark.parametrize(
    ("sizes", "n_problems"),
    [
        ({}, 0),
        ({"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}, 0),
        ({"tensor_model_parallel_size": 4, "expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1}, 0),
        ({"tensor_model_parallel_size": 3}, 2),  # also the default of ETP
        ({"tensor_model_parallel_size": 4, "context_parallel_size": 4}, 1),
        ({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 8}, 1),
    ],
)
def test_megatron_sizes_must_divide_the_trainer_gpus(sizes: dict[str, int], n_problems: int) -> None:
    config = build(MEGATRON, {f"{SIZES}.{name}": size for name, size in sizes.items()})
    assert n_problems == len(check(config))


def test_tensor_parallel_groups_must_fit_a_node() -> None:
    nodes = {"trainer.nnodes": 4, "trainer.n_gpus_per_node": 2, f"{SIZES}.tensor_model_parallel_size": 4}
    (line,) = check(build(MEGATRON, nodes, {f"{SIZES}.expert_tensor_parallel_size": 1}))
    assert "TP 4 does not fit into nodes of 2 GPUs" in line


def test_local_mode_needs_a_core_per_gpu() -> None:
    config = build(EMULATED, {"trainer.n_gpus_per_node": 2, "rollout.nnodes": 2, "rollout.n_gpus_per_node": 3})
    assert [] == check_cores(config, 8)
    (line,) = check_cores(config, 7)
    assert "asks for 2 + 6 GPUs" in line
    assert "local.allow_oversubscribe: true" in line
    assert [line] == check(config, available_cores=7)


def test_cores_are_not_counted_where_they_do_not_matter() -> None:
    many = EMULATED | {"trainer.n_gpus_per_node": 64}
    assert [] == check_cores(build(many, {"local.allow_oversubscribe": True}), 1)
    assert [] == check_cores(build(many, {"launcher": "slurm"}), 1)


def test_named_cores_are_the_ones_that_count() -> None:
    assert 1 == len(check_cores(build(EMULATED, {"local.cores": [3]}), 8))
    assert [] == check_cores(build(EMULATED, {"local.cores": [3, 5]}), 8)


def test_load_config_raises_all_cross_checks_together() -> None:
    overrides = [f"{key}={value}" for key, value in EMULATED.items()] + [f"{ROLLOUT}.n=1", f"{ROLLOUT}.top_p=0.5"]
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    lines = str(caught.value).splitlines()
    assert "2 problems in the configuration:" == lines[0]
    assert lines[1].startswith(f"  1. override '{ROLLOUT}.n=1': algorithm.adv_estimator: grpo compares")
    assert lines[2].startswith(f"  2. override '{ROLLOUT}.top_p=0.5': {ROLLOUT}.top_p: 0.5 samples")


def test_what_this_release_cannot_run_is_accepted_and_listed() -> None:
    config = build(MEGATRON, {f"{ROLLOUT}.name": "vllm", "launcher": "slurm", "rollout.agent": "m:f"})
    assert [] == check(config)
    told = "not available yet: rollout.agent=m:f; remove it: responses are single-turn"
    assert [told] == not_available(config)
    assert [] == not_available(build(EMULATED))


def test_settings_without_effect_are_noted_not_refused() -> None:
    assert [] == notes(build(EMULATED))
    values = {"async_training.partial_rollout": False, "rollout.kv_on_sync": "keep", "trainer.test_freq": 5}
    texts = notes(build(EMULATED, values))
    assert ["async_training.partial_rollout", "rollout.kv_on_sync", "trainer.test_freq"] == [
        text.split(":")[0].split(" ")[0] for text in texts
    ]


# --- files ------------------------------------------------------------------------------------------------------------


def safetensors(n_bytes: int = 16) -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [n_bytes // 4], "data_offsets": [0, n_bytes]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(n_bytes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete run input: model folder m, data x.jsonl."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    (tmp_path / "m" / "model.safetensors").write_bytes(safetensors())
    (tmp_path / "x.jsonl").write_text('{"prompt": "1"}\n')
    return tmp_path


def path_problems(folder: Path, **other: Any) -> list[str]:
    values = {"actor_rollout_ref.model.path": str(folder / "m"), "data.train_files": [str(folder / "x.jsonl")]}
    return [line.replace(f"{folder}/", "") for line in check_paths(build(values, other))]


def test_complete_inputs_have_no_path_problems(folder: Path) -> None:
    assert [] == path_problems(folder)
    assert [] == check_paths(build(EMULATED))


def test_missing_empty_and_foreign_data_files(folder: Path) -> None:
    (folder / "empty.jsonl").touch()
    (folder / "x.csv").write_text("a,b\n")
    (folder / "cut.parquet").write_bytes(b"PAR1" + bytes(20))
    names = ["no.jsonl", "empty.jsonl", "x.csv", "cut.parquet", "m"]
    lines = path_problems(folder, **{"data.val_files": [str(folder / name) for name in names]})
    expected = [
        "does not exist",
        "is empty",
        "neither .jsonl nor .parquet",
        "not a complete parquet file",
        "is a folder",
    ]
    assert len(expected) == len(lines)
    for name, part, line in zip(names, expected, lines, strict=True):
        assert line.startswith(f"data.val_files: {name} ")
        assert part in line


@pytest.mark.parametrize(
    ("file", "content", "part"),
    [
        ("config.json", None, "m has no config.json"),
        ("config.json", b"{", "config.json is damaged"),
        ("config.json", b"[]", "config.json is damaged"),
        ("tokenizer.json", None, "m has no tokenizer.json"),
        ("model.safetensors", None, "has no *.safetensors"),
        ("model.safetensors", safetensors()[:-1], "bytes instead of"),
        ("model.safetensors", b"\xff" * 20, "is damaged"),
        ("model.safetensors", b"abc", "is damaged"),
        ("model.safetensors", (2).to_bytes(8, "little") + b"[]", "unreadable header"),
    ],
)
def test_damaged_model_folders(folder: Path, file: str, content: bytes | None, part: str) -> None:
    path = folder / "m" / file
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    (line,) = path_problems(folder)
    assert part in line


def test_sharded_model_with_a_missing_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "second.safetensors"}}
    (folder / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    (line,) = path_problems(folder)
    assert "second.safetensors is missing" in line


def test_missing_policy_reward_resume_and_tokenizer(folder: Path) -> None:
    values = {
        "actor_rollout_ref.model.tokenizer_path": str(folder / "t"),
        "async_training.dynamic_schedule_policy": str(folder / "p.yaml"),
        "reward.function": f"{folder}/r.py:score",
        "trainer.resume_from_path": str(folder / "c"),
    }
    assert list(values) == [line.split(":")[0] for line in path_problems(folder, **values)]


# --- documentation ----------------------------------------------------------------------------------------------------


def test_every_key_has_documentation_type_and_default() -> None:
    text = render_docs()
    for key in all_keys().values():
        assert key.field.description, key.dotted
        assert f"{key.dotted}\n" in text or f"{key.dotted}:\n" in text
    assert "actor_rollout_ref.actor.optim.lr\n    float > 0; default 1.0e-06\n    Peak learning rate.\n" in text


def test_documentation_of_one_section_and_of_one_key() -> None:
    lines = render_docs("runlog").splitlines()
    assert ["runlog:", "runlog.flush_s", "runlog.rows_per_file"] == [
        line for line in lines if line.startswith("runlog")
    ]
    assert render_docs("trainer.seed").startswith("trainer.seed\n    int; default 0\n")
    with pytest.raises(ConfigError, match=r"did you mean runlog\?"):
        render_docs("runlogs")


def test_template_holds_every_key_and_loads_to_what_it_was_given(tmp_path: Path) -> None:
    chosen = EMULATED | {
        "trainer.experiment_name": "off",
        "trainer.seed": 3,
        "trainer.logger": ["console", "prometheus"],
    }
    text = render_template(chosen, title="demo")
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert build(chosen) == load_config(path)
    for key in all_keys().values():
        assert f"{key.path[-1]}:" in text


def test_uncommenting_every_key_of_the_template_gives_the_defaults(tmp_path: Path) -> None:
    lines = []
    for line in render_template(EMULATED).splitlines():
        margin, hash_sign, rest = line.partition("#")
        lines.append(margin + rest if hash_sign and not margin.strip() and rest[:1] not in (" ", "") else line)
    path = tmp_path / "run.yaml"
    path.write_text("\n".join(lines))
    assert build(EMULATED) == load_config(path)


def test_template_refuses_unknown_keys() -> None:
    with pytest.raises(ConfigError, match=r"did you mean trainer\.seed\?"):
        render_template({"trainer.sed": 1})
