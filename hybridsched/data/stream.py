"""From files to the endless, seeded stream of prompts a run draws from.

Owns: tokenizing once, the length policy, and the order of prompts.
Invariants: ``stream[position]`` is a pure function of (prompts, shuffle, seed, position): no state moves, so resuming
is just asking for the same positions again; each epoch holds every prompt exactly once; the order does not depend on
the platform or the numpy release (it is made from raw generator bits, which numpy promises to keep, not from
``Generator.permutation``, which it does not).
Does not: remember what was issued (the controller's frontier does) or read files (see ``prompts``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Literal, overload

import numpy as np
import numpy.typing as npt
import xxhash

from hybridsched.config.schema import DataConfig
from hybridsched.data.prompts import LoadReport, MalformedRow, PromptRow, load_rows
from hybridsched.data.tokenizer import Tokenizer
from hybridsched.errors import DataError
from hybridsched.model import Prompt, TokenArray

_KEPT_EPOCHS = 2  #: permutations kept: the current epoch, and its neighbour while leases straddle the border


class PromptSet(Sequence[Prompt]):
    """The prompts of one split, tokenized and of admissible length, in file order."""

    def __init__(self, prompts: Sequence[Prompt], report: LoadReport, n_filtered: int = 0, n_truncated: int = 0):
        """`n_filtered` and `n_truncated`: how many prompts the length policy dropped and cut."""
        self._prompts = tuple(prompts)
        self.report = report
        self.n_filtered = n_filtered
        self.n_truncated = n_truncated

    @classmethod
    def build(cls, config: DataConfig, tokenizer: Tokenizer, split: Literal["train", "val"] = "train") -> PromptSet:
        """Load, tokenize and measure the prompts of ``config.train_files`` (or ``val_files``).

        A row that the chat template refuses, or that has no tokens, counts as malformed. Raises DataError as
        ``load_rows`` does, for chat messages without a chat template, for a prompt that is too long under
        ``truncation: error``, and when the length filter leaves nothing.
        """
        files = config.train_files if split == "train" else config.val_files
        rows, report = load_rows(files, config.prompt_key, config.reward_fn_key, config.max_malformed_fraction)
        tokenized, malformed = _tokenize(rows, tokenizer, config)
        report = report.with_malformed(malformed)
        report.require(config.max_malformed_fraction)
        prompts: list[Prompt] = []
        n_long = 0
        for row, ids in tokenized:
            if len(ids) > config.max_prompt_length:
                n_long += 1
                if config.filter_overlong_prompts:
                    continue
                if config.truncation == "error":
                    raise _too_long(row, ids, tokenized, config)
                ids = _cut(ids, config.max_prompt_length, config.truncation)
            prompts.append(Prompt(row.prompt_uid, _frozen(ids), row.data_source, row.ground_truth, row.extra_info))
        if not prompts:
            raise DataError(
                f"no prompt left in {', '.join(report.files)}: all {n_long} are longer than data.max_prompt_length = "
                f"{config.max_prompt_length} tokens (filter_overlong_prompts). Raise data.max_prompt_length."
            )
        filtering = config.filter_overlong_prompts
        return cls(prompts, report, n_long if filtering else 0, 0 if filtering else n_long)

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        return self._prompts[index]

    @property
    def fingerprint(self) -> str:
        """16 hex digits over uids and tokens in order: two sets with the same one give the same stream."""
        digest = xxhash.xxh3_64()
        for prompt in self._prompts:
            digest.update(f"{prompt.prompt_uid}\0{prompt.tokens.shape[0]}\0".encode())
            digest.update(prompt.tokens.tobytes())
        return digest.hexdigest()

    def summary(self) -> str:
        """For the log: counts, lengths, what was dropped and cut."""
        lengths = [p.tokens.shape[0] for p in self._prompts]
        line = f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens"
        if self.n_filtered:
            line += f", {self.n_filtered} too long and filtered"
        if self.n_truncated:
            line += f", {self.n_truncated} too long and truncated"
        return f"{line}; {self.report.summary()}"


class _Prompts(Sequence[Prompt]):
    """A sequence whose items are made by `_at`; a slice is a list of them."""

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        if isinstance(index, slice):
            return [self._at(i) for i in range(*index.indices(len(self)))]
        return self._at(index)

    @abstractmethod
    def _at(self, index: int) -> Prompt:
        """Raises IndexError outside."""


class PromptStream(_Prompts):
    """``stream[position]``: the prompt of sample `position`, counted over all epochs."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        shuffle: bool = True,
        seed: int = 0,
        total_epochs: int = 1,
        limit: int | None = None,
    ) -> None:
        """`limit`: end the stream after that many samples, if the epochs do not end it earlier."""
        if total_epochs < 0 or (limit is not None and limit < 0):
            raise DataError(f"total_epochs ({total_epochs}) and the limit of samples ({limit}) cannot be negative.")
        self._prompts = prompts
        self._n = len(prompts)
        self._shuffle = shuffle
        self._seed = seed
        everything = self._n * total_epochs
        self._length = everything if limit is None else min(everything, limit)
        self._orders: OrderedDict[int, npt.NDArray[np.int64]] = OrderedDict()

    def __len__(self) -> int:
        return self._length

    def _at(self, index: int) -> Prompt:
        return self._prompts[self.index_of(index)]

    def __iter__(self) -> Iterator[Prompt]:
        return (self[position] for position in range(self._length))

    def epoch_of(self, position: int) -> int:
        """Pass over the data set (from 0) that `position` belongs to. Raises IndexError outside the stream."""
        return self._checked(position) // self._n

    def index_of(self, position: int) -> int:
        """Index within the prompt set of the prompt at `position`. Raises IndexError outside the stream."""
        epoch, offset = divmod(self._checked(position), self._n)
        return int(self._order(epoch)[offset]) if self._shuffle else offset

    def _checked(self, position: int) -> int:
        # Negative positions are refused: "the last sample" is never what a frontier means.
        if not 0 <= position < self._length:
            raise IndexError(f"position {position} is outside the prompt stream of {self._length} samples")
        return position

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        order = self._orders.get(epoch)
        if order is None:
            order = stable_permutation(self._n, self._seed, epoch)
            self._orders[epoch] = order
            if len(self._orders) > _KEPT_EPOCHS:
                self._orders.popitem(last=False)
        else:
            self._orders.move_to_end(epoch)
        return order


