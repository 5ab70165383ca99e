"""Submitting a run and what becomes of it, with a Slurm that answers from a list."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from hybridsched.cli import main as cli
from hybridsched.config import load_config
from hybridsched.errors import ConfigError, DeadlineExceeded, Interrupted, RunFolderError, UserError
from hybridsched.runlog.writer import HDF5RunLog
from hybridsched.runtime.adapters.attempt import new_attempt
from hybridsched.runtime.prepare import read_run
from hybridsched.slurm import SiteProfile
from hybridsched.slurm.commands import Said
from hybridsched.slurm.follow import Follower, statuses
from hybridsched.slurm.request import request_of
from hybridsched.slurm.sites import load_site, site_of_run
from hybridsched.slurm.submission import SlurmRun, prepare_here, read_jobs, run_in, submit_run

RUN = """\
launcher: slurm
actor_rollout_ref:
  actor: {strategy: emulated, ppo_mini_batch_size: 12}
  rollout: {name: emulated}
async_training: {trigger_parameter_sync_step: 3, use_dynamic_resource_scheduling: true}
trainer: {experiment_name: mine, nnodes: 2, n_gpus_per_node: 8}
rollout: {nnodes: 2, n_gpus_per_node: 8}
slurm: {time: "1:00:00", trainer: {partition: trn}, rollout: {partition: gpu}}
"""
UNKNOWN = Said(False, "", "slurm_load_jobs error: Invalid job id specified")
SILENT = Said(False, "", "Unable to contact slurm controller")


class Slurm:
    """A controller with one answer to everything: the job is in ``states``, the last one stays."""

    def __init__(self, *states: str | Said, version: str = "23.11.4") -> None:
        self.states = list(states) or ["RUNNING"]
        self.version = version
        self.nodes = {"trn": "trn0 trn1", "gpu": "gpu0 gpu1"}
        self.refusals: dict[str, str] = {}
        self.asked: list[list[str]] = []
        self.details = ""  #: what scontrol says

    def __call__(self, command) -> Said:
        self.asked.append(list(command))
        text = " ".join(command)
        for part, reason in self.refusals.items():
            if part in text:
                return Said(False, "", reason)
        if command[0] == "sbatch":
            return Said(True, f"slurm {self.version}" if "--version" in command else "41\n", "")
        if command[0] == "sinfo":
            partition = next(part.partition("=")[2] for part in command if part.startswith("--partition="))
            return Said(True, self.nodes[partition].replace(" ", "\n"), "")
        if command[0] == "squeue":
            state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
            return state if isinstance(state, Said) else Said(True, f"41+0|{state}|None|a\n41+1|{state}|None|b\n", "")
        if command[0] == "scontrol" and self.details:
            return Said(True, self.details, "")
        return UNKNOWN if command[0] in ("scontrol", "sacct") else Said(True, "", "")

    def names(self) -> list[str]:
        return [command[0] for command in self.asked]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty folder with a run.yaml, as working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYBRIDSCHED_SITE", raising=False)
    (tmp_path / "run.yaml").write_text(RUN, encoding="utf-8")
    return tmp_path


def config(*overrides: str):
    return load_config("run.yaml", overrides)


def submitted(slurm: Slurm) -> SlurmRun:
    """A run in runs/mine that waits without sleeping."""
    run = submit_run(config(), ask=slurm)
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    return SlurmRun(run.folder, run.job_id, run.after_attempt, ask=slurm, sleep=sleep, now=lambda: clock[0])


def leave_result(folder: Path, code: int, **error: str) -> None:
    """What rank 0 of the next start leaves."""
    attempt, _ = new_attempt(folder, "id", "launch", "", "")
    (attempt / "result.json").write_text(json.dumps({"exit_code": code, "ok": code == 0, "error": error or None}))


# -- submitting


def test_a_submission_lays_out_the_folder_and_remembers_its_job(here):
    slurm = Slurm()
    run = submit_run(config(), site=load_site("slingshot-cray"), ask=slurm)
    assert ("41", here / "runs" / "mine") == (run.job_id, run.folder)
    assert read_run(run.folder)["run_id"].startswith("mine-")
    assert "cray_shasta" == site_of_run(run.folder).mpi
    (entry,) = read_jobs(run.folder)
    assert ("41", ["trainer", "rollout"], 0) == (entry["job_id"], entry["roles"], entry["after_attempt"])
    script = (run.folder / "slurm" / "41_submission.sh").read_text()
    assert f"--run {run.folder}" in script
    assert "--prepare-only" not in script
    assert f"--output={run.folder}/slurm/%j_batch.log" in script
    assert 0o700 == run.folder.stat().st_mode & 0o777


@pytest.mark.parametrize("refused", ["--test-only", "--parsable"])
def test_a_refused_submission_leaves_no_folder(here, refused):
    slurm = Slurm()
    slurm.refusals = {refused: "Invalid account"}
    with pytest.raises(UserError, match="Invalid account"):
        submit_run(config(), ask=slurm)
    assert not (here / "runs" / "mine").exists()


def test_a_job_that_would_wait_for_ever_is_taken_out_and_leaves_no_folder(here, monkeypatch):
    monkeypatch.setattr("hybridsched.slurm.admission._LOOK_S", 0.0)
    slurm = Slurm(Said(True, "41+0|PENDING|PartitionNodeLimit|\n41+1|PENDING|None|\n", ""))
    with pytest.raises(UserError, match="PartitionNodeLimit"):
        submit_run(config(), ask=slurm)
    assert "scancel" in slurm.names()
    assert not (here / "runs" / "mine").exists()


def test_an_accepted_job_stays_when_slurm_does_not_answer_afterwards(here):
    run = submit_run(config(), ask=Slurm(SILENT))
    assert [run.job_id] == [entry["job_id"] for entry in read_jobs(run.folder)]


def test_a_local_run_is_not_submitted(here):
    with pytest.raises(ConfigError, match="set launcher: slurm"):
        submit_run(config("launcher=local"), ask=Slurm())


@pytest.mark.parametrize("how", ["resume", "force"])
def test_a_run_whose_job_lives_is_neither_resumed_nor_replaced(here, how):
    submit_run(config(), ask=Slurm())
    with pytest.raises(UserError, match=r"job 41 of this run is RUNNING.*hybridsched cancel"):
        submit_run(config(), ask=Slurm("RUNNING"), **{how: True})


def test_a_run_is_resumed_by_another_job_and_an_earlier_result_does_not_count(here):
    first = submitted(Slurm("COMPLETED"))
    leave_result(first.folder, 4, kind="FaultError", text="a disk died")
    assert (4, "a disk died") == (first.wait().exit_code, first.wait().text)
    second = submit_run(config("trainer.resume_mode=auto"), resume=True, ask=Slurm("COMPLETED"))
    assert 1 == second.after_attempt
    assert second.ending() is None
    leave_result(second.folder, 0)
    assert 0 == second.wait().exit_code
    assert 2 == len(read_jobs(second.folder))


def test_a_rendered_script_lays_out_the_folder_itself(here):
    assert here / "runs" / "mine" == prepare_here(config("slurm.site=campus-apptainer")).absolute()
    assert "pmi2" == site_of_run(here / "runs" / "mine").mpi
    with pytest.raises(RunFolderError, match="was not submitted"):
        run_in(here / "runs" / "mine")


# -- the order of components


@pytest.mark.parametrize(
    ("version", "mpi", "roles"),
    [
        ("22.05.8", "pmix", ("rollout", "trainer")),  # gpu* sorts before trn*
        ("22.05.8", "pmi2", ("trainer", "rollout")),
        ("23.02.1", "pmix", ("rollout", "trainer")),
        ("23.02.2", "pmix", ("trainer", "rollout")),
        ("24.05.0", "pmix", ("trainer", "rollout")),
    ],
)
def test_components_come_in_the_order_in_which_this_slurms_pmix_works(here, version, mpi, roles):
    request = request_of(config(), SiteProfile(mpi=mpi), Slurm(version=version))
    assert roles == request.roles
    assert f"export HYBRIDSCHED_ROLES={','.join(roles)}\n" in request.script()


def test_an_old_pmix_without_a_sure_order_is_refused_with_the_cure(here):
    slurm = Slurm(version="22.05.8")
    slurm.nodes = {"trn": "n1 n3", "gpu": "n2 n4"}
    with pytest.raises(UserError, match="Use mpi: pmi2"):
        request_of(config(), SiteProfile(mpi="pmix"), slurm)


# -- how it ended


def test_completed_without_a_result_is_a_failure(here):
    ending = submitted(Slurm("PENDING", "RUNNING", "COMPLETED")).wait()
    assert 4 == ending.exit_code
    assert "the run left no result; Slurm says COMPLETED" in ending.text
    assert "41_batch.log" in ending.text


def test_the_run_itself_has_the_last_word(here):
    run = submitted(Slurm("FAILED"))
    leave_result(run.folder, 0)
    assert 0 == run.wait().exit_code


def test_a_job_slurm_has_forgotten_is_over(here):
    assert "does not know the job" in submitted(Slurm("RUNNING", UNKNOWN)).wait().text


@pytest.mark.parametrize(("script", "code", "kind"), [(130, 130, "Interrupted"), (75, 75, "RequeueRequested")])
def test_the_job_script_knows_whether_a_stop_was_for_good(here, script, code, kind):
    """Ranks are only told to stop: their result is the same when the job cannot be put back into the queue."""
    slurm = Slurm("FAILED")
    slurm.details = f"JobId=41 HetJobId=41 HetJobOffset=0 JobState=FAILED Reason=x ExitCode={script}:0 NodeList=a\n"
    run = submitted(slurm)
    leave_result(run.folder, 75, kind="RequeueRequested", text="time limit or preemption")
    ending = run.wait()
    assert (code, kind) == (ending.exit_code, ending.kind)


def test_a_requeued_job_is_waited_for(here):
    looks = []
    run = submitted(Slurm("RUNNING", "RUNNING", "COMPLETING", "PENDING", "RUNNING", "CANCELLED"))
    run.wait(on_look=lambda found: looks.append(found.state))
    assert ["RUNNING", "COMPLETING", "PENDING", "RUNNING", "CANCELLED"] == looks


def test_waiting_is_bounded(here):
    with pytest.raises(DeadlineExceeded, match="not over after 60 s"):
        submitted(Slurm("RUNNING")).wait(60)


def test_a_slurm_that_stays_silent_ends_the_waiting(here):
    with pytest.raises(DeadlineExceeded, match="Unable to contact"):
        submitted(Slurm("RUNNING", SILENT)).wait()


def test_a_short_silence_changes_nothing(here):
    run = submitted(Slurm("RUNNING", SILENT, SILENT, "COMPLETED"))
    leave_result(run.folder, 0)
    assert 0 == run.wait().exit_code


# -- following


def write_log(folder: Path, cycles: int) -> None:
    log = HDF5RunLog(folder / "log", "controller", run_id="id", wall=time.time, now=time.monotonic)
    log.event("decision", "activate", new="yes", reason="the queue is short")
    for step in range(1, cycles + 1):
        log.metrics(step, {"timing_s/step": 1.0, "rollout/reward/mean": step / 10, "samples/trained": 36.0})
    log.close()


def test_cycles_in_the_log_become_statuses_each_once(here):
    run = submitted(Slurm("RUNNING"))
    assert [] == statuses(run.folder)
    write_log(run.folder, 3)
    said, seen = [], []
    follower = Follower(run, said.append, seen.append)
    follower.look(run.state())
    follower.look(run.state())
    assert [1, 2, 3] == [status["version"] for status in seen]
    assert [36, 72, 108] == [status["trained"] for status in seen]
    assert "activate: yes (the queue is short)" == seen[-1]["decision"]
    assert ["job 41: RUNNING on a,b"] == said


def test_a_new_start_is_told_once(here):
    run = submitted(Slurm("RUNNING"))
    said = []
    follower = Follower(run, said.append, lambda _status: None)
    leave_result(run.folder, 4)
    follower.look(run.state())
    follower.look(run.state())
    assert [f"start 1; logs: {run.folder}/attempts/1/logs"] == [line for line in said if line.startswith("start")]


# -- commands


STUB = """\
#!/bin/bash
echo "$(basename "$0") $*" >>"$FAKE_SLURM/asked"
case "$(basename "$0") $*" in
  *--version*) echo "slurm 23.11.4" ;;
  sbatch*) echo 41 ;;
  sinfo*) printf '%s\\n' n1 n2 n3 n4 ;;
  squeue*) cat "$FAKE_SLURM/squeue" ;;
