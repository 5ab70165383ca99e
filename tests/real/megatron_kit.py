"""Starts the ranks of a Megatron trainer for tests, and knows the samples they train on.

`run_job` starts one process per rank (megatron_rank.py), waits for all with a deadline, and gives back what their
checks returned. A process costs some ten seconds on a slow day, so one job runs many checks.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridsched.model import FinishReason, Response, Sample, VersionRun, WeightVersion

JOB_S = 240.0
MINIS = 2
VERSION = WeightVersion(0, 0)
VOCAB = 13  #: not a multiple of 2, so that TP 2 needs padding


def require_megatron() -> None:
    """Skip where Megatron Core is missing; never in CI."""
    if importlib.util.find_spec("megatron") is None:
        text = "Megatron Core is not installed: pip install --no-deps megatron-core==0.16.1"
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(text)
        pytest.skip(text)


def training_samples(step: int, number: int, poison: int | None = None) -> list[Sample]:
    """The samples of one mini-batch, the same everywhere; ``poison``: index of one that spoils the loss."""
    rng = np.random.default_rng([step, number])
    samples = []
    for index in range(5):
        prompt = rng.integers(0, VOCAB, int(rng.integers(2, 6))).astype(np.int32)
        responses = []
        for _ in range(3):
            tokens = rng.integers(0, VOCAB, int(rng.integers(2, 12))).astype(np.int32)
            logprobs = (-2.5 + 0.3 * rng.standard_normal(tokens.shape[0])).astype(np.float32)
            responses.append(
                Response(
                    tokens,
                    logprobs,
                    (VersionRun(VERSION, 0, tokens.shape[0]),),
                    FinishReason.STOP,
                    None,
                    float(rng.random()) if index != poison else 1e300 * float(rng.random()),
                    None,
                )
            )
        uid = 100 * step + 10 * number + index
        samples.append(Sample(uid, f"p{uid}", prompt, tuple(responses)))
    return samples


def job_config(model: Path, sizes: dict[str, Any], **actor: Any) -> dict[str, Any]:
    """A run.yaml's contents for a trainer on ``model``; ``sizes``: keys of actor.megatron without their long tails."""
    megatron: dict[str, Any] = {
        {"tp": "tensor_model", "pp": "pipeline_model", "ep": "expert_model", "cp": "context"}.get(key, key)
        + ("_parallel_size" if key in ("tp", "pp", "ep", "cp") else ""): value
        for key, value in sizes.items()
        if key != "dp"
    }
    ranks = sizes.get("dp", 1) * sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1)
    return {
        "actor_rollout_ref": {
            "model": {"path": str(model)},
            "actor": {"strategy": "megatron", "optim": {"lr": 1e-2}, "megatron": megatron, **actor},
        },
        "trainer": {"nnodes": 1, "n_gpus_per_node": ranks},
        "algorithm": {"norm_adv_by_std_in_grpo": False},
    }


def stage(folder: Path, name: str, config: dict[str, Any], checks: list[str], **extra: Any) -> dict[str, Any]:
    """One stage of a job; ``folder``: that of the job."""
    return {"name": name, "folder": str(folder / name), "config": config, "checks": checks, "vocab": VOCAB, **extra}


def run_job(folder: Path, stages: list[dict[str, Any]], *, dies: int | None = None) -> list[dict[str, dict[str, Any]]]:
    """Answers by stage and check, one dict per rank. ``dies``: a rank that is to be killed. Fails with all logs."""
    folder.mkdir(parents=True, exist_ok=True)
    world = stages[0]["config"]["trainer"]["n_gpus_per_node"]
    (folder / "job.json").write_text(json.dumps(stages))
    logs = [folder / f"rank{rank}.log" for rank in range(world)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONWARNINGS": "ignore"}
    script = str(Path(__file__).with_name("megatron_rank.py"))
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(folder / "job.json"), str(rank)],
            stdout=logs[rank].open("wb"),
            stderr=subprocess.STDOUT,
            env=environment,
        )
        for rank in range(world)
    ]
    try:
        _wait(processes, logs, dies)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait(10)
    out: list[dict[str, dict[str, Any]]] = []
    for rank in range(world):
        found = {} if rank == dies else pickle.loads((folder / f"rank{rank}.pickle").read_bytes())
        out.append({name: Answers(answers) for name, answers in found.items()})
    return out


class Answers(dict[str, Any]):
    """What the checks of a stage returned, by check. Asking for one that did not come to its end fails, saying why."""

    def __missing__(self, check: str) -> Any:
        pytest.fail(f"{check} has no answer: {self.get('error', 'it was not asked')}")


def _wait(processes: list[subprocess.Popen[bytes]], logs: list[Path], dies: int | None) -> None:
    """Until all ended well; the first that does not ends the test at once."""
    deadline = time.monotonic() + JOB_S
    while any(process.poll() is None for process in processes):
        for rank, process in enumerate(processes):
            if process.poll() and rank != dies:
                pytest.fail(f"rank {rank} ended with {process.returncode}\n" + _tails(logs))
        if time.monotonic() > deadline:
            pytest.fail(f"the ranks did not end in {JOB_S:g} s\n" + _tails(logs))
        time.sleep(0.1)
    if any(process.returncode for rank, process in enumerate(processes) if rank != dies):
        pytest.fail("a rank ended badly\n" + _tails(logs))


def _tails(logs: list[Path]) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)
