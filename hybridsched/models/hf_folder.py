"""Model folders in Hugging Face layout: config.json plus model.safetensors (one file or shards with an index).

Owns: reading and writing such folders, and the list of named tensors of a model (`weight_specs`, `named_weights`), the
one order and naming in which weights are sent, checked and stored.

Invariants: files are written under a temporary name, fsynced and renamed, so a reader never sees half a file; reading
copies tensor by tensor (never a second copy of the model in memory); every error names the file and the cure.

Does not: contact a hub, touch tokenizers beyond copying their files, convert to other layouts.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hybridsched.errors import DataError, InternalError
from hybridsched.model import TensorSpec
from hybridsched.models.qwen3 import CausalLM, ModelConfig, empty_model, torch_dtype

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
#: What belongs to a model folder beside weights; copied along so that a checkpoint is usable on its own.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without prefix."""
    return str(dtype).removeprefix("torch.")


def named_weights(model: CausalLM) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, parameter without gradient tracking) in sending order."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()


def weight_specs(model: CausalLM) -> list[TensorSpec]:
    """Name, shape and dtype of every tensor, in the order of `named_weights`."""
    return [TensorSpec(name, tuple(t.shape), dtype_name(t.dtype)) for name, t in named_weights(model)]


def load_config(folder: str | Path) -> ModelConfig:
    """The checked configuration of a model folder. Raises DataError naming file and cure."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such model folder; give a local Hugging Face folder (a hub is never contacted)")
    return ModelConfig.from_hf(_read_json(folder / CONFIG, "the model's configuration"), str(folder / CONFIG))


def load_hf(folder: str | Path, dtype: str = "float32", device: str | torch.device = "cpu") -> CausalLM:
    """The model in ``folder``, cast to ``dtype`` on ``device``.

    Raises DataError when a file is missing or damaged, or a tensor is missing, extra or of the wrong shape.
    """
    model = empty_model(load_config(folder), dtype, device)
    read_weights(folder, dict(named_weights(model)))
    return model


def read_weights(folder: str | Path, targets: Mapping[str, torch.Tensor]) -> None:
    """Copy every tensor of the folder into the target of its name (dtype and device of the target are kept).

    ``targets``: all tensors of the model. Raises DataError as `load_hf` does.
    """
    folder = Path(folder)
    done: set[str] = set()
    for path, names in _weight_files(folder):
        done |= _copy_file(path, names, targets)
    missing = [name for name in targets if name not in done]
    if missing:
        raise DataError(
            f"{folder}: {_some(missing)} not in its safetensors files, though config.json asks for it; "
            "copy the model folder again, or correct config.json (tie_word_embeddings?)"
        )


def save_hf(model: CausalLM, folder: str | Path, extra_files_from: str | Path | None = None) -> None:
    """`save_weights` of a whole model."""
    save_weights(model.config, weight_specs(model), named_weights(model), folder, extra_files_from)


def save_weights(
    config: ModelConfig,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, torch.Tensor]],
    folder: str | Path,
    extra_files_from: str | Path | None = None,
) -> None:
    """Write config.json and model.safetensors into ``folder`` (made if absent), fsynced.

    ``tensors``: in the order of ``specs``, written one by one as they come, so that they need not be in memory
    together. ``extra_files_from``: a model folder whose tokenizer and generation files are copied along.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / (WEIGHTS + ".tmp")
    with temporary.open("wb") as file:
        file.write(_header(specs))
        for spec, (name, tensor) in zip(specs, tensors, strict=True):
            came, due = (
                (name, tuple(tensor.shape), dtype_name(tensor.dtype)),
                (spec.name, tuple(spec.shape), spec.dtype),
            )
            if came != due:
                raise InternalError(f"tensor {came} came where {due} was due")
            file.write(tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data)
    _publish(temporary, folder / WEIGHTS)
    (folder / INDEX).unlink(missing_ok=True)  # of an older, sharded save: readers would prefer either
    _write_text(folder / CONFIG, json.dumps(config.to_hf(specs[0].dtype), indent=2) + "\n")
    if extra_files_from is not None and Path(extra_files_from).resolve() != folder.resolve():
        for name in COMPANIONS:
            source = Path(extra_files_from) / name
            if source.is_file():
                temporary = folder / (name + ".tmp")
                shutil.copyfile(source, temporary)
                _publish(temporary, folder / name)
    _sync(folder)


