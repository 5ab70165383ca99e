"""Checkpoints in memory: what a simulated run resumes from.

Owns ``MemoryCheckpointStore``, a ``runtime.checkpoints.CheckpointStore``. The trainer's part is whatever the emulated
trainer puts under the folder's name into ``trainer_parts`` (hand the same mapping to ``EmulatedTrainer``); the
controller's part is kept as JSON text, so that nothing restored shares an object with what was saved.

Invariants: a checkpoint is listed only when both parts are there; committed ones never change. On a full disk
``commit`` raises NoSpace and the old ones stay.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from hybridsched.errors import QueueError, RunFolderError
from hybridsched.model import WeightVersion
from hybridsched.runtime.checkpoints import CheckpointRef, ControllerState
from hybridsched.simulation.storage import MemoryDisk


class MemoryCheckpointStore:
    """One per simulated run; survives the deaths of its processes."""

    def __init__(self, disk: MemoryDisk) -> None:
        self._disk = disk
        self._serial = 0
        self._open: dict[str, WeightVersion] = {}
        self._committed: dict[str, tuple[WeightVersion, str]] = {}
        #: The trainer's part by folder name.
        self.trainer_parts: dict[str, str] = {}

    def begin(self, version: WeightVersion) -> str:
        """A fresh folder name for the trainer's part."""
        folder = f"checkpoints/{version}-{self._serial}"
        self._serial += 1
        self._open[folder] = version
        return folder

    def commit(self, folder: str, state: ControllerState) -> CheckpointRef:
        """Add the controller's part and publish. Raises NoSpace, QueueError; the old ones stay."""
        if folder not in self._open:
            raise QueueError(f"{folder}: cannot be committed, it was not begun here or is finished")
        if folder not in self.trainer_parts:
            raise QueueError(f"{folder}: cannot be committed, the trainer saved nothing there")
        text = json.dumps(state.to_json(), sort_keys=True)
        self._disk.claim(len(text) + len(self.trainer_parts[folder]), f"checkpoint {folder}")
        self._committed[folder] = (self._open.pop(folder), text)
        return CheckpointRef(self._committed[folder][0], folder)

    def discard(self, folder: str) -> None:
        """Remove an unfinished one; a committed one stays."""
        if self._open.pop(folder, None) is not None:
            self.trainer_parts.pop(folder, None)

    def complete(self) -> Sequence[CheckpointRef]:
        """Complete checkpoints, oldest first: by lineage, then number."""
        refs = [CheckpointRef(version, folder) for folder, (version, _) in self._committed.items()]
        return sorted(refs, key=lambda ref: ref.version)

    def load(self, folder: str) -> ControllerState:
        """The controller's part. Raises RunFolderError."""
        if folder not in self._committed:
            raise RunFolderError(f"{folder}: no complete checkpoint there")
        return ControllerState.from_json(json.loads(self._committed[folder][1]), folder)

    def prune(self, keep: int) -> Sequence[CheckpointRef]:
        """Remove all but the newest ``keep``; returns what is left, oldest first."""
        there = self.complete()
        for ref in there[: max(0, len(there) - keep)]:
            _, text = self._committed.pop(ref.folder)
            self._disk.used -= len(text) + len(self.trainer_parts.pop(ref.folder))
        return self.complete()
