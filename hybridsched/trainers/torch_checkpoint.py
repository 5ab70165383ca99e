"""Files of a torch trainer checkpoint: what is written where, fsynced, and read back.

    model/               Hugging Face folder (rank 0), with the tokenizer files of the model it started from
    trainer_state.pt     optimizer, masters, steps, version history (rank 0); loads with weights_only=True
    rng_rank{r}.pt       random state of rank r

The caller makes the folder before and publishes (renames) it after; nothing here is atomic by itself.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hybridsched.errors import FaultError, RunFolderError
from hybridsched.models import hf_folder
from hybridsched.models.qwen3 import CausalLM

FORMAT = 1
MODEL, STATE = "model", "trainer_state.pt"


def write_shared(folder: Path, model: CausalLM, state: dict[str, Any], tokenizer_from: Path | None) -> None:
    """Rank 0's part. Raises FaultError when it cannot be written."""
    try:
        hf_folder.save_hf(model, folder / MODEL, extra_files_from=tokenizer_from)
    except OSError as error:
        raise _unwritable(folder / MODEL, error) from error
    write_state(folder / STATE, {"format": FORMAT, **state})


def write_rng(folder: Path, rank: int, device: torch.device) -> None:
    """One rank's random state."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    write_state(folder / f"rng_rank{rank}.pt", state)


def read_shared(folder: Path, model: CausalLM) -> dict[str, Any]:
    """Fill the model's parameters and return the state. Raises RunFolderError when the checkpoint is not usable."""
    state = read_state(folder / STATE)
    if state.get("format") != FORMAT:
        raise RunFolderError(
            f"{folder / STATE}: format {state.get('format')!r}, this version of hybridsched reads {FORMAT}; "
            "resume with the version that wrote it"
        )
    saved = hf_folder.load_hf(folder / MODEL, hf_folder.dtype_name(next(model.parameters()).dtype), "cpu")
    if saved.config != model.config:
        raise RunFolderError(f"{folder / MODEL}: its architecture is not that of actor_rollout_ref.model.path")
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), saved.parameters(), strict=True):
            parameter.copy_(value)
    return state


def read_rng(folder: Path, rank: int, device: torch.device, log: Callable[[str], None]) -> dict[str, Any] | None:
    """Restore one rank's random state; a rank that did not exist when the checkpoint was written keeps its own (None).

    Returns all that was saved for the rank.
    """
    path = folder / f"rng_rank{rank}.pt"
    if not path.exists():
        log(f"{path} does not exist (the checkpoint is of fewer trainer ranks): rank {rank} keeps its fresh seed")
        return None
    state = read_state(path)
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    return state


def write_state(path: Path, value: dict[str, Any]) -> None:
    """torch.save, on disk when it returns. Raises FaultError when it cannot be written."""
    try:
        with path.open("wb") as file:
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError of its zip writer
        raise _unwritable(path, error) from error


def read_state(path: Path) -> dict[str, Any]:
    """What write_state wrote. Raises RunFolderError when it cannot be read."""
    try:
        value: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise RunFolderError(
            f"{path} cannot be read ({error}); resume from an older checkpoint (trainer.resume_from_path)"
        ) from error
    return value


def _unwritable(path: Path, error: Exception) -> FaultError:
    return FaultError(f"checkpoint: {path} cannot be written ({error}); free space or fix permissions, then resume")
