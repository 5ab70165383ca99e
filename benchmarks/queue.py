"""How fast is the sample queue? Writer and reader against the raw limit and against what others do. Ratios, one run.

    python benchmarks/queue.py [--quick] [--json FILE] [--hdf5 FILE] [--folder DIR]

Workload: segments of 64 samples of 8 responses, lognormal lengths with a mean of about 2k tokens, prompts of 512
tokens, Zipf token ids, about 125 bytes of metadata. Time of a write = from samples in memory to durable under the final
name (fsync of file and folder, xxh3-64 of every column); of a read = from the file to samples, verified.

Compared, each durable for writes and interleaved round by round (best of N, so that a busy machine hurts all alike):
raw         the bytes of the segment, already joined: os.write, fsync, rename, fsync(folder); os.read
rawv        the arrays of the segment as they lie in memory: os.pwritev, then the same (for comparison)
pickle      pickle protocol 5 of the samples, same four steps, zlib.crc32 of the bytes
npz         numpy.savez of the same columns, same steps
sqlite      one row per sample (pickled), one transaction per segment, WAL, synchronous=FULL
socket      one pickled sample per request and reply over a local socket to another process; in memory, not durable
socket-1    the same with one pickled response per request
"""

from __future__ import annotations

import sys
from pathlib import Path

# This file is called queue.py: its folder must not hide the standard library's queue module.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

import argparse
import contextlib
import io
import json
import os
import pickle
import platform
import shutil
import socket
import sqlite3
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import h5py
import numpy as np

from hybridsched.model import FinishReason, Response, Sample, SegmentId, VersionRun, WeightVersion
from hybridsched.sample_queue.columns import encode
from hybridsched.sample_queue.files import gather_write
from hybridsched.sample_queue.store import FileSegmentStore

SAMPLES, RESPONSES, PROMPT = 64, 8, 512
WRITE_TO_RAW = 0.5  # DESIGN 15
WRITE_TO_SOCKET = 3.0


def workload(seed: int = 0) -> list[Sample]:
    """One segment's worth of samples."""
    rng = np.random.default_rng(seed)
    ranks = rng.zipf(1.2, 1 << 21) % 152_000
    return [_sample(uid, rng, ranks.astype(np.int32)) for uid in range(SAMPLES)]


def _sample(uid: int, rng: np.random.Generator, ranks: np.ndarray[Any, Any]) -> Sample:
    responses = []
    for _ in range(RESPONSES):
        n = int(np.clip(rng.lognormal(np.log(1700), 0.6), 16, 8192))
        start = int(rng.integers(0, ranks.size - n))
        logprobs = -rng.exponential(1.0, n).astype(np.float32)
        logprobs[rng.random(n) < 0.5] *= 1e-3
        responses.append(
            Response(
                ranks[start : start + n].copy(),
                logprobs,
                (VersionRun(WeightVersion(0, 3), 0, n),),
                FinishReason.STOP,
                reward=float(rng.integers(0, 2)),
                t_start=1e9,
                t_end=1e9 + n / 50,
            )
        )
    extra = {"index": uid, "split": "train", "question": "a question of usual length about some numbers"}
    return Sample(uid, f"train-{uid:08d}", ranks[:PROMPT].copy(), tuple(responses), "math", str(uid), extra)


# ------------------------------------------------------------------ the methods


def fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


@contextlib.contextmanager
def durable_file(path: Path) -> Iterator[int]:
    """A new file for writing: fsync, rename and fsync of the folder at the end."""
    temporary = path.with_suffix(".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    yield fd
    os.fsync(fd)
    os.close(fd)
    os.rename(temporary, path)
    fsync_folder(path.parent)


def write_raw(path: Path, data: bytes | memoryview) -> None:
    """The limit: the same bytes, joined beforehand."""
    with durable_file(path) as fd:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]


def write_scattered(path: Path, pieces: list[Any]) -> None:
    """The limit for what lies scattered in memory: the same arrays, already in order, not joined."""
    with durable_file(path) as fd:
        gather_write(fd, pieces, 0)


def read_raw(path: Path) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


def write_pickle(path: Path, samples: list[Sample]) -> None:
    data = pickle.dumps(samples, protocol=5)
    write_raw(path, struct.pack("<I", zlib.crc32(data)) + data)


def read_pickle(path: Path) -> list[Sample]:
    data = memoryview(read_raw(path))
    if zlib.crc32(data[4:]) != struct.unpack("<I", data[:4])[0]:
        raise ValueError(f"{path} is damaged")
    loaded: list[Sample] = pickle.loads(data[4:])
    return loaded


def write_npz(path: Path, samples: list[Sample]) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, **{name.replace("/", "."): np.concatenate(parts) for name, parts in encode(samples).items()})  # type: ignore[arg-type]
    write_raw(path, buffer.getbuffer())


def read_npz(path: Path) -> dict[str, Any]:
    with np.load(path) as file:  # checks the zip's crc32
        return {name: file[name] for name in file.files}


