"""Before anything is started: check everything a user can get wrong, and lay out the run folder.

    runs/NAME/
      run.json               run id, when, by which version        config/resolved.yaml   what the run works with
      attempts/<k>/          logs of one start (latest -> k)        checkpoints/           global_step_N-lL/
      queue/ accept/ ledger/ owner/                                 log/                   HDF5 run log
      report.html

Every error here is a UserError: one message with the cure, nothing half-written.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridsched import __version__
from hybridsched.config import check_cores, check_paths, derive, load_config, not_available, save_resolved
from hybridsched.config.derived import Derived
from hybridsched.config.schema import RunConfig
from hybridsched.errors import ConfigError, DataError, RunFolderError, UserError
from hybridsched.models.config import ModelConfig
from hybridsched.runlog.sinks import missing_packages
from hybridsched.runtime.adapters import slurm
from hybridsched.runtime.plan import RunPlan, build_plan
from hybridsched.runtime.run_identity import identity_of, require_same
from hybridsched.sample_queue.owner import identity_of_this_process, require_free

if TYPE_CHECKING:
    from hybridsched.data import PromptSet

FORMAT = 1  #: of a run folder, in run.json


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run that may be started."""

    folder: Path
    run_id: str
    config: RunConfig
    derived: Derived
    plan: RunPlan
    resume: bool


def usable_cores(config: RunConfig) -> list[int]:
    """CPU cores of local mode: local.cores, or those this process may use. Raises ConfigError for foreign ones."""
    own = sorted(os.sched_getaffinity(0))
    if config.local.cores is None:
        return own
    foreign = [core for core in config.local.cores if core not in own]
    if foreign:
        raise ConfigError(f"local.cores: this process may not use cores {foreign}; usable are {own}")
    return list(config.local.cores)


def plan_of(config: RunConfig, derived: Derived) -> RunPlan:
    """The plan of a run; the same in the launcher, in every agent and in tests."""
    local = config.launcher == "local"
    return build_plan(
        trainer_nodes=config.trainer.nnodes,
        trainer_gpus_per_node=config.trainer.n_gpus_per_node,
        rollout_nodes=config.rollout.nnodes,
        rollout_gpus_per_node=config.rollout.n_gpus_per_node,
        gpus_per_replica=derived.gpus_per_replica,
        lending=derived.n_hybrid_replicas > 0,
        cores=usable_cores(config) if local else (),
        oversubscribe=config.local.allow_oversubscribe,
    )


def prepared_run(folder: Path, *, resume: bool) -> PreparedRun:
    """A run that was prepared before, e.g. when it was submitted. Raises RunFolderError, ConfigError."""
    run_id = str(read_run(folder)["run_id"])
    config = load_config(folder / "config" / "resolved.yaml")
    derived = derive(config)
    return PreparedRun(folder, run_id, config, derived, plan_of(config, derived), resume)


def check_everything(config: RunConfig) -> tuple[RunConfig, Derived]:
    """All checks that need files, cores or imports. Returns the configuration with derived lengths filled in."""
    config, derived, _identity = _check(config)
    return config, derived


def _check(config: RunConfig) -> tuple[RunConfig, Derived, dict[str, Any]]:
    """`check_everything`, and what the run is (`run_identity`)."""
    problems = [*not_available(config), *check_cores(config, len(usable_cores(config)))]
    problems += [*missing_packages(config.trainer.logger), *_missing_trainer(config)]
    if problems:
        raise ConfigError("this run cannot be started here:\n- " + "\n- ".join(problems))
    problems = check_paths(config)
    if problems:
        raise DataError("files of this run cannot be used:\n- " + "\n- ".join(problems))
    emulated = config.actor_rollout_ref.actor.strategy == "emulated"
    n_prompts, fingerprint, model = _check_emulated(config) if emulated else _check_data(config)
    derived = derive(config, n_prompts)
    _check_policy(config, derived)
    identity = identity_of(config, fingerprint, model)
    if n_prompts is not None and config.actor_rollout_ref.actor.optim.total_training_steps == -1:
        config = _with_schedule(config, derived)
    return config, derived, identity


