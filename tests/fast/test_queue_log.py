"""Chained logs against a model of plain lists, and what damage does to them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridsched.errors import QueueError
from hybridsched.sample_queue.log import FileChainedLog, chain_length, log_headers, read_chain


def uids(entries: list[dict[str, Any]]) -> list[int]:
    return [entry["uid"] for entry in entries]


def batch(*numbers: int) -> list[dict[str, Any]]:
    return [{"uid": number} for number in numbers]


@dataclass
class Model:
    """The chain of every incarnation as one plain list."""

    chains: dict[str, list[int]] = field(default_factory=dict)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_history_of_forks_reads_like_plain_lists(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("log")
    model, logs, counter = Model(), {}, 0
    for step in range(data.draw(st.integers(1, 8))):
        name = f"inc{step}"
        parent = data.draw(st.none() | st.sampled_from(sorted(model.chains))) if model.chains else None
        position = data.draw(st.integers(0, len(model.chains[parent]))) if parent else 0
        fork = (parent, position) if parent else None
        logs[name] = FileChainedLog(folder, "ledger", name, fork, "process-crash", run_id="r")
        model.chains[name] = list(model.chains[parent][:position]) if parent else []
        for _ in range(data.draw(st.integers(0, 3))):
            writer = data.draw(st.sampled_from(sorted(logs)))  # a zombie may go on appending to its own file
            numbers = list(range(counter, counter + data.draw(st.integers(0, 4))))
            counter += len(numbers)
            assert len(model.chains[writer]) + len(numbers) == logs[writer].append(batch(*numbers))
            model.chains[writer] += numbers
    for name, expected in model.chains.items():
        start = data.draw(st.integers(0, len(expected) + 2))
        assert expected[start:] == uids(logs[name].entries(start))
        assert expected == uids(read_chain(folder, "ledger", name))
        assert len(expected) == logs[name].position == chain_length(folder, "ledger", name)
    assert list(model.chains) == [header.incarnation for header in log_headers(folder, "ledger")]
    for log in logs.values():
        log.close()


def test_what_is_appended_survives_in_a_readable_file(tmp_path: Path) -> None:
    log = FileChainedLog(tmp_path, "accept", "a", run_id="r")
    assert (log.position, log.append([{"uid": 1, "text": "ü\n\ud800"}, {"uid": 2}]), log.append(batch(3))) == (0, 2, 3)
    lines = [json.loads(line) for line in (tmp_path / "accept" / "a.jsonl").read_bytes().splitlines()]
    header = {"log": "accept", "run_id": "r", "incarnation": "a", "ordinal": 1, "parent": None, "parent_position": 0}
    assert header == lines[0]
    assert [(line["position"], len(line["entries"])) for line in lines[1:]] == [(0, 2), (2, 1)]
    assert log.entries() == [{"uid": 1, "text": "ü\n\ud800"}, {"uid": 2}, {"uid": 3}]


def test_an_incarnation_is_created_once(tmp_path: Path) -> None:
    FileChainedLog(tmp_path, "accept", "a").append(batch(1))
    with pytest.raises(QueueError, match=r"a\.jsonl: exists already"):
        FileChainedLog(tmp_path, "accept", "a")
    assert uids(read_chain(tmp_path, "accept", "a")) == [1]


def test_a_fork_drops_what_the_parent_wrote_behind_it(tmp_path: Path) -> None:
    first = FileChainedLog(tmp_path, "accept", "a")
    first.append(batch(0, 1, 2))
    second = FileChainedLog(tmp_path, "accept", "b", ("a", 2))
    first.append(batch(3))
    second.append(batch(20))
    assert uids(second.entries()) == [0, 1, 20]
    assert uids(first.entries()) == [0, 1, 2, 3]


@pytest.mark.parametrize("cut", [1, 5, 20, 33])
def test_a_torn_last_line_is_ignored_as_a_whole(tmp_path: Path, cut: int) -> None:
    log = FileChainedLog(tmp_path, "accept", "a")
    log.append(batch(0, 1))
    log.append(batch(2, 3))
    path = tmp_path / "accept" / "a.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert uids(read_chain(tmp_path, "accept", "a")) == [0, 1]
    assert uids(_fork(tmp_path, 2, batch(9)).entries()) == [0, 1, 9]


def _fork(folder: Path, position: int, entries: list[dict[str, Any]]) -> FileChainedLog:
    log = FileChainedLog(folder, "accept", "next", ("a", position))
    log.append(entries)
    return log


def test_a_tail_of_zeros_after_a_host_crash_is_torn_too(tmp_path: Path) -> None:
    log = FileChainedLog(tmp_path, "accept", "a")
    log.append(batch(0))
    with open(tmp_path / "accept" / "a.jsonl", "ab") as file:
        file.write(bytes(100) + b'{"uid":5}]}\n')
    assert uids(read_chain(tmp_path, "accept", "a")) == [0]


def test_a_damaged_middle_line_names_file_and_line(tmp_path: Path) -> None:
    log = FileChainedLog(tmp_path, "accept", "a")
    for number in range(3):
        log.append(batch(number))
    path = tmp_path / "accept" / "a.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    flipped = lines[2].replace(b'"uid":1', b'"uid":7')
    for bad in (flipped, b"\n", lines[2][:10] + b"\n", lines[1], b"[1]\n", bytes(20) + b"\r\n"):
        path.write_bytes(b"".join([*lines[:2], bad, lines[3]]))
        with pytest.raises(QueueError, match=r"a\.jsonl: line 3: damaged"):
            read_chain(tmp_path, "accept", "a")
    path.write_bytes(b"".join([lines[0], lines[1], lines[3], lines[2]]))
    with pytest.raises(QueueError, match=r"line 3: damaged \(it starts at entry 2, not at 1\)"):
        read_chain(tmp_path, "accept", "a")


def test_a_fork_behind_the_end_of_the_parent_is_refused(tmp_path: Path) -> None:
    FileChainedLog(tmp_path, "accept", "a").append(batch(0, 1))
    with pytest.raises(QueueError, match=r"continues at entry 3, but only 2 are there"):
        FileChainedLog(tmp_path, "accept", "b", ("a", 3))
    with pytest.raises(QueueError, match="cannot be negative"):
        FileChainedLog(tmp_path, "accept", "b", ("a", -1))
    with pytest.raises(QueueError, match=r"z\.jsonl: not there"):
        FileChainedLog(tmp_path, "accept", "b", ("z", 0))
    assert [header.incarnation for header in log_headers(tmp_path, "accept")] == ["a"]


def test_lines_lost_below_a_fork_are_noticed(tmp_path: Path) -> None:
    FileChainedLog(tmp_path, "accept", "a").append(batch(0, 1))
    FileChainedLog(tmp_path, "accept", "b", ("a", 2)).append(batch(2))
    path = tmp_path / "accept" / "a.jsonl"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(QueueError, match=r"a\.jsonl: ends at entry 0, but a later incarnation continues at 2"):
        read_chain(tmp_path, "accept", "b")


def test_a_damaged_header_and_a_circle_are_named(tmp_path: Path) -> None:
    FileChainedLog(tmp_path, "accept", "a")
    path = tmp_path / "accept" / "a.jsonl"
    header = json.loads(path.read_text())
    path.write_text(json.dumps(header | {"parent": "a"}) + "\n")
    with pytest.raises(QueueError, match="circle"):
        read_chain(tmp_path, "accept", "a")
    path.write_text("{\n")
    with pytest.raises(QueueError, match=r"a\.jsonl: line 1: the header is damaged"):
        read_chain(tmp_path, "accept", "a")


def test_a_log_of_another_run_is_no_parent(tmp_path: Path) -> None:
    FileChainedLog(tmp_path, "accept", "a", run_id="one")
    with pytest.raises(QueueError, match="is the log of run 'one', not 'two'"):
        FileChainedLog(tmp_path, "accept", "b", ("a", 0), run_id="two")


def test_an_incarnation_that_cannot_name_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QueueError, match="cannot name a file"):
        FileChainedLog(tmp_path, "accept", "../a")


def test_a_closed_log_refuses_to_append(tmp_path: Path) -> None:
    log = FileChainedLog(tmp_path, "accept", "a")
    log.close()
    log.close()
    with pytest.raises(QueueError, match="is closed"):
        log.append(batch(1))


def test_an_append_that_cannot_be_taken_back_ends_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = FileChainedLog(tmp_path, "accept", "a")
    log.append(batch(1))

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    monkeypatch.setattr(os, "ftruncate", fail)
    for expected in ("appending failed", "could not be taken back"):
        with pytest.raises(QueueError, match=expected):
            log.append(batch(2))
    assert log.position == 1


def test_durability_decides_about_syncing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    FileChainedLog(tmp_path, "accept", "a", durability="process-crash").append(batch(1))
    assert synced == []
    FileChainedLog(tmp_path, "accept", "b", durability="host-crash").append(batch(1))
    assert len(synced) == 1
