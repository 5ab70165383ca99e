"""Weights into and out of a Megatron model: a Hugging Face folder to this rank's pieces, and back as whole tensors.

Owns the order of the collectives: `gather` runs through `models.megatron_layout.entries`, the same on every rank, one
parameter after the other, and finishes that walk also when its caller stops early, so that collectives of different
syncs never interleave. Never holds more than one whole parameter (and its pieces) beside the model.

Does not: send anything to engines, or write files (megatron_checkpoint.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from hybridsched.errors import InternalError
from hybridsched.model import TensorSpec
from hybridsched.models import hf_folder
from hybridsched.models import megatron_layout as layout
from hybridsched.models.config import ModelConfig, weight_shapes
from hybridsched.trainers.megatron_groups import MegatronGroups


class WeightMap:
    """Which parameter of this rank's model is which part of the Hugging Face model.

    ``model``: the bare GPTModel of this rank. Raises InternalError when a parameter has no counterpart, in either
    direction: a Megatron version that names things differently is noticed at the start.
    """

    def __init__(self, model: nn.Module, config: ModelConfig, groups: MegatronGroups) -> None:
        self.config = config
        self._groups = groups
        self._entries = list(layout.entries(config))
        self._shapes = weight_shapes(config)
        parameters = dict(model.named_parameters())
        self._dtype = next(iter(parameters.values())).dtype
        self._device = next(iter(parameters.values())).device
        self._held: dict[int, nn.Parameter] = {}
        present = frozenset(parameters)
        for index, entry in enumerate(self._entries):
            if self._owner(entry) == (groups.stage, groups.ep_rank if entry.expert is not None else 0):
                name = self._name(entry, present)
                self._held[index] = parameters.pop(name)
        self._tied_copy = self._take_tied_copy(parameters)
        if parameters:
            raise InternalError(
                f"Megatron's model has parameters the conversion table does not know: {', '.join(sorted(parameters))}"
            )

    def _name(self, entry: layout.Entry, present: frozenset[str]) -> str:
        try:
            return layout.local_name(entry, self.config, self._groups.pp, self._groups.ep, present)
        except KeyError as error:
            raise InternalError(
                f"Megatron's model has no {error.args[0]}, which should hold {', '.join(entry.hf)}; is this version of "
                "megatron-core one the conversion table knows (see setup.cfg)?"
            ) from error

    def _owner(self, entry: layout.Entry) -> tuple[int, int]:
        """(pipeline stage, expert-parallel rank; 0 outside experts)."""
        rank = 0 if entry.expert is None else layout.expert_place(entry, self.config, self._groups.ep)[0]
        return layout.stage_of(entry, self.config, self._groups.pp), rank

    def _take_tied_copy(self, parameters: dict[str, nn.Parameter]) -> nn.Parameter | None:
        """A tied head on a last stage that is not the first holds its own copy of the embedding."""
        if self.config.tie_word_embeddings and self._groups.pp > 1 and self._groups.last_stage:
            return parameters.pop("output_layer.weight", None)
        return None

    # -- in -----------------------------------------------------------------------------------------------------------

    def load(self, folder: Path) -> None:
        """Fill this rank's parameters from a Hugging Face folder, one at a time. Raises DataError as `hf_folder` does.

        Not collective: each rank reads what it holds.
        """
        with hf_folder.TensorReader(folder, self._shapes) as reader, torch.no_grad():
            for index, parameter in self._held.items():
                self._fill(parameter, index, reader)
            if self._tied_copy is not None:
                self._fill(self._tied_copy, 0, reader)

    def _fill(self, parameter: nn.Parameter, index: int, reader: hf_folder.TensorReader) -> None:
        entry = self._entries[index]
        tensors = [reader.read(name) for name in entry.hf]
        whole = layout.fuse(entry, tensors, self.config, self._groups.tp)
        rank, size = self._piece_of(entry)
        piece = layout.shard(entry, whole, rank, size)
        if piece.shape != parameter.shape:
            raise InternalError(
                f"{', '.join(entry.hf)}: this rank's piece has shape {tuple(piece.shape)}, Megatron's parameter "
                f"{tuple(parameter.shape)}"
            )
        parameter.copy_(piece)

    def _piece_of(self, entry: layout.Entry) -> tuple[int, int]:
        """(this rank's place, places) among the ranks that share the parameter out."""
        groups = self._groups
        return (groups.tp_rank, groups.tp) if entry.expert is None else (groups.etp_rank, groups.etp)

    # -- out ----------------------------------------------------------------------------------------------------------

    def specs(self) -> list[TensorSpec]:
        """Names, shapes and dtypes of what `gather` yields, in its order."""
        dtype = hf_folder.dtype_name(self._dtype)
        return [TensorSpec(name, self._shapes[name], dtype) for name in layout.hf_names(self.config)]

    def gather(self, tick: Callable[[], None] = lambda: None) -> GatherWalk:
        """(Hugging Face name, whole tensor), on every rank. Collective where a rank does not hold everything.

        ``tick`` is called once per parameter. A tensor is valid until the next one is asked for.
        """
        return GatherWalk(self, tick)

    def __len__(self) -> int:
        """Parameters of the whole model."""
        return len(self._entries)

    @property
    def gathers(self) -> bool:
        """Whether `gather` is collective."""
        return self._groups.gathers

    def parts_of(self, index: int) -> list[tuple[str, Tensor]]:
        """The Hugging Face tensors of one parameter, on every rank. Collective."""
        entry = self._entries[index]
        return list(zip(entry.hf, layout.split(entry, self.whole(index), self.config), strict=True))

    def whole(self, index: int) -> Tensor:
        """One parameter, whole, on every rank: pieces first, then experts, then along the pipeline. Collective."""
        entry = self._entries[index]
        groups = self._groups
        stage, expert_rank = self._owner(entry)
        held = self._held.get(index)
        with torch.no_grad():
            if held is not None:
                pieces = groups.gather_pieces(held.detach().contiguous(), expert=entry.expert is not None)
                whole = layout.unshard(entry, pieces).contiguous()
            else:
                shape = layout.whole_shape(entry, self.config, self._shapes, groups.tp)
                whole = torch.empty(shape, dtype=self._dtype, device=self._device)
            if entry.expert is not None and groups.stage == stage:
                groups.share_expert(whole, expert_rank)
            groups.share_stage(whole, stage)
        return whole


class GatherWalk(Iterator[tuple[str, Tensor]]):
    """One run through all parameters. ``close`` finishes it without results, also when it has not begun: other ranks
    take part in every step of it and would wait. After a failed step nothing more is tried: the group is broken."""

    def __init__(self, weights: WeightMap, tick: Callable[[], None]) -> None:
        self._weights = weights
        self._tick = tick
        self._next = 0
        self._ready: list[tuple[str, Tensor]] = []

    def __next__(self) -> tuple[str, Tensor]:
        if not self._ready:
            if self._next == len(self._weights):
                raise StopIteration
            index, self._next = self._next, len(self._weights)
            self._ready = self._weights.parts_of(index)[::-1]
            self._next = index + 1
            self._tick()
        return self._ready.pop()

    def close(self) -> None:
        """Take part in the rest. Idempotent."""
        self._ready.clear()
        remaining, self._next = range(self._next, len(self._weights)), len(self._weights)
        for index in remaining if self._weights.gathers else ():
            self._weights.whole(index)
            self._tick()
