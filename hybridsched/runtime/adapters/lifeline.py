"""What ties the processes of a run together, so that none of them outlives it.

    python -m hybridsched.runtime.adapters.lifeline PARENT COMMAND...     become COMMAND, killed when PARENT dies

Owns: the parent-death signal, lifelines (a process that watches another one that is not its parent), the marks a run's
processes carry in their environment, and the sweep over what still carries them. Standard library only, since it runs
in the first lines of every process.

Invariants: only processes of this user are touched, and of those only the ones whose environment carries every mark
that is asked for; a pid is never trusted without its start time, for it may be somebody else's by now. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

RUN_ID_VARIABLE = "HYBRIDSCHED_RUN_ID"  #: mark of every process of a run
LAUNCH_VARIABLE = "HYBRIDSCHED_LAUNCH"  #: mark of every process of one call of the launcher

#: Set by an agent in a Slurm step, for the processes it starts (`spare_signals`).
SPARED_VARIABLE = "HYBRIDSCHED_SPARE_SIGNALS"

_PR_SET_PDEATHSIG = 1
_LAUNCHER_PREFIXES = ("PMI", "OMPI", "MPI", "PRTE", "SLURM", "HYDRA", "I_MPI")
_SWEEP_PAUSE_S = 0.05
_FOLDER = re.compile(r"hs-(\d+)\.(\d+)-.+")  # hs-PID.START-random


def die_with(parent: int) -> None:
    """Be killed when ``parent`` dies; end at once when it already has.

    The signal is armed for the *thread* of the parent that forked: a parent starts its children in its main thread.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused; hybridsched needs Linux")
    if os.getppid() != parent:  # it died before the signal was armed
        os._exit(1)


def spare_signals() -> bool:
    """Let nobody but the agent end this process in order. Returns whether it is one of a Slurm step.

    Slurm sends what is meant for a step to every process of it: TERM when the job ends, USR2 before its time limit. The
    agent and the launch loop know what follows from them, and need their workers for it. Not ignored but handled: what
    this process starts can be ended as usual.
    """
    if SPARED_VARIABLE not in os.environ:
        return False
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda _number, _frame: None)
    return True


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks after boot; None when there is none, or only a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold anything, also spaces and brackets
    return None if fields[0] in "ZX" else int(fields[19])


def tag_of(pid: int) -> str:
    """``PID:START``, which names a process for good. Raises ProcessLookupError when it is gone."""
    ticks = start_ticks(pid)
    if ticks is None:
        raise ProcessLookupError(f"process {pid} is gone")
    return f"{pid}:{ticks}"


def is_alive(tag: str) -> bool:
    """Whether the process named by `tag_of` is there and no zombie."""
    pid, _, ticks = tag.partition(":")
    return start_ticks(int(pid)) == int(ticks)


def open_tag(tag: str) -> int | None:
    """A pidfd of the process named by `tag_of` (readable once it is dead; the caller closes it); None: it is gone."""
    pid, _, ticks = tag.partition(":")
    try:
        fd = os.pidfd_open(int(pid))
    except ProcessLookupError:
        return None
    if start_ticks(int(pid)) == int(ticks):
        return fd
    os.close(fd)
    return None


def send_signal(tag: str, number: signal.Signals) -> bool:
    """Signal the process named by `tag_of`; False when it is gone."""
    fd = open_tag(tag)
    if fd is None:
        return False
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what a launcher left there: a child that kept it would be drawn into the MPI job."""
    return {name: value for name, value in environment.items() if not name.startswith(_LAUNCHER_PREFIXES)}


def carriers(marks: Mapping[str, str], spared: Mapping[str, str] | None = None) -> list[int]:
    """Living processes of this user, without this one, whose environment carries all ``marks``.

    spared: those that carry one of these as well are not meant.
    """
    wanted = {f"{name}={value}".encode() for name, value in marks.items()}
    unwanted = {f"{name}={value}".encode() for name, value in (spared or {}).items()}
    if not wanted:
        raise ValueError("without a mark every process of the user would be meant")
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if entry.stat().st_uid != os.getuid():
                continue
            carried = Path(entry.path, "environ").read_bytes().split(b"\0")
        except OSError:  # gone meanwhile, or not ours to look at
            continue
        if wanted <= set(carried) and not unwanted & set(carried):
            found.append(int(entry.name))
    return sorted(found)


def sweep(
    marks: Mapping[str, str], deadline_s: float, spared: Mapping[str, str] | None = None
) -> tuple[int, list[int]]:
    """Kill everything that carries ``marks`` (and none of ``spared``), for at most ``deadline_s`` seconds.

    Returns (how many were killed, those still there). Looks again after each round: a process may have been started
    between looking and killing.
    """
    killed: set[int] = set()
    end = time.monotonic() + deadline_s
    while left := carriers(marks, spared):
        if time.monotonic() > end:
            return len(killed), left
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed.add(pid)
        time.sleep(_SWEEP_PAUSE_S)
    return len(killed), []


@contextmanager
def private_folder() -> Iterator[Path]:
    """`make_private_folder`, as long as the block lives."""
    folder = make_private_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_private_folder() -> Path:
    """A folder for sockets (0700, short path) on this host's own disk.

    Its name says which process made it, so that what a killed one left behind is removed by the next.
    """
    top = Path(tempfile.gettempdir())
    for entry in os.scandir(top):
        found = _FOLDER.fullmatch(entry.name)
        if found is None or start_ticks(int(found[1])) == int(found[2]):
            continue
        shutil.rmtree(entry.path, ignore_errors=True)  # another user's cannot be removed, and stays
    return Path(tempfile.mkdtemp(prefix=f"hs-{os.getpid()}.{start_ticks(os.getpid())}-", dir=top))


def main(argv: list[str]) -> None:
    """Arm the parent-death signal, which survives exec, and become the command."""
    die_with(int(argv[1]))
    try:
        os.execvp(argv[2], argv[2:])
    except OSError as error:
        print(f"{argv[2]}: cannot be started: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


if __name__ == "__main__":
    main(sys.argv)
