"""One rank of a submitted function without Slurm: environment, results, stale files, and whose pickles are loaded."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import pytest
from submitit.core.utils import DelayedSubmission, JobPaths

from hybridsched.errors import ConfigError, UserError
from hybridsched.slurm import HetSlurmExecutor, SiteProfile
from hybridsched.slurm.components import Component
from hybridsched.slurm.pickles import end_of, load_own, mark_end, marker_of, save
from hybridsched.slurm.rank import component_of_rank, correct_environment

cloudpickle.register_pickle_by_value(sys.modules[__name__])

HET = {
    "SLURM_HET_SIZE": "2",
    "SLURM_NTASKS_HET_GROUP_0": "2",
    "SLURM_NTASKS_HET_GROUP_1": "3",
    "SLURM_JOB_NODELIST": "gpu[0-2],trn[0-1]",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "trn[0-1]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "gpu[0-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NUM_NODES_HET_GROUP_0": "2",
    "SLURM_JOB_NUM_NODES_HET_GROUP_1": "3",
}


def raise_it(text: str) -> None:
    raise ValueError(text)


class Checkpointable:
    """Waits for a signal that makes it go on."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def __call__(self, folder: str) -> int:
        Path(folder, "up").touch()
        end = time.monotonic() + 60
        while time.monotonic() < end:
            time.sleep(0.05)
        return self.at

    def checkpoint(self, folder: str) -> DelayedSubmission:
        """One further."""
        return DelayedSubmission(Checkpointable(self.at + 1), folder)


def submitted(folder: Path, function, *arguments) -> JobPaths:
    """A submission for job 7."""
    delayed = DelayedSubmission(function, *arguments)
    delayed.set_timeout(5, 3)
    paths = JobPaths(folder, job_id="7", task_id=0)
    save(delayed, paths.submitted_pickle)
    return paths


def command() -> list[str]:
    return [sys.executable, "-m", "hybridsched.slurm.rank"]


def environment(rank: int = 0, **more: str) -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    job = {"SLURM_JOB_ID": "7", "SLURM_PROCID": str(rank), "SUBMITIT_EXECUTOR": "slurm", "PYTHONPATH": root}
    return {**os.environ, **job, **more}


def run(folder: Path, rank: int = 0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command(), str(folder)], env=environment(rank), capture_output=True, text=True, timeout=100, check=False
    )


# -- environment


def test_hosts_come_in_the_order_of_the_ranks_and_are_all_counted():
    found = {**HET, "SLURM_PROCID": "3"}
    correct_environment(found)
    assert ("trn[0-1],gpu[0-2]", "5", "1") == (
        found["SLURM_JOB_NODELIST"],
        found["SLURM_JOB_NUM_NODES"],
        found["HYBRIDSCHED_COMPONENT"],
    )


def test_a_plain_job_keeps_its_environment():
    found = {"SLURM_JOB_NODELIST": "a,b", "SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "1"}
    before = dict(found)
    correct_environment(found)
    assert {**before, "HYBRIDSCHED_COMPONENT": "0"} == found


def test_the_component_of_a_rank_follows_from_the_tasks_before_it():
    assert [0, 0, 1, 1, 1] == [component_of_rank({**HET, "SLURM_PROCID": str(rank)}) for rank in range(5)]


# -- results


def test_a_result_and_its_marker_are_left_for_the_owner_only(tmp_path):
    paths = submitted(tmp_path, sum, [1, 2])
    assert 0 == run(tmp_path).returncode
    assert ("success", 3) == load_own(paths.result_pickle)
    assert end_of(marker_of(tmp_path, "7", 0)) is True
    assert 0 == paths.result_pickle.stat().st_mode & 0o077


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (raise_it, ("no good",), "ValueError: no good"),
        (sys.exit, (3,), "SystemExit: 3"),
        (threading.Lock, (), "the result of rank 0 cannot be pickled"),
    ],
    ids=["raises", "exits", "no pickle"],
)
def test_every_end_without_a_value_is_an_error_with_its_reason(tmp_path, function, arguments, message):
    paths = submitted(tmp_path, function, *arguments)
    done = run(tmp_path)
    assert 1 == done.returncode
    outcome, text = load_own(paths.result_pickle)
    assert "error" == outcome
    assert message in text
    assert message in done.stderr
    assert end_of(marker_of(tmp_path, "7", 0)) is False


