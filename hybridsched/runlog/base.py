"""The contract of the run log: where everybody reports events and metrics. Files, memory and nothing implement it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class EventSink(Protocol):
    """Takes events and metrics; never blocks for long, never raises into the caller's decision."""

    def event(self, kind: str, entity: str, *, old: str = "", new: str = "", reason: str = "", **detail: Any) -> None:
        """One transition, decision, drop, retry or fault.

        kind examples: run, worker, replica, lease, sample, segment, decision, switch, tenancy, sync, checkpoint,
        validation, ledger, fault, activity. ``activity`` events feed the resource-time picture: entity is a replica
        ("standalone.0", "hybrid.1") or "trainer.0", new is one of rollout, train, sync, switch, wait, idle.
        ``detail`` values are JSON-able.
        """
        ...

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One row of metrics, all belonging to sync cycle ``step`` (names as in DESIGN.md section 13)."""
        ...
