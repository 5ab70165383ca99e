"""How well the GPUs are used: the formulas of the ``dynamic_resource/*`` metrics, and exact ones beside them.

Owns: the ratios of section 4 of the specification as pure functions (the section is named in each docstring), and
integrators that are fed as things happen and keep O(1) memory.

Invariants: every ratio is in [0, 1]; without a time span (or without capacity) it is 0.0, never an exception or NaN;
each interval counts with its own capacity. Symbols: a = trainer GPUs, b = rollout GPUs.

Not here: clocks (times are handed in, in seconds on one monotonic scale) and names of other metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hybridsched.errors import InternalError
from hybridsched.model import Tenant

#: Timings that are work of the training GPUs (4.1). A missing one (no critic, no reference model) counts 0.
COMPUTE_KEYS = ("reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")


def clip01(value: float) -> float:
    """``value`` limited to [0, 1]; NaN becomes 0.0."""
    return min(1.0, max(0.0, value)) if value == value else 0.0


def share(part: float, whole: float) -> float:
    """part / whole in [0, 1]; 0.0 when there is no whole."""
    return clip01(part / whole) if whole > 0 else 0.0


def train_compute_time_s(timing_s: Mapping[str, float]) -> float:
    """4.1, compute_i: seconds of training compute of one collection. Names may carry the prefix ``timing_s/``."""
    return sum(timing_s.get(key, timing_s.get(f"timing_s/{key}", 0.0)) for key in COMPUTE_KEYS)


def train_resource_utilization(compute_s: Iterable[float], allocated_s: Iterable[float]) -> float:
    """4.1: sum of compute_i over sum of alloc_i of the collections of one cycle (a ratio of sums, no mean of ratios).

    alloc_i goes from the begin of waiting for samples to the end of the collection, weight sync and activation
    included. The waiting time while hybrids are lent is not in it: those GPUs are not the trainer's then.
    """
    return share(sum(compute_s), sum(allocated_s))


def rollout_capacity(ready_replicas: int, concurrent_samples_per_replica: int, max_required_samples: int) -> int:
    """4.2, cap_k = min(READY replicas x s, max_required)."""
    return min(ready_replicas * concurrent_samples_per_replica, max_required_samples)


class CapacityIntegral:
    """4.2: rollout_resource_utilization, incrementally: integral of min(cap, active) over integral of cap.

    Call ``observe`` whenever the number of active samples or the capacity changes (a finished sample leaves ``active``
    at completion), ``roll`` at each sync. A seed point before the capacity is known has capacity None: its interval is
    weighted with the first capacity that becomes known, instead of dropping out as 0.
    """

    def __init__(self, t: float, active: int = 0, capacity: int | None = None) -> None:
        self._t = t
        self._active = active
        self._capacity = capacity
        self._used = 0.0
        self._offered = 0.0
        self._active_s = 0.0
        self._unknown_s = 0.0
        self._unknown_active = 0.0

    def observe(self, t: float, active: int, capacity: int | None) -> None:
        """From ``t`` on, ``active`` samples run and ``capacity`` could. Raises InternalError when time runs back."""
        self._advance(t)
        if capacity is not None and self._capacity is None:
            # Corrected seed: as if this capacity had been there from the beginning.
            self._used += min(capacity * self._unknown_s, self._unknown_active)
            self._offered += capacity * self._unknown_s
            self._unknown_s = self._unknown_active = 0.0
        self._active, self._capacity = active, capacity

    def utilization(self, t: float) -> float:
        """The ratio of the window up to ``t``. Raises InternalError when time runs back."""
        self._advance(t)
        return share(self._used, self._offered)

    def active_time_s(self, t: float) -> float:
        """Seconds of the window up to ``t`` in which at least one sample was running."""
        self._advance(t)
        return self._active_s

    def roll(self, t: float) -> float:
        """Close the window at ``t`` and open the next one with the same counts; the ratio of the closed one."""
        ratio = self.utilization(t)
        self._used = self._offered = self._active_s = self._unknown_s = self._unknown_active = 0.0
        return ratio

    def _advance(self, t: float) -> None:
        dt = t - self._t
        if dt < 0:
            raise InternalError(f"utilization: time runs back from {self._t} to {t}")
        self._t = t
        if self._active > 0:
            self._active_s += dt
        if self._capacity is None:
            self._unknown_s += dt
            self._unknown_active += dt * self._active
        else:
            self._used += dt * min(self._capacity, self._active)
            self._offered += dt * self._capacity


def rollout_resource_utilization(points: Iterable[tuple[float, int, int | None]], t_end: float) -> float:
    """4.2 over a list of (t, active, capacity), each holding until the next one. No point: 0.0."""
    integral: CapacityIntegral | None = None
    for t, active, capacity in points:
        if integral is None:
            integral = CapacityIntegral(t, active, capacity)
        else:
            integral.observe(t, active, capacity)
    return 0.0 if integral is None else integral.utilization(t_end)


def hybrid_rollout_share(wait_s: float, step_s: float, lent: int = 1, hybrids: int = 1) -> float:
    """4.3, x = clip(wait / step, 0, 1), times the share of the hybrids that was lent (k of H; the peer lends all).

    wait_s: summed timing_s/wait_for_enough_samples, step_s: summed timing_s/step of the cycle.
    """
    return share(wait_s, step_s) * share(lent, hybrids)


def resource_utilization(a: int, b: int, u_train: float, u_rollout: float, x: float) -> float:
    """4.3: ((1 - x) a U_train + (x a + b) U_rollout) / (a + b)."""
    x = clip01(x)
    return share((1 - x) * a * u_train + (x * a + b) * u_rollout, a + b)


def trainer_idle_ratio(waiting_s: float, step_s: float) -> float:
    """fully_async/trainer/idle_ratio: the share of a step in which training waited for samples."""
    return share(waiting_s, step_s)


def rollouter_idle_ratio(active_s: float, version_s: float) -> float:
    """fully_async/rollouter/idle_ratio: 1 - active / version, 0.0 without a span.

    active_s: time with at least one running sample (``CapacityIntegral.active_time_s``), wherever in the window.
    """
    return 1.0 - share(active_s, version_s) if version_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class GpuSeconds:
    """Where the trainer GPUs' time went, in GPU-seconds."""

    train: float = 0.0
    handover: float = 0.0
    rollout: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.train + self.handover + self.rollout


