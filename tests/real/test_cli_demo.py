"""The newcomer's way, for real: `hybridsched demo`, everything that looks at its run, `--resume`, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_COMMAND = [sys.executable, "-m", "hybridsched.cli.main"]


def hybridsched(*arguments: object, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    command = [*_COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def processes_of(run: str) -> list[str]:
    """Command lines of live processes that name this run folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if run in line:
                found.append(line)
    return found


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    """Folder of a demo of three cycles."""
    folder = tmp_path_factory.mktemp("demo")
    arguments = ("--cycles", 3, "--min-rise", 0.05, "trainer.save_freq=1", "local.allow_oversubscribe=true")
    done = hybridsched("demo", "--folder", folder, *arguments)
    assert 0 == done.returncode, done.stdout + done.stderr
    assert f"report: {folder / 'run' / 'report.html'}" in done.stdout
    return folder


def test_demo_trains_and_every_sample_has_its_verdict(demo):
    summary = json.loads(hybridsched("report", demo / "run", "--json").stdout)
    assert ("finished", 3, 192) == (summary["outcome"], summary["cycles"], summary["samples"]["trained"])
    assert summary["activations"] == summary["deactivations"] >= 1
    checked = hybridsched("queue", "fsck", demo / "run", "--complete")
    assert (0, "ok") == (checked.returncode, checked.stdout.splitlines()[-1]), checked.stdout
    decisions = hybridsched("explain", demo / "run", "decisions").stdout
    assert "activate       yes" in decisions
    assert "exit code 0" in hybridsched("status", demo / "run").stdout


def test_demo_goes_on_where_it_ended(demo):
    resolved = demo / "run" / "config" / "resolved.yaml"  # with the demo's seeds; what the launch loop tells to use
    again = hybridsched("run", resolved, "--resume", "trainer.total_training_steps=4", "--quiet")
    assert 0 == again.returncode, again.stdout + again.stderr
    summary = json.loads(hybridsched("report", demo / "run", "--json").stdout)
    assert (4, 2, 256) == (summary["version"], summary["attempts"], summary["samples"]["trained"])
    checked = hybridsched("queue", "fsck", demo / "run")
    assert 0 == checked.returncode, checked.stdout


def test_ctrl_c_ends_in_order_and_leaves_no_process(demo):
    arguments = ("demo", "--folder", demo, "--keep", "--cycles", "100", "local.allow_oversubscribe=true")
    process = subprocess.Popen(
        [*_COMMAND, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    seen = ""
    deadline = time.monotonic() + 120
    while "cycle 1 cycle done" not in seen:
        line = process.stdout.readline()
        assert line and time.monotonic() < deadline, f"ended before its first cycle: {seen}"
        seen += line
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert 130 == process.returncode, seen + out + err
    assert "stopping" in err
    assert "--resume" in err
    assert [] == processes_of(str(demo / "run-2"))
