"""What a generation engine is. One instance per replica (and, for tensor parallel engines, per worker group).

All methods are coroutines on the worker's event loop. An engine never talks to the control plane: it is handed work
and weights, and counts its progress. Order of life of a hybrid: start -> sleep -> (wake_weights -> begin_update ->
load_bucket* -> finish_update -> wake_kv -> resume -> generate* -> abort -> sleep)*.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hybridsched.model import Response, SamplingParams, TensorSpec, TokenArray, WeightVersion

PauseMode = Literal["abort", "keep", "wait"]


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """The n responses of one lease, generated together (the prompt is prefilled once).

    ``partials[i]`` is what response i already has: ``Response.empty()`` at first, a finished response is returned as
    it is, an aborted one is continued with the remaining budget (max_new_tokens - n_tokens).
    ``response_offset``: index of partials[0] within the sample (draws depend on it).
    """

    key: str  #: unique among running groups, e.g. "train:17:3" (purpose, sample_uid, lease epoch)
    sample_uid: int
    prompt_tokens: TokenArray
    params: SamplingParams
    partials: tuple[Response, ...]
    response_offset: int = 0


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes the engine holds: weights and KV cache mapped, as measured."""

    weights_bytes: int
    kv_bytes: int


class GenerationEngine(ABC):
    """One replica's engine."""

    name: str = "base"

    @abstractmethod
    async def start(self) -> None:
        """Load the model; ready to generate with the weights of the model folder."""

    @abstractmethod
    async def shutdown(self) -> None:
        """Release everything. Idempotent."""

    @abstractmethod
    async def generate(self, group: GroupRequest) -> tuple[Response, ...]:
        """Generate until every response is finished or the group is aborted.

        Returns one Response per partial, in order, *including* the tokens and version_runs of the partial; finish is
        ABORTED for the unfinished ones. While paused, new groups are accepted and held.
        """

    @abstractmethod
    async def abort(self, keys: Sequence[str] | None = None) -> None:
        """End the named groups (None: all); their generate() calls return partials before this returns."""

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Stop stepping. abort: running groups return partials; keep: they stay; wait: they finish first.

        Returns only after acknowledged quiescence.
        """

    @abstractmethod
    async def resume(self) -> None:
        """Step again. Raises if weights or KV cache are not resident."""

    @abstractmethod
    async def sleep(self) -> None:
        """Level 2: free weights and KV cache for real. Nothing may be running (abort first)."""

    @abstractmethod
    async def wake_weights(self) -> None:
        """Allocate weights, filled with NaN so that a missed refill cannot pass unseen."""

    @abstractmethod
    async def wake_kv(self) -> None:
        """Allocate the KV cache. Raises unless weights have been refilled (finish_update) since the wake."""

    @abstractmethod
    async def begin_update(self, specs: Sequence[TensorSpec]) -> None:
        """A weight update begins; the engine is paused. Raises with the difference if specs do not fit the model."""

    @abstractmethod
    async def load_bucket(self, tensors: Mapping[str, Any]) -> None:
        """Take complete named tensors (torch.Tensor, Hugging Face names). The caller may reuse the memory after."""

    def destination(self, name: str) -> Any:
        """During an update: the tensor that a large tensor of that name may be received into, without load_bucket.

        Contiguous, of the announced shape and dtype, on the device the group uses. None: hand it to load_bucket. May
        be called from another thread between begin_update and finish_update; what is asked for counts as arriving.
        """
        return None

    @abstractmethod
    async def finish_update(self, version: WeightVersion, *, keep_kv: bool = False) -> None:
        """All tensors are there: raises if one is missing. Tokens sampled from now on carry ``version``.

        keep_kv False: prefix cache and the KV of kept groups are dropped and recomputed on resume.
        """

    @abstractmethod
    async def logprobs(self, sequences: Sequence[tuple[TokenArray, TokenArray]], temperature: float) -> list[Any]:
        """Teacher-force (prompt, response) pairs: float32 [T] log-probs of the response tokens each (truth test)."""

    @abstractmethod
    def memory(self) -> EngineMemory:
        """What is mapped now."""

    @property
    @abstractmethod
    def version(self) -> WeightVersion:
        """Version of the resident weights."""

    @property
    @abstractmethod
    def progress(self) -> int:
        """Tokens sampled or prefilled so far; grows while the engine is alive and has work."""

    @abstractmethod
    def unfinished(self, key: str) -> int:
        """Unfinished responses of a running group (0 when unknown)."""

    @abstractmethod
    def running_sequences(self) -> int:
        """Sequences now in the batch (utilization)."""
