"""Policies x scenarios: wall clock as a ratio to the best static split and to the clairvoyant bound. Emulated, virtual.

    python benchmarks/policy_table.py [--quick] [--jobs N] [--draws N] [--json FILE] [--scenario NAME] [--policy NAME]

For each scenario of benchmarks/scenarios: the best static split of its GPUs (splits that divide into whole replicas,
on a coarse grid first where there are many, hybrids off), then each policy on the scenario's own split, the best
`fixed_ratio` of a grid, and two bounds for that split (`simulation/bound.py`): "bound" for schedules in which no
replica works on more samples than configured, the yardstick of "lookahead closes", and "any", what no schedule at all
can beat. Below 1 in "to static" lending wins over the best split one could have chosen with hindsight; the lines below
the table name the scenarios where it loses. `lookahead` is compared with `default` over several draws of response
lengths, as single runs differ by luck. --quick: four scenarios of six cycles, three ratios, one draw.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # not benchmarks/: its queue.py hides the standard library's

from concurrent.futures import ProcessPoolExecutor

from hybridsched.config.schema import RunConfig
from hybridsched.report.text import columns
from hybridsched.simulation.bound import best_fixed_ratio, lower_bound
from hybridsched.simulation.scenario import Played, load_scenario, play, splits, with_policy, with_split

SCENARIOS = ROOT / "benchmarks" / "scenarios"
QUICK = ("generation_bound", "training_bound", "slow_switch", "end_of_data")
#: How much worse than another a policy may be and still count as equal.
TOLERANCE = 0.01


def best_static(config: RunConfig) -> Played:
    """The fastest split of the same GPUs without lending. What a split loses its replicas to is left out of it."""
    emulated = config.emulated.model_copy(update={"worker_lost_at_s": {}, "replica_speed": {}})
    plain = {True: config, False: config.model_copy(update={"emulated": emulated})}
    own = config.trainer.nnodes * config.trainer.n_gpus_per_node
    every = splits(config)
    runs: dict[int, Played] = {}

    def run_all(indices: Iterable[int]) -> int:
        for i in indices:
            if 0 <= i < len(every) and i not in runs:
                other = with_split(plain[every[i][0] == own], *every[i])
                runs[i] = play(with_policy(other, "static_fully_async"))
        return min(runs, key=lambda i: runs[i].wall_clock_s)

    step = max(1, len(every) // 6)
    best = run_all(range(0, len(every), step))
    while step > 1:  # wall clock has one valley over the splits: look between the best and its neighbours
        step = (step + 1) // 2
        best = run_all((best - step, best + step))
    return runs[best]


def measure(
    path: Path, policies: list[str], ratios: tuple[float, ...], cycles: int | None, draws: int
) -> dict[str, Any]:
    """All runs of one scenario."""
    config = load_scenario(path, cycles=cycles).config
    static = best_static(config)
    runs = {name: play(with_policy(config, name)) for name in policies}
    ratio, fixed = best_fixed_ratio(config, ratios)
    runs[f"fixed_ratio*{ratio:g}"] = fixed
    trained = min(run.trained for run in runs.values())
    bound, any_bound = lower_bound(config, trained, crowding=False), lower_bound(config, trained)
    times = {name: run.wall_clock_s for name, run in runs.items()}
    gap = times["default"] - bound.seconds if "default" in times else 0.0
    return {
        "scenario": path.stem,
        "static_split": f"{static.trainer_gpus}+{static.rollout_gpus}",
        "static_s": static.wall_clock_s,
        "bound_s": bound.seconds,
        "any_bound_s": any_bound.seconds,
        "bound": bound.reason,
        "seconds": times,
        "to_static": {name: time / static.wall_clock_s for name, time in times.items()},
        "to_bound": {name: time / bound.seconds for name, time in times.items()},
        "utilization": {name: run.utilization for name, run in runs.items()},
        "gap_closed": {name: (times["default"] - time) / gap for name, time in times.items()} if gap > 0 else {},
        "draws": [
            compare(path, seed, cycles) for seed in range(1, draws + 1) if {"default", "lookahead"} <= set(policies)
        ],
    }


def compare(path: Path, seed: int, cycles: int | None) -> dict[str, float]:
    """`lookahead` against `default` with other response lengths: ratio of times, and share of the gap closed."""
    config = load_scenario(path, [f"trainer.seed={seed}"], cycles=cycles).config
    default, lookahead = (play(with_policy(config, name)) for name in ("default", "lookahead"))
    bound = lower_bound(config, min(default.trained, lookahead.trained), crowding=False).seconds
    gap, gain = default.wall_clock_s - bound, default.wall_clock_s - lookahead.wall_clock_s
    return {"ratio": lookahead.wall_clock_s / default.wall_clock_s, "closed": gain / gap if gap > 0 else 0.0}


def table(rows: list[dict[str, Any]], policies: list[str]) -> str:
    """One line a scenario: per policy ratio to static / ratio to bound."""
    head = ["scenario", "best static", *policies, "fixed_ratio*", "bound (any)", "lookahead closes"]
    lines = [head]
    for row in rows:
        names = [*policies, next(name for name in row["seconds"] if name.startswith("fixed_ratio*"))]
        cells = [f"{row['to_static'][name]:.3f} / {row['to_bound'][name]:.3f}" for name in names]
        cells[-1] += f" ({names[-1].removeprefix('fixed_ratio*')})"
        closed = row["gap_closed"].get("lookahead")
        static = f"{row['static_split']} {row['static_s']:.0f} s"
        bounds = f"{row['bound_s']:.0f} ({row['any_bound_s']:.0f}) s"
        every = [closed, *(draw["closed"] for draw in row["draws"])]
        shown = "-" if closed is None else f"{statistics.fmean(every):+.0%} ({min(every):+.0%} to {max(every):+.0%})"
        lines.append([row["scenario"], static, *cells, bounds, shown])
    return columns(lines)


def losses(rows: list[dict[str, Any]], policies: list[str]) -> list[str]:
    """Where lending is slower than the best static split, and where a policy is worse than `default`."""
    found = []
    for row in rows:
        for name in policies:
            ratio = row["to_static"][name]
            if name != "static_fully_async" and ratio > 1 + TOLERANCE:
                found.append(
                    f"{row['scenario']}: {name} takes {ratio - 1:.1%} longer than static {row['static_split']}"
                )
        times = row["seconds"]
        if "lookahead" in times and "default" in times:
            worse = times["lookahead"] / times["default"] - 1
            if worse > TOLERANCE:
                found.append(f"{row['scenario']}: lookahead takes {worse:.1%} longer than default")
    return found


def verdict(rows: list[dict[str, Any]]) -> str:
    """`lookahead` against `default` over all draws of all scenarios."""
    ratios = [row["seconds"]["lookahead"] / row["seconds"]["default"] for row in rows]
    closed = [row["gap_closed"]["lookahead"] for row in rows]
    means = []
    for row, ratio in zip(rows, ratios, strict=True):
        means.append(statistics.fmean([ratio, *(draw["ratio"] for draw in row["draws"])]))
    for row in rows:
        ratios += [draw["ratio"] for draw in row["draws"]]
        closed += [draw["closed"] for draw in row["draws"]]
    half, worse = sum(share >= 0.5 for share in closed), sum(ratio > 1 + TOLERANCE for ratio in ratios)
    return (
        f"lookahead takes {statistics.fmean(ratios):.3f} of default's time, mean over {len(ratios)} runs (worst "
        f"scenario on average {max(means):.3f}, worst single run {max(ratios):.3f}; {worse} runs over 1 % slower)\n"
        f"it closes {statistics.fmean(closed):.0%} of the gap from default to the bound on average, half or more in "
        f"{half} of {len(closed)} runs (target: in 80 %)"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four short scenarios")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--jobs", type=int, default=1, help="scenarios at a time, one process each")
    parser.add_argument("--draws", type=int, default=3, help="more draws of lengths for lookahead against default")
    parser.add_argument("--scenario", action="append", help="only these (file names without .yaml)")
    parser.add_argument("--policy", action="append", help="only these; default: all three of ours")
    options = parser.parse_args()
    wanted = options.scenario or (QUICK if options.quick else None)
    paths = [path for path in sorted(SCENARIOS.glob("*.yaml")) if wanted is None or path.stem in wanted]
    policies = options.policy or ["static_fully_async", "default", "lookahead"]
    ratios = (0.2, 0.5, 0.8) if options.quick else (0.2, 0.4, 0.6, 0.8, 1.0)
    draws = 0 if options.quick else options.draws
    cycles = [6 if options.quick and path.stem != "end_of_data" else None for path in paths]
    began = time.monotonic()
    with ProcessPoolExecutor(options.jobs) as pool:
        work = [pool.submit(measure, path, policies, ratios, n, draws) for path, n in zip(paths, cycles, strict=True)]
        rows = []
        for one in work:
            rows.append(one.result())
            done = f"{rows[-1]['scenario']}: {rows[-1]['bound']}, {time.monotonic() - began:.0f} s"
            print(done, file=sys.stderr, flush=True)
    print("emulated runs in virtual time; each cell: ratio to the best static split / ratio to the bound")
    print(table(rows, policies))
    for line in losses(rows, policies) or ["lending loses nowhere"]:
        print(line)
    if all("lookahead" in row["gap_closed"] for row in rows):
        print(verdict(rows))
    if options.json is not None:
        options.json.write_text(json.dumps({"emulated": True, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
