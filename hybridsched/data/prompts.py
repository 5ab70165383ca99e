"""Reads prompt files: JSONL and parquet rows in the layout users of the peer have, checked one by one.

A row holds ``prompt`` (chat messages, or one plain string), ``data_source``, ``reward_model.ground_truth`` and,
optionally, ``extra_info``; other columns are ignored.

Owns: which rows are usable, why the others are not, and the ``prompt_uid`` of each.
Invariants: uids are unique within one call and depend only on what the used columns say, so a JSONL file and its
parquet twin give the same uids; rows keep file order; nothing is dropped without an entry in the report.
Does not: tokenize, shuffle, or apply the length policy (see ``tokenizer`` and ``stream``).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import xxhash

from hybridsched.errors import DataError

JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet", ".pq")
_SHOWN = 5  #: malformed rows spelled out in an error message
_BATCH_ROWS = 1024  #: parquet rows decoded at a time

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One usable row. ``origin`` is "file:row" for messages; ``prompt`` is a list of chat messages or plain text."""

    prompt_uid: str
    prompt: Messages | str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    origin: str


@dataclass(frozen=True, slots=True)
class MalformedRow:
    """A row that cannot be used. ``row`` counts from 1: the line of a JSONL file, the row of a parquet file."""

    file: str
    row: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.row}: {self.reason}"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What came out of the files: ``n_rows`` read (blank lines do not count), the unusable ones, repeated uids."""

    files: tuple[str, ...]
    n_rows: int
    malformed: tuple[MalformedRow, ...] = field(default=())
    n_duplicates: int = 0

    @property
    def n_usable(self) -> int:
        """Rows that became prompts."""
        return self.n_rows - len(self.malformed)

    @property
    def malformed_fraction(self) -> float:
        """Share of the rows that is malformed; 0.0 without rows."""
        return len(self.malformed) / self.n_rows if self.n_rows else 0.0

    def with_malformed(self, more: Sequence[MalformedRow]) -> LoadReport:
        """The same report with rows found unusable later (by the chat template, say)."""
        return replace(self, malformed=(*self.malformed, *more))

    def summary(self) -> str:
        """One line for the log, with the first malformed rows spelled out below it."""
        line = f"{self.n_usable} prompts from {', '.join(self.files)}"
        if self.n_duplicates:
            line += f"; {self.n_duplicates} repeated rows kept under their own uid"
        if self.malformed:
            line += f"; {len(self.malformed)} of {self.n_rows} rows malformed:\n{self._malformed_lines()}"
        return line

    def require(self, max_malformed_fraction: float) -> None:
        """Raise DataError when too many rows are malformed or none is usable."""
        if self.malformed_fraction > max_malformed_fraction:
            raise DataError(
                f"{len(self.malformed)} of {self.n_rows} rows are malformed ({self.malformed_fraction:.2%}; "
                f"data.max_malformed_fraction allows {max_malformed_fraction:.2%}):\n{self._malformed_lines()}\n"
                "Correct or remove these rows, or raise data.max_malformed_fraction to run without them."
            )
        if self.n_usable == 0:
            detail = f", all malformed:\n{self._malformed_lines()}\n" if self.malformed else ". "
            raise DataError(
                f"no usable row in {', '.join(self.files)}: {self.n_rows} rows read{detail}"
                "Point data.train_files (or data.val_files) at a file with at least one prompt."
            )

    def _malformed_lines(self) -> str:
        shown = [f"  {row}" for row in self.malformed[:_SHOWN]]
        if len(self.malformed) > _SHOWN:
            shown.append(f"  ... and {len(self.malformed) - _SHOWN} more")
        return "\n".join(shown)


class _Unusable(Exception):
    """A row's reason; never leaves this module."""


