"""What a run is: the few things that must stay the same for a resume to mean anything. Kept in run.json.

Owns: which things these are, and the refusal when one has changed. A sample is a position in the stream of prompts, a
checkpoint counts samples and updates: with other prompts, another order, another number of responses or another
mini-batch the same numbers would mean other things. Everything else may be changed on a resume: lengths and deadlines,
learning rate, policy and its thresholds, number of nodes, cycles per sync, steps to train, paths (as long as what lies
there is the same), reward function, logging.

Does not: compare weights (a resume takes them from its checkpoint; only the reference model is read from the folder).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import xxhash

from hybridsched.config import resolved_values
from hybridsched.config.schema import RunConfig
from hybridsched.errors import RunFolderError
from hybridsched.models.config import ModelConfig

#: Keys that may not change between the starts of one run, and why.
FIXED_KEYS = {
    "data.seed": "it gives the prompts another order",
    "data.shuffle": "it gives the prompts another order",
    "actor_rollout_ref.rollout.n": "samples on disk hold that many responses",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "checkpoints count updates of that size",
    "actor_rollout_ref.actor.strategy": "its checkpoints cannot be read by another one",
    "actor_rollout_ref.rollout.name": "emulated samples and real ones do not mix",
}


def identity_of(config: RunConfig, data_fingerprint: str, model: ModelConfig | None) -> dict[str, Any]:
    """For run.json. data_fingerprint: of the training prompts; model: None where there is none (emulated)."""
    values = resolved_values(config)
    identity: dict[str, Any] = {key: _at(values, key) for key in FIXED_KEYS}
    identity["data"] = data_fingerprint
    if model is not None:
        identity["model"] = xxhash.xxh3_64_hexdigest(repr(model).encode())
    return identity


def require_same(before: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Raise RunFolderError naming everything that changed since the run began. What ``before`` lacks is not judged."""
    changed = [_told(name, before[name], now.get(name)) for name in before if before[name] != now.get(name)]
    if changed:
        raise RunFolderError(
            f"{where}: this run cannot go on with what it is given now:\n- "
            + "\n- ".join(changed)
            + "\nChange it back to go on (config/resolved.yaml has every value of the last start), or start a new run: "
            "--force replaces this one, another trainer.experiment_name keeps it"
        )


def _told(name: str, before: Any, now: Any) -> str:
    if name == "data":
        return (
            f"data.train_files (with tokenizer and length policy) gave prompts {before} when the run began, {now} now: "
            "positions in the checkpoint would mean other prompts"
        )
    if name == "model":
        return (
            "actor_rollout_ref.model.path: config.json there describes another model than when the run began: the "
            "checkpoint does not fit it"
        )
    reason = FIXED_KEYS.get(name, "the run was begun with it")
    return f"{name} was {before!r} when the run began and is {now!r} now: {reason}"


def _at(values: Mapping[str, Any], dotted: str) -> Any:
    found: Any = values
    for part in dotted.split("."):
        found = found[part]
    return found
