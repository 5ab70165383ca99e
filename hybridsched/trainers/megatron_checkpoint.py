"""Files of a Megatron trainer checkpoint: what is written where, fsynced, and read back, also under other sizes.

    megatron/            model and optimizer as Megatron's distributed checkpoint (torch_dist): every rank its pieces
    model/               the same model as a Hugging Face folder (rank 0), with the tokenizer files it started from
    trainer_state.pt     steps, version history, sizes (rank 0)
    rng_rank{r}.pt       random states of rank r

Invariants: a checkpoint loads under other TP, PP, EP and DP sizes, and bit for bit under the same (what Megatron cannot
convert is refused by name); all of it is on disk when `save` returns on every rank. Megatron's own writer is not used:
it forks from a process full of threads, waits for the child without a bound, and leaves a manager process behind;
torch's writer stores the same format in this process.

Does not: make the folder or publish it (the caller renames it), or decide when.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hybridsched.config.schema import MegatronConfig
from hybridsched.errors import FaultError, HybridschedError, RunFolderError
from hybridsched.models import hf_folder
from hybridsched.trainers.megatron_bridge import BridgeWeights
from hybridsched.trainers.megatron_optimizer import MegatronOptimizer
from hybridsched.trainers.megatron_weights import WeightMap
from hybridsched.trainers.torch_checkpoint import read_rng, read_state, write_state

FORMAT = 1
#: Raises on every rank when one hands in a problem.
Together = Callable[[HybridschedError | None], None]
SHARDS, MODEL, STATE = "megatron", "model", "trainer_state.pt"


def save_shards(folder: Path, optimizer: MegatronOptimizer, rank: int, together: Together) -> None:
    """Model and optimizer, all ranks' pieces. Collective. Raises FaultError on every rank when one cannot write.

    Megatron's `save` in its steps, because one rank failing in its first leaves the others waiting in its second.
    """
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

    target = folder / SHARDS
    sharded, common = save_preprocess(optimizer.sharded_state(loading=False), True)
    together(_attempt(target, lambda: _write_common(target, common)) if rank == 0 else None)
    together(_attempt(target, lambda: _write_shards(target, sharded)))
    together(_attempt(target, lambda: _seal(target, rank)))


def _attempt(target: Path, step: Callable[[], None]) -> FaultError | None:
    """What went wrong in a step, None when nothing did."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        step()
    except CheckpointException as error:  # what any rank ran into, on all of them
        return _unwritable(target, _first(error))
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError of its zip writer
        return _unwritable(target, error)
    return None


def _write_common(target: Path, common: dict[str, Any]) -> None:
    """The part all ranks have in common, and the folder."""
    target.mkdir(exist_ok=True)
    torch.save(common, target / "common.pt")


def _write_shards(target: Path, sharded: dict[str, Any]) -> None:
    """Megatron's torch_dist format, written by torch's own writer in this process. Collective."""
    import torch.distributed.checkpoint as dcp
    from megatron.core.dist_checkpointing.strategies import torch as megatron_format

    state, _, _ = megatron_format._replace_state_dict_keys_with_sharded_keys(sharded, True)
    dcp.save(
        megatron_format.mcore_to_pyt_state_dict(state, False),
        storage_writer=dcp.FileSystemWriter(target, thread_count=1, sync_files=True),
        planner=megatron_format.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
    )


def _seal(target: Path, rank: int) -> None:
    """Say what format it is, and have everything on disk."""
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

    if rank == 0:
        save_config(CheckpointingConfig("torch_dist", 1), str(target))
    _sync_files(target, rank)


