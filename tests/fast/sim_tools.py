"""Short simulated runs for tests: a small base configuration, and the checks every run must pass."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hybridsched.config import load_config
from hybridsched.config.schema import RunConfig
from hybridsched.simulation.storage import newest_incarnation, read_chain
from hybridsched.simulation.world import SimulatedRun

BASE = [
    "actor_rollout_ref.actor.strategy=emulated",
    "actor_rollout_ref.rollout.name=emulated",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "async_training.trigger_parameter_sync_step=2",
    "async_training.staleness_threshold=0.5",
    "async_training.use_dynamic_resource_scheduling=true",
    "async_training.dynamic_schedule_deactivate_ratio=0.6",
    "async_training.concurrent_samples_per_replica=3",
    "data.max_response_length=1024",
    "emulated.response_mean_tokens=200",
    "emulated.dataset_size=64",
    "emulated.decode_base_s=0.05",
    "emulated.train_fixed_s=2",
    "queue.seal_age_s=2",
    "local.allow_oversubscribe=true",
]


def config(*overrides: str) -> RunConfig:
    """The base configuration with overrides."""
    return load_config(None, [*BASE, *overrides])


def simulate(*overrides: str, limit_s: float = 1e6, **kwargs: Any) -> SimulatedRun:
    """Run to the end."""
    run = SimulatedRun(config(*overrides), **kwargs)
    run.summary = run.run(limit_s=limit_s)  # type: ignore[attr-defined]
    return run


def verdicts(run: SimulatedRun) -> Counter[str]:
    """Verdicts along the ledger chain; asserts that no sample has two."""
    newest = newest_incarnation(run.disk, "ledger")
    assert newest is not None
    entries = read_chain(run.disk, "ledger", newest)
    uids = [entry["uid"] for entry in entries]
    assert len(uids) == len(set(uids)), "a sample has two verdicts"
    chain = newest_incarnation(run.disk, "accept")
    assert chain is not None
    accepted = {entry["uid"] for entry in read_chain(run.disk, "accept", chain)}
    trained = {entry["uid"] for entry in entries if entry["verdict"] == "trained"}
    assert trained <= accepted, f"trained but never accepted: {sorted(trained - accepted)}"
    return Counter(entry["verdict"] for entry in entries)


def events(run: SimulatedRun, kind: str, new: str | None = None) -> list[Any]:
    """Events of a kind."""
    return [e for e in run.log.of(kind) if new is None or e.new == new]
