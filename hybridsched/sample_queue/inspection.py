"""What `hybridsched queue ls | head | stat` show, as plain JSON-able data. Reads only; prints nothing.

Damaged segments do not stop an inspection: they appear with their error.
"""

from __future__ import annotations

import math
from collections import Counter
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from hybridsched.errors import QueueError
from hybridsched.model import Sample, SegmentId
from hybridsched.sample_queue.log import ACCEPT_LOG, LEDGER, log_headers, read_chain
from hybridsched.sample_queue.segment import SegmentSummary, segment_info, segment_versions
from hybridsched.sample_queue.store import QUEUE_FOLDER, FileSegmentStore, read_queue_header


def open_for_reading(run_folder: Path) -> FileSegmentStore:
    """The store of whatever run the folder holds; nothing is created. RunFolderError when it holds none."""
    header = read_queue_header(Path(run_folder) / QUEUE_FOLDER)
    return FileSegmentStore(Path(run_folder), str(header["run_id"]), create=False)


def list_segments(run_folder: Path) -> list[dict[str, Any]]:
    """One row per sealed segment: where it is, what it holds; ``error`` instead when it cannot be read."""
    store = open_for_reading(run_folder)
    return [_row(store, segment) for segment in store.list()]


def _row(store: FileSegmentStore, segment: SegmentId) -> dict[str, Any]:
    row: dict[str, Any] = {"producer": segment.producer, "incarnation": segment.incarnation, "seq": segment.seq}
    try:
        return row | _summary_fields(segment_info(store.path(segment)))
    except (QueueError, FileNotFoundError) as error:
        return row | {"error": str(error)}


def _summary_fields(summary: SegmentSummary) -> dict[str, Any]:
    oldest, newest = segment_versions(summary.rows)
    sealed = datetime.fromtimestamp(summary.header.sealed_unix_ns / 1e9, UTC)
    return {
        "samples": len(summary.rows),
        "responses": summary.n_responses,
        "tokens": summary.n_tokens,
        "bytes": summary.n_bytes,
        "oldest_version": str(oldest),
        "newest_version": str(newest),
        "sealed": sealed.isoformat(timespec="milliseconds"),
    }


def head(run_folder: Path, n: int = 3, segment: SegmentId | None = None) -> list[dict[str, Any]]:
    """The first ``n`` samples of the queue (or of one segment), decoded: lists instead of arrays."""
    store = open_for_reading(run_folder)
    segments = store.list() if segment is None else [segment]
    samples = (sample_fields(sample, each, row) for each in segments for row, sample in enumerate(store.read(each)))
    return list(islice(samples, n))


def sample_fields(sample: Sample, segment: SegmentId, row: int) -> dict[str, Any]:
    """A sample as JSON-able fields."""
    return {
        "segment": str(segment),
        "row": row,
        "sample_uid": sample.sample_uid,
        "prompt_uid": sample.prompt_uid,
        "epoch": sample.epoch,
        "issue": sample.issue,
        "data_source": sample.data_source,
        "ground_truth": sample.ground_truth,
        "extra_info": sample.extra_info,
        "prompt_tokens": sample.prompt_tokens.tolist(),
        "responses": [
            {
                "token_ids": response.token_ids.tolist(),
                "logprobs": response.logprobs.tolist(),
                "response_mask": None if response.response_mask is None else response.response_mask.tolist(),
                "versions": [
                    {"version": str(run.version), "start": run.start, "end": run.end, "kept_kv": run.kept_kv}
                    for run in response.version_runs
                ],
                "finish": response.finish.value,
                "reward": response.reward,
                "failure": response.failure,
                "seconds": response.t_end - response.t_start,
            }
            for response in sample.responses
        ],
    }


def totals(run_folder: Path) -> dict[str, Any]:
    """Totals over the queue: files, samples, tokens, bytes, rewards, lengths, verdicts, free space."""
    store = open_for_reading(run_folder)
    segments = store.list()
    rewards: list[float] = []
    counts: Counter[str] = Counter()
    producers: set[str] = set()
    for segment in segments:
        producers.add(segment.producer)
        try:
            summary = segment_info(store.path(segment))
        except (QueueError, FileNotFoundError):
            counts["damaged"] += 1
            continue
        counts += Counter(
            samples=len(summary.rows),
            responses=summary.n_responses,
            tokens=summary.n_tokens,
            bytes=summary.n_bytes,
        )
        rewards += [row.reward_mean for row in summary.rows if not math.isnan(row.reward_mean)]
    queue = Path(run_folder) / QUEUE_FOLDER
    verdicts = Counter(str(entry.get("verdict")) for entry in newest_chain(queue, LEDGER))
    return {
        "run_id": store.run_id,
        "producers": len(producers),
        "segments": len(segments),
        **{key: counts[key] for key in ("samples", "responses", "tokens", "bytes", "damaged")},
        "tokens_per_response": counts["tokens"] / counts["responses"] if counts["responses"] else None,
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        "accepted": len(newest_chain(queue, ACCEPT_LOG)),
        "verdicts": dict(verdicts),
        "quarantined": len(store.quarantined()),
        "foreign": len(store.foreign()),
        "free_bytes": store.free_bytes(),
    }


def newest_chain(queue: Path, name: str) -> list[dict[str, Any]]:
    """Entries along the chain of the newest incarnation of a log, [] when there is none. Raises QueueError."""
    headers = log_headers(queue, name)
    return read_chain(queue, name, headers[-1].incarnation) if headers else []
