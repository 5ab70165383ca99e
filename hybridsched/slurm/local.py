"""Steps on this machine: mpiexec and everything below it.

Owns: mpiexec's command and environment, who of its agents lives (they are processes of this host), and ending the step.
Invariant: nothing of an attempt is left after `LocalStep.end`.

Does not: judge how the step ended, or start it again (`launch_loop` does).
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hybridsched.config.schema import RunConfig
from hybridsched.errors import UserError
from hybridsched.runtime.adapters.attempt import AttemptInfo, Ending, new_attempt, read_agent, read_exits
from hybridsched.runtime.adapters.lifeline import (
    is_alive,
    private_folder,
    send_signal,
    sweep,
    tag_of,
    without_launcher,
)
from hybridsched.runtime.prepare import PreparedRun
from hybridsched.slurm.steps import SWEEP_S, Child, OnLine, StepSpec


def mpiexec() -> Path:
    """The launcher that belongs to the MPI library of this interpreter. Raises UserError."""
    path = Path(sys.prefix) / "bin" / "mpiexec"
    if not os.access(path, os.X_OK):
        raise UserError(
            f"{path}: not there; local runs use the mpiexec of the Python environment, whose MPI library mpi4py loads: "
            f"{sys.executable} -m pip install mpich mpi4py"
        )
    return path


class LocalLauncher:
    """Implements `steps.Launcher` on this machine."""

    def __init__(self, run: PreparedRun) -> None:
        self._run = run

    def check(self) -> None:
        """Raises UserError when there is no mpiexec."""
        mpiexec()

    @contextmanager
    def attempt(self, launch: str) -> Iterator[tuple[Path, AttemptInfo]]:
        """The agents' sockets lie in a folder that goes with the block."""
        with private_folder() as sockets:
            yield new_attempt(self._run.folder.resolve(), self._run.run_id, launch, tag_of(os.getpid()), str(sockets))

    def config(self) -> RunConfig:
        """Always what the run was prepared with."""
        return self._run.config

    def command(self, what: StepSpec) -> list[str]:
        """mpiexec with its arguments."""
        return [str(mpiexec()), "-launcher", "fork", "-n", str(what.ranks), *what.agent()]

    def start(self, what: StepSpec, on_line: OnLine) -> LocalStep:
        """Start it."""
        return LocalStep(what, self.command(what), on_line)

    def after(self, ending: Ending, folder: Path) -> Ending:
        """Nothing to add: there is one machine, and this process is on it."""
        return ending

    def resume_command(self) -> str:
        """For people."""
        resolved = self._run.folder / "config" / "resolved.yaml"
        return shlex.join(["hybridsched", "run", str(resolved), "--resume"])


class LocalStep:
    """Implements `steps.Step`. Must be started from the main thread."""

    def __init__(self, what: StepSpec, command: list[str], on_line: OnLine) -> None:
        self._what = what
        self._agents: dict[int, str] = {}  # rank -> its process
        self._child = Child(command, step_environment(what, os.environ), on_line)

    @property
    def returncode(self) -> int | None:
        """Of mpiexec; None while it runs. Proves nothing about the run."""
        return self._child.returncode

    def pump(self, timeout_s: float) -> None:
        """Wait for output or the end, at most so long, and hand on complete lines."""
        self._child.pump(timeout_s)

    def ask(self, number: signal.Signals) -> bool:
        """Signal rank 0's agent; False when there is none (yet, or any more)."""
        tag = read_agent(self._what.attempt_folder, 0)
        return tag is not None and send_signal(tag, number)

    def not_up(self) -> list[int]:
        """Ranks whose agent has not said so far who it is."""
        for rank in range(self._what.ranks):
            if rank not in self._agents and (tag := read_agent(self._what.attempt_folder, rank)) is not None:
                self._agents[rank] = tag
        return [rank for rank in range(self._what.ranks) if rank not in self._agents]

    def lost(self) -> list[int]:
        """Ranks whose agent is gone without having ended in order."""
        self.not_up()
        gone = [rank for rank, tag in self._agents.items() if not is_alive(tag)]
        if not gone:
            return []
        in_order = {ending.rank for ending in read_exits(self._what.attempt_folder) if ending.exit_code == 0}
        return sorted(set(gone) - in_order)

    def end(self) -> list[int]:
        """Kill and collect everything of this attempt that is left. Returns pids that would not die."""
        if not self._child.kill():
            return sorted({self._child.pid, *sweep(self._what.marks, SWEEP_S)[1]})
        _killed, left = sweep(self._what.marks, SWEEP_S)
        self._child.close()
        return left


def step_environment(what: StepSpec, inherited: Mapping[str, str]) -> dict[str, str]:
    """Without another launcher's variables (inside a Slurm job hydra would use srun), with the marks."""
    return {**without_launcher(inherited), **what.marks, "PYTHONUNBUFFERED": "1"}
