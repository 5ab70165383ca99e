"""How much slower a replica's samples get when it works on more of them, from measured decode times.

Owns ``LoadModel`` and its fit. Pure arithmetic on what the workers report (runtime/workers/meter.py): seconds, steps,
tokens and prefill by size of the batch. Invariants: shares lie in [0, 1]; what cannot be told apart counts as not
depending on the load.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Time a sample needs on a replica that works on ``load`` samples, relative to that at ``mean_load``.

    fixed_share: part of a step at mean_load that does not depend on the load. max_load: samples whose unfinished
    responses the engine can have in its batch; with more, all wait in turn (inf: no limit).
    """

    fixed_share: float = 1.0
    mean_load: float = 1.0
    max_load: float = math.inf

    def slowness(self, load: float) -> float:
        """Seconds per second of work at mean load."""
        running = min(load, self.max_load)
        step = self.fixed_share + (1.0 - self.fixed_share) * running / self.mean_load
        return step * (load / running if running > 0 else 1.0)


def fit_load(
    served_s: Sequence[float], decode: Iterable[Mapping[int, Sequence[float]]], max_num_seqs: int
) -> LoadModel:
    """From completed samples: seconds each spent on replicas, and the decode sums that came with them."""
    rows = [sums for report in decode for sums in report.values()]
    seconds = math.fsum(row[0] for row in rows)
    steps = math.fsum(row[1] for row in rows)
    tokens = math.fsum(row[2] for row in rows)
    load = math.fsum(served_s) / seconds if seconds > 0 else 0.0
    if not (load > 0 and steps > 0 and tokens > 0):
        return LoadModel()
    batch = tokens / steps
    return LoadModel(_fixed_share(rows, batch), load, max(1.0, max_num_seqs * load / batch))


def _fixed_share(rows: Sequence[Sequence[float]], batch: float) -> float:
    """Least squares of seconds over steps and tokens, rows weighted by the inverse of their length."""
    ss = st = tt = sy = ty = 0.0
    for seconds, steps, tokens, *_prefill in rows:
        if seconds > 0:
            ss += steps * steps / seconds
            st += steps * tokens / seconds
            tt += tokens * tokens / seconds
            sy += steps
            ty += tokens
    determinant = ss * tt - st * st
    if determinant <= 1e-6 * ss * tt:  # batches of one size
        return 1.0
    base, per_sequence = (tt * sy - st * ty) / determinant, (ss * ty - st * sy) / determinant
    base, per_sequence = max(0.0, base), max(0.0, per_sequence)
    whole = base + per_sequence * batch
    return base / whole if whole > 0 else 1.0