def _missing_trainer(config: RunConfig) -> list[str]:
    """What the trainer needs and this environment lacks; nothing is imported."""
    actor = config.actor_rollout_ref.actor
    if actor.strategy != "megatron":
        return []
    if importlib.util.find_spec("megatron") is None:
        return [
            "actor_rollout_ref.actor.strategy: megatron needs Megatron Core, which is not installed here: "
            "pip install 'hybridsched[megatron]', or use torch"
        ]
    if actor.megatron.weight_source == "megatron-bridge" and importlib.util.find_spec("megatron.bridge") is None:
        return [
            "actor_rollout_ref.actor.megatron.weight_source: megatron-bridge is not installed here: "
            "pip install megatron-bridge (Python 3.12 and CUDA only), or use builtin"
        ]
    return []


def _check_emulated(config: RunConfig) -> tuple[None, str, None]:
    """An emulated run makes its prompts up, whatever data.train_files names."""
    from hybridsched.data import synthetic_prompts

    emulated = config.emulated
    return None, synthetic_prompts(emulated.dataset_size, emulated.prompt_tokens).fingerprint, None


def _check_data(config: RunConfig) -> tuple[int, str, ModelConfig]:
    """(number of training prompts, their fingerprint, the model they are for)."""
    from hybridsched.data import PromptSet
    from hybridsched.data.tokenizer import Tokenizer, stop_token_ids
    from hybridsched.models.folder_check import check_model
    from hybridsched.rewards import resolve_reward

    path = config.actor_rollout_ref.model.path
    assert path is not None  # config.checks
    model = check_model(path)
    _check_family(config, model)
    folder = config.actor_rollout_ref.model.tokenizer_path or path
    tokenizer = Tokenizer.from_folder(folder)
    stop_token_ids(path, tokenizer)
    prompts = PromptSet.build(config.data, tokenizer)
    _check_vocabulary(prompts, model, folder)
    if config.data.val_files:
        _check_vocabulary(PromptSet.build(config.data, tokenizer, split="val"), model, folder)
    resolve_reward(config.reward.function, config.reward.kwargs)
    return len(prompts), prompts.fingerprint, model


