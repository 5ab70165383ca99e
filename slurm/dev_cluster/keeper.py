"""The keeper: one process that starts everything of a cluster, and with which everything dies.

Owns: network, daemons, nodes, and orders (`cluster.py kill-node` and the like), which it carries out itself: only it is
in the namespaces with all rights, and only what it started dies with it. In a cluster of hosts it is pid 1.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from conf import user_name, write_config
from layout import CALL_S, CONTROLLER, PACKAGES, Cluster, ClusterError, addresses, cores_of

UP_S = 60.0  #: bound of a daemon's start, and of all nodes' together
_LOOK_S = 0.05
_NODE_SCRIPT = Path(__file__).resolve().with_name("node.sh")


class Keeper:
    """Starts, obeys, and ends with its owner."""

    def __init__(self, cluster: Cluster, owner: int | None) -> None:
        """owner: a pidfd, or None."""
        self.cluster = cluster
        self.data = cluster.load()
        self.owner = owner

    def run(self) -> None:
        """Start, say how it went, and serve until killed or orphaned."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        try:
            self._start()
        except (ClusterError, OSError, subprocess.SubprocessError) as error:
            self.cluster.save(state=f"failed: {error}")
            return
        self.cluster.save(state="up")
        while self.cluster.conf.exists() and not self._is_orphaned():  # a folder that was removed: nobody could end us
            self._obey()
            _reap()
            time.sleep(_LOOK_S)

    def _is_orphaned(self) -> bool:
        return self.owner is not None and bool(select.select([self.owner], [], [], 0)[0])

    def _start(self) -> None:
        if not self.data["plain"]:
            _call("hostname", "login")
            _call("ip", "link", "set", "lo", "up")
            _call("ip", "link", "add", "cluster", "type", "bridge")
            _call("ip", "addr", "add", f"{CONTROLLER}/16", "dev", "cluster")
            _call("ip", "link", "set", "cluster", "up")
        write_config(self.cluster, self.data)
        if not self.data["plain"]:
            _call("mount", "--bind", str(self.cluster.folder / "hosts"), "/etc/hosts")
        if self.data["munge"]:
            start_munge(self.cluster)
        if self.data["accounting"]:
            start_database(self.cluster)
        start_controller(self.cluster)
        for node in self.data["nodes"]:
            start_node(self.cluster, node)
        self._wait_idle()

    def _wait_idle(self) -> None:
        deadline, states = time.monotonic() + UP_S, ""
        while time.monotonic() < deadline:
            try:
                states = self.cluster.call("/usr/bin/sinfo", "-h", "-p", "all", "-N", "-o", "%N %t")
            except ClusterError as error:
                states = str(error)
            if sum(line.endswith(" idle") for line in states.splitlines()) == len(self.data["nodes"]):
                return
            time.sleep(_LOOK_S)
        raise ClusterError(f"not every node came up within {UP_S:.0f} s: {states}")

    def _obey(self) -> None:
        for order in sorted((self.cluster.folder / "orders").glob("*.json")):
            problem = ""
            try:
                verb, argument = json.loads(order.read_text())
                ORDERS[verb](self.cluster, argument)
            except (ClusterError, OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
                problem = f"{type(error).__name__}: {error}"
            order.with_suffix(".answer").write_text(problem)
            order.unlink()


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=CALL_S, check=False)
    if done.returncode:
        raise ClusterError(f"{' '.join(command)}: {done.stderr.strip()}")


