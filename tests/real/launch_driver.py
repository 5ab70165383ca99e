"""Calls the launch loop in a process of its own, so that it can be interrupted and killed: launch_driver.py
FOLDER AGENT_MODULE [KEY=VALUE ...].

Prints one JSON line per message and one at the end.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from hybridsched.config import load_config
from hybridsched.runtime.prepare import prepare
from hybridsched.slurm import launch_loop, step_watch

EMULATED = [
    "actor_rollout_ref.actor.strategy=emulated",
    "actor_rollout_ref.rollout.name=emulated",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "local.allow_oversubscribe=true",
    "trainer.total_training_steps=1",
    "faults.backoff_s=0.1",
    "deadlines.stop_s=1",
]


def tell(**line: Any) -> None:
    """One line for the test."""
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    step_watch.SETTLE_S = step_watch.GRACE_S = 1.0
    prepared = prepare(
        load_config(None, [*EMULATED, *sys.argv[3:], f"trainer.default_local_dir={sys.argv[1]}"]), resume=False
    )
    tell(run_id=prepared.run_id)
    code = launch_loop.run_local(
        prepared,
        on_status=lambda status: tell(status=status),
        say=lambda message: tell(said=message),
        agent_module=sys.argv[2],
    )
    tell(code=code)
