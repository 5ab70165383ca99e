"""Numbers of the timing model from measured cycles: decode, training, response lengths. Pure arithmetic.

Owns the three fits of ``hybridsched calibrate``. Each takes the metrics of some cycles and returns a small record of
what was found and how well it fits; what the cycles cannot tell apart is put where it does least harm, and said in
``notes``. Invariants: no number that is found is negative, and the same metrics give the same fit. Reads no files,
plays nothing.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

import numpy as np
import numpy.typing as npt

Metrics = Mapping[str, float]
FloatArray = npt.NDArray[np.float64]

_DECODE = re.compile(r"decode/(?P<kind>\w+)/batch_(?P<size>\d+)/seconds")
_QUANTILES = (10, 25, 50, 75, 90, 95)
#: A slope whose standard error is more than this share of it is not told apart from none.
_VAGUE = 0.5
#: A trend counts when it is this many standard errors from none.
_SURE = 3.0


@dataclass(frozen=True, slots=True)
class DecodeFit:
    """Seconds of a decode step = base_s + per_seq_s x batch, at speed 1; prefill in tokens/s (None: not seen)."""

    base_s: float
    per_seq_s: float
    prefill_tokens_per_s: float | None
    hybrid_speed: float | None  #: relative to standalone replicas; None: only one kind was measured
    batches: tuple[int, int]  #: smallest and largest batch measured
    error: float  #: root mean square of measured / fitted - 1 over sizes, weighted by time
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainFit:
    """Seconds of a cycle's training = fixed_s x optimizer steps + tokens / tokens_per_s (all ranks together)."""

    fixed_s: float
    tokens_per_s: float
    error: float  #: root mean square of measured / fitted - 1 over cycles
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LengthFit:
    """Log-normal response lengths before the cut, and how their mean grows with the samples."""

    mean: float
    sigma: float
    growth_per_1000: float
    cut_share: float  #: of responses that the model expects to be cut off
    notes: tuple[str, ...] = ()


def fit_decode(cycles: Sequence[Metrics]) -> DecodeFit | None:
    """None when no decode times were recorded."""
    points = _decode_points(cycles)
    kinds = {kind: rows for kind, rows in points.items() if len(rows)}
    if not kinds:
        return None
    main = "standalone" if "standalone" in kinds else next(iter(kinds))
    rows = kinds[main]
    found = _nonnegative(rows[:, 1:], rows[:, 0])
    notes = []
    sizes = rows[:, 2] / rows[:, 1]
    if sizes.max() < 1.5 * sizes.min():
        notes.append(
            f"batches were all of about {sizes.mean():.0f} sequences: the part of a step that grows with it is a guess"
        )
    hybrid = None
    if main == "standalone" and "hybrid" in kinds:
        other = kinds["hybrid"]
        hybrid = float((other[:, 1:] @ found).sum() / other[:, 0].sum())
    expected = rows[:, 1:] @ found
    off = rows[:, 0] / np.maximum(expected, 1e-12) - 1.0
    error = math.sqrt(float(np.average(off**2, weights=rows[:, 0])))
    prefill = 1.0 / found[2] if found[2] > 0 else None
    if prefill is None:
        notes.append("prefill took too little time to be measured: the default speed is kept")
    span = (int(sizes.min()), math.ceil(sizes.max()))
    return DecodeFit(float(found[0]), float(found[1]), prefill, hybrid, span, error, tuple(notes))


def _decode_points(cycles: Sequence[Metrics]) -> dict[str, FloatArray]:
    """kind -> float64 [points, 4] (seconds, steps, tokens, prefill tokens), one point per cycle and batch size."""
    found: dict[str, list[list[float]]] = {}
    for values in cycles:
        for name in values:
            match = _DECODE.fullmatch(name)
            if match:
                stem = name.removesuffix("seconds")
                point = [values.get(stem + what, 0.0) for what in ("seconds", "steps", "tokens", "prefill_tokens")]
                if point[0] > 0 and point[1] > 0 and point[2] > 0:
                    found.setdefault(match["kind"], []).append(point)
    return {kind: np.asarray(rows, np.float64) for kind, rows in found.items()}


def fit_train(seconds: Sequence[float], steps: Sequence[float], tokens: Sequence[float]) -> TrainFit:
    """Per cycle: seconds spent on training, optimizer steps, tokens trained."""
    y, design = np.asarray(seconds, np.float64), np.column_stack([steps, tokens]).astype(np.float64)
    whole = float(y.sum() / design[:, 1].sum())
    notes: tuple[str, ...] = ()
    found = _nonnegative(design, y)
    if not (found[1] > 0 and _sure_slope(design, y, found)):
        found = np.asarray([0.0, whole])
        notes = (
            "cycles differ too little in tokens to tell a fixed time per optimizer step from time per token: "
            "all of it is put on the tokens",
        )
    expected = design @ found
    error = math.sqrt(float(np.mean((y / np.maximum(expected, 1e-12) - 1.0) ** 2)))
    return TrainFit(float(found[0]), float(1.0 / found[1]), error, notes)


