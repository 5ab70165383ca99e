"""The segment format: what goes in comes out, plain tools can read it, and nothing wrong is read without complaint."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
from h5py import h5f
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from queue_helpers import make_sample, make_samples, plain, samples, segment_id

from hybridsched.errors import QueueError, SegmentDamaged
from hybridsched.model import FinishReason, Response, Sample, VersionRun, WeightVersion
from hybridsched.sample_queue.layout import COLUMNS
from hybridsched.sample_queue.segment import (
    SegmentHeader,
    column_checksums,
    read_segment,
    segment_header,
    segment_info,
    verify_segment,
    write_segment,
)

HEADER = SegmentHeader("run-1", segment_id(), 1_000, 2_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("segments")


def write(path: Path, content: list[Sample], durable: bool = False) -> Path:
    path.unlink(missing_ok=True)
    write_segment(path, content, HEADER, durable=durable)
    return path


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(content=st.lists(samples(), min_size=1, max_size=4))
def test_what_is_written_is_read_back_bit_for_bit(folder: Path, content: list[Sample]) -> None:
    path = write(folder / "roundtrip.h5", content)
    assert [plain(s) for s in content] == [plain(s) for s in read_segment(path)]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(content=st.lists(samples(), min_size=1, max_size=4), data=st.data())
def test_rows_come_in_the_order_asked_for(folder: Path, content: list[Sample], data: st.DataObject) -> None:
    path = write(folder / "rows.h5", content)
    rows = data.draw(st.lists(st.integers(0, len(content) - 1), max_size=6))
    assert [plain(content[row]) for row in rows] == [plain(s) for s in read_segment(path, rows)]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(content=st.lists(samples(), min_size=1, max_size=4))
def test_info_equals_what_the_writer_announced(folder: Path, content: list[Sample]) -> None:
    path = folder / "info.h5"
    path.unlink(missing_ok=True)
    written = write_segment(path, content, HEADER, durable=False)
    assert repr(written) == repr(segment_info(path)) == repr(verify_segment(path))  # repr: NaN equals NaN
    assert path.stat().st_size == written.n_bytes
    assert column_checksums(content) == written.checksums
    for sample, row in zip(content, written.rows, strict=True):
        assert (sample.sample_uid, sample.prompt_uid, sample.n_tokens) == (row.sample_uid, row.prompt_uid, row.n_tokens)
        assert (sample.oldest_version() or WeightVersion(-1, -1)) == row.oldest
        assert len(sample.valid_responses) == row.n_valid


def test_canonical_forms_of_mask_and_reward(tmp_path: Path) -> None:
    response = Response(
        np.array([4, 5], np.int32),
        np.zeros(2, np.float32),
        (),
        FinishReason.LENGTH,
        response_mask=np.ones(2, np.uint8),
        reward=float("nan"),
    )
    (read,) = read_segment(write(tmp_path / "s.h5", [Sample(0, "p", np.empty(0, np.int32), (response,))]))
    assert read.responses[0].response_mask is None
    assert read.responses[0].reward is None


def test_reward_mean_and_versions_of_a_row(tmp_path: Path) -> None:
    old, new = WeightVersion(0, 9), WeightVersion(1, 7)
    runs = (VersionRun(old, 0, 1), VersionRun(new, 1, 2))
    two = Response(np.zeros(2, np.int32), np.zeros(2, np.float32), runs, FinishReason.STOP, reward=3.0)
    failed = Response(np.zeros(2, np.int32), np.zeros(2, np.float32), runs[1:], FinishReason.STOP, failure="timeout")
    sample = Sample(5, "p", np.zeros(4, np.int32), (two, failed, Response.empty(), two.with_reward(2.0)))
    (row,) = segment_info(write(tmp_path / "s.h5", [sample])).rows
    assert (2.5, 2, old, new, 6 + 4 * 4) == (row.reward_mean, row.n_valid, row.oldest, row.newest, row.n_tokens)


def test_numpy_values_in_metadata_become_plain(tmp_path: Path) -> None:
    sample = Sample(0, "p", np.empty(0, np.int32), (), extra_info={"a": np.float64(1.5), "b": np.arange(3)})
    (read,) = read_segment(write(tmp_path / "s.h5", [sample]))
    assert read.extra_info == {"a": 1.5, "b": [0, 1, 2]}


def test_metadata_that_is_not_json_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(QueueError, match=r"sample 3 \(prompt 'p'\).*bytes cannot be stored as JSON"):
        write(tmp_path / "s.h5", [Sample(3, "p", np.empty(0, np.int32), (), ground_truth=b"x")])
    assert list(tmp_path.iterdir()) == []


def test_arrays_of_different_length_are_refused_by_name(tmp_path: Path) -> None:
    bad = Response(np.zeros(3, np.int32), np.zeros(2, np.float32), (), FinishReason.STOP)
    with pytest.raises(QueueError, match=r"sample 4 .*token_ids \(3,\), logprobs \(2,\)"):
        write(tmp_path / "s.h5", [Sample(4, "p", np.empty(0, np.int32), (bad,))])
    assert list(tmp_path.iterdir()) == []


def test_a_segment_without_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QueueError, match="without samples"):
        write(tmp_path / "s.h5", [])


def test_a_row_that_does_not_exist_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "s.h5", make_samples(range(2)))
    with pytest.raises(QueueError, match=r"s\.h5: rows \[2, -1\] were asked for, but there are 2 samples"):
        read_segment(path, [0, 2, -1])


def test_strided_and_wide_arrays_are_stored_by_value(tmp_path: Path) -> None:
    ids, logprobs = np.arange(10, dtype=np.int64)[::2], np.linspace(-1, 0, 10)[::2]
    sample = Sample(0, "p", np.arange(6)[::3], (Response(ids, logprobs, (), FinishReason.STOP),))
    (read,) = read_segment(write(tmp_path / "s.h5", [sample]))
    assert ([0, 2, 4, 6, 8], np.int32) == (read.responses[0].token_ids.tolist(), read.responses[0].token_ids.dtype)
    assert logprobs.astype(np.float32).tolist() == read.responses[0].logprobs.tolist()
    assert read.prompt_tokens.tolist() == [0, 3]


def test_a_large_segment_goes_through_several_gather_writes(tmp_path: Path) -> None:
    content = make_samples(range(40), n=60, length=3)
    path = write(tmp_path / "s.h5", content, durable=True)
    assert [plain(s) for s in content] == [plain(s) for s in read_segment(path)]


def test_plain_h5py_and_pandas_read_a_segment(tmp_path: Path) -> None:
    path = write(tmp_path / "s.h5", make_samples(range(3), n=2, length=4))
    with h5py.File(path) as file:
        assert file.attrs["schema"] == b"hybridsched.samples"
        assert tuple(file.attrs[k] for k in ("schema_version", "n_samples", "n_responses", "n_tokens")) == (2, 3, 6, 24)
        assert (file.attrs["created_unix_ns"], file.attrs["sealed_unix_ns"]) == (1_000, 2_000)
        assert [0, 1] == file.attrs["version_min"].tolist() == file.attrs["version_max"].tolist()
        frame = pd.DataFrame({name: column[:] for name, column in file["responses"].items()})
        assert frame["reward"].tolist() == [0.0, 1.0] * 3
        assert frame["sample"].tolist() == [0, 0, 1, 1, 2, 2]
        assert file["tokens/id"][8:12].tolist() == [1000, 1001, 1002, 1003]
        for column in COLUMNS:
            dataset = file[column.name]
            assert {"xxh3_64", "units", "description"} == set(dataset.attrs)
            assert (dataset.chunks, dataset.compression) == (None, None)


def test_the_format_stays_within_what_old_hdf5_reads(tmp_path: Path) -> None:
    path = write(tmp_path / "s.h5", make_samples(range(2)))
    assert path.read_bytes()[8] in (2, 3), "superblock version: HDF5 1.8 and 1.10 know 2 and 3"
    with h5py.File(path) as file:
        assert not file.id.get_create_plist().get_attr_creation_order()
    tool = shutil.which("h5dump")
    if tool:
        out = subprocess.run([tool, "-d", "/tokens/id", path], capture_output=True, text=True, timeout=30, check=True)
        assert "1001" in out.stdout
    assert h5f.is_hdf5(bytes(path))


def test_columns_a_later_writer_added_are_ignored(tmp_path: Path) -> None:
    content = make_samples(range(2))
    path = write(tmp_path / "s.h5", content)
    with h5py.File(path, "r+") as file:
        file["responses/extra"] = np.arange(4)
        file["new_table/x"] = np.arange(2)
    assert [plain(s) for s in content] == [plain(s) for s in read_segment(path)]


def test_another_format_version_is_refused_naming_both_versions(tmp_path: Path) -> None:
    path = write(tmp_path / "s.h5", make_samples(range(1)))
    with h5py.File(path, "r+") as file:
        file.attrs.modify("schema_version", 7)
    with pytest.raises(QueueError, match=r"s\.h5: format version 7, written by hybridsched .*reads version 2") as error:
        read_segment(path)
    assert not isinstance(error.value, SegmentDamaged)


def test_another_hdf5_file_is_not_a_segment(tmp_path: Path) -> None:
    path = write(tmp_path / "s.h5", make_samples(range(1)))
    with h5py.File(path, "r+") as file:
        file.attrs["schema"] = np.bytes_("something else")
    with pytest.raises(QueueError, match="schema is 'something else'"):
        read_segment(path)


def test_a_missing_file_is_file_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_segment(tmp_path / "none.h5")


def test_the_header_is_readable_alone(tmp_path: Path) -> None:
    assert segment_header(write(tmp_path / "s.h5", make_samples(range(1)))) == HEADER


# ------------------------------------------------------------------ damage


def outcome(path: Path) -> list[dict[str, object]] | str:
    """Samples of a file, or "damaged"."""
    try:
        verify_segment(path)
        return [plain(s) for s in read_segment(path)]
    except SegmentDamaged as error:
        assert str(path) in str(error)
        return "damaged"


@pytest.fixture(scope="module")
def intact(folder: Path) -> tuple[bytes, list[dict[str, object]]]:
    content = [*make_samples(range(3), n=2, length=50), Sample(9, "empty", np.empty(0, np.int32), ())]
    path = write(folder / "intact.h5", content)
    return path.read_bytes(), [plain(s) for s in content]


@settings(max_examples=250, deadline=None)
@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_bit_flip_is_read_as_other_samples(
    folder: Path, intact: tuple[bytes, list[dict[str, object]]], position: float, bit: int
) -> None:
    data, expected = intact
    damaged = bytearray(data)
    damaged[int(position * len(data))] ^= 1 << bit
    path = folder / "flipped.h5"
    path.write_bytes(damaged)
    assert outcome(path) in (expected, "damaged")  # some bytes of a file mean nothing


def test_every_flip_in_every_column_is_noticed_and_names_the_dataset(
    folder: Path, intact: tuple[bytes, list[dict[str, object]]]
) -> None:
    data, _ = intact
    original = folder / "original.h5"
    original.write_bytes(data)
    with h5py.File(original) as file:
        places = {c.name: (file[c.name].id.get_offset(), file[c.name].nbytes) for c in COLUMNS}
    path = folder / "flipped.h5"
    for name, (offset, n_bytes) in places.items():
        assert n_bytes > 0, name
        for at in {0, n_bytes // 2, n_bytes - 1}:
            damaged = bytearray(data)
            damaged[offset + at] ^= 0x10
            path.write_bytes(damaged)
            with pytest.raises(SegmentDamaged, match=f"dataset '{name}' is damaged: expected xxh3_64 .* found"):
                verify_segment(path)


@settings(max_examples=80, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_every_truncation_is_noticed(folder: Path, intact: tuple[bytes, list[dict[str, object]]], share: float) -> None:
    data, _ = intact
    path = folder / "truncated.h5"
    path.write_bytes(data[: int(share * len(data))])
    assert outcome(path) == "damaged"


def test_zeroed_pages_are_noticed(folder: Path, intact: tuple[bytes, list[dict[str, object]]]) -> None:
    data, expected = intact
    path = folder / "zeroed.h5"
    for start in range(0, len(data), 512):
        path.write_bytes(data[:start] + bytes(len(data[start : start + 512])) + data[start + 512 :])
        assert outcome(path) in (expected, "damaged")
    path.write_bytes(bytes(len(data)))
    assert outcome(path) == "damaged"


def test_intact_columns_that_contradict_each_other_are_damage(tmp_path: Path) -> None:
    content = [make_sample(0, n=1, length=4)]
    long, short = write(tmp_path / "a.h5", content), write(tmp_path / "b.h5", [make_sample(0, n=1, length=3)])
    with h5py.File(long, "r+") as target, h5py.File(short) as source:
        del target["tokens/id"]
        source.copy("tokens/id", target["tokens"], "id")
    with pytest.raises(SegmentDamaged, match="columns of /tokens differ in length"):
        read_segment(long)
