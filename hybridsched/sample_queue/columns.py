"""Samples to flat columns and back. Pure numpy: no files, no HDF5.

Invariants
    ``decode(encode(samples)) == samples`` field by field, with two canonical forms: an all-ones response mask reads
    back as None, a NaN reward as None. Metadata must be JSON (numpy scalars and arrays become numbers and lists).
    Token arrays of decoded samples are slices of one array per column: nothing is done per token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridsched.errors import QueueError
from hybridsched.model import Response, RowRef, Sample, SampleRow, SegmentId, VersionRun, WeightVersion
from hybridsched.sample_queue.files import json_bytes
from hybridsched.sample_queue.layout import COLUMNS, FINISH_CODES, GROUPS

Array = npt.NDArray[Any]
Pieces = dict[str, list[Array]]  #: column name -> arrays to be written one after another
Columns = Mapping[str, Array]

NO_VERSION = WeightVersion(-1, -1)  #: stands for "no token" where a version is required

_DTYPES = {column.name: np.dtype(column.dtype) for column in COLUMNS}
_shared_ones: Array = np.ones(0, np.uint8)
_TABLES = {
    group: [column.name for column in COLUMNS if column.group == group] for group in ("samples", "responses", "runs")
}


def encode(samples: Sequence[Sample]) -> Pieces:
    """Columns of ``samples``; token arrays are referenced, not copied. QueueError names what cannot be stored."""
    rows: dict[str, list[tuple[Any, ...]]] = {group: [] for group in _TABLES}
    pieces: Pieces = {name: [] for name in _DTYPES}
    with_masks = any(response.response_mask is not None for sample in samples for response in sample.responses)
    for position, sample in enumerate(samples):
        meta = _meta_bytes(sample)
        prompt = np.ascontiguousarray(sample.prompt_tokens, np.int32)
        rows["samples"].append(
            (sample.sample_uid, sample.epoch, sample.issue, prompt.size, len(sample.responses), len(meta))
        )
        pieces["prompt_tokens/id"].append(prompt)
        pieces["meta/json"].append(np.frombuffer(meta, np.uint8))
        for response in sample.responses:
            n_tokens, n_masked = _add_response(pieces, sample, response, with_masks)
            row = len(rows["responses"])
            rows["runs"] += [(row, *version, start, end, kept) for version, start, end, kept in response.version_runs]
            rows["responses"].append(_response_row(position, response, n_tokens, n_masked))
    if not with_masks:  # the usual case: one block of ones for all
        pieces["tokens/mask"] = [_ones(sum(map(len, pieces["tokens/id"])))]
    for group, names in _TABLES.items():
        values_by_name = zip(*rows[group], strict=True) if rows[group] else [()] * len(names)
        for name, values in zip(names, values_by_name, strict=True):
            pieces[name].append(np.array(values, _DTYPES[name]))
    return pieces


def _ones(n: int) -> Array:
    """A read-only block of ``n`` ones; all callers share one, as long as the longest asked for."""
    global _shared_ones
    if _shared_ones.size < n:
        _shared_ones = np.ones(n, np.uint8)
        _shared_ones.flags.writeable = False
    return _shared_ones[:n]


def _add_response(pieces: Pieces, sample: Sample, response: Response, with_masks: bool) -> tuple[int, int]:
    """Append a response's token arrays; returns the number of tokens and how many of them are masked."""
    ids = np.ascontiguousarray(response.token_ids, np.int32)
    logprobs = np.ascontiguousarray(response.logprobs, np.float32)
    mask = response.response_mask
    if ids.ndim != 1 or logprobs.shape != ids.shape or (mask is not None and mask.shape != ids.shape):
        raise QueueError(
            f"sample {sample.sample_uid} (prompt {sample.prompt_uid!r}): a response has token_ids {ids.shape}, "
            f"logprobs {logprobs.shape}, response_mask {None if mask is None else mask.shape}; all must be [T]. "
            "The engine that made it is at fault."
        )
    pieces["tokens/id"].append(ids)
    pieces["tokens/logprob"].append(logprobs)
    n_masked = 0
    if with_masks:
        stored = np.ones(ids.size, np.uint8) if mask is None else np.ascontiguousarray(mask, np.uint8)
        pieces["tokens/mask"].append(stored)
        n_masked = int(ids.size - np.count_nonzero(stored))
    return ids.size, n_masked


