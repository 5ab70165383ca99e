"""The configuration files of a cluster. Written inside its namespaces, where host name and free ports are those."""

from __future__ import annotations

import os
import pwd
import re
import socket
from collections.abc import Mapping
from typing import Any

from layout import CONTROLLER, Cluster, ClusterError, addresses


def write_config(cluster: Cluster, data: Mapping[str, Any]) -> None:
    """slurm.conf, gres.conf, hosts, slurmdbd.conf. Inside the namespaces, where host name and ports are those."""
    folder, nodes = cluster.folder, data["nodes"]
    plain, gpus, cpus = data["plain"], data["gpus"], data["cpus"]
    where = addresses(nodes)
    ports = free_ports(len(nodes) + 2) if plain else [6818] * len(nodes) + [6817, 6819]
    settings = _settings(cluster, data, controller_port=ports[-2], database_port=ports[-1])
    lines = [f"{key}={value}" for key, value in settings.items()]
    gres = f" Gres=gpu:{gpus}" if gpus else ""
    for node, port in zip(nodes, ports, strict=False):
        address = f"NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1" if plain else f"NodeAddr={where[node]}"
        lines.append(f"NodeName={node} {address} Port={port} CPUs={cpus} RealMemory=8000{gres} State=UNKNOWN")
    lines.append("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    for group in dict.fromkeys(re.sub(r"\d+$", "", node) for node in nodes):
        members = ",".join(node for node in nodes if re.sub(r"\d+$", "", node) == group)
        lines.append(f"PartitionName={group} Nodes={members} MaxTime=INFINITE State=UP")
    cluster.conf.write_text("\n".join(lines) + "\n")
    if gpus:  # Slurm only looks at what kind of file it is, and at the digits of its name
        for index in range(gpus):
            (folder / "dev" / f"nvidia{index}").symlink_to("/dev/null")
        devices = f"{folder}/dev/nvidia[0-{gpus - 1}]" if gpus > 1 else f"{folder}/dev/nvidia0"
        (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={devices}\n")
    hosts = [f"{address} {node}" for node, address in where.items()]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"{CONTROLLER} login", *hosts]) + "\n")
    if data["accounting"]:
        _write_database_config(cluster, settings, ports[-1])


def _settings(cluster: Cluster, data: Mapping[str, Any], *, controller_port: int, database_port: int) -> dict[str, str]:
    folder, user = cluster.folder, user_name()
    auth = {"AuthType": "auth/none", "CredType": "cred/none"}
    if data["munge"]:
        auth = {"AuthType": "auth/munge", "CredType": "cred/munge", "AuthInfo": f"socket={folder}/run/munge.sock"}
    accounting = {"AccountingStorageType": "accounting_storage/none", "JobAcctGatherType": "jobacct_gather/none"}
    if data["accounting"]:
        accounting = {
            "AccountingStorageType": "accounting_storage/slurmdbd",
            "AccountingStorageHost": "localhost",
            "AccountingStoragePort": str(database_port),
            "AccountingStorageTRES": "gres/gpu",
            "JobAcctGatherType": "jobacct_gather/linux",
        }
        if data["munge"]:
            accounting["AccountingStoragePass"] = f"{folder}/run/munge.sock"
    return {
        "ClusterName": "dev",
        "SlurmctldHost": f"{socket.gethostname()}({'127.0.0.1' if data['plain'] else CONTROLLER})",
        "SlurmctldPort": str(controller_port),
        "SlurmUser": user,
        "SlurmdUser": user,
        **auth,
        "StateSaveLocation": f"{folder}/state",
        "SlurmdSpoolDir": f"{folder}/spool/%n",
        "SlurmctldPidFile": f"{folder}/run/slurmctld.pid",
        "SlurmdPidFile": f"{folder}/run/slurmd.%n.pid",
        "SlurmctldLogFile": f"{folder}/log/slurmctld.log",
        "SlurmdLogFile": f"{folder}/log/slurmd.%n.log",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "MpiDefault": "none",
        "ReturnToService": "2",
        "SlurmdParameters": "config_overrides",
        "GresTypes": "gpu",
        "SchedulerType": "sched/backfill",
        # Heterogeneous jobs are started by backfill only, which by default looks every 30 s.
        "SchedulerParameters": "bf_interval=1,sched_interval=2,sched_min_interval=100000",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SlurmdTimeout": "10",
        "KillWait": "5",
        "MinJobAge": "600",
        **accounting,
        **dict(item.split("=", 1) for item in data["settings"]),
    }


def _write_database_config(cluster: Cluster, settings: Mapping[str, str], port: int) -> None:
    folder = cluster.folder
    lines = {
        "AuthType": settings["AuthType"],
        **({"AuthInfo": settings["AuthInfo"]} if "AuthInfo" in settings else {}),
        "DbdHost": "localhost",
        "DbdPort": str(port),
        "SlurmUser": settings["SlurmUser"],
        "StorageType": "accounting_storage/mysql",
        "StorageLoc": "slurm_acct_db",
        "PidFile": f"{folder}/run/slurmdbd.pid",
        "LogFile": f"{folder}/log/slurmdbd.log",
    }
    path = folder / "slurmdbd.conf"
    path.touch(mode=0o600)
    path.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))


def user_name() -> str:
    """Of this process. Raises ClusterError."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise ClusterError(f"user id {os.getuid()} has no name; Slurm needs one") from None


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
