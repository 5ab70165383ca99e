"""What `hybridsched demo` needs before its run: starting model, data set, run.yaml. Made once, used again.

    FOLDER/inputs/model-seed0/  data-seed0/        made when missing
    FOLDER/run.yaml                                written every time, from the template handed in
    FOLDER/run/ (run-2/, ... when runs are kept)   the run's folder, which the run itself makes

Invariants: a folder below inputs/ is either complete or not there (made beside it and renamed); equal seeds give equal
inputs. Does not: start anything, or import torch when the model is there already.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from hybridsched.errors import DataError, FaultError, RunFolderError

N_TRAIN = 2048  #: prompts; one epoch is enough for 31 cycles
N_VAL = 64
WARM_START_STEPS = 150
SAMPLES_PER_CYCLE = 64  #: S of the template

Progress = Callable[[int, int, float], None]  #: (steps done, steps in all, loss)


@dataclass(frozen=True, slots=True)
class DemoInputs:
    """Absolute paths of complete inputs."""

    model: Path
    train: Path
    val: Path


def input_paths(folder: Path, seed: int) -> DemoInputs:
    """Where `make_inputs` puts things."""
    inputs = folder.absolute() / "inputs"
    data = inputs / f"data-seed{seed}"
    return DemoInputs(inputs / f"model-seed{seed}", data / "train.parquet", data / "val.parquet")


def make_inputs(folder: Path, seed: int, *, progress: Progress | None = None) -> DemoInputs:
    """Make what is missing below ``folder``. ``progress`` is called per warm-start step, not at all when all is there.

    Raises DataError when the folder cannot be written.
    """
    paths = input_paths(folder, seed)

    def build_model(where: Path) -> None:
        from hybridsched.demo.warm_start import make_demo_model

        make_demo_model(where, seed=seed, steps=WARM_START_STEPS, progress=progress)

    def build_data(where: Path) -> None:
        from hybridsched.demo.make_data import make_data

        make_data(where, n_train=N_TRAIN, n_val=N_VAL, seed=seed)

    _once(paths.train.parent, build_data)
    _once(paths.model, build_model)
    return paths


def _once(target: Path, build: Callable[[Path], None]) -> None:
    """Build beside ``target`` and rename, so that an interrupted demo leaves nothing that looks complete."""
    if target.is_dir():
        return
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        build(part)
        os.replace(part, target)
    except OSError as error:
        if target.is_dir():  # another demo was faster, with equal content
            return
        raise DataError(f"{target} cannot be written: {error.strerror or error}; choose another --folder") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def run_folder(folder: Path, *, keep: bool) -> Path:
    """Where the next run goes: ``run``, or with ``keep`` the first of run, run-2, run-3, ... that is free."""
    first = folder.absolute() / "run"
    if not keep:
        return first
    for number in range(1, 1000):
        candidate = first if number == 1 else first.with_name(f"run-{number}")
        if not candidate.exists():
            return candidate
    raise RunFolderError(f"{folder}: holds 999 runs already; remove some, or choose another --folder")


def write_run_yaml(folder: Path, template: str, inputs: DemoInputs, run: Path) -> Path:
    """Fill the paths into the template and write FOLDER/run.yaml. Raises DataError when it cannot be written."""
    paths = {"model_folder": inputs.model, "train_file": inputs.train, "val_file": inputs.val, "run_folder": run}
    # Placeholders stand inside YAML's double quotes, which take the escapes of JSON.
    text = Template(template).substitute({name: json.dumps(str(path))[1:-1] for name, path in paths.items()})
    target = folder.absolute() / "run.yaml"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{target} cannot be written: {error.strerror}; choose another --folder") from error
    return target


def overrides(*, cycles: int, seed: int, static: bool, engine: str, trainer: str) -> list[str]:
    """What a demo changes in its run.yaml, as the arguments of `hybridsched run`. Shares cores where there is one."""
    changes: dict[str, object] = {
        "trainer.total_training_steps": cycles,
        # Enough passes for these cycles and what is generated ahead of them.
        "trainer.total_epochs": -(-(cycles + 1) * SAMPLES_PER_CYCLE // N_TRAIN),
        "trainer.seed": seed,
        "data.seed": seed,
    }
    if static:
        changes["async_training.dynamic_schedule_policy"] = "static_fully_async"
    if engine != "torch":
        changes["actor_rollout_ref.rollout.name"] = engine
    if trainer != "torch":
        changes["actor_rollout_ref.actor.strategy"] = trainer
    if len(os.sched_getaffinity(0)) < 2:
        changes["local.allow_oversubscribe"] = "true"
    return [f"{key}={value}" for key, value in changes.items()]


def require_rise(summary: Mapping[str, Any], least: float) -> None:
    """The demo has shown something only if the model has learnt. Raises FaultError when it has not."""
    first, last = summary.get("reward_first"), summary.get("reward_last")
    if first is None or last is None:
        raise FaultError("the demo's run log has no rewards: nothing was trained")
    if not last - first >= least:  # also when one is NaN
        raise FaultError(
            f"the demo's reward went from {first:.3f} to {last:.3f}, by less than {least:g}: the model has not learnt "
            "what it should have; more --cycles help when there were few, else look at the report"
        )
