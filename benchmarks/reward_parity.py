"""Does lending change what is learnt? Paired seeds, lending against static, samples trained on the x axis.

    python benchmarks/reward_parity.py [--seeds 8] [--cycles 10] [--quick] [--json FILE]

Held-out accuracy (128 prompts, sampled at temperature 1: greedy answers saturate within two cycles) is measured after
every weight version, that is after the same number of trained samples in both arms; a run's score is the mean. The
arms are equivalent when the 90 % interval of the mean paired difference (Student's t) lies within +-0.05. A test that
cannot fail proves nothing: runs with shuffled log-probs, and runs whose replicas keep stale weights, go through the
same test and must be rejected.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from pathlib import Path

# Not the script's own folder: its queue.py would hide the standard library's.
SHARED = Path(__file__).resolve().parent / "shared"
sys.path[0] = str(SHARED)

from demo_runs import STATIC, DemoRuns, RunResult

MARGIN = 0.05
#: 95 % quantile of Student's t by degrees of freedom (Abramowitz and Stegun, table 26.10).
T95 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833, 10: 1.812, 11: 1.796}


def options(seed: int, cycles: int) -> list[str]:
    """Both arms of one pair."""
    return [
        "data.max_response_length=128",
        "actor_rollout_ref.rollout.max_num_seqs=24",
        "async_training.concurrent_samples_per_replica=3",
        f"trainer.total_training_steps={cycles}",
        "trainer.test_freq=1",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "trainer.val_at_end=true",
        f"trainer.seed={seed}",
        f"data.seed={seed}",
    ]


def score(result: RunResult) -> float:
    """Mean held-out accuracy over the run (at equal numbers of trained samples in every run)."""
    from hybridsched.runlog.reader import RunLog

    curve = RunLog.open(result.folder).metrics()["val/reward/mean@1"]
    return float(curve.value.mean())


def interval(differences: list[float]) -> tuple[float, float, float]:
    """(mean, lower, upper) of the 90 % interval of the mean."""
    n = len(differences)
    mean = statistics.mean(differences)
    half = T95.get(n - 1, 1.75) * statistics.stdev(differences) / math.sqrt(n)
    return mean, mean - half, mean + half


def equivalent(differences: list[float]) -> bool:
    """True when the whole interval lies within the margin."""
    _mean, low, high = interval(differences)
    return low > -MARGIN and high < MARGIN


def arm(runs: DemoRuns, name: str, seeds: range, cycles: int, *extra: str, sabotage: str = "") -> list[float]:
    """Scores of one arm, by seed."""
    scores = []
    environment = {"HYBRIDSCHED_TEST_BUILD": f"sabotage:{sabotage}", "PYTHONPATH": str(SHARED)} if sabotage else {}
    before = {key: os.environ.get(key) for key in environment}
    os.environ.update(environment)
    try:
        for seed in seeds:
            result = runs.run(*options(seed, cycles), *extra)
            scores.append(score(result))
            reward = result.summary["reward_last"]
            print(f"  {name:<18} seed {seed}: held out {scores[-1]:.4f}, reward at the end {reward:.3f}", flush=True)
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.__setitem__(key, value)
    return scores


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="3 seeds, 6 cycles: shows the machinery, proves little")
    parser.add_argument("--json", metavar="FILE")
    chosen = parser.parse_args()
    seeds = range(3 if chosen.quick else chosen.seeds)
    cycles = 6 if chosen.quick else chosen.cycles
    controls = range(min(4, len(seeds)))
    runs = DemoRuns()
    static = arm(runs, "static", seeds, cycles, STATIC)
    lending = arm(runs, "lending", seeds, cycles)
    shuffled = arm(runs, "shuffled log-probs", controls, cycles, sabotage="shuffled_logprobs")
    stale = arm(runs, "stale weights", controls, cycles, sabotage="stale_weights")
    results = {}
    for name, scores in (("lending", lending), ("shuffled log-probs", shuffled), ("stale weights", stale)):
        differences = [a - b for a, b in zip(scores, static, strict=False)]
        mean, low, high = interval(differences)
        results[name] = {"mean": mean, "low": low, "high": high, "equivalent": equivalent(differences)}
        print(f"{name}: mean difference to static {mean:+.4f}, 90 % interval [{low:+.4f}, {high:+.4f}]")
    checks = {
        f"lending is equivalent to static within +-{MARGIN}": results["lending"]["equivalent"],
        "shuffled log-probs are rejected by the same test": not results["shuffled log-probs"]["equivalent"],
        "stale weights are rejected by the same test": not results["stale weights"]["equivalent"],
    }
    for text, good in checks.items():
        print(("PASS  " if good else "FAIL  ") + text)
    if chosen.json:
        Path(chosen.json).write_text(json.dumps({"results": results, "checks": checks}, indent=1) + "\n")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
