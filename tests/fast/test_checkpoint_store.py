"""Checkpoints as folders: whole or not at all, whatever happens while one is written; chains beside them."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridsched.errors import InternalError, NoSpace, QueueError, RunFolderError
from hybridsched.model import WeightVersion
from hybridsched.runtime.adapters import checkpoints
from hybridsched.runtime.adapters.chains import file_chains
from hybridsched.runtime.adapters.checkpoints import FileCheckpointStore
from hybridsched.runtime.checkpoints import CheckpointStore, ControllerState, LogPosition
from hybridsched.runtime.services import ChainSources
from hybridsched.sample_queue import files
from hybridsched.simulation.chains import memory_chains
from hybridsched.simulation.storage import MemoryDisk


def state(version: WeightVersion, **changes: Any) -> ControllerState:
    at = LogPosition("a001", 3)
    base = ControllerState(
        "run", version, {0: 0, 1: 2}, 4, 8, 5, [7], at, at, "default", {"ratio": [0.3]}, {"trained": 9}, 1.5
    )
    return replace(base, **changes)


def saved(store: CheckpointStore, version: WeightVersion, weights: bytes = b"weights") -> str:
    """What the trainer does."""
    folder = store.begin(version)
    (Path(folder) / "model").mkdir()
    (Path(folder) / "model" / "model.safetensors").write_bytes(weights)
    return folder


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_a_checkpoint_is_invisible_until_it_is_committed_and_restores_equal(tmp_path: Path) -> None:
    store: CheckpointStore = FileCheckpointStore(tmp_path)
    assert store.complete() == []
    version = WeightVersion(1, 12)
    folder = saved(store, version)
    assert store.complete() == []
    ref = store.commit(folder, state(version))
    assert ref.folder == str(tmp_path / "checkpoints" / "global_step_12-l1")
    assert (Path(ref.folder) / "model" / "model.safetensors").read_bytes() == b"weights"
    assert (list(store.complete()), names(tmp_path)) == ([ref], ["global_step_12-l1"])
    assert FileCheckpointStore(tmp_path).load(ref.folder) == state(version)


def test_complete_ones_come_by_lineage_then_number(tmp_path: Path) -> None:
    store = FileCheckpointStore(tmp_path)
    written = [WeightVersion(0, 10), WeightVersion(1, 2), WeightVersion(0, 9)]
    for version in written:
        store.commit(saved(store, version), state(version))
    assert [ref.version for ref in store.complete()] == sorted(written)


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    store = FileCheckpointStore(tmp_path)
    refs = [store.commit(saved(store, v), state(v)) for v in (WeightVersion(0, n) for n in range(4))]
    assert (list(store.prune(2)), names(tmp_path)) == (refs[2:], ["global_step_2-l0", "global_step_3-l0"])
    assert list(store.prune(5)) == refs[2:]
    with pytest.raises(RunFolderError, match="no complete checkpoint there"):
        store.load(refs[0].folder)


def test_the_same_version_again_replaces_the_former(tmp_path: Path) -> None:
    store = FileCheckpointStore(tmp_path)
    version = WeightVersion(0, 1)
    store.commit(saved(store, version, b"old"), state(version))
    ref = store.commit(saved(store, version, b"new"), state(version, collections=99))
    assert (Path(ref.folder) / "model" / "model.safetensors").read_bytes() == b"new"
    assert (store.load(ref.folder).collections, names(tmp_path)) == (99, ["global_step_1-l0"])


def test_a_replacement_cut_off_between_its_renames_keeps_the_former(tmp_path: Path) -> None:
    store = FileCheckpointStore(tmp_path)
    version = WeightVersion(0, 1)
    ref = store.commit(saved(store, version), state(version))
    os.rename(ref.folder, tmp_path / "checkpoints" / ".old-global_step_1-l0.0a1b")
    assert list(FileCheckpointStore(tmp_path).complete()) == [ref]


def test_discard_removes_the_unfinished_and_never_a_committed_one(tmp_path: Path) -> None:
    store = FileCheckpointStore(tmp_path)
    version = WeightVersion(0, 0)
    ref = store.commit(saved(store, version), state(version))
    folder = saved(store, WeightVersion(0, 1))
    for unwanted in (folder, folder, ref.folder):
        store.discard(unwanted)
    assert names(tmp_path) == ["global_step_0-l0"]


def test_an_empty_or_unknown_one_is_not_committed(tmp_path: Path) -> None:
    store = FileCheckpointStore(tmp_path)
    version = WeightVersion(0, 0)
    with pytest.raises(QueueError, match="the trainer saved nothing"):
        store.commit(store.begin(version), state(version))
    ref = store.commit(saved(store, version), state(version))
    with pytest.raises(QueueError, match="not begun here"):
        store.commit(ref.folder, state(version))


@pytest.mark.parametrize("where", ["write_fully", "fsync_folder"])
def test_a_full_disk_is_no_space_and_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    store = FileCheckpointStore(tmp_path)
    ref = store.commit(saved(store, WeightVersion(0, 0)), state(WeightVersion(0, 0)))
    folder = saved(store, WeightVersion(0, 1))

    def full(*_args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(files, where, full)
        with pytest.raises(NoSpace, match="writing a checkpoint"):
            store.commit(folder, state(WeightVersion(0, 1)))
    assert list(store.complete()) == [ref]
    store.discard(folder)
    assert names(tmp_path) == ["global_step_0-l0"]


def test_a_rename_that_fails_brings_the_former_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileCheckpointStore(tmp_path)
    version = WeightVersion(0, 1)
    ref = store.commit(saved(store, version, b"old"), state(version))
    folder = saved(store, version, b"new")
    rename = os.rename

    def broken(src: Any, dst: Any) -> None:
        if str(src) == folder:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(src, dst)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.os, "rename", broken)
        with pytest.raises(QueueError, match="writing a checkpoint failed"):
            store.commit(folder, state(version))
    assert (Path(ref.folder) / "model" / "model.safetensors").read_bytes() == b"old"


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_checkpoint_store as t
from hybridsched.runtime.adapters import checkpoints
from hybridsched.runtime.adapters.checkpoints import FileCheckpointStore
from hybridsched.model import WeightVersion

store, version = FileCheckpointStore(Path({run!r})), WeightVersion(0, 5)
folder = t.saved(store, version)
target = {{"write": checkpoints, "rename": os}}[{what!r}]
name = {{"write": "_sync_tree", "rename": "rename"}}[{what!r}]
setattr(target, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
store.commit(folder, t.state(version))
"""


