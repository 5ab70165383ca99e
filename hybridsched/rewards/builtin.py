"""The built-in reward functions. All have the peer's signature and return a float in [0, 1].

    compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float

Pure: text in, number out. A ground truth a function cannot understand raises ValueError (the response fails, it does
not score zero).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

_DIGITS = frozenset("0123456789")
_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?(?:\s*/\s*\d+(?:\.\d+)?)?"
#: A sign counts only when no word or closing bracket stands before it: "5-3" ends in 3, "x = -3" in -3.
_NUMBER_IN_TEXT = re.compile(rf"(?<![\w.)\]])(?=[-+.\d]){_NUMBER}|(?<=[-+])(?=[.\d]){_NUMBER}")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*([^{}]+?)\s*\}\s*\{\s*([^{}]+?)\s*\}")


def exact_match(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    strip: bool = True,
    ignore_case: bool = False,
) -> float:
    """1.0 when the response is the ground truth (or one of a list of them), else 0.0.

    `strip` ignores white space around both, `ignore_case` the difference between capitals and small letters.
    """
    accepted = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    if not accepted:
        raise ValueError("ground_truth is an empty list: nothing can match it")

    def normal(value: Any) -> str:
        text = str(value).strip() if strip else str(value)
        return text.casefold() if ignore_case else text

    return 1.0 if normal(solution_str) in {normal(value) for value in accepted} else 0.0


def numeric_match(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    abs_tol: float = 1e-6,
    rel_tol: float = 1e-6,
) -> float:
    """1.0 when the number the response ends in equals the ground truth, else 0.0.

    The answer is the last ``\\boxed{...}``, else what follows the last ``####``, else the whole text; its last number
    counts. Numbers may have thousands separators, exponents, and be fractions (``3/4``, ``\\frac{3}{4}``).
    Equal: ``|answer - truth| <= max(abs_tol, rel_tol * |truth|)``. Raises ValueError when the ground truth holds no
    number.
    """
    truth = float(ground_truth) if isinstance(ground_truth, int | float) else last_number(str(ground_truth))
    if truth is None or not math.isfinite(truth):
        raise ValueError(f"ground_truth {ground_truth!r} is not a number")
    answer = last_number(_answer_part(solution_str))
    return 1.0 if answer is not None and abs(answer - truth) <= max(abs_tol, rel_tol * abs(truth)) else 0.0


def last_number(text: str) -> float | None:
    """The last finite number in `text`, None when there is none."""
    plain = _FRACTION.sub(r"\1/\2", text.replace("\u2212", "-").replace("$", ""))
    for match in reversed(list(_NUMBER_IN_TEXT.finditer(plain))):
        value = _parse(match.group())
        if value is not None:
            return value
    return None


def _parse(text: str) -> float | None:
    numerator, slash, denominator = text.replace(",", "").partition("/")
    try:
        value = float(numerator) / float(denominator) if slash else float(numerator)
    except (ValueError, ZeroDivisionError):
        return None
    return value if math.isfinite(value) else None


def _answer_part(text: str) -> str:
    """What the response offers as its answer."""
    start = text.rfind("\\boxed{")
    if start >= 0:
        start += len("\\boxed{")
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start:end]
        return text[start:]  # never closed: the response was cut off inside the box
    return text.rpartition("####")[2]


def count_on(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    end_steps: float = 1.0,
) -> float:
    """The demo's task: how well the response counts on from a start number, digit by digit, mod 10.

    ``reward = right / (steps + end_steps)``. White space aside, every character of the response is one step. A step is
    right when it is the digit after the one before it (after 9 comes 0); the digit before the first step is the last
    digit of `ground_truth`. Anything but a digit is a wrong step and leaves "the one before" as it is.

    Each step is judged by its predecessor, so one mistake costs one step, not all that follow. The end counts as
    `end_steps` steps that are never right, so that an empty response scores 0, one more right step always pays
    (1/2, 2/3, 3/4, ...), and a short lucky guess never beats a long right count. Raises ValueError when the ground
    truth does not end in a digit.
    """
    start = str(ground_truth).strip()[-1:]
    if start not in _DIGITS:
        raise ValueError(f"ground_truth {ground_truth!r} does not end in a digit")
    if end_steps <= 0:
        raise ValueError(f"end_steps is {end_steps}, it should be positive")
    before = int(start)
    right = steps = 0
    for character in solution_str:
        if character.isspace():
            continue
        steps += 1
        if character in _DIGITS:
            digit = int(character)
            right += digit == (before + 1) % 10
            before = digit
    return right / (steps + end_steps)


BUILTINS: dict[str, Callable[..., float]] = {
    "exact_match": exact_match,
    "numeric_match": numeric_match,
    "count_on": count_on,
}
