"""One start of a run on this machine: mpiexec and everything below it.

Owns: the command, the environment, the output of mpiexec, and ending the step. Invariants: mpiexec is in a session of
its own, so a Ctrl-C of the terminal reaches only the launcher, which decides; it is killed when the launcher dies (the
agents watch the launcher themselves, too); nothing of this launch is left after `end`.

Does not: judge how the step ended, or start it again (`launch_loop` does).
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hybridsched.errors import FaultError, UserError
from hybridsched.runtime.adapters.attempt import read_agent, read_exits
from hybridsched.runtime.adapters.lifeline import (
    LAUNCH_VARIABLE,
    RUN_ID_VARIABLE,
    is_alive,
    send_signal,
    sweep,
    without_launcher,
)

AGENT_MODULE = "hybridsched.runtime.agent_main"
SWEEP_S = 10.0  #: within which killed processes are gone

_LIFELINE_MODULE = "hybridsched.runtime.adapters.lifeline"
_CHUNK = 1 << 16
_MAX_LINE = 1 << 20  # of output without a line break
_REAP_S = 10.0


@dataclass(frozen=True, slots=True)
class StepCommand:
    """What is started: ``ranks`` agents of one attempt. ``agent_module``: another one in tests."""

    run_folder: Path
    attempt: int
    attempt_folder: Path
    run_id: str
    launch: str
    ranks: int
    resume: bool
    agent_module: str = AGENT_MODULE

    @property
    def marks(self) -> dict[str, str]:
        """What every process of this launch carries in its environment."""
        return {RUN_ID_VARIABLE: self.run_id, LAUNCH_VARIABLE: self.launch}

    def command(self) -> list[str]:
        """mpiexec with its arguments. Raises UserError when there is none."""
        agent = [sys.executable, "-m", self.agent_module, "--run", str(self.run_folder), "--attempt", str(self.attempt)]
        return [str(mpiexec()), "-launcher", "fork", "-n", str(self.ranks), *agent, *["--resume"] * self.resume]

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Without another launcher's variables (inside a Slurm job hydra would use srun), with the marks."""
        return {**without_launcher(inherited), **self.marks, "PYTHONUNBUFFERED": "1"}


def mpiexec() -> Path:
    """The launcher that belongs to the MPI library of this interpreter. Raises UserError."""
    path = Path(sys.prefix) / "bin" / "mpiexec"
    if not os.access(path, os.X_OK):
        raise UserError(
            f"{path}: not there; local runs use the mpiexec of the Python environment, whose MPI library mpi4py loads: "
            f"{sys.executable} -m pip install mpich mpi4py"
        )
    return path


class LocalStep:
    """A started step. Must be started from the main thread: mpiexec dies with the thread that started it."""

    def __init__(self, what: StepCommand, on_line: Callable[[str], None]) -> None:
        """on_line: gets every line of rank 0's and mpiexec's output, during `pump`."""
        self._what = what
        self._on_line = on_line
        self._rest = b""
        self._agents: dict[int, str] = {}  # rank -> its process
        guard = [sys.executable, "-m", _LIFELINE_MODULE, str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                [*guard, *what.command()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=what.environment(os.environ),
                start_new_session=True,
            )
        except OSError as error:
            raise FaultError(f"mpiexec cannot be started: {error}") from error
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        self._death = os.pidfd_open(self._process.pid)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._output, selectors.EVENT_READ)
        self._selector.register(self._death, selectors.EVENT_READ)

    @property
    def returncode(self) -> int | None:
        """Of mpiexec; None while it runs. Proves nothing about the run."""
        return self._process.poll()

    def pump(self, timeout_s: float) -> None:
        """Wait for output or the end, at most so long, and hand on complete lines."""
        for key, _events in self._selector.select(timeout_s):
            if key.fd == self._output:
                self._read()

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

    def kill(self) -> None:
        """SIGKILL to mpiexec and its session; `end` takes care of the rest."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> list[int]:
        """Kill and collect everything of this launch that is left. Returns pids that would not die."""
        self.kill()
        try:
            self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            return sorted({self._process.pid, *sweep(self._what.marks, SWEEP_S)[1]})
        _killed, left = sweep(self._what.marks, SWEEP_S)
        self._read()
        if self._rest:
            self._on_line(self._rest.decode("utf-8", errors="replace"))
        self._selector.close()
        os.close(self._death)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return left

    def _read(self) -> None:
        """Everything that is there now."""
        while True:
            try:
                data = os.read(self._output, _CHUNK)
            except BlockingIOError:
                return
            if not data:
                if self._output in self._selector.get_map():
                    self._selector.unregister(self._output)
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > _MAX_LINE:
                lines, self._rest = [*lines, self._rest], b""
            for line in lines:
                self._on_line(line.decode("utf-8", errors="replace"))
