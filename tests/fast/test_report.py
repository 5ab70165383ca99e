"""Reports: figures worked out by hand, timelines, one self-contained page, stories, comparison, live view."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_log_kit import CYCLES, NOT_LENT, START, Clock, pictures, write_run

from hybridsched.errors import RunFolderError, UserError
from hybridsched.report import LiveView, compare, explain, summarize, write_html
from hybridsched.report.live import StatusLine
from hybridsched.report.resource_plot import zoom
from hybridsched.report.run_data import load_run
from hybridsched.report.style import to_png, to_svg
from hybridsched.report.text import columns, duration, show, sparkline
from hybridsched.report.timeline import ACTIVITIES, Interval, clip, shares, thin, timeline
from hybridsched.runlog.rows import EventRow
from hybridsched.runlog.writer import HDF5RunLog


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("synthetic"))


@pytest.fixture(scope="module")
def page(synthetic: Path) -> str:
    return write_html(synthetic, synthetic / "report.html").read_text(encoding="utf-8")


def new_log(folder: Path, clock: Clock) -> HDF5RunLog:
    return HDF5RunLog(folder / "log", "controller", run_id="r", wall=clock.wall, now=clock.now)


def event(t: float, kind: str, entity: str, new: str, old: str = "") -> EventRow:
    return EventRow(t, t, kind, entity, old, new, "")


# --- summary ----------------------------------------------------------------------------------------------------------


def test_summary_figures_worked_by_hand(tmp_path: Path) -> None:
    clock = Clock()
    log = new_log(tmp_path, clock)
    log.event("run", "run", new="started")
    log.metrics(0, {"val/reward/mean@2": 0.125})
    for number in range(1, 21):
        clock.t += 2.0
        values = {"timing_s/step": 2.0, "timing_s/gen": 0.5, "rollout/reward/mean": number / 100}
        use = {"dynamic_resource/train_resource_utilization": 0.25 if number % 2 else 0.75}
        log.metrics(
            number, values | use | {"perf/total_num_tokens": 300.0, "samples/trained": 8.0, "samples/stale": 1.0}
        )
    log.metrics(20, {"val/reward/mean@2": 0.5, "val/reward/best@2": 0.75})
    for seconds in (1.0, 3.0):
        log.event("switch", "pool", new="activated", reason="gap", seconds=seconds, lent=["hybrid.0"])
        log.event("switch", "pool", new="deactivated", reason="enough", seconds=0.5)
    log.event("switch", "pool", new="activated", reason="validation", seconds=100.0)
    log.event("switch", "pool", new="deactivated", reason="validation is done", seconds=100.0)
    log.event("sync", "0.20", new="second sync skipped", reason="surplus")
    log.event("worker", "hybrid.0", new="exited", reason="signal 9")
    clock.t += 1.0
    log.event("run", "run", new="finished", reason="end of data")
    log.event("worker", "trainer.0", new="exited", reason="asked for")
    log.close()
    assert summarize(tmp_path) == {
        "run_id": tmp_path.name,
        "outcome": "finished",
        "reason": "end of data",
        "cycles": 20,
        "version": 20,
        "attempts": 1,
        "lineages": 1,
        "wall_clock_s": 41.0,
        "reward_first": 0.015,
        "reward_last": 0.195,
        "val_reward_first": 0.125,
        "val_reward_last": 0.5,
        "activations": 2,
        "deactivations": 2,
        "skipped_syncs": 1,
        "switch_cost_s": 2.5,
        "utilizations": {"train": 0.5, "rollout": None, "cluster": None, "exact": None},
        "samples": {"trained": 160, "stale": 20, "filtered": 0, "failed": 0, "surplus": 0},
        "tokens": 6000,
        "tokens_per_s": 150.0,
        "deaths": 1,
        "timings_s": {"step": 2.0, "gen": 0.5},
        "resource_time": {},
    }


def test_reward_of_few_cycles_takes_at_least_one(tmp_path: Path) -> None:
    log = new_log(tmp_path, Clock())
    for number, reward in enumerate((0.25, 0.5, 0.75), start=1):
        log.metrics(number, {"timing_s/step": 1.0, "rollout/reward/mean": reward})
    summary = summarize(tmp_path)
    assert (summary["reward_first"], summary["reward_last"]) == (0.25, 0.75)


def test_an_empty_run_has_a_summary_without_figures(tmp_path: Path) -> None:
    log = new_log(tmp_path, Clock())
    log.event("run", "run", new="started")
    summary = summarize(tmp_path)
    assert (summary["outcome"], summary["cycles"]) == ("running or killed", 0)
    assert (summary["reward_first"], summary["tokens_per_s"], summary["switch_cost_s"]) == (None, None, None)
    assert json.loads(json.dumps(summary)) == summary


def test_a_resumed_run_counts_only_the_time_its_controller_was_there(tmp_path: Path) -> None:
    clock = Clock()
    first = new_log(tmp_path, clock)
    first.event("run", "run", new="started")
    clock.t = 10.0
    first.metrics(1, {"timing_s/step": 10.0, "rollout/reward/mean": 0.1})
    clock.t = 19.0
    first.metrics(2, {"timing_s/step": 9.0, "rollout/reward/mean": 0.9})
    clock.t = 1000.0
    second = new_log(tmp_path, clock)
    second.event("run", "run", new="started")
    second.event("run", "run", new="restored", version=[1, 1])
    clock.t = 1012.0
    second.metrics(2, {"timing_s/step": 12.0, "rollout/reward/mean": 0.2})
    summary = summarize(tmp_path)
    assert (summary["wall_clock_s"], summary["attempts"], summary["lineages"]) == (31.0, 2, 2)
    assert (summary["cycles"], summary["reward_last"]) == (2, 0.2)


def test_verdicts_come_from_the_ledger_when_there_is_one(tmp_path: Path) -> None:
    from hybridsched.sample_queue.log import LEDGER, FileChainedLog

    new_log(tmp_path, Clock()).event("run", "run", new="started")
    chain = FileChainedLog(tmp_path / "queue", LEDGER, "a", durability="process-crash")
    chain.append([{"uid": uid, "verdict": "surplus" if uid > 4 else "trained"} for uid in range(7)])
    assert summarize(tmp_path)["samples"] == {"trained": 5, "stale": 0, "filtered": 0, "failed": 0, "surplus": 2}


def test_a_folder_without_a_run_is_a_user_error(tmp_path: Path) -> None:
    for act in (summarize, lambda folder: explain(folder, "run"), lambda folder: write_html(folder, folder / "x.html")):
        with pytest.raises(RunFolderError, match="holds no run log"):
            act(tmp_path)


# --- timeline ---------------------------------------------------------------------------------------------------------


def test_intervals_follow_activities_and_equal_neighbours_are_one() -> None:
    events = [
        event(0, "activity", "standalone.0", "rollout"),
        event(1, "activity", "standalone.0", "rollout"),
        event(3, "activity", "standalone.0", "sync"),
        event(3, "activity", "standalone.0", "rollout"),
        event(5, "run", "run", "finished"),
    ]
    assert timeline(events) == {"standalone.0": [Interval(0, 5, "rollout")]}


def test_a_lent_gpu_does_what_its_hybrid_does_and_only_while_it_is_ready() -> None:
    events = [
        event(0, "activity", "trainer.0", "wait"),
        event(0, "activity", "hybrid.0", "idle"),
        event(1, "activity", "trainer.0", "switch"),
        event(2, "tenancy", "trainer.0", "hybrid", "handover"),
        event(2, "activity", "hybrid.0", "idle"),
        event(3, "replica", "hybrid.0", "ready", "held"),
        event(3, "activity", "hybrid.0", "rollout"),
        event(6, "activity", "hybrid.0", "idle"),
        event(7, "activity", "trainer.0", "switch"),
        event(7, "replica", "hybrid.0", "draining", "ready"),
        event(7, "activity", "hybrid.0", "switch"),
        event(8, "activity", "hybrid.0", "idle"),
        event(8, "activity", "trainer.0", "train"),
    ]
    assert timeline(events, end=10) == {
        "trainer.0": [
            Interval(0, 1, "wait"),
            Interval(1, 3, "switch"),
            Interval(3, 6, "rollout"),
            Interval(6, 7, "idle"),
            Interval(7, 8, "switch"),
            Interval(8, 10, "train"),
        ]
    }


def test_a_hybrid_over_two_gpus_colours_both_and_its_death_leaves_them_idle() -> None:
    events = [event(0, "activity", f"trainer.{i}", "switch") for i in range(4)]
    events += [event(0, "worker", f"hybrid.{i}", "up") for i in range(2)]
    events += [event(1, "replica", "hybrid.1", "ready"), event(1, "activity", "hybrid.1", "rollout")]
    events += [event(4, "replica", "hybrid.1", "failed", "ready")]
    rows = timeline(events, end=6)
    lent = [Interval(0, 1, "switch"), Interval(1, 4, "rollout"), Interval(4, 6, "idle")]
    assert [rows["trainer.2"], rows["trainer.3"]] == [lent, lent]
    assert rows["trainer.0"] == [Interval(0, 6, "switch")]


def test_a_start_after_a_kill_leaves_a_gap() -> None:
    events = [
        event(0, "activity", "trainer.0", "train"),
        event(5, "sample", "1", "stale"),
        event(90, "run", "run", "started"),
        event(92, "activity", "trainer.0", "train"),
        event(93, "run", "run", "stopped"),
    ]
    assert timeline(events, end=100) == {"trainer.0": [Interval(0, 5, "train"), Interval(92, 93, "train")]}


def test_shares_of_time_by_kind_of_row() -> None:
    rows = {
        "standalone.0": [Interval(0, 3, "rollout"), Interval(3, 4, "sync")],
        "standalone.1": [Interval(0, 4, "rollout")],
        "trainer.0": [Interval(0, 1, "train"), Interval(1, 4, "wait")],
    }
    found = {kind: {k: v for k, v in part.items() if v} for kind, part in shares(rows).items()}
    assert found == {"standalone": {"rollout": 0.875, "sync": 0.125}, "trainer": {"train": 0.25, "wait": 0.75}}
    late = {kind: {k: v for k, v in part.items() if v} for kind, part in shares(rows, 3, 4).items()}
    assert late == {"standalone": {"rollout": 0.5, "sync": 0.5}, "trainer": {"wait": 1.0}}


_STEPS = st.lists(st.tuples(st.floats(0.25, 5), st.sampled_from(ACTIVITIES)), min_size=1, max_size=60)


@given(_STEPS)
def test_intervals_never_overlap_and_cover_everything(steps: list[tuple[float, str]]) -> None:
    t, events = 0.0, []
    for seconds, what in steps:
        events.append(event(t, "activity", "standalone.0", what))
        t += seconds
    row = timeline(events, end=t)["standalone.0"]
    assert (row[0].start, row[-1].end) == (0.0, t)
    assert all(a.end == b.start and a.what != b.what for a, b in pairwise(row))


@given(_STEPS, st.integers(2, 20))
def test_thinning_keeps_order_ends_and_the_number_asked_for(steps: list[tuple[float, str]], bins: int) -> None:
    t, intervals = 0.0, []
    for seconds, what in steps:
        intervals.append(Interval(t, t + seconds, what))
        t += seconds
    thinned = thin(intervals, bins)
    assert len(thinned) <= bins
    assert thinned[0].start == 0.0
    assert thinned[-1].end == pytest.approx(t)
    assert all(a.end <= b.start + 1e-9 for a, b in pairwise(thinned))


def test_clipping_cuts_at_both_ends() -> None:
    assert clip([Interval(0, 2, "train"), Interval(2, 5, "wait")], 1, 3) == [
        Interval(1, 2, "train"),
        Interval(2, 3, "wait"),
    ]


def test_the_synthetic_run_shows_a_cycle_without_lending(synthetic: Path) -> None:
    run = load_run(synthetic)
    ends = {row.step: row.time for row in run.log.history()}
    rows = timeline(run.log.event_rows)
    assert list(rows) == ["standalone.0", "standalone.1", "trainer.0"]
    did = {
        step: {i.what for i in clip(rows["trainer.0"], ends[step - 1], ends[step]) if i.seconds > 1e-6}
        for step in (NOT_LENT, NOT_LENT + 1)
    }
    assert "rollout" in did[NOT_LENT]
    assert "rollout" not in did[NOT_LENT + 1]


# --- pictures and page ------------------------------------------------------------------------------------------------


class _Page(HTMLParser):
    """Collects tags, references and visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_one_file_without_script_or_outside_references(page: str) -> None:
    seen = _Page(page)
    assert not {"script", "link", "iframe", "img", "object"} & set(seen.tags)
    assert [reference for reference in seen.references if not reference.startswith("#")] == []
    assert set(re.findall(r"url\((.)", page)) <= {"#"}
    assert "@import" not in page
    assert seen.tags.count("svg") == 9


