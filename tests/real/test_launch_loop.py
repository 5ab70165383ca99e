"""The launch loop with real mpiexec and agents that only play how one ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridsched.runtime.adapters.lifeline import RUN_ID_VARIABLE, carriers, sweep
from hybridsched.slurm.launch_loop import STATUS_PREFIX, is_tried_again

HERE = Path(__file__).parent
LONG_S = 60.0


class Launch:
    """A launcher under test."""

    def __init__(self, folder: Path, part: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "launch_driver.py"), str(folder), "fake_agent"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "FAKE_AGENT": part, "PYTHONPATH": str(HERE)},
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.lines = (json.loads(line) for line in self.process.stdout)
        self.run_id: str = next(self.lines)["run_id"]

    @property
    def marks(self) -> dict[str, str]:
        return {RUN_ID_VARIABLE: self.run_id}

    def until(self, key: str) -> Any:
        """The next line with that key."""
        return next(line[key] for line in self.lines if key in line)

    def end(self) -> tuple[int, str]:
        """(code, everything said)."""
        said, code = [], None
        for line in self.lines:
            said += [line["said"]] if "said" in line else []
            code = line.get("code", code)
        assert self.process.wait(LONG_S) == 0
        assert code is not None
        return code, "\n".join(said)

    def wait_for(self, path: str) -> None:
        """A file of the run folder that is about to come."""
        end = time.monotonic() + LONG_S
        while not (self.folder / path).exists():
            assert time.monotonic() < end, f"{path} did not come"
            time.sleep(0.02)

    def attempts(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "attempts").iterdir() if not path.is_symlink())

    def left(self) -> list[int]:
        """Processes of the run after a generous while."""
        end = time.monotonic() + 10.0
        while (left := carriers(self.marks)) and time.monotonic() < end:
            time.sleep(0.05)
        return left


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[Any]:
    started: list[Launch] = []

    def launch(part: str) -> Launch:
        started.append(Launch(tmp_path / "run", part))
        return started[-1]

    yield launch
    for one in started:
        one.process.kill()
        one.process.wait(LONG_S)
        sweep(one.marks, LONG_S)


def test_success_is_told_by_nobody_but_the_result(launches: Any) -> None:
    launch = launches("success")

    assert {"phase": "playing"} == launch.until("status")
    assert (0, "") == launch.end()
    assert ["1"] == launch.attempts()
    assert "a line that is no status" in (launch.folder / "attempts/latest/logs/launcher.log").read_text()
    assert 0o600 == (launch.folder / "attempts/1/attempt.json").stat().st_mode & 0o777
    assert [] == launch.left()


def test_faults_are_tried_again_with_resume_and_nothing_is_left_between(launches: Any) -> None:
    launch = launches("third-time")
    code, said = launch.end()
    result = json.loads((launch.folder / "attempts/latest/result.json").read_text())

    assert code == 0
    assert "attempt 1 of 3 ended with WorkerDied (exit code 4): fault 1" in said
    assert "attempt 2 of 3 ended with WorkerDied (exit code 4): fault 2" in said
    assert {"resumed": True} == result["summary"]
    assert ["1", "2", "3"] == launch.attempts()
    assert os.readlink(launch.folder / "attempts/latest") == "3"
    assert [] == launch.left()


def test_a_killed_agent_is_a_fault_with_the_reason_and_the_command_to_go_on(launches: Any) -> None:
    launch = launches("killed")
    code, said = launch.end()

    assert code == 4
    assert ["1", "2", "3"] == launch.attempts()
    assert "the step ended without a result" in said
    assert f"logs: {launch.folder}/attempts/3/logs" in said
    assert f"go on with: hybridsched run {launch.folder}/config/resolved.yaml --resume" in said


def test_an_exit_code_of_zero_is_not_believed(launches: Any) -> None:
    code, said = launches("lie").end()

    assert code == 4
    assert "exit code 0 of the launcher" in said


def test_a_good_result_is_believed_whatever_the_exit_code(launches: Any) -> None:
    launch = launches("modest")

    assert (0, "") == launch.end()
    assert ["1"] == launch.attempts()


def test_wrong_input_found_by_any_rank_is_not_tried_again(launches: Any) -> None:
    launch = launches("user-error-on-rank-1")
    code, said = launch.end()

    assert code == 2
    assert "DataError (exit code 2): reward.function does not import" in said
    assert "go on with" not in said
    assert ["1"] == launch.attempts()


def test_a_bug_is_not_tried_again_and_its_traceback_is_kept(launches: Any) -> None:
    launch = launches("bug")
    code, said = launch.end()

    assert code == 70
    assert ["1"] == launch.attempts()
    assert f"traceback: {launch.folder}/attempts/1/logs/traceback.txt" in said
    assert "Traceback: there" == (launch.folder / "attempts/1/logs/traceback.txt").read_text()


def test_a_run_that_has_its_result_and_does_not_end_is_ended(launches: Any) -> None:
    launch = launches("lingering")
    code, said = launch.end()

    assert code == 0
    assert "the run ended, but its processes did not" in said
    assert [] == launch.left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_interruption_is_an_orderly_stop(launches: Any, number: signal.Signals) -> None:
    launch = launches("hang")
    launch.wait_for("attempts/1/ready")
    launch.process.send_signal(number)
    code, said = launch.end()

    assert code == 130
    assert said.startswith("stopping: the run writes a checkpoint and ends; Ctrl-C again to kill it")
    assert "stopped (exit code 130): stopped as asked" in said
    assert ["1"] == launch.attempts()
    assert [] == launch.left()


def test_the_second_interruption_kills(launches: Any) -> None:
    launch = launches("stubborn")
    launch.wait_for("attempts/1/ready")
    launch.process.send_signal(signal.SIGINT)
    assert launch.until("said").startswith("stopping")
    launch.process.send_signal(signal.SIGINT)
    code, said = launch.end()

    assert code == 130
    assert said.startswith("killed\nstopped (exit code 130): killed before the run could end in order")
    assert [] == launch.left()


def test_nothing_is_left_of_a_launcher_that_is_killed_but_what_left_the_run(launches: Any) -> None:
    launch = launches("hang")
    launch.wait_for("attempts/1/ready")
    agents = {
        pid for pid in carriers(launch.marks) if b"time.sleep(600)" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    }
    assert len(agents) >= 3  # mpiexec and two agents
    launch.process.kill()
    launch.process.wait(LONG_S)
    end = time.monotonic() + 10.0
    while (left := agents & set(carriers(launch.marks))) and time.monotonic() < end:
        time.sleep(0.05)

    assert set() == left


def test_a_missing_mpiexec_is_said_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridsched.errors import UserError
    from hybridsched.slurm.local import mpiexec

    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(UserError, match="pip install mpich mpi4py"):
        mpiexec()


@pytest.mark.parametrize(
    ("code", "again"), [(0, False), (1, True), (2, False), (3, False), (4, True), (-9, True), (70, False), (75, False)]
)
def test_only_faults_are_tried_again(code: int, again: bool) -> None:
    assert again == is_tried_again(code)


def test_the_launcher_knows_the_names_rank_0_uses() -> None:
    from hybridsched.runtime import build
    from hybridsched.runtime.adapters.attempt import RESULT_FILE

    assert (build.STATUS_PREFIX, build.RESULT_FILE) == (STATUS_PREFIX, RESULT_FILE)
