"""While a step runs: who wants it to end, and when it has to be ended.

Owns: counting signals (`Interruptions`) and the bounds of a running step (`StepWatch`). Nothing here relies on what
the MPI does about a dead rank. Does not: end the step, or judge how it ended.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from hybridsched.config.schema import RunConfig
from hybridsched.errors import FaultError
from hybridsched.runtime.adapters.attempt import read_exits, read_result
from hybridsched.slurm.steps import Step

Say = Callable[[str], None]

#: Asked of a person's terminal, or of whoever ends this process.
TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Asked of a batch script: USR2 before the time limit (--signal), TERM when preempted or at the limit; INT is a
#: person's (scancel --batch --signal=INT).
BATCH_SIGNALS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)

GRACE_S = 5.0  #: between the death of an agent and the end of the step: MPI's own clean-up, or last words
SETTLE_S = 30.0  #: more than deadlines.stop_s, between rank 0's result and the end of the step


class Interruptions:
    """Counts signals while the block runs. Handlers count and do nothing else.

    kills: whether the second one kills; Slurm sends several, and only the first means something new.
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals] = TERMINAL_SIGNALS,
        *,
        kills: bool = True,
        message: str = "stopping: the run writes a checkpoint and ends; Ctrl-C again to kill it",
    ) -> None:
        self.count = 0
        self.by_user = False  #: one of them was an interrupt: the end is wanted, not a new start
        self.kills = kills
        self.message = message
        self._signals = signals
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruptions:
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _received(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.by_user = self.by_user or number == signal.SIGINT


class StepWatch:
    """Says when a running step has to be ended."""

    def __init__(self, step: Step, folder: Path, config: RunConfig, interruptions: Interruptions, say: Say) -> None:
        self._step = step
        self._folder = folder
        self._config = config
        self._interruptions = interruptions
        self._say = say
        self._since: dict[str, float] = {}  # when something was first seen

    @property
    def asked(self) -> bool:
        """Somebody asked for the end."""
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
            self._say(self._interruptions.message)
        if self._interruptions.count > 1 and self._interruptions.kills:
            return "killed"
        bound = stop_bound_s(self._config)
        return f"the orderly stop took more than {bound:.0f} s; killed" if self._for("asked", now) > bound else None

    def _not_ending(self, now: float) -> str | None:
        """After a fault the ranks leave at once, and the next attempt waits for them."""
        result = read_result(self._folder)
        if "result" not in self._since and result is None:
            return None
        bound = self._config.deadlines.stop_s * self._config.deadlines.scale + SETTLE_S
        if result is not None and result.exit_code == FaultError.exit_code:
            bound = GRACE_S / 2 if result.suspects else 2 * GRACE_S  # a launcher may wait for a lost node, in vain
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
        if not lost or "result" in self._since:
            return None
        hopeless = any(
            ending.suspects for ending in read_exits(self._folder)
        )  # MPI will not clean up after a lost node
        if self._for("lost", now) <= (1.0 if hopeless else GRACE_S):
            return None
        return f"agents of ranks {lost} are gone and the rest did not end by itself; killed"

    def _for(self, what: str, now: float) -> float:
        """Seconds since this was first asked."""
        return now - self._since.setdefault(what, now)


def stop_bound_s(config: RunConfig) -> float:
    """How long an orderly stop may take: hybrids leave, a checkpoint is written, workers end."""
    d = config.deadlines
    return (d.switch_s + d.drain_s + d.checkpoint_s + 2 * d.stop_s) * d.scale + SETTLE_S
