"""One sealed segment: the only place that touches HDF5, for writing and for reading.

Invariants
    A segment is complete under its final name or it is not there: ``.tmp`` -> fsync -> rename -> fsync(folder).
    After a failure nothing is left behind; on a full disk the error is NoSpace.
    Whatever is damaged later is noticed by the reader: metadata by HDF5's own checksums, data by xxh3-64 per column.
    The format (layout.py) opens with plain h5py, h5dump 1.8+ and pandas: bounds v108-v110, contiguous, no filters.

How it is written: HDF5 lays out a "skeleton" (groups and contiguous datasets with space allocated and nothing filled
in); the arrays go straight from where they are to those offsets with ``pwritev``: no joined copy, and HDF5 never holds
payload when the disk fills up. While the disk takes them, checksums are computed and attributes added; then one fsync.

Not here: names, folders, retries (store.py).
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xxhash
from h5py import h5a, h5d, h5f, h5g, h5p, h5s, h5t

import hybridsched
from hybridsched.errors import QueueError, SegmentDamaged
from hybridsched.model import Sample, SampleRow, SegmentId, WeightVersion
from hybridsched.sample_queue.columns import (
    Array,
    Pieces,
    check_sizes,
    decode,
    encode,
    joined,
    prompt_uids,
    sample_rows,
)
from hybridsched.sample_queue.files import (
    gather_write,
    publish,
    queue_error,
    start_writeback,
    surviving_file_size_limit,
    temporary_name,
)
from hybridsched.sample_queue.layout import CHECKSUM, COLUMNS, GROUPS, INFO_COLUMNS, SCHEMA, SCHEMA_VERSION

_WRITER = f"hybridsched {hybridsched.__version__}; h5py {h5py.version.version}; hdf5 {h5py.version.hdf5_version}"
_METADATA_BYTES = 64 << 10  # generous bound of what HDF5 itself writes into a segment
_ALL_NAMES = tuple(column.name for column in COLUMNS)


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """Whose segment it is. created: its first sample arrived; sealed: it was written (ns since the epoch)."""

    run_id: str
    segment: SegmentId
    created_unix_ns: int
    sealed_unix_ns: int


@dataclass(frozen=True, slots=True)
class SegmentSummary:
    """A segment without its tokens. ``checksums`` by column (xxh3-64, hex); n_tokens counts response tokens."""

    header: SegmentHeader
    rows: tuple[SampleRow, ...]
    n_bytes: int
    n_responses: int
    n_tokens: int
    checksums: Mapping[str, str]


# ------------------------------------------------------------------ writing


def write_segment(
    path: Path, samples: Sequence[Sample], header: SegmentHeader, *, durable: bool = True
) -> SegmentSummary:
    """Seal ``samples`` as ``path`` (whose folder exists). Durable on return when ``durable``.

    Raises NoSpace or QueueError; then neither ``path`` nor a temporary file is left by this call, except when only the
    folder's fsync failed: the complete segment is there then, and writing it again is recognised by the store.
    """
    if not samples:
        raise QueueError(f"{path}: a segment without samples is not written")
    pieces = encode(samples)
    need = sum(array.nbytes for arrays in pieces.values() for array in arrays) + _METADATA_BYTES
    temporary = temporary_name(path)
    try:
        with surviving_file_size_limit():
            summary = _write_temporary(temporary, pieces, [sample.prompt_uid for sample in samples], header, durable)
            publish(temporary, path, durable)
    except (OSError, RuntimeError) as error:
        raise queue_error(error, path, "sealing a segment", need) from error
    finally:
        temporary.unlink(missing_ok=True)
    return summary


def _write_temporary(
    temporary: Path, pieces: Pieces, prompts: Sequence[str], header: SegmentHeader, durable: bool
) -> SegmentSummary:
    """The complete file under its temporary name, synced when ``durable``."""
    with contextlib.ExitStack() as stack:
        fd = -1
        with _created(temporary) as file:
            datasets = _create_datasets(file, pieces)
            fd = os.open(temporary, os.O_WRONLY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            _fill(fd, pieces, datasets)
            if durable:
                start_writeback(fd)
            checksums = {name: _checksum(arrays) for name, arrays in pieces.items()}
            rows = sample_rows(joined(pieces, INFO_COLUMNS), prompts, header.segment)
            attributes = _attributes(header, rows, pieces)
            for key, value in attributes.items():
                _set_attribute(file, key, value)
            _describe(datasets, checksums)
        if durable:
            os.fsync(fd)
        n_bytes = os.fstat(fd).st_size
    return SegmentSummary(header, rows, n_bytes, attributes["n_responses"], attributes["n_tokens"], checksums)


def column_checksums(samples: Sequence[Sample]) -> dict[str, str]:
    """Checksums by column that a segment of ``samples`` has: two segments with equal ones hold the same samples."""
    return {name: _checksum(arrays) for name, arrays in encode(samples).items()}


def _checksum(arrays: Iterable[Array]) -> str:
    """16 hex digits over the bytes of the arrays in order."""
    digest = xxhash.xxh3_64()
    for array in arrays:
        digest.update(array.data)
    return digest.hexdigest()


def _attributes(header: SegmentHeader, rows: Sequence[SampleRow], pieces: Pieces) -> dict[str, Any]:
    """Root attributes. Version bounds are (lineage, number) over the samples that have tokens."""
    segment = header.segment
    versions = [version for row in rows for version in (row.oldest, row.newest)]
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "writer": _WRITER,
        "run_id": header.run_id,
        "producer": segment.producer,
        "incarnation": segment.incarnation,
        "seq": segment.seq,
        "n_samples": len(rows),
        "n_responses": sum(map(len, pieces["responses/n_tokens"])),
        "n_tokens": sum(map(len, pieces["tokens/id"])),
        "version_min": np.array(min(versions), "<i8"),
        "version_max": np.array(max(versions), "<i8"),
        "created_unix_ns": header.created_unix_ns,
        "sealed_unix_ns": header.sealed_unix_ns,
    }


@contextmanager
def _created(path: Path) -> Iterator[Any]:
    """A new HDF5 file, closed at the end whatever happens."""
    creation = h5p.create(h5p.FILE_CREATE)
    creation.set_attr_phase_change(64, 32)  # all attributes stay in the object header: compact, checksummed
    file = h5f.create(os.fsencode(path), h5f.ACC_TRUNC, creation, _access())
    try:
        yield file
    finally:
        file.close()


def _create_datasets(file: Any, pieces: Pieces) -> dict[str, Any]:
    """All groups and datasets, with room for their data but nothing in it."""
    layout = h5p.create(h5p.DATASET_CREATE)
    layout.set_layout(h5d.CONTIGUOUS)
    layout.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5d.FILL_TIME_NEVER)
    layout.set_obj_track_times(False)
    groups = {group: h5g.create(file, group.encode()) for group in GROUPS}
    datasets = {}
    for column in COLUMNS:
        length = sum(map(len, pieces[column.name]))
        name = column.name.partition("/")[2].encode()
        kind = h5t.py_create(np.dtype(column.dtype))
        datasets[column.name] = h5d.create(groups[column.group], name, kind, h5s.create_simple((length,)), layout)
    return datasets


def _fill(fd: int, pieces: Pieces, datasets: Mapping[str, Any]) -> None:
    """Put the data where HDF5 made room for it (an empty dataset has no place)."""
    places = {name: offset for name, data in datasets.items() if (offset := data.get_offset()) is not None}
    stretch: list[Array] = []  # of columns that lie side by side: one system call for all of them
    start = end = 0
    for name, offset in sorted(places.items(), key=lambda item: item[1]):
        if offset != end:
            gather_write(fd, stretch, start)
            stretch, start = [], offset
        stretch += pieces[name]
        end = offset + datasets[name].get_storage_size()
    gather_write(fd, stretch, start)


def _describe(datasets: Mapping[str, Any], checksums: Mapping[str, str]) -> None:
    for column in COLUMNS:
        data = datasets[column.name]
        _set_attribute(data, CHECKSUM, checksums[column.name])
        _set_attribute(data, "units", column.units)
        _set_attribute(data, "description", column.description)


def _access() -> Any:
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_libver_bounds(h5f.LIBVER_V18, h5f.LIBVER_V110)
    access.set_file_locking(False, True)  # sealed files need no lock, and locks fail on many cluster file systems
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    return access


def _set_attribute(target: Any, key: str, value: Any) -> None:
    if isinstance(value, str):
        kind, text = _fixed_string(value)
        h5a.create(target, key.encode(), kind, _SCALAR).write(text, kind)
        return
    array = np.asarray(value, "<i8")
    space = h5s.create_simple(array.shape) if array.ndim else _SCALAR
    h5a.create(target, key.encode(), h5t.STD_I64LE, space).write(array, h5t.STD_I64LE)


def _get_attribute(target: Any, key: str) -> Any:
    attribute = h5a.open(target, key.encode())
    out = np.empty(attribute.shape, attribute.dtype)
    attribute.read(out)
    value = out.tolist()
    return value.decode() if isinstance(value, bytes) else value


@functools.lru_cache(maxsize=256)  # units and descriptions are the same in every segment
def _fixed_string(value: str) -> tuple[Any, Array]:
    data = value.encode() or b"\0"
    kind = h5t.C_S1.copy()
    kind.set_size(len(data))
    kind.set_strpad(h5t.STR_NULLPAD)
    kind.set_cset(h5t.CSET_UTF8)
    return kind, np.array(data, f"S{len(data)}")


_SCALAR = h5s.create(h5s.SCALAR)


# ------------------------------------------------------------------ reading


def read_segment(path: Path, rows: Sequence[int] | None = None) -> list[Sample]:
    """Samples of a sealed segment (all, or ``rows`` in that order); every column read is verified as a whole.

    Token arrays are slices of one array per column, so keeping one sample keeps the segment's tokens in memory.
    Raises FileNotFoundError, SegmentDamaged (names file, dataset, expected and found), QueueError (rows that do not
    exist, a newer format, an I/O error).
    """
    with _Reader(path) as reader:
        columns = reader.columns(name for name in _ALL_NAMES if name != "tokens/mask")
        if columns["responses/n_masked"].any():
            columns |= reader.columns(["tokens/mask"])
        reader.check(columns)
    try:
        return decode(columns, rows)
    except QueueError as error:
        raise QueueError(f"{path}: {error}") from error


def segment_info(path: Path) -> SegmentSummary:
    """Header, rows and checksums of a segment; token columns are not read. Raises as read_segment."""
    with _Reader(path) as reader:
        columns = reader.columns(INFO_COLUMNS)
        reader.check(columns)
        header = reader.header()
        rows = sample_rows(columns, prompt_uids(columns), header.segment)
        n_responses, n_tokens = len(columns["responses/n_tokens"]), int(columns["responses/n_tokens"].sum())
        return SegmentSummary(header, rows, reader.n_bytes, n_responses, n_tokens, reader.checksums())


def segment_header(path: Path) -> SegmentHeader:
    """Only the root attributes (for listing). Raises as read_segment."""
    with _Reader(path) as reader:
        return reader.header()


def verify_segment(path: Path) -> SegmentSummary:
    """Check every column of the format, whatever a reader would need (for fsck). Raises as read_segment."""
    with _Reader(path) as reader:
        reader.check(reader.columns(_ALL_NAMES))
    return segment_info(path)


def segment_versions(rows: Iterable[SampleRow]) -> tuple[WeightVersion, WeightVersion]:
    """Oldest and newest weight version over ``rows``."""
    rows = tuple(rows)
    return min(row.oldest for row in rows), max(row.newest for row in rows)


class _Reader:
    """An open segment. Everything HDF5 cannot make sense of is damage; what the OS says is not."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.n_bytes = os.stat(path).st_size
        with self._guard("the file"):
            self._file = h5f.open(os.fsencode(path), h5f.ACC_RDONLY, _access())

    def __enter__(self) -> _Reader:
        try:
            schema, version = self._attribute("schema"), self._attribute("schema_version")
            if schema != SCHEMA:
                raise QueueError(f"{self._path}: schema is {schema!r}, not {SCHEMA!r}: this is not a sample segment")
            if version != SCHEMA_VERSION:
                raise QueueError(
                    f"{self._path}: format version {version}, written by {self._attribute('writer')}; this hybridsched "
                    f"{hybridsched.__version__} reads version {SCHEMA_VERSION}. Read it with the hybridsched that "
                    "wrote it."
                )
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise QueueError(f"{self._path}: cannot read {what}: {error}") from error
            raise SegmentDamaged(f"{self._path}: {what} is damaged: HDF5 says: {error}") from error

    def _attribute(self, name: str) -> Any:
        with self._guard(f"attribute {name!r}"):
            return _get_attribute(self._file, name)

    def header(self) -> SegmentHeader:
        """Whose segment it is."""
        names = ("run_id", "producer", "incarnation", "seq", "created_unix_ns", "sealed_unix_ns")
        run_id, producer, incarnation, seq, created, sealed = (self._attribute(name) for name in names)
        return SegmentHeader(run_id, SegmentId(producer, incarnation, seq), created, sealed)

    def columns(self, names: Iterable[str]) -> dict[str, Array]:
        """Read and verify whole columns."""
        return {name: self._column(name) for name in names}

    def checksums(self) -> dict[str, str]:
        """The stored checksum of every column, without reading the data."""
        return {name: self._stored_checksum(self._open(name), name) for name in _ALL_NAMES}

    def _open(self, name: str) -> Any:
        with self._guard(f"dataset {name!r}"):
            return h5d.open(self._file, name.encode())

    def _stored_checksum(self, data: Any, name: str) -> str:
        with self._guard(f"checksum of dataset {name!r}"):
            return str(_get_attribute(data, CHECKSUM))

    def _column(self, name: str) -> Array:
        data = self._open(name)
        with self._guard(f"dataset {name!r}"):
            values = np.empty(data.shape, data.dtype)
            if values.nbytes > self.n_bytes:
                raise ValueError(f"it claims {values.nbytes} bytes in a file of {self.n_bytes}")
            if values.size:
                data.read(h5s.ALL, h5s.ALL, values)
        expected, found = self._stored_checksum(data, name), _checksum([values])
        if expected != found:
            raise SegmentDamaged(
                f"{self._path}: dataset {name!r} is damaged: expected {CHECKSUM} {expected}, found {found} over "
                f"{values.nbytes} bytes. The segment goes to quarantine and its prompts are issued again."
            )
        return values

    def check(self, columns: Mapping[str, Array]) -> None:
        """Columns that are each intact must also fit together."""
        contradiction = check_sizes(columns)
        if contradiction:
            raise SegmentDamaged(f"{self._path}: {contradiction}")
