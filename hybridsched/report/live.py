"""The live view of a run in a terminal: cycle, reward, queue, who holds the trainer's GPUs, the last decision and why.

Takes the status mappings the controller sends (phase, version, queue, in_flight, tenant, trained, decision, elapsed_s,
metrics; all but phase may be missing). On a terminal a block of lines is redrawn in place; on a pipe one plain line per
cycle is printed, and one when the run starts, stops or changes hands. Never raises because of what a status holds.
rich is imported on first use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from hybridsched.report.text import duration, show, sparkline

Status = Mapping[str, Any]

_CYCLE_DONE = "cycle done"
_WORTH_A_LINE = (_CYCLE_DONE, "first weight sync", "stopping")
_REWARD = "rollout/reward/mean"


class StatusLine:
    """Status mappings as plain lines; remembers the last reward, which comes once a cycle."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.validation: float | None = None
        self.last: dict[str, Any] = {}

    def take(self, status: Status) -> None:
        """Remember a status."""
        metrics = status.get("metrics")
        for name, value in metrics.items() if isinstance(metrics, Mapping) else ():
            if not isinstance(value, int | float) or not math.isfinite(value):
                continue
            if name == _REWARD:
                self.rewards.append(float(value))
            elif str(name).startswith("val/reward/mean@"):
                self.validation = float(value)
        self.last = {**self.last, **status}

    def line(self) -> str:
        """The last status in one line."""
        now = self.last
        reward = f"reward {self.rewards[-1]:.3f}" if self.rewards else "reward -"
        parts = [
            f"[{duration(_number(now.get('elapsed_s')))}]",
            f"cycle {show(now.get('version'))}",
            f"{now.get('phase', '-')}:",
            f"{reward},",
            f"queue {show(now.get('queue'))},",
            f"in flight {show(now.get('in_flight'))},",
            f"trained {show(now.get('trained'))},",
            f"trainer's GPUs: {holder(now.get('tenant'))}",
        ]
        decision = str(now.get("decision") or "")
        return " ".join(parts) + (f"; {decision}" if decision else "")


def holder(tenant: Any) -> str:
    """Who has the trainer's GPUs, for people."""
    return {"hybrid": "lent to rollout", "trainer": "with the trainer", "handover": "changing hands"}.get(
        str(tenant), "-"
    )


class LiveView:
    """Shows a run while it goes on. Use as a context manager; `update` takes each status.

    run_folder: named in the head. console: a rich console, None for standard output.
    """

    def __init__(self, run_folder: Path | str = "", console: Any = None) -> None:
        from rich.console import Console

        self._folder = str(run_folder)
        self._console = console if console is not None else Console()
        self._status = StatusLine()
        self._live: Any = None

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(self.renderable(), console=self._console, refresh_per_second=4, transient=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.update(self.renderable())
            self._live.stop()
            self._live = None

    def update(self, status: Status) -> None:
        """Show a new status."""
        self._status.take(status)
        if self._live is not None:
            self._live.update(self.renderable())
        elif not self._console.is_terminal and status.get("phase") in _WORTH_A_LINE:
            self._console.print(self._status.line(), markup=False, highlight=False, soft_wrap=True)

    def renderable(self) -> Any:
        """The block that is shown in a terminal."""
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        now, state = self._status.last, self._status
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        reward = Text("-")
        if state.rewards:
            reward = Text.assemble((f"{state.rewards[-1]:.3f}", "bold"), "  ", (sparkline(state.rewards), "cyan"))
        if state.validation is not None:
            reward.append(f"  validation {state.validation:.3f}")
        lent = now.get("tenant") == "hybrid"
        gpus = Text(holder(now.get("tenant")), style="bold blue" if lent else "bold yellow")
        counts = (("queue", "queued"), ("in_flight", "in flight"), ("trained", "trained"))
        flow = ", ".join(f"{show(now.get(key))} {name}" for key, name in counts)
        grid.add_row("cycle", Text(f"{show(now.get('version'))}   {now.get('phase', 'starting')}"))
        grid.add_row("reward", reward)
        grid.add_row("samples", Text(flow))
        grid.add_row("trainer's GPUs", gpus)
        grid.add_row("last decision", Text(str(now.get("decision") or "-")))
        elapsed = duration(_number(now.get("elapsed_s")))
        title = Text(f"hybridsched  {self._folder}".rstrip())
        return Panel(grid, title=title, title_align="left", subtitle=Text(elapsed), subtitle_align="right")


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
