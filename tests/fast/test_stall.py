"""A run that produces nothing to train on ends, with the reason; one that produces something goes on."""

from __future__ import annotations

import pytest

from hybridsched.errors import RunStalled
from hybridsched.runtime.stall import ALL_FAILED, STALL_WINDOW, StallWatch


def watch(good: int = 0, failed: int = 0, filtered: int = 0, *, limit: float = 0.5) -> StallWatch:
    made = StallWatch(16, limit)
    for _ in range(good):
        made.good()
    for number in range(failed):
        made.without_row("failed", f"boom {number}")
    for _ in range(filtered):
        made.without_row("filtered", "all equal")
    return made


@pytest.mark.parametrize("made", [(0, ALL_FAILED, 0), (20, 31, 0), (0, 60, 100)])
def test_too_many_failures_end_the_run_with_the_last_reason(made):
    limit = 0.3 if made[2] else 0.5
    with pytest.raises(RunStalled, match=f"the last failure: boom {made[1] - 1}"):
        watch(*made, limit=limit).check()


@pytest.mark.parametrize(
    "made", [(0, 0, 0), (0, ALL_FAILED - 1, 0), (1, 40, 0), (25, 25, 0), (0, 0, STALL_WINDOW - 1), (1, 0, 150)]
)
def test_what_may_still_become_something_goes_on(made):
    watch(*made).check()


def test_only_filtered_samples_end_the_run_when_the_window_is_full_of_them():
    with pytest.raises(RunStalled, match="100% were filtered"):
        watch(5, 0, STALL_WINDOW).check()
