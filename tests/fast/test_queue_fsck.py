"""fsck finds each kind of damage, the ledger check each broken promise, and inspection shows what is there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queue_helpers import make_sample, make_samples, segment_id

from hybridsched.errors import QueueError, RunFolderError
from hybridsched.model import RowRef, Verdict, WeightVersion
from hybridsched.sample_queue.fsck import FsckReport, fsck
from hybridsched.sample_queue.inspection import head, list_segments, totals
from hybridsched.sample_queue.ledger import Entry, accept_entry, accepted_ref, ledger_entry, verify_chain
from hybridsched.sample_queue.log import ACCEPT_LOG, LEDGER, FileChainedLog
from hybridsched.sample_queue.store import FileSegmentStore


def verdict(uid: int, what: Verdict = Verdict.TRAINED, prompt: str | None = None, epoch: int = 0) -> Entry:
    version = WeightVersion(0, 1)
    return ledger_entry(uid, what, prompt_uid=prompt or f"prompt-{uid}", epoch=epoch, version=version, collection=2)


class Run:
    """A healthy run of two segments with two samples each, of which the first two are trained."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = FileSegmentStore(folder, "run-1")
        self.accept = FileChainedLog(folder / "queue", ACCEPT_LOG, "c1", run_id="run-1")
        self.ledger = FileChainedLog(folder / "queue", LEDGER, "c1", run_id="run-1")
        for seq in range(2):
            self.store.write(segment_id(seq), make_samples([2 * seq, 2 * seq + 1]))
            self.accept.append([accept_entry(2 * seq + row, RowRef(segment_id(seq), row)) for row in range(2)])
        self.ledger.append([verdict(0), verdict(1, Verdict.STALE)])

    def path(self, seq: int) -> Path:
        return self.store.path(segment_id(seq))

    def check(self, *, complete: bool = False) -> FsckReport:
        return fsck(self.folder, complete=complete)

    def only_problem(self) -> str:
        report = self.check()
        assert not report.ok
        assert report.text().endswith("1 problems")
        (problem,) = report.problems
        return problem


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_healthy_run_is_ok(run: Run) -> None:
    report = run.check()
    assert report.ok, report.text()
    assert (report.n_segments, report.n_samples, report.n_accepted, report.notes) == (2, 4, 4, [])
    assert sum(run.path(seq).stat().st_size for seq in range(2)) == report.n_bytes
    assert report.text().splitlines()[1:] == [
        "ledger: 2 verdicts (1 stale, 1 trained), 0 samples without one",
        "ok",
    ]


def test_fsck_changes_nothing(run: Run) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.folder.rglob("*")}
    run.check()
    assert before == {path: path.stat().st_mtime_ns for path in run.folder.rglob("*")}


def test_a_bit_flip_is_a_problem(run: Run) -> None:
    data = bytearray(run.path(1).read_bytes())
    at = data.index(make_sample(3).responses[0].token_ids.tobytes())
    data[at] ^= 1
    run.path(1).write_bytes(data)
    problem = run.only_problem()
    assert "segment node0.0/7.0.123-00000001" in problem
    assert "dataset 'tokens/id' is damaged: expected xxh3_64" in problem


def test_a_truncated_segment_is_a_problem(run: Run) -> None:
    run.path(0).write_bytes(run.path(0).read_bytes()[:-100])
    assert "is damaged" in run.only_problem()


def test_a_missing_or_foreign_queue_header_is_a_problem(run: Run) -> None:
    header = run.folder / "queue" / "queue.json"
    header.rename(header.with_suffix(".away"))
    assert "is not the folder of a run" in run.only_problem()
    header.write_text(json.dumps({"schema_version": 9, "run_id": "run-1"}))
    assert "version 9" in run.only_problem()


def test_an_accepted_segment_that_is_gone_before_its_verdict_is_a_problem(run: Run) -> None:
    run.store.remove([segment_id(1)])
    report = run.check()
    assert [
        f"sample {uid} was accepted and has no verdict, but segment node0.0/7.0.123-00000001 is gone" for uid in (2, 3)
    ] == report.problems