class Sqlite:
    """One database; a transaction per segment."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None)
        for statement in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL", "CREATE TABLE s (k, data BLOB)"):
            self.connection.execute(statement)

    def write(self, key: int, samples: list[Sample]) -> None:
        self.connection.execute("BEGIN")
        rows = ((key, pickle.dumps(sample, protocol=5)) for sample in samples)
        self.connection.executemany("INSERT INTO s VALUES (?, ?)", rows)
        self.connection.execute("COMMIT")

    def read(self, key: int) -> list[Sample]:
        return [pickle.loads(data) for (data,) in self.connection.execute("SELECT data FROM s WHERE k = ?", (key,))]


class SocketQueue:
    """A queue process: each request puts one pickled sample or gets one back; each has a reply."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            with contextlib.suppress(EOFError):
                self._serve(theirs)
            os._exit(0)
        theirs.close()
        self.socket = ours
        ours.settimeout(60)

    @staticmethod
    def _serve(peer: socket.socket) -> None:
        held: list[Any] = []
        while True:
            request = pickle.loads(_receive(peer))
            if request is None:
                _send(peer, pickle.dumps(held.pop(0), protocol=5))
            else:
                held.append(request)
                _send(peer, pickle.dumps(len(held)))

    def put(self, items: list[Any]) -> None:
        for item in items:
            _send(self.socket, pickle.dumps(item, protocol=5))
            pickle.loads(_receive(self.socket))

    def get(self, n: int) -> list[Any]:
        taken = []
        for _ in range(n):
            _send(self.socket, pickle.dumps(None))
            taken.append(pickle.loads(_receive(self.socket)))
        return taken

    def close(self) -> None:
        self.socket.close()
        os.waitpid(self.pid, 0)


def _send(peer: socket.socket, data: bytes) -> None:
    peer.sendall(struct.pack("<Q", len(data)))
    peer.sendall(data)


def _receive(peer: socket.socket) -> bytearray:
    head = _exactly(peer, 8)
    return _exactly(peer, struct.unpack("<Q", head)[0])


def _exactly(peer: socket.socket, n: int) -> bytearray:
    data, done = bytearray(n), 0
    while done < n:
        count = peer.recv_into(memoryview(data)[done:])
        if count == 0:
            raise EOFError
        done += count
    return data


# ------------------------------------------------------------------ measuring


@dataclass
class Times:
    """Seconds of every round by method."""

    write: dict[str, list[float]] = field(default_factory=dict)
    read: dict[str, list[float]] = field(default_factory=dict)

    @contextlib.contextmanager
    def clock(self, table: dict[str, list[float]], method: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        table.setdefault(method, []).append(time.perf_counter() - start)


def measure(folder: Path, rounds: int) -> tuple[Times, int]:
    """Interleaved rounds; returns the times and the bytes of a segment."""
    samples = workload()
    store = FileSegmentStore(folder / "run", "bench")
    raw_folder = folder / "files"
    raw_folder.mkdir()
    database, server, times, n_bytes = Sqlite(folder / "queue.sqlite"), SocketQueue(), Times(), 0
    try:
        for number in range(-1, rounds):  # round -1 warms up and is thrown away
            table = Times() if number < 0 else times
            n_bytes = one_round(number + 1, samples, store, raw_folder, database, server, table)
    finally:
        server.close()
        database.connection.close()
    return times, n_bytes


def one_round(
    number: int,
    samples: list[Sample],
    store: FileSegmentStore,
    folder: Path,
    database: Sqlite,
    server: SocketQueue,
    times: Times,
) -> int:
    """Every method once, each write followed by its read; a round starts one method later than the round before."""
    segment = SegmentId("bench", "1", number)
    paths = {name: folder / f"{name}-{number}" for name in ("raw", "rawv", "pickle", "npz")}
    responses = [response for sample in samples for response in sample.responses]
    n_bytes = store.write(SegmentId("bench", "source", number), samples).n_bytes
    data = read_raw(store.path(SegmentId("bench", "source", number)))
    pieces = [part for parts in encode(samples).values() for part in parts]
    methods: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
        ("segment", lambda: store.write(segment, samples), lambda: store.read(segment)),
        ("raw", lambda: write_raw(paths["raw"], data), lambda: read_raw(paths["raw"])),
        ("rawv", lambda: write_scattered(paths["rawv"], pieces), lambda: read_raw(paths["rawv"])),
        ("pickle", lambda: write_pickle(paths["pickle"], samples), lambda: read_pickle(paths["pickle"])),
        ("npz", lambda: write_npz(paths["npz"], samples), lambda: read_npz(paths["npz"])),
        ("sqlite", lambda: database.write(number, samples), lambda: database.read(number)),
        ("socket", lambda: server.put(samples), lambda: server.get(len(samples))),
        ("socket-1", lambda: server.put(responses), lambda: server.get(len(responses))),
    ]
    first = number % len(methods)
    for name, write, read in methods[first:] + methods[:first]:
        with times.clock(times.write, name):
            write()
        with times.clock(times.read, name):
            read()
    store.remove(store.list())
    for path in paths.values():
        path.unlink()
    return n_bytes


