"""The published experiment under virtual time: two static splits fitted, the dynamic run predicted, and what bounds it.

    python benchmarks/published_experiment.py [--quick] [--draws N] [--json FILE] [--figure FILE] [--cache FILE]

32 GPUs: static 16+16, static 8+24, dynamic 16+16 (`default`, ratio 0.6). Every run is our real controller, rollouter,
policies and workers with *emulated* engines and trainers. What is assumed, with ranges and reasons, is
benchmarks/published/assumptions.yaml, committed before the first comparison with the dynamic time. Two speeds are
fitted on the two static times; with `compat: peer` the dynamic time is predicted by draws over the ranges, each fitted
anew. Runs are shorter than the real one: hours are steady-state seconds per cycle x the assumed number of cycles.

The first two comparisons had 16 draws: centre 5.580 h, the measured time 3.2 % below it, the centre itself uncertain by
3 % from so few draws. 64 draws were taken after that was known, over the same assumptions, to make it certain to 1 %.

--cache keeps finished draws, so that with --time-limit the work can be done in pieces.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not benchmarks/: its queue.py hides the standard library's

from hybridsched.runtime.policy_loader import list_policies
from hybridsched.simulation import experiment as x
from hybridsched.simulation.uncertainty import Assumption, latin_hypercube, main_effects, quantile, read_assumptions

ASSUMPTIONS = Path(__file__).parent / "published" / "assumptions.yaml"
DRAW_SEED = 20260710
#: (cycles, warm-up cycles) of the static and of the dynamic runs of a draw, and of all runs at the values.
DRAW_STATIC, DRAW_DYNAMIC, CENTRE = (12, 4), (20, 6), (30, 6)
QUICK = (9, 3)
#: With fewer draws an interval is no verdict.
ENOUGH_DRAWS = 16


def setting_of(content: Mapping[str, Any], values: Mapping[str, float], seed: int = 1) -> x.Setting:
    """A setting from the file's fixed part and values of the assumptions."""
    fixed: dict[str, Any] = {key: value for key, value in content["setting"].items() if key != "gpus_per_block"}
    starts: dict[str, Any] = {key: entry["value"] for key, entry in content["calibrated"].items()}
    return x.Setting(**{**fixed, **starts, **values}, seed=seed)


def predict(content: Mapping[str, Any], values: Mapping[str, float], seed: int, *, quick: bool) -> dict[str, float]:
    """Fit the two statics under these values, then run the dynamic arm."""
    measured = content["measured"]
    cycles, warmup = QUICK if quick else DRAW_STATIC
    setting = setting_of(content, values, seed)
    fit = x.calibrate(
        setting, measured["static_16_16_h"], measured["static_8_24_h"], cycles=cycles, warmup=warmup, rounds=6
    )
    cycles, warmup = QUICK if quick else DRAW_DYNAMIC
    dynamic = x.simulate(fit.setting, x.DYNAMIC_PEER, cycles=cycles, warmup=warmup)
    return {
        "dynamic_peer_h": dynamic.hours(setting.cycles),
        "error_16_16": fit.error_16_16,
        "error_8_24": fit.error_8_24,
        "generation_tokens_per_s": fit.setting.generation_tokens_per_s,
        "training_tokens_per_s": fit.setting.training_tokens_per_s,
    }


def draw_all(
    content: Mapping[str, Any], draws: Sequence[Mapping[str, float]], cache: Path | None, limit_s: float, *, quick: bool
) -> list[dict[str, float] | None]:
    """The prediction of every draw; None where time was up."""
    key = hashlib.sha256(json.dumps([content, draws, quick], sort_keys=True).encode()).hexdigest()[:16]
    kept: dict[str, Any] = json.loads(cache.read_text(encoding="utf-8")) if cache and cache.is_file() else {}
    done = kept.setdefault(key, {})
    began = time.monotonic()
    for i, values in enumerate(draws):
        if str(i) in done or time.monotonic() - began > limit_s:
            continue
        done[str(i)] = predict(content, values, i + 1, quick=quick)
        print(f"  draw {i + 1} of {len(draws)}: dynamic {done[str(i)]['dynamic_peer_h']:.3f} h", flush=True)
        if cache:
            cache.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return [done.get(str(i)) for i in range(len(draws))]


