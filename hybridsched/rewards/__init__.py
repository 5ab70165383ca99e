"""Rewards: built-in functions, finding the user's, scoring one response, shaping. No torch, no processes."""

from __future__ import annotations

from hybridsched.rewards.builtin import BUILTINS, count_on, exact_match, numeric_match
from hybridsched.rewards.resolve import RewardFunction, resolve_reward
from hybridsched.rewards.scoring import RewardFailure, group_is_degenerate, overlong_penalty, score_one

__all__ = [
    "BUILTINS",
    "RewardFailure",
    "RewardFunction",
    "count_on",
    "exact_match",
    "group_is_degenerate",
    "numeric_match",
    "overlong_penalty",
    "resolve_reward",
    "score_one",
]
