"""The run log: nothing is lost, any tool opens it, and it reads back as it was written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridsched.errors import ConfigError, RunFolderError
from hybridsched.runlog import series, wal
from hybridsched.runlog.naming import LogFile, metric_name, parse_file, variable_name
from hybridsched.runlog.reader import RunLog
from hybridsched.runlog.sinks import NullRunLog, PrometheusTextfile, TeeRunLog, mirrors
from hybridsched.runlog.writer import HDF5RunLog


class Ticks:
    """A clock that stands until told."""

    def __init__(self) -> None:
        self.t = 100.0

    def now(self) -> float:
        return self.t

    def wall(self) -> float:
        return 1_800_000_000.0 + self.t


def new_log(folder: Path, clock: Ticks | None = None, **kwargs: Any) -> HDF5RunLog:
    clock = clock or Ticks()
    settings: dict[str, Any] = {"run_id": "r-1", "wall": clock.wall, "now": clock.now, "flush_s": 10.0} | kwargs
    return HDF5RunLog(folder / "log", "controller", **settings)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "log").iterdir())


# --- round trip -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "end", [HDF5RunLog.close, HDF5RunLog.flush, lambda log: None], ids=["closed", "flushed", "wal"]
)
def test_events_read_back_as_written_in_any_state_of_the_files(
    tmp_path: Path, end: Callable[[HDF5RunLog], Any]
) -> None:
    clock = Ticks()
    log = new_log(tmp_path, clock)
    log.event("replica", "hybrid.0", old="asleep", new="syncing", reason="hand-over", epoch=3, lent=["a", "ü"])
    clock.t += 1.5
    log.event("run", "run", new="finished")
    end(log)
    first, second = RunLog.open(tmp_path).events()
    assert (first.kind, first.entity, first.old, first.new) == ("replica", "hybrid.0", "asleep", "syncing")
    assert (first.reason, first.detail) == ("hand-over", {"epoch": 3, "lent": ["a", "ü"]})
    assert (second.time - first.time, second.now - first.now, second.detail) == (1.5, 1.5, {})


@pytest.mark.parametrize("end", [HDF5RunLog.close, lambda log: None], ids=["closed", "wal"])
def test_metrics_read_back_with_their_names_and_missing_values(
    tmp_path: Path, end: Callable[[HDF5RunLog], Any]
) -> None:
    log = new_log(tmp_path)
    log.metrics(0, {"val/reward/mean@8": 0.25})
    log.metrics(1, {"timing_s/step": 3.0, "weight_sync/probe_max_diff": float("nan")})
    log.metrics(2, {"timing_s/step": 4.0, "val/reward/mean@8": 0.5})
    end(log)
    curves = RunLog.open(tmp_path).metrics()
    assert sorted(curves) == ["timing_s/step", "val/reward/mean@8"]
    assert curves["timing_s/step"].step.tolist() == [1, 2]
    assert curves["val/reward/mean@8"].value.tolist() == [0.25, 0.5]


def test_text_that_hdf5_cannot_hold_is_kept_as_escapes(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    log.event("fault", "x", reason="nul \0 and half a pair \ud800", detail="\0")
    log.close()
    (event,) = RunLog.open(tmp_path).events()
    assert (event.reason, event.detail) == ("nul \\x00 and half a pair \\ud800", {"detail": "\0"})


def test_details_that_json_does_not_know_do_not_stop_the_caller(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    log.event("sample", "1", count=np.int64(3), where=Path("/x"), tokens=np.arange(2), wrong={("a", 1): 2})
    assert RunLog.open(tmp_path).events()[0].detail.keys() == {"unstorable"}
    log.event("sample", "1", count=np.int64(3), where=Path("/x"), tokens=np.arange(2), names={"b", "a"})
    assert RunLog.open(tmp_path).events()[1].detail == {
        "count": 3,
        "where": "/x",
        "tokens": [0, 1],
        "names": ["a", "b"],
    }


# --- files ------------------------------------------------------------------------------------------------------------


def test_full_files_are_sealed_and_their_wal_is_gone(tmp_path: Path) -> None:
    log = new_log(tmp_path, rows_per_file=16)
    for number in range(40):
        log.event("sample", str(number), new="trained")
    log.maybe_flush()
    assert names(tmp_path) == [
        "controller-events-001-000000.nc",
        "controller-events-001-000001.nc",
        "controller-events-001-000002.wal.jsonl",
    ]
    assert [e.entity for e in RunLog.open(tmp_path).events()] == [str(n) for n in range(40)]


def test_the_open_file_is_rewritten_when_due_and_only_then(tmp_path: Path) -> None:
    clock = Ticks()
    log = new_log(tmp_path, clock, flush_s=10)
    log.event("run", "run", new="started")
    clock.t += 9.9
    assert log.maybe_flush() is False
    assert not (tmp_path / "log/controller-events-001-000000.nc").exists()
    clock.t += 0.2
    assert log.maybe_flush() is True
    with h5py.File(tmp_path / "log/controller-events-001-000000.nc") as file:
        assert (file.attrs["sealed"], file["kind"].asstr()[:].tolist()) == (0, ["run"])


def test_a_second_start_uses_new_names_and_seals_what_the_first_left(tmp_path: Path) -> None:
    first = new_log(tmp_path)
    first.event("run", "run", new="started")
    second = new_log(tmp_path)  # the first one was killed: not closed
    second.event("run", "run", new="restored")
    assert names(tmp_path) == ["controller-events-001-000000.nc", "controller-events-002-000000.wal.jsonl"]
    assert [(e.attempt, e.new) for e in RunLog.open(tmp_path).events()] == [(1, "started"), (2, "restored")]


def test_a_log_torn_in_the_middle_of_a_line_loses_that_line_only(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    log.event("run", "run", new="started")
    log.event("run", "run", new="finished")
    path = tmp_path / "log/controller-events-001-000000.wal.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    assert [e.new for e in RunLog.open(tmp_path).events()] == ["started"]


def test_after_a_host_crash_the_longer_of_wal_and_file_counts(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    for number in range(3):
        log.event("sample", str(number))
    log.flush()
    path = tmp_path / "log/controller-events-001-000000.wal.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] + b"\0" * 50)  # pages that never reached the disk
    assert [e.entity for e in RunLog.open(tmp_path).events()] == ["0", "1", "2"]


def test_a_full_disk_loses_no_row_and_does_not_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = new_log(tmp_path)
    log.event("sample", "0")

    def half(fd: int, data: bytes) -> int:
        if len(data) > 10:
            return real_write(fd, data[:10])
        raise OSError(28, "No space left on device")

    real_write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(wal.os, "write", half)
        patch.setattr(series, "write_netcdf", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left")))
        log.event("sample", "1")
        log.event("sample", "2")
        log.flush()
        assert "No space left" in log.problem
        assert [e.entity for e in RunLog.open(tmp_path).events()] == ["0"]
    log.event("sample", "3")
    assert [e.entity for e in RunLog.open(tmp_path).events()] == ["0", "1", "2", "3"]
    log.flush()
    assert log.problem == ""


def test_a_folder_that_cannot_be_made_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("in the way")
    with pytest.raises(RunFolderError, match="run log cannot be written"):
        new_log(tmp_path)


def test_a_folder_without_a_log_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="holds no run log"):
        RunLog.open(tmp_path)


# --- kill -9 ----------------------------------------------------------------------------------------------------------

_VICTIM = """
import itertools, sys, threading, time
from pathlib import Path
from hybridsched.runlog.writer import HDF5RunLog
log = HDF5RunLog(Path(sys.argv[1]), "controller", run_id="r", wall=time.time, now=time.monotonic, flush_s=0.001,
                 rows_per_file=64)
