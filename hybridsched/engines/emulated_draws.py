"""What an emulated model "generates": response lengths and rewards, drawn from a hash.

Owns the draws of the emulated engine. Invariant: a draw depends on (run seed, sample_uid, response index) only, so it
is the same on whatever replica, after whatever aborts, in whatever order. Nothing here knows of time or replicas.
"""

from __future__ import annotations

import math
import struct

import xxhash

from hybridsched.config.schema import EmulatedConfig
from hybridsched.model import FinishReason, Sample, SamplingParams

_PACK = struct.Struct("<QQQQ").pack
_MASK = (1 << 64) - 1
_UNIT = 2.0**-64

#: What a draw is for; part of the hash, so that draws of one response are independent.
_LENGTH, _REWARD, _FAILED, _EQUAL, _EASE, _ODD = range(6)


def draw_length(config: EmulatedConfig, seed: int, sample_uid: int, index: int) -> int:
    """Tokens response ``index`` would have without a budget: log-normal with mean ``mean_length``, at least 1.

    Its logarithm is normal with standard deviation ``response_sigma`` and mean ln(mean) - sigma^2 / 2.
    """
    sigma, mean = config.response_sigma, mean_length(config, sample_uid)
    if sigma == 0:
        return max(1, round(mean))
    bits = xxhash.xxh3_128_intdigest(_PACK(seed & _MASK, sample_uid & _MASK, index, _LENGTH))
    radius = math.sqrt(-2.0 * math.log(((bits >> 64) + 0.5) * _UNIT))
    normal = radius * math.cos(2.0 * math.pi * (bits & _MASK) * _UNIT)
    return max(1, round(mean * math.exp(sigma * normal - 0.5 * sigma * sigma)))


def mean_length(config: EmulatedConfig, sample_uid: int) -> float:
    """Mean response length of a sample: ``response_mean_tokens``, growing with the uid, every other block scaled.

    Validation samples count from uid 0 and so keep the early lengths.
    """
    mean = config.response_mean_tokens * (1.0 + config.response_growth_per_1000 * sample_uid / 1000.0)
    block = config.response_block_samples
    return mean * config.response_block_factor if block and (sample_uid // block) % 2 else mean


def budgeted(length: int, params: SamplingParams) -> tuple[int, FinishReason]:
    """The length under ``params`` and why it ends there: LENGTH when the budget cuts it off, else STOP."""
    if params.ignore_eos or length > params.max_new_tokens:
        return params.max_new_tokens, FinishReason.LENGTH
    return length, FinishReason.STOP


def draw_rewards(config: EmulatedConfig, seed: int, sample_uid: int, n: int, *, attempt: int = 0) -> list[float | None]:
    """Rewards 0.0 or 1.0 of the n responses of a sample; None where the reward "fails".

    A share ``reward_failed_fraction`` of the responses fails (drawn anew for each ``attempt``). A share
    ``reward_equal_fraction`` of the samples has all rewards equal; in every other sample with at least two good
    responses they differ.
    """
    first = attempt * n
    ease = _unit(seed, sample_uid, 0, _EASE)
    good = [i for i in range(n) if _unit(seed, sample_uid, first + i, _FAILED) >= config.reward_failed_fraction]
    rewards: list[float | None] = [None] * n
    equal = _unit(seed, sample_uid, 0, _EQUAL) < config.reward_equal_fraction
    for i in good:
        rewards[i] = float(ease >= 0.5) if equal else float(_unit(seed, sample_uid, first + i, _REWARD) < ease)
    if not equal and len(good) > 1 and len({rewards[i] for i in good}) == 1:
        odd = good[int(_unit(seed, sample_uid, first, _ODD) * len(good))]
        rewards[odd] = 1.0 - (rewards[odd] or 0.0)
    return rewards


def emulated_rewards(sample: Sample, config: EmulatedConfig, *, seed: int, attempt: int = 0) -> list[float | None]:
    """One reward per response of ``sample``, None for a failed one; see ``draw_rewards``."""
    return draw_rewards(config, seed, sample.sample_uid, len(sample.responses), attempt=attempt)


def _unit(seed: int, sample_uid: int, index: int, what: int) -> float:
    """Uniform in [0, 1)."""
    bits = xxhash.xxh3_64_intdigest(_PACK(seed & _MASK, sample_uid & _MASK, index, what))
    return float(bits >> 11) * 2.0**-53
