"""A real Slurm for tests: slurm/dev_cluster, up for a module, gone after it also when the test process is killed.

    @pytest.fixture(scope="module")
    def cluster(tmp_path_factory):
        with slurm_cluster(tmp_path_factory, nodes="trn0,gpu[0-1]") as one:
            yield one

`SlurmCluster.run` calls any command in its environment; `in_this_process` is for code that calls sbatch itself
(submitit). Everything below pytest's own temporary folder is shared by the nodes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPT = REPOSITORY / "slurm" / "dev_cluster" / "cluster.py"
UP_S = 150.0
CALL_S = 60.0


def missing(what: str) -> NoReturn:
    """Skip; in CI fail, where everything has to be there."""
    if os.environ.get("CI", "") in ("", "0", "false"):
        pytest.skip(what)
    pytest.fail(what)


def require_slurm() -> None:
    """For tests of this machine's Slurm."""
    for name in ("slurmctld", "slurmd", "srun", "sbatch"):
        if shutil.which(name, path=f"/usr/sbin:{os.environ['PATH']}") is None:
            missing(f"{name} is not installed: make slurm-deps (as root; Debian's slurm-wlm, munge, slurmdbd, ...)")


class SlurmCluster:
    """A running cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "HYBRIDSCHED_DEV_CLUSTER": str(folder),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
        }

    # --- commands -------------------------------------------------------------------------------------------------

    def run(self, *command: str | Path, timeout_s: float = CALL_S, check: bool = True) -> str:
        """What a command printed (both streams); with ``check`` it has to succeed."""
        done = subprocess.run(
            list(map(str, command)),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        assert not check or done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}"
        return done.stdout

    def sbatch(self, script: Path, *options: str) -> str:
        """Submit; returns the job id (the leader's)."""
        return self.run("sbatch", "--parsable", *options, script).strip().partition(";")[0]

    def states(self, job: str) -> dict[str, str]:
        """State of every component, by the id squeue shows (9, or 9+0 and 9+1); {} when Slurm knows no such job."""
        lines = self.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%i %T", check=False).splitlines()
        return dict(line.split() for line in lines if line[:1].isdigit())

    def wait_state(self, job: str, *states: str, deadline_s: float = 120.0) -> dict[str, str]:
        """Until every component is in one of these states."""
        end = time.monotonic() + deadline_s
        while not (found := self.states(job)) or not set(found.values()) <= set(states):
            assert time.monotonic() < end, f"job {job} is {found}, not {states}, after {deadline_s:g} s\n{self.story()}"
            time.sleep(0.1)
        return found

    def story(self, last: int = 15) -> str:
        """The controller's last words, for messages."""
        log = self.folder / "log" / "slurmctld.log"
        return "\n".join(log.read_text(errors="replace").splitlines()[-last:]) if log.exists() else "no slurmctld.log"

    @contextmanager
    def in_this_process(self) -> Iterator[None]:
        """While the block runs, sbatch and the others of this process mean this cluster."""
        changed = {name: self.environment[name] for name in ("PATH", "SLURM_CONF", "HYBRIDSCHED_DEV_CLUSTER")}
        before = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    # --- misfortune -----------------------------------------------------------------------------------------------

    def order(self, verb: str, *arguments: str) -> None:
        """kill-node NODE, start-node NODE, stop-controller, kill-controller, start-controller."""
        self.run(sys.executable, SCRIPT, verb, self.folder, *arguments)


@contextmanager
def slurm_cluster(
    tmp_path_factory: pytest.TempPathFactory,
    *options: str,
    nodes: str = "trn[0-1],gpu[0-1]",
    plain: bool = False,
    accounting: bool = False,
) -> Iterator[SlurmCluster]:
    """A cluster while the block runs. ``options``: more of `cluster.py up`, e.g. "--set", "KillWait=2"."""
    require_slurm()
    folder = tmp_path_factory.mktemp("cluster")
    # Every node has a /tmp of its own; what may lie below it here and has to be seen there:
    seen = (tmp_path_factory.getbasetemp(), REPOSITORY, sys.prefix)
    shared = [word for folder_seen in seen for word in ("--share", str(folder_seen))]
    kind = [*["--plain"] * plain, *["--accounting"] * accounting]
    command = [sys.executable, str(SCRIPT), "up", str(folder), "--nodes", nodes, "--owner", str(os.getpid())]
    up = subprocess.run([*command, *shared, *kind, *options], capture_output=True, text=True, timeout=UP_S)
    if "namespaces are not allowed here" in up.stderr:
        missing(up.stderr.strip())
    assert up.returncode == 0, up.stdout + up.stderr
    try:
        yield SlurmCluster(folder)
    finally:
        down = subprocess.run([sys.executable, str(SCRIPT), "down", str(folder)], capture_output=True, text=True)
        assert down.returncode == 0, down.stderr


__all__ = ["SlurmCluster", "missing", "require_slurm", "slurm_cluster"]
