"""The wish to end a run in order, as the controller sees it (`services.StopFlag`).

Signal handlers set it and do nothing else: no print, no lock, no await. Installing handlers is `agent_main`'s.
"""

from __future__ import annotations

from typing import Literal

StopKind = Literal["", "stop", "requeue"]


class StopRequest:
    """One wish: none, "stop" (Ctrl-C, SIGTERM) or "requeue" (time limit, preemption).

    A later requeue does not undo a stop, but a stop overrides a requeue: the user wins over the batch system, and the
    run can be resumed either way.
    """

    def __init__(self) -> None:
        self._kind: StopKind = ""

    @property
    def kind(self) -> StopKind:
        """What is asked for; "" while the run is to go on."""
        return self._kind

    def ask(self, kind: Literal["stop", "requeue"]) -> None:
        """May be called from a signal handler."""
        if self._kind != "stop":
            self._kind = kind
