"""Calling Slurm's commands: bounded, and with errors for people.

Owns: the bound of one call, and the difference between "Slurm said no" (`Said.ok` is false, with its words) and "Slurm
could not be asked" (FaultError, UserError). Invariant: no shell is involved; arguments arrive as they are.
Does not: interpret what Slurm prints (`state`, `submission` do).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridsched.errors import FaultError, UserError

CALL_S = 60.0  #: bound of one call; a busy controller may take many seconds


@dataclass(frozen=True, slots=True)
class Said:
    """What a command answered."""

    ok: bool
    out: str
    err: str

    @property
    def reason(self) -> str:
        """Its words about a refusal, on one line."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        return "; ".join(lines) or "no reason given"


Call = Callable[[Sequence[str]], Said]


def call(command: Sequence[str]) -> Said:
    """Run a Slurm command. Raises UserError when there is none here, FaultError when it does not answer in time."""
    # SLURM_TIME_FORMAT and SQUEUE_FORMAT of users would change what is parsed here.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SQUEUE_", "SACCT_"))}
    try:
        done = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CALL_S,
            env=environment,
            check=False,
        )
    except FileNotFoundError:
        raise UserError(
            f"{command[0]}: not found; this is no login node of a Slurm cluster (module load slurm? or hybridsched run)"
        ) from None
    except subprocess.TimeoutExpired:
        raise FaultError(f"{' '.join(command)}: no answer from Slurm within {CALL_S:.0f} s; try again later") from None
    except OSError as error:
        raise FaultError(f"{command[0]}: cannot be started: {error.strerror}") from error
    return Said(done.returncode == 0, done.stdout, done.stderr)
