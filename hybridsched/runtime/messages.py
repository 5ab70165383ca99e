"""Every message between controller, node agents and workers. `wire.py` turns them into bytes.

Typed msgspec structs, never pickles. Inside one process (simulation) envelopes are passed as objects and nothing is
copied. Names of endpoints: "controller",
"agent.<rank>", and worker ids ("standalone.0", "hybrid.0", "trainer.0").

Sample payload never passes through the controller: `Lease` carries a prompt once; partial responses go from worker to
worker (`Handoff`); finished samples go through segments.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from hybridsched.model import Response, SampleRow, SamplingParams, SegmentId, WeightVersion
from hybridsched.runtime.message_base import Failure as Failure
from hybridsched.runtime.message_base import Message as Message
from hybridsched.runtime.message_base import Ok as Ok
from hybridsched.runtime.messages_sync import AbortSync as AbortSync
from hybridsched.runtime.messages_sync import JoinGather as JoinGather
from hybridsched.runtime.messages_sync import OpenSync as OpenSync
from hybridsched.runtime.messages_sync import Probe as Probe
from hybridsched.runtime.messages_sync import ProbeResult as ProbeResult
from hybridsched.runtime.messages_sync import ReadHandover as ReadHandover
from hybridsched.runtime.messages_sync import ReceiveWeights as ReceiveWeights
from hybridsched.runtime.messages_sync import SendWeights as SendWeights
from hybridsched.runtime.messages_sync import SyncAddress as SyncAddress
from hybridsched.runtime.messages_sync import SyncDone as SyncDone
from hybridsched.runtime.messages_sync import WriteHandover as WriteHandover

# --- supervision -------------------------------------------------------------------------------------------------


class AgentUp(Message, frozen=True):
    """An agent listens. ``workers``: ids it is responsible for."""

    rank: int
    host: str
    pid: int
    workers: list[str]


class AgentBeat(Message, frozen=True):
    """An agent (or, from rank 0 to the agents, the controller) is alive."""

    rank: int
    phases: dict[str, str] = {}  #: worker id -> phase


class WorkerUp(Message, frozen=True):
    """A worker process connected to its agent and can be called."""

    worker: str
    incarnation: str
    pid: int


class WorkerExited(Message, frozen=True):
    """A worker process is gone. Its channel is drained before this is sent."""

    worker: str
    incarnation: str
    reason: str
    restarting: bool


class Beat(Message, frozen=True):
    """Worker to agent: what I do and how far I am. Judged by progress, not by the beat itself."""

    phase: str
    progress: int
    unfinished: dict[int, int] = {}  #: lease id -> unfinished responses (forwarded to the controller when changed)


class KillWorker(Message, frozen=True):
    """Controller to agent: end this worker (trainer group restart, a replica that does not acknowledge)."""

    worker: str
    reason: str


class Shutdown(Message, frozen=True):
    """Orderly end: workers leave, agents return."""

    reason: str


# --- rollout -----------------------------------------------------------------------------------------------------


class Lease(Message, frozen=True):
    """The right and the order to generate one sample. ``lease`` is unique per issue and move (its epoch)."""

    lease: int
    purpose: str
    sample_uid: int
    prompt_uid: str
    prompt_tokens: np.ndarray
    params: SamplingParams
    data_source: str = ""
    ground_truth: Any = None
    extra_info: dict[str, Any] = {}
    epoch: int = 0
    issue: int = 0
    retry: int = 0  #: how often responses with failed rewards were generated again
    partials: tuple[Response, ...] = ()


class Handoff(Message, frozen=True):
    """Controller to the worker that holds parked partials: continue at ``dst`` under a new lease."""

    old_lease: int
    lease: int
    dst: str


class DropParked(Message, frozen=True):
    """Forget parked partials (they are generated from the start again, or no longer wanted)."""

    leases: list[int]


class LeaseParked(Message, frozen=True):
    """An aborted lease waits on its worker, with what it has."""

    lease: int
    unfinished: int
    tokens: int


class LeaseLost(Message, frozen=True):
    """A handoff named a lease this worker does not hold."""

    lease: int
    new_lease: int


class LeaseFailed(Message, frozen=True):
    """Generation itself failed (engine error); the sample is issued again."""

    lease: int
    reason: str


class SampleCompleted(Message, frozen=True):
    """All responses generated and rewarded. ``verdict``: "" (goes to the queue), "filtered" or "failed"."""

    lease: int
    sample_uid: int
    verdict: str
    rewards: list[float | None]
    n_tokens: list[int]
    oldest: WeightVersion
    newest: WeightVersion
    reason: str = ""
    generation_s: float = 0.0
    reprefill_tokens: int = 0
    version_span: int = 0
    decode: dict[int, tuple[float, float, float, float]] = {}  #: of the replica since it last told (workers/meter.py)


class SegmentSealed(Message, frozen=True):
    """Rows are durable."""

    segment: SegmentId
    rows: tuple[SampleRow, ...]
    n_bytes: int
    reason: str


class SpaceReport(Message, frozen=True):
    """The disk is full (or has room again); finished samples wait in memory."""

    blocked: bool
    text: str
    pending: int


class AbortLeases(Message, frozen=True):
    """Abort leases (None: all of this worker). Replied to after every LeaseParked was sent."""

    leases: list[int] | None = None
    drain_s: float = 0.0  #: > 0: let them finish for so long first (partial_rollout: False)
    discard: bool = False  #: partials are dropped, the samples start again


class PauseGeneration(Message, frozen=True):
    """Stop stepping (weight sync). mode: abort, keep or wait."""

    mode: str
    drain_s: float = 0.0
    discard: bool = False


class ResumeGeneration(Message, frozen=True):
    """Step again."""


class Flush(Message, frozen=True):
    """Seal what is finished now."""

    reason: str


class StartEngine(Message, frozen=True):
    """Load the model."""


class SleepEngine(Message, frozen=True):
    """Free weights and KV cache; replied with measured memory."""


class WakeEngine(Message, frozen=True):
    """stage: weights or kv."""

    stage: str


class MemoryReport(Message, frozen=True):
    """What an engine or trainer holds after a transition."""

    weights_bytes: int
    kv_bytes: int
    rss_bytes: int
    freed_bytes: int = 0


# --- trainer -----------------------------------------------------------------------------------------------------


class OpenRendezvous(Message, frozen=True):
    """To trainer.0: bind the group's store."""


