"""The owner fence: who may take a run folder from whom, and what happens when several try."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queue_helpers import at_once

from hybridsched.errors import OwnershipLost, RunFolderError
from hybridsched.sample_queue.owner import (
    OwnerFence,
    OwnerIdentity,
    OwnerRecord,
    _why_not,
    current_owner,
    identity_of_this_process,
    process_is_alive,
)

JOB = OwnerIdentity("77", 1, "node-a", 4242, "boot-1", 1_000)
LOCAL = replace(JOB, job_id="", restart_count=0)


def alive(_: OwnerIdentity) -> bool:
    return True


def dead(_: OwnerIdentity) -> bool:
    return False


gone, there = alive, dead  # as answers of Slurm


def claim(folder: Path, identity: OwnerIdentity, is_alive=alive, slurm_says_gone=there) -> OwnerFence:  # type: ignore[no-untyped-def]
    return OwnerFence.claim(folder, identity, is_alive, slurm_says_gone, wall_ns=lambda: 1_700_000_000_000_000_000)


def refusal(folder: Path, identity: OwnerIdentity, is_alive=alive, slurm_says_gone=there) -> str:  # type: ignore[no-untyped-def]
    with pytest.raises(OwnershipLost) as error:
        claim(folder, identity, is_alive, slurm_says_gone)
    return str(error.value)


def test_the_first_claim_is_number_one(tmp_path: Path) -> None:
    fence = claim(tmp_path, JOB)
    assert fence.n == 1
    fence.check()
    record = json.loads((tmp_path / "owner" / "000001.json").read_text())
    assert tuple(record[k] for k in ("job_id", "restart_count", "host", "pid")) == ("77", 1, "node-a", 4242)
    assert OwnerRecord(1, JOB, 1_700_000_000_000_000_000, False) == current_owner(tmp_path)


def test_a_later_start_of_the_same_job_takes_over_from_any_host(tmp_path: Path) -> None:
    first = claim(tmp_path, JOB)
    second = claim(tmp_path, replace(JOB, restart_count=2, host="node-b", boot_id="boot-9"))
    assert second.n == 2
    second.check()
    with pytest.raises(OwnershipLost, match=r"owned it as number 1, now the owner is number 2, job 77 \(start 2\)"):
        first.check()


def test_an_earlier_start_of_the_same_job_is_refused_even_when_the_owner_is_dead(tmp_path: Path) -> None:
    claim(tmp_path, replace(JOB, restart_count=5))
    assert "later start of the same job" in refusal(tmp_path, JOB, dead, gone)


def test_another_job_is_refused_until_slurm_says_the_owner_is_gone(tmp_path: Path) -> None:
    claim(tmp_path, JOB)
    other = replace(JOB, job_id="78", host="node-b", boot_id="boot-2", pid=9)
    assert "runs on another host" in refusal(tmp_path, other)
    assert claim(tmp_path, other, slurm_says_gone=gone).n == 2


def test_on_the_same_host_the_process_decides(tmp_path: Path) -> None:
    claim(tmp_path, LOCAL)
    me = replace(LOCAL, pid=4243, started_ns=2_000)
    assert "it is alive" in refusal(tmp_path, me)
    assert claim(tmp_path, me, dead).n == 2


def test_after_a_reboot_the_owner_is_dead(tmp_path: Path) -> None:
    claim(tmp_path, LOCAL)
    assert claim(tmp_path, replace(LOCAL, boot_id="boot-2")).n == 2


def test_an_owner_on_another_host_is_never_taken_for_dead(tmp_path: Path) -> None:
    claim(tmp_path, LOCAL)
    assert "nothing says that it ended" in refusal(tmp_path, replace(LOCAL, host="node-b"), dead, gone)


def test_an_owner_in_another_container_is_never_taken_for_dead(tmp_path: Path) -> None:
    claim(tmp_path, replace(LOCAL, pid_namespace="pid:[1]"))
    assert "another container" in refusal(tmp_path, replace(LOCAL, pid=1, pid_namespace="pid:[2]"), dead)


def test_a_released_folder_is_free_for_everybody(tmp_path: Path) -> None:
    first = claim(tmp_path, LOCAL)
    first.release()
    first.release()
    assert claim(tmp_path, replace(LOCAL, host="node-b")).n == 2


def test_the_refusal_tells_the_owners_story_and_what_to_do(tmp_path: Path) -> None:
    claim(tmp_path, JOB)
    story = refusal(tmp_path, replace(JOB, job_id="78", host="node-b"))
    for part in (
        "job 77 (start 1), process 4242 on node-a",
        "since 2023-11-14 22:13:20 UTC",
        "scancel 77",
        str(tmp_path),
    ):
        assert part in story
    claim(tmp_path / "local", LOCAL)
    assert "ssh node-a kill 4242" in refusal(tmp_path / "local", replace(LOCAL, host="node-b"))


_IDENTITIES = st.builds(
    OwnerIdentity,
    job_id=st.sampled_from(["", "1", "2"]),
    restart_count=st.integers(0, 2),
    host=st.sampled_from(["a", "b"]),
    pid=st.integers(1, 2),
    boot_id=st.sampled_from(["x", "y"]),
    started_ns=st.integers(1, 2),
)


@given(owner=_IDENTITIES, me=_IDENTITIES, lives=st.booleans(), job_gone=st.booleans())
def test_whenever_it_is_allowed_something_proves_that_the_owner_ended(
    owner: OwnerIdentity, me: OwnerIdentity, lives: bool, job_gone: bool
) -> None:
    record = OwnerRecord(3, owner, 0, False)
    allowed = not _why_not(record, me, lambda _: lives, lambda _: job_gone)
    same_job = owner.job_id != "" and owner.job_id == me.job_id
    newer = same_job and me.restart_count > owner.restart_count
    older = same_job and me.restart_count < owner.restart_count
    slurm = owner.job_id != "" and not same_job and job_gone
    here = owner.host == me.host and (owner.boot_id != me.boot_id or not lives)
    assert (not older and (newer or slurm or here)) == allowed
    assert _why_not(replace(record, released=True), me, alive, there) == ""


def test_of_many_claimants_exactly_one_wins(tmp_path: Path) -> None:
    def attempt(number: int) -> int:
        identity = replace(LOCAL, pid=100 + number)
        try:
            fence = OwnerFence.claim(tmp_path, identity, lambda other: other.pid != 4242, there)
            fence.check()
        except OwnershipLost:
            return 0
        return fence.n

    for n in (1, 2):
        won = at_once([lambda number=number: attempt(number) for number in range(8)])  # type: ignore[misc]
        assert [n] == [number for number in won if number]
        (tmp_path / "owner" / f"{n:06d}.released").touch()
    assert sorted(os.listdir(tmp_path / "owner")) == [
        "000001.json",
        "000001.released",
        "000002.json",
        "000002.released",
    ]


def test_a_damaged_record_is_not_taken_for_an_ended_owner(tmp_path: Path) -> None:
    claim(tmp_path, LOCAL)
    (tmp_path / "owner" / "000001.json").write_text("{}")
    with pytest.raises(RunFolderError, match=r"000001\.json: the owner's record is damaged"):
        claim(tmp_path, LOCAL, dead)


def test_a_run_folder_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match="must be writable"):
        claim(tmp_path / "file", LOCAL)


def test_check_notices_that_the_records_vanished(tmp_path: Path) -> None:
    fence = claim(tmp_path, LOCAL)
    (tmp_path / "owner" / "000001.json").unlink()
    with pytest.raises(OwnershipLost, match="now the owner is nobody"):
        fence.check()


def test_this_process_is_alive_and_a_reused_pid_is_not_it() -> None:
    me = identity_of_this_process("5", 2)
    assert ("5", 2, os.getpid()) == (me.job_id, me.restart_count, me.pid)
    assert process_is_alive(me)
    assert not process_is_alive(replace(me, started_ns=me.started_ns - 10_000_000))
    assert me == identity_of_this_process("5", 2)


def test_a_killed_process_and_a_zombie_are_dead() -> None:
    code = (
        "from hybridsched.sample_queue.owner import identity_of_this_process as i; import dataclasses, json\n"
        "print(json.dumps(dataclasses.asdict(i())), flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        identity = OwnerIdentity(**json.loads(process.stdout.readline()))
        assert process_is_alive(identity)
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not process_is_alive(identity), "a zombie"
    assert not process_is_alive(identity), "reaped"
