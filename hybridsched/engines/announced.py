"""The tensors of a weight update against those of an engine's model: announced before, counted after. No torch.

Owns the two judgements every engine makes, and their words. Does not: hold or move tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hybridsched.errors import WeightSyncError
from hybridsched.model import TensorSpec


def check_announced(own: Sequence[TensorSpec], announced: Sequence[TensorSpec]) -> None:
    """Raises WeightSyncError with the difference when the announced tensors are not those of the engine's model."""
    ours, theirs = {s.name: s for s in own}, {s.name: s for s in announced}
    problems = [f"missing {_some([n for n in ours if n not in theirs])}"] if ours.keys() - theirs.keys() else []
    if theirs.keys() - ours.keys():
        problems.append(f"not in this model {_some([n for n in theirs if n not in ours])}")
    for name in ours:
        if name not in theirs:
            continue
        here, there = ours[name], theirs[name]
        if tuple(there.shape) != tuple(here.shape):
            problems.append(f"{name} has shape {tuple(there.shape)}, here it is {tuple(here.shape)}")
        if there.dtype != here.dtype:
            problems.append(f"{name} is {there.dtype}, here it is {here.dtype}")
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise WeightSyncError(
            f"the announced weights do not fit the engine's model: {'; '.join(problems[:8])}{more}. "
            "Trainer and engine must have the same model folder and dtype"
        )


def check_arrived(own: Sequence[TensorSpec], arrived: Collection[str]) -> None:
    """Raises WeightSyncError naming what is missing unless every tensor of the model arrived."""
    missing = [spec.name for spec in own if spec.name not in arrived]
    if missing:
        raise WeightSyncError(
            f"{len(missing)} of {len(own)} tensors did not arrive: {_some(missing)}. "
            "The engine stays paused; repeat the whole sync"
        )


def _some(names: list[str], limit: int = 5) -> str:
    """The first few names, and how many more."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