def load_rows(
    files: Sequence[str | Path],
    prompt_key: str = "prompt",
    reward_fn_key: str = "data_source",
    max_malformed_fraction: float = 0.0,
) -> tuple[list[PromptRow], LoadReport]:
    """Read and check all rows of `files`, in order.

    prompt_uid is ``DATA_SOURCE/INDEX`` from ``extra_info.index`` when that pair is unique over all files, else a
    hash of the row (``x`` + 32 hex digits); a repeated uid gets ``~2``, ``~3``, ... in file order.

    Raises DataError for a file that is missing, empty, not readable, of an unknown kind or wrongly encoded, when more
    than `max_malformed_fraction` of all rows are malformed, and when no usable row is left.
    """
    if not files:
        raise DataError("no prompt files: set data.train_files to one or more .jsonl or .parquet files.")
    rows: list[PromptRow] = []
    malformed: list[MalformedRow] = []
    for name in map(str, files):
        n_before = len(rows) + len(malformed)
        for number, raw in _read(Path(name).expanduser(), prompt_key):
            try:
                rows.append(_check_row(raw, prompt_key, reward_fn_key, f"{name}:{number}"))
            except _Unusable as problem:
                malformed.append(MalformedRow(name, number, str(problem)))
        if len(rows) + len(malformed) == n_before:
            raise DataError(f"{name} has no rows. Write one prompt per row, or take the file off the list.")
    rows, n_duplicates = _with_uids(rows)
    report = LoadReport(tuple(map(str, files)), len(rows) + len(malformed), tuple(malformed), n_duplicates)
    report.require(max_malformed_fraction)
    return rows, report


# -- files ------------------------------------------------------------------------------------------------------------


def _read(path: Path, prompt_key: str) -> Iterator[tuple[int, Any]]:
    """(row number from 1, decoded row or the _Unusable that decoding it gave) of one file."""
    suffix = path.suffix.lower()
    if suffix not in JSONL_SUFFIXES + PARQUET_SUFFIXES:
        raise DataError(
            f"{path}: unknown kind of prompt file {suffix or '(no extension)'!r}. Use .jsonl (one JSON object per "
            "line) or .parquet; rename or convert the file."
        )
    if not path.exists():
        raise DataError(f"{path} does not exist (looked from {Path.cwd()}). Correct data.train_files / data.val_files.")
    if not path.is_file():
        raise DataError(f"{path} is a folder. Name the files in it, e.g. {path / 'train.parquet'}.")
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty (0 bytes). Write the data set again, or take the file off the list.")
        yield from _read_jsonl(path) if suffix in JSONL_SUFFIXES else _read_parquet(path, prompt_key)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}. Check its permissions, and that it is complete."
        ) from error


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = _without_bom(path, line)
            try:
                text = line.decode("utf-8").strip()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}:{number}: not UTF-8 (byte 0x{line[error.start]:02x} at column {error.start + 1}). "
                    f"Convert the file, e.g. `iconv -f latin1 -t utf-8 {path.name} > utf8-{path.name}`."
                ) from error
            if text:
                yield number, _decode_json(text)


def _without_bom(path: Path, first_line: bytes) -> bytes:
    """The first line without a UTF-8 byte-order mark; other marks are a wrong encoding."""
    if first_line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(
            f"{path} is UTF-16. Convert the file, e.g. `iconv -f utf-16 -t utf-8 {path.name} > utf8-{path.name}`."
        )
    return first_line.removeprefix(b"\xef\xbb\xbf")


def _decode_json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        return _Unusable(f"not JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        return _Unusable("not usable: nested too deeply")
    except _Unusable as problem:
        return problem


def _refuse_constant(name: str) -> NoReturn:
    # json.loads would accept it, but no other reader of the run's files would.
    raise _Unusable(f"{name} is not JSON; write null or a number")


def _read_parquet(path: Path, prompt_key: str) -> Iterator[tuple[int, Any]]:
    # Imported here: pyarrow takes long to load and JSONL users never need it.
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            columns = list(file.schema_arrow.names)
            if prompt_key not in columns:
                raise DataError(
                    f"{path} has no column {prompt_key!r} (it has: {', '.join(columns)}). Set data.prompt_key."
                )
            number = 0
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a readable parquet file: {error}. Write it again.") from error


# -- rows -------------------------------------------------------------------------------------------------------------


def _check_row(raw: Any, prompt_key: str, reward_fn_key: str, origin: str) -> PromptRow:
    """The row without its uid, or _Unusable with the reason."""
    if isinstance(raw, _Unusable):
        raise raw
    if not isinstance(raw, dict):
        raise _Unusable(f"a row is a JSON object, this is {_kind(raw)}")
    data_source = raw.get(reward_fn_key)
    if not isinstance(data_source, str) or not data_source:
        raise _Unusable(f"{reward_fn_key!r} (data.reward_fn_key) should be a name, it is {_kind(data_source)}")
    _require_text(data_source, reward_fn_key)
    reward_model = raw.get("reward_model")
    if not isinstance(reward_model, dict):
        raise _Unusable(f"'reward_model' should be an object with 'ground_truth', it is {_kind(reward_model)}")
    if reward_model.get("ground_truth") is None:
        raise _Unusable("'reward_model' has no 'ground_truth'")
    extra_info = raw.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, dict):
        raise _Unusable(f"'extra_info' should be an object, it is {_kind(extra_info)}")
    row = PromptRow(
        prompt_uid="",
        prompt=_check_prompt(raw.get(prompt_key), prompt_key),
        data_source=data_source,
        ground_truth=reward_model["ground_truth"],
        extra_info=extra_info or {},
        origin=origin,
    )
    for name, value in (("reward_model.ground_truth", row.ground_truth), ("extra_info", row.extra_info)):
        try:
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode("utf-8")
        except (TypeError, ValueError) as error:
            # It has to travel to the reward processes and into the sample files.
            raise _Unusable(f"'{name}' holds something JSON has no form for: {error}") from error
    return row


