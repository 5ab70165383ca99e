"""Calls a reward function for one response and decides whether what came back is a reward.

Owns: the border between user code and the run. Invariants: ``score_one`` returns a finite float or raises
RewardFailure, whatever the function does short of killing its process; a failure is never turned into a number.
Does not: time out (a hanging function is ended by the pool that owns its process), retry or log.
"""

from __future__ import annotations

import math
import numbers
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridsched.errors import FaultError

_FRAMES = 8  #: innermost frames of a traceback kept for the log


class RewardFailure(FaultError):
    """A response could not be scored. ``reason`` is one line; ``detail`` the traceback of the function, or ""."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return self.reason


def score_one(
    fn: Callable[..., Any],
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
) -> float:
    """The reward of one response.

    `fn` returns a number (true and false count as 1 and 0), a 0-d array or tensor, or a dict whose
    "score" is one of these. Raises RewardFailure when it raises, exits, or returns anything else, NaN or infinity.
    """
    try:
        value = fn(data_source, solution_str, ground_truth, extra_info)
    except (Exception, SystemExit) as error:  # user code may raise anything; the response fails, the run goes on
        detail = "".join(traceback.format_exception(error, limit=-_FRAMES))
        raise RewardFailure(f"the reward function raised {type(error).__name__}: {error}", detail) from error
    if isinstance(value, Mapping):
        if "score" not in value:
            keys = ", ".join(map(str, value)) or "nothing"
            raise RewardFailure(f'the reward function returned a dict without "score" (it has: {keys})')
        value = value["score"]
    return _as_reward(value)


def _as_reward(value: Any) -> float:
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        value = value.item()  # numpy scalar or 0-d tensor, without importing either
    if not isinstance(value, numbers.Real):
        size = f" of length {len(value)}" if isinstance(value, Sequence) or hasattr(value, "shape") else ""
        raise RewardFailure(f"the reward function returned {type(value).__name__}{size}; one number is expected")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardFailure(f"the reward function returned {number}; a finite number is expected")
    return number


def overlong_penalty(n_tokens: int, max_response_length: int, buffer_len: int, factor: float) -> float:
    """Soft punishment of overlong responses, to be added to the reward (DAPO, arXiv:2503.14476, eq. 13).

    With L = max_response_length, B = buffer_len, n = n_tokens::

        0                            n <= L - B
        -factor * (n - (L - B)) / B  L - B < n <= L
        -factor                      n > L

    B = 0 leaves only the last case. `n_tokens` counts new tokens including the end-of-sequence token. Raises
    ValueError unless 0 <= B <= L and factor >= 0.
    """
    if not 0 <= buffer_len <= max_response_length:
        raise ValueError(f"buffer_len {buffer_len} should be between 0 and max_response_length {max_response_length}")
    if factor < 0:
        raise ValueError(f"factor {factor} should not be negative")
    over = n_tokens - (max_response_length - buffer_len)
    if over <= 0:
        return 0.0
    return -factor * min(1.0, over / buffer_len) if buffer_len else -factor


def group_is_degenerate(values: Sequence[float]) -> bool:
    """True when a group teaches nothing: no values, or two and more that are all equal.

    A single value is kept, as the peer does: with n = 1 the comparison is with other prompts, not within the group.
    """
    return not values or (len(values) > 1 and min(values) == max(values))
