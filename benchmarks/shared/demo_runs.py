"""Runs of the demo's task for benchmarks: inputs made once, one call per run, what it cost read from outside.

Every run is a real one (`prepare` and `run_local`, as `hybridsched run` does): processes, MPI, torch, HDF5 files.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hybridsched.config import load_config
from hybridsched.demo.inputs import DemoInputs, make_inputs
from hybridsched.report import summarize
from hybridsched.runlog.reader import RunLog
from hybridsched.runtime.prepare import prepare
from hybridsched.slurm.launch_loop import run_local

TICK = os.sysconf("SC_CLK_TCK")
DEMO = [
    "reward.function=count_on",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.actor.optim.lr=5e-4",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=4",
    "actor_rollout_ref.actor.optim.weight_decay=0",
    "actor_rollout_ref.rollout.n=8",
    "async_training.trigger_parameter_sync_step=4",
    "async_training.staleness_threshold=0.5",
    "async_training.use_dynamic_resource_scheduling=true",
    "async_training.dynamic_schedule_deactivate_ratio=0.6",
    "data.max_prompt_length=16",
    "queue.seal_samples=16",
    "queue.seal_age_s=1",
    "trainer.val_before_train=false",
    "trainer.val_at_end=false",
    "trainer.total_epochs=100",
    "faults.attempts=1",
]
STATIC = "async_training.dynamic_schedule_policy=static_fully_async"


@dataclass(slots=True)
class RunResult:
    """One finished run. ``rows``: metrics by cycle; ``cpu_s``: CPU seconds by process kind; ``asleep``: CPU share."""

    folder: Path
    summary: dict[str, Any]
    rows: list[dict[str, float]]
    cpu_s: dict[str, float] = field(default_factory=dict)
    alive_s: dict[str, float] = field(default_factory=dict)

    def total(self, name: str, skip: int) -> float:
        """Sum of a metric over the cycles after the first ``skip``."""
        return sum(row.get(name, 0.0) for row in self.rows[skip:])

    def mean(self, name: str, skip: int = 0) -> float:
        """Mean of a metric over the cycles after the first ``skip`` that have it."""
        values = [row[name] for row in self.rows[skip:] if name in row]
        return sum(values) / len(values) if values else float("nan")


class CpuMeter:
    """CPU seconds of the processes of one run, by kind, read from /proc once a second until stopped."""

    def __init__(self, run_id: str) -> None:
        self._mark = f"HYBRIDSCHED_RUN_ID={run_id}".encode()
        self._seen: dict[int, tuple[str, float, float, float]] = {}  # pid -> kind, first cpu, last cpu, first time
        self._last: dict[int, float] = {}
        self._begun = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def begin(self, status: dict[str, Any]) -> None:
        """Count from the first finished cycle on: loading a model is not what a sleeping worker costs."""
        if status.get("phase") == "cycle done" and not self._begun:
            self._begun = True
            self._seen.clear()
            self._last.clear()

    def stop(self) -> tuple[dict[str, float], dict[str, float]]:
        """(CPU seconds, seconds observed) by kind."""
        self._stop.set()
        self._thread.join(timeout=5)
        cpu: dict[str, float] = {}
        alive: dict[str, float] = {}
        for pid, (kind, first, last, since) in self._seen.items():
            cpu[kind] = cpu.get(kind, 0.0) + last - first
            alive[kind] = alive.get(kind, 0.0) + self._last[pid] - since
        return cpu, alive

    def _watch(self) -> None:
        while not self._stop.wait(1.0):
            for entry in os.scandir("/proc"):
                if entry.name.isdigit():
                    self._look(int(entry.name))

    def _look(self, pid: int) -> None:
        try:
            if self._mark not in Path(f"/proc/{pid}/environ").read_bytes():
                return
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            return
        kind = _kind(words)
        if kind:
            cpu, now = (int(fields[11]) + int(fields[12])) / TICK, time.monotonic()
            _, first, _, since = self._seen.get(pid, (kind, cpu, cpu, now))
            self._seen[pid] = (kind, first, cpu, since)
            self._last[pid] = now


def _kind(words: Sequence[str]) -> str:
    line = " ".join(words)
    if "agent_main" in line and "mpiexec" not in words[0]:
        return "agents"
    if "workers.reward" in line:
        return "rewards"
    for kind in ("hybrid", "standalone", "trainer"):
        if f"{kind}." in line:
            return kind
    return ""


class DemoRuns:
    """Makes the inputs once and starts runs below one folder."""

    def __init__(self, folder: Path | None = None, seed: int = 0) -> None:
        self.folder = folder or Path(tempfile.mkdtemp(prefix="hybridsched-bench-"))
        self.inputs: DemoInputs = make_inputs(self.folder, seed)
        self._count = 0

    def run(self, *overrides: str) -> RunResult:
        """One run to its end. Raises RuntimeError when it does not end well."""
        self._count += 1
        target = self.folder / f"run-{self._count}"
        config = load_config(
            None,
            [
                *DEMO,
                f"actor_rollout_ref.model.path={self.inputs.model}",
                f"data.train_files=[{self.inputs.train}]",
                f"data.val_files=[{self.inputs.val}]",
                f"trainer.default_local_dir={target}",
                *overrides,
            ],
        )
        prepared = prepare(config, resume=False, force=True)
        meter = CpuMeter(prepared.run_id)
        code = run_local(prepared, on_status=meter.begin)
        cpu, alive = meter.stop()
        if code != 0:
            raise RuntimeError(f"run in {target} ended with {code}; logs in {target}/attempts/latest/logs")
        history = RunLog.open(target).history()
        rows = [row.values for row in history if "timing_s/step" in row.values]
        return RunResult(target, dict(summarize(target)), rows, cpu, alive)
