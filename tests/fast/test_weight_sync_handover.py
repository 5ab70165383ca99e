"""Same-node hand-over: several readers, deaths on either side, nothing left over. Readers are threads or processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridsched.errors import WeightSyncError
from hybridsched.model import TensorSpec, WeightVersion
from hybridsched.weight_sync import shared_ring
from hybridsched.weight_sync.handover import HandoverReader, HandoverReport, HandoverWriter, sweep
from hybridsched.weight_sync.plan import plan_buckets
from hybridsched.weight_sync.wire import SyncReport

VERSION = WeightVersion(0, 9)
BUCKET = 4096
HANGS_S = 60  # a bound that only a hang reaches
MODEL = {
    "embed": torch.arange(3200, dtype=torch.float32).reshape(50, 64),
    "norm": torch.linspace(-1, 1, 63).to(torch.bfloat16),
    "q": torch.arange(900, dtype=torch.float64).reshape(30, 30),
    "mask": torch.arange(9) % 2 == 0,
    "head": torch.arange(800, dtype=torch.float32).reshape(40, 20).t(),
}
SPECS = [TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in MODEL.items()]
SETTINGS: dict[str, Any] = {"version": VERSION, "bucket_bytes": BUCKET, "join_timeout_s": 20, "bucket_timeout_s": 20}


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[HandoverWriter]:
    with HandoverWriter("run-1", "node0", folder=tmp_path, scratch=tmp_path) as opened:
        yield opened


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [f.exception(HANGS_S) or f.result() for f in futures]


def writing(writer: HandoverWriter, *readers: str, **options: Any) -> Callable[[], HandoverReport]:
    settings = {**SETTINGS, **options}
    source = settings.pop("source", MODEL)
    return lambda: writer.send(SPECS, source.items(), readers=readers, **settings)


def reading(writer: HandoverWriter, name: str, load: Any, **options: Any) -> Callable[[], SyncReport]:
    settings = {"specs": SPECS, **SETTINGS, **options}
    return lambda: HandoverReader(writer.address, name).receive(settings.pop("specs"), load=load, **settings)


def keeper(into: dict[str, torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: into.update({n: t.clone() for n, t in tensors.items()})


def equal(got: dict[str, torch.Tensor]) -> bool:
    return list(got) == list(MODEL) and all(
        got[n].dtype == t.dtype and torch.equal(got[n], t) for n, t in MODEL.items()
    )


def test_two_readers_get_everything_bit_for_bit(writer: HandoverWriter) -> None:
    got: list[dict[str, torch.Tensor]] = [{}, {}]
    report, *read = at_once(
        writing(writer, "h0", "h1"),
        reading(writer, "h0", keeper(got[0])),
        reading(writer, "h1", keeper(got[1])),
    )
    assert [equal(g) for g in got] == [True, True]
    assert (sorted(report.loaded), report.lost) == (["h0", "h1"], {})
    assert [r.checksums for r in read] == [report.sync.checksums] * 2
    assert report.sync.buckets == len(plan_buckets(SPECS, BUCKET))


def test_one_writer_serves_one_version_after_the_other(writer: HandoverWriter) -> None:
    for number in (1, 2, 3):
        got: dict[str, torch.Tensor] = {}
        version = WeightVersion(0, number)
        report, read = at_once(
            writing(writer, "h0", version=version), reading(writer, "h0", keeper(got), version=version)
        )
        assert (report.sync.version, read.version, equal(got)) == (f"0.{number}", f"0.{number}", True)


def test_memory_is_two_buckets_whatever_the_size_of_the_model(
    writer: HandoverWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = shared_ring.make_ring
    monkeypatch.setattr(
        "hybridsched.weight_sync.handover.make_ring", lambda n, scratch: (sizes.append(n), real(n, scratch))[1]
    )
    at_once(writing(writer, "h0"), reading(writer, "h0", keeper({})))
    assert sizes == [2 * BUCKET]


def test_a_loader_may_keep_tensors_only_with_fresh_buffers(writer: HandoverWriter) -> None:
    fresh: dict[str, torch.Tensor] = {}
    reused: dict[str, torch.Tensor] = {}
    at_once(
        writing(writer, "h0", "h1"),
        reading(writer, "h0", fresh.update, fresh_buffers=True),
        reading(writer, "h1", reused.update),
    )
    assert [equal(fresh), equal(reused)] == [True, False]


def test_where_memory_is_short_the_ring_goes_to_the_scratch_folder(
    writer: HandoverWriter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full() -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_ring, "_memory_fd", full)
    got: dict[str, torch.Tensor] = {}
    report, _ = at_once(writing(writer, "h0"), reading(writer, "h0", keeper(got)))
    assert (report.loaded, equal(got)) == (("h0",), True)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == []


def test_no_room_anywhere_names_both_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WeightSyncError, match=r"shared memory: No space .* scratch folder .*: No space"):
        shared_ring.make_ring(1 << 20, tmp_path)


def test_a_killed_reader_is_cut_out_and_the_other_completes(writer: HandoverWriter) -> None:
    script = """
