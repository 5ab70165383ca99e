"""Real runs for tests: `hybridsched run` in a process of its own, torch, MPI, files; small, and slow where it helps.

Used by tests/real/test_main_job.py and tests/faults. A `RealRun` is watched through what it leaves (run log, /proc,
attempts), never through its memory; every wait has a deadline and says what the run did so far when it passes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import yaml

from hybridsched.runlog.reader import RunLog
from hybridsched.runlog.rows import EventRow
from hybridsched.runtime.adapters.lifeline import RUN_ID_VARIABLE, carriers, sweep
from hybridsched.sample_queue.fsck import FsckReport, fsck

LONG_S = 150.0  #: generous: the machine may be shared
GONE_S = 10.0  #: within which nothing of an ended run is left (DESIGN 14)

T = TypeVar("T")


def make_inputs(folder: Path) -> Path:
    """A barely warm-started demo model and its data, and a run.yaml that names them; returns run.yaml."""
    from hybridsched.demo.make_data import make_data
    from hybridsched.demo.warm_start import make_demo_model

    make_demo_model(folder / "model", seed=0, steps=10)
    data = make_data(folder / "data", n_train=256, n_val=4)
    values = {
        "data": {
            "train_files": [str(data["train.jsonl"])],
            "val_files": [str(data["val.jsonl"])],
            "max_prompt_length": 16,
            "max_response_length": 64,
        },
        "actor_rollout_ref": {
            "model": {"path": str(folder / "model")},
            "actor": {"ppo_mini_batch_size": 4, "optim": {"lr": 5e-4}},
            "rollout": {"n": 4},
        },
        "async_training": {
            "trigger_parameter_sync_step": 2,
            "staleness_threshold": 0.5,
            "use_dynamic_resource_scheduling": True,
            "dynamic_schedule_deactivate_ratio": 0.6,
            "concurrent_samples_per_replica": 3,
        },
        "trainer": {"save_freq": 1, "val_before_train": False, "val_at_end": False},
        "reward": {"function": "count_on"},
        "queue": {"seal_age_s": 0.5},
        "runlog": {"flush_s": 0.5},
        "local": {"allow_oversubscribe": True},
        "faults": {"backoff_s": 0.1},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


class RealRun:
    """A run folder, and the launcher working on it."""

    def __init__(self, run_yaml: Path, folder: Path, *overrides: str) -> None:
        self.yaml = run_yaml
        self.folder = folder
        self.overrides = overrides
        self.process: subprocess.Popen[str] | None = None

    # --- the launcher ---------------------------------------------------------------------------------------------

    def start(self, *more: str) -> RealRun:
        """`hybridsched run`; ``more``: --resume, or further keys."""
        self.process = self.launcher(*more)
        return self

    def launcher(self, *more: str) -> subprocess.Popen[str]:
        """A launcher on this folder that is not ours to wait for."""
        keys = [*self.overrides, f"trainer.default_local_dir={self.folder}"]
        command = [sys.executable, "-m", "hybridsched.cli.main", "run", str(self.yaml), "--quiet", *keys, *more]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def end(self, deadline_s: float = LONG_S) -> tuple[int, str]:
        """Wait for the launcher: (exit code, what it said)."""
        assert self.process is not None
        try:
            said, _ = self.process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"did not end within {deadline_s:.0f} s\n{self.story()}") from None
        return self.process.returncode, said

    def finish(self) -> str:
        """Wait for success, with nothing left behind; returns what was said."""
        code, said = self.end()
        assert code == 0, f"exit code {code}\n{said}\n{self.story()}"
        self.require_gone()
        return said

    def clean_up(self) -> None:
        """For the end of a test, however it went."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        if (self.folder / "run.json").exists():
            sweep(self.marks, GONE_S)

    # --- its processes --------------------------------------------------------------------------------------------

    @property
    def marks(self) -> dict[str, str]:
        """What every process of this run carries in its environment."""
        return {RUN_ID_VARIABLE: json.loads((self.folder / "run.json").read_text())["run_id"]}

    def processes(self) -> dict[int, list[str]]:
        """Command lines of the run's living processes."""
        found = {}
        for pid in carriers(self.marks):
            try:
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            except OSError:
                continue
        return {pid: line for pid, line in found.items() if line}  # empty: a zombie

    def pids(self, what: str) -> list[int]:
        """Of a worker by name, of ``reward``, ``mpiexec``, or ``agent.<rank>``; [] when there is none now."""
        if what.startswith("agent."):
            path = self.folder / "attempts" / "latest" / f"agent-{what.removeprefix('agent.')}.json"
            try:
                pid = int(json.loads(path.read_text())["process"].partition(":")[0])
            except (OSError, ValueError):
                return []
            return [pid] if pid in self.processes() else []
        lines = self.processes()
        if what == "mpiexec":
            return [pid for pid, line in lines.items() if Path(line[0]).name == "mpiexec"]
        if what == "reward":
            return [pid for pid, line in lines.items() if "hybridsched.runtime.workers.reward" in line]
        return [pid for pid, line in lines.items() if what in line and "hybridsched.runtime.workers.process" in line]

    def pid(self, what: str) -> int:
        """The process ``what``, waited for."""
        return self.wait(lambda: self.pids(what), f"process {what}")[0]

    def kill(self, what: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal the process ``what``; returns its pid."""
        pid = self.pid(what)
        os.kill(pid, number)
        return pid

    def require_gone(self) -> None:
        """No process carries the run's mark, at the latest `GONE_S` from now."""
        end = time.monotonic() + GONE_S
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.1)
        assert {} == left

    # --- what it left ---------------------------------------------------------------------------------------------

    def log(self) -> RunLog:
        """The run log as it is now."""
        return RunLog.open(self.folder)

    def events(self, kind: str, entity: str | None = None, new: str | None = None) -> list[EventRow]:
        """Events so far; [] when there is no log yet."""
        try:
            rows = self.log().events(kind, entity)
        except Exception:
            return []
        return [row for row in rows if new in (None, row.new)]

    def cycles(self) -> int:
        """Cycles whose metrics are in the log."""
        try:
            return sum("timing_s/step" in row.values for row in self.log().metric_rows)
        except Exception:
            return 0

    def wait(self, look: Callable[[], T], what: str, deadline_s: float = LONG_S) -> T:
        """Until ``look`` returns something true, while the launcher runs."""
        end = time.monotonic() + deadline_s
        while not (found := look()):
            if self.process is not None and self.process.poll() is not None:
                assert self.process.stdout is not None
                raise AssertionError(
                    f"ended ({self.process.returncode}) before {what}\n{self.process.stdout.read()}\n{self.story()}"
                )
            assert time.monotonic() < end, f"{what}: not within {deadline_s:.0f} s\n{self.story()}"
            time.sleep(0.1)
        return found

    def trained_samples(self) -> int:
        """Samples the metrics of the present history say were trained."""
        return round(sum(row.values.get("samples/trained", 0) for row in self.log().history()))

    def wait_attempt(self, number: int) -> None:
        """Until this attempt is on its way."""
        link = self.folder / "attempts" / "latest"
        self.wait(lambda: link.is_symlink() and os.readlink(link) == str(number), f"attempt {number}")

    def wait_cycles(self, more: int) -> None:
        """Until so many more cycles are done."""
        target = self.cycles() + more
        self.wait(lambda: self.cycles() >= target, f"cycle {target}")

    def wait_event(self, kind: str, entity: str | None, new: str, more: int = 1) -> EventRow:
        """Until there are ``more`` events of this sort beyond those of now; returns the newest."""
        seen = len(self.events(kind, entity, new)) + more
        return self.wait(lambda: self.events(kind, entity, new)[seen - 1 :], f"{kind} {entity} {new}")[-1]

    def require_exactly_once(self, trained: int) -> FsckReport:
        """fsck finds nothing, every sample has one verdict, and so many were trained."""
        report = fsck(self.folder, complete=True)
        assert report.ok, report.text()
        assert report.ledger is not None
        assert trained == report.ledger.verdicts["trained"], report.text()
        return report

    def story(self, last: int = 60) -> str:
        """The last events and logs, for a message."""
        try:
            rows = self.log().event_rows[-last:]
        except Exception as error:
            return f"no run log: {error}"
        lines = [f"{r.time:.2f} {r.kind} {r.entity} {r.old}->{r.new} {r.reason[:200]}" for r in rows]
        for path in sorted((self.folder / "attempts" / "latest" / "logs").glob("*.log")):
            text = path.read_text(errors="replace").splitlines()[-5:]
            lines += [f"--- {path.name}", *text] if text else []
        return "\n".join(lines)


@contextmanager
def real_run(run_yaml: Path, folder: Path, *overrides: str) -> Iterator[RealRun]:
    """A run whose processes are gone after the block."""
    run = RealRun(run_yaml, folder, *overrides)
    try:
        yield run
    finally:
        run.clean_up()


__all__ = ["GONE_S", "LONG_S", "RealRun", "make_inputs", "real_run"]
