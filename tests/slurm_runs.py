"""Real runs as Slurm jobs, for tests: `hybridsched submit` on a dev cluster, watched like a local run (`real_runs`).

Processes are looked for on the machine that carries the cluster: its nodes' processes are ordinary ones there, of other
numbers than on their node. So agents are found by their node's name, not by the pid they wrote down.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from real_runs import LONG_S, RealRun, T
from slurm_cluster import SlurmCluster

from hybridsched.runtime.adapters.lifeline import carriers

OVER = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}
#: What every run here has in common: nothing waits long, and nodes are missed soon.
QUICK = [
    "launcher=slurm",
    "slurm.trainer.partition=trn",
    "slurm.rollout.partition=gpu",
    'slurm.time="30"',
    "trainer.device=cpu",
    "deadlines.agent_silence_s=8",
]


class SlurmRealRun(RealRun):
    """A run folder, and the job working on it."""

    def __init__(self, cluster: SlurmCluster, run_yaml: Path, folder: Path, *overrides: str) -> None:
        super().__init__(run_yaml, folder, *QUICK, *overrides)
        self.cluster = cluster
        self.job = ""

    # --- the job --------------------------------------------------------------------------------------------------

    def submit(self, *more: str) -> SlurmRealRun:
        """`hybridsched submit`; ``more``: --resume, or further keys."""
        keys = [*self.overrides, f"trainer.default_local_dir={self.folder}"]
        command = ["python", "-m", "hybridsched.cli.main", "submit", str(self.yaml), *keys, *more]
        said = self.cluster.run(*command, timeout_s=LONG_S)
        found = re.search(r"^job +(\d+)", said, re.MULTILINE)
        assert found is not None, said
        self.job = found[1]
        return self

    def finish(self) -> str:
        """Wait for success, with nothing left behind; returns what the job said."""
        self.wait(lambda: self.is_over(), f"job {self.job} ends")
        states = self.cluster.states(self.job)
        assert {"COMPLETED"} == set(states.values()), f"{states}\n{self.said()}\n{self.story()}"
        result = json.loads((self.folder / "attempts" / "latest" / "result.json").read_text())
        assert (result["exit_code"], result["ok"]) == (0, True)
        self.require_gone()
        return self.said()

    def is_over(self) -> bool:
        """Whether no component of the job is going on, or will."""
        states = self.cluster.states(self.job)
        return bool(states) and set(states.values()) <= OVER

    def wait(self, look: Callable[[], T], what: str, deadline_s: float = LONG_S) -> T:
        """Until ``look`` returns something true, while the job is there."""
        end = time.monotonic() + deadline_s
        while not (found := look()):
            if self.is_over():
                found = look()
                assert found, f"{self._told()} before {what}\n{self.cluster.story()}"
                break
            assert time.monotonic() < end, f"{what}: not within {deadline_s:.0f} s; {self._told()}"
            time.sleep(0.2)
        return found

    def _told(self) -> str:
        return f"{self.cluster.states(self.job)}\n{self.said()}\n{self.story()}"

    def wait_said(self, pattern: str) -> re.Match[str]:
        """Until the launch loop says this."""
        return self.wait(lambda: re.search(pattern, self.said()), pattern)

    def wait_restart(self, number: int) -> None:
        """Until the job runs again after a requeue. Slurm's pause of two minutes before that is cut short."""
        self.wait(lambda: self._hasten(number), f"start {number} of job {self.job}", 2 * LONG_S)

    def _hasten(self, number: int) -> bool:
        shown = self.cluster.run("scontrol", "-o", "show", "job", self.job, check=False)
        rows = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in shown.splitlines()]
        for row in rows:
            if row["JobState"] == "PENDING":
                self.cluster.run("scontrol", "update", f"JobId={row['JobId']}", "StartTime=now", check=False)
        return all(row["JobState"] == "RUNNING" and int(row["Restarts"]) >= number for row in rows)

    def said(self) -> str:
        """Of the batch script, over all starts of the job."""
        path = self.folder / "slurm" / f"{self.job}_batch.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def nodes(self) -> list[str]:
        """Of the newest attempt, by rank."""
        found: list[str] = json.loads((self.folder / "attempts" / "latest" / "attempt.json").read_text())["nodes"]
        return found

    def clean_up(self) -> None:
        """For the end of a test, however it went."""
        if self.job and not self.is_over():
            self.cluster.run("scancel", self.job, check=False)
        super().clean_up()

    # --- its processes --------------------------------------------------------------------------------------------

    def pids(self, what: str) -> list[int]:
        """Of a worker by name, or of ``agent.<rank>``; [] when there is none now."""
        if not what.startswith("agent."):
            return super().pids(what)
        try:
            node = self.nodes()[int(what.removeprefix("agent."))]
        except OSError:
            return []
        ours = set(carriers({**self.marks, "SLURMD_NODENAME": node}))
        return [pid for pid, line in self.processes().items() if pid in ours and is_agent(line)]

    def kill(self, what: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal the process ``what``; returns its pid."""
        pid = self.pid(what)
        os.kill(pid, number)
        return pid


def is_agent(line: list[str]) -> bool:
    """Whether a command line is that of a node agent (and not of srun, which carries it, too)."""
    return "hybridsched.runtime.agent_main" in line[:4]


@contextmanager
def slurm_run(cluster: SlurmCluster, run_yaml: Path, folder: Path, *overrides: str) -> Iterator[SlurmRealRun]:
    """A run whose job and processes are gone after the block."""
    run = SlurmRealRun(cluster, run_yaml, folder, *overrides)
    try:
        yield run
    finally:
        run.clean_up()