def _check_family(config: RunConfig, model: ModelConfig) -> None:
    """Whether trainer and engine can compute this model, cut as configured."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if model.num_experts and (actor.strategy == "torch" or rollout.name == "torch"):
        raise ConfigError(
            f"actor_rollout_ref.model.path: {config.actor_rollout_ref.model.path} is a mixture of experts, which torch "
            "engine and trainer cannot compute; use actor.strategy: megatron with rollout.name: vllm, or a dense model"
        )
    if actor.strategy == "megatron":
        from hybridsched.models.model_sizes import size_problems

        sizes = actor.megatron
        problems = size_problems(
            model,
            sizes.tensor_model_parallel_size,
            sizes.pipeline_model_parallel_size,
            sizes.expert_model_parallel_size,
        )
        if problems:
            raise ConfigError("actor_rollout_ref.actor.megatron does not fit the model:\n- " + "\n- ".join(problems))


def _check_vocabulary(prompts: PromptSet, model: ModelConfig, tokenizer_folder: str) -> None:
    for prompt in prompts:
        largest = int(prompt.tokens.max())
        if largest >= model.vocab_size:
            raise DataError(
                f"prompt {prompt.prompt_uid}: the tokenizer in {tokenizer_folder} gives token {largest}, the model "
                f"knows {model.vocab_size} tokens (vocab_size in config.json): tokenizer and model do not belong "
                "together. Set actor_rollout_ref.model.tokenizer_path to the model's own."
            )


def _check_policy(config: RunConfig, derived: Derived) -> None:
    from hybridsched.runtime.policy_loader import load_policy

    load_policy(config.async_training, only_hybrid=derived.only_hybrid)


def _with_schedule(config: RunConfig, derived: Derived) -> RunConfig:
    """The learning-rate schedule needs a length that only the data tells."""
    if derived.schedule_steps is None:
        return config
    overrides = [f"actor_rollout_ref.actor.optim.total_training_steps={max(1, derived.schedule_steps)}"]
    from hybridsched.config.loader import resolved_values

    return load_config(None, overrides, base=resolved_values(config))


def prepare(config: RunConfig, *, resume: bool, force: bool = False) -> PreparedRun:
    """Check everything and create (or re-enter) the run folder.

    Raises ConfigError, DataError, RunFolderError, and OwnershipLost while a controller works in the folder; then
    nothing was written.
    """
    config, derived, identity = _check(config)
    folder = Path(derived.run_folder)
    plan = plan_of(config, derived)
    try:
        run_id = _enter(folder, config, identity, resume=resume, force=force)
    except OSError as error:
        raise RunFolderError(
            f"{folder}: cannot be looked into: {error.strerror}; choose another trainer.default_local_dir"
        ) from error
    existed = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        if not resume:
            _write_json(folder / "run.json", _run_json(run_id, identity))
        (folder / "config").mkdir(exist_ok=True)
        save_resolved(config, folder / "config" / "resolved.yaml", derived)
    except OSError as error:
        if not existed:
            shutil.rmtree(folder, ignore_errors=True)  # half a folder would stand in the way of the next start
        raise RunFolderError(
            f"{folder}: cannot be written: {error.strerror}; choose another trainer.default_local_dir, or make room"
        ) from error
    return PreparedRun(folder, run_id, config, derived, plan, resume)


def _run_json(run_id: str, identity: dict[str, Any]) -> dict[str, Any]:
    return {"run_id": run_id, "hybridsched": __version__, "format": FORMAT, "identity": identity}


def _enter(folder: Path, config: RunConfig, identity: dict[str, Any], *, resume: bool, force: bool) -> str:
    """The id of the run that may now begin or go on in this folder; with ``force`` an earlier one is removed."""
    existing = read_run(folder) if (folder / "run.json").exists() else None
    if existing is not None and (resume or force):  # its workers still read what would be written here
        me = identity_of_this_process()
        require_free(folder, me, slurm_says_gone=lambda owner: slurm.job_is_gone(owner.job_id))
    if not resume:
        _require_fresh(folder, existing, force)
        return f"{config.trainer.experiment_name}-{secrets.token_hex(4)}"
    if existing is None:
        raise RunFolderError(f"{folder}: there is no run to resume (no run.json); start it without --resume")
    before = existing.get("identity")
    require_same(before if isinstance(before, dict) else {}, identity, str(folder))
    return str(existing["run_id"])


def _require_fresh(folder: Path, existing: dict[str, Any] | None, force: bool) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise RunFolderError(f"{folder}: is not a folder; choose another trainer.default_local_dir")
    if not any(folder.iterdir()):
        return
    if existing is None:
        raise RunFolderError(f"{folder}: is not empty and is no run of ours; choose another trainer.experiment_name")
    if force:
        shutil.rmtree(folder)
        return
    raise RunFolderError(
        f"{folder}: holds run {existing.get('run_id')} already; go on with it (--resume), replace it (--force), or "
        "choose another trainer.experiment_name"
    )


def read_run(folder: Path) -> dict[str, Any]:
    """run.json of a run folder. Raises RunFolderError."""
    path = folder / "run.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RunFolderError(f"{folder}: is not the folder of a run (there is no run.json)") from error
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be read: {error.strerror}; check permissions") from error
    except ValueError as error:
        raise RunFolderError(
            f"{path}: is damaged ({error}); put it back from a copy, or remove the folder to start anew"
        ) from error
    if not isinstance(data, dict) or not isinstance(data.get("run_id"), str) or not data["run_id"]:
        raise RunFolderError(f"{path}: has no run_id; this is not a run folder of hybridsched")
    version = data.get("format")
    if not isinstance(version, int) or version > FORMAT:
        raise RunFolderError(
            f"{path}: format {version!r} is newer than this hybridsched ({__version__}, format {FORMAT}); use the "
            f"version that made it ({data.get('hybridsched')})"
        )
    return data


def _write_json(path: Path, data: dict[str, Any]) -> None:
    tmp = path.with_suffix(".tmp")
    tmp.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    os.replace(tmp, path)


__all__ = [
    "PreparedRun",
    "UserError",
    "check_everything",
    "plan_of",
    "prepare",
    "prepared_run",
    "read_run",
    "usable_cores",
]