def load_shards(folder: Path, optimizer: MegatronOptimizer, steps: int) -> None:
    """Put model and optimizer back. Collective. Raises RunFolderError when the checkpoint is not usable."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    source = folder / SHARDS
    try:
        state = dist_checkpointing.load(optimizer.sharded_state(loading=True), str(source))
    except CheckpointException as error:
        raise _unreadable(source, _first(error)) from error
    except (OSError, RuntimeError, ValueError, LookupError, EOFError, pickle.PickleError) as error:
        raise _unreadable(source, error) from error
    except CheckpointingException as error:
        raise _unreadable(source, error) from error
    optimizer.load_sharded_state(state, steps)


def save_model(folder: Path, weights: WeightMap | BridgeWeights, rank: int, companions: Path) -> None:
    """The Hugging Face folder, written by rank 0 while all ranks gather. Collective."""
    tensors = weights.gather()
    if rank != 0:
        for _ in tensors:
            pass
        return
    try:
        hf_folder.save_weights(weights.config, weights.specs(), tensors, folder / MODEL, extra_files_from=companions)
    except OSError as error:
        raise _unwritable(folder / MODEL, error) from error
    finally:
        tensors.close()


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Rank 0's small part."""
    write_state(folder / STATE, {"format": FORMAT, **state})


def load_state(folder: Path, sizes: MegatronConfig) -> dict[str, Any]:
    """What `save_state` wrote.

    Raises RunFolderError when it is another trainer's or another version's, or when the optimizer of ``sizes`` cannot
    take its state over.
    """
    if not (folder / SHARDS).is_dir():
        raise RunFolderError(
            f"{folder}: has no {SHARDS}/, so it is no checkpoint of the Megatron trainer; resume with the "
            "actor_rollout_ref.actor.strategy it was written with, or start anew from its model/ folder "
            "(actor_rollout_ref.model.path)"
        )
    state = read_state(folder / STATE)
    if state.get("format") != FORMAT:
        raise RunFolderError(
            f"{folder / STATE}: format {state.get('format')!r}, this version of hybridsched reads {FORMAT}; "
            "resume with the version that wrote it"
        )
    _require_same_optimizer(folder, state["sizes"], sizes)
    return state


def _require_same_optimizer(folder: Path, before: dict[str, Any], now: MegatronConfig) -> None:
    """Megatron lays optimizer state out in three ways between which it does not convert."""
    changes = []
    if before["use_distributed_optimizer"] != now.use_distributed_optimizer:
        changes.append(f"use_distributed_optimizer was {str(before['use_distributed_optimizer']).lower()}")
    if (before["expert_model_parallel_size"] > 1) != (now.expert_model_parallel_size > 1):
        changes.append(
            f"expert_model_parallel_size was {before['expert_model_parallel_size']} (1 and more keep experts apart)"
        )
    if changes:
        raise RunFolderError(
            f"{folder}: its optimizer state cannot be taken over: actor_rollout_ref.actor.megatron."
            f"{' and '.join(changes)}; set it back (other sizes may change), or start a new run from {folder / MODEL}"
        )


def save_random_states(folder: Path, rank: int, device: torch.device) -> None:
    """This rank's generators and Megatron's named states."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state(), "named": _named_generators().get_states()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    write_state(folder / f"rng_rank{rank}.pt", state)


def load_random_states(folder: Path, rank: int, device: torch.device, log: Callable[[str], None]) -> None:
    """Put them back; a rank that did not exist when the checkpoint was written keeps its own."""
    state = read_rng(folder, rank, device, log)
    if state is not None:
        _named_generators().set_states(state["named"])


def _named_generators() -> Any:
    """Megatron's tracker of random states by name."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker()


def _first(error: Any) -> BaseException:
    """The first of the failures that torch's checkpointing collected from the ranks."""
    failures: dict[int, Any] = error.failures
    rank = min(failures)
    cause = failures[rank][0]
    return RuntimeError(f"rank {rank}: {type(cause).__name__}: {cause}")


def _unwritable(path: Path, error: BaseException) -> FaultError:
    return FaultError(f"checkpoint: {path} cannot be written ({error}); free space or fix permissions, then resume")


def _unreadable(path: Path, error: BaseException) -> RunFolderError:
    return RunFolderError(
        f"{path} cannot be read ({error}); resume from an older checkpoint (trainer.resume_from_path)"
    )


def _sync_files(folder: Path, rank: int) -> None:
    """This rank's pieces, and on rank 0 the common files and the folder itself, are on disk afterwards."""
    paths = [path for path in folder.iterdir() if path.is_file() and path.name.startswith(f"__{rank}_")]
    if rank == 0:
        paths += [path for path in folder.iterdir() if path.is_file() and not path.name.startswith("__")]
        paths += [folder, folder.parent]
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