def test_text_of_the_run_is_escaped(page: str) -> None:
    assert "<script>" not in page
    assert "<b>signal 9</b>" not in page
    text = _Page(page).text
    assert "synthetic <script>alert(1)</script>" in text
    assert "<b>signal 9</b>" in text


def test_the_page_tells_figures_decisions_faults_and_configuration(page: str) -> None:
    text = _Page(page).text
    for part in (
        "finished: end of data",
        "surplus of 12 samples",
        "reissued",
        "trigger_parameter_sync_step: 4",
        "0.375",
    ):
        assert part in text
    assert text.count("hybrids are lent") == CYCLES - 1


def test_pictures_take_the_colour_of_the_page(page: str) -> None:
    assert "currentColor" in page
    assert "#010203" not in page


def test_a_killed_run_and_a_run_without_a_cycle_can_be_reported(tmp_path: Path) -> None:
    killed = write_run(tmp_path / "killed", finish=False)
    assert "running or killed" in write_html(killed, tmp_path / "killed.html").read_text()
    young = tmp_path / "young"
    new_log(young, Clock()).event("run", "run", new="started")
    text = write_html(young, tmp_path / "young.html").read_text()
    assert _Page(text).tags.count("svg") == 9
    assert "The policy has not been asked yet." in text


def test_a_report_that_cannot_be_written_is_a_user_error(synthetic: Path) -> None:
    with pytest.raises(RunFolderError, match="cannot be written"):
        write_html(synthetic, synthetic / "no" / "such" / "folder.html")


