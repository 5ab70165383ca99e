"""A simulation's log as the HDF5 run log every report reads.

Owns `write_run_log`: the events and metrics of a `MemoryRunLog`, in order, with their virtual times, as
`FOLDER/log/*.h5`, and the resolved configuration beside it. Invariant: what is written says that it is emulated.
Nothing is computed here.
"""

from __future__ import annotations

from pathlib import Path

from hybridsched.config.loader import save_resolved
from hybridsched.errors import RunFolderError
from hybridsched.runlog.writer import HDF5RunLog
from hybridsched.simulation.world import SimulatedRun


def write_run_log(run: SimulatedRun, folder: Path) -> None:
    """Write the log of a finished simulation. Raises RunFolderError for a folder that has a run log already."""
    if (folder / "log").exists():
        raise RunFolderError(f"{folder} holds the log of a run already; give --log another folder")
    at = 0.0
    epoch = run.clock.epoch
    log = HDF5RunLog(
        folder / "log",
        "controller",
        run_id=f"simulated-{run.config.trainer.experiment_name}",
        wall=lambda: epoch + at,
        now=lambda: at,
        flush_s=float("inf"),
        attrs={"emulated": 1},
    )
    done = 0
    for row in [*run.log.rows, None]:
        for event in run.log.events[done : len(run.log.events) if row is None else row.after]:
            at = event.t
            log.event(event.kind, event.entity, old=event.old, new=event.new, reason=event.reason, **event.detail)
        if row is not None:
            done, at = row.after, row.t
            log.metrics(row.step, row.values)
    log.close()
    if log.problem:
        raise RunFolderError(f"{folder}: the log of the simulation could not be written: {log.problem}")
    (folder / "config").mkdir(exist_ok=True)
    save_resolved(run.config, folder / "config" / "resolved.yaml", run.derived)
