"""A node agent that only plays how one ends: FAKE_AGENT names the part. Run by mpiexec through the real launch loop."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from hybridsched.runtime.adapters.attempt import Ending, read_attempt, write_agent, write_exit
from hybridsched.runtime.adapters.lifeline import open_tag, tag_of

RANK = int(os.environ["PMI_RANK"])
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def result(folder: Path, code: int, kind: str = "", text: str = "", **summary: Any) -> None:
    """result.json as runtime.build writes it."""
    error = {"kind": kind, "text": text} if kind else None
    data = {"exit_code": code, "ok": error is None, "summary": summary, **({"error": error} if error else {})}
    (folder / "result.json").write_text(json.dumps(data))


def leave(code: int) -> NoReturn:
    """Like an agent: at once."""
    sys.stdout.flush()
    os._exit(code)


def leave_in_order(folder: Path) -> NoReturn:
    """As a rank does that was told to."""
    write_exit(folder, Ending(0, rank=RANK))
    leave(0)


def wait_for_end() -> NoReturn:
    """Until a signal ends it."""
    while True:
        time.sleep(0.05)


def main() -> None:
    """Play the part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path)
    parser.add_argument("--attempt", type=int)
    parser.add_argument("--resume", action="store_true")
    a = parser.parse_args()
    folder: Path = a.run / "attempts" / str(a.attempt)
    part = os.environ["FAKE_AGENT"]
    write_agent(folder, RANK, tag_of(os.getpid()))
    launcher = open_tag(read_attempt(folder).launcher)
    assert launcher is not None, "the launcher is not who it says it is"
    if RANK != 0:
        if part == "user-error-on-rank-1":
            write_exit(folder, Ending(2, "DataError", "reward.function does not import", rank=1))
            leave(2)
        wait_for_end() if part in ("hang", "stubborn", "killed") else leave_in_order(folder)
    print('@status {"phase": "playing"}', flush=True)
    print("a line that is no status", flush=True)
    parts[part](folder, a)


def success(folder: Path, a: argparse.Namespace) -> None:
    result(folder, 0, resumed=a.resume)
    leave(0)


def third_time(folder: Path, a: argparse.Namespace) -> None:
    """Faults twice, each time leaving a process of its own session behind."""
    if a.attempt < 3:
        subprocess.Popen(SLEEP, start_new_session=True)
        write_exit(folder, Ending(4, "WorkerDied", f"fault {a.attempt}"))
        leave(4)
    success(folder, a)


def killed(folder: Path, a: argparse.Namespace) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lie(folder: Path, a: argparse.Namespace) -> None:
    """All is well, says the exit code."""
    leave(0)


def modest(folder: Path, a: argparse.Namespace) -> None:
    """A good result, and an exit code that says otherwise."""
    result(folder, 0)
    leave(7)


def bug(folder: Path, a: argparse.Namespace) -> None:
    write_exit(folder, Ending(70, "InternalError", "illegal transition", "Traceback: there"))
    leave(70)


def hang(folder: Path, a: argparse.Namespace) -> None:
    """Stops in order when asked."""

    def stop(_number: int, _frame: Any) -> None:
        result(folder, 130, "Interrupted", "stopped as asked")
        os._exit(130)

    signal.signal(signal.SIGTERM, stop)
    stubborn(folder, a)


def stubborn(folder: Path, a: argparse.Namespace) -> None:
    """Does not stop, and has a child in a session of its own."""
    if os.environ["FAKE_AGENT"] == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(SLEEP, start_new_session=True)
    (folder / "ready").touch()
    wait_for_end()


def lingering(folder: Path, a: argparse.Namespace) -> None:
    """Has its result and does not end."""
    result(folder, 0)
    wait_for_end()


parts = {
    "success": success,
    "third-time": third_time,
    "killed": killed,
    "lie": lie,
    "modest": modest,
    "bug": bug,
    "hang": hang,
    "stubborn": stubborn,
    "lingering": lingering,
    "user-error-on-rank-1": lambda folder, a: wait_for_end(),
}

if __name__ == "__main__":
    main()