def _sure_slope(design: FloatArray, y: FloatArray, found: FloatArray) -> bool:
    """The time per token is known to within half of itself."""
    freedom = len(y) - 2
    if freedom < 1:
        return False
    residual = y - design @ found
    covariance = np.linalg.pinv(design.T @ design) * float(residual @ residual) / freedom
    return math.sqrt(max(0.0, float(covariance[1, 1]))) <= _VAGUE * float(found[1])


def fit_lengths(cycles: Sequence[Metrics], samples: Sequence[float], cut: int) -> LengthFit | None:
    """``samples``: trained before the middle of each cycle; ``cut``: max_response_length. None without quantiles."""
    means = [values.get("rollout/response_length/mean") for values in cycles]
    if any(mean is None for mean in means) or not all(_quantile(values, 50) for values in cycles):
        return None
    sigma = _sigma(cycles, cut)
    y = np.asarray([_uncut_mean(mean, sigma, cut) for mean in means if mean is not None], np.float64)
    x = np.asarray(samples, np.float64) / 1000.0
    notes: list[str] = []
    slope, error = _trend(x, y)
    level, growth = float(y.mean()), 0.0
    if slope > _SURE * error and slope > 0:
        start = float(y.mean() - slope * x.mean())
        if start > 0:
            level, growth = start, slope / start
    elif -slope > _SURE * error:
        half = len(y) // 2
        level = float(y[half:].mean())
        notes.append("responses became shorter: the lengths of the second half of the fitted cycles are used")
    cut_share = fmean(_cut_share(level * (1.0 + growth * float(at)), sigma, cut) for at in x)
    return LengthFit(level, sigma, growth, cut_share, tuple(notes))


def _quantile(values: Metrics, q: int) -> float:
    return values.get(f"rollout/response_length/tp{q:02d}", 0.0)


def _sigma(cycles: Sequence[Metrics], cut: int) -> float:
    """Slope of the logarithm of the quantiles over those of a normal distribution, below the cut."""
    points = []
    for values in cycles:
        known = [(q, _quantile(values, q)) for q in _QUANTILES]
        logs = [(NormalDist().inv_cdf(q / 100), math.log(v)) for q, v in known if 0 < v < cut]
        if len(logs) > 1:
            points.append(_trend(*(np.asarray(column) for column in zip(*logs, strict=True)))[0])
    return max(0.0, float(np.mean(points))) if points else 0.0


def _uncut_mean(observed: float, sigma: float, cut: int) -> float:
    """Mean of the log-normal whose mean after the cut is ``observed``; at most 1000 x it."""
    if sigma == 0 or observed >= cut:
        return min(observed, float(cut))
    low, high = observed, 1000.0 * observed
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _cut_mean(middle, sigma, cut) < observed else (low, middle)
    return float(low)


def _cut_mean(mean: float, sigma: float, cut: int) -> float:
    """E[min(L, cut)] of a log-normal."""
    normal, mu = NormalDist(), math.log(mean) - sigma * sigma / 2
    z = (math.log(cut) - mu) / sigma
    return mean * normal.cdf(z - sigma) + cut * (1.0 - normal.cdf(z))


def _cut_share(mean: float, sigma: float, cut: int) -> float:
    if sigma == 0:
        return float(mean >= cut)
    return 1.0 - NormalDist().cdf((math.log(cut) - math.log(mean) + sigma * sigma / 2) / sigma)


def _trend(x: FloatArray, y: FloatArray) -> tuple[float, float]:
    """Slope of y over x and its standard error (inf with fewer than three points or no spread in x)."""
    dx = x - x.mean()
    spread = float(dx @ dx)
    if spread <= 0:
        return 0.0, math.inf
    slope = float(dx @ (y - y.mean())) / spread
    if len(x) < 3:
        return slope, math.inf
    residual = y - y.mean() - slope * dx
    return slope, math.sqrt(float(residual @ residual) / (len(x) - 2) / spread)


def _nonnegative(design: FloatArray, y: FloatArray) -> FloatArray:
    """Least squares with no negative coefficient, each row weighted as if its variance went with its length.

    Few columns: every subset of them is solved, the best that is nowhere negative wins.
    """
    weight = 1.0 / np.sqrt(np.maximum(y, 1e-9))
    a, b = design * weight[:, None], y * weight
    columns = range(design.shape[1])
    best, least = np.zeros(design.shape[1]), math.inf
    for size in range(1, design.shape[1] + 1):
        for chosen in itertools.combinations(columns, size):
            solved = np.linalg.lstsq(a[:, chosen], b, rcond=None)[0]
            if (solved < 0).any():
                continue
            rest = b - a[:, chosen] @ solved
            if float(rest @ rest) < least * (1.0 - 1e-9):
                best, least = np.zeros(design.shape[1]), float(rest @ rest)
                best[list(chosen)] = solved
    return best