def _response_row(position: int, response: Response, n_tokens: int, n_masked: int) -> tuple[Any, ...]:
    runs = response.version_runs
    if len(runs) == 1:
        oldest = newest = runs[0].version
    else:
        oldest = min((run.version for run in runs), default=NO_VERSION)
        newest = max((run.version for run in runs), default=NO_VERSION)
    return (
        position,
        n_tokens,
        n_masked,
        len(runs),
        math.nan if response.reward is None else response.reward,
        FINISH_CODES.index(response.finish),
        *oldest,
        *newest,
        response.t_start,
        response.t_end,
    )


def _meta_bytes(sample: Sample) -> bytes:
    meta: dict[str, Any] = {"prompt_uid": sample.prompt_uid}
    if sample.data_source:
        meta["data_source"] = sample.data_source
    if sample.ground_truth is not None:
        meta["ground_truth"] = sample.ground_truth
    if sample.extra_info:
        meta["extra_info"] = sample.extra_info
    failures = {str(k): r.failure for k, r in enumerate(sample.responses) if r.failure is not None}
    if failures:
        meta["failures"] = failures
    try:
        return json_bytes(meta)
    except (TypeError, ValueError) as error:
        raise QueueError(
            f"sample {sample.sample_uid} (prompt {sample.prompt_uid!r}): ground_truth or extra_info is not JSON: "
            f"{error}. Store plain numbers, strings, lists and mappings in the data set."
        ) from error


def joined(pieces: Pieces, names: Iterable[str]) -> dict[str, Array]:
    """The named columns as one array each."""
    return {name: parts[0] if len(parts := pieces[name]) == 1 else np.concatenate(parts) for name in names}


def check_sizes(columns: Columns) -> str | None:
    """Whether the counts fit the data, over the columns that are there; the first contradiction as a sentence."""
    for group in GROUPS:
        lengths = {name: len(values) for name, values in columns.items() if name.startswith(f"{group}/")}
        if len(set(lengths.values())) > 1:
            return f"columns of /{group} differ in length: {lengths}"
    for count, of in (
        ("samples/prompt_len", "prompt_tokens/id"),
        ("samples/n_responses", "responses/n_tokens"),
        ("samples/meta_len", "meta/json"),
        ("responses/n_tokens", "tokens/id"),
        ("responses/n_runs", "runs/response"),
    ):
        if count in columns and of in columns and int(columns[count].sum(dtype=np.int64)) != len(columns[of]):
            return f"{count} adds up to {int(columns[count].sum(dtype=np.int64))}, but {of} has {len(columns[of])} rows"
    return None


def offsets(counts: Array) -> list[int]:
    """``[0, c0, c0 + c1, ...]``: row ``i`` of a ragged column is ``[offsets[i], offsets[i + 1])``."""
    return [0, *np.cumsum(counts, dtype=np.int64).tolist()]


def decode(columns: Columns, rows: Sequence[int] | None = None) -> list[Sample]:
    """Samples of ``columns`` (all of the layout; tokens/mask may be absent when nothing is masked), in the order of
    ``rows`` (None: all). QueueError when a row does not exist."""
    table = {name: values.tolist() for name, values in columns.items() if name.split("/")[0] in _TABLES}
    n_samples = len(table["samples/sample_uid"])
    wanted = range(n_samples) if rows is None else rows
    bad = [row for row in wanted if not 0 <= row < n_samples]
    if bad:
        raise QueueError(f"rows {bad} were asked for, but there are {n_samples} samples")
    prompts, answers = offsets(columns["samples/prompt_len"]), offsets(columns["samples/n_responses"])
    meta_at = offsets(columns["samples/meta_len"])
    meta = columns["meta/json"].tobytes()
    make = _ResponseMaker(columns, table)
    samples = []
    for row in wanted:
        info = json.loads(meta[meta_at[row] : meta_at[row + 1]])
        failures = info.get("failures", {})
        first = answers[row]
        samples.append(
            Sample(
                sample_uid=table["samples/sample_uid"][row],
                prompt_uid=info["prompt_uid"],
                prompt_tokens=columns["prompt_tokens/id"][prompts[row] : prompts[row + 1]],
                responses=tuple(make(k, failures.get(str(k - first))) for k in range(first, answers[row + 1])),
                data_source=info.get("data_source", ""),
                ground_truth=info.get("ground_truth"),
                extra_info=info.get("extra_info", {}),
                epoch=table["samples/epoch"][row],
                issue=table["samples/issue"][row],
            )
        )
    return samples


