#!/usr/bin/env python3
"""Boots a real Slurm on one machine, and takes it down again without a trace. Standard library only.

    cluster.py up FOLDER --nodes trn[0-1],gpu[0-1] [--gpus 8] [--accounting] [--plain] ...
    cluster.py shell FOLDER | exec FOLDER CMD... | status FOLDER | down FOLDER
    cluster.py kill-node FOLDER NODE | start-node FOLDER NODE
    cluster.py stop-controller FOLDER | kill-controller FOLDER | start-controller FOLDER

Two kinds. Where namespaces are allowed every node is a host of its own (address, host name, /tmp, /dev/shm, pids), and
`kill-node` is a real node death: its processes are gone and its address answers no more. ``--plain``: all nodes are
slurmd processes of this host, told apart by ports. Both as root and as an ordinary user (who can run only own jobs).

Invariants
    Everything of a cluster lies in FOLDER and hangs on one keeper process: when the keeper dies, or the process
    ``--owner`` names, everything else dies with it (a pid namespace; in a plain cluster a death signal and a sweep).
    Any number of clusters run at once: each has its own network, or in plain mode ports the system chose.

Does not: configure a cluster for real work (no cgroups, and unless --munge no authentication beyond the user).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from keeper import ORDERS, UP_S
from layout import CALL_S, MARK, PACKAGES, Cluster, ClusterError, expand

COMMANDS = ("sbatch", "srun", "salloc", "sattach", "squeue", "scancel", "scontrol", "sinfo", "sacct", "sacctmgr")

_DOWN_S = 20.0
_SPACES = ("--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")
_FREED = ("state", "spool", "db", "nodes", "dev", "run", "bin", "orders")


def up(cluster: Cluster, options: argparse.Namespace) -> None:
    """Start a cluster and wait until every node is idle. Raises ClusterError; then nothing is left of it."""
    if shutil.which("slurmctld", path="/usr/sbin:/usr/local/sbin:/usr/bin") is None:
        raise ClusterError(f"slurmctld is not installed: {PACKAGES}")
    spaces = [] if options.plain else _spaces()
    cluster.create(
        {
            "state": "starting",
            "plain": options.plain,
            "nodes": expand(options.nodes),
            "gpus": options.gpus,
            "cpus": options.cpus,
            "accounting": options.accounting,
            "munge": options.munge,
            "settings": options.set,
            "share": [os.path.abspath(path) for path in options.share],
        }
    )
    keeper = _start_keeper(cluster, spaces, options.owner)
    _write_commands(cluster, None if options.plain else keeper.pid)
    end = time.monotonic() + 2 * UP_S
    while (state := str(cluster.load()["state"])) == "starting":
        if keeper.poll() is not None or time.monotonic() > end:
            state = f"the keeper ended: {(cluster.folder / 'log' / 'keeper.out').read_text()[-2000:]}"
            break
        time.sleep(0.02)
    if state != "up":
        down(cluster)
        raise ClusterError(f"{state}\nlogs: {cluster.folder}/log")


def _spaces() -> list[str]:
    """What gives the keeper its namespaces; an ordinary user becomes master of an own user namespace."""
    user = [] if os.getuid() == 0 else ["--user", "--map-current-user", "--keep-caps"]
    command = ["unshare", *user, *_SPACES]
    try:
        tried = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=CALL_S, check=False)
    except FileNotFoundError:
        raise ClusterError("unshare is not installed: apt-get install util-linux, or use --plain") from None
    if tried.returncode:
        raise ClusterError(f"namespaces are not allowed here ({tried.stderr.strip()}); use --plain")
    return command


def _start_keeper(cluster: Cluster, spaces: list[str], owner_pid: int | None) -> subprocess.Popen[bytes]:
    owner = () if owner_pid is None else (os.pidfd_open(owner_pid),)
    script = str(Path(__file__).resolve().with_name("keeper.py"))
    with open(cluster.folder / "log" / "keeper.out", "ab") as output:
        keeper = subprocess.Popen(
            [*spaces, sys.executable, script, str(cluster.folder), *map(str, owner)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, MARK: str(cluster.folder)},
            start_new_session=True,
            pass_fds=owner,
        )
    (cluster.folder / "keeper.json").write_text(json.dumps([keeper.pid, _started(keeper.pid)]))
    return keeper


def _write_commands(cluster: Cluster, keeper: int | None) -> None:
    """bin/sbatch and the others: usable from anywhere on this machine, with that folder first on the PATH."""
    enter = "" if keeper is None else f"nsenter -t {keeper} --net "
    if keeper is not None and os.getuid() != 0:
        enter = f"nsenter -t {keeper} --user --preserve-credentials --net "
    for name in COMMANDS:
        path = cluster.folder / "bin" / name
        path.write_text(
            f"#!/bin/sh\nexport SLURM_CONF='{cluster.conf}' {MARK}='{cluster.folder}'\n"
            f'exec {enter}/usr/bin/{name} "$@"\n'
        )
        path.chmod(0o755)


def down(cluster: Cluster) -> None:
    """End everything and remove its state; logs stay. Also after a crash. Raises ClusterError when something stays."""
    cluster.load()
    try:
        keeper, started = json.loads((cluster.folder / "keeper.json").read_text())
    except (OSError, ValueError):
        keeper, started = 0, ""
    if keeper and started and _started(keeper) == started:
        os.kill(keeper, signal.SIGKILL)  # unshare: its child, pid 1 of everything, dies with it
    end = time.monotonic() + _DOWN_S
    while left := list(_marked(cluster.folder)):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > end:
            raise ClusterError(f"processes that would not die: {left}")
        time.sleep(0.05)
    for name in _FREED:
        shutil.rmtree(cluster.folder / name, ignore_errors=True)
    cluster.save(state="down")


def _started(pid: int) -> str:
    """When a process started, which tells a reused number apart; "" when there is none, or only a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _marked(folder: Path) -> Iterator[int]:
    """Processes of the cluster, of this user; but not those this one was started by."""
    mark, spared, pid = f"{MARK}={folder}".encode(), set(), os.getpid()
    while pid > 1:
        spared.add(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) in spared:
            continue
        try:
            if mark in Path(entry.path, "environ").read_bytes().split(b"\0") and _started(int(entry.name)):
                yield int(entry.name)
        except OSError:
            continue


