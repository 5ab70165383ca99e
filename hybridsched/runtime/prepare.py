"""Before anything is started: check everything a user can get wrong, and lay out the run folder.

    runs/NAME/
      run.json               run id, when, by which version        config/resolved.yaml   what the run works with
      attempts/<k>/          logs of one start (latest -> k)        checkpoints/           global_step_N-lL/
      queue/ accept/ ledger/ owner/                                 log/                   HDF5 run log
      report.html

Every error here is a UserError: one message with the cure, nothing half-written.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridsched import __version__
from hybridsched.config import check_cores, check_paths, derive, load_config, not_available, save_resolved
from hybridsched.config.derived import Derived
from hybridsched.config.schema import RunConfig
from hybridsched.errors import ConfigError, DataError, RunFolderError, UserError
from hybridsched.runtime.plan import RunPlan, build_plan


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


def check_everything(config: RunConfig) -> tuple[RunConfig, Derived]:
    """All checks that need files, cores or imports. Returns the configuration with derived lengths filled in."""
    problems = [*not_available(config), *check_cores(config, len(usable_cores(config)))]
    if problems:
        raise ConfigError("this run cannot be started here:\n- " + "\n- ".join(problems))
    problems = check_paths(config)
    if problems:
        raise DataError("files of this run cannot be used:\n- " + "\n- ".join(problems))
    n_prompts = None
    if config.actor_rollout_ref.actor.strategy != "emulated":
        n_prompts = _check_data(config)
    derived = derive(config, n_prompts)
    _check_policy(config, derived)
    if n_prompts is not None and config.actor_rollout_ref.actor.optim.total_training_steps == -1:
        config = _with_schedule(config, derived)
    return config, derived


def _check_data(config: RunConfig) -> int:
    from hybridsched.data import PromptSet
    from hybridsched.data.tokenizer import Tokenizer
    from hybridsched.rewards import resolve_reward

    folder = config.actor_rollout_ref.model.tokenizer_path or config.actor_rollout_ref.model.path
    assert folder is not None
    tokenizer = Tokenizer.from_folder(folder)
    prompts = PromptSet.build(config.data, tokenizer)
    if config.data.val_files:
        PromptSet.build(config.data, tokenizer, split="val")
    resolve_reward(config.reward.function, config.reward.kwargs)
    return len(prompts)


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
    """Check everything and create (or re-enter) the run folder."""
    config, derived = check_everything(config)
    folder = Path(derived.run_folder)
    plan = plan_of(config, derived)
    existing = read_run(folder) if (folder / "run.json").exists() else None
    if resume:
        if existing is None:
            raise RunFolderError(f"{folder}: there is no run to resume (no run.json); start it without --resume")
        run_id = str(existing["run_id"])
    else:
        _require_fresh(folder, existing, force)
        run_id = f"{config.trainer.experiment_name}-{secrets.token_hex(4)}"
    try:
        (folder / "config").mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        if existing is None or not resume:
            _write_json(folder / "run.json", {"run_id": run_id, "hybridsched": __version__, "format": 1})
        save_resolved(config, folder / "config" / "resolved.yaml", derived)
    except OSError as error:
        raise RunFolderError(
            f"{folder}: cannot be written: {error.strerror}; choose another trainer.default_local_dir, or make room"
        ) from error
    return PreparedRun(folder, run_id, config, derived, plan, resume)


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
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path}: cannot be read as run.json: {error}; is this a run folder?") from error
    if not isinstance(data, dict) or "run_id" not in data:
        raise RunFolderError(f"{path}: has no run_id; this is not a run folder of hybridsched")
    return data


def _write_json(path: Path, data: dict[str, Any]) -> None:
    tmp = path.with_suffix(".tmp")
    tmp.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    os.replace(tmp, path)


__all__ = ["PreparedRun", "UserError", "check_everything", "plan_of", "prepare", "read_run", "usable_cores"]
