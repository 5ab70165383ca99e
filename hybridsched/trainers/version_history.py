"""How old a weight version is, in versions and in optimizer steps. Pure bookkeeping, saved with the trainer.

A version of a dead lineage (from before a rollback or resume) that the trainer never reached again counts at its fork:
as the newest version known from its own or an older lineage that does not come after it.
"""

from __future__ import annotations

from hybridsched.model import WeightVersion

KEPT = 256  #: versions remembered; older ones count as the oldest kept


class VersionHistory:
    """Optimizer steps done when each version was synced."""

    def __init__(self, entries: list[tuple[int, int, int]] | None = None) -> None:
        self._steps: dict[WeightVersion, int] = {
            WeightVersion(lineage, number): steps for lineage, number, steps in entries or []
        }

    def begin(self, version: WeightVersion, optimizer_steps: int) -> None:
        """``version`` was just synced after ``optimizer_steps`` steps."""
        self._steps[version] = optimizer_steps
        while len(self._steps) > KEPT:
            del self._steps[min(self._steps)]

    def lags(self, version: WeightVersion, now: WeightVersion, optimizer_steps: int) -> tuple[int, int]:
        """(versions, optimizer steps) between a token's ``version`` and the present; never negative."""
        at = self._counted_at(version)
        number = version.number if version.lineage == now.lineage else at.number
        return max(0, now.number - number), max(0, optimizer_steps - self._steps.get(at, optimizer_steps))

    def entries(self) -> list[tuple[int, int, int]]:
        """(lineage, number, optimizer steps), for a checkpoint."""
        return [(version.lineage, version.number, steps) for version, steps in self._steps.items()]

    def _counted_at(self, version: WeightVersion) -> WeightVersion:
        if version in self._steps or not self._steps:
            return version
        before = [v for v in self._steps if v.lineage <= version.lineage and v.number <= version.number]
        return max(before, key=lambda v: (v.number, v.lineage)) if before else version