def at_the_values(
    content: Mapping[str, Any], assumptions: Sequence[Assumption], *, quick: bool
) -> tuple[x.Fit, dict[str, x.Outcome]]:
    """All arms with every assumption at its value."""
    measured = content["measured"]
    cycles, warmup = QUICK if quick else CENTRE
    fit = x.calibrate(
        setting_of(content, {a.name: a.value for a in assumptions}),
        measured["static_16_16_h"],
        measured["static_8_24_h"],
        cycles=cycles,
        warmup=warmup,
        rounds=6,
    )
    arms = [x.DYNAMIC_PEER, x.DYNAMIC_DEFAULT, x.STATIC_12_20]
    if "lookahead" in list_policies():
        arms.append(replace(x.DYNAMIC_DEFAULT, name="dynamic 16+16, our lookahead", policy="lookahead"))
    outcomes = {x.STATIC_16_16.name: fit.static_16_16, x.STATIC_8_24.name: fit.static_8_24}
    for arm in arms:
        outcomes[arm.name] = x.simulate(fit.setting, arm, cycles=cycles, warmup=warmup)
    return fit, outcomes


def median_error(values: Sequence[float], samples: int = 2000) -> float:
    """Standard error of the centre from the finite number of draws (bootstrap)."""
    source = random.Random(DRAW_SEED)
    medians = [quantile(source.choices(values, k=len(values)), 0.5) for _ in range(samples)]
    return statistics.pstdev(medians)


def report(
    content: Mapping[str, Any],
    assumptions: Sequence[Assumption],
    fit: x.Fit,
    outcomes: Mapping[str, x.Outcome],
    draws: Sequence[Mapping[str, float]],
    predicted: Sequence[Mapping[str, float]],
) -> dict[str, Any]:
    """Everything as numbers."""
    cycles = fit.setting.cycles
    hours = {name: outcome.hours(cycles) for name, outcome in outcomes.items()}
    results = [p["dynamic_peer_h"] for p in predicted]
    centre, low, high = (quantile(results, share) for share in (0.5, 0.1, 0.9))
    measured = content["measured"]["dynamic_h"]
    out: dict[str, Any] = {
        "emulated": True,
        "static_16_16_h": hours[x.STATIC_16_16.name],
        "static_8_24_h": hours[x.STATIC_8_24.name],
        "dynamic_peer_h": centre,
        "dynamic_peer_interval_h": [low, high],
        "dynamic_peer_error_h": median_error(results),
        "dynamic_peer_range_h": [min(results), max(results)],
        "dynamic_peer_at_values_h": hours[x.DYNAMIC_PEER.name],
        "dynamic_measured_h": measured,
        "dynamic_default_h": hours[x.DYNAMIC_DEFAULT.name],
        "static_12_20_h": hours[x.STATIC_12_20.name],
        "conserved_h": x.conserved_s(fit) * cycles / 3600,
        "bound_h": x.bound_s(fit.setting, fit.static_16_16.tokens_per_cycle) * cycles / 3600,
        "generation_tokens_per_s": fit.setting.generation_tokens_per_s,
        "training_tokens_per_s": fit.setting.training_tokens_per_s,
        "fit_errors": [fit.error_16_16, fit.error_8_24],
        "worst_fit_error_of_draws": max(max(abs(p["error_16_16"]), abs(p["error_8_24"])) for p in predicted),
        "draws": len(results),
        "fits": [{"values": dict(draws[i]), "seed": i + 1, **one} for i, one in enumerate(predicted)],
        "effects_h": main_effects(assumptions, [draws[i] for i in range(len(predicted))], results),
        "picture": x.picture(fit.setting, outcomes),
    }
    for name, value in hours.items():
        if "lookahead" in name:
            out["dynamic_lookahead_h"] = value
    out["checks"] = dict(out["picture"])
    if len(results) >= ENOUGH_DRAWS:
        off = measured / centre - 1
        out["checks"]["measured time inside the 80 % interval"] = low <= measured <= high
        out["checks"][f"measured time within 3 % of the centre ({off:+.1%})"] = abs(off) <= 0.03
    return out


