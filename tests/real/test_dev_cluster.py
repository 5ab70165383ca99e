"""slurm/dev_cluster: every way to boot it, what its nodes are, and that it leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SCRIPT, SlurmCluster, require_slurm, slurm_cluster

pytestmark = [pytest.mark.system, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory, nodes="trn0,gpu[0-1]") as one:
        yield one


def marked(folder: Path) -> list[int]:
    """Living processes of a cluster."""
    found = []
    for entry in os.scandir("/proc"):
        try:
            environment = Path(entry.path, "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if f"HYBRIDSCHED_DEV_CLUSTER={folder}".encode() in environment:
            found.append(int(entry.name))
    return found


def require_gone(folder: Path) -> None:
    end = time.monotonic() + 20.0
    while (left := marked(folder)) and time.monotonic() < end:
        time.sleep(0.05)
    assert [] == left


def test_every_node_is_a_host_of_its_own(cluster: SlurmCluster, tmp_path: Path) -> None:
    said = cluster.run("srun", "-N3", "bash", "-c", "echo $(hostname) $(hostname -I) $(ls /tmp | tr '\\n' ' ')")
    hosts = sorted(line.split()[:2] for line in said.splitlines())

    assert ["gpu0", "gpu1", "trn0"] == [name for name, _ in hosts]
    assert 3 == len({address for _, address in hosts})
    (tmp_path / "seen").touch()
    cluster.run("srun", "-N3", "ls", tmp_path / "seen")  # what is shared
    cluster.run("srun", "-w", "gpu0", "touch", "/tmp/mine")
    cluster.run("srun", "-w", "gpu0", "ls", "/tmp/mine")
    assert "cannot access" in cluster.run("srun", "-w", "gpu1", "ls", "/tmp/mine", check=False)


def test_nodes_know_each_other_by_name_and_have_gpus(cluster: SlurmCluster) -> None:
    said = cluster.run("srun", "-w", "trn0", "--gpus-per-node=2", "bash", "-c", "getent hosts gpu1; env")

    assert "gpu1" in said.splitlines()[0]
    assert "CUDA_VISIBLE_DEVICES=0,1" in said.splitlines()


def test_a_killed_node_is_dead_and_comes_back(cluster: SlurmCluster) -> None:
    started = subprocess.Popen(
        ["srun", "-w", "gpu1", "--no-kill", "sleep", "300"], env=cluster.environment, stderr=subprocess.DEVNULL
    )
    end = time.monotonic() + 30.0
    while "gpu1" not in cluster.run("squeue", "-h", "-t", "running", "-o", "%N"):
        assert time.monotonic() < end
        time.sleep(0.1)
    cluster.order("kill-node", "gpu1")
    assert 0 != os.system(f"nsenter -t {started.pid} --net ping -c1 -W1 10.231.1.12 >/dev/null 2>&1")
    started.send_signal(signal.SIGKILL)
    started.wait()
    cluster.order("start-node", "gpu1")
    assert "gpu1" == cluster.run("srun", "-w", "gpu1", "--overlap", "hostname", timeout_s=120).splitlines()[-1]


def test_a_restarted_controller_goes_on_where_it_was(cluster: SlurmCluster, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH -o {tmp_path}/out -w gpu0\nsleep 2\necho done\n")
    job = cluster.sbatch(script)
    cluster.order("stop-controller")
    cluster.order("start-controller")
    cluster.wait_state(job, "COMPLETED")

    assert "done" == (tmp_path / "out").read_text().strip()


@pytest.mark.parametrize("kind", [["--plain"], ["--munge", "--accounting"]])
def test_the_other_kinds_run_jobs_too_and_leave_nothing(
    tmp_path_factory: pytest.TempPathFactory, kind: list[str]
) -> None:
    with slurm_cluster(tmp_path_factory, *kind, nodes="n[0-1]") as one:
        assert 2 == len(one.run("srun", "-N2", "hostname").splitlines())
        if "--accounting" in kind:
            end = time.monotonic() + 30.0
            while "COMPLETED" not in (said := one.run("sacct", "-n", "-X", "-S", "2020-01-01")):
                assert time.monotonic() < end, said
                time.sleep(0.2)
    require_gone(one.folder)


@pytest.mark.parametrize("kind", [[], ["--plain"]])
def test_a_cluster_dies_with_its_owner(tmp_path_factory: pytest.TempPathFactory, kind: list[str]) -> None:
    require_slurm()
    owner = subprocess.Popen(["sleep", "300"])
    folder = tmp_path_factory.mktemp("owned")
    command = [sys.executable, str(SCRIPT), "up", str(folder), "--nodes", "n[0-1]", "--owner", str(owner.pid), *kind]
    subprocess.run(command, check=True, timeout=120)
    assert [] != marked(folder)
    owner.kill()
    owner.wait()
    require_gone(folder)


@pytest.mark.parametrize("kind", [[], ["--plain"]])
def test_an_ordinary_user_can_have_one(tmp_path_factory: pytest.TempPathFactory, kind: list[str]) -> None:
    """The script needs nothing but the system's Python: the test's own may be out of reach for others."""
    require_slurm()
    folder = Path(f"/tmp/hs-cluster-{os.getpid()}-{len(kind)}")
    user = [] if os.getuid() else ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]

    def call(verb: str, *more: str) -> str:
        command = [*user, "/usr/bin/python3", "-B", str(SCRIPT), verb, str(folder), *more]
        return subprocess.run(command, check=True, timeout=120, capture_output=True, text=True).stdout

    try:
        call("up", "--nodes", "n[0-1]", *kind)
        assert 2 == len(call("exec", "srun", "-N2", "id", "-u").split())
        call("kill-node", "n1")
        call("start-node", "n1")
        assert "up" == call("status").split()[0]
    finally:
        call("down")
        subprocess.run(["rm", "-rf", str(folder)], check=True)


def test_the_command_line_has_it_too(tmp_path: Path) -> None:
    require_slurm()
    folder = tmp_path / "c"

    def call(*arguments: str) -> str:
        command = [sys.executable, "-m", "hybridsched.cli.main", "cluster", *arguments, "--folder", str(folder)]
        return subprocess.run(command, check=True, timeout=120, capture_output=True, text=True).stdout

    call("up", "--nodes", "n[0-1]", "--owner", str(os.getpid()))
    assert ["n0", "n1"] == sorted(call("exec", "srun", "-N2", "hostname").split())
    call("down")
    require_gone(folder)


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    def told(*arguments: str) -> str:
        done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        return done.stderr

    (tmp_path / "file").touch()
    assert "is not empty" in told("up", str(tmp_path))
    assert "holds no cluster" in told("down", str(tmp_path))
    assert "is no node list" in told("up", str(tmp_path / "new"), "--nodes", "0x")
