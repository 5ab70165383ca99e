"""The controller's accept log and ledger as files of the run folder: how one incarnation opens and reads them.

Owns the translation between `LogPosition` (what a checkpoint holds) and `sample_queue.log` (what lies on disk). The
logs lie beside the segments, where fsck looks for them. Raises what the log raises: QueueError, NoSpace.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybridsched.errors import InternalError
from hybridsched.runtime.checkpoints import LogPosition
from hybridsched.runtime.services import ChainSources
from hybridsched.sample_queue.log import ACCEPT_LOG, LEDGER, FileChainedLog, read_chain
from hybridsched.sample_queue.store import QUEUE_FOLDER, Durability


def file_chains(
    run_folder: Path, run_id: str, new_incarnation: Callable[[], str], durability: Durability = "host-crash"
) -> ChainSources:
    """The chains of a run. ``new_incarnation`` gives a file name that was never used in this run folder."""
    folder = Path(run_folder) / QUEUE_FOLDER

    def known(name: str) -> str:
        if name not in (ACCEPT_LOG, LEDGER):
            raise InternalError(f"there is no chained log {name!r}; a run has {ACCEPT_LOG!r} and {LEDGER!r}")
        return name

    def open_log(name: str, incarnation: str, parent: LogPosition | None) -> FileChainedLog:
        fork = None if parent is None else (parent.incarnation, parent.position)
        return FileChainedLog(folder, known(name), incarnation, fork, durability, run_id=run_id)

    def read(name: str, incarnation: str) -> list[dict[str, Any]]:
        return read_chain(folder, known(name), incarnation)

    return ChainSources(open=open_log, new_incarnation=new_incarnation, read=read)