def test_every_picture_draws_something(synthetic: Path) -> None:
    for name, figure in pictures(synthetic).items():
        assert any(axes.has_data() for axes in figure.axes), name
        assert to_png(figure).startswith(b"\x89PNG"), name


def test_an_svg_is_the_same_for_the_same_run(synthetic: Path) -> None:
    first, second = (to_svg(zoom(load_run(synthetic)), 'a "b" <c>') for _ in range(2))
    assert first == second
    assert first.startswith('<svg role="img" aria-label="a &quot;b&quot; &lt;c>"')


# --- stories ----------------------------------------------------------------------------------------------------------


def test_the_story_of_a_replica_has_its_transitions_and_reasons(synthetic: Path) -> None:
    story = explain(synthetic, "standalone.1").splitlines()
    assert story[0].startswith("standalone.1 in run synthetic-1; times in seconds since 2027-")
    assert any("ready -> failed" in line and "because: killed by signal 9 (SIGKILL)" in line for line in story)
    assert not any("standalone.0" in line.split("  ")[2:3] for line in story)


def test_a_replica_is_not_mistaken_for_one_whose_name_begins_alike(tmp_path: Path) -> None:
    log = new_log(tmp_path, Clock())
    log.event("replica", "hybrid.1", new="ready")
    log.event("replica", "hybrid.10", new="ready")
    log.event("switch", "pool", new="activated", lent=["hybrid.10"])
    log.event("switch", "pool", new="activated", lent=["hybrid.1"])
    log.event("segment", "hybrid.1/a-00000001", new="sealed")
    lines = explain(tmp_path, "hybrid.1").splitlines()[1:]
    assert [line.split()[2] for line in lines] == ["hybrid.1", "pool", "hybrid.1/a-00000001"]


