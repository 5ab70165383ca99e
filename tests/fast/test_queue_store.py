"""The folder of segments: names, discovery, foreign files, quarantine, removal."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from queue_helpers import at_once, make_samples, plain, segment_id

from hybridsched.errors import QueueError, RunFolderError, SegmentDamaged
from hybridsched.model import SegmentId
from hybridsched.sample_queue import files
from hybridsched.sample_queue.store import FileSegmentStore


@pytest.fixture
def store(tmp_path: Path) -> FileSegmentStore:
    return FileSegmentStore(tmp_path, "run-1", wall_ns=lambda: 5)


def test_a_sealed_segment_is_listed_and_read(store: FileSegmentStore) -> None:
    content = make_samples(range(3))
    info = store.write(segment_id(), content)
    assert [segment_id()] == store.list()
    assert [plain(s) for s in content] == [plain(s) for s in store.read(segment_id())]
    assert [plain(content[2])] == [plain(s) for s in store.read(segment_id(), [2])]
    assert info == store.info(segment_id())
    assert store.path(segment_id()).stat().st_size == info.n_bytes


def test_the_layout_on_disk(store: FileSegmentStore, tmp_path: Path) -> None:
    store.write(SegmentId("gpu017.0", "99.1.5", 12), make_samples([1]))
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert found == ["queue/queue.json", "queue/seg/gpu017.0/99.1.5-00000012.h5"]


def test_a_second_store_of_the_same_run_sees_the_segments(store: FileSegmentStore, tmp_path: Path) -> None:
    store.write(segment_id(), make_samples(range(2)))
    other = FileSegmentStore(tmp_path, "run-1", create=False)
    assert [segment_id()] == other.list()
    assert len(other.read(segment_id())) == 2


def test_the_listing_is_sorted_by_producer_incarnation_number(store: FileSegmentStore) -> None:
    names = [segment_id(s, p, i) for p in ("b", "a") for i in ("2", "1") for s in (10, 9)]
    for name in names:
        store.write(name, make_samples([1]))
    assert sorted(names) == store.list()


def test_foreign_files_are_ignored_and_reported(store: FileSegmentStore, tmp_path: Path) -> None:
    store.write(segment_id(), make_samples([1]))
    elsewhere = FileSegmentStore(tmp_path / "other", "run-2")
    elsewhere.write(segment_id(4), make_samples([2]))
    shutil.copy(elsewhere.path(segment_id(4)), store.path(segment_id(4)))
    shutil.copy(store.path(segment_id()), store.path(segment_id(8)))
    folder = store.path(segment_id()).parent
    for name in ("notes.txt", "7.0.123-1.h5", "7.0.123-000000011.h5", ".7.0.123-00000009.h5.tmp"):
        (folder / name).write_text("x")
    (folder.parent / "stray").write_text("x")
    assert [segment_id()] == store.list()
    assert list(store.foreign()) == [
        "node0.0/7.0.123-000000011.h5: not a segment name",
        "node0.0/7.0.123-00000004.h5: belongs to run 'run-2'",
        "node0.0/7.0.123-00000008.h5: belongs to run 'run-1 (copied from node0.0/7.0.123-00000000)'",
        "node0.0/7.0.123-1.h5: not a segment name",
        "node0.0/notes.txt: not a segment name",
        "stray: not a producer's folder",
    ]
    with pytest.raises(QueueError, match="belongs to run 'run-2', not 'run-1'"):
        store.read(segment_id(4))


def test_the_queue_of_another_run_is_refused(store: FileSegmentStore, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"queue\.json: this is the queue of run 'run-1', not of 'run-2'"):
        FileSegmentStore(tmp_path, "run-2")


def test_a_folder_without_queue_is_refused_by_tools(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is not the folder of a run"):
        FileSegmentStore(tmp_path, "run-1", create=False)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_header_is_refused(store: FileSegmentStore, tmp_path: Path) -> None:
    (tmp_path / "queue" / "queue.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"queue\.json: cannot be read"):
        FileSegmentStore(tmp_path, "run-1")


def test_many_processes_may_create_the_queue_at_once(tmp_path: Path) -> None:
    def create() -> str:
        return FileSegmentStore(tmp_path, "run-1").run_id

    assert at_once([create] * 6) == ["run-1"] * 6
    assert sorted(path.name for path in (tmp_path / "queue").iterdir()) == ["queue.json", "seg"]


def test_the_same_content_under_its_name_again_is_a_repeat(store: FileSegmentStore) -> None:
    first = store.write(segment_id(), make_samples(range(2)))
    before = store.path(segment_id()).stat().st_ino
    assert first == store.write(segment_id(), make_samples(range(2)))
    assert before == store.path(segment_id()).stat().st_ino


def test_a_taken_name_is_never_overwritten(store: FileSegmentStore) -> None:
    store.write(segment_id(), make_samples([1]))
    with pytest.raises(QueueError, match="the name is taken by other samples"):
        store.write(segment_id(), make_samples([2]))
    assert [s.sample_uid for s in store.read(segment_id())] == [1]


def test_a_failed_folder_sync_is_repaired_by_writing_again(
    store: FileSegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write(segment_id(0), make_samples([1]))

    def fail(folder: Path) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(QueueError, match="Input/output error"):
        patch.setattr(files, "fsync_folder", fail)
        store.write(segment_id(1), make_samples([2]))
    assert [row.sample_uid for row in store.write(segment_id(1), make_samples([2])).rows] == [2]
    assert [segment_id(0), segment_id(1)] == store.list()


def test_a_rename_whose_answer_got_lost_counts(store: FileSegmentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    rename: Callable[[object, object], None] = os.rename

    def replayed(source: str, target: str) -> None:
        rename(source, target)
        rename(source, target)

    monkeypatch.setattr(os, "rename", replayed)
    store.write(segment_id(), make_samples([1]))
    assert [s.sample_uid for s in store.read(segment_id())] == [1]


def test_a_rename_that_really_failed_does_not(store: FileSegmentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(source: str, target: str) -> None:
        os.unlink(source)
        raise FileNotFoundError(2, "No such file", source)

    monkeypatch.setattr(os, "rename", lost)
    with pytest.raises(QueueError, match="sealing a segment failed"):
        store.write(segment_id(), make_samples([1]))
    assert store.list() == []


def test_names_that_cannot_be_files_are_refused(store: FileSegmentStore) -> None:
    for name in ("a/b", "..", ".x", "", "a b"):
        with pytest.raises(QueueError, match="cannot name a file"):
            store.write(SegmentId(name, "1", 0), make_samples([1]))
        with pytest.raises(QueueError, match="cannot name a file"):
            store.write(SegmentId("p", name, 0), make_samples([1]))


def test_a_segment_that_is_not_there_is_no_damage(store: FileSegmentStore) -> None:
    with pytest.raises(QueueError, match=r"not there \(yet\)") as error:
        store.read(segment_id(3))
    assert not isinstance(error.value, SegmentDamaged)


def test_a_damaged_segment_is_listed_and_goes_to_quarantine(store: FileSegmentStore, tmp_path: Path) -> None:
    store.write(segment_id(), make_samples([1]))
    path = store.path(segment_id())
    path.write_bytes(path.read_bytes()[:1000])
    reader = FileSegmentStore(tmp_path, "run-1")
    assert [segment_id()] == reader.list()
    with pytest.raises(SegmentDamaged) as error:
        reader.read(segment_id())
    reader.quarantine(segment_id(), str(error.value))
    reader.quarantine(segment_id(), "a second process noticed it too")
    assert reader.list() == []
    assert {segment_id(): str(error.value)} == reader.quarantined()
    aside = tmp_path / "queue" / "quarantine" / "node0.0"
    assert sorted(p.name for p in aside.iterdir()) == ["7.0.123-00000000.h5", "7.0.123-00000000.reason.json"]
    note = json.loads((aside / "7.0.123-00000000.reason.json").read_text())
    assert {"segment": "node0.0/7.0.123-00000000", "reason": str(error.value)} == {k: note[k] for k in list(note)[:2]}


def test_quarantine_of_what_never_was_is_an_error(store: FileSegmentStore) -> None:
    with pytest.raises(QueueError, match="moving it to quarantine"):
        store.quarantine(segment_id(5), "x")


def test_remove_frees_bytes_and_skips_what_is_gone(store: FileSegmentStore) -> None:
    sizes = [store.write(segment_id(seq), make_samples([seq])).n_bytes for seq in range(3)]
    assert sum(sizes[:2]) == store.remove([segment_id(0), segment_id(1), segment_id(9)])
    assert [segment_id(2)] == store.list()
    assert store.remove([segment_id(0)]) == 0


def test_clean_tmp_touches_only_the_own_leftovers(store: FileSegmentStore) -> None:
    store.write(segment_id(), make_samples([1]))
    store.write(segment_id(producer="other"), make_samples([1]))
    mine = store.path(segment_id()).parent / ".7.0.123-00000001.h5.tmp"
    others = store.path(segment_id(producer="other")).parent / ".7.0.123-00000001.h5.tmp"
    for path in (mine, others):
        path.write_text("x")
    assert [mine] == store.clean_tmp("node0.0")
    assert (mine.exists(), others.exists()) == (False, True)
    assert len(store.list()) == 2
    assert store.clean_tmp("never-started") == []


def test_free_bytes_is_what_the_file_system_says(store: FileSegmentStore, tmp_path: Path) -> None:
    state = os.statvfs(tmp_path)
    assert abs(store.free_bytes() - state.f_bavail * state.f_frsize) < 1 << 30


def test_process_crash_durability_does_not_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    FileSegmentStore(tmp_path / "fast", "r", "process-crash").write(segment_id(), make_samples([1]))
    assert synced == []
    FileSegmentStore(tmp_path / "safe", "r", "host-crash").write(segment_id(), make_samples([1]))
    assert synced


def test_forced_hdf5_locking_is_warned_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HDF5_USE_FILE_LOCKING", "TRUE")
    with pytest.warns(UserWarning, match="HDF5_USE_FILE_LOCKING"):
        FileSegmentStore(tmp_path, "run-1")


def test_a_late_listing_is_refreshed(store: FileSegmentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    refreshed: list[Path] = []
    monkeypatch.setattr(files, "refresh_listing", refreshed.append)
    store.write(segment_id(), make_samples([1]))
    with pytest.raises(QueueError):
        store.read(segment_id(3))
    assert [store.path(segment_id()).parent] == refreshed
    monkeypatch.setattr(store, "_lists_late", True)
    store.list()
    assert store.path(segment_id()).parent.parent in refreshed


def test_refreshing_changes_nothing_and_survives_a_missing_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    files.refresh_listing(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o750
    files.refresh_listing(tmp_path / "none")
    assert not (tmp_path / "none").exists()
