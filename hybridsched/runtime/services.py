"""Everything the controller is handed: clock, logs, stores, prompts, policy. Real ones and simulated ones fit alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hybridsched.config.derived import Derived
from hybridsched.config.schema import RunConfig
from hybridsched.model import Prompt
from hybridsched.runlog.base import EventSink
from hybridsched.runtime.checkpoints import CheckpointStore, LogPosition
from hybridsched.runtime.clock import Clock
from hybridsched.runtime.endpoint import Endpoint
from hybridsched.runtime.flights import Prompts
from hybridsched.runtime.plan import RunPlan
from hybridsched.sample_queue.base import ChainedLog, SegmentStore
from hybridsched.scheduling.policy import DynamicSchedulePolicyBase


class StopFlag(Protocol):
    """Set by signal handlers: "" (go on), "stop" (Ctrl-C), "requeue" (time limit, preemption)."""

    @property
    def kind(self) -> str: ...


@dataclass(frozen=True, slots=True)
class ChainSources:
    """How to open the accept log and the ledger for one incarnation of the controller."""

    open: Callable[[str, str, LogPosition | None], ChainedLog]  #: (log name, incarnation, parent) -> log
    new_incarnation: Callable[[], str]
    read: Callable[[str, str], list[dict[str, Any]]]  #: (log name, incarnation) -> entries of its whole chain


@dataclass(frozen=True, slots=True)
class Services:
    """Handed in by `build.py` (real) or `simulation/run.py` (virtual)."""

    config: RunConfig
    derived: Derived
    plan: RunPlan
    run_id: str
    endpoint: Endpoint
    clock: Clock
    log: EventSink
    offload: Callable[..., Awaitable[Any]]
    store: SegmentStore
    chains: ChainSources
    checkpoints: CheckpointStore
    prompts: Prompts
    validation_prompts: Sequence[Prompt]
    stop_token_ids: tuple[int, ...]
    policy: DynamicSchedulePolicyBase
    stop: StopFlag
    check_owner: Callable[[], None]  #: raises OwnershipLost
    on_status: Callable[[dict[str, Any]], None]  #: live progress for people
    beat_s: float = 1.0
    audit: Callable[[], None] | None = None  #: called after every step of the controller (simulation tests)