def test_the_story_of_a_sample_goes_through_log_accept_log_and_ledger(tmp_path: Path) -> None:
    from hybridsched.sample_queue.log import ACCEPT_LOG, LEDGER, FileChainedLog
    from hybridsched.sample_queue.store import FileSegmentStore

    log = new_log(tmp_path, Clock())
    log.event("sample", "7", new="reissued", reason="hybrid.0 died")
    log.event("lease", "7", new="dropped")
    log.event("segment", "hybrid.0/a001-00000003", new="sealed", reason="age")
    FileSegmentStore(tmp_path, "r", "process-crash")
    queue = tmp_path / "queue"
    accept = FileChainedLog(queue, ACCEPT_LOG, "a", durability="process-crash")
    accept.append([{"uid": 7, "segment": ["hybrid.0", "a001", 3], "row": 5}])
    ledger = FileChainedLog(queue, LEDGER, "a", durability="process-crash")
    ledger.append([{"uid": 7, "verdict": "trained", "prompt_uid": "p", "epoch": 0, "version": [0, 2], "collection": 9}])
    lines = explain(tmp_path, "7").splitlines()[1:]
    assert len(lines) == 5
    assert "reissued  hybrid.0 died" in lines[0]
    assert "hybrid.0/a001-00000003 sealed  age" in lines[1]
    assert "no longer on disk" in lines[2]
    assert "accepted as number 0: row 5 of segment hybrid.0/a001-00000003" in lines[3]
    assert "verdict trained under version 0.2, collection 9 (prompt p, epoch 0)" in lines[4]
    assert "dropped" in explain(tmp_path, "lease 7")