def _check_prompt(prompt: Any, key: str) -> Messages | str:
    """Chat messages without their null fields (parquet structs carry every key), or a non-empty string."""
    if isinstance(prompt, str):
        if not prompt:
            raise _Unusable(f"{key!r} is an empty string")
        _require_text(prompt, key)
        return prompt
    if not isinstance(prompt, list):
        raise _Unusable(f"{key!r} (data.prompt_key) should be chat messages or a string, it is {_kind(prompt)}")
    if not prompt:
        raise _Unusable(f"{key!r} is an empty list of messages")
    messages: Messages = []
    for index, message in enumerate(prompt):
        if not isinstance(message, dict):
            raise _Unusable(f"{key}[{index}] should be an object with role and content, it is {_kind(message)}")
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                raise _Unusable(f"{key}[{index}].{name} should be text, it is {_kind(message.get(name))}")
            _require_text(message[name], f"{key}[{index}].{name}")
        messages.append({name: value for name, value in message.items() if value is not None})
    return messages


def _require_text(text: str, what: str) -> None:
    """JSON can spell halves of surrogate pairs, which no encoding has and no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise _Unusable(f"{what} holds half of a surrogate pair ({half}) at character {error.start + 1}") from error


def _kind(value: Any) -> str:
    """How a value is called in a message to people."""
    if value is None:
        return "missing"
    names = {dict: "an object", list: "a list", str: "text", bool: "true/false", int: "a number", float: "a number"}
    if value == "":
        return "empty text"
    return names.get(type(value), f"of type {type(value).__name__}")


# -- uids -------------------------------------------------------------------------------------------------------------


def _with_uids(rows: list[PromptRow]) -> tuple[list[PromptRow], int]:
    """The rows with their uids, and how many needed a suffix."""
    indexed = [_index_of(row) for row in rows]
    seen_index = Counter((row.data_source, index) for row, index in zip(rows, indexed, strict=True))
    taken: set[str] = set()
    next_suffix: Counter[str] = Counter()
    named: list[PromptRow] = []
    n_duplicates = 0
    for row, index in zip(rows, indexed, strict=True):
        unique = index is not None and seen_index[(row.data_source, index)] == 1
        base = f"{row.data_source}/{index}" if unique else _hash_of(row)
        uid = base
        if uid in taken:
            n_duplicates += 1
        while uid in taken:
            next_suffix[base] += 1
            uid = f"{base}~{next_suffix[base] + 1}"
        taken.add(uid)
        named.append(replace(row, prompt_uid=uid))
    return named, n_duplicates


def _index_of(row: PromptRow) -> str | None:
    index = row.extra_info.get("index")
    usable = isinstance(index, int | str) and not isinstance(index, bool) and index != ""
    return str(index) if usable else None


def _hash_of(row: PromptRow) -> str:
    content = _without_nulls([row.prompt, row.data_source, row.ground_truth, row.extra_info])
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return "x" + xxhash.xxh3_128_hexdigest(canonical.encode("ascii"))


def _without_nulls(value: Any) -> Any:
    """Without null fields of objects: parquet gives a struct every key, JSON only those that were written."""
    if isinstance(value, dict):
        return {str(key): _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
