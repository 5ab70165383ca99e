"""The truth test after a sync: do trainer and receiver compute the same log-probabilities?

Owns the verdict only; whoever calls it teacher-forces the probe set on both sides. Pure numpy. A comparison that
compared nothing is a failure, never a pass: no probes, no tokens and non-finite numbers all fail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Verdict of one truth test. ``max_abs_diff`` is in nats, NaN when nothing could be compared."""

    max_abs_diff: float
    n_tokens: int
    n_probes: int
    ok: bool
    reason: str


def compare_logprobs(trainer: Sequence[Any], receiver: Sequence[Any], tolerance: float) -> ProbeResult:
    """Compare teacher-forced log-probs: one float array [T] per probe and side, in the same order.

    ok when every number is finite and the largest absolute difference is at most ``tolerance`` (nats).
    """
    n_probes = len(trainer)
    if n_probes == 0 or len(receiver) == 0:
        return _failed(0, "no probes were compared: the probe set is empty on one side, which proves nothing")
    if len(receiver) != n_probes:
        return _failed(n_probes, f"trainer answered {n_probes} probes, receiver {len(receiver)}")
    if not tolerance >= 0:
        return _failed(n_probes, f"tolerance {tolerance} is not a non-negative number")
    worst, where, n_tokens = -1.0, (0, 0), 0
    for i, (a, b) in enumerate(zip(trainer, receiver, strict=True)):
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if x.ndim != 1 or x.shape != y.shape:
            return _failed(n_probes, f"probe {i}: trainer has shape {x.shape}, receiver {y.shape}; expected equal [T]")
        for side, values in (("trainer", x), ("receiver", y)):
            bad = np.flatnonzero(~np.isfinite(values))
            if bad.size:
                reason = f"probe {i}, token {bad[0]}: {side} log-prob is {values[bad[0]]} ({bad.size} such tokens)"
                return _failed(n_probes, reason)
        if x.size:
            n_tokens += int(x.size)
            diff = np.abs(x - y)
            at = int(diff.argmax())
            if diff[at] > worst:
                worst, where = float(diff[at]), (i, at)
    if n_tokens == 0:
        return _failed(n_probes, "the probes hold no tokens: nothing was compared")
    at_text = f"largest difference {worst:.3g} at probe {where[0]}, token {where[1]}"
    ok = worst <= tolerance
    verdict = "within" if ok else "above"
    return ProbeResult(worst, n_tokens, n_probes, ok, f"{at_text}: {verdict} the tolerance {tolerance:g}")


def _failed(n_probes: int, reason: str) -> ProbeResult:
    return ProbeResult(math.nan, 0, n_probes, False, reason)
