"""What the launch loop starts, whichever program starts it: one step of node agents, one attempt after the other.

Owns: `StepSpec` (what is started), the two protocols the loop works with, and `Child`, the process of a launcher
(mpiexec, srun) and its output. `local` and `srun` implement them.

Invariants: a launcher's process is in a session of its own, so a Ctrl-C of the terminal reaches only the loop, which
decides; it is killed when the loop's process dies.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hybridsched.config.schema import RunConfig
from hybridsched.errors import FaultError
from hybridsched.runtime.adapters.attempt import AttemptInfo, Ending
from hybridsched.runtime.adapters.lifeline import LAUNCH_VARIABLE, RUN_ID_VARIABLE

AGENT_MODULE = "hybridsched.runtime.agent_main"
SWEEP_S = 10.0  #: within which killed processes are gone

OnLine = Callable[[str], None]

_LIFELINE_MODULE = "hybridsched.runtime.adapters.lifeline"
_CHUNK = 1 << 16
_MAX_LINE = 1 << 20  # of output without a line break
_REAP_S = 10.0


@dataclass(frozen=True, slots=True)
class StepSpec:
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
        """What every process of this attempt carries in its environment."""
        return {RUN_ID_VARIABLE: self.run_id, LAUNCH_VARIABLE: self.launch}

    def agent(self, python: str = sys.executable) -> list[str]:
        """The command of one agent."""
        command = [python, "-m", self.agent_module, "--run", str(self.run_folder), "--attempt", str(self.attempt)]
        return [*command, *["--resume"] * self.resume]


class Step(Protocol):
    """A started step."""

    @property
    def returncode(self) -> int | None:
        """Of the launcher; None while it runs. Proves nothing about the run."""
        ...

    def pump(self, timeout_s: float) -> None:
        """Wait for output or the end, at most so long, and hand on complete lines."""
        ...

    def ask(self, number: signal.Signals) -> bool:
        """Ask rank 0 to end in order; False when there is none (yet, or any more)."""
        ...

    def not_up(self) -> list[int]:
        """Ranks whose agent has not said so far who it is."""
        ...

    def lost(self) -> list[int]:
        """Ranks whose agent is gone (or out of reach) without having ended in order."""
        ...

    def end(self) -> list[int]:
        """Kill and collect what is left. Returns pids that would not die."""
        ...


class Launcher(Protocol):
    """A way to start steps, and what it knows about the machines below."""

    def check(self) -> None:
        """Before a folder is made. Raises UserError when steps cannot be started."""
        ...

    def attempt(self, launch: str) -> AbstractContextManager[tuple[Path, AttemptInfo]]:
        """A new attempt's folder, and what its processes have to know; private folders live as long as the block."""
        ...

    def config(self) -> RunConfig:
        """What the present attempt works with."""
        ...

    def command(self, what: StepSpec) -> list[str]:
        """The command line that starts the step."""
        ...

    def start(self, what: StepSpec, on_line: OnLine) -> Step:
        """Start it."""
        ...

    def after(self, ending: Ending, folder: Path) -> Ending:
        """How the attempt ended, with what only this launcher knows (a node is lost, the job has to start anew)."""
        ...

    def resume_command(self) -> str:
        """For people: how the run goes on."""
        ...


class Child:
    """The process of a launcher. Must be started from the main thread: it dies with the thread that started it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], on_line: OnLine) -> None:
        """on_line: gets every line of its output, during `pump`. Raises FaultError when it cannot be started."""
        self.name = Path(command[0]).name
        self._on_line = on_line
        self._rest = b""
        guard = [sys.executable, "-m", _LIFELINE_MODULE, str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                [*guard, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            raise FaultError(f"{self.name} cannot be started: {error}") from error
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        self._death = os.pidfd_open(self._process.pid)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._output, selectors.EVENT_READ)
        self._selector.register(self._death, selectors.EVENT_READ)

    @property
    def pid(self) -> int:
        """Of the launcher."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def pump(self, timeout_s: float) -> None:
        """Wait for output or the end, at most so long, and hand on complete lines."""
        for key, _events in self._selector.select(timeout_s):
            if key.fd == self._output:
                self._read()

    def signal(self, number: signal.Signals) -> None:
        """To the process alone; nothing when it has ended."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended within so long."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> bool:
        """SIGKILL to it and its session; False when it did not die."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        return self.wait(_REAP_S)

    def close(self) -> None:
        """The last lines. It must have ended."""
        self._read()
        if self._rest:
            self._on_line(self._rest.decode("utf-8", errors="replace"))
        self._selector.close()
        os.close(self._death)
        assert self._process.stdout is not None
        self._process.stdout.close()

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
