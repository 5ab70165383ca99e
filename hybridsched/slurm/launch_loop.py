"""The launch loop: start the job step, watch it, and start it again with resume when it ended badly (DESIGN 4).

Owns: attempts and their folders, what is done with Ctrl-C, the judgement how an attempt ended, and the last message.

Invariants
    Success is what rank 0 wrote into result.json, never the exit code of a launcher: that of mpiexec or srun depends
    on the MPI, on who died and in which order.
    Between two attempts, and after the last one, no process of this launch is left.
    Only faults are tried again (exit codes 1, 4 and signals). Wrong input (2), a lost run folder (3), a broken rule
    (70), a requeue (75), an orderly stop (130) and a stalled run would end the same way, or are what somebody wanted.
    The first Ctrl-C (or SIGTERM, SIGHUP) asks rank 0 to stop in order, the second one kills. Neither waits without a
    bound.

Does not: know what a run does, or read its data. `local` starts the processes.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TextIO

from hybridsched.config.schema import RunConfig
from hybridsched.errors import FaultError, Interrupted, RunStalled
from hybridsched.runtime.adapters.attempt import Ending, new_attempt, read_exits, read_result
from hybridsched.runtime.adapters.lifeline import private_folder, tag_of
from hybridsched.runtime.prepare import PreparedRun
from hybridsched.slurm.local import AGENT_MODULE, LocalStep, StepCommand, mpiexec

STATUS_PREFIX = "@status "  #: of rank 0's lines that are for the live view (runtime.build writes them)

OnStatus = Callable[[dict[str, Any]], None]
Say = Callable[[str], None]

_FAULT = FaultError.exit_code
_RETRIED = (1, _FAULT)
_LOOK_S = 0.25  # between two looks at signals and files
_GRACE_S = 5.0  # between the death of an agent and the end of the step: MPI's own clean-up, or last words
_SETTLE_S = 30.0  # more than deadlines.stop_s, between rank 0's result and the end of the step
_TAIL_LINES = 10
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
    mpiexec()  # a missing one is said before a folder is made
    with Interruptions() as interruptions:
        return _Loop(prepared, on_status, say or _to_stderr, agent_module, interruptions).run()


def _to_stderr(message: str) -> None:
    sys.stdout.flush()
    print(f"hybridsched: {message}", file=sys.stderr, flush=True)


class Interruptions:
    """Counts Ctrl-C and its relatives while the block runs. Handlers count and do nothing else."""

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruptions:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _received(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1


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


class StepWatch:
    """Says when a running step has to be ended. Nothing here relies on what the MPI does about a dead rank."""

    def __init__(
        self, step: LocalStep, folder: Path, config: RunConfig, interruptions: Interruptions, say: Say
    ) -> None:
        self._step = step
        self._folder = folder
        self._config = config
        self._interruptions = interruptions
        self._say = say
        self._since: dict[str, float] = {}  # when something was first seen

    @property
    def asked(self) -> bool:
        """The user asked for the end."""
        return "asked" in self._since

    def why_end(self, now: float) -> str | None:
        """The reason to end the step now, for people; None: let it run."""
        return self._interrupted(now) or self._not_ending(now) or self._not_starting(now) or self._lost(now)

    def _interrupted(self, now: float) -> str | None:
        if not self._interruptions.count:
            return None
        if not self.asked:
            self._since["asked"] = now
            if not self._step.ask(signal.SIGTERM):
                return "stopped before the run began"
            self._say("stopping: the run writes a checkpoint and ends; Ctrl-C again to kill it")
        if self._interruptions.count > 1:
            return "killed"
        bound = stop_bound_s(self._config)
        return f"the orderly stop took more than {bound:.0f} s; killed" if self._for("asked", now) > bound else None

    def _not_ending(self, now: float) -> str | None:
        if "result" not in self._since and read_result(self._folder) is None:
            return None
        bound = self._config.deadlines.stop_s * self._config.deadlines.scale + _SETTLE_S
        if self._for("result", now) <= bound:
            return None
        return f"the run ended, but its processes did not within {bound:.0f} s; killed"

    def _not_starting(self, now: float) -> str | None:
        bound = self._config.deadlines.start_s * self._config.deadlines.scale
        waited = self._for("start", now)
        if waited <= bound or not (missing := self._step.not_up()):
            return None
        return f"agents of ranks {missing} did not come up within {bound:.0f} s (deadlines.start_s); killed"

    def _lost(self, now: float) -> str | None:
        lost = self._step.lost()
        if not lost or "result" in self._since or self._for("lost", now) <= _GRACE_S:
            return None
        return f"agents of ranks {lost} are gone and the rest did not end by itself; killed"

    def _for(self, what: str, now: float) -> float:
        """Seconds since this was first asked."""
        return now - self._since.setdefault(what, now)


def stop_bound_s(config: RunConfig) -> float:
    """How long an orderly stop may take: hybrids leave, a checkpoint is written, workers end."""
    d = config.deadlines
    return (d.switch_s + d.drain_s + d.checkpoint_s + 2 * d.stop_s) * d.scale + _SETTLE_S


class _Loop:
    """One call of run_local."""

    def __init__(
        self, prepared: PreparedRun, on_status: OnStatus, say: Say, agent_module: str, interruptions: Interruptions
    ) -> None:
        self._run = prepared
        self._on_status = on_status
        self._say = say
        self._agent_module = agent_module
        self._interruptions = interruptions
        self._launch = secrets.token_hex(8)

    def run(self) -> int:
        """Attempt after attempt."""
        faults = self._run.config.faults
        resume = self._run.resume
        outcome = self._attempt(resume=resume)
        for used in range(1, faults.attempts):
            if outcome.left or not outcome.is_tried_again or self._interruptions.count:
                break
            pause = faults.backoff_s * 2 ** (used - 1)
            self._say(
                f"attempt {used} of {faults.attempts} ended with {_told(outcome.ending)}\n"
                f"starting again from the newest checkpoint in {pause:g} s; logs: {outcome.folder / 'logs'}"
            )
            if not self._sleep(pause):
                outcome = Outcome(_interrupted("stopped between two attempts"), outcome.folder)
                break
            outcome = self._attempt(resume=True)
        self._conclude(outcome)
        return outcome.code

    def _attempt(self, *, resume: bool) -> Outcome:
        with private_folder() as sockets:
            folder, info = new_attempt(
                self._run.folder.resolve(), self._run.run_id, self._launch, tag_of(os.getpid()), str(sockets)
            )
            what = StepCommand(
                run_folder=self._run.folder.resolve(),
                attempt=info.attempt,
                attempt_folder=folder,
                run_id=self._run.run_id,
                launch=self._launch,
                ranks=self._run.plan.world_size,
                resume=resume,
                agent_module=self._agent_module,
            )
            with open(folder / "logs" / "launcher.log", "w", encoding="utf-8") as log:
                print(f"$ {shlex.join(what.command())}", file=log, flush=True)
                return self._watch(what, log)

    def _watch(self, what: StepCommand, log: TextIO) -> Outcome:
        step = LocalStep(what, lambda line: self._line(line, log))
        watch = StepWatch(step, what.attempt_folder, self._run.config, self._interruptions, self._say)
        try:
            while step.returncode is None:
                step.pump(_LOOK_S)
                if (reason := watch.why_end(time.monotonic())) is not None:
                    self._say(reason)
                    break
        finally:
            code = step.returncode
            left = step.end()
            print(f"mpiexec ended with {code}; left over: {left}", file=log, flush=True)
        return Outcome(judge(what.attempt_folder, code, stopped=watch.asked), what.attempt_folder, tuple(left))

    def _line(self, line: str, log: TextIO) -> None:
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
                lines.append(f"go on with: {self._resume_command()}")
        if outcome.left:
            lines.append(f"processes that would not die: {list(outcome.left)}")
        if lines:
            self._say("\n".join(lines))

    def _resume_command(self) -> str:
        resolved = self._run.folder / "config" / "resolved.yaml"
        return shlex.join(["hybridsched", "run", str(resolved), "--resume"])


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
