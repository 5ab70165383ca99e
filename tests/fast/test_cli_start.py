"""What `run` and `demo` do around a run: order of steps, live view, summary, exit codes. The run itself is replaced."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from hybridsched.cli import main as cli
from hybridsched.cli.summary import summary_pairs
from hybridsched.demo import inputs
from hybridsched.errors import DataError
from hybridsched.runlog.writer import HDF5RunLog

RUN = """\
actor_rollout_ref: {actor: {strategy: emulated}, rollout: {name: emulated}}
local: {allow_oversubscribe: true}
"""


class FakeLaunch:
    """Stands for the launch loop: leaves a run log with these rewards, sends one status, ends with this code."""

    def __init__(self) -> None:
        self.code = 0
        self.rewards = [0.25, 0.75]
        self.calls: list[tuple[Path, bool]] = []
        self.on_status = None

    def __call__(self, prepared, *, on_status=None) -> int:
        self.calls.append((prepared.folder, prepared.resume))
        self.on_status = on_status
        log = HDF5RunLog(
            prepared.folder / "log", "controller", run_id=prepared.run_id, wall=time.time, now=time.monotonic
        )
        log.event("run", "run", new="started", reason="attempt 1")
        for step, reward in enumerate(self.rewards, 1):
            log.metrics(step, {"rollout/reward/mean": reward, "timing_s/step": 2.0, "timing_s/gen": 1.5})
        log.event("run", "run", new="finished", reason="all done")
        log.close()
        if on_status is not None:
            on_status({"phase": "cycle done", "version": 2, "queue": 5})
        return self.code


@pytest.fixture
def launch(monkeypatch) -> FakeLaunch:
    fake = FakeLaunch()
    monkeypatch.setattr("hybridsched.slurm.launch_loop.run_local", fake)
    return fake


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Run a command in an empty folder that has a run.yaml: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN, encoding="utf-8")

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_run_shows_progress_summary_and_report(call, launch, tmp_path):
    code, out, err = call("run", "run.yaml", "trainer.experiment_name=mine")
    assert (0, "") == (code, err)
    assert [(Path("runs/mine"), False)] == launch.calls
    lines = out.splitlines()
    assert "cycle 2 cycle done" in lines[0]
    assert "finished: all done" in out
    assert "0.25 -> 0.75 (first and last tenth)" in out
    assert "report: runs/mine/report.html" == lines[-1]
    assert (tmp_path / "runs" / "mine" / "report.html").stat().st_size > 1000


def test_quiet_shows_no_progress(call, launch):
    code, out, _ = call("run", "run.yaml", "--quiet")
    assert (0, None) == (code, launch.on_status)
    assert "cycle done" not in out


@pytest.mark.parametrize("ended", [2, 3, 4, 70, 75, 130])
def test_run_ends_with_the_exit_code_of_the_run(call, launch, ended):
    launch.code = ended
    code, out, _ = call("run", "run.yaml")
    assert ended == code
    assert "report: " in out


def test_resume_goes_on_in_the_same_folder_and_force_replaces_it(call, launch, tmp_path):
    def run_id() -> str:
        return json.loads((tmp_path / "runs" / "run" / "run.json").read_text(encoding="utf-8"))["run_id"]

    assert 0 == call("run", "run.yaml")[0]
    first = run_id()
    code, _, err = call("run", "run.yaml")
    assert 2 == code
    assert "--resume" in err
    assert 0 == call("run", "run.yaml", "--resume")[0]
    assert first == run_id()
    assert 0 == call("run", "run.yaml", "--force")[0]
    assert first != run_id()
    assert [False, True, False] == [resume for _, resume in launch.calls]


def test_a_run_that_left_no_log_still_tells_its_exit_code(call, monkeypatch):
    monkeypatch.setattr("hybridsched.slurm.launch_loop.run_local", lambda prepared, on_status=None: 4)
    code, out, err = call("run", "run.yaml")
    assert (4, "") == (code, out)
    assert "no report: " in err


def test_status_report_explain_and_compare_read_the_run(call, launch):
    call("run", "run.yaml", "trainer.experiment_name=one")
    call("run", "run.yaml", "trainer.experiment_name=two")
    code, out, _ = call("status", "runs/one", "--json")
    found = json.loads(out)
    assert (0, "not started", None, 2) == (code, found["controller"], found["attempt"], found["last cycle"])
    code, out, _ = call("report", "runs/one", "--json")
    assert (0, 0.25, 0.75) == (code, json.loads(out)["reward_first"], json.loads(out)["reward_last"])
    assert (0, "page.html\n") == call("report", "runs/one", "--open-html", "page.html")[:2]
    code, out, _ = call("explain", "runs/one", "run")
    assert (0, True) == (code, "all done" in out)
    code, out, _ = call("compare", "runs/one", "runs/two")
    assert (0, ["one", "two"]) == (code, out.splitlines()[0].split())


# -- demo


@pytest.fixture
def ready(monkeypatch, tmp_path):
    """A warm start that takes no time; returns the demo's folder."""

    monkeypatch.setattr(inputs, "WARM_START_STEPS", 2)
    return tmp_path / "runs" / "demo"


