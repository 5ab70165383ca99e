"""Judges a model folder without loading it: configuration, names, shapes and kinds of all tensors. No torch.

Owns `check_model`, for the start of a run: what would end a worker minutes later, on another machine, is said at once.
Reads config.json and the headers of the safetensors files, never a tensor. Does not: replace the checks of those who
load (`hf_folder` makes the same ones again, on what it really reads).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridsched.errors import DataError
from hybridsched.models.config import ModelConfig, weight_shapes

_FLOATS = ("F64", "F32", "F16", "BF16")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def check_model(folder: str | Path) -> ModelConfig:
    """The configuration of a folder whose files can be loaded. Raises DataError with the first thing that is wrong."""
    folder = Path(folder)
    config_file = folder / "config.json"
    raw = _json_object(config_file)
    config = ModelConfig.from_hf(raw, str(config_file))
    expected = weight_shapes(config)
    missing = set(expected)
    for file, name, entry in _tensors(folder):
        if name == "lm_head.weight" and name not in expected:
            continue  # some writers store the tied head twice
        _check_tensor(file, name, entry, expected)
        missing.discard(name)
    if missing:
        names = [name for name in expected if name in missing]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise DataError(
            f"{folder}: its safetensors files lack {', '.join(names[:3])}{more}, which config.json asks for; copy the "
            "model folder again, or correct config.json (num_hidden_layers? tie_word_embeddings?)"
        )
    return config


def _tensors(folder: Path) -> Iterator[tuple[Path, str, Mapping[str, Any]]]:
    """(file, name, entry of the header) of every tensor a loader would take."""
    if (folder / _SINGLE).is_file():
        files: dict[Path, set[str] | None] = {folder / _SINGLE: None}
    else:
        table = _json_object(folder / _INDEX).get("weight_map")
        if not isinstance(table, dict) or not table:
            raise DataError(f"{folder / _INDEX}: has no weight_map; copy the file again")
        files = {folder / str(shard): set() for shard in sorted(set(map(str, table.values())))}
        for name, shard in table.items():
            names = files[folder / str(shard)]
            assert names is not None
            names.add(name)
    for file, wanted in files.items():
        for name, entry in _header(file).items():
            if wanted is None or name in wanted:
                yield file, name, entry


def _check_tensor(file: Path, name: str, entry: Any, expected: Mapping[str, tuple[int, ...]]) -> None:
    if name not in expected:
        raise DataError(f"{file}: tensor {name} does not belong to the model config.json describes")
    kind, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
    if not isinstance(shape, list) or tuple(shape) != expected[name]:
        raise DataError(f"{file}: tensor {name} has shape {shape}, config.json says {list(expected[name])}")
    if kind not in _FLOATS:
        raise DataError(
            f"{file}: tensor {name} is stored as {kind}; weights have to be floating point ({', '.join(_FLOATS)}): "
            "convert the model, quantized ones are not supported"
        )


def _header(file: Path) -> dict[str, Any]:
    try:
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length)) if length < file.stat().st_size else None
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: damaged or unreadable safetensors file ({error}); copy it again") from error
    if not isinstance(header, dict):
        raise DataError(f"{file}: damaged safetensors file (no header); copy it again")
    header.pop("__metadata__", None)
    return header


def _json_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read as JSON ({error}); copy the model folder again") from error
    if not isinstance(value, dict):
        raise DataError(f"{file}: holds no JSON object; copy the file again")
    return value