class Rendezvous(Message, frozen=True):
    """host:port of the group's store."""

    address: str


class StartTrainer(Message, frozen=True):
    """Join the group; ``checkpoint``: restore from there."""

    rank: int
    world_size: int
    rendezvous: str
    checkpoint: str | None = None


class LoadCollection(Message, frozen=True):
    """Read these rows (mini-batches of (segment, rows in order)); two-phase so that damage breaks no collective."""

    collection_id: int
    mini_batches: list[list[tuple[SegmentId, int]]]


class CollectionLoaded(Message, frozen=True):
    """``damaged``: segments that could not be read, with reasons."""

    damaged: list[tuple[SegmentId, str]]
    seconds: float


class TrainCollection(Message, frozen=True):
    """Train on the loaded collection."""

    collection_id: int
    version: WeightVersion
    collection: int


class Trained(Message, frozen=True):
    """Reduced metrics and timings of one collection."""

    metrics: dict[str, float]
    timing_s: dict[str, float]
    n_tokens: int
    lag_kl: dict[int, float] = {}


class BeginCycle(Message, frozen=True):
    """Weights were synced as this version."""

    version: WeightVersion


class OffloadTrainer(Message, frozen=True):
    """Make room for hybrids."""

    keep_parameters: bool


class OnloadTrainer(Message, frozen=True):
    """Take the GPU back."""


class SaveCheckpoint(Message, frozen=True):
    """Write this rank's part into a folder."""

    folder: str


# --- rewards -----------------------------------------------------------------------------------------------------


class RewardRequest(Message, frozen=True):
    """Worker to its agent (forwarded to a reward process): score these responses."""

    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    responses: list[np.ndarray]


class RewardReply(Message, frozen=True):
    """One (reward, failure) per response."""

    rewards: list[tuple[float | None, str | None]]


AnyMessage = Message


class Envelope(msgspec.Struct, frozen=True):
    """One message on its way. call 0: no reply expected; reply True: answers that call of the other side.

    serial: number of the message from this life of ``src`` to ``dst`` (runtime/once.py); 0: not numbered.
    """

    src: str
    dst: str
    call: int
    reply: bool
    body: Message
    serial: int = 0
