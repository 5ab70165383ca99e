"""A run log as a real run would write it: 12 cycles, two standalone replicas, one hybrid, one cycle without lending.

`write_run` is deterministic; times are virtual. Used by tests of the report, and handy to look at its pictures:
``python tests/fast/run_log_kit.py FOLDER``.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from hybridsched.runlog.writer import HDF5RunLog

CYCLES = 12
NOT_LENT = 9  #: the decision after the sync of this version is no
START = 1_800_000_000.0

CONFIG = """\
trainer:
  experiment_name: synthetic <script>alert(1)</script>
  nnodes: 1
async_training:
  trigger_parameter_sync_step: 4
  staleness_threshold: 0.5
"""


class Clock:
    """Virtual seconds since the start."""

    def __init__(self) -> None:
        self.t = 0.0

    def now(self) -> float:
        return self.t

    def wall(self) -> float:
        return START + self.t


class SyntheticRun:
    """Writes the events and metrics of one run, cycle by cycle."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self.log = HDF5RunLog(
            folder / "log", "controller", run_id="synthetic-1", wall=self.clock.wall, now=self.clock.now
        )
        self.activations = 0
        self.ratio = 0.6

    def does(self, row: str, what: str) -> None:
        self.log.event("activity", row, new=what)

    def replica(self, name: str, old: str, new: str, reason: str = "") -> None:
        self.log.event("replica", name, old=old, new=new, reason=reason, event=new, epoch=1)

    def start(self) -> None:
        log = self.log
        log.event("run", "run", new="started", reason="attempt 1")
        for rank in range(2):
            log.event("agent", f"agent.{rank}", new="up", reason=f"node{rank} pid {rank}")
        for pid, worker in enumerate(("trainer.0", "hybrid.0", "standalone.0", "standalone.1")):
            log.event("worker", worker, new="up", incarnation="a001", pid=pid)
        self.clock.t += 2.0
        for name in ("standalone.0", "standalone.1", "hybrid.0"):
            self.replica(name, "starting", "asleep")
            self.does(name, "idle")
        self.does("trainer.0", "wait")
        self.sync(0)
        log.event("checkpoint", "0.0", new="written", reason="checkpoints/global_step_0-l0")
        log.metrics(0, {"val/reward/mean@4": 0.30, "val/reward/best@4": 0.52, "val/prompts": 64.0})
        log.event("validation", "0", new="done", reason="reward mean@4 0.3000")

    def sync(self, version: int) -> None:
        log, clock = self.log, self.clock
        self.does("trainer.0", "sync")
        log.event("sync", f"0.{version}", new="begun", reason="abort")
        for name in ("standalone.0", "standalone.1"):
            self.replica(name, "ready", "syncing", f"version 0.{version}")
            self.does(name, "sync")
        clock.t += 0.5
        for name in ("standalone.0", "standalone.1"):
            self.replica(name, "syncing", "held", f"version 0.{version}")
            self.replica(name, "held", "ready", f"holds version 0.{version}")
            self.does(name, "rollout")
        log.event("sync", f"0.{version}", new="done", reason="2 receivers, attempt 1", seconds=0.5, n_bytes=400_000)

    def decide(self, version: int) -> bool:
        lend = version != NOT_LENT and version < CYCLES
        reasons = {True: "gap 20 samples x 0.1 s = 2.0 s > switch cost 0.9 s", False: "surplus of 12 samples"}
        reason = "end of the run" if version == CYCLES else reasons[lend]
        detail = {"version": version, "queue": 5 if lend else 60, "in_flight": 9, "window_room": 50}
        self.log.event(
            "decision", "activate", new="yes" if lend else "no", reason=reason, ratio=round(self.ratio, 3), **detail
        )
        self.ratio += 0.05 if lend else -0.02
        return lend

    def activate(self, version: int) -> None:
        log, clock = self.log, self.clock
        log.event("pool", "hybrids", old="standalone_only", new="activating", reason="gap")
        log.event("tenancy", "trainer.0", old="trainer", new="handover", reason="handover_begun")
        self.does("trainer.0", "switch")
        self.replica("hybrid.0", "asleep", "syncing", f"hand-over of 0.{version}")
        self.does("hybrid.0", "sync")
        clock.t += 0.5
        log.event("tenancy", "trainer.0", old="handover", new="hybrid", reason="weights_handed")
        self.replica("hybrid.0", "syncing", "held", f"holds version 0.{version}")
        self.does("hybrid.0", "idle")
        log.event("switch", "hybrid.0", new="add_replicas")
        self.replica("hybrid.0", "held", "ready", f"holds version 0.{version}")
        log.event("switch", "hybrid.0", new="resume_generation_replicas")
        self.does("hybrid.0", "rollout")
        log.event("pool", "hybrids", old="activating", new="hybrid_active", reason="1 of 1 hybrids")
        log.event("switch", "pool", new="activated", reason="gap", seconds=0.5, lent=["hybrid.0"])
        self.activations += 1

    def deactivate(self) -> None:
        log, clock = self.log, self.clock
        reason = "38 of 38 samples are there (ratio 0.600 x 64 = 38 samples)"
        log.event("decision", "deactivate", new="yes", reason="hybrids are lent", version=0, ratio=self.ratio)
        log.event("pool", "hybrids", old="hybrid_active", new="deactivating", reason=reason)
        self.does("trainer.0", "switch")
        for call in ("remove_replicas", "abort_replicas", "sleep_replicas"):
            log.event("switch", "hybrid.0", new=call)
        self.replica("hybrid.0", "ready", "draining", "taken back")
        self.does("hybrid.0", "switch")
        clock.t += 0.4
        self.replica("hybrid.0", "draining", "asleep", "released 100 bytes, measured")
        self.does("hybrid.0", "idle")
        log.event("tenancy", "trainer.0", old="hybrid", new="trainer", reason="release_proven")
        self.does("trainer.0", "wait")
        log.event("pool", "hybrids", old="deactivating", new="standalone_only", reason=reason)
        log.event("switch", "pool", new="deactivated", reason=reason, seconds=0.4)

    def cycle(self, number: int, lent: bool) -> None:
        """From one sync to the next; ``number`` is the version it ends with."""
        log, clock = self.log, self.clock
        began = clock.t
        waited = 2.0 + 0.2 * math.sin(number) if lent else 0.0
        gaps = [0.25, 0.2, 0.15, 0.1] if lent else [0.0] * 4
        if lent:
            clock.t += waited
            self.deactivate()
        if number == 7:
            self.death()
        for gap in gaps:
            clock.t += gap
            self.does("trainer.0", "train")
            log.event("segment", f"standalone.0/a001-{number:08d}", new="sealed", reason="samples", rows=16)
            clock.t += 0.45
            self.does("trainer.0", "wait")
        if not lent:
            self.does("standalone.1", "idle")
        self.sync(number)
        lends = self.decide(number)
        if lends:
            self.activate(number)
        elif number < CYCLES:
            log.event("sync", f"0.{number}", new="second sync skipped", reason="surplus of 12 samples")
        step = clock.t - began
        log.metrics(number, self.metrics(number, step, waited, sum(gaps), lent) | {"timing_s/activate": 0.5 * lends})
        if number % 4 == 0:
            log.metrics(number, {"val/reward/mean@4": 0.3 + 0.04 * number, "val/reward/best@4": 0.5 + 0.035 * number})
            log.event("validation", str(number), new="done", reason=f"reward mean@4 {0.3 + 0.04 * number:.4f}")
            log.event("checkpoint", f"0.{number}", new="written", reason=f"checkpoints/global_step_{number}-l0")

    def death(self) -> None:
        log = self.log
        log.event("worker", "standalone.1", new="exited", reason="killed by signal 9 (SIGKILL)", incarnation="a001")
        self.replica("standalone.1", "ready", "failed", "killed by signal 9 (SIGKILL)")
        self.does("standalone.1", "idle")
        reason = "standalone.1 died before they were durable"
        log.event("sample", "417", new="reissued", reason=reason)
        log.event("fault", "standalone.1", new="recovered", reason="<b>signal 9</b>", reissued=1, restarted=3)

    def metrics(self, number: int, step: float, waited: float, gen: float, lent: bool) -> dict[str, float]:
        reward = 0.31 + 0.36 * (1 - math.exp(-number / 5))
        train = 1.7
        return {
            "dynamic_resource/train_resource_utilization": 0.45 + 0.02 * number if lent else 0.85,
            "dynamic_resource/rollout_resource_utilization": 0.93 if lent else 0.7,
            "dynamic_resource/resource_utilization": 0.80 if lent else 0.78,
            "dynamic_resource/resource_utilization_exact": 0.82 if lent else 0.77,
            "dynamic_resource/mq_size": (6.0 + number) if lent else 60.0,
            "dynamic_resource/activations": float(self.activations),
            "fully_async/static/required_samples": 16.0,
            "fully_async/static/max_required_samples": 96.0,
            "timing_s/step": step,
            "timing_s/gen": gen,
            "timing_s/seal_wait": 0.01,
            "timing_s/wait_for_enough_samples": waited,
            "timing_s/param_sync": 0.5,
            "timing_s/deactivate": 0.4 if lent else 0.0,
            "timing_s/save_checkpoint": 0.2 if number % 4 == 0 else 0.0,
            "timing_s/validate": 0.0,
            "timing_s/update_actor": train,
            "rollout/reward/mean": reward,
            "perf/total_num_tokens": 40_000.0,
            "samples/trained": 64.0,
            "samples/filtered": 2.0,
            "staleness/age_max": 2.0,
            "staleness/age_0_share": 0.6,
            "staleness/age_1_share": 0.3,
            "staleness/age_2_share": 0.1,
        }


