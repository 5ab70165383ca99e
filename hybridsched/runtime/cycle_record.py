"""What one sync cycle measured, and the metrics that follow from it (names and definitions: DESIGN.md section 13).

Pure bookkeeping: the controller fills a CycleRecord while it works and calls `metrics` once at the end, so that every
number belongs to the cycle that produced it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hybridsched.model import WeightVersion
from hybridsched.runtime.synchronizer import SyncStats
from hybridsched.runtime.workers.meter import NOTHING, Sums, added
from hybridsched.scheduling import utilization as u


@dataclass(slots=True)
class CollectionRecord:
    """One collection."""

    wait_s: float = 0.0  #: until enough samples were completed
    seal_wait_s: float = 0.0  #: from then until enough were durable
    load_s: float = 0.0
    allocated_s: float = 0.0
    wait_samples: int = 0
    tokens: int = 0
    samples: int = 0
    timing_s: dict[str, float] = field(default_factory=dict)
    train: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class CycleRecord:
    """One cycle, from one sync to the next."""

    version: WeightVersion
    began: float
    ended: float = 0.0
    collections: list[CollectionRecord] = field(default_factory=list)
    wait_for_enough_s: float = 0.0
    deactivate_s: float = 0.0
    activate_s: float = 0.0
    sync: SyncStats = field(default_factory=SyncStats)
    save_s: float = 0.0
    validate_s: float = 0.0
    activated: bool = False
    lent: int = 0
    lent_share: float = 0.0
    mq_size: int = 0
    ages: list[int] = field(default_factory=list)
    generation_s: list[float] = field(default_factory=list)
    spans: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    u_rollout: float = 0.0
    rollout_active_s: float = 0.0
    gpu_seconds: u.GpuSeconds = field(default_factory=u.GpuSeconds)
    generated: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    lag_s: float = 0.0  #: largest event-loop lag
    decode: dict[tuple[str, int], Sums] = field(default_factory=dict)  #: (kind of replica, size of the batch)

    def note_decode(self, kind: str, sums: Mapping[int, Sums]) -> None:
        """Take in what a replica measured (runtime/workers/meter.py)."""
        for size, more in sums.items():
            self.decode[kind, size] = added(self.decode.get((kind, size), NOTHING), more)


@dataclass(frozen=True, slots=True)
class Static:
    """Sizes that do not change in a run."""

    a: int
    b: int
    required_samples: int
    max_required_samples: int
    staleness_threshold: float
    max_concurrent_samples: int


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a run ended."""

    version: WeightVersion
    cycles: int
    trained: int
    activations: int
    deactivations: int
    skipped_syncs: int
    wall_clock_s: float
    reason: str


