"""A submitted function from the outside, with a Slurm that answers from a list: when it is over, and what is told."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hybridsched.errors import DeadlineExceeded, UserError
from hybridsched.slurm import job as job_module
from hybridsched.slurm.commands import Said
from hybridsched.slurm.job import HetSlurmJob, HetWatcher
from hybridsched.slurm.pickles import mark_end, marker_of, save

UNKNOWN = Said(False, "", "Invalid job id specified")
SILENT = Said(False, "", "Unable to contact slurm controller")


class Slurm:
    """``said``: what squeue answers; a state, or a whole answer."""

    def __init__(self) -> None:
        self.said: str | Said = "RUNNING"
        self.reason = "None"
        self.calls = 0

    def __call__(self, command) -> Said:
        self.calls += 1
        if command[0] != "squeue":
            return UNKNOWN
        if isinstance(self.said, Said):
            return self.said
        return Said(True, f"5+0|{self.said}|{self.reason}|a\n5+1|{self.said}|{self.reason}|b\n", "")


@pytest.fixture
def slurm() -> Slurm:
    return Slurm()


@pytest.fixture
def job(tmp_path, slurm, monkeypatch) -> HetSlurmJob:
    """Four ranks; every look is a fresh one, and nothing sleeps long."""
    monkeypatch.setattr(job_module, "_POLL_S", 0.01)
    monkeypatch.setattr(job_module, "_SHARED_FILES_S", 0.05)

    class Watcher(HetWatcher):
        def update_if_long_enough(self, mode: str) -> None:
            if mode != "cache":
                self.update()

    class Job(HetSlurmJob):
        watcher = Watcher(ask=slurm)

    return Job(tmp_path, "5", tasks=[0, 1, 2, 3])


def leave(job: HetSlurmJob, rank: int, outcome: str = "success", value: object = None) -> None:
    """What a rank leaves."""
    save((outcome, value), job.task(rank).paths.result_pickle)
    mark_end(marker_of(Path(job.paths.folder), job.job_id, rank), ok=outcome == "success")


def test_results_of_all_ranks_are_enough_while_slurm_still_cleans_up(job, slurm):
    slurm.said = "COMPLETING"
    for rank in range(4):
        assert not job.done()
        leave(job, rank, value=rank * 10)
    assert job.done()
    assert [0, 10, 20, 30] == job.results()


def test_one_failed_rank_is_enough_and_the_first_one_is_told(job):
    leave(job, 0, "error", "torn down by the others")
    os.utime(job.task(0).paths.result_pickle, (time.time(), time.time() + 5))
    leave(job, 2, "error", "the real trouble")
    assert job.done()
    text = str(job.exception())
    assert text.startswith("rank 2 of job 5 failed (ranks [0] failed after it):\nthe real trouble")
    assert str(job.task(2).paths.stderr) in text


def test_files_of_the_start_before_a_requeue_prove_nothing(job, slurm):
    slurm.said = "PENDING"
    leave(job, 1, "error", "killed for the requeue")
    assert not job.done()


def test_completed_without_the_marks_of_all_ranks_is_failed(job, slurm):
    slurm.said = "COMPLETED"
    for rank in (0, 1, 3):
        leave(job, rank)
    assert "FAILED" == job.state
    text = str(job.exception())
    assert "without a result of ranks [2]; Slurm says COMPLETED" in text
    assert f"it wrote nothing to {job.task(2).paths.stderr}" in text


def test_the_last_words_of_a_rank_without_a_result_are_told(job, slurm):
    slurm.said = "OUT_OF_MEMORY"
    job.task(0).paths.stderr.write_text("".join(f"line {number}\n" for number in range(100)) + "oom-kill\n")
    text = str(job.exception())
    assert "oom-kill" in text
    assert "line 10\n" not in text
    assert "Slurm says OUT_OF_MEMORY" in text


def test_a_job_nobody_knows_any_more_is_over_after_a_while(job, slurm, monkeypatch):
    slurm.said = UNKNOWN
    assert not job.done()
    monkeypatch.setattr(job_module, "GONE_AFTER_S", 0.0)
    assert job.done()
    assert "GONE" == job.state


def test_silence_ends_no_job_but_bounds_the_waiting(job, slurm, monkeypatch):
    assert "RUNNING" == job.state
    slurm.said = SILENT
    assert not job.done()
    assert "RUNNING" == job.state
    monkeypatch.setattr(job_module, "SILENT_AFTER_S", 0.02)
    with pytest.raises(DeadlineExceeded, match="Slurm has not answered"):
        job.wait()


def test_waiting_for_what_will_not_come_is_an_error_after_a_while(job, slurm, monkeypatch):
    monkeypatch.setattr(job_module, "HOPELESS_AFTER_S", 0.02)
    slurm.said, slurm.reason = "PENDING", "PartitionTimeLimit"
    with pytest.raises(UserError, match=r"will not come \(PartitionTimeLimit\); cancel it with: scancel 5"):
        job.wait()


def test_waiting_is_bounded(job):
    with pytest.raises(DeadlineExceeded, match="job 5 is RUNNING"):
        job.wait(0.03)


def test_result_of_several_ranks_is_refused_with_the_alternative(job):
    with pytest.raises(TypeError, match="use results"):
        job.result()


def test_one_rank_of_several_can_be_asked_alone(job):
    for rank in range(4):
        leave(job, rank, value=rank)
    assert 3 == job.task(3).result()
    assert job.task(3).paths.result_pickle.exists()


def test_cleaning_keeps_what_was_collected_and_says_so_to_others(job, tmp_path):
    for rank in range(4):
        leave(job, rank, value=rank)
    assert [0, 1, 2, 3] == job.results()
    job.clean()
    assert [] == list(tmp_path.glob("*.pkl"))
    assert [0, 1, 2, 3] == job.results()
    again = type(job)(tmp_path, "5", tasks=[0, 1, 2, 3])
    assert again.done()
    with pytest.raises(UserError, match="were collected before"):
        again.results()


def test_a_running_job_keeps_its_pickles(job):
    with pytest.raises(RuntimeError, match="still needs its pickles"):
        job.clean()


def test_jobs_of_one_process_are_asked_about_together(job, slurm, tmp_path):
    watcher = type(job).watcher
    others = [type(job)(tmp_path, str(number)) for number in (6, 7, 8)]
    before = slurm.calls
    watcher.update()
    # one squeue for all, and scontrol and sacct for the three it left out
    assert 1 + 2 * len(others) == slurm.calls - before
    assert "RUNNING" == watcher.get_state("5", mode="cache")