def test_a_collected_segment_whose_samples_have_verdicts_is_fine(run: Run) -> None:
    run.store.remove([segment_id(0)])
    assert run.check().ok


def test_an_accepted_segment_in_quarantine_is_a_problem_and_told(run: Run) -> None:
    run.store.quarantine(segment_id(1), "checksum of tokens/id")
    report = run.check()
    assert "segment node0.0/7.0.123-00000001 is quarantined" in report.problems[0]
    assert report.notes == ["quarantined node0.0/7.0.123-00000001: checksum of tokens/id"]


def test_an_accept_entry_of_another_row_or_sample_is_a_problem(run: Run) -> None:
    run.accept.append([accept_entry(7, RowRef(segment_id(1), 0))])
    assert run.only_problem() == "accept log entry 4: row 0 of node0.0/7.0.123-00000001 is not sample 7"


def test_an_accept_entry_behind_the_segment_is_a_problem(run: Run) -> None:
    run.accept.append([accept_entry(7, RowRef(segment_id(1), 2))])
    assert "row 2 of node0.0/7.0.123-00000001 is not sample 7" in run.only_problem()


def test_a_sample_accepted_twice_is_a_problem(run: Run) -> None:
    run.accept.append([accept_entry(2, RowRef(segment_id(1), 0))])
    assert run.only_problem() == "sample 2 was accepted twice: at 2 and 4"


def test_an_accept_entry_that_is_none_is_a_problem(run: Run) -> None:
    run.accept.append([{"uid": 9}])
    assert "accept log entry 4: not an accept log entry" in run.only_problem()


def test_two_verdicts_for_one_sample_are_a_problem(run: Run) -> None:
    run.ledger.append([verdict(1)])
    assert run.only_problem() == "ledger: 1 samples have more than one verdict: uid 1"


def test_trained_but_never_accepted_is_a_problem(run: Run) -> None:
    run.ledger.append([verdict(2), verdict(3), verdict(4)])
    assert run.only_problem() == "ledger: 1 samples were trained but never accepted: uid 4"


def test_samples_without_verdict_count_only_once_the_run_is_complete(run: Run) -> None:
    run.ledger.append([verdict(3)])
    assert run.check().ok
    assert run.check(complete=True).problems == ["ledger: 1 ranges of samples have no verdict: uid (2, 2)"]


def test_a_damaged_line_of_a_log_is_a_problem(run: Run) -> None:
    run.ledger.append([verdict(2)])
    path = run.folder / "queue" / LEDGER / "c1.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"stale"', b'"stalE"'))
    assert "c1.jsonl: line 2: damaged (its crc32 does not fit)" in run.only_problem()


def test_a_log_of_another_run_is_a_problem(run: Run) -> None:
    FileChainedLog(run.folder / "queue", ACCEPT_LOG, "c2", ("c1", 4), run_id="run-1")
    path = run.folder / "queue" / ACCEPT_LOG / "c2.jsonl"
    path.write_text(path.read_text().replace("run-1", "run-2"))
    assert run.only_problem() == "accept log of incarnation c2 belongs to run 'run-2'"


def test_the_chain_of_the_newest_incarnation_counts(run: Run) -> None:
    later = FileChainedLog(run.folder / "queue", LEDGER, "c2", ("c1", 1), run_id="run-1")
    later.append([verdict(1), verdict(2)])
    report = run.check()
    assert report.ok
    assert report.ledger is not None
    assert report.ledger.verdicts == {"trained": 3}


def test_twins_gaps_leftovers_and_foreign_files_are_notes(run: Run) -> None:
    run.store.write(segment_id(4), make_samples([3], n=1))
    (run.path(0).parent / ".7.0.123-00000005.h5.tmp").write_text("x")
    (run.path(0).parent / "notes.txt").write_text("x")
    report = run.check()
    assert report.ok
    assert report.notes == [
        "sample 3 is in 2 rows (it was re-issued): node0.0/7.0.123-00000001 row 1, node0.0/7.0.123-00000004 row 0",
        "foreign file node0.0/notes.txt: not a segment name",
        "unfinished file node0.0/.7.0.123-00000005.h5.tmp (its producer removes it at its next start)",
        "gap in sequence numbers of node0.0/7.0.123: 2, 3 (removed, or not visible yet)",
    ]