def metrics(cycle: CycleRecord, static: Static, gauges: Mapping[str, float]) -> dict[str, float]:
    """All metrics of a cycle. ``gauges``: snapshots the controller adds as they are."""
    span = max(cycle.ended - cycle.began, 0.0)
    compute = [u.train_compute_time_s(c.timing_s) for c in cycle.collections]
    allocated = [c.allocated_s for c in cycle.collections]
    if allocated:
        allocated[-1] += cycle.sync.seconds + cycle.activate_s  # the specification does not subtract them
    u_train = u.train_resource_utilization(compute, allocated)
    x = u.hybrid_rollout_share(cycle.wait_for_enough_s, span) * cycle.lent_share
    out: dict[str, float] = {
        "dynamic_resource/train_compute_time_s": sum(compute),
        "dynamic_resource/train_allocated_time_s": sum(allocated),
        "dynamic_resource/train_resource_utilization": u_train,
        "dynamic_resource/rollout_resource_utilization": cycle.u_rollout,
        "dynamic_resource/resource_utilization": u.resource_utilization(
            static.a, static.b, u_train, cycle.u_rollout, x
        ),
        "dynamic_resource/resource_utilization_exact": u.resource_utilization_exact(
            sum(compute), cycle.gpu_seconds, cycle.u_rollout, static.a, static.b, span
        ),
        "dynamic_resource/hybrid_rollout_gpu_s": cycle.gpu_seconds.rollout,
        "dynamic_resource/hybrid_train_gpu_s": cycle.gpu_seconds.train,
        "dynamic_resource/handover_gpu_s": cycle.gpu_seconds.handover,
        "dynamic_resource/mq_size": float(cycle.mq_size),
        "dynamic_resource/activated": float(cycle.activated),
        "dynamic_resource/lent_replicas": float(cycle.lent),
        "timing_s/step": span,
        "timing_s/gen": sum(c.wait_s for c in cycle.collections),
        "timing_s/seal_wait": sum(c.seal_wait_s for c in cycle.collections),
        "timing_s/load": sum(c.load_s for c in cycle.collections),
        "timing_s/wait_for_enough_samples": cycle.wait_for_enough_s,
        "timing_s/param_sync": cycle.sync.seconds,
        "timing_s/activate": cycle.activate_s,
        "timing_s/deactivate": cycle.deactivate_s,
        "timing_s/save_checkpoint": cycle.save_s,
        "timing_s/validate": cycle.validate_s,
        "fully_async/total_wait_time": sum(c.wait_s for c in cycle.collections),
        "fully_async/trainer/idle_ratio": u.trainer_idle_ratio(sum(c.wait_s for c in cycle.collections), span),
        "fully_async/rollouter/active_time": cycle.rollout_active_s,
        "fully_async/rollouter/version_time": span,
        "fully_async/rollouter/idle_ratio": u.rollouter_idle_ratio(cycle.rollout_active_s, span),
        "fully_async/rollouter/step_generated_samples": float(cycle.generated),
        "fully_async/static/required_samples": float(static.required_samples),
        "fully_async/static/max_required_samples": float(static.max_required_samples),
        "fully_async/static/staleness_threshold": static.staleness_threshold,
        "fully_async/static/max_queue_size": float(static.max_required_samples),
        "fully_async/static/max_concurrent_samples": float(static.max_concurrent_samples),
        "training/global_step": float(cycle.version.number),
        "training/collections": float(len(cycle.collections)),
        "perf/total_num_tokens": float(sum(c.tokens for c in cycle.collections)),
        "perf/time_per_step": span,
        "perf/throughput": sum(c.tokens for c in cycle.collections) / span / (static.a + static.b) if span > 0 else 0.0,
        "weight_sync/pause_s": cycle.sync.pause_s,
        "weight_sync/transfer_s": cycle.sync.transfer_s,
        "weight_sync/resume_s": cycle.sync.resume_s,
        "weight_sync/bytes": float(cycle.sync.n_bytes),
        "weight_sync/receivers": float(cycle.sync.receivers),
        "weight_sync/attempts": float(cycle.sync.attempts),
        "weight_sync/probe_max_diff": cycle.sync.probe_max_diff,
        "runtime/event_loop_lag_s": cycle.lag_s,
    }
    out |= {f"weight_sync/phase/{name}": seconds for name, seconds in cycle.sync.phases.items()}
    out |= _spread("fully_async/processing_time", cycle.generation_s)
    out |= _ages(cycle)
    out |= {f"samples/{name}": float(count) for name, count in cycle.verdicts.items()}
    done = sum(cycle.verdicts.values())
    out["samples/filtered_share"] = cycle.verdicts.get("filtered", 0) / done if done else 0.0
    out |= _trainer(cycle.collections)
    if cycle.rewards:
        out["rollout/reward/mean"] = sum(cycle.rewards) / len(cycle.rewards)
    if cycle.lengths:
        out["rollout/response_length/mean"] = sum(cycle.lengths) / len(cycle.lengths)
        out["rollout/response_length/max"] = float(max(cycle.lengths))
        out |= _quantiles("rollout/response_length", cycle.lengths)
    for (kind, size), sums in sorted(cycle.decode.items()):
        names = ("seconds", "steps", "tokens", "prefill_tokens")
        out |= {f"decode/{kind}/batch_{size:04d}/{name}": value for name, value in zip(names, sums, strict=True)}
    return out | dict(gauges)


def _ages(cycle: CycleRecord) -> dict[str, float]:
    partial = sum(span > 1 for span in cycle.spans)
    out = {
        "fully_async/partial/total_partial_num": float(partial),
        "fully_async/partial/partial_ratio": partial / len(cycle.spans) if cycle.spans else 0.0,
        "fully_async/partial/max_partial_span": float(max(cycle.spans, default=1) - 1),
    }
    if cycle.ages:
        out["staleness/age_mean"] = sum(cycle.ages) / len(cycle.ages)
        out["staleness/age_max"] = float(max(cycle.ages))
        for age, count in sorted(Counter(cycle.ages).items()):
            if age <= 8:
                out[f"staleness/age_{age}_share"] = count / len(cycle.ages)
    return out


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """avg, min, max and percentiles of seconds per sample; nothing without a sample."""
    if not values:
        return {}
    ordered = sorted(values)

    def at(q: float) -> float:
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))]

    return {
        f"{name}/avg": sum(ordered) / len(ordered),
        f"{name}/min": ordered[0],
        f"{name}/max": ordered[-1],
        f"{name}/tp50": at(0.5),
        f"{name}/tp95": at(0.95),
        f"{name}/tp99": at(0.99),
    }


def _quantiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """Percentiles a distribution can be fitted to."""
    ordered = sorted(values)
    return {f"{name}/tp{q:02d}": float(ordered[q * len(ordered) // 100]) for q in (10, 25, 50, 75, 90, 95)}


def _trainer(collections: Sequence[CollectionRecord]) -> dict[str, float]:
    """Timings are summed over the cycle's collections, learning metrics averaged by samples (max for */max)."""
    out: dict[str, float] = {}
    for c in collections:
        for key, seconds in c.timing_s.items():
            name = f"timing_s/{key}"
            out[name] = out.get(name, 0.0) + seconds
    weight = sum(c.samples for c in collections)
    for key in {k: None for c in collections for k in c.train}:
        values = [(c.train[key], c.samples) for c in collections if key in c.train]
        if key.endswith("/max"):
            out[key] = max(v for v, _ in values)
        elif key.endswith("/min"):
            out[key] = min(v for v, _ in values)
        elif key in ("optimizer_steps", "actor/lr"):
            out[key] = values[-1][0]
        elif weight:
            out[key] = sum(v * n for v, n in values) / max(1, sum(n for _, n in values))
    return out
