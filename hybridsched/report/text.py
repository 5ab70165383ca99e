"""How figures look in text: numbers, durations, shares. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def show(value: Any) -> str:
    """A value as people read it; "-" for nothing."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, int):
        return f"{value:,}".replace(",", " ") if abs(value) >= 10_000 else str(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {show(item)}" for key, item in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(show(item) for item in value) or "-"
    return str(value)


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    if value and (abs(value) < 1e-3 or abs(value) >= 1e7):
        return f"{value:.3g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.3f}".rstrip("0").rstrip(".")


def duration(seconds: float | None) -> str:
    """3.2 s, 4 min 10 s, 5 h 20 min."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def columns(rows: Sequence[Sequence[str]], *, right: bool = True) -> str:
    """Rows as aligned text; the first column to the left, the others to the right (or left)."""
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [
            cell.rjust(width) if right else cell.ljust(width) for cell, width in zip(row[1:], widths[1:], strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """The last ``width`` values as a row of bars."""
    last = [value for value in values if math.isfinite(value)][-width:]
    if not last:
        return ""
    low, high = min(last), max(last)
    span = (high - low) or 1.0
    return "".join(_BARS[min(7, int((value - low) / span * 7.999))] for value in last)
