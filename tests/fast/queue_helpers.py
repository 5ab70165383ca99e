"""Samples, hypothesis strategies and child processes for the tests of the sample queue."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from hybridsched.model import FinishReason, Response, Sample, SegmentId, VersionRun, WeightVersion


def make_sample(
    uid: int, *, n: int = 2, length: int = 5, version: tuple[int, int] = (0, 1), prompt_uid: str | None = None
) -> Sample:
    """A small sample whose token ids depend on its uid."""
    responses = tuple(
        Response(
            token_ids=np.arange(length, dtype=np.int32) + 1000 * uid + k,
            logprobs=-np.linspace(0.5, 1.0, length, dtype=np.float32),
            version_runs=(VersionRun(WeightVersion(*version), 0, length),),
            finish=FinishReason.STOP,
            reward=float(k),
            t_start=10.0,
            t_end=11.5,
        )
        for k in range(n)
    )
    return Sample(uid, prompt_uid or f"prompt-{uid}", np.arange(3, dtype=np.int32) + uid, responses, "unit", "42")


def make_samples(uids: Iterable[int], **options: Any) -> list[Sample]:
    """Several of them."""
    return [make_sample(uid, **options) for uid in uids]


def segment_id(seq: int = 0, producer: str = "node0.0", incarnation: str = "7.0.123") -> SegmentId:
    """A segment name."""
    return SegmentId(producer, incarnation, seq)


def plain(sample: Sample) -> dict[str, Any]:
    """A sample as plain values with types and bits, so that ``==`` means identical."""

    def array(values: Any) -> Any:
        return None if values is None else (str(values.dtype), values.tobytes())

    responses = [
        (
            array(r.token_ids),
            array(r.logprobs),
            r.version_runs,
            r.finish,
            array(r.response_mask),
            repr(r.reward),
            r.failure,
            r.t_start,
            r.t_end,
        )
        for r in sample.responses
    ]
    names = ("sample_uid", "prompt_uid", "data_source", "ground_truth", "extra_info", "epoch", "issue")
    return {name: getattr(sample, name) for name in names} | {
        "prompt_tokens": array(sample.prompt_tokens),
        "responses": responses,
    }


_FINITE = st.floats(allow_nan=False, allow_infinity=False, width=64)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | _FINITE | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_ANY_TEXT = st.text(st.characters(), max_size=12)  # with control characters and lone surrogates


@st.composite
def responses(draw: st.DrawFn) -> Response:
    """Any response: empty, partial, masked, of several versions, without reward."""
    length = draw(st.integers(0, 12))
    cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=3))) if length > 1 else []
    bounds = [0, *cuts, length] if length else []
    versions = sorted(
        draw(
            st.lists(
                st.tuples(st.integers(0, 3), st.integers(0, 2**31 - 1)), min_size=len(bounds), max_size=len(bounds)
            )
        )
    )
    runs = tuple(
        VersionRun(WeightVersion(*version), a, b, draw(st.booleans()))
        for version, a, b in zip(versions, bounds[:-1], bounds[1:], strict=False)
    )
    mask = draw(st.none() | st.lists(st.integers(0, 1), min_size=length, max_size=length))
    if mask is not None and 0 not in mask:
        mask = None  # the canonical form of "all ones"
    return Response(
        token_ids=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)), np.int32),
        logprobs=np.array(draw(st.lists(st.floats(-100, 0, width=32), min_size=length, max_size=length)), np.float32),
        version_runs=runs,
        finish=draw(st.sampled_from(FinishReason)),
        response_mask=None if mask is None else np.array(mask, np.uint8),
        reward=draw(st.none() | st.floats(allow_nan=False)),
        failure=draw(st.none() | _ANY_TEXT),
        t_start=draw(_FINITE),
        t_end=draw(_FINITE),
    )


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Any sample."""
    return Sample(
        sample_uid=draw(st.integers(0, 2**62)),
        prompt_uid=draw(_ANY_TEXT),
        prompt_tokens=np.array(draw(st.lists(st.integers(0, 2**31 - 1), max_size=6)), np.int32),
        responses=tuple(draw(st.lists(responses(), max_size=4))),
        data_source=draw(_ANY_TEXT),
        ground_truth=draw(_JSON),
        extra_info=draw(st.dictionaries(st.text(max_size=5), _JSON, max_size=3)),
        epoch=draw(st.integers(0, 1000)),
        issue=draw(st.integers(0, 1000)),
    )


def in_child(work: Callable[[], Any], seconds: int = 60) -> Any:
    """Result of ``work`` run in a forked child; AssertionError with its traceback when it raised there."""
    return at_once([work], seconds)[0]


def at_once(works: Iterable[Callable[[], Any]], seconds: int = 60) -> list[Any]:
    """Results of all ``works``, run in one forked child each that all start at the same moment."""
    gate_out, gate_in = os.pipe()
    children = []
    for work in works:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm(seconds)
            os.close(gate_in)
            os.read(gate_out, 1)  # end of file when the parent closes its side
            try:
                outcome = (True, work())
            except BaseException:
                outcome = (False, traceback.format_exc())
            os.write(writing, pickle.dumps(outcome))
            os._exit(0)
        os.close(writing)
        children.append((pid, reading))
    os.close(gate_out)
    os.close(gate_in)
    return [_result(pid, reading) for pid, reading in children]


def _result(pid: int, reading: int) -> Any:
    with open(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert data, f"the child died with status {status}"
    worked, result = pickle.loads(data)
    assert worked, result
    return result


def killed_child(work: Callable[[], Any], seconds: int = 60) -> int:
    """Run ``work`` in a forked child; returns the signal that killed it, 0 when it ended by itself."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(seconds)
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0, "the child raised"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
