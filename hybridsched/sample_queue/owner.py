"""One owner per run folder: a controller takes it over by exclusively creating ``owner/<n + 1>.json``.

Invariants
    The owner is the holder of the highest n. Numbers only grow; of several claimants of one number exactly one wins,
    on any number of hosts. Whoever sees a higher n than its own stops at once (:meth:`OwnerFence.check`).
    A folder is taken from a predecessor only when that one certainly does not write any more: it released the folder;
    this is a later start of the same Slurm job; Slurm says its job is gone; it ran on this host before a reboot; or on
    this host and the process is gone (a reused pid is told apart by its start time). Doubt means refusal.

Who is alive is asked through callables, so the rules themselves depend on nothing but their arguments.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from hybridsched.errors import OwnershipLost, RunFolderError
from hybridsched.sample_queue import files

OWNER_FOLDER = "owner"
_RECORD = re.compile(r"(\d+)\.json")
_MAX_ROUNDS = 64  # each lost race means that another claimant won, and that is looked at anew


@dataclass(frozen=True, slots=True)
class OwnerIdentity:
    """Who a controller is.

    job_id: Slurm job, "" outside Slurm. restart_count: grows with every start of the same job (requeue or launch
    loop). started_ns: when the process started, in ns after the boot of ``host``: tells a reused pid apart.
    pid_namespace: pids of another one cannot be judged ("" = unknown, taken as the same).
    """

    job_id: str
    restart_count: int
    host: str
    pid: int
    boot_id: str
    started_ns: int
    pid_namespace: str = ""

    def __str__(self) -> str:
        job = f"job {self.job_id} (start {self.restart_count}), " if self.job_id else ""
        return f"{job}process {self.pid} on {self.host}"


@dataclass(frozen=True, slots=True)
class OwnerRecord:
    """One line of the folder's history: who took it as number n, when (ns since the epoch), whether it gave it back."""

    n: int
    identity: OwnerIdentity
    claimed_unix_ns: int
    released: bool


def process_is_alive(identity: OwnerIdentity) -> bool:
    """Whether that process runs on this host now. A zombie is dead; a pid with another start time is somebody else."""
    started = _process_start_ns(identity.pid)
    return started is not None and started == identity.started_ns


def never_gone(identity: OwnerIdentity) -> bool:
    """Answer for ``slurm_says_gone`` where there is no Slurm to ask."""
    return False


def identity_of_this_process(job_id: str = "", restart_count: int = 0) -> OwnerIdentity:
    """Who this process is; job and restart count are known to the launcher."""
    started = _process_start_ns(os.getpid())
    if started is None:
        raise RunFolderError("/proc/self/stat cannot be read: hybridsched needs Linux with /proc mounted")
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return OwnerIdentity(job_id, restart_count, socket.gethostname(), os.getpid(), boot_id, started, namespace)


def _process_start_ns(pid: int) -> int | None:
    """ns after boot at which a process started; None when there is none or only a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before may contain anything, also spaces and brackets
    if fields[0] in "ZX":
        return None
    return int(fields[19]) * (1_000_000_000 // os.sysconf("SC_CLK_TCK"))


class OwnerFence:
    """The right to write in a run folder, as number ``n``."""

    def __init__(self, folder: Path, n: int, identity: OwnerIdentity) -> None:
        self._folder, self.n, self.identity = folder, n, identity

    @classmethod
    def claim(
        cls,
        run_folder: Path,
        identity: OwnerIdentity,
        is_alive: Callable[[OwnerIdentity], bool] = process_is_alive,
        slurm_says_gone: Callable[[OwnerIdentity], bool] = never_gone,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> OwnerFence:
        """Become the owner. OwnershipLost tells the present owner's story; RunFolderError: not writable, damaged."""
        folder = Path(run_folder) / OWNER_FOLDER
        try:
            files.make_folder(folder, durable=True)
        except OSError as error:
            raise RunFolderError(f"{folder}: cannot be created: {error}. The run folder must be writable.") from error
        for _ in range(_MAX_ROUNDS):
            owner = current_owner(run_folder)
            if owner is not None:
                refusal = _why_not(owner, identity, is_alive, slurm_says_gone)
                if refusal:
                    raise OwnershipLost(_story(run_folder, owner, refusal))
            n = 1 if owner is None else owner.n + 1
            record = {"n": n, **asdict(identity), "claimed_unix_ns": wall_ns()}
            try:
                files.create_exclusive(folder / f"{n:06d}.json", files.json_bytes(record) + b"\n", durable=True)
            except FileExistsError:
                files.refresh_listing(folder)
                continue
            except OSError as error:
                raise RunFolderError(f"{folder}: cannot write: {error}. The run folder must be writable.") from error
            return cls(folder, n, identity)
        raise OwnershipLost(f"{folder}: {_MAX_ROUNDS} other controllers took the run folder in turn. Start only one.")

    def check(self) -> None:
        """Raise OwnershipLost when somebody took the folder over; then nothing may be written any more."""
        owner = current_owner(self._folder.parent)
        if owner is None or owner.n != self.n or owner.identity != self.identity:
            who = f"number {owner.n}, {owner.identity}, since {_when(owner)}" if owner else "nobody"
            raise OwnershipLost(
                f"{self._folder.parent}: this controller ({self.identity}) owned it as number {self.n}, now the owner "
                f"is {who}. It stops without writing."
            )

    def release(self) -> None:
        """Give the folder back after an orderly end, so that the next start may come from anywhere. Idempotent."""
        try:
            files.create_exclusive(self._folder / f"{self.n:06d}.released", b"", durable=True)
        except FileExistsError:
            return