def flush():
    while True:
        log.maybe_flush()
threading.Thread(target=flush, daemon=True).start()
for number in itertools.count():
    log.event("sample", str(number))
    if number % 10 == 0:
        log.metrics(number, {"a/b": number})
    sys.stdout.write(f"{number}\\n"); sys.stdout.flush()
"""


@pytest.mark.parametrize("rows", [1, 70, 400])
def test_kill_9_loses_nothing_that_was_reported(tmp_path: Path, rows: int) -> None:
    victim = subprocess.Popen(
        [sys.executable, "-c", _VICTIM, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert victim.stdout is not None
    for line in victim.stdout:
        if int(line) >= rows:
            break
    victim.send_signal(signal.SIGKILL)
    reported = rows + sum(1 for line in victim.stdout if line.endswith("\n"))
    victim.wait()
    log = RunLog.open(tmp_path)
    entities = [e.entity for e in log.events()]
    assert len(entities) >= reported + 1
    assert entities == [str(n) for n in range(len(entities))]
    steps = log.metrics()["a/b"].step.tolist()
    assert steps == list(range(0, 10 * len(steps), 10))
    assert len(steps) >= reported // 10 + 1
    new_log(tmp_path).close()  # the next start tidies up, and changes nothing
    assert [e.entity for e in RunLog.open(tmp_path).events()] == entities
    assert not [name for name in names(tmp_path) if name.endswith(".jsonl")]


def test_a_thread_flushes_while_events_arrive(tmp_path: Path) -> None:
    log = new_log(tmp_path, rows_per_file=32, flush_s=1e-9)
    stop = threading.Event()

    def flush() -> None:
        while not stop.is_set():
            log.flush()

    thread = threading.Thread(target=flush)
    thread.start()
    for number in range(500):
        log.event("sample", str(number))
        log.metrics(number, {"x": float(number)})
    stop.set()
    thread.join()
    log.close()
    reader = RunLog.open(tmp_path)
    assert [e.entity for e in reader.events()] == [str(n) for n in range(500)]
    assert reader.metrics()["x"].value.tolist() == list(map(float, range(500)))
    assert not [name for name in names(tmp_path) if not name.endswith(".nc")]


def test_reading_while_files_are_sealed_sees_every_row_reported_before(tmp_path: Path) -> None:
    log = new_log(tmp_path, rows_per_file=16)
    seen: list[int] = []
    for number in range(100):
        log.event("sample", str(number))
        if number % 7 == 0:
            log.maybe_flush()
        if number % 5 == 0:
            seen.append(len(RunLog.open(tmp_path).events()))
    assert seen == [n + 1 for n in range(0, 100, 5)]


# --- names ------------------------------------------------------------------------------------------------------------


@given(st.text(min_size=1, max_size=30) | st.text("ab_/x0@", min_size=1, max_size=12))
def test_variable_names_are_plain_and_give_the_metric_back(name: str) -> None:
    variable = variable_name(name)
    assert set(variable) <= set("abcdefghijklmnopqrstuvwxyz0123456789_")
    assert metric_name(variable) == name


@pytest.mark.parametrize(
    ("metric", "variable"),
    [
        ("dynamic_resource/mq_size", "dynamic_resource__mq_size"),
        ("val/reward/mean@8", "val__reward__mean_x40_8"),
        ("step", "_x73_tep"),
        ("replica/hybrid.0/unfinished", "replica__hybrid_x2e_0__unfinished"),
    ],
)
def test_variable_names_of_real_metrics(metric: str, variable: str) -> None:
    assert variable_name(metric) == variable


def test_file_names_parse_back_and_foreign_files_do_not() -> None:
    file = LogFile("agent.3", "metrics", 12, 345)
    assert parse_file(file.data) == (file, ".nc")
    assert parse_file(file.wal) == (file, ".wal.jsonl")
    assert [parse_file(name) for name in (".x-events-001-000000.nc.tmp", "run.nc", "metrics.prom")] == [None] * 3


# --- other tools ------------------------------------------------------------------------------------------------------


def test_xarray_opens_metrics_events_and_the_export(tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("h5netcdf")
    log = new_log(tmp_path)
    log.metrics(1, {"rollout/reward/mean": 0.5})
    log.metrics(2, {"rollout/reward/mean": 0.75, "timing_s/step": 3.0})
    log.event("decision", "activate", new="yes", reason="gap")
    log.close()
    with xarray.open_dataset(tmp_path / "log/controller-metrics-001-000000.nc", engine="h5netcdf") as data:
        assert data["rollout__reward__mean"].sel(step=2).item() == 0.75
        assert np.isnan(data["timing_s__step"].sel(step=1).item())
        assert (data["timing_s__step"].attrs["long_name"], data["timing_s__step"].attrs["units"]) == (
            "timing_s/step",
            "s",
        )
        assert set(data.coords) == {"step", "time", "now"}
        assert str(data["time"].dtype).startswith("datetime64")
    with xarray.open_dataset(tmp_path / "log/controller-events-001-000000.nc", engine="h5netcdf") as data:
        assert data["reason"].values.tolist() == ["gap"]
    with xarray.open_dataset(RunLog.open(tmp_path).export_nc(tmp_path / "run.nc"), engine="h5netcdf") as data:
        assert data.sizes == {"step": 2, "event": 1}
        assert data["event_kind"].item() == "decision"
        assert data["rollout__reward__mean"].values.tolist() == [0.5, 0.75]


def test_the_export_opens_with_the_netcdf4_engine(tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("netCDF4")
    log = new_log(tmp_path)
    log.metrics(1, {"a": 0.5})
    log.event("run", "run", new="finished")
    log.close()
    with xarray.open_dataset(RunLog.open(tmp_path).export_nc(tmp_path / "run.nc"), engine="netcdf4") as data:
        assert data["a"].values.tolist() == [0.5]


@pytest.mark.parametrize("command", [["h5dump", "-H"], ["ncdump", "-h"]], ids=lambda c: c[0])
def test_command_line_tools_read_the_files(tmp_path: Path, command: list[str]) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    log = new_log(tmp_path)
    log.metrics(1, {"a/b": 0.5})
    log.close()
    path = tmp_path / "log/controller-metrics-001-000000.nc"
    assert "a__b" in subprocess.run([*command, str(path)], check=True, capture_output=True, text=True).stdout


def test_every_variable_hangs_on_a_dimension_scale_and_is_readable_by_hdf5_1_10(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    log.metrics(1, {"a": 0.5})
    log.close()
    with h5py.File(tmp_path / "log/controller-metrics-001-000000.nc") as file:
        assert h5py.h5ds.is_scale(file["step"].id)
        assert [file["a"].dims[0].keys(), file["a"].dims[0][0].name] == [["step"], "/step"]
        assert np.isnan(file["a"].attrs["_FillValue"][0])
        assert file.id.get_create_plist().get_version()[0] <= 3


def test_parquet_export(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    log = new_log(tmp_path)
    log.metrics(1, {"a/b": 0.5})
    log.event("run", "run", new="finished", reason="end of data")
    metrics, events = RunLog.open(tmp_path).export_parquet(tmp_path / "out")
    assert pq.read_table(metrics).column("a/b").to_pylist() == [0.5]
    assert pq.read_table(events).column("reason").to_pylist() == ["end of data"]


# --- history ----------------------------------------------------------------------------------------------------------


def test_rows_of_one_step_are_joined_and_the_later_value_holds(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    log.metrics(3, {"timing_s/step": 1.0, "x": 1.0})
    log.metrics(3, {"val/reward/mean@1": 0.5, "x": 2.0})
    table = RunLog.open(tmp_path).table()
    assert table.step.tolist() == [3]
    assert {name: column.tolist() for name, column in table.columns.items()} == {
        "timing_s/step": [1.0],
        "x": [2.0],
        "val/reward/mean@1": [0.5],
    }


def test_steps_behind_a_rollback_are_not_history(tmp_path: Path) -> None:
    clock = Ticks()
    log = new_log(tmp_path, clock)
    for step in (1, 2, 3, 4):
        clock.t += 1
        log.metrics(step, {"reward": float(step)})
    clock.t += 1
    log.event("run", "run", new="restored", reason="checkpoint", version=[1, 2])
    clock.t += 1
    log.metrics(3, {"reward": 30.0})
    assert RunLog.open(tmp_path).metrics()["reward"].value.tolist() == [1.0, 2.0, 30.0]
    assert len(RunLog.open(tmp_path).metric_rows) == 5


def test_a_clock_set_back_does_not_reorder_the_events_of_a_process(tmp_path: Path) -> None:
    clock = Ticks()
    log = new_log(tmp_path, clock)
    for number, t in enumerate((100.0, 50.0, 101.0)):
        clock.t = t
        log.event("sample", str(number))
    assert [e.entity for e in RunLog.open(tmp_path).events()] == ["0", "1", "2"]


# --- sinks ------------------------------------------------------------------------------------------------------------


def test_a_mirror_that_fails_is_dropped_and_the_log_goes_on(tmp_path: Path) -> None:
    class Broken(NullRunLog):
        calls = 0

        def event(self, kind: str, entity: str, **rest: Any) -> None:
            self.calls += 1
            raise OSError("no")

    log, broken = new_log(tmp_path), Broken()
    tee = TeeRunLog([log, broken])
    tee.event("run", "run", new="started")
    tee.event("run", "run", new="finished", reason="x", cycles=3)
    tee.close()
    assert broken.calls == 1
    assert [e.new for e in RunLog.open(tmp_path).events()] == ["started", "finished"]


def test_prometheus_text_has_the_newest_values_and_counts_of_events(tmp_path: Path) -> None:
    sink = PrometheusTextfile(tmp_path / "metrics.prom", 'r"1')
    sink.event("fault", "hybrid.0", new="cut out")
    sink.metrics(1, {"dynamic_resource/mq_size": 3.0})
    sink.metrics(2, {"dynamic_resource/mq_size": 4.0, "x": float("nan")})
    lines = (tmp_path / "metrics.prom").read_text().splitlines()
    assert 'hybridsched_dynamic_resource_mq_size{run="r\\"1",metric="dynamic_resource/mq_size"} 4.0' in lines
    assert 'hybridsched_events_total{run="r\\"1",kind="fault",new="cut out"} 1' in lines
    assert 'hybridsched_x{run="r\\"1",metric="x"} NaN' in lines


@pytest.mark.parametrize(("logger", "package"), [("tensorboard", "tensorboard"), ("wandb_offline", "wandb")])
def test_a_mirror_whose_package_is_missing_is_a_config_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logger: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"needs the package {package}: pip install {package}"):
        mirrors(["console", logger], tmp_path, run_id="r", project="p", name="n")


def test_the_wal_is_plain_json_lines(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    log.metrics(7, {"a/b": 0.5})
    (line,) = (tmp_path / "log/controller-metrics-001-000000.wal.jsonl").read_text().splitlines()
    assert json.loads(line) == [1_800_000_100.0, 100.0, 7, {"a/b": 0.5}]