def show(
    result: Mapping[str, Any],
    assumptions: Sequence[Assumption],
    outcomes: Mapping[str, x.Outcome],
    content: Mapping[str, Any],
) -> None:
    """The tables."""
    measured = content["measured"]
    known = {
        x.STATIC_16_16.name: f"{measured['static_16_16_h']:.3f} (fitted)",
        x.STATIC_8_24.name: f"{measured['static_8_24_h']:.3f} (fitted)",
        x.DYNAMIC_PEER.name: f"{measured['dynamic_h']:.3f}",
    }
    cycles = {a.name: a.value for a in assumptions}["cycles"]
    head = f"{'':42} {'hours':>7} {'measured h':>15} {'s/cycle':>8} {'queue':>6} {'cluster':>8} {'rollout':>8}   train"
    print("\nAll assumptions at their values (emulated engines):\n" + head)
    for name, outcome in outcomes.items():
        means = [x.steady_mean(outcome, curve) for curve in list(x.CURVES)[1:5]]
        print(
            f"{name:42} {outcome.hours(cycles):7.3f} {known.get(name, '-'):>15} {outcome.seconds_per_cycle:8.1f} "
            f"{means[0]:6.1f} {means[1]:8.1%} {means[2]:8.1%} {means[3]:7.1%}"
        )
    print(f"{'work of 16+16 spread over 32 GPUs, no loss':42} {result['conserved_h']:7.3f}")
    print(f"{'bound: no schedule of 16+16 is faster':42} {result['bound_h']:7.3f}")
    low, high = result["dynamic_peer_interval_h"]
    print(
        f"\nPrediction for the dynamic run, compat: peer, {result['draws']} draws over the ranges, each fitted to the "
        f"two static times (worst error {result['worst_fit_error_of_draws']:.1%}):\n"
        f"  80 % interval {low:.3f} to {high:.3f} h, centre {result['dynamic_peer_h']:.3f} h (standard error "
        f"{result['dynamic_peer_error_h']:.3f} h from the number of draws), all draws "
        f"{result['dynamic_peer_range_h'][0]:.3f} to {result['dynamic_peer_range_h'][1]:.3f} h; "
        f"measured {result['dynamic_measured_h']:.3f} h\n"
        "  The measured runs used another engine (SGLang) with speculative decoding (multi-token prediction)."
    )
    if result["effects_h"]:
        print("\nWhat each assumption moves, from the low to the high end of its range (least squares over the draws):")
        for a in sorted(assumptions, key=lambda a: -abs(result["effects_h"][a.name][0])):
            effect, error = result["effects_h"][a.name]
            print(f"  {a.name:24} {a.low:>9g} .. {a.high:<9g} {effect:+.3f} h, standard error {error:.3f}")
    print()
    for text, good in result["checks"].items():
        print(("PASS  " if good else "FAIL  ") + text)


def draw_figure(outcomes: Mapping[str, x.Outcome], path: Path) -> None:
    """The five curves of the method for the three measured arms."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    arms = {x.STATIC_16_16.name: "#d1495b", x.STATIC_8_24.name: "#2e86ab", x.DYNAMIC_PEER.name: "#3a7d44"}
    names = list(x.CURVES)[:5]
    figure, axes = plt.subplots(len(names), 1, figsize=(9, 13), sharex=True, constrained_layout=True)
    for axis, name in zip(axes, names, strict=True):
        for arm, colour in arms.items():
            curve = outcomes[arm].curves[name]
            axis.plot(range(1, len(curve) + 1), curve, color=colour, label=arm, linewidth=1.6)
        axis.set_ylabel(name)
        axis.grid(alpha=0.25)
        if "utilization" in name:
            axis.set_ylim(0, 1.03)
        else:
            axis.set_ylim(bottom=0)
    axes[0].legend(loc="upper right", ncols=3, frameon=False, fontsize=9)
    axes[0].set_title("Published experiment, simulated (emulated engines, real scheduler)")
    axes[-1].set_xlabel("sync cycle")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    """Fit, predict, print, judge. 0 when every check holds, 1 when not, 3 when draws are left for another call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 draws, short runs: a look, no verdict")
    parser.add_argument("--draws", type=int, default=64, help="16 leave the centre uncertain by 3 %%")
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--figure", metavar="FILE", type=Path)
    parser.add_argument("--cache", metavar="FILE", type=Path)
    parser.add_argument("--time-limit", metavar="S", type=float, default=float("inf"), help="begin no draw after this")
    options = parser.parse_args()
    content, assumptions = read_assumptions(ASSUMPTIONS)
    draws = latin_hypercube(assumptions, 3 if options.quick else options.draws, DRAW_SEED)
    predicted = draw_all(content, draws, options.cache, options.time_limit, quick=options.quick)
    finished = [p for p in predicted if p is not None]
    if len(finished) < len(predicted):
        print(f"{len(finished)} of {len(predicted)} draws are done; call again with the same --cache")
        return 3
    fit, outcomes = at_the_values(content, assumptions, quick=options.quick)
    result = report(content, assumptions, fit, outcomes, draws, finished)
    show(result, assumptions, outcomes, content)
    if options.figure:
        draw_figure(outcomes, options.figure)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if all(result["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