def require_free(
    run_folder: Path,
    identity: OwnerIdentity,
    is_alive: Callable[[OwnerIdentity], bool] = process_is_alive,
    slurm_says_gone: Callable[[OwnerIdentity], bool] = never_gone,
) -> None:
    """Raise OwnershipLost when `OwnerFence.claim` would be refused now; claims and writes nothing."""
    owner = current_owner(run_folder)
    refusal = "" if owner is None else _why_not(owner, identity, is_alive, slurm_says_gone)
    if owner is not None and refusal:
        raise OwnershipLost(_story(run_folder, owner, refusal))


def current_owner(run_folder: Path) -> OwnerRecord | None:
    """The holder of the highest number, None when there is none. RunFolderError when its record is damaged."""
    folder = Path(run_folder) / OWNER_FOLDER
    if not folder.is_dir():
        return None
    if files.lists_late(folder):
        files.refresh_listing(folder)
    names = {entry.name for entry in os.scandir(folder)}
    numbers = [int(found[1]) for found in map(_RECORD.fullmatch, names) if found]
    if not numbers:
        return None
    path = folder / f"{max(numbers):06d}.json"
    try:
        record = json.loads(path.read_bytes())
        n, claimed = int(record.pop("n")), int(record.pop("claimed_unix_ns"))
        return OwnerRecord(n, OwnerIdentity(**record), claimed, f"{n:06d}.released" in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(
            f"{path}: the owner's record is damaged ({error}). If certainly no controller of this run is alive, remove "
            "the file and start again."
        ) from error


def _why_not(
    owner: OwnerRecord,
    me: OwnerIdentity,
    is_alive: Callable[[OwnerIdentity], bool],
    slurm_says_gone: Callable[[OwnerIdentity], bool],
) -> str:
    """Why the folder may not be taken from ``owner``; "" when it may."""
    them = owner.identity
    if owner.released:
        return ""
    if them.job_id and them.job_id == me.job_id:
        if me.restart_count > them.restart_count:
            return ""
        if me.restart_count < them.restart_count:
            return f"it is a later start of the same job (this is start {me.restart_count})"
    elif them.job_id and slurm_says_gone(them):
        return ""
    if them.host != me.host:
        return "it runs on another host, and nothing says that it ended"
    if them.boot_id != me.boot_id:
        return ""
    if them.pid_namespace and me.pid_namespace and them.pid_namespace != me.pid_namespace:
        return "it runs in another container of this host, so its process cannot be seen from here"
    return "it is alive" if is_alive(them) else ""


def _story(run_folder: Path, owner: OwnerRecord, refusal: str) -> str:
    them = owner.identity
    stop = f"scancel {them.job_id}" if them.job_id else f"ssh {them.host} kill {them.pid}"
    return (
        f"{run_folder} is owned by {them}, since {_when(owner)} (owner number {owner.n}): {refusal}.\n"
        f"Stop it first ({stop}), wait until it ended, and start again; or use another run folder. If it certainly "
        f"does not run any more, create {Path(run_folder) / OWNER_FOLDER / f'{owner.n:06d}.released'}."
    )


def _when(owner: OwnerRecord) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(owner.claimed_unix_ns / 1e9))
