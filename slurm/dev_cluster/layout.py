"""A cluster's folder, the names of its nodes, and how its commands are called. Knows nothing of processes.

FOLDER/cluster.json   what was asked for, and how it is    slurm.conf gres.conf hosts slurmdbd.conf
FOLDER/bin/           sbatch, squeue, ... that reach this cluster from anywhere on the machine
FOLDER/log/           what the daemons say                  run/ state/ spool/ db/ nodes/NODE/tmp
FOLDER/orders/        what the keeper is asked to do, and its answers
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MARK = "HYBRIDSCHED_DEV_CLUSTER"  #: in the environment of everything a cluster runs: its folder
SUBNET = "10.231"
CONTROLLER = f"{SUBNET}.0.1"
FOLDERS = ("state", "spool", "log", "run", "bin", "none", "nodes", "dev", "orders")
CALL_S = 20.0  #: bound of one command
PACKAGES = "apt-get install slurm-wlm slurm-client munge slurmdbd mariadb-server iproute2 (make slurm-deps)"


class ClusterError(Exception):
    """Shown as one message."""


class Cluster:
    """A cluster's folder and what its cluster.json says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.conf = self.folder / "slurm.conf"

    def create(self, options: Mapping[str, Any]) -> None:
        """Lay out the folder. Raises ClusterError when something is there."""
        if self.folder.exists() and any(self.folder.iterdir()):
            raise ClusterError(f"{self.folder}: is not empty; take the cluster there down first (cluster.py down)")
        for name in FOLDERS:
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for node in options["nodes"]:
            tmp = self.folder / "nodes" / node / "tmp"
            tmp.mkdir(parents=True)
            tmp.chmod(0o1777)
            (self.folder / "spool" / node).mkdir()
        self.save(**options)

    def load(self) -> dict[str, Any]:
        """cluster.json. Raises ClusterError."""
        try:
            data: dict[str, Any] = json.loads((self.folder / "cluster.json").read_text())
        except (OSError, ValueError) as error:
            raise ClusterError(f"{self.folder}: holds no cluster ({error})") from error
        return data

    def save(self, **changes: Any) -> None:
        """Change cluster.json."""
        path = self.folder / "cluster.json"
        data = {**(json.loads(path.read_text()) if path.exists() else {}), **changes}
        path.with_suffix(".tmp").write_text(json.dumps(data, indent=1) + "\n")
        path.with_suffix(".tmp").replace(path)

    @property
    def environment(self) -> dict[str, str]:
        """For commands that use the cluster."""
        return {
            **os.environ,
            MARK: str(self.folder),
            "SLURM_CONF": str(self.conf),
            "PATH": f"{self.folder / 'bin'}:/usr/sbin:{os.environ.get('PATH', '/usr/bin:/bin')}",
        }

    def call(self, *command: str, timeout_s: float = CALL_S) -> str:
        """Run a Slurm command; returns what it printed. Raises ClusterError."""
        try:
            done = subprocess.run(
                command, env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ClusterError(f"{' '.join(command)}: {error}") from error
        if done.returncode:
            raise ClusterError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout


def expand(nodes: str) -> list[str]:
    """trn[0-1],gpu7 -> trn0, trn1, gpu7. Raises ClusterError."""
    names = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", nodes):
        found = re.fullmatch(r"([a-z][a-z0-9-]*?)(?:(\d+)|\[([\d,-]+)\])", part)
        if found is None:
            raise ClusterError(f"--nodes: {part!r} is no node list like trn[0-1] or gpu7")
        prefix, single, ranges = found.groups()
        for span in (ranges or single).split(","):
            first, _, last = span.partition("-")
            names += [f"{prefix}{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    if not names or len(set(names)) != len(names) or len(names) > 200:
        raise ClusterError(f"--nodes: {nodes!r} names no node, one twice, or more than 200")
    return names


def addresses(nodes: list[str]) -> dict[str, str]:
    """Address of each node, in a cluster of hosts."""
    return {node: f"{SUBNET}.{1 + i // 200}.{10 + i % 200}" for i, node in enumerate(nodes)}


def cores_of(nodes: list[str]) -> dict[str, str]:
    """The CPU core of each node. trn0, gpu0, trn1, ... take turns, so that a job on trn0 and gpu0 has two cores."""
    own = sorted(os.sched_getaffinity(0))
    by_number = sorted(nodes, key=lambda node: int(re.sub(r"\D*", "", node) or 0))
    return {node: str(own[i % len(own)]) for i, node in enumerate(by_number)}