def _reap() -> None:
    """Children, and as pid 1 also what lost its parent."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _wait_for(there: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + UP_S
    while not there():
        if time.monotonic() > deadline:
            raise ClusterError(f"{what} did not come within {UP_S:.0f} s")
        time.sleep(_LOOK_S)


# --- daemons ----------------------------------------------------------------------------------------------------------


def daemon(cluster: Cluster, name: str, *command: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """Start something that dies with the keeper; what it prints goes to log/NAME.out."""
    with open(cluster.folder / "log" / f"{name}.out", "ab") as output:
        try:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**cluster.environment, "PATH": f"/usr/sbin:/sbin:{os.environ.get('PATH', '/usr/bin:/bin')}"},
                start_new_session=True,
            )
        except OSError as error:
            raise ClusterError(f"{command[0]} cannot be started ({error}): {PACKAGES}") from error
    (cluster.folder / "run" / f"{name}.pid").write_text(str(process.pid))
    return process


def end(cluster: Cluster, name: str, number: signal.Signals = signal.SIGKILL) -> None:
    """Signal a daemon and wait for its end."""
    path = cluster.folder / "run" / f"{name}.pid"
    try:
        pid = int(path.read_text())
    except (OSError, ValueError):
        raise ClusterError(f"{name}: does not run") from None
    os.kill(pid, number)
    _wait_for(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid, f"the end of {name}")
    path.unlink()


def start_controller(cluster: Cluster) -> None:
    """slurmctld; after `kill-controller` it goes on where it was."""
    daemon(cluster, "controller", "/usr/sbin/slurmctld", "-D", "-f", str(cluster.conf))


def start_munge(cluster: Cluster) -> None:
    """A munged of our own, with a key of its own."""
    folder = cluster.folder / "run"
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    files = [f"--{kind}={folder}/munge.{end}" for kind, end in (("socket", "sock"), ("pid-file", "pid"))]
    files += [f"--key-file={key}", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]
    daemon(cluster, "munge", "/usr/sbin/munged", "--foreground", "--force", "--num-threads=10", *files)
    _wait_for((folder / "munge.sock").exists, "munged")


def start_database(cluster: Cluster) -> None:
    """MariaDB without network, and slurmdbd."""
    folder, user = cluster.folder / "db", user_name()
    folder.mkdir()
    make = ["mariadb-install-db", "--no-defaults", f"--datadir={folder}/data", "--skip-test-db", f"--user={user}"]
    make.append("--auth-root-authentication-method=normal")
    with open(cluster.folder / "log" / "database.out", "ab") as output:
        subprocess.run(make, stdout=output, stderr=output, check=True, timeout=UP_S)
    serve = ["--no-defaults", f"--datadir={folder}/data", f"--socket={folder}/sock", "--skip-networking"]
    serve += ["--skip-grant-tables", "--innodb-buffer-pool-size=64M", "--innodb-lock-wait-timeout=900"]
    daemon(cluster, "database", "/usr/sbin/mariadbd", *serve, f"--user={user}")
    _wait_for((folder / "sock").exists, "mariadbd")
    os.environ["MYSQL_UNIX_PORT"] = f"{folder}/sock"  # slurmdbd's client library reads it
    daemon(cluster, "slurmdbd", "/usr/sbin/slurmdbd", "-D")
    port = int(re.findall(r"DbdPort=(\d+)", (cluster.folder / "slurmdbd.conf").read_text())[0])
    _wait_for(lambda: _answers(port), "slurmdbd")


def _answers(port: int) -> bool:
    with closing(socket.socket()) as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


# --- nodes ------------------------------------------------------------------------------------------------------------


def start_node(cluster: Cluster, node: str) -> None:
    """A node, also one that was killed."""
    data = cluster.load()
    nodes = data["nodes"]
    if node not in nodes:
        raise ClusterError(f"{node}: the nodes are {', '.join(nodes)}")
    name, cores = f"node.{node}", cores_of(nodes)[node]
    if data["plain"]:
        slurmd = ["/usr/sbin/slurmd", "-D", "-f", str(cluster.conf), "-N", node, "-c"]
        daemon(cluster, name, "taskset", "-c", cores, *slurmd)
        return
    spaces = ["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
    where = [str(cluster.folder), node, addresses(nodes)[node], cores, *data["share"]]
    process = daemon(cluster, name, *spaces, "bash", str(_NODE_SCRIPT), *where, stdin=subprocess.PIPE)
    assert process.stdin is not None
    with process.stdin as waiting:
        _wait_for(lambda: process.poll() is not None or _has_own_network(process.pid), node)
        if process.poll() is not None:
            raise ClusterError(f"{node}: no namespaces; see {cluster.folder}/log/{name}.out, or use --plain")
        _connect(f"n{nodes.index(node)}", process.pid)
        waiting.write(b"go\n")


def _has_own_network(pid: int) -> bool:
    return os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")


def _connect(cable: str, pid: int) -> None:
    """Plug a node into the cluster's switch. The cable of a dead node of that name may still lie there."""
    subprocess.run(["ip", "link", "del", cable], stderr=subprocess.DEVNULL, timeout=CALL_S, check=False)
    _call("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    _call("ip", "link", "set", cable, "master", "cluster", "up")


ORDERS: dict[str, Callable[[Cluster, str], None]] = {
    "kill-node": lambda cluster, node: end(cluster, f"node.{node}"),
    "start-node": start_node,
    "kill-controller": lambda cluster, _: end(cluster, "controller"),  # loses what it did in the last seconds
    "stop-controller": lambda cluster, _: end(cluster, "controller", signal.SIGTERM),
    "start-controller": lambda cluster, _: start_controller(cluster),
}


if __name__ == "__main__":
    Keeper(Cluster(Path(sys.argv[1])), int(sys.argv[2]) if len(sys.argv) > 2 else None).run()