class SyntheticPrompts(_Prompts):
    """`n` prompts of one length that exist only when asked for; all share one token array. No text behind them."""

    def __init__(self, n: int, length: int) -> None:
        """`length` in tokens, all zeros."""
        if n < 0 or length < 1:
            raise DataError(f"synthetic prompts need a count >= 0 and a length >= 1, not {n} and {length}.")
        self._n = n
        self._tokens = _frozen([0] * length)

    def __len__(self) -> int:
        return self._n

    def _at(self, index: int) -> Prompt:
        if not 0 <= index < self._n:
            raise IndexError(f"prompt {index} is outside the {self._n} synthetic prompts")
        return Prompt(f"synthetic/{index}", self._tokens, "synthetic")

    @property
    def fingerprint(self) -> str:
        """As in PromptSet."""
        return xxhash.xxh3_64_hexdigest(f"synthetic\0{self._n}\0{self._tokens.shape[0]}".encode())


def synthetic_prompts(n: int, length: int) -> SyntheticPrompts:
    """Prompts for the emulated engine: `n` of `length` tokens, uids ``synthetic/0``, ..., made on demand."""
    return SyntheticPrompts(n, length)


def stable_permutation(n: int, *entropy: int) -> npt.NDArray[np.int64]:
    """A permutation of range(n), int64 [n], that depends only on `n` and `entropy`, on every platform and release."""
    words = [value % 2**64 for value in entropy]  # SeedSequence takes no negative numbers
    keys = np.random.PCG64(np.random.SeedSequence(words)).random_raw(n)
    return np.argsort(np.asarray(keys, dtype=np.uint64), kind="stable")


def _tokenize(
    rows: Sequence[PromptRow], tokenizer: Tokenizer, config: DataConfig
) -> tuple[list[tuple[PromptRow, list[int]]], list[MalformedRow]]:
    # Causes that lie with the tokenizer or the configuration are raised at once, not counted row by row.
    tokenizer.check_template_variables(config.apply_chat_template_kwargs)
    if any(not isinstance(row.prompt, str) for row in rows):
        tokenizer.require_chat_template()
    tokenized: list[tuple[PromptRow, list[int]]] = []
    malformed: list[MalformedRow] = []
    for row in rows:
        try:
            ids = tokenizer.encode_prompt(row.prompt, **config.apply_chat_template_kwargs)
            reason = "" if ids else "the prompt has no tokens"
        except DataError as error:
            reason = str(error)
        if reason:
            file, _, number = row.origin.rpartition(":")
            malformed.append(MalformedRow(file, int(number), reason))
        else:
            tokenized.append((row, ids))
    return tokenized, malformed


def _too_long(
    row: PromptRow, ids: list[int], tokenized: Sequence[tuple[PromptRow, list[int]]], config: DataConfig
) -> DataError:
    lengths = [len(other) for _, other in tokenized]
    n_long = sum(length > config.max_prompt_length for length in lengths)
    return DataError(
        f"{row.origin}: the prompt has {len(ids)} tokens, data.max_prompt_length is {config.max_prompt_length} "
        f"({n_long} of {len(lengths)} prompts are too long, the longest has {max(lengths)} tokens). Raise "
        "data.max_prompt_length, set data.filter_overlong_prompts: true, or data.truncation: left, right or middle."
    )


def _cut(ids: list[int], length: int, side: Literal["error", "left", "right", "middle"]) -> list[int]:
    """`length` of the tokens: left drops from the start, right from the end, middle keeps both ends."""
    if side == "left":
        return ids[-length:]
    if side == "right":
        return ids[:length]
    head = length // 2
    return ids[:head] + ids[len(ids) - (length - head) :]


def _frozen(ids: Sequence[int]) -> TokenArray:
    # Prompts are shared by everyone who asks; nobody may write into them.
    tokens = np.array(ids, dtype=np.int32)
    tokens.flags.writeable = False
    return tokens