class _ResponseMaker:
    """Builds the response of a row; offsets and version runs are computed once per segment."""

    def __init__(self, columns: Columns, table: Mapping[str, list[Any]]) -> None:
        self._ids, self._logprobs = columns["tokens/id"], columns["tokens/logprob"]
        self._mask = columns.get("tokens/mask")
        self._table = table
        self._tokens = offsets(columns["responses/n_tokens"])
        self._runs_at = offsets(columns["responses/n_runs"])
        names = ("lineage", "number", "start", "end", "kept_kv")
        self._runs = [
            VersionRun(WeightVersion(lineage, number), start, end, bool(kept))
            for lineage, number, start, end, kept in zip(*(table[f"runs/{name}"] for name in names), strict=True)
        ]

    def __call__(self, row: int, failure: str | None) -> Response:
        table, a, b = self._table, self._tokens[row], self._tokens[row + 1]
        reward = table["responses/reward"][row]
        masked = self._mask is not None and table["responses/n_masked"][row] > 0
        return Response(
            token_ids=self._ids[a:b],
            logprobs=self._logprobs[a:b],
            version_runs=tuple(self._runs[self._runs_at[row] : self._runs_at[row + 1]]),
            finish=FINISH_CODES[table["responses/finish"][row]],
            response_mask=self._mask[a:b] if masked and self._mask is not None else None,
            reward=None if math.isnan(reward) else reward,
            failure=failure,
            t_start=table["responses/t_start"][row],
            t_end=table["responses/t_end"][row],
        )


def prompt_uids(columns: Columns) -> list[str]:
    """The prompt of each sample, from its metadata."""
    at, meta = offsets(columns["samples/meta_len"]), columns["meta/json"].tobytes()
    return [json.loads(meta[a:b])["prompt_uid"] for a, b in pairwise(at)]


def sample_rows(columns: Columns, prompts: Sequence[str], segment: SegmentId) -> tuple[SampleRow, ...]:
    """What is announced of each sample, from the columns without tokens (layout.INFO_COLUMNS) and prompt_uids.

    reward_mean is NaN when no response has a reward; versions are (-1, -1) when the sample has no token.
    """
    answers = offsets(columns["samples/n_responses"])
    tokens_at = offsets(columns["responses/n_tokens"])
    prompt_lens = columns["samples/prompt_len"].tolist()
    rewards = columns["responses/reward"].tolist()
    oldest, newest = _versions(columns, "oldest"), _versions(columns, "newest")
    rows = []
    for row, uid in enumerate(columns["samples/sample_uid"].tolist()):
        a, b = answers[row], answers[row + 1]
        valid = [value for value in rewards[a:b] if value == value]
        rows.append(
            SampleRow(
                sample_uid=uid,
                prompt_uid=prompts[row],
                ref=RowRef(segment, row),
                n_tokens=tokens_at[b] - tokens_at[a] + (b - a) * prompt_lens[row],
                oldest=min((version for version in oldest[a:b] if version is not NO_VERSION), default=NO_VERSION),
                newest=max(newest[a:b], default=NO_VERSION),
                reward_mean=sum(valid) / len(valid) if valid else math.nan,
                n_valid=len(valid),
            )
        )
    return tuple(rows)


def _versions(columns: Columns, end: str) -> list[WeightVersion]:
    """The ``oldest`` or ``newest`` version of each response; NO_VERSION itself where there is no token."""
    pairs = zip(columns[f"responses/{end}_lineage"].tolist(), columns[f"responses/{end}_number"].tolist(), strict=True)
    known: dict[tuple[int, int], WeightVersion] = {NO_VERSION: NO_VERSION}
    return [known.get(pair) or known.setdefault(pair, WeightVersion(*pair)) for pair in pairs]