@dataclass(slots=True)
class TenancyIntegral:
    """Exact counterpart of x: GPU-seconds by tenant, fed with tenancy events. O(GPUs) memory."""

    t: float  #: start of the window
    _since: dict[str, tuple[float, Tenant]] = field(default_factory=dict)
    _sums: dict[Tenant, float] = field(default_factory=lambda: dict.fromkeys(Tenant, 0.0))

    def switch(self, t: float, gpu: str, tenant: Tenant) -> None:
        """From ``t`` on, ``gpu`` belongs to ``tenant``. The first one of a GPU counts from ``t`` on only."""
        if gpu in self._since:
            self._settle(t, gpu)
        self._since[gpu] = (t, tenant)

    def roll(self, t: float) -> GpuSeconds:
        """Close the window at ``t``; tenancies go on in the next one."""
        for gpu in self._since:
            self._settle(t, gpu)
        sums = self._sums
        self._sums, self.t = dict.fromkeys(Tenant, 0.0), t
        return GpuSeconds(sums[Tenant.TRAINER], sums[Tenant.HANDOVER], sums[Tenant.HYBRID])

    def _settle(self, t: float, gpu: str) -> None:
        since, tenant = self._since[gpu]
        if t < since:
            raise InternalError(f"utilization: tenancy of GPU {gpu} runs back from {since} to {t}")
        self._sums[tenant] += t - since
        self._since[gpu] = (t, tenant)


def resource_utilization_exact(
    compute_s: float, gpu_seconds: GpuSeconds, u_rollout: float, a: int, b: int, span_s: float
) -> float:
    """Work done over GPU time there was, from tenancy events instead of x.

    (compute_s x a + U_rollout x (hybrid rollout GPU-seconds + b x span)) / ((a + b) x span). compute_s is the training
    compute of the cycle (all a GPUs compute together), span_s the cycle's wall clock. Hand-overs, syncs and waiting
    are nobody's work, so they lower it.
    """
    busy = compute_s * a + clip01(u_rollout) * (gpu_seconds.rollout + b * span_s)
    return share(busy, (a + b) * span_s)
