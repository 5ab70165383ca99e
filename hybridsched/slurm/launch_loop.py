"""The launch loop: start the job step, watch it, and start it again with resume when it ended badly (DESIGN 4).

Owns: attempts and their order, the judgement how an attempt ended, and the last message.

Invariants
    Success is what rank 0 wrote into result.json, never the exit code of a launcher: that of mpiexec or srun depends
    on the MPI, on who died and in which order.
    Between two attempts, and after the last one, no process of this launch is left.
    Only faults are tried again (exit codes 1, 4 and signals). Wrong input (2), a lost run folder (3), a broken rule
    (70), a requeue (75), an orderly stop (130) and a stalled run would end the same way, or are what somebody wanted.
    The first Ctrl-C (or SIGTERM, SIGHUP) asks rank 0 to stop in order, the second one kills. Neither waits without a
    bound.

One loop, two kinds of step: `local` starts them by mpiexec, `srun` inside a Slurm job, where also a lost node is found
out between two attempts. Does not: know what a run does, or read its data.
"""

from __future__ import annotations

import json
import secrets
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from hybridsched.errors import FaultError, Interrupted, RunStalled
from hybridsched.runtime.adapters.attempt import BEAT_LINE, Ending, read_exits, read_result
from hybridsched.runtime.prepare import PreparedRun
from hybridsched.slurm.local import LocalLauncher
from hybridsched.slurm.step_watch import Interruptions, Say, StepWatch
from hybridsched.slurm.steps import AGENT_MODULE, Launcher, StepSpec

STATUS_PREFIX = "@status "  #: of rank 0's lines that are for the live view (runtime.build writes them)

OnStatus = Callable[[dict[str, Any]], None]

_FAULT = FaultError.exit_code
_RETRIED = (1, _FAULT)
_LOOK_S = 0.25  # between two looks at signals and files
_TAIL_LINES = 10


def run_local(
    prepared: PreparedRun,
    *,
    on_status: OnStatus = lambda _status: None,
    say: Say | None = None,
    agent_module: str = AGENT_MODULE,
) -> int:
    """Run to the end on this machine. Returns the exit code of the run (errors.py); the reason has been said.

    on_status: live progress. say: one message for people (None: stderr). Call it from the main thread.
    """
    launcher = LocalLauncher(prepared)
    launcher.check()
    with Interruptions() as interruptions:
        return LaunchLoop(prepared, launcher, interruptions, on_status, say or to_stderr, agent_module).run().code


