"""What the control plane itself costs: dispatch, activation, deactivation, event-loop lag, memory. Zero-cost engines.

    python benchmarks/control_plane.py [--quick] [--json FILE]

Real controller, agents and worker classes on a real asyncio loop; engines and trainer are *emulated* and take no time;
envelopes between agents go through the in-memory transport but are encoded and decoded as on the wire. Targets are
DESIGN.md section 15: activate and deactivate 64 replicas under 50 ms each, at least 5,000 requests dispatched a
second, cost linear up to 4,096 replicas, an agent under 100 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not benchmarks/: its queue.py hides the standard library's

from hybridsched.config import load_config
from hybridsched.config.schema import RunConfig
from hybridsched.runtime import wire
from hybridsched.runtime.clock import RealClock
from hybridsched.runtime.controller import Controller
from hybridsched.runtime.garbage import collect_rarely
from hybridsched.runtime.messages import Envelope
from hybridsched.simulation.runlog import MemoryRunLog
from hybridsched.simulation.world import SimulatedRun

ZERO = [
    "actor_rollout_ref.actor.strategy=emulated",
    "actor_rollout_ref.rollout.name=emulated",
    "async_training.use_dynamic_resource_scheduling=true",
    "local.allow_oversubscribe=true",
    "emulated.decode_base_s=0",
    "emulated.decode_per_seq_s=0",
    "emulated.prefill_tokens_per_s=1e12",
    "emulated.wake_s=0",
    "emulated.sleep_s=0",
    "emulated.sync_s=0",
    "emulated.handover_s=0",
    "emulated.train_fixed_s=0",
    "emulated.train_tokens_per_s=1e12",
    "emulated.response_mean_tokens=64",
    "queue.seal_age_s=0.2",
    "trainer.val_before_train=false",
    "deadlines.start_s=3000",
    "deadlines.switch_s=600",
    "deadlines.agent_silence_s=600",
]


class WireRun(SimulatedRun):
    """A simulated run in real time whose envelopes are encoded and decoded."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config, network_faults=self._through_the_wire, beat_s=1.0)
        self.clock = RealClock()  # type: ignore[assignment]
        self.log = MemoryRunLog(self.clock)
        self.bytes = 0

    def _through_the_wire(self, _src: int, _dst: int, envelope: Envelope) -> int:
        frame = wire.encode(envelope)
        self.bytes += len(frame)
        wire.decode(frame)
        return 1


def switches(hybrids: int) -> dict[str, float]:
    """Seconds of one activation and one deactivation of ``hybrids`` replicas on nodes of 8."""
    nodes = max(1, hybrids // 8)
    config = load_config(
        None,
        [
            *ZERO,
            f"trainer.nnodes={nodes}",
            f"trainer.n_gpus_per_node={hybrids // nodes}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={max(16, hybrids)}",
            "trainer.total_training_steps=3",
            f"emulated.dataset_size={max(16, hybrids) * 100}",
            "async_training.concurrent_samples_per_replica=1",
            "actor_rollout_ref.rollout.n=2",
        ],
    )
    run = WireRun(config)
    collect_rarely()  # as rank 0 does
    asyncio.run(run.main())
    activated = [e.detail["seconds"] for e in run.log.of("switch", "pool") if e.new == "activated"]
    deactivated = [e.detail["seconds"] for e in run.log.of("switch", "pool") if e.new == "deactivated"]
    lags = [row.values["runtime/event_loop_lag_s"] for row in run.log.rows if "runtime/event_loop_lag_s" in row.values]
    return {
        "activate_s": min(activated),
        "deactivate_s": min(deactivated),
        "event_loop_lag_s": max(lags, default=0.0),
    }


def dispatch(replicas: int, samples: int) -> dict[str, float]:
    """Requests (samples with 8 responses) given out per second: admission, choice, lease, encoding, delivery."""
    nodes = max(1, replicas // 8)
    config = load_config(
        None,
        [
            *ZERO,
            "async_training.use_dynamic_resource_scheduling=false",
            f"rollout.nnodes={nodes}",
            f"rollout.n_gpus_per_node={replicas // nodes}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={samples}",
            "async_training.trigger_parameter_sync_step=1",
            "async_training.staleness_threshold=0",
            f"async_training.concurrent_samples_per_replica={max(1, samples // replicas)}",
            "trainer.total_training_steps=1",
            f"emulated.dataset_size={samples}",
        ],
    )
    run = WireRun(config)
    spent: list[float] = []

    async def main() -> None:
        original = Controller.run

        async def timed(self: Controller, resume_from: str | None = None) -> Any:
            pump = self.parts.rollouter.pump

            def measured() -> None:
                before, given = time.perf_counter(), self.parts.rollouter.in_flight()
                pump()
                if self.parts.rollouter.in_flight() - given > samples // 4:
                    spent.append((time.perf_counter() - before) / (self.parts.rollouter.in_flight() - given))

            self.parts.rollouter.pump = measured  # type: ignore[method-assign]
            return await original(self, resume_from)

        Controller.run = timed  # type: ignore[method-assign]
        try:
            await run.main()
        finally:
            Controller.run = original  # type: ignore[method-assign]

    began = time.perf_counter()
    asyncio.run(main())
    whole = time.perf_counter() - began
    return {
        "dispatched_per_s": 1.0 / min(spent) if spent else 0.0,
        "whole_path_samples_per_s": samples / whole,
        "bytes_per_sample": run.bytes / samples,
    }


def agent_memory() -> float:
    """Resident MB of a process that has imported everything a node agent needs."""
    code = (
        "import hybridsched.runtime.agent_main, sys\n"
        "assert 'torch' not in sys.modules and 'vllm' not in sys.modules\n"
        "print([l for l in open('/proc/self/status') if l.startswith('VmRSS')][0].split()[1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout.split()[-1]) / 1024


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to 64 replicas only")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    sizes = [1, 64] if options.quick else [1, 64, 512, 4096]
    table: dict[str, Any] = {"replicas": {}}
    head = ("replicas", "activate ms", "deactivate ms", "dispatched/s", "whole path/s", "lag ms")
    print(" ".join(f"{name:>13}" for name in head))
    for size in sizes:
        row = switches(size) | dispatch(size, max(64, min(4 * size, 8192)))
        table["replicas"][size] = row
        print(
            f"{size:>9} {1e3 * row['activate_s']:>12.1f} {1e3 * row['deactivate_s']:>14.1f} "
            f"{row['dispatched_per_s']:>13.0f} {row['whole_path_samples_per_s']:>13.0f} "
            f"{1e3 * row['event_loop_lag_s']:>8.0f}",
            flush=True,
        )
    at64 = table["replicas"][64]
    largest = table["replicas"][sizes[-1]]
    table["agent_mb"] = agent_memory()
    growth = (largest["activate_s"] / sizes[-1]) / (at64["activate_s"] / 64)
    checks = {
        "activate 64 replicas under 50 ms": at64["activate_s"] < 0.05,
        "deactivate 64 replicas under 50 ms": at64["deactivate_s"] < 0.05,
        "at least 5,000 requests dispatched a second": min(r["dispatched_per_s"] for r in table["replicas"].values())
        >= 5000,
        f"linear: cost per replica at {sizes[-1]} is {growth:.2f}x that at 64 (target below 1.5)": growth < 1.5,
        f"agent memory {table['agent_mb']:.0f} MB (target below 100)": table["agent_mb"] < 100,
    }
    for text, good in checks.items():
        print(("PASS  " if good else "FAIL  ") + text)
    table["checks"] = checks
    if options.json:
        Path(options.json).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
