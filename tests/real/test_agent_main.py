"""Node agents for real: mpiexec, MPI, worker processes, the launch loop; only controller and workers are stand-ins."""

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

from hybridsched.runtime.adapters.attempt import read_agent
from hybridsched.runtime.adapters.lifeline import RUN_ID_VARIABLE, carriers, send_signal, sweep

HERE = Path(__file__).parent
LONG_S = 90.0
WORKERS = ["hybrid.0", "standalone.0", "trainer.0"]
LENDING = "async_training.use_dynamic_resource_scheduling=true"


class Run:
    """A started run."""

    def __init__(self, folder: Path, part: str) -> None:
        self.folder = folder
        python_path = os.pathsep.join([str(HERE), str(HERE.parent / "fast")])
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "launch_driver.py"), str(folder), "hybridsched.runtime.agent_main", LENDING],
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": python_path,
                "HYBRIDSCHED_TEST_RANK0": "fake_rank0:run",
                "HYBRIDSCHED_TEST_BUILD": "echo_worker:build_any",
                "FAKE_RANK0": part,
            },
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.marks = {RUN_ID_VARIABLE: json.loads(self.process.stdout.readline())["run_id"]}

    def end(self) -> tuple[int, str]:
        """(exit code, everything said); nothing may be left."""
        out, _ = self.process.communicate(timeout=LONG_S)
        lines = [json.loads(line) for line in out.splitlines()]
        assert [] == carriers(self.marks)
        return lines[-1]["code"], "\n".join(line["said"] for line in lines if "said" in line)

    def saw(self) -> Any:
        """What rank 0 wrote down, once it is there."""
        end = time.monotonic() + LONG_S
        while True:
            try:
                return json.loads((self.folder / "saw.json").read_text())
            except (OSError, ValueError):
                assert time.monotonic() < end, self.logs()
                time.sleep(0.05)

    def logs(self) -> str:
        """Of everybody."""
        return "\n".join(f"{p.name}: {p.read_text()}" for p in sorted(self.folder.glob("attempts/*/logs/*")))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    runs: list[Run] = []

    def one(part: str) -> Run:
        runs.append(Run(tmp_path / "run", part))
        return runs[-1]

    yield one
    for run in runs:
        run.process.kill()
        run.process.wait(LONG_S)
        sweep(run.marks, LONG_S)


def test_agents_start_their_workers_stay_small_and_end_in_order(start: Any) -> None:
    run = start("end")
    code, said = run.end()
    saw = run.saw()

    assert (0, "") == (code, said), run.logs()
    assert {"0": ["trainer.0", "hybrid.0"], "1": ["standalone.0"]} == saw["agents"]
    assert {name: f"hello {name}" for name in WORKERS} == {name: saw["answers"][name] for name in WORKERS}
    assert all(kilobytes < 100_000 for kilobytes in saw["memory_kb"].values()), saw["memory_kb"]
    assert sorted(path.name for path in run.folder.glob("attempts/1/exit-*.json")) == ["exit-0.json", "exit-1.json"]


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 130), (signal.SIGUSR2, 75)])
def test_signals_reach_the_controller_as_a_request(start: Any, number: signal.Signals, expected: int) -> None:
    run = start("wait")
    run.saw()
    tag = read_agent(run.folder / "attempts/1", 0)
    assert tag is not None and send_signal(tag, number)

    assert expected == run.end()[0]


def test_a_worker_that_is_killed_is_reported_and_started_again(start: Any) -> None:
    run = start("kill-worker")
    code, _said = run.end()
    saw = run.saw()

    assert code == 0, run.logs()
    assert ["standalone.0"] == [one["worker"] for one in saw["exits"]]
    assert saw["exits"][0]["reason"].startswith("killed by its agent: for the test")
    assert "a001.2" == saw["workers"]["standalone.0"]


def test_a_controller_that_fails_ends_the_step_and_the_loop_resumes(start: Any) -> None:
    run = start("raise")
    code, said = run.end()

    assert code == 4
    assert "attempt 2 of 3 ended with WorkerDied (exit code 4): trainer.0: for the test" in said
    assert run.saw()["resume"] is True


@pytest.mark.parametrize("rank", [0, 1])
def test_an_agent_that_is_killed_ends_the_step_and_the_loop_resumes(start: Any, rank: int) -> None:
    run = start("wait")
    run.saw()
    (run.folder / "saw.json").unlink()
    tag = read_agent(run.folder / "attempts/1", rank)
    assert tag is not None and send_signal(tag, signal.SIGKILL)

    assert run.saw()["resume"] is True
    run.process.send_signal(signal.SIGINT)
    code, said = run.end()
    assert code == 130
    assert "attempt 1 of 3 ended with FaultError (exit code 4): the step ended without a result" in said


def test_nothing_is_left_when_the_launcher_is_killed(start: Any) -> None:
    run = start("wait")
    run.saw()
    assert len(carriers(run.marks)) >= 6  # mpiexec, two agents, three workers
    run.process.kill()
    end = time.monotonic() + 10.0
    while (left := carriers(run.marks)) and time.monotonic() < end:
        time.sleep(0.05)

    assert [] == left


def test_agents_do_not_import_what_only_workers_need() -> None:
    imports = (
        "import sys, hybridsched.runtime.agent_main, hybridsched.runtime.node_agent, hybridsched.runtime.build\n"
        "import hybridsched.runtime.adapters.processes, hybridsched.runtime.adapters.reward_pool\n"
        "import hybridsched.runtime.transport.mpi, hybridsched.runtime.prepare\n"
        "print(sorted({'torch', 'vllm', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", imports], capture_output=True, text=True, timeout=LONG_S, check=True)

    assert "[]" == ended.stdout.strip()
