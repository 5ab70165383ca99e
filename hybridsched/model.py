"""Frozen dataclasses and enums everyone shares: the glossary of DESIGN.md as types.

No I/O, no third-party import but numpy (token arrays), no behaviour beyond small derived values.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]
LogprobArray = npt.NDArray[np.float32]


class WeightVersion(NamedTuple):
    """``(lineage, number)``: number counts weight syncs; a rollback or resume opens a new lineage at its fork."""

    lineage: int
    number: int

    def __str__(self) -> str:
        return f"{self.lineage}.{self.number}"


class VersionRun(NamedTuple):
    """Tokens ``[start, end)`` of one response were sampled under ``version`` (``kept_kv``: on KV of an older one)."""

    version: WeightVersion
    start: int
    end: int
    kept_kv: bool = False


class FinishReason(enum.Enum):
    """Why a response ended."""

    STOP = "stop"  #: end-of-sequence token
    LENGTH = "length"  #: the response budget is used up
    ABORTED = "aborted"  #: interrupted; a partial response, to be continued


class ReplicaKind(enum.Enum):
    """Which GPUs a replica sits on."""

    STANDALONE = "standalone"  #: rollout node, always generating
    HYBRID = "hybrid"  #: trainer node, generates only while lent


class Tenant(enum.Enum):
    """Who may use a trainer GPU."""

    TRAINER = "trainer"
    HANDOVER = "handover"
    HYBRID = "hybrid"


class Verdict(enum.Enum):
    """What became of a sample. Every sample gets exactly one along the ledger chain."""

    TRAINED = "trained"
    STALE = "stale"
    FILTERED = "filtered"
    FAILED = "failed"
    SURPLUS = "surplus"


class Purpose(enum.Enum):
    """What a sample is generated for. Validation is outside window, queue and counts."""

    TRAIN = "train"
    VALIDATION = "validation"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One item of the data set, tokenized once by the controller.

    ``prompt_uid`` is stable across runs (row id in the file, or a hash of the row);
    ``tokens`` is int32, already through the chat template and the length policy.
    """

    prompt_uid: str
    tokens: TokenArray
    data_source: str = ""
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the responses of a sample are drawn. ``seed`` is the run seed.

    The draw at response position ``p`` of response ``i`` depends on (seed, sample_uid, i, p) only,
    so routing, aborting and continuing elsewhere do not change it.
    """

    n: int = 1
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Response:
    """One generated continuation, complete or partial.

    token_ids: int32 [T]; logprobs: float32 [T], log-probability of each sampled token under the sampling
    distribution (temperature applied); response_mask: uint8 [T], 1 where the token was sampled by the policy.
    """

    token_ids: TokenArray
    logprobs: LogprobArray
    version_runs: tuple[VersionRun, ...]
    finish: FinishReason
    response_mask: npt.NDArray[np.uint8] | None = None  #: None = all ones
    reward: float | None = None  #: None = not scored (yet) or failed
    failure: str | None = None  #: why the reward or the generation failed
    t_start: float = 0.0  #: wall clock, seconds since the epoch
    t_end: float = 0.0

    @property
    def n_tokens(self) -> int:
        """Length in tokens."""
        return int(self.token_ids.shape[0])

    @property
    def finished(self) -> bool:
        """True when nothing is left to generate."""
        return self.finish is not FinishReason.ABORTED

    @staticmethod
    def empty() -> Response:
        """A response not yet begun (zero tokens, to be continued)."""
        return Response(np.empty(0, np.int32), np.empty(0, np.float32), (), FinishReason.ABORTED)

    def with_reward(self, reward: float | None, failure: str | None = None) -> Response:
        """The same response, scored."""
        return replace(self, reward=reward, failure=failure)


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt with its n responses: the unit that is leased, queued, counted and trained on.

    ``sample_uid`` is the position in the run's endless prompt stream (0, 1, 2, ... over all epochs);
    validation samples count from 0 in their own stream.
    """

    sample_uid: int
    prompt_uid: str
    prompt_tokens: TokenArray
    responses: tuple[Response, ...]
    data_source: str = ""
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    epoch: int = 0  #: pass over the data set
    issue: int = 0  #: how often this sample was issued before (re-issue after a death)

    @property
    def valid_responses(self) -> tuple[Response, ...]:
        """Responses that have a reward."""
        return tuple(r for r in self.responses if r.reward is not None)

    @property
    def n_response_tokens(self) -> int:
        """Tokens of all responses together."""
        return sum(r.n_tokens for r in self.responses)

    @property
    def n_tokens(self) -> int:
        """Prompt plus response tokens as the trainer sees them (the prompt counts once per response)."""
        return self.n_response_tokens + len(self.responses) * int(self.prompt_tokens.shape[0])

    def oldest_version(self) -> WeightVersion | None:
        """The version of the oldest token, None when there is no token."""
        runs = [run.version for r in self.responses for run in r.version_runs]
        return min(runs, key=lambda v: (v.lineage, v.number)) if runs else None


class SegmentId(NamedTuple):
    """Name of one sealed file of the queue; never reused. ``incarnation`` identifies one start of the producer."""

    producer: str
    incarnation: str
    seq: int

    def __str__(self) -> str:
        return f"{self.producer}/{self.incarnation}-{self.seq:08d}"


class RowRef(NamedTuple):
    """One sample inside a sealed segment."""

    segment: SegmentId
    row: int


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What the controller knows of a durable sample without its tokens."""

    sample_uid: int
    prompt_uid: str
    ref: RowRef
    n_tokens: int  #: prompt + response tokens as the trainer sees them
    oldest: WeightVersion
    newest: WeightVersion
    reward_mean: float
    n_valid: int  #: responses with a reward


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One named tensor in Hugging Face naming. dtype is torch's name without prefix, e.g. "float32"."""

    name: str
    shape: tuple[int, ...]
    dtype: str