def test_what_an_earlier_start_left_is_removed_before_the_function_runs(tmp_path):
    paths = submitted(tmp_path, os._exit, 5)
    save(("success", "old"), paths.result_pickle)
    mark_end(marker_of(tmp_path, "7", 0), ok=True)
    assert 5 == run(tmp_path).returncode
    assert not paths.result_pickle.exists()
    assert end_of(marker_of(tmp_path, "7", 0)) is None


def test_usr2_checkpoints_requeues_and_leaves_no_result(tmp_path):
    """With a stand-in for scontrol that writes down what it was asked."""
    stub = tmp_path / "bin" / "scontrol"
    stub.parent.mkdir()
    stub.write_text(f'#!/bin/sh\necho "$*" >>"{tmp_path}/asked"\n')
    stub.chmod(0o755)
    paths = submitted(tmp_path, Checkpointable(), str(tmp_path))
    save(("success", "old"), tmp_path / "7_1_result.pkl")
    path = f"{stub.parent}:{os.environ['PATH']}"
    process = subprocess.Popen([*command(), str(tmp_path)], env=environment(PATH=path), stderr=subprocess.PIPE)
    end = time.monotonic() + 60
    while not (tmp_path / "up").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)  # comes first at preemption
    process.send_signal(signal.SIGUSR2)
    _, said = process.communicate(timeout=60)
    assert 0 == process.returncode, said
    assert "requeue 7\n" == (tmp_path / "asked").read_text()
    assert 1 == load_own(paths.submitted_pickle).function.at
    assert [] == list(tmp_path.glob("7_*_result.pkl"))


# -- whose pickles


def test_a_pickle_others_may_write_is_not_loaded(tmp_path):
    path = tmp_path / "x.pkl"
    save(1, path)
    path.chmod(0o622)
    with pytest.raises(UserError, match="others may write it"):
        load_own(path)


def test_a_pickle_of_somebody_else_is_not_loaded(tmp_path, monkeypatch):
    path = tmp_path / "x.pkl"
    save(1, path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UserError, match="not to you"):
        load_own(path)


def test_a_link_is_not_followed_and_damage_is_told(tmp_path):
    save(1, tmp_path / "real.pkl")
    (tmp_path / "link.pkl").symlink_to(tmp_path / "real.pkl")
    with pytest.raises(UserError, match="cannot be read"):
        load_own(tmp_path / "link.pkl")
    (tmp_path / "torn.pkl").write_bytes(pickle.dumps(list(range(1000)))[:50])
    with pytest.raises(UserError, match="damaged"):
        load_own(tmp_path / "torn.pkl")


# -- the executor, before anything is submitted


@pytest.fixture
def executor(tmp_path, monkeypatch) -> HetSlurmExecutor:
    monkeypatch.setattr(HetSlurmExecutor, "affinity", classmethod(lambda cls: 2))
    return HetSlurmExecutor(tmp_path, [{"nodes": 2, "partition": "a"}, {"partition": "b"}], site=SiteProfile())


def test_update_parameters_changes_the_job_or_all_components(executor):
    executor.update_parameters(timeout_min=7, name="mine", mem_gb=2, cpus_per_task=3)
    assert [("2048M", 3)] * 2 == [(one.mem, one.cpus_per_task) for one in executor.components]
    assert ["a", "b"] == [one.partition for one in executor.components]
    text = executor._script("x")
    assert "--job-name=mine" in text
    assert 2 == text.count("--time=7")
    executor.update_parameters(components=[Component(nodes=5)])
    assert 5 == executor._num_tasks()


@pytest.mark.parametrize("wrong", [{"nodez": 1}, {"nodes": 0}, {"partition": "$(x)"}, {"name": "a b"}, {"time": "x"}])
def test_wrong_parameters_change_nothing(executor, wrong):
    before = dict(executor.parameters)
    with pytest.raises(ConfigError):
        executor.update_parameters(**wrong)
    assert before == executor.parameters


def test_arrays_are_refused_with_the_reason(executor, tmp_path):
    with pytest.raises(NotImplementedError, match="Slurm refuses --array"), executor.batch():
        pass
    with pytest.raises(NotImplementedError, match="2 functions at once are a job array"):
        executor.map_array(sum, [[1], [2]])
    assert [] == list(tmp_path.iterdir())


def test_a_folder_with_a_pattern_in_its_name_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="percent sign"):
        HetSlurmExecutor(tmp_path / "%j")


def test_arguments_that_are_too_large_are_refused_and_leave_nothing(executor, tmp_path):
    executor.max_pickle_size_gb = 1e-6
    with pytest.raises(ConfigError, match="max_pickle_size_gb"):
        executor.submit(len, bytes(10_000))
    assert [] == list(tmp_path.iterdir())
