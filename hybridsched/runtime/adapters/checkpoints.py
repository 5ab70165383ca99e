"""Checkpoints as folders of the run, visible as a whole or not at all: a `runtime.checkpoints.CheckpointStore`.

    <run>/checkpoints/global_step_<number>-l<lineage>/    complete; controller.json inside
    <run>/checkpoints/.tmp-<name>.<token>/                being written
    <run>/checkpoints/.old-<name>.<token>/                the former one of that name, while it is replaced

Invariants
    A folder gets its final name by one rename, after every file in it and the folder itself are on disk. So a complete
    name is a complete checkpoint, also after the power failed.
    What a dead run left unfinished is removed by the next `begin`; a replacement that was cut off between its two
    renames is undone by whoever looks next. Only the owner of the run folder has a store; others read the folders.

Does not: write the trainer's part (the trainer does, into the folder `begin` gives) or decide how many are kept.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from hybridsched.errors import QueueError, RunFolderError
from hybridsched.model import WeightVersion
from hybridsched.runtime.checkpoints import CheckpointRef, ControllerState
from hybridsched.sample_queue import files

CHECKPOINTS = "checkpoints"
CONTROLLER_FILE = "controller.json"
_NAME = re.compile(r"global_step_(?P<number>\d+)-l(?P<lineage>\d+)")
_ASIDE = re.compile(r"\.old-(?P<name>global_step_\d+-l\d+)\.[0-9a-f]+")


class FileCheckpointStore:
    """Checkpoints under ``run_folder``. Synchronous; callers hand the methods to `offload`."""

    def __init__(self, run_folder: Path) -> None:
        self._root = Path(run_folder).absolute() / CHECKPOINTS
        self._open: dict[str, WeightVersion] = {}

    def begin(self, version: WeightVersion) -> str:
        """A fresh folder for the trainer's part. Raises NoSpace, QueueError."""
        path = self._root / f".tmp-{_name(version)}.{os.urandom(4).hex()}"
        try:
            files.make_folder(self._root, durable=True)
            self._clean_up()
            path.mkdir()
        except OSError as error:
            raise files.queue_error(error, path, "beginning a checkpoint", 4096) from error
        self._open[str(path)] = version
        return str(path)

    def commit(self, folder: str, state: ControllerState) -> CheckpointRef:
        """Add controller.json, bring everything to disk, publish. Raises NoSpace, QueueError; the old ones stay."""
        if folder not in self._open:
            raise QueueError(f"{folder}: cannot be committed, it was not begun here or is finished")
        version, path = self._open[folder], Path(folder)
        if not path.is_dir() or not any(path.iterdir()):
            raise QueueError(f"{folder}: cannot be committed, the trainer saved nothing there")
        final = self._root / _name(version)
        data = json.dumps(state.to_json(), sort_keys=True, indent=1).encode() + b"\n"
        try:
            with files.surviving_file_size_limit():
                _write(path / CONTROLLER_FILE, data)
                _sync_tree(path)
            self._publish(path, final)
        except OSError as error:
            raise files.queue_error(error, path, "writing a checkpoint", len(data)) from error
        del self._open[folder]
        return CheckpointRef(version, str(final))

    def discard(self, folder: str) -> None:
        """Remove an unfinished one. Idempotent; a committed one stays."""
        if self._open.pop(folder, None) is not None:
            _remove(Path(folder))

    def complete(self) -> Sequence[CheckpointRef]:
        """Complete checkpoints, oldest first: by lineage, then number."""
        self._undo_replacements()
        refs = [CheckpointRef(version, str(path)) for version, path in self._found()]
        return sorted(refs, key=lambda ref: ref.version)

    def load(self, folder: str) -> ControllerState:
        """The controller's part. Raises RunFolderError: not there, damaged, of another hybridsched."""
        path = Path(folder) / CONTROLLER_FILE
        cure = "resume from another checkpoint (trainer.resume_from_path)"
        try:
            data = json.loads(path.read_bytes())
        except FileNotFoundError as error:
            raise RunFolderError(f"{folder}: no complete checkpoint there (no {CONTROLLER_FILE}); {cure}") from error
        except (OSError, ValueError) as error:
            raise RunFolderError(f"{path}: cannot be read: {error}; {cure}") from error
        try:
            return ControllerState.from_json(data, str(path))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunFolderError(f"{path}: is damaged: {type(error).__name__}: {error}; {cure}") from error

    def prune(self, keep: int) -> Sequence[CheckpointRef]:
        """Remove all but the newest ``keep``; returns what is left, oldest first."""
        there = self.complete()
        split = max(0, len(there) - max(0, keep))
        for ref in there[:split]:
            # Out of sight first: a removal that is cut off must not leave half a checkpoint under a complete name.
            doomed = self._root / f".tmp-{Path(ref.folder).name}.{os.urandom(4).hex()}"
            try:
                os.rename(ref.folder, doomed)
                files.fsync_folder(self._root)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise files.queue_error(error, Path(ref.folder), "removing an old checkpoint") from error
            _remove(doomed)
        return there[split:]

    # -- inside -------------------------------------------------------------------------------------------------------

    def _found(self) -> Iterator[tuple[WeightVersion, Path]]:
        try:
            entries = sorted(self._root.iterdir())
        except FileNotFoundError:
            return
        for path in entries:
            match = _NAME.fullmatch(path.name)
            if match and (path / CONTROLLER_FILE).is_file():
                yield WeightVersion(int(match["lineage"]), int(match["number"])), path

    def _publish(self, path: Path, final: Path) -> None:
        """Rename; a former checkpoint of the same version is put aside first and removed afterwards."""
        aside = self._root / f".old-{final.name}.{os.urandom(4).hex()}"
        if final.exists():
            os.rename(final, aside)
        try:
            os.rename(path, final)
        except OSError:
            if aside.exists():
                os.rename(aside, final)
            raise
        files.fsync_folder(self._root)
        _remove(aside)

    def _undo_replacements(self) -> None:
        for path in sorted(self._root.glob(".old-*")):
            match = _ASIDE.fullmatch(path.name)
            if match and not (self._root / match["name"]).exists():
                os.rename(path, self._root / match["name"])

    def _clean_up(self) -> None:
        """Remove what earlier runs left unfinished (and what was put aside, once its replacement is there)."""
        self._undo_replacements()
        for path in [*self._root.glob(".tmp-*"), *self._root.glob(".old-*")]:
            if str(path) not in self._open:
                _remove(path)


def _name(version: WeightVersion) -> str:
    return f"global_step_{version.number}-l{version.lineage}"


def _write(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        files.write_fully(fd, data)
    finally:
        os.close(fd)


def _sync_tree(root: Path) -> None:
    """fsync every file and folder below ``root``, and ``root``."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            fd = os.open(Path(folder) / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        files.fsync_folder(Path(folder))


def _remove(path: Path) -> None:
    """Remove a folder that nobody may use any more; what cannot be removed now is removed by the next `begin`."""
    shutil.rmtree(path, ignore_errors=True)