import os, signal, sys
sys.path[:0] = [sys.argv[2]]
import test_weight_sync_handover as t
seen = []
def load(tensors):
    seen.append(tensors)
    if len(seen) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
t.HandoverReader(sys.argv[1], "h0").receive(t.SPECS, load=load, **t.SETTINGS)
"""
    doomed = subprocess.Popen([sys.executable, "-c", script, writer.address, str(Path(__file__).parent)])
    got: dict[str, torch.Tensor] = {}
    try:
        report, _ = at_once(
            writing(writer, "h0", "h1", join_timeout_s=HANGS_S),
            reading(writer, "h1", keeper(got), join_timeout_s=HANGS_S),
        )
        assert (report.loaded, list(report.lost), equal(got)) == (("h1",), ["h0"], True)
        assert "at bucket" in report.lost["h0"]
        assert doomed.wait(HANGS_S) == -9
    finally:
        doomed.kill()
        doomed.wait(HANGS_S)


def test_a_reader_that_hangs_is_cut_out_after_the_deadline(writer: HandoverWriter) -> None:
    release = threading.Event()
    got: dict[str, torch.Tensor] = {}

    def write() -> HandoverReport:
        try:
            return writing(writer, "h0", "h1", bucket_timeout_s=0.5)()
        finally:
            release.set()

    report, stuck, _ = at_once(
        write,
        reading(writer, "h0", lambda tensors: release.wait(HANGS_S)),
        reading(writer, "h1", keeper(got)),
    )
    assert (report.loaded, equal(got)) == (("h1",), True)
    assert "did not answer within" in report.lost["h0"]
    assert isinstance(stuck, WeightSyncError)


def test_a_loader_that_raises_is_reported_with_its_words_and_the_other_completes(writer: HandoverWriter) -> None:
    def bad(tensors: dict[str, torch.Tensor]) -> None:
        raise KeyError("no such parameter")

    report, error, _ = at_once(
        writing(writer, "h0", "h1"), reading(writer, "h0", bad), reading(writer, "h1", keeper({}))
    )
    assert report.loaded == ("h1",)
    assert "no such parameter" in report.lost["h0"]
    with pytest.raises(WeightSyncError, match=r"loading bucket 3 .embed. failed: KeyError"):
        raise error


def test_a_reader_that_never_joins_is_named(writer: HandoverWriter) -> None:
    report, _ = at_once(writing(writer, "h0", "h1", join_timeout_s=0.5), reading(writer, "h1", keeper({})))
    assert (report.loaded, report.lost) == (("h1",), {"h0": "did not join within 0.5 s"})


def test_no_reader_at_all_is_an_error(writer: HandoverWriter) -> None:
    with pytest.raises(WeightSyncError, match=r"no reader is left .h0: did not join within 0.1 s."):
        writing(writer, "h0", join_timeout_s=0.1)()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"version": WeightVersion(0, 8)}, "offers version 0.9, this receiver expects 0.8"),
        ({"bucket_bytes": 8192}, "buckets of 4096 bytes, this receiver 8192"),
        ({"specs": SPECS[:-1]}, "head: only the sender has it"),
    ],
)
def test_a_mismatch_is_named_on_both_sides(writer: HandoverWriter, options: dict[str, Any], word: str) -> None:
    loaded: dict[str, torch.Tensor] = {}
    errors = at_once(writing(writer, "h0"), reading(writer, "h0", loaded.update, **options))
    assert [type(e) for e in errors] == [WeightSyncError, WeightSyncError]
    assert [word in str(e) for e in errors] == [True, True]
    assert loaded == {}


def test_damaged_shared_memory_is_found(writer: HandoverWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    take = HandoverReader._take

    def flip_after_arrival(reader: HandoverReader, channel: Any, bucket: Any, data: Any, *rest: Any) -> None:
        if bucket.index == 2:
            original_receive = channel.receive

            def receive(nbytes: int, timeout_s: float) -> bytes:
                message = original_receive(nbytes, timeout_s)
                data[7] ^= 1
                return message

            channel.receive = receive
        take(reader, channel, bucket, data, *rest)

    monkeypatch.setattr(HandoverReader, "_take", flip_after_arrival)
    errors = at_once(writing(writer, "h0"), reading(writer, "h0", keeper({})))
    assert [type(e) for e in errors] == [WeightSyncError, WeightSyncError]
    assert ["bucket 2 arrived damaged" in str(e) for e in errors] == [True, True]


def test_the_death_of_the_writer_ends_the_reader(writer: HandoverWriter) -> None:
    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield "embed", MODEL["embed"]
        raise OSError("the gather lost a peer")

    class Source(dict[str, torch.Tensor]):
        def items(self) -> Any:
            return source()

    write, read = at_once(writing(writer, "h0", source=Source()), reading(writer, "h0", keeper({})))
    assert isinstance(write, OSError)
    with pytest.raises(WeightSyncError, match=r"hand-over to h0 at .* ended after \d of \d+ buckets: the writer"):
        raise read


def test_abort_frees_a_blocked_reader_and_a_blocked_writer(writer: HandoverWriter) -> None:
    reader = HandoverReader(writer.address, "h0")
    started, release = threading.Event(), threading.Event()

    def load(tensors: dict[str, torch.Tensor]) -> None:
        started.set()
        assert release.wait(HANGS_S)

    def order() -> None:
        assert started.wait(HANGS_S)
        writer.abort("the agent says so")
        reader.abort("the agent says so")
        release.set()

    patient = {**SETTINGS, "bucket_timeout_s": HANGS_S}
    errors = at_once(
        lambda: writer.send(SPECS, MODEL.items(), readers=["h0"], **patient),
        lambda: reader.receive(SPECS, load=load, **patient),
        order,
    )
    assert [type(e) for e in errors[:2]] == [WeightSyncError, WeightSyncError]
    assert ["aborted: the agent says so" in str(e) for e in errors[:2]] == [True, True]


def test_a_reader_without_a_writer_gives_up(tmp_path: Path) -> None:
    reader = HandoverReader(str(tmp_path / "nobody.sock"), "h0")
    with pytest.raises(WeightSyncError, match=r"no hand-over writer at .*nobody.sock within 0.1 s"):
        reader.receive(SPECS, load=keeper({}), **{**SETTINGS, "join_timeout_s": 0.1})


def test_the_folder_is_private_and_gone_after_close(tmp_path: Path) -> None:
    writer = HandoverWriter("run-1", "node0", folder=tmp_path)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    writer.close()
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_sweep_removes_only_the_dead_run(tmp_path: Path) -> None:
    dead, alive = (HandoverWriter(run, "node0", folder=tmp_path) for run in ("dead", "alive"))
    removed = sweep("dead", tmp_path)
    assert [p.name for p in removed] == ["node0.sock", f"hybridsched-{os.getuid()}-dead"]
    assert [p.name for p in tmp_path.iterdir()] == [f"hybridsched-{os.getuid()}-alive"]
    assert sweep("dead", tmp_path) == []
    for writer in (dead, alive):
        writer.close()


def test_a_writer_takes_the_place_of_a_dead_one(tmp_path: Path) -> None:
    HandoverWriter("run-1", "node0", folder=tmp_path)._listener.close()
    with HandoverWriter("run-1", "node0", folder=tmp_path) as writer:
        got: dict[str, torch.Tensor] = {}
        at_once(writing(writer, "h0"), reading(writer, "h0", keeper(got)))
        assert equal(got)


def test_a_planted_link_is_refused_by_writer_and_sweep(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"hybridsched-{os.getuid()}-run-1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WeightSyncError, match="not a folder of this user"):
        HandoverWriter("run-1", "node0", folder=tmp_path)
    with pytest.raises(WeightSyncError, match="not a folder of this user"):
        sweep("run-1", tmp_path)


@pytest.mark.parametrize("name", ["", "..", "a/b", "x" * 81])
def test_names_that_could_leave_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="may hold only"):
        HandoverWriter(name, "node0", folder=tmp_path)


def test_a_path_longer_than_a_socket_address_works(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 90) / ("e" * 90)
    deep.mkdir(parents=True)
    with HandoverWriter("run-1", "node0", folder=deep) as writer:
        got: dict[str, torch.Tensor] = {}
        at_once(writing(writer, "h0"), reading(writer, "h0", keeper(got)))
        assert equal(got)