def write_run(folder: Path, *, finish: bool = True) -> Path:
    """Write the whole run into ``folder``; finish False: it is killed after the last cycle. Returns the folder."""
    run = SyntheticRun(folder)
    run.start()
    lent = run.decide(0)
    run.activate(0)
    for number in range(1, CYCLES + 1):
        run.cycle(number, lent)
        lent = number != NOT_LENT
    if finish:
        run.log.event("run", "run", new="finished", reason="end of data")
        run.log.close()
    (folder / "config").mkdir()
    (folder / "config" / "resolved.yaml").write_text(CONFIG)
    (folder / "run.json").write_text(json.dumps({"run_id": "synthetic-1"}))
    return folder


def pictures(folder: Path) -> dict[str, Any]:
    """All figures of a run by name."""
    from hybridsched.report.plots import PICTURES
    from hybridsched.report.resource_plot import time_shares, whole_run, zoom
    from hybridsched.report.run_data import load_run

    run = load_run(folder)
    drawn = {name: draw(run) for name, draw in PICTURES}
    return drawn | {"whole_run": whole_run(run), "zoom": zoom(run), "time_shares": time_shares(run)}


if __name__ == "__main__":
    from hybridsched.report.style import to_png

    target = Path(sys.argv[1])
    write_run(target)
    for name, figure in pictures(target).items():
        (target / f"{name}.png").write_bytes(to_png(figure))
