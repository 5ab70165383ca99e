"""What a configuration names on disk: is it there, readable, and what it should be?

Owns: `check_paths`, for `--check-paths` and the start of a run. Reads no tensor and no prompt: of a safetensors file
only the header (8 bytes of length and a JSON table), which is enough to see that a file was cut short.
Does not: tokenize, parse prompts, import reward functions or policies (their owners do, with better messages).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridsched.config.problems import Problem, problem
from hybridsched.config.schema import RunConfig

_JSONL, _PARQUET = (".jsonl", ".ndjson"), (".parquet", ".pq")  # what data.prompts reads
_MAX_HEADER = 100 << 20  #: bytes; the safetensors format's own limit


def check_paths(config: RunConfig) -> list[str]:
    """What is wrong with the files the configuration names, each as ``key: what -> cure``; empty when nothing is."""
    return [one.text() for one in _problems(config)]


def _problems(config: RunConfig) -> Iterator[Problem]:
    for key, files in (("data.train_files", config.data.train_files), ("data.val_files", config.data.val_files)):
        for name in files:
            yield from _data_file(key, name)
    model = config.actor_rollout_ref.model
    if model.path is not None:
        yield from _model_folder(model.path)
    tokenizer = model.tokenizer_path or model.path
    if tokenizer is not None and Path(tokenizer).is_dir():
        key = "actor_rollout_ref.model.tokenizer_path" if model.tokenizer_path else "actor_rollout_ref.model.path"
        yield from _json_file(key, Path(tokenizer) / "tokenizer.json", "save it with tokenizer.save_pretrained")
    elif model.tokenizer_path is not None:
        yield _missing("actor_rollout_ref.model.tokenizer_path", model.tokenizer_path, "name a folder")
    yield from _other_files(config)


def _other_files(config: RunConfig) -> Iterator[Problem]:
    policy = config.async_training.dynamic_schedule_policy
    if policy.endswith((".yaml", ".yml", ".py")):
        yield from _readable(
            "async_training.dynamic_schedule_policy", policy, "name a policy file or a built-in policy"
        )
    function = config.reward.function.rpartition(":")[0]
    if function.endswith(".py"):
        yield from _readable("reward.function", function, "write it as path.py:function")
    resume = config.trainer.resume_from_path
    if resume is not None and not Path(resume).is_dir():
        yield _missing("trainer.resume_from_path", resume, "name a checkpoint folder")
    site = config.slurm.site
    if config.launcher == "slurm" and site is not None and ("/" in site or site.endswith((".yaml", ".yml"))):
        yield from _readable("slurm.site", site, "name a site profile or a file")


def _missing(key: str, name: str, cure: str) -> Problem:
    where = Path(name)
    if where.exists():
        kind = "a folder" if where.is_dir() else "a file"
        return problem(key, f"{name} is {kind}", cure)
    parent = where.absolute().parent
    hint = "" if parent.is_dir() else f" (not even the folder {parent})"
    return problem(key, f"{name} does not exist{hint}", f"{cure}; relative paths start at {Path.cwd()}")


def _readable(key: str, name: str, cure: str) -> Iterator[Problem]:
    """Nothing when ``name`` is a readable, non-empty file."""
    where = Path(name)
    if not where.is_file():
        yield _missing(key, name, cure)
        return
    try:
        with open(where, "rb") as stream:
            empty = not stream.read(1)
    except OSError as error:
        yield problem(key, f"{name} cannot be read ({error.strerror})", "check its permissions")
        return
    if empty:
        yield problem(key, f"{name} is empty", cure)


def _data_file(key: str, name: str) -> Iterator[Problem]:
    found = list(_readable(key, name, "name a JSONL or parquet file with prompts"))
    yield from found
    if found:
        return
    suffix = Path(name).suffix.lower()
    if suffix not in (*_JSONL, *_PARQUET):
        yield problem(key, f"{name} is neither .jsonl nor .parquet", "convert or rename it")
    elif suffix in _PARQUET and not _has_parquet_marks(Path(name)):
        yield problem(key, f"{name} is not a complete parquet file", "write or copy it again")


def _has_parquet_marks(path: Path) -> bool:
    """Parquet begins and ends with PAR1; a copy that was cut short does not end so."""
    with open(path, "rb") as stream:
        head = stream.read(4)
        size = stream.seek(0, os.SEEK_END)
        if size < 12:
            return False
        stream.seek(-4, os.SEEK_END)
        return head == b"PAR1" and stream.read(4) == b"PAR1"


def _model_folder(name: str) -> Iterator[Problem]:
    key, folder = "actor_rollout_ref.model.path", Path(name)
    if not folder.is_dir():
        yield _missing(key, name, "name a local Hugging Face folder (a hub is never contacted)")
        return
    yield from _json_file(key, folder / "config.json", "name a complete Hugging Face folder")
    index = folder / "model.safetensors.index.json"
    weights = sorted(folder.glob("*.safetensors"))
    if index.exists():
        table = _read_json(index)
        shards = table.get("weight_map") if isinstance(table, dict) else None
        if not isinstance(shards, dict):
            yield problem(key, f"{index} is damaged", "copy the model again")
            return
        weights = [folder / str(shard) for shard in sorted(set(shards.values()))]
    if not weights:
        yield problem(key, f"{name} has no *.safetensors", "convert the model: model.save_pretrained(folder)")
    for file in weights:
        reason = f"{file.name} is missing" if not file.is_file() else _safetensors_damage(file)
        if reason is not None:
            yield problem(key, f"{name}: {reason}", "copy the model again")


def _json_file(key: str, path: Path, cure: str) -> Iterator[Problem]:
    if not path.is_file():
        yield problem(key, f"{path.parent} has no {path.name}", cure)
    elif not isinstance(_read_json(path), dict):
        yield problem(key, f"{path} is damaged (not a JSON object)", "copy it again")


def _read_json(path: Path) -> Any:
    """The parsed file, None when it cannot be read or parsed."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def _safetensors_damage(path: Path) -> str | None:
    """Why a safetensors file cannot be whole, None when header and size agree."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                return f"{path.name} is damaged ({size} bytes, header of {length} bytes)"
            header = json.loads(stream.read(length))
        tensors = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + length + max(tensors, default=0)
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return f"{path.name} is damaged (unreadable header)"
    return None if size == expected else f"{path.name} has {size} bytes instead of {expected}"