@pytest.mark.parametrize("what", ["write", "rename"])
def test_a_kill_in_the_middle_leaves_nothing_visible_and_the_next_begin_cleans_up(tmp_path: Path, what: str) -> None:
    script = KILLED.format(tests=str(Path(__file__).parent), run=str(tmp_path), what=what)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    store = FileCheckpointStore(tmp_path)
    (leftover,) = names(tmp_path)
    assert (list(store.complete()), leftover.startswith(".tmp-global_step_5-l0.")) == ([], True)
    folder = store.begin(WeightVersion(0, 6))
    assert names(tmp_path) == [Path(folder).name]


def test_beginning_a_second_one_leaves_the_first_alone(tmp_path: Path) -> None:
    store = FileCheckpointStore(tmp_path)
    first = saved(store, WeightVersion(0, 1))
    store.begin(WeightVersion(0, 2))
    assert store.commit(first, state(WeightVersion(0, 1))).version == WeightVersion(0, 1)


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"{", "cannot be read"), (b"[]", "is damaged"), (b'{"schema": 99}', "schema 99"), (b'{"schema": 1}', "damaged")],
)
def test_a_damaged_or_foreign_controller_file_names_the_file_and_the_cure(
    tmp_path: Path, content: bytes, why: str
) -> None:
    store = FileCheckpointStore(tmp_path)
    ref = store.commit(saved(store, WeightVersion(0, 0)), state(WeightVersion(0, 0)))
    (Path(ref.folder) / "controller.json").write_bytes(content)
    with pytest.raises(RunFolderError, match=why) as raised:
        store.load(ref.folder)
    assert "controller.json" in str(raised.value)


def test_foreign_files_beside_checkpoints_are_left_alone(tmp_path: Path) -> None:
    store = FileCheckpointStore(tmp_path)
    ref = store.commit(saved(store, WeightVersion(0, 0)), state(WeightVersion(0, 0)))
    (tmp_path / "checkpoints" / "notes.txt").write_text("mine")
    (tmp_path / "checkpoints" / "global_step_x-l0").mkdir()
    store.begin(WeightVersion(0, 1))
    assert list(store.complete()) == [ref]
    assert {"notes.txt", "global_step_x-l0"} < set(names(tmp_path))


# --- chains -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["files", "memory"])
def chains(request: pytest.FixtureRequest, tmp_path: Path) -> ChainSources:
    numbers = iter(range(100))

    def new() -> str:
        return f"a{next(numbers):03d}"

    if request.param == "files":
        return file_chains(tmp_path, "run-1", new, "process-crash")
    return memory_chains(MemoryDisk(), new)


def test_a_chain_goes_on_from_the_position_in_a_checkpoint(chains: ChainSources) -> None:
    first = chains.new_incarnation()
    log = chains.open("accept", first, None)
    log.append([{"uid": 1}, {"uid": 2}, {"uid": 3}])
    second = chains.new_incarnation()
    fork = chains.open("accept", second, LogPosition(first, 2))
    assert (fork.position, fork.append([{"uid": 9}])) == (2, 3)
    assert chains.read("accept", second) == [{"uid": 1}, {"uid": 2}, {"uid": 9}]
    assert chains.read("accept", first) == [{"uid": 1}, {"uid": 2}, {"uid": 3}]


def test_accept_log_and_ledger_are_apart(chains: ChainSources) -> None:
    name = chains.new_incarnation()
    chains.open("accept", name, None).append([{"uid": 1}])
    ledger = chains.open("ledger", name, None)
    assert (ledger.position, chains.read("ledger", name)) == (0, [])


def test_a_position_the_log_does_not_have_is_refused(chains: ChainSources) -> None:
    first = chains.new_incarnation()
    chains.open("ledger", first, None).append([{"uid": 1}])
    with pytest.raises(QueueError):
        chains.open("ledger", chains.new_incarnation(), LogPosition(first, 2))


def test_logs_of_a_run_lie_where_fsck_looks_and_have_no_other_names(tmp_path: Path) -> None:
    sources = file_chains(tmp_path, "run-1", lambda: "a000", "process-crash")
    sources.open("accept", "a000", None)
    header = json.loads((tmp_path / "queue" / "accept" / "a000.jsonl").read_text().splitlines()[0])
    assert header["run_id"] == "run-1"
    with pytest.raises(InternalError, match="no chained log 'notes'"):
        sources.open("notes", "a000", None)
