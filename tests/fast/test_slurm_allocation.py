"""What a job was given, and which of it can still be used: environments and answers of Slurm as they were seen."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from hybridsched.errors import FaultError, UserError
from hybridsched.runtime.adapters import slurm
from hybridsched.slurm.allocation import Allocation, Group, expand_hosts, read_allocation
from hybridsched.slurm.node_table import Asked, NodeTable

HET = {
    "SLURM_JOB_ID": "12",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "12",
    "SLURM_JOB_ID_HET_GROUP_1": "13",
    "SLURM_JOB_NODELIST": "trn[0-1]",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "trn[0-1]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "gpu[08-10]",
    "SLURMD_NODENAME": "trn0",
}


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu7", ["gpu7"]),
        ("gpu[3]", ["gpu3"]),
        ("trn[0-1]", ["trn0", "trn1"]),
        ("n[008-011,20],login", ["n008", "n009", "n010", "n011", "n20", "login"]),
        ("a1,b[2,4]-ib", ["a1", "b2-ib", "b4-ib"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_compressed_host_lists_are_expanded_in_order(text: str, hosts: list[str]) -> None:
    assert tuple(hosts) == expand_hosts(text)


@pytest.mark.parametrize("text", ["", ",", "a,,b", "n[1-", "n[a-b]", "n[]"])
def test_what_is_no_host_list_is_refused(text: str) -> None:
    with pytest.raises(FaultError, match="no host list"):
        expand_hosts(text)


def test_roles_come_from_the_script_in_the_order_of_the_groups() -> None:
    allocation = read_allocation({**HET, "HYBRIDSCHED_ROLES": "rollout,trainer", "SLURM_RESTART_COUNT": "2"})

    assert ("trn0", "trn1") == allocation.of_role("rollout")
    assert ("gpu08", "gpu09", "gpu10") == allocation.of_role("trainer")
    assert ("12", 2, "trn0") == (allocation.job_id, allocation.restart_count, allocation.host)
    assert ["12", "13"] == [group.job_id for group in allocation.groups]


def test_without_a_word_of_the_script_the_trainer_is_first() -> None:
    assert ["trainer", "rollout"] == [group.role for group in read_allocation(HET).groups]


def test_a_plain_job_is_all_trainer() -> None:
    allocation = read_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"})

    assert ("n1",) == allocation.of_role("trainer") == allocation.nodes()
    assert () == allocation.of_role("rollout")


def test_outside_a_job_it_is_said_how_to_get_into_one() -> None:
    with pytest.raises(UserError, match="hybridsched submit"):
        read_allocation({})


@pytest.mark.parametrize("roles", ["trainer", "trainer,trainer", "trainer,other", "trainer,rollout,trainer"])
def test_roles_that_do_not_fit_the_job_are_refused(roles: str) -> None:
    with pytest.raises(FaultError, match="HYBRIDSCHED_ROLES"):
        read_allocation({**HET, "HYBRIDSCHED_ROLES": roles})


# --- after a failed attempt -------------------------------------------------------------------------------------------


def allocation(trainer: Sequence[str] = ("t0", "t1"), rollout: Sequence[str] = ("g0", "g1")) -> Allocation:
    groups = (Group("trainer", 0, "1", tuple(trainer)), Group("rollout", 1, "2", tuple(rollout)))
    return Allocation("1", 0, "t0", groups)


class Cluster:
    """Answers of a Slurm."""

    def __init__(self) -> None:
        self.states: list[tuple[str, str]] | None = [("RUNNING", "t[0-1]"), ("RUNNING", "g[0-1]")]
        self.dead: list[str] = []

    def table(self, given: Allocation | None = None) -> NodeTable:
        def components(_job: str) -> list[slurm.Component] | None:
            if self.states is None:
                return None
            return [slurm.Component(str(i + 1), i, state, nodes, 0) for i, (state, nodes) in enumerate(self.states)]

        def silent(addresses: Mapping[str, str]) -> list[str]:
            return [node for node in addresses if node in self.dead]

        asked = Asked(components, lambda nodes: {node: f"{node}:6818" for node in nodes}, silent)
        return NodeTable(given or allocation(), asked)


def test_when_all_is_well_the_same_nodes_are_used_again() -> None:
    table = Cluster().table()

    assert ({}, "") == (table.look().lost, table.look().verdict)
    assert ("t0", "t1", "g0", "g1") == table.ranks()


def test_a_silent_rollout_node_is_left_out_before_slurm_notices_and_stays_out() -> None:
    cluster = Cluster()
    table = cluster.table()
    cluster.dead = ["g0"]
    look = table.look()
    cluster.dead = []

    assert ({"g0": "it does not answer"}, "") == (look.lost, look.verdict)
    assert {} == table.look().lost
    assert ("t0", "t1", "g1") == table.ranks()


def test_a_node_that_slurm_took_away_is_lost() -> None:
    cluster = Cluster()
    cluster.states = [("RUNNING", "t[0-1]"), ("RUNNING", "g1")]
    assert {"g0": "Slurm took it out of the job"} == cluster.table().look().lost


def test_a_lost_trainer_node_needs_a_new_start_of_the_job() -> None:
    cluster = Cluster()
    cluster.dead = ["t1"]
    assert "trainer node t1 is lost (it does not answer)" == cluster.table().look().verdict


def test_without_any_rollout_node_the_job_starts_anew() -> None:
    cluster = Cluster()
    cluster.dead = ["g0", "g1"]
    assert "every rollout node is lost: g0, g1" == cluster.table().look().verdict


@pytest.mark.parametrize("state", ["CANCELLED", "TIMEOUT", "NODE_FAIL", "COMPLETING"])
def test_a_component_that_ended_needs_a_new_start_of_the_job(state: str) -> None:
    cluster = Cluster()
    cluster.states = [("RUNNING", "t[0-1]"), (state, "g[0-1]")]
    assert f"the rollout component is {state.lower()}" == cluster.table().look().verdict


def test_a_controller_that_does_not_answer_is_no_bad_news() -> None:
    cluster = Cluster()
    cluster.states = None
    table = cluster.table()

    assert ({}, "") == (table.look().lost, table.look().verdict)
    cluster.dead = ["g1"]
    assert ["g1"] == list(table.look().lost)


def test_when_not_even_our_own_node_answers_the_answers_mean_nothing() -> None:
    cluster = Cluster()
    cluster.dead = ["t0", "t1", "g0", "g1"]
    assert ({}, "") == (cluster.table().look().lost, cluster.table().look().verdict)


def test_a_node_whose_agent_alone_did_not_start_is_left_out() -> None:
    table = Cluster().table()

    assert {"g1": "its agent did not start"} == table.look(["g1"]).lost
    assert ("t0", "t1", "g0") == table.ranks()


# --- asking -----------------------------------------------------------------------------------------------------------

SHOWN = (
    "JobId=3 HetJobId=3 HetJobOffset=0 JobName=a b JobState=RUNNING Reason=None Restarts=1 NodeList=trn0\n\n"
    "JobId=4 HetJobId=3 HetJobOffset=1 JobName=a b JobState=CANCELLED Restarts=0 NodeList=(null)\n"
)


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, str]]:
    """What Slurm says to ``command subcommand``; every call is kept under "asked"."""
    answers: dict[str, Any] = {"asked": []}

    def call(*command: str, timeout_s: float = 0.0) -> tuple[int, str]:
        answers["asked"].append(" ".join(command))
        words = [word for word in command if not word.startswith("-")]
        found: tuple[int, str] = answers.get(" ".join(words[:2]), (0, ""))
        return found

    monkeypatch.setattr(slurm, "call", call)
    return answers


def test_components_are_read_from_scontrol(answer: dict[str, Any]) -> None:
    answer["scontrol show"] = (0, SHOWN)

    assert [
        slurm.Component("3", 0, "RUNNING", "trn0", 1),
        slurm.Component("4", 1, "CANCELLED", "", 0),
    ] == slurm.job_components("3")
    assert not slurm.job_is_gone("3")


def test_a_job_is_gone_only_when_slurm_says_so(answer: dict[str, Any]) -> None:
    answer["scontrol show"] = (-1, "scontrol did not answer within 15 s")
    assert not slurm.job_is_gone("3")
    answer["scontrol show"] = (1, "slurm_load_jobs error: Invalid job id specified")
    assert slurm.job_is_gone("3")
    answer["scontrol show"] = (0, SHOWN.replace("RUNNING", "NODE_FAIL"))
    assert slurm.job_is_gone("3")


def test_only_the_start_one_belongs_to_is_requeued_and_no_cancelled_job(answer: dict[str, Any]) -> None:
    answer["scontrol show"] = (0, SHOWN)

    assert "" == slurm.requeue("3", 1)
    assert "scontrol requeue 3" == answer["asked"][-1]
    assert "" == slurm.requeue("3", 0)  # another agent of the job was faster
    assert 1 == answer["asked"].count("scontrol requeue 3")
    answer["scontrol show"] = (0, SHOWN.replace("RUNNING", "CANCELLED"))
    assert "job 3 was cancelled" == slurm.requeue("3", 1)
    answer["scontrol show"] = (-1, "")
    assert "Slurm does not answer" == slurm.requeue("3", 1)


def test_addresses_of_nodes_have_the_port_of_their_daemon(answer: dict[str, Any]) -> None:
    answer["scontrol show"] = (0, "NodeName=a NodeAddr=10.0.0.1 Port=7001\nNodeName=b NodeAddr=10.0.0.2 Port=7002\n")
    assert {"a": "10.0.0.1:7001", "b": "10.0.0.2:7002"} == slurm.node_addresses(["a", "b"])


def test_a_node_is_silent_when_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"127.0.0.1:{server.getsockname()[1]}"
        assert slurm.answers(there)
        assert [] == slurm.silent_nodes({"a": there})
    assert ["a"] == slurm.silent_nodes({"a": there})
    assert [] == slurm.silent_nodes({})
