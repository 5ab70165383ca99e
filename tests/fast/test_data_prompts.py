"""Prompt files: both kinds give the same rows and uids; whatever is wrong is named with file and row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridsched.data import load_rows
from hybridsched.errors import DataError


def good(index: int | None = 0, text: str = "hi", **more: Any) -> dict[str, Any]:
    return {
        "data_source": "d",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "extra_info": {"split": "train"} | ({} if index is None else {"index": index}),
    } | more


def jsonl(folder: Path, *rows: Any, name: str = "train.jsonl") -> Path:
    path = folder / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def parquet(folder: Path, *rows: dict[str, Any], name: str = "train.parquet") -> Path:
    path = folder / name
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def test_a_row_is_read_as_written(tmp_path: Path) -> None:
    path = jsonl(tmp_path, good(7, reward_model={"ground_truth": ["a", 2]}, ability="ignored"))
    (row,), report = load_rows([path])
    assert row.prompt_uid == "d/7"
    assert row.prompt == [{"role": "user", "content": "hi"}]
    assert (row.data_source, row.ground_truth) == ("d", ["a", 2])
    assert row.extra_info == {"split": "train", "index": 7}
    assert row.origin == f"{path}:1"
    assert (report.n_rows, report.n_usable, report.malformed) == (1, 1, ())


def test_other_keys_can_be_named(tmp_path: Path) -> None:
    row = good(None) | {"question": "plain text", "source": "s"}
    (got,), _ = load_rows([jsonl(tmp_path, row)], prompt_key="question", reward_fn_key="source")
    assert (got.prompt, got.data_source) == ("plain text", "s")


def test_jsonl_and_parquet_twins_give_equal_prompts_and_uids(tmp_path: Path) -> None:
    # Parquet gives every struct all keys, with nulls; the second rows lack some of them.
    rows = [good(0), good(None, "ho"), good(None, prompt=[{"role": "user", "content": "é", "name": "x"}])]
    from_jsonl, _ = load_rows([jsonl(tmp_path, *rows)])
    from_parquet, _ = load_rows([parquet(tmp_path, *rows)])
    assert [(r.prompt_uid, r.prompt) for r in from_jsonl] == [(r.prompt_uid, r.prompt) for r in from_parquet]


def test_uids_do_not_depend_on_other_rows_or_key_order(tmp_path: Path) -> None:
    alone = load_rows([jsonl(tmp_path, good(None, "x"))])[0][0]
    turned = dict(reversed(good(None, "x").items()))
    other = load_rows([jsonl(tmp_path, good(None, "y"), turned)])[0][1]
    assert alone.prompt_uid == other.prompt_uid
    assert alone.prompt_uid.startswith("x") and len(alone.prompt_uid) == 33


def test_an_index_that_repeats_is_no_uid(tmp_path: Path) -> None:
    rows, report = load_rows([jsonl(tmp_path, good(1, "a"), good(1, "b"), good(1, "c", data_source="e"), good(2))])
    assert [row.prompt_uid[:1] for row in rows] == ["x", "x", "e", "d"]
    assert len({row.prompt_uid for row in rows}) == 4
    assert report.n_duplicates == 0


def test_repeated_rows_get_a_suffix_in_file_order(tmp_path: Path) -> None:
    rows, report = load_rows([jsonl(tmp_path, *[good(None)] * 3)])
    base = rows[0].prompt_uid
    assert [row.prompt_uid for row in rows] == [base, f"{base}~2", f"{base}~3"]
    assert report.n_duplicates == 2


def test_a_suffix_never_meets_an_index(tmp_path: Path) -> None:
    # Row 3 hashes like row 1; its suffixed uid may not collide with an index that looks like it.
    base = load_rows([jsonl(tmp_path, good(None))])[0][0].prompt_uid
    source, looks_like = "d", f"{base}~2"
    rows, _ = load_rows([jsonl(tmp_path, good(None), good(looks_like), good(None), good("0"), good(0, "z"))])
    assert rows[1].prompt_uid == f"{source}/{looks_like}"
    assert len({row.prompt_uid for row in rows}) == len(rows)


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(good()).encode() + b"\r\n\n  \n")
    _, report = load_rows([path])
    assert (report.n_rows, report.n_usable) == (1, 1)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{", "not JSON: Expecting property name"),
        ('{"a": NaN}', "NaN is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ([1], "a row is a JSON object, this is a list"),
        (good(data_source=None), "'data_source' \\(data.reward_fn_key\\) should be a name, it is missing"),
        (good(data_source=3), "should be a name, it is a number"),
        (good(reward_model=None), "'reward_model' should be an object with 'ground_truth', it is missing"),
        (good(reward_model={"style": "rule"}), "'reward_model' has no 'ground_truth'"),
        (good(extra_info=[]), "'extra_info' should be an object, it is a list"),
        (good(prompt=None), "should be chat messages or a string, it is missing"),
        (good(prompt=""), "'prompt' is an empty string"),
        (good(prompt=[]), "'prompt' is an empty list of messages"),
        (good(prompt=["hi"]), "prompt\\[0\\] should be an object with role and content, it is text"),
        (good(prompt=[{"content": "hi"}]), "prompt\\[0\\].role should be text, it is missing"),
        (good(prompt=[{"role": "user", "content": None}]), "prompt\\[0\\].content should be text, it is missing"),
    ],
)
def test_a_malformed_row_is_reported_with_file_line_and_reason(tmp_path: Path, bad: Any, reason: str) -> None:
    path = jsonl(tmp_path, good(0), "", bad, good(1))
    with pytest.raises(DataError, match=f"1 of 3 rows are malformed.*\n  {path}:3: .*{reason}"):
        load_rows([path])
    rows, report = load_rows([path], max_malformed_fraction=0.34)
    assert [row.prompt_uid for row in rows] == ["d/0", "d/1"]
    assert [(bad_row.file, bad_row.row) for bad_row in report.malformed] == [(str(path), 3)]
    assert f"{path}:3" in report.summary()


def test_a_malformed_parquet_row_is_reported_with_its_row(tmp_path: Path) -> None:
    path = parquet(tmp_path, good(0), good(1, data_source=None), good(2, extra_info={"index": 2, "raw": b"\x00"}))
    with pytest.raises(DataError, match=f"{path}:2: 'data_source'.*\n  {path}:3: 'extra_info' holds something JSON"):
        load_rows([path])


@pytest.mark.parametrize(("allowed", "refused"), [(0.5, False), (0.49, True)])
def test_the_fraction_counts_over_all_files(tmp_path: Path, allowed: float, refused: bool) -> None:
    files = [jsonl(tmp_path, good(0), name="a.jsonl"), jsonl(tmp_path, "{}", name="b.jsonl")]
    if refused:
        with pytest.raises(DataError, match=r"50.00%; data.max_malformed_fraction allows 49.00%"):
            load_rows(files, max_malformed_fraction=allowed)
    else:
        assert load_rows(files, max_malformed_fraction=allowed)[1].malformed_fraction == 0.5


def test_only_the_first_malformed_rows_are_spelled_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\.\.\. and 95 more"):
        load_rows([jsonl(tmp_path, *["{}"] * 100)])


def test_no_usable_row_is_refused_even_when_all_may_be_malformed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no usable row in .*: 2 rows read, all malformed"):
        load_rows([jsonl(tmp_path, "{}", "{}")], max_malformed_fraction=1.0)


def test_no_files_is_refused() -> None:
    with pytest.raises(DataError, match=r"set data\.train_files"):
        load_rows([])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", None, "does not exist"),
        ("a.jsonl", b"", "is empty \\(0 bytes\\)"),
        ("a.parquet", b"", "is empty \\(0 bytes\\)"),
        ("a.jsonl", b"\n\n", "has no rows"),
        ("a.csv", b"x", "unknown kind of prompt file '.csv'"),
        ("a", b"x", "no extension"),
        ("a.jsonl", b'{}\n{"a": "\xe9"}\n', ":2: not UTF-8 \\(byte 0xe9 at column 8\\).*iconv"),
        ("a.jsonl", "{}\n".encode("utf-16"), "is UTF-16.*iconv"),
        ("a.parquet", b"PAR1 but not really", "is not a readable parquet file"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_cure(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path}.*{message}|{path}{message}"):
        load_rows([path])


def test_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.parquet").mkdir()
    with pytest.raises(DataError, match="is a folder"):
        load_rows([tmp_path / "d.parquet"])


def test_a_truncated_parquet_file_is_refused(tmp_path: Path) -> None:
    path = parquet(tmp_path, good())
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=f"{path} is not a readable parquet file"):
        load_rows([path])


def test_a_parquet_file_without_the_prompt_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no column 'question' \(it has: data_source, prompt, .*Set data.prompt_key"):
        load_rows([parquet(tmp_path, good())], prompt_key="question")


def test_a_parquet_file_without_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    with pytest.raises(DataError, match="has no rows"):
        load_rows([path])
