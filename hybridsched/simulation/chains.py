"""The controller's chained logs in memory: the twin of `runtime.adapters.chains`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridsched.runtime.checkpoints import LogPosition
from hybridsched.runtime.services import ChainSources
from hybridsched.simulation.storage import MemoryChainedLog, MemoryDisk, read_chain


def memory_chains(disk: MemoryDisk, new_incarnation: Callable[[], str]) -> ChainSources:
    """Accept log and ledger on a simulated disk. ``new_incarnation`` gives a name nobody had on this disk."""

    def open_log(name: str, incarnation: str, parent: LogPosition | None) -> MemoryChainedLog:
        fork = None if parent is None else (parent.incarnation, parent.position)
        return MemoryChainedLog(disk, name, incarnation, fork)

    def read(name: str, incarnation: str) -> list[dict[str, Any]]:
        return read_chain(disk, name, incarnation)

    return ChainSources(open=open_log, new_incarnation=new_incarnation, read=read)