# ------------------------------------------------------------------ results


def summarise(times: Times, n_bytes: int, folder: Path) -> dict[str, Any]:
    """Best-of-N seconds, ratios, and the targets of DESIGN 15."""
    best = {kind: {name: min(runs) for name, runs in getattr(times, kind).items()} for kind in ("write", "read")}
    to_raw = best["write"]["raw"] / best["write"]["segment"]
    to_socket = {name: best["write"][name] / best["write"]["segment"] for name in ("socket", "socket-1")}
    targets = [
        {"what": "writer against raw write+fsync", "ratio": to_raw, "at_least": WRITE_TO_RAW},
        {"what": "writer against request/reply per sample", "ratio": to_socket["socket"], "at_least": WRITE_TO_SOCKET},
        {
            "what": "writer against request/reply per response",
            "ratio": to_socket["socket-1"],
            "at_least": WRITE_TO_SOCKET,
        },
    ]
    for target in targets:
        target["pass"] = target["ratio"] >= target["at_least"]
    return {
        "benchmark": "queue",
        "machine": f"{platform.node()}, {os.cpu_count()} cores, {os.statvfs(folder).f_bsize} B blocks",
        "rounds": len(times.write["segment"]),
        "samples_per_segment": SAMPLES,
        "segment_bytes": n_bytes,
        "best_s": best,
        "speed_of_segment_to": {
            kind: {name: best[kind][name] / best[kind]["segment"] for name in best[kind]} for kind in best
        },
        "targets": targets,
    }


def show(result: dict[str, Any]) -> None:
    """Print the table and the verdicts."""
    megabytes = result["segment_bytes"] / 1e6
    print(f"{result['machine']}; best of {result['rounds']}; segment = {SAMPLES} samples, {megabytes:.1f} MB")
    heads = [f"{f'{kind} ms':>9}{'samples/s':>11}{'MB/s':>7}{'x':>7}" for kind in ("write", "read")]
    print(f"{'':10} {heads[0]}   {heads[1]}")
    for name in result["best_s"]["write"]:
        cells = []
        for kind in ("write", "read"):
            seconds = result["best_s"][kind][name]
            ratio = result["speed_of_segment_to"][kind][name]
            cells.append(f"{seconds * 1e3:>9.1f}{SAMPLES / seconds:>11.0f}{megabytes / seconds:>7.0f}{ratio:>7.2f}")
        print(f"{name:10} {cells[0]}   {cells[1]}")
    print("x = how much faster the segment is; raw is the limit, sockets are in memory, not durable")
    limit = result["best_s"]["write"]["socket"] / result["best_s"]["write"]["raw"]
    print(f"on this disk even the raw write+fsync is only {limit:.1f} x as fast as the request/reply per sample")
    for target in result["targets"]:
        word = "pass" if target["pass"] else "FAIL"
        print(f"{word}  {target['what']}: {target['ratio']:.2f} (target: at least {target['at_least']})")


def save_hdf5(path: Path, result: dict[str, Any], times: Times) -> None:
    """All rounds as columns, the summary as attributes; written under a temporary name first."""
    temporary = path.with_name(f".{path.name}.tmp")
    with h5py.File(temporary, "w", libver=("v108", "v110")) as file:
        for key in ("benchmark", "machine", "rounds", "samples_per_segment", "segment_bytes"):
            file.attrs[key] = result[key]
        file.attrs["targets"] = json.dumps(result["targets"])
        for kind in ("write", "read"):
            for name, seconds in getattr(times, kind).items():
                dataset = file.create_dataset(f"{kind}/{name}", data=np.array(seconds))
                dataset.attrs["units"] = "seconds"
    os.replace(temporary, path)


def main(arguments: list[str] | None = None) -> int:
    """Exit 0 when all targets are reached, else 1."""
    parser = argparse.ArgumentParser(description="Sample queue: writer and reader against the raw limit and others.")
    parser.add_argument("--quick", action="store_true", help="5 rounds instead of 25")
    parser.add_argument("--json", type=Path, help="write the summary here")
    parser.add_argument("--hdf5", type=Path, default=Path("build/benchmarks/queue.h5"), help="write all rounds here")
    parser.add_argument("--folder", type=Path, default=Path("build"), help="file system to measure")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="queue-bench-", dir=options.folder))
    try:
        times, n_bytes = measure(scratch, 5 if options.quick else 25)
        result = summarise(times, n_bytes, scratch)
    finally:
        shutil.rmtree(scratch)
    show(result)
    options.hdf5.parent.mkdir(parents=True, exist_ok=True)
    save_hdf5(options.hdf5, result, times)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(target["pass"] for target in result["targets"]) else 1


if __name__ == "__main__":
    sys.exit(main())