def test_demo_makes_its_inputs_runs_and_judges(call, launch, ready):
    code, out, _ = call("demo", "--cycles", "3", "local.allow_oversubscribe=true")
    assert 0 == code
    assert [(ready / "run", False)] == launch.calls
    assert f"report: {ready / 'run' / 'report.html'}" in out
    assert "s model and data" in out
    resolved = (ready / "run" / "config" / "resolved.yaml").read_text(encoding="utf-8")
    assert "total_training_steps: 3" in resolved
    code, out, _ = call("demo", "--keep", "--static", "local.allow_oversubscribe=true")
    assert (0, ready / "run-2") == (code, launch.calls[-1][0])
    assert "static_fully_async" in out


def test_demo_fails_when_nothing_is_learnt(call, launch, ready):
    launch.rewards = [0.25, 0.3]
    code, out, err = call("demo", "local.allow_oversubscribe=true")
    assert 4 == code
    assert "report: " in out
    assert "went from 0.250 to 0.300" in err
    assert 0 == call("demo", "--min-rise", "0.04", "local.allow_oversubscribe=true")[0]


def test_demo_ends_with_the_exit_code_of_its_run(call, launch, ready):
    launch.code = 130
    assert 130 == call("demo", "local.allow_oversubscribe=true")[0]


@pytest.mark.parametrize(
    ("override", "says"), [("rollout.agent=m:f", "not available yet"), ("launcher=slurm", "make slurm-demo")]
)
def test_demo_tells_what_it_cannot_do_before_it_trains_a_model(call, launch, monkeypatch, override, says):
    def make(*_, **__):
        raise DataError("the model was made first")

    monkeypatch.setattr(inputs, "make_inputs", make)
    code, _, err = call("demo", override)
    assert 2 == code
    assert says in err


# -- wording


def test_the_summary_is_told_even_of_a_run_without_a_cycle():
    summary = {
        "outcome": "failed",
        "reason": "no disk",
        "cycles": 0,
        "reward_first": None,
        "reward_last": None,
        "val_reward_first": None,
        "val_reward_last": None,
        "activations": 0,
        "deactivations": 0,
        "skipped_syncs": 0,
        "switch_cost_s": None,
        "utilizations": {"exact": None, "train": None, "rollout": None},
        "samples": {"trained": 0},
        "wall_clock_s": 1.0,
        "timings_s": {},
        "resource_time": {"trainer": {"train": 0.75, "sync": 0.25, "idle": 0.0}},
    }
    pairs = summary_pairs(summary)
    assert ("failed: no disk", "- -> - (first and last tenth)") == (pairs["ended"], pairs["reward"])
    assert ("-", "train 75%, sync 25%") == (pairs["time in a cycle"], pairs["trainer GPUs did"])