def order(cluster: Cluster, verb: str, argument: str) -> None:
    """Let the keeper do something. Raises ClusterError with its answer."""
    if cluster.load()["state"] != "up":
        raise ClusterError(f"{cluster.folder}: the cluster is not up")
    path = cluster.folder / "orders" / f"{time.time_ns()}-{os.getpid()}.json"
    path.with_suffix(".tmp").write_text(json.dumps([verb, argument]))
    path.with_suffix(".tmp").replace(path)
    end = time.monotonic() + UP_S
    while path.exists():
        if time.monotonic() > end:
            raise ClusterError(f"the keeper did not {verb} {argument} within {UP_S:.0f} s; is it alive?")
        time.sleep(0.01)
    problem = path.with_suffix(".answer").read_text()
    if problem:
        raise ClusterError(problem)


def main(arguments: list[str]) -> int:
    """Parse and obey."""
    options = _parse(arguments)
    cluster = Cluster(options.folder)
    try:
        _obey(cluster, options)
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 2
    return 0


def _obey(cluster: Cluster, options: argparse.Namespace) -> None:
    command = options.command
    if command == "up":
        begun = time.monotonic()
        up(cluster, options)
        print(f"up after {time.monotonic() - begun:.1f} s; look around with: {sys.argv[0]} shell {cluster.folder}")
    elif command == "down":
        down(cluster)
    elif command == "status":
        print(cluster.load()["state"])
        print(cluster.call("sinfo", "-N", "-l"), end="")
    elif command == "shell":
        shell = os.environ.get("SHELL", "/bin/bash")
        os.execve(shell, [shell], cluster.environment)
    elif command == "exec":
        os.execvpe(options.cmd[0], options.cmd, cluster.environment)
    else:
        order(cluster, command, getattr(options, "node", ""))


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="cluster.py", description="A real Slurm on one machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    made = {}
    for name in ("up", "down", "status", "shell", "exec", *ORDERS):
        made[name] = commands.add_parser(name)
        made[name].add_argument("folder", type=Path)
        if name.endswith("-node"):
            made[name].add_argument("node")
    made["exec"].add_argument("cmd", nargs=argparse.REMAINDER)
    one = made["up"]
    one.add_argument("--nodes", default="trn[0-1],gpu[0-1]", help="each name without its number is a partition, too")
    one.add_argument("--plain", action="store_true", help="no namespaces: all nodes on this host")
    one.add_argument("--gpus", type=int, default=8, help="GPUs Slurm believes a node to have; 0: no GRES")
    one.add_argument("--cpus", type=int, default=8, help="CPUs Slurm believes a node to have")
    one.add_argument("--accounting", action="store_true", help="slurmdbd with a MariaDB of its own")
    one.add_argument("--munge", action="store_true", help="auth/munge instead of auth/none")
    one.add_argument("--share", action="append", default=[], help="folder below /tmp that all nodes see")
    one.add_argument("--owner", type=int, help="process whose death takes the cluster down")
    one.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of slurm.conf")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
