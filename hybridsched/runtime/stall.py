"""When a run produces nothing to train on: everything filtered, everything failing.

Owns `StallWatch`: the last outcomes of samples and the judgement on them. Does not: know why (it is told the reason of
the last failure), or end the run (whoever calls `check` lets the error through).
"""

from __future__ import annotations

from collections import deque

from hybridsched.errors import RunStalled

#: How many finished samples the check looks back on.
STALL_WINDOW = 200
ALL_FAILED = 16  #: so many without a single good one, from the start on, are enough: failures may be slow (time-outs)
_AT_LEAST = 8
_GOOD, _FAILED, _FILTERED = "good", "failed", "filtered"


class StallWatch:
    """Outcomes of the last samples."""

    def __init__(self, samples_per_step: int, max_failed_fraction: float) -> None:
        """samples_per_step: of one update; a few of them are looked at before anything is judged."""
        self._enough = max(_AT_LEAST, min(STALL_WINDOW, 4 * samples_per_step, 50))
        self._limit = max_failed_fraction
        self._outcomes: deque[str] = deque(maxlen=STALL_WINDOW)
        self._last_failure = ""

    def good(self) -> None:
        """A sample went to the queue."""
        self._outcomes.append(_GOOD)

    def without_row(self, verdict: str, reason: str) -> None:
        """A sample ended as "failed" or "filtered"."""
        self._outcomes.append(verdict)
        if verdict == _FAILED:
            self._last_failure = f"; the last failure: {reason}"

    def check(self) -> None:
        """Raise RunStalled when going on makes no sense."""
        seen, failures = len(self._outcomes), self._outcomes.count(_FAILED)
        hopeless = failures == seen >= ALL_FAILED
        if seen < self._enough and not hopeless:
            return
        failed, filtered = failures / seen, self._outcomes.count(_FILTERED) / seen
        if failed > self._limit or (seen == STALL_WINDOW and filtered == 1.0):
            raise RunStalled(
                f"of the last {seen} samples {failed:.0%} failed, {filtered:.0%} were filtered and "
                f"{1 - failed - filtered:.0%} can be trained on (reward.max_failed_fraction = {self._limit:.0%})"
                f"{self._last_failure}. Every sample's reason: hybridsched explain RUN samples; tracebacks of the "
                "reward function: agent.*.reward.*.log among the logs"
            )