_STORED = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def _header(specs: Sequence[TensorSpec]) -> bytes:
    """The beginning of a safetensors file: length of the table (8 bytes), then the table, filled up to 8 bytes."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for spec in specs:
        end = start + math.prod(spec.shape) * torch_dtype(spec.dtype).itemsize
        table[spec.name] = {"dtype": _STORED[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class TensorReader:
    """Reads tensors of a model folder one by one, by name. A context manager: files stay open inside.

    ``shapes``: name -> shape of every tensor the model has. Raises DataError, naming file and cure, for a folder that
    lacks one, and at `read` for a tensor that is damaged or of another shape.
    """

    def __init__(self, folder: str | Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._folder = Path(folder)
        self._shapes = shapes
        self._files = ExitStack()
        self._where: dict[str, tuple[Path, Any]] = {}

    def __enter__(self) -> TensorReader:
        try:
            for path, names in _weight_files(self._folder):
                file = self._files.enter_context(_opened(path))
                for name in names if names is not None else file.keys():
                    self._where[name] = (path, file)
            missing = [name for name in self._shapes if name not in self._where]
            if missing:
                raise DataError(
                    f"{self._folder}: {_some(missing)} not in its safetensors files, though config.json asks for it; "
                    "copy the model folder again, or correct config.json (tie_word_embeddings?)"
                )
        except BaseException:
            self._files.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def read(self, name: str) -> torch.Tensor:
        """The tensor of that name, as it is stored."""
        path, file = self._where[name]
        try:
            tensor: torch.Tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise DataError(f"{path}: tensor {name} cannot be read ({error}); copy the file again") from error
        if tuple(tensor.shape) != tuple(self._shapes[name]):
            raise DataError(
                f"{path}: tensor {name} has shape {tuple(tensor.shape)}, config.json says {tuple(self._shapes[name])}"
            )
        return tensor


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise DataError(f"{path}: a shard named by {INDEX} is missing; copy the complete model folder") from error
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: damaged or unreadable safetensors file ({error}); copy it again") from error


def _read_json(path: Path, what: str) -> dict[str, Any]:
    """A JSON object from a file; DataError if that is not what it holds."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path}: {what} is missing; copy the complete model folder") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check permissions and the file system") from error
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON ({error}); copy the file again") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: holds no JSON object; copy the file again")
    return value


def _weight_files(folder: Path) -> list[tuple[Path, list[str] | None]]:
    """Safetensors files to read, each with the names to take from it (None: all)."""
    if (folder / WEIGHTS).is_file():
        return [(folder / WEIGHTS, None)]
    if not (folder / INDEX).is_file():
        raise DataError(
            f"{folder}: neither {WEIGHTS} nor {INDEX} is there; copy the complete model folder "
            "(weights in other formats must be converted to safetensors)"
        )
    table = _read_json(folder / INDEX, "the index of the shards").get("weight_map")
    if not isinstance(table, dict) or not table:
        raise DataError(f"{folder / INDEX}: has no weight_map; copy the file again")
    shards: dict[str, list[str]] = {}
    for name, shard in table.items():
        shards.setdefault(str(shard), []).append(name)
    return [(folder / shard, names) for shard, names in sorted(shards.items())]


def _copy_file(path: Path, names: list[str] | None, wanted: Mapping[str, torch.Tensor]) -> set[str]:
    """Copy tensors of one file into the model's; returns the names copied."""
    done: set[str] = set()
    tied = "lm_head.weight" not in wanted
    try:
        with safe_open(path, framework="pt") as file:
            present = set(file.keys())
            for name in names if names is not None else file.keys():
                if name not in present:
                    raise DataError(
                        f"{path}: tensor {name} is missing, though {INDEX} places it here; copy the shard again"
                    )
                if name not in wanted:
                    if name == "lm_head.weight" and tied:
                        continue  # some writers store the tied head twice
                    raise DataError(f"{path}: tensor {name} does not belong to the model config.json describes")
                tensor, target = file.get_tensor(name), wanted[name]
                if tensor.shape != target.shape:
                    raise DataError(
                        f"{path}: tensor {name} has shape {tuple(tensor.shape)}, config.json says {tuple(target.shape)}"
                    )
                target.copy_(tensor)
                done.add(name)
    except FileNotFoundError as error:
        raise DataError(f"{path}: a shard named by {INDEX} is missing; copy the complete model folder") from error
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: damaged or unreadable safetensors file ({error}); copy it again") from error
    return done


def _some(names: list[str], limit: int = 5) -> str:
    """The first few names, and how many more."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _write_text(path: Path, text: str) -> None:
    """Write a small file under a temporary name, then publish it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    _publish(temporary, path)


def _publish(temporary: Path, path: Path) -> None:
    """fsync and rename."""
    _sync(temporary)
    os.replace(temporary, path)


def _sync(path: Path) -> None:
    """fsync a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
