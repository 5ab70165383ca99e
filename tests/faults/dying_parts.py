"""Workers that die at a moment of their own choosing, for tests that need the middle of something short.

Loaded by HYBRIDSCHED_TEST_BUILD=dying_parts:build. Before the method MOMENT of its engine runs, worker W looks
for the file $HYBRIDSCHED_TEST_DEATHS/W.MOMENT, removes it and kills itself (SIGKILL); so each file is one death.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from hybridsched.config import load_config
from hybridsched.runtime.workers.build import build_worker

FOLDER_VARIABLE = "HYBRIDSCHED_TEST_DEATHS"
MOMENTS = ("load_bucket", "sleep")


def build(spec: Any, config_path: str, context: Any, endpoint: Any, clock: Any, offload: Any) -> Any:
    """As workers.build.build_worker."""
    worker = build_worker(spec, load_config(config_path), context, endpoint, clock, offload)
    engine = getattr(worker, "_engine", None)
    if engine is not None:
        for moment in MOMENTS:
            _mortal(engine, moment, Path(os.environ[FOLDER_VARIABLE]) / f"{spec.worker}.{moment}")
    return worker


def _mortal(engine: Any, moment: str, sentence: Path) -> None:
    original = getattr(engine, moment)

    async def method(*args: Any, **kwargs: Any) -> Any:
        if sentence.exists():  # noqa: ASYNC240 - it is the last thing this process does
            sentence.unlink()  # noqa: ASYNC240
            os.kill(os.getpid(), signal.SIGKILL)
        return await original(*args, **kwargs)

    setattr(engine, moment, method)
