"""What is made of Slurm's answers: one call for all jobs, states of components, pending for ever, silence."""

from __future__ import annotations

import itertools

import pytest

from hybridsched.errors import FaultError, UserError
from hybridsched.slurm import admission
from hybridsched.slurm.commands import Said
from hybridsched.slurm.components import Component
from hybridsched.slurm.state import TERMINAL, ComponentState, JobState, detailed, states_of

UNKNOWN = Said(False, "", "slurm_load_jobs error: Invalid job id specified")
NO_ACCOUNTING = Said(False, "", "Slurm accounting storage is disabled")
SILENT = Said(False, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")


class FakeSlurm:
    """Answers by command, remembers what was asked."""

    def __init__(self, **answers: Said | list[Said]) -> None:
        self.answers = answers
        self.asked: list[list[str]] = []

    def __call__(self, command) -> Said:
        self.asked.append(list(command))
        answer = self.answers[command[0]]
        return answer.pop(0) if isinstance(answer, list) else answer


def said(text: str) -> Said:
    return Said(True, text, "")


def job(*states: str, reason: str = "") -> JobState:
    return JobState("1", tuple(ComponentState(i, state, reason) for i, state in enumerate(states)))


def test_one_call_answers_for_heterogeneous_and_plain_jobs():
    slurm = FakeSlurm(squeue=said("7+1|RUNNING|None|gpu[0-1]\n9|PENDING|Priority|\n7+0|RUNNING|None|trn0\n"))
    found = states_of(["7", "9"], slurm)
    assert 1 == len(slurm.asked)
    assert ("RUNNING", "trn0,gpu[0-1]") == (found["7"].state, found["7"].nodes)
    assert ("PENDING", "Priority") == (found["9"].state, found["9"].reason)


def test_what_squeue_left_out_is_asked_of_scontrol_then_of_sacct():
    line = "JobId=8 HetJobId=7 HetJobOffset=1 JobName=x JobState=FAILED Reason=NonZeroExitCode Restarts=2 ExitCode=1:0"
    first = line.replace("JobId=8", "JobId=7", 1).replace("Offset=1", "Offset=0").replace("FAILED", "CANCELLED")
    slurm = FakeSlurm(
        squeue=said("3|RUNNING|None|a\n"),
        scontrol=[said(f"{first} NodeList=a\n{line} NodeList=(null)\n"), UNKNOWN],
        sacct=said("9+0|CANCELLED by 1000|0:15|a\n9+0|COMPLETED|0:0|a\n9+1|TIMEOUT|0:0|b\n"),
    )
    found = states_of(["3", "7", "9"], slurm)
    assert ["squeue", "scontrol", "scontrol", "sacct"] == [command[0] for command in slurm.asked]
    assert "CANCELLED" == found["7"].state
    assert [("1:0", 2), ("1:0", 2)] == [(one.exit_code, one.restarts) for one in found["7"].components]
    assert ["COMPLETED", "TIMEOUT"] == [one.state for one in found["9"].components]  # the last row counts
    assert "TIMEOUT" == found["9"].state


def test_a_job_nobody_knows_is_absent_also_without_accounting():
    assert {} == states_of(["5"], FakeSlurm(squeue=UNKNOWN, scontrol=UNKNOWN, sacct=NO_ACCOUNTING))
    assert detailed("5", FakeSlurm(scontrol=UNKNOWN, sacct=NO_ACCOUNTING)) is None


@pytest.mark.parametrize("silent", ["squeue", "scontrol"])
def test_silence_is_not_taken_for_an_unknown_job(silent):
    answers = {"squeue": UNKNOWN, "scontrol": UNKNOWN, "sacct": said(""), silent: SILENT}
    with pytest.raises(FaultError, match="Unable to contact"):
        states_of(["5"], FakeSlurm(**answers))


def test_a_name_cannot_pretend_to_be_a_state():
    line = "JobId=5 JobName=a JobState=RUNNING Reason=None Restarts=0 NodeList=n Comment=JobState=COMPLETED"
    found = states_of(["5"], FakeSlurm(squeue=UNKNOWN, scontrol=said(line)))
    assert "RUNNING" == found["5"].state


def test_a_job_is_over_only_when_every_component_is():
    words = [*sorted(TERMINAL), "RUNNING", "PENDING", "COMPLETING", "REQUEUED", "PREEMPTED"]
    for states in itertools.product(words, repeat=2):
        assert job(*states).is_over == all(state in TERMINAL for state in states)
        assert (job(*states).state in TERMINAL) == job(*states).is_over


@pytest.mark.parametrize(
    ("states", "state"),
    [
        (("COMPLETED", "COMPLETED"), "COMPLETED"),
        (("COMPLETED", "FAILED"), "FAILED"),
        (("TIMEOUT", "FAILED"), "TIMEOUT"),
        (("RUNNING", "CANCELLED"), "RUNNING"),
        (("PENDING", "RUNNING"), "RUNNING"),
        (("PENDING", "COMPLETED"), "PENDING"),
    ],
)
def test_states_of_components_become_one(states, state):
    assert state == job(*states).state


def test_people_are_told_which_component_is_different():
    assert (
        "RUNNING (Gone) - component 0 RUNNING, component 1 CANCELLED"
        == job("RUNNING", "CANCELLED", reason="Gone").told()
    )
    assert "RUNNING" == job("RUNNING", "RUNNING", reason="None").told()


@pytest.mark.parametrize(("reason", "hopeless"), [("PartitionNodeLimit", True), ("Resources", False), ("None", False)])
def test_reasons_that_waiting_cures_are_told_from_those_it_does_not(reason, hopeless):
    assert hopeless == (job("PENDING", reason=reason).hopeless is not None)
    assert job("RUNNING", reason=reason).hopeless is None


# -- admission

TWO = (Component(nodes=2, partition="a", role="trainer"), Component(nodes=2, partition="b", role="rollout"))


def nodes(**partitions: str):
    """A Slurm that takes everything and knows these nodes."""

    def answer(command) -> Said:
        if command[0] == "sinfo":
            asked = [part.partition("=")[2] for part in command if part.startswith("--partition=")]
            return said("\n".join(partitions[asked[0]].split())) if asked else said("a*\nb\n")
        return said("")

    return answer


def test_components_that_share_too_few_nodes_are_refused(tmp_path):
    script = tmp_path / "s"
    admission.require_possible(script, TWO, nodes(a="n1 n2 n3", b="n3 n4"))
    with pytest.raises(UserError, match="trainer and rollout need 4 nodes together, and their partitions have 3"):
        admission.require_possible(script, TWO, nodes(a="n1 n2", b="n2 n3"))


def test_no_partition_means_the_default_one(tmp_path):
    open_ = (Component(nodes=2), Component(nodes=2, partition="b"))
    with pytest.raises(UserError, match="have 3"):
        admission.require_possible(tmp_path / "s", open_, nodes(a="n1 n2", b="n2 n3"))


def test_a_refusal_tells_slurms_reason_and_what_was_asked_for(tmp_path):
    slurm = FakeSlurm(sbatch=Said(False, "", "allocation failure: Requested node configuration is not available\n"))
    with pytest.raises(UserError) as error:
        admission.require_possible(tmp_path / "s", TWO, slurm)
    assert "Requested node configuration is not available" in str(error.value)
    assert "- trainer: 2 nodes of partition a" in str(error.value)


def test_a_job_that_waits_for_ever_is_cancelled_and_one_that_only_waits_is_not():
    pending = "5+0|PENDING|{}|\n5+1|PENDING|None|\n"
    slurm = FakeSlurm(squeue=said(pending.format("PartitionNodeLimit")), scancel=said(""))
    with pytest.raises(UserError, match="PartitionNodeLimit"):
        admission.require_startable("5", TWO, slurm, sleep=lambda _s: None)
    assert ["scancel", "5"] == slurm.asked[-1]
    slurm = FakeSlurm(squeue=[said(pending.format("PartitionNodeLimit")), said(pending.format("Resources"))])
    admission.require_startable("5", TWO, slurm, sleep=lambda _s: None)
    assert ["squeue", "squeue"] == [command[0] for command in slurm.asked]


@pytest.mark.parametrize(("text", "job_id"), [("12\n", "12"), ("12;cluster\n", "12"), ("note\n13\n", "13")])
def test_the_job_id_is_read_from_sbatch(tmp_path, text, job_id):
    assert job_id == admission.send(tmp_path / "s", FakeSlurm(sbatch=said(text)))


def test_an_answer_of_sbatch_without_a_job_is_an_error(tmp_path):
    with pytest.raises(FaultError, match="names no job"):
        admission.send(tmp_path / "s", FakeSlurm(sbatch=said("\n")))


def test_cancelling_a_job_that_ended_is_no_error():
    admission.cancel("5", FakeSlurm(scancel=Said(False, "", "scancel: error: Invalid job id 5")))
    with pytest.raises(UserError, match="Access"):
        admission.cancel("5", FakeSlurm(scancel=Said(False, "", "Access/permission denied")))


@pytest.mark.parametrize(
    ("version", "mpi", "order"),
    [("22.05.8", "pmix", [1, 0]), ("22.05.8", "pmi2", [0, 1]), ("23.02.2", "pmix", [0, 1]), ("", "pmix", [0, 1])],
)
def test_components_keep_their_order_but_for_an_old_pmix(version, mpi, order):
    known = nodes(a="trn0 trn1", b="gpu0 gpu1")
    answer = said(f"slurm {version}")
    assert order == admission.sure_order(TWO, mpi, lambda command: answer if "--version" in command else known(command))


@pytest.mark.parametrize(("text", "version"), [("slurm 22.05.8\n", (22, 5, 8)), ("slurm-wlm 23.11.4\n", (23, 11, 4))])
def test_the_version_of_slurm_is_read(text, version):
    assert version == admission.version(FakeSlurm(sbatch=said(text)))
    assert () == admission.version(FakeSlurm(sbatch=said("something")))
