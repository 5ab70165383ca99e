"""What a checkpoint of the controller holds, and the store that keeps checkpoints whole or not at all.

The trainer writes its part into the folder `begin` gives; `commit` adds controller.json and makes the checkpoint
visible in one step. A reader never sees a half-written one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from hybridsched.errors import RunFolderError
from hybridsched.model import WeightVersion

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class LogPosition:
    """A place in a chained log: which incarnation's chain, and how many entries of it."""

    incarnation: str
    position: int


@dataclass(frozen=True, slots=True)
class ControllerState:
    """Everything the controller needs to go on as if nothing had happened."""

    run_id: str
    version: WeightVersion
    forks: dict[int, int]  #: lineage -> number at which it was opened
    collections: int  #: trained collections so far
    optimizer_steps: int
    frontier_lowest: int
    frontier_above: list[int]
    accept_log: LogPosition
    ledger: LogPosition
    policy: str
    policy_state: dict[str, Any]
    counts: dict[str, int] = field(default_factory=dict)
    clock_s: float = 0.0  #: training wall clock so far
    best: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        return {"schema": SCHEMA, **asdict(self), "version": list(self.version)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str) -> ControllerState:
        """Read back. Raises RunFolderError on a foreign schema."""
        if data.get("schema") != SCHEMA:
            raise RunFolderError(
                f"{where}: checkpoint schema {data.get('schema')!r} is not {SCHEMA}; it was written by another "
                "hybridsched, resume with that one"
            )
        values = {k: v for k, v in data.items() if k != "schema"}
        values["version"] = WeightVersion(*values["version"])
        values["forks"] = {int(k): int(v) for k, v in values["forks"].items()}
        values["accept_log"] = LogPosition(**values["accept_log"])
        values["ledger"] = LogPosition(**values["ledger"])
        return cls(**values)


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """One complete checkpoint."""

    version: WeightVersion
    folder: str


class CheckpointStore(Protocol):
    """Keeps checkpoints (files, or memory in simulation)."""

    def begin(self, version: WeightVersion) -> str:
        """A fresh folder for the trainer's part."""
        ...

    def commit(self, folder: str, state: ControllerState) -> CheckpointRef:
        """Add the controller's part and publish. Raises NoSpace, QueueError; the old ones stay."""
        ...

    def discard(self, folder: str) -> None:
        """Remove an unfinished one."""
        ...

    def complete(self) -> Sequence[CheckpointRef]:
        """Complete checkpoints, oldest first."""
        ...

    def load(self, folder: str) -> ControllerState:
        """The controller's part. Raises RunFolderError."""
        ...

    def prune(self, keep: int) -> Sequence[CheckpointRef]:
        """Remove all but the newest ``keep``; returns what is left, oldest first."""
        ...