esac
"""


class FakeCommands:
    """Commands named as Slurm's on the PATH; squeue prints what `say` was given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        for name in ("sbatch", "sinfo", "squeue", "scancel", "scontrol", "sacct"):
            (folder / "bin" / name).write_text(STUB)
            (folder / "bin" / name).chmod(0o755)
        self.say("RUNNING")

    def say(self, state: str, reason: str = "None") -> None:
        (self.folder / "squeue").write_text(f"41+0|{state}|{reason}|a\n41+1|{state}|{reason}|b\n")

    def asked(self) -> list[str]:
        return (self.folder / "asked").read_text().splitlines()


@pytest.fixture
def slurm(here, monkeypatch) -> FakeCommands:
    fake = FakeCommands(here / "fake")
    monkeypatch.setenv("PATH", f"{fake.folder / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("FAKE_SLURM", str(fake.folder))
    return fake


@pytest.fixture
def call(slurm, capsys):
    """Run a command: (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_submit_tells_job_folder_and_how_to_follow_and_cancel(call):
    code, out, err = call("submit", "run.yaml")
    assert (0, "") == (code, err)
    lines = out.splitlines()
    assert ["job     41", "folder  runs/mine"] == lines[:2]
    assert "hybridsched watch runs/mine" in lines[2]
    assert lines[3].endswith("hybridsched cancel runs/mine")


def test_run_sends_a_configuration_for_slurm_to_submit(call):
    code, _, err = call("run", "run.yaml")
    assert 2 == code
    assert "hybridsched submit run.yaml" in err


def test_watch_ends_with_the_exit_code_of_the_run_and_its_summary(call, slurm, here):
    call("submit", "run.yaml")
    write_log(here / "runs" / "mine", 2)
    leave_result(here / "runs" / "mine", 0)
    slurm.say("COMPLETED")
    code, out, err = call("watch", "runs/mine")
    assert (0, "") == (code, err)
    assert "job 41: COMPLETED" in out
    assert "cycle 2 cycle done" in out
    assert out.splitlines()[-1].endswith("report.html")


def test_submit_with_watch_of_a_run_that_fails_ends_with_its_code_and_reason(call, slurm, here, monkeypatch):
    waited = SlurmRun.wait

    def fail_meanwhile(run, *arguments, **options):
        leave_result(run.folder, 4, kind="WorkerDied", text="rank 1 of node b died")
        slurm.say("FAILED")
        return waited(run, *arguments, **options)

    monkeypatch.setattr(SlurmRun, "wait", fail_meanwhile)
    code, out, err = call("submit", "run.yaml", "--watch")
    assert 4 == code
    assert "WorkerDied (exit code 4): rank 1 of node b died" in err
    assert "job     41" in out


def test_ctrl_c_while_watching_leaves_the_run_alone_and_says_so(call, slurm, monkeypatch):
    call("submit", "run.yaml")

    def interrupt(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(SlurmRun, "wait", interrupt)
    code, _, err = call("watch", "runs/mine")
    assert Interrupted.exit_code == code
    assert "job 41 goes on" in err
    assert "hybridsched cancel" in err
    assert not any(line.startswith("scancel") for line in slurm.asked())


def test_cancel_lets_a_running_job_write_a_checkpoint_and_tells_how_to_go_on(call, slurm):
    call("submit", "run.yaml")
    code, out, _ = call("cancel", "runs/mine")
    assert 0 == code
    assert "scancel --batch --signal=INT 41" in slurm.asked()
    assert "scancel 41" not in slurm.asked()
    assert "do not wait for that: hybridsched cancel runs/mine --now" in out
    assert "runs/mine/config/resolved.yaml --resume" in out


@pytest.mark.parametrize(("state", "more"), [("RUNNING", ["--now"]), ("PENDING", [])])
def test_cancel_ends_a_waiting_job_or_a_running_one_on_request_at_once(call, slurm, state, more):
    call("submit", "run.yaml")
    slurm.say(state)
    assert f"job 41 cancelled (it was {state})" in call("cancel", "runs/mine", *more)[1]
    assert "scancel 41" in slurm.asked()


def test_cancel_of_a_job_that_is_over_does_nothing(call, slurm):
    call("submit", "run.yaml")
    slurm.say("COMPLETED")
    assert "job 41 is over already (COMPLETED)" in call("cancel", "runs/mine")[1]
    assert "scancel 41" not in slurm.asked()


def test_status_of_a_submitted_run_tells_its_job(call, slurm):
    call("submit", "run.yaml")
    slurm.say("PENDING", "Resources")
    assert "PENDING (Resources)" in call("status", "runs/mine")[1]
    assert "41: PENDING (Resources)" == json.loads(call("status", "runs/mine", "--json")[1])["job"]


def test_status_without_a_run_lists_all_of_them_with_one_question_to_slurm(call, slurm):
    call("submit", "run.yaml")
    call("submit", "run.yaml", "trainer.experiment_name=other")
    before = len(slurm.asked())
    code, out, _ = call("status")
    assert 0 == code
    assert {"mine", "other"} <= set(out.split())
    assert 2 == out.count("RUNNING")
    assert ["squeue"] == [line.split()[0] for line in slurm.asked()[before:]]


def test_status_without_any_run_says_where_it_looked(call):
    assert "no runs in runs/" in call("status")[1]


def test_logs_of_job_script_rank_and_worker(call, here):
    call("submit", "run.yaml")
    folder = here / "runs" / "mine"
    leave_result(folder, 0)
    (folder / "slurm" / "41_batch.log").write_text("from the script\n")
    logs = folder / "attempts" / "1" / "logs"
    (logs / "launcher.log").write_text("".join(f"line {number}\n" for number in range(100)))
    (logs / "agent-1.log").write_text("from rank 1\n")
    (logs / "trainer.0-1.log").write_text("from the trainer\n")
    code, out, _ = call("logs", "runs/mine", "-n", "2")
    assert 0 == code
    assert out.endswith("line 98\nline 99\n")
    assert "from the script" in out
    assert (0, "from rank 1\n", "") == call("logs", "runs/mine", "--rank", "1")
    assert (0, "from the trainer\n", "") == call("logs", "runs/mine", "--worker", "trainer.0")
    code, _, err = call("logs", "runs/mine", "--rank", "7")
    assert 2 == code
    assert "there is: agent-1.log, launcher.log, trainer.0-1.log" in err


def test_a_machine_without_slurm_says_so(call, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    code, _, err = call("submit", "run.yaml")
    assert 2 == code
    assert "sbatch: not found" in err
    assert "login node" in err
