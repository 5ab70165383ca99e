"""Event sinks that combine or mirror: nothing, several, Prometheus text, TensorBoard, Weights & Biases offline.

Mirrors get the metrics (and, where it fits, counts of events); the HDF5 log stays the truth. Invariants: a mirror that
fails is dropped with one warning and the run goes on; nothing contacts the network. Packages of mirrors are imported
when a mirror is made; a missing one is a ConfigError that names it.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridsched.errors import ConfigError
from hybridsched.runlog.base import EventSink

_LOG = logging.getLogger("hybridsched.runlog")
_NOT_PROMETHEUS = re.compile(r"[^a-zA-Z0-9_]+")


class NullRunLog:
    """Forgets everything."""

    def event(self, kind: str, entity: str, *, old: str = "", new: str = "", reason: str = "", **detail: Any) -> None:
        """See EventSink."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """See EventSink."""

    def maybe_flush(self) -> bool:
        """Nothing to do."""
        return False

    def close(self) -> None:
        """Nothing to do."""


class TeeRunLog:
    """Several sinks as one, in this order. The first is the truth and may raise; the others are mirrors."""

    def __init__(self, sinks: Sequence[EventSink]) -> None:
        self._sinks = list(sinks)

    def event(self, kind: str, entity: str, *, old: str = "", new: str = "", reason: str = "", **detail: Any) -> None:
        """See EventSink."""
        self._each("event", kind, entity, old=old, new=new, reason=reason, **detail)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """See EventSink."""
        self._each("metrics", step, values)

    def maybe_flush(self) -> bool:
        """Flush what can be flushed; True when any did something."""
        return any(self._each("maybe_flush"))

    def close(self) -> None:
        """Close what can be closed."""
        self._each("close")

    def _each(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        results = []
        for index, sink in enumerate(list(self._sinks)):
            call = getattr(sink, method, None)
            if call is None:
                continue
            try:
                results.append(call(*args, **kwargs))
            except Exception as error:
                if index == 0:
                    raise
                self._sinks.remove(sink)
                _LOG.warning("%s no longer mirrors the run log: %s", type(sink).__name__, error)
        return results


class PrometheusTextfile:
    """The newest value of every metric, and counts of events, for node_exporter's textfile collector."""

    def __init__(self, path: Path, run_id: str) -> None:
        self._path, self._run_id = path, run_id
        self._values: dict[str, float] = {}
        self._events: Counter[tuple[str, str]] = Counter()
        path.parent.mkdir(parents=True, exist_ok=True)

    def event(self, kind: str, entity: str, *, old: str = "", new: str = "", reason: str = "", **detail: Any) -> None:
        """Counted by kind and new state."""
        self._events[kind, new] += 1

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Rewrite the file."""
        self._values |= values
        self._values["step"] = float(step)
        self._write()

    def close(self) -> None:
        """Write the last counts."""
        self._write()

    def _write(self) -> None:
        run = f'run="{_quoted(self._run_id)}"'
        lines: list[str] = []
        for name, value in sorted(self._values.items()):
            full = "hybridsched_" + _NOT_PROMETHEUS.sub("_", name).strip("_")
            lines += [f"# TYPE {full} gauge", f'{full}{{{run},metric="{_quoted(name)}"}} {_number(value)}']
        lines.append("# TYPE hybridsched_events_total counter")
        for (kind, new), count in sorted(self._events.items()):
            lines.append(f'hybridsched_events_total{{{run},kind="{_quoted(kind)}",new="{_quoted(new)}"}} {count}')
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="backslashreplace")
        os.replace(temporary, self._path)


class TensorBoard:
    """Metrics as scalars, in the format of TensorBoard. Raises ConfigError without the package ``tensorboard``.

    Written with the package's own event writer: torch's would bring torch into the agent, which must stay small.
    """

    def __init__(self, folder: Path) -> None:
        _require("tensorboard", "trainer.logger: tensorboard")
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer = importlib.import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter(
            str(folder)
        )

    def event(self, kind: str, entity: str, *, old: str = "", new: str = "", reason: str = "", **detail: Any) -> None:
        """Not mirrored."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One scalar per metric."""
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        summary = self._summary(value=scalars)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Write out and close."""
        self._writer.close()


class WandbOffline:
    """Metrics for Weights & Biases, kept on disk. Raises ConfigError without the package ``wandb``."""

    def __init__(self, folder: Path, project: str, name: str) -> None:
        wandb = _require("wandb", "trainer.logger: wandb_offline")
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(mode="offline", dir=str(folder), project=project, name=name)

    def event(self, kind: str, entity: str, *, old: str = "", new: str = "", reason: str = "", **detail: Any) -> None:
        """Not mirrored."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One history row; the step is a column, because rows of one step come apart (training, validation)."""
        self._run.log({"cycle": step, **values})

    def close(self) -> None:
        """Finish the offline run."""
        self._run.finish()


def mirrors(loggers: Sequence[str], folder: Path, *, run_id: str, project: str, name: str) -> list[EventSink]:
    """Mirrors for the names of trainer.logger, with files under ``folder``; "console" is not one. ConfigError."""
    out: list[EventSink] = []
    for logger in loggers:
        if logger == "prometheus":
            out.append(PrometheusTextfile(folder / "metrics.prom", run_id))
        elif logger == "tensorboard":
            out.append(TensorBoard(folder / "tensorboard"))
        elif logger == "wandb_offline":
            out.append(WandbOffline(folder / "wandb", project, name))
    return out


#: Package behind each name of trainer.logger that needs one.
_PACKAGES = {"tensorboard": "tensorboard", "wandb_offline": "wandb"}


def missing_packages(loggers: Sequence[str]) -> list[str]:
    """What `mirrors` would refuse for want of a package, one message each; nothing is imported."""
    needed = [(logger, _PACKAGES[logger]) for logger in loggers if logger in _PACKAGES]
    return [
        f"trainer.logger: {logger} needs the package {package}: pip install {package}, or take it out"
        for logger, package in needed
        if importlib.util.find_spec(package) is None
    ]


def _require(package: str, key: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(f"{key} needs the package {package}: pip install {package}, or take it out") from error


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(float(value)) if math.isfinite(value) else ("+Inf" if value > 0 else "-Inf")