# ------------------------------------------------------------------ the ledger check


def test_a_prompt_issued_twice_in_one_epoch_is_a_problem() -> None:
    entries = [verdict(0, prompt="a"), verdict(1, prompt="b"), verdict(2, prompt="a", epoch=1)]
    assert verify_chain(entries).ok
    report = verify_chain([*entries, verdict(3, prompt="b")])
    assert report.reissued == ((0, "b"),)
    assert "prompts were issued more than once in an epoch" in report.text()


def test_an_entry_that_is_no_ledger_line_is_a_problem() -> None:
    report = verify_chain([verdict(0), {"uid": 1, "verdict": "eaten"}, {"verdict": "trained"}])
    assert len(report.unknown) == 2
    assert not report.ok


@given(uids=st.sets(st.integers(0, 30)), frontier=st.integers(0, 35))
def test_gaps_are_exactly_the_missing_uids(uids: set[int], frontier: int) -> None:
    report = verify_chain([verdict(uid) for uid in sorted(uids, reverse=True)], frontier=frontier, complete=True)
    missing = [uid for first, last in report.gaps for uid in range(first, last + 1)]
    assert sorted(set(range(frontier)) - uids) == missing
    assert (not missing) == report.ok


@given(uids=st.lists(st.integers(0, 6), max_size=12))
def test_doubled_are_exactly_the_repeated_uids(uids: list[int]) -> None:
    entries = [verdict(uid, prompt=f"p{uid}") for uid in uids]
    assert tuple(sorted({uid for uid in uids if uids.count(uid) > 1})) == verify_chain(entries).doubled


def test_an_accept_entry_survives_its_way_through_json() -> None:
    ref = RowRef(segment_id(3), 4)
    assert (9, ref) == accepted_ref(json.loads(json.dumps(accept_entry(9, ref))))
    with pytest.raises(QueueError, match="not an accept log entry"):
        accepted_ref({"uid": 1, "segment": ["a", "b"], "row": 0})


# ------------------------------------------------------------------ inspection


def test_ls_gives_one_row_per_segment(run: Run) -> None:
    shutil.copy(run.path(1), run.path(3))
    run.path(1).write_bytes(b"junk")
    rows = list_segments(run.folder)
    assert [k for k in rows[0] if k in ("seq", "samples", "responses", "tokens")] == [
        "seq",
        "samples",
        "responses",
        "tokens",
    ]
    assert tuple(rows[0][k] for k in ("seq", "samples", "responses", "tokens", "newest_version")) == (
        0,
        2,
        4,
        20,
        "0.1",
    )
    assert (rows[1]["seq"], "damaged" in rows[1]["error"]) == (1, True)
    assert len(json.loads(json.dumps(rows))) == 2


def test_head_decodes_samples(run: Run) -> None:
    samples = head(run.folder, 3)
    assert [sample["sample_uid"] for sample in samples] == [0, 1, 2]
    assert samples[2]["responses"][0]["token_ids"] == [2000, 2001, 2002, 2003, 2004]
    assert samples[2]["responses"][0]["versions"] == [{"version": "0.1", "start": 0, "end": 5, "kept_kv": False}]
    assert [sample["sample_uid"] for sample in head(run.folder, 9, segment_id(1))[1:]] == [3]
    assert samples == json.loads(json.dumps(samples))


def test_stat_adds_up(run: Run) -> None:
    stat = totals(run.folder)
    expected = {
        "segments": 2,
        "samples": 4,
        "responses": 8,
        "tokens": 40,
        "damaged": 0,
        "accepted": 4,
        "reward_mean": 0.5,
    }
    assert expected == {key: stat[key] for key in expected}
    assert stat["verdicts"] == {"trained": 1, "stale": 1}
    run.path(0).write_bytes(b"junk")
    assert (totals(run.folder)["damaged"], totals(run.folder)["samples"]) == (1, 2)


def test_inspection_of_a_folder_without_run_is_a_user_error(tmp_path: Path) -> None:
    for look in (list_segments, head, totals):
        with pytest.raises(RunFolderError, match="is not the folder of a run"):
            look(tmp_path)
