"""What the simulator costs by size, and what lending brings there. Emulated, one core.

    python benchmarks/simulator_scale.py [--quick] [--json FILE] [--figure FILE] [--profile REPLICAS]

A cluster of N replicas (half of them hybrids on trainer GPUs), 8 samples of 8 responses a replica and cycle, 10 cycles:
the real controller, agents and workers under the virtual clock. Printed are seconds of this machine's CPU per sample
against N, and for the largest size the whole run against the target of DESIGN.md section 15: 512 replicas, 4,096
samples x 8 responses a cycle, 10 cycles, under 2 minutes on one core; cost per sample flat from 8 to 512 replicas.

Then what lending is worth at that size: against the same split without it, and against the best static split, which at
so many GPUs can be chosen as finely as one likes. --quick: sizes to 64 and 4 cycles.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # not benchmarks/: its queue.py hides the standard library's

from hybridsched.config.schema import RunConfig
from hybridsched.report.text import columns
from hybridsched.simulation.scenario import load_scenario, played, with_policy
from hybridsched.simulation.world import SimulatedRun

SIZES = (8, 16, 32, 64, 128, 256, 512)
QUICK_SIZES = (8, 16, 32, 64)
SAMPLES_PER_REPLICA = 8
COLLECTIONS = 4
LIMIT_S = 120.0
#: Cost per sample may grow by this factor from the smallest to the largest size and still be called flat.
FLAT = 1.25
#: Shares of the GPUs given to the trainer that are tried for the best static split.
SHARES = (0.375, 0.4375, 0.5625)


@dataclass(frozen=True, slots=True)
class Cost:
    """One simulated run and what it took."""

    replicas: int
    samples: int
    cpu_s: float
    virtual_s: float

    @property
    def per_sample_ms(self) -> float:
        """Milliseconds of CPU per trained sample."""
        return 1000.0 * self.cpu_s / self.samples


def configuration(replicas: int, cycles: int, *, trainer_gpus: int | None = None) -> RunConfig:
    """N GPUs, one per replica, half of them trainer GPUs unless told otherwise; nodes of 8 where that divides."""
    samples = SAMPLES_PER_REPLICA * replicas
    trainers = replicas // 2 if trainer_gpus is None else trainer_gpus
    per_node = next(size for size in (8, 4, 2, 1) if trainers % size == 0 and (replicas - trainers) % size == 0)
    overrides = {
        "actor_rollout_ref.actor.strategy": "emulated",
        "actor_rollout_ref.rollout.name": "emulated",
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.rollout.max_num_seqs": 256,
        "actor_rollout_ref.actor.ppo_mini_batch_size": samples // COLLECTIONS,
        "async_training.trigger_parameter_sync_step": COLLECTIONS,
        "async_training.staleness_threshold": 0.5,
        "async_training.concurrent_samples_per_replica": 16,
        "async_training.use_dynamic_resource_scheduling": "true",
        "async_training.dynamic_schedule_deactivate_ratio": 0.6,
        "data.max_prompt_length": 512,
        "data.max_response_length": 16384,
        "trainer.nnodes": trainers // per_node,
        "trainer.n_gpus_per_node": per_node,
        "trainer.total_training_steps": cycles,
        "trainer.save_freq": 0,
        "rollout.nnodes": (replicas - trainers) // per_node,
        "rollout.n_gpus_per_node": per_node,
        "emulated.prompt_tokens": 256,
        "emulated.response_mean_tokens": 3000,
        "emulated.response_sigma": 0.7,
        "emulated.decode_base_s": 0.02,
        "emulated.decode_per_seq_s": 0.0002,
        "emulated.train_tokens_per_s": 2500,
        "emulated.train_fixed_s": 1,
        "emulated.wake_s": 3,
        "emulated.sleep_s": 2,
        "emulated.handover_s": 2,
        "emulated.sync_s": 4,
        "deadlines.scale": 100,
    }
    return load_scenario(None, [f"{key}={value}" for key, value in overrides.items()]).config


def run(config: RunConfig) -> tuple[SimulatedRun, Any, float]:
    """A run, its summary, and the CPU seconds it took."""
    simulated = SimulatedRun(config, beat_s=30.0)
    began = time.process_time()
    summary = simulated.run(limit_s=1e9)
    return simulated, summary, time.process_time() - began


def costs(sizes: tuple[int, ...], cycles: int) -> list[Cost]:
    """CPU per sample by size."""
    found = []
    for replicas in sizes:
        _simulated, summary, cpu_s = run(configuration(replicas, cycles))
        found.append(Cost(replicas, summary.trained, cpu_s, summary.wall_clock_s))
        print(f"  {replicas} replicas: {cpu_s:.1f} s, {found[-1].per_sample_ms:.2f} ms a sample", file=sys.stderr)
    return found


def lending(replicas: int, cycles: int) -> list[tuple[str, float, float]]:
    """(what, virtual seconds a cycle, utilization) of lending and of static splits of so many GPUs."""
    rows = []
    for name in ("static_fully_async", "default"):
        simulated, summary, _ = run(with_policy(configuration(replicas, cycles), name))
        one = played(simulated, summary, name)
        rows.append((one.label, one.wall_clock_s / one.cycles, one.utilization))
    for share in SHARES:
        gpus = round(share * replicas / 4) * 4
        if gpus in (0, replicas // 2, replicas):
            continue
        config = with_policy(configuration(replicas, cycles, trainer_gpus=gpus), "static_fully_async")
        simulated, summary, _ = run(config)
        one = played(simulated, summary, "static_fully_async")
        rows.append((one.label, one.wall_clock_s / one.cycles, one.utilization))
    return rows


def draw(found: list[Cost], path: Path) -> None:
    """Cost per sample over replicas."""
    from hybridsched.report import style

    figure = style.new_figure(4.0, 8.0)
    axes = figure.add_subplot()
    style.dress(axes, "Simulator: CPU per sample by size (emulated)", "replicas", "ms per sample", grid="both")
    style.line(axes, [c.replicas for c in found], [c.per_sample_ms for c in found], style.BLUE, "measured")
    axes.set_xscale("log", base=2)
    axes.set_xticks([c.replicas for c in found], [str(c.replicas) for c in found])
    axes.set_ylim(0, 1.3 * max(c.per_sample_ms for c in found))
    path.write_bytes(style.to_png(figure))


def profile(replicas: int, cycles: int) -> None:
    """Where the time goes."""
    import cProfile
    import pstats

    profiler = cProfile.Profile()
    config = configuration(replicas, cycles)
    profiler.enable()
    run(config)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def main() -> int:
    """Command line. 0: both targets hold; 1: one does not (--quick gives no verdict)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--figure", type=Path, metavar="FILE")
    parser.add_argument("--profile", type=int, metavar="REPLICAS", help="only profile a run of this size")
    parser.add_argument("--no-lending", action="store_true", help="only the cost")
    options = parser.parse_args()
    if options.profile:
        profile(options.profile, 3)
        return 0
    sizes, cycles = (QUICK_SIZES, 4) if options.quick else (SIZES, 10)
    costs(sizes[:1], 1)  # warm: imports and first calls are not the simulator's
    found = costs(sizes, cycles)
    rows = [["replicas", "samples", "CPU s", "ms a sample", "virtual s"]]
    rows += [
        [str(c.replicas), str(c.samples), f"{c.cpu_s:.1f}", f"{c.per_sample_ms:.2f}", f"{c.virtual_s:.0f}"]
        for c in found
    ]
    print("emulated engines, real controller, virtual time, one core")
    print(columns(rows))
    largest, growth = found[-1], found[-1].per_sample_ms / found[0].per_sample_ms
    checks = {
        f"{largest.replicas} replicas, {largest.samples // cycles} samples x 8 a cycle, {cycles} cycles in "
        f"{largest.cpu_s:.0f} s (target {LIMIT_S:.0f} s)": largest.cpu_s < LIMIT_S,
        f"cost per sample from {found[0].replicas} to {largest.replicas} replicas: x {growth:.2f} "
        f"(flat: at most x {FLAT})": growth <= FLAT,
    }
    out: dict[str, Any] = {
        "emulated": True,
        "cost": [{"replicas": c.replicas, "samples": c.samples, "cpu_s": c.cpu_s} for c in found],
        "growth": growth,
    }
    if not options.no_lending:
        out["lending"] = show_lending(largest.replicas, min(cycles, 3))
    if options.figure:
        draw(found, options.figure)
    if options.json:
        options.json.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    for text, good in checks.items():
        print(("PASS  " if good else "FAIL  ") + text)
    return 0 if options.quick or all(checks.values()) else 1


def show_lending(replicas: int, cycles: int) -> list[dict[str, Any]]:
    """Print and return what lending brings at this size."""
    rows = lending(replicas, cycles)
    own = rows[0][1]
    fastest = min(seconds for name, seconds, _ in rows if "static" in name)
    print(f"\nLending at {replicas} GPUs, {cycles} cycles:")
    shown = [["split and policy", "s a cycle", "to the same split", "to the best static", "GPUs used"]]
    for name, seconds, used in sorted(rows, key=lambda row: row[1]):
        shown.append([name, f"{seconds:.0f}", f"{seconds / own:.3f}", f"{seconds / fastest:.3f}", f"{used:.0%}"])
    print(columns(shown))
    return [{"what": name, "seconds": seconds, "utilization": used} for name, seconds, used in rows]


if __name__ == "__main__":
    sys.exit(main())
