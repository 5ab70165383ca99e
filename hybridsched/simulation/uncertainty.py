"""Assumptions with ranges, draws over them, and what they do to a prediction.

Owns: reading an assumptions file, Latin hypercube draws, quantiles and main effects. Invariants: pure but for reading
the file; the same seed gives the same draws. Knows nothing of what is predicted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hybridsched.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Assumption:
    """One number taken for granted: its value, the range it may have, and why."""

    name: str
    value: float
    low: float
    high: float
    log: bool
    unit: str
    reason: str

    def at(self, share: float) -> float:
        """The number at ``share`` (0 to 1) of the range."""
        if self.log:
            return math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        return self.low + share * (self.high - self.low)

    def share(self, value: float) -> float:
        """Inverse of ``at``."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def read_assumptions(path: Path) -> tuple[dict[str, Any], list[Assumption]]:
    """The whole file, and its ``assumptions``. Raises ConfigError when one lacks a range or a reason."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    found = []
    for name, entry in content["assumptions"].items():
        missing = {"value", "low", "high", "scale", "unit", "reason"} - set(entry)
        if missing:
            raise ConfigError(f"{path}: assumptions.{name}: lacks {', '.join(sorted(missing))}")
        value, low, high = (float(entry[key]) for key in ("value", "low", "high"))
        log = entry["scale"] == "log"
        if not low <= value <= high or low == high or (log and low <= 0):
            raise ConfigError(f"{path}: assumptions.{name}: {value} is not within a range from {low} to {high}")
        found.append(Assumption(name, value, low, high, log, entry["unit"], " ".join(entry["reason"].split())))
    return content, found


def latin_hypercube(assumptions: Sequence[Assumption], n: int, seed: int) -> list[dict[str, float]]:
    """``n`` draws; each of n equal shares of every range is hit exactly once."""
    source = random.Random(seed)
    columns = {}
    for assumption in assumptions:
        strata = list(range(n))
        source.shuffle(strata)
        columns[assumption.name] = [assumption.at((stratum + source.random()) / n) for stratum in strata]
    return [{name: column[i] for name, column in columns.items()} for i in range(n)]


def quantile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics. Raises ValueError without values."""
    if not values:
        raise ValueError("a quantile of nothing")
    return float(np.quantile(np.asarray(values, np.float64), share))


def main_effects(
    assumptions: Sequence[Assumption], draws: Sequence[Mapping[str, float]], results: Sequence[float]
) -> dict[str, tuple[float, float]]:
    """How far the result moves when one assumption goes from the low to the high end of its range, all else equal,
    and the standard error of that.

    Least squares on the shares of the ranges, so interactions and curvature are averaged over. Needs more draws than
    assumptions + 1; {} with fewer.
    """
    if len(draws) < len(assumptions) + 2:
        return {}
    shares = [[1.0, *(a.share(draw[a.name]) for a in assumptions)] for draw in draws]
    design, found = np.asarray(shares), np.asarray(results, np.float64)
    solution = np.linalg.lstsq(design, found, rcond=None)[0]
    residual = found - design @ solution
    variance = float(residual @ residual) / (len(draws) - len(assumptions) - 1)
    errors = np.sqrt(variance * np.diag(np.linalg.pinv(design.T @ design)))
    return {a.name: (float(solution[i]), float(errors[i])) for i, a in enumerate(assumptions, start=1)}