def to_stderr(message: str) -> None:
    """One message for people."""
    sys.stdout.flush()
    print(f"hybridsched: {message}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended. ``left``: processes that would not die."""

    ending: Ending
    folder: Path
    left: tuple[int, ...] = ()

    @property
    def code(self) -> int:
        """Exit code of the run, if this was the last attempt."""
        return self.ending.exit_code

    @property
    def is_tried_again(self) -> bool:
        """Whether another attempt may end better: not when everything was filtered or failing."""
        return is_tried_again(self.code) and self.ending.kind != RunStalled.__name__


def is_tried_again(code: int) -> bool:
    """Whether an attempt that ended so is followed by another one."""
    return code in _RETRIED or code < 0


class LaunchLoop:
    """One start of a run: attempt after attempt, until it succeeds or nothing more can be tried here."""

    def __init__(
        self,
        prepared: PreparedRun,
        launcher: Launcher,
        interruptions: Interruptions,
        on_status: OnStatus,
        say: Say,
        agent_module: str = AGENT_MODULE,
    ) -> None:
        self._run = prepared
        self._launcher = launcher
        self._on_status = on_status
        self._say = say
        self._agent_module = agent_module
        self._interruptions = interruptions
        self._launch = secrets.token_hex(8)

    def run(self) -> Outcome:
        """To the end; the last message has been said. Call it from the main thread."""
        faults = self._run.config.faults
        outcome = self._attempt(resume=self._run.resume)
        for used in range(1, faults.attempts):
            if outcome.left or not outcome.is_tried_again or self._interruptions.count:
                break
            pause = faults.backoff_s * 2 ** (used - 1)
            self._say(
                f"attempt {used} of {faults.attempts} ended with {_told(outcome.ending)}\n"
                f"starting again from the newest checkpoint in {pause:g} s; logs: {outcome.folder / 'logs'}"
            )
            if not self._sleep(pause):
                ending = self._launcher.after(_interrupted("stopped between two attempts"), outcome.folder)
                outcome = Outcome(ending, outcome.folder)
                break
            outcome = self._attempt(resume=True)
        self._conclude(outcome)
        return outcome

    def _attempt(self, *, resume: bool) -> Outcome:
        with self._launcher.attempt(self._launch) as (folder, info):
            what = StepSpec(
                run_folder=self._run.folder.resolve(),
                attempt=info.attempt,
                attempt_folder=folder,
                run_id=self._run.run_id,
                launch=info.launch,
                ranks=len(info.nodes) or self._run.plan.world_size,
                resume=resume,
                agent_module=self._agent_module,
            )
            with open(folder / "logs" / "launcher.log", "w", encoding="utf-8") as log:
                print(f"$ {shlex.join(self._launcher.command(what))}", file=log, flush=True)
                outcome = self._watch(what, log)
        return Outcome(self._launcher.after(outcome.ending, folder), folder, outcome.left)

    def _watch(self, what: StepSpec, log: TextIO) -> Outcome:
        step = self._launcher.start(what, lambda line: self._line(line, log))
        watch = StepWatch(step, what.attempt_folder, self._launcher.config(), self._interruptions, self._say)
        try:
            while step.returncode is None:
                step.pump(_LOOK_S)
                if (reason := watch.why_end(time.monotonic())) is not None:
                    self._say(reason)
                    break
        finally:
            code = step.returncode
            left = step.end()
            print(f"the launcher ended with {code}; left over: {left}", file=log, flush=True)
        return Outcome(judge(what.attempt_folder, code, stopped=watch.asked), what.attempt_folder, tuple(left))

    def _line(self, line: str, log: TextIO) -> None:
        if line == BEAT_LINE:
            return  # of rank 0, for the step
        if not line.startswith(STATUS_PREFIX):
            print(line, file=log, flush=True)
            return
        try:
            status = json.loads(line.removeprefix(STATUS_PREFIX))
        except ValueError:
            print(line, file=log, flush=True)
        else:
            self._on_status(status)

    def _sleep(self, seconds: float) -> bool:
        """False when interrupted."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self._interruptions.count:
            time.sleep(min(_LOOK_S, left))
        return not self._interruptions.count

    # --- the last message -----------------------------------------------------------------------------------------

    def _conclude(self, outcome: Outcome) -> None:
        lines = []
        ending, folder = outcome.ending, outcome.folder
        if ending.exit_code:
            lines += [_told(ending), f"logs: {folder / 'logs'}"]
            if ending.traceback:
                where = folder / "logs" / "traceback.txt"
                where.write_text(ending.traceback, encoding="utf-8")
                lines.append(f"traceback: {where}")
            if ending.exit_code not in (2, 3):
                lines.append(f"go on with: {self._launcher.resume_command()}")
        if outcome.left:
            lines.append(f"processes that would not die: {list(outcome.left)}")
        if lines:
            self._say("\n".join(lines))


def judge(folder: Path, launcher_code: int | None, *, stopped: bool) -> Ending:
    """How the attempt in ``folder`` ended, from what its processes left there.

    launcher_code: of mpiexec or srun, only for the message. stopped: somebody asked for the end.
    """
    result = read_result(folder)
    if result is not None:
        return result
    errors = [ending for ending in read_exits(folder) if ending.exit_code != 0]
    if errors:
        # Of several ranks the one whose end cannot be mended by another start; else the first one.
        return next((ending for ending in errors if not is_tried_again(ending.exit_code)), errors[0])
    if stopped:
        return _interrupted("killed before the run could end in order; what was durable is kept")
    text = f"the step ended without a result ({_launcher_end(launcher_code)})"
    if any(folder.glob("agent-*.json")):
        return Ending(_FAULT, "FaultError", f"{text}: a node agent or the launcher of the step was killed")
    lines = [f"{text}: no agent came up", *_tail(folder / "logs" / "launcher.log")]
    return Ending(_FAULT, "FaultError", "\n".join(lines))


def _interrupted(text: str) -> Ending:
    return Ending(Interrupted.exit_code, "Interrupted", text)


def _launcher_end(code: int | None) -> str:
    if code is None:
        return "the launcher was killed"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code} of the launcher"


def _told(ending: Ending) -> str:
    what = {"Interrupted": "stopped", "RequeueRequested": "to be started again"}.get(
        ending.kind, ending.kind or "failed"
    )
    return f"{what} (exit code {ending.exit_code}): {ending.text}"


def _tail(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[1:-1]  # without our own
    except OSError:
        return []
    return [f"    {line}" for line in lines[-_TAIL_LINES:]]


__all__ = ["Interruptions", "LaunchLoop", "Outcome", "is_tried_again", "judge", "run_local", "to_stderr"]
