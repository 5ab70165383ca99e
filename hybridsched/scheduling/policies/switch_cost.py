"""What one round trip (activate, later deactivate) of the hybrids costs, measured.

Invariants: only complete pairs count, in the order they happened (an activation with the deactivation that ended it);
every measured switch is used at most once, however often it is shown. Not here: work that aborts repeat.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any


class SwitchCost:
    """Mean of the last ``history`` complete pairs in seconds; ``initial_s`` until there is one."""

    def __init__(self, history: int, initial_s: float) -> None:
        self.initial_s = initial_s
        self.pairs: deque[float] = deque(maxlen=history)
        self._open: float | None = None  # an activation whose deactivation has not been seen
        self._seen_activate: float = 0  # the count, or without counts the duration, that was last looked at
        self._seen_deactivate: float = 0

    @property
    def seconds(self) -> float:
        """The cost to expect of the next pair."""
        return sum(self.pairs) / len(self.pairs) if self.pairs else self.initial_s

    def observe(
        self, activate_s: float, deactivate_s: float, activations: int | None = None, deactivations: int | None = None
    ) -> None:
        """Take in the last measured durations (0: none yet), once per cycle after a possible activation.

        With counts a switch is new when its count grew. Without, when its duration changed; as activations and
        deactivations alternate, one that changed implies the other. Repeating both values adds nothing, and a
        duration of 0 lets the same value count again later.
        """
        counted = activations is not None and deactivations is not None
        a_mark: float = activations if activations is not None and counted else activate_s
        d_mark: float = deactivations if deactivations is not None and counted else deactivate_s
        activated = activate_s > 0 and a_mark != self._seen_activate
        deactivated = deactivate_s > 0 and d_mark != self._seen_deactivate
        self._seen_activate, self._seen_deactivate = a_mark, d_mark
        if not counted and activated and deactivate_s > 0:
            deactivated = True
        if deactivated and self._open is not None:
            # Within a cycle the deactivation comes first, so it ends the activation of an earlier cycle.
            self.pairs.append(self._open + deactivate_s)
            self._open = None
        elif deactivated and activate_s > 0 and (not counted or (activated and activations == deactivations)):
            # Nothing open: the activation shown beside it is the one it ended (unless hybrids are lent right now).
            self.pairs.append(activate_s + deactivate_s)
            return
        if activated:
            self._open = activate_s

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {
            "pairs": list(self.pairs),
            "open": self._open,
            "seen_activate": self._seen_activate,
            "seen_deactivate": self._seen_deactivate,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Undo ``state``."""
        self.pairs = deque((float(x) for x in state["pairs"]), maxlen=self.pairs.maxlen)
        self._open = state["open"]
        self._seen_activate = state["seen_activate"]
        self._seen_deactivate = state["seen_deactivate"]