@pytest.mark.parametrize("word", ["decision", "decisions", "faults", "samples", "pool", "run", "syncs", "lending"])
def test_kinds_of_events_have_stories_in_singular_and_plural(synthetic: Path, word: str) -> None:
    assert len(explain(synthetic, word).splitlines()) > 1


def test_the_story_of_a_weight_version_ends_with_its_figures(synthetic: Path) -> None:
    story = explain(synthetic, "0.4")
    assert "2 receivers, attempt 1" in story
    assert "cycle 4: " in story.splitlines()[-1]


def test_an_unknown_entity_is_a_user_error_that_proposes_names(synthetic: Path) -> None:
    with pytest.raises(
        UserError, match=r"nothing in this run is called 'standalone\.7'; did you mean standalone\.[01]"
    ):
        explain(synthetic, "standalone.7")
    with pytest.raises(UserError, match="nothing is recorded of sample 99999"):
        explain(synthetic, "99999")


# --- comparison, live view, text --------------------------------------------------------------------------------------


def test_comparison_has_a_column_a_run_and_changes_against_the_first(tmp_path: Path) -> None:
    for name, seconds in (("one", 10.0), ("two", 8.0)):
        clock = Clock()
        log = new_log(tmp_path / name, clock)
        log.event("run", "run", new="started")
        clock.t += seconds
        log.metrics(1, {"timing_s/step": seconds, "rollout/reward/mean": 0.5})
        log.event("run", "run", new="finished")
    lines = compare([tmp_path / "one", tmp_path / "two"]).splitlines()
    assert lines[0].split() == ["one", "two"]
    assert [line.split()[-2:] for line in lines if line.startswith("  against")] == [["+0.0%", "-20.0%"]] * 2
    with pytest.raises(UserError, match="at least two"):
        compare([tmp_path / "one"])


STATUS: dict[str, Any] = {
    "phase": "cycle done",
    "version": 3,
    "queue": 12,
    "in_flight": 6,
    "tenant": "hybrid",
    "trained": 192,
    "decision": "activate: yes (gap [3] samples)",
    "elapsed_s": 12.5,
    "metrics": {"rollout/reward/mean": 0.5},
}


def test_on_a_pipe_each_cycle_is_one_plain_line() -> None:
    from rich.console import Console

    out = io.StringIO()
    with LiveView("runs/x", Console(file=out, width=40)) as view:
        view.update({"phase": "training", "version": 3})
        view.update(STATUS)
    assert out.getvalue().splitlines() == [
        "[12.5 s] cycle 3 cycle done: reward 0.500, queue 12, in flight 6, trained 192, "
        "trainer's GPUs: lent to rollout; activate: yes (gap [3] samples)"
    ]


def test_in_a_terminal_the_view_shows_reward_holder_and_decision() -> None:
    from rich.console import Console

    out = io.StringIO()
    with LiveView("runs/x", Console(file=out, force_terminal=True, width=100)) as view:
        view.update(STATUS)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    for part in ("runs/x", "0.500", "lent to rollout", "12 queued, 6 in flight, 192 trained", "gap [3] samples"):
        assert part in shown


def test_a_status_without_figures_gives_a_line() -> None:
    line = StatusLine()
    line.take({"phase": "starting", "metrics": {"rollout/reward/mean": None, "val/reward/mean@1": float("nan")}})
    assert line.line() == ("[-] cycle - starting: reward -, queue -, in flight -, trained -, trainer's GPUs: -")


def test_figures_in_text() -> None:
    assert [show(v) for v in (None, True, 3, 12345, 0.5, 1234.5, 1e-5, float("nan"))] == [
        "-",
        "yes",
        "3",
        "12 345",
        "0.5",
        "1 234",
        "1e-05",
        "-",
    ]
    assert [duration(s) for s in (None, 3.21, 59.94, 250, 19260)] == [
        "-",
        "3.21 s",
        "59.9 s",
        "4 min 10 s",
        "5 h 21 min",
    ]
    assert columns([["a", "1"], ["bc", "22"]]) == "a    1\nbc  22"
    assert sparkline([0.0, 0.5, 1.0]) == "▁▄█"


def test_importing_the_room_loads_neither_matplotlib_nor_h5py_nor_torch() -> None:
    code = (
        "import sys, hybridsched.report, hybridsched.runlog\n"
        "print([m for m in ('matplotlib', 'h5py', 'torch', 'rich', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_start_of_the_synthetic_run_is_where_its_clock_began(synthetic: Path) -> None:
    assert load_run(synthetic).start == START
