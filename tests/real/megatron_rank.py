"""One rank of a Megatron trainer under test: `python megatron_rank.py JOB.json RANK`, started by megatron_kit.

A job is a list of stages; each starts a trainer of its own and runs checks (functions below, by name) on it, in order.
What they return is left in ``rank{r}.pickle``. Checks measure, tests judge; all ranks run the same ones.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron_kit import MINIS, training_samples
from safetensors.torch import load_file

from hybridsched.config.derived import data_parallel_rank, data_parallel_size
from hybridsched.config.schema import RunConfig
from hybridsched.errors import HybridschedError
from hybridsched.model import WeightVersion
from hybridsched.trainers import megatron_checkpoint
from hybridsched.trainers.base import TrainBatch, TrainerGroup
from hybridsched.trainers.batching import partition_samples
from hybridsched.trainers.megatron_trainer import MegatronTrainer

MEET_S = 120.0
GROUP_S = 120.0


class Rank:
    """What the checks work on."""

    def __init__(self, job: dict[str, Any], rank: int) -> None:
        self.job, self.rank, self.folder = job, rank, Path(job["folder"])
        self.folder.mkdir(exist_ok=True)
        self.config = RunConfig.model_validate(job["config"])
        self.world = self.config.trainer.n_gpus_per_node
        self.model = Path(self.config.actor_rollout_ref.model.path or "")
        self.trainer = MegatronTrainer(self.config, scratch=self.folder / "scratch", log=lambda text: None)

    def start(self) -> None:
        """Rank 0 opens the meeting and leaves its address in a file."""
        note = self.folder / "address"
        if self.rank == 0:
            part = note.with_suffix(".part")
            part.write_text(self.trainer.open_rendezvous())
            part.rename(note)
        deadline = time.monotonic() + MEET_S
        while not note.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank 0 left no address in {note} for {MEET_S} s")
            time.sleep(0.05)
        group_s = self.job.get("group_s", GROUP_S)
        self.trainer.start(TrainerGroup(self.rank, self.world, note.read_text(), group_s))
        self.begin_cycle(0)

    def begin_cycle(self, number: int) -> None:
        """Weights were synced."""
        self.version = WeightVersion(0, number)
        self.trainer.begin_cycle(self.version)

    def batch(self, step: int, poison: int | None = None) -> TrainBatch:
        """This rank's share of a collection of MINIS mini-batches."""
        minis = []
        for number in range(MINIS):
            samples = training_samples(step, number, poison)
            parts = partition_samples([s.prompt_tokens.shape[0] for s in samples], data_parallel_size(self.config))
            mine = parts[data_parallel_rank(self.config, self.rank)]
            minis.append(tuple(samples[i] for i in mine))
        return TrainBatch(tuple(minis), self.version, step)

    def weights(self) -> dict[str, np.ndarray]:
        """A copy of the whole model."""
        return {name: tensor.clone().float().numpy() for name, tensor in self.trainer.iter_weights()}


def weights_equal_the_folder(r: Rank) -> dict[str, Any]:
    stored = load_file(r.model / "model.safetensors")
    specs = r.trainer.weight_specs()
    seen = [(name, tuple(t.shape), torch.equal(t, stored[name])) for name, t in r.trainer.iter_weights()]
    return {
        "names": [name for name, _, _ in seen],
        "as_promised": [(s.name, tuple(s.shape)) for s in specs] == [(name, shape) for name, shape, _ in seen],
        "different": [name for name, _, equal in seen if not equal],
        "missing": sorted(set(stored) - {name for name, _, _ in seen} - {"lm_head.weight"}),
    }


def whole_vocabulary(r: Rank) -> np.ndarray:
    """Log-probs of every token of the vocabulary after every prefix of a fixed sequence: [L, V]."""
    tokens = np.random.default_rng(5).integers(0, r.job["vocab"], 12).astype(np.int32)
    out = []
    for token in range(r.job["vocab"]):
        sequences = [(tokens[:end], np.array([token], np.int32)) for end in range(1, len(tokens) + 1)]
        out.append([float(logp[0]) for logp in r.trainer.logprobs(sequences, 1.0)])
    return np.array(out).T


def probe(r: Rank) -> list[np.ndarray]:
    """The truth test's log-probs at temperature 0.7."""
    rng = np.random.default_rng(9)
    draws = [(rng.integers(0, r.job["vocab"], 4), rng.integers(0, r.job["vocab"], 3 + i)) for i in range(5)]
    return r.trainer.logprobs([(a.astype(np.int32), b.astype(np.int32)) for a, b in draws], 0.7)


def train(r: Rank) -> dict[str, Any]:
    results = [r.trainer.train(r.batch(step)) for step in range(3)]
    return {"metrics": [x.metrics for x in results], "weights": r.weights(), "progress": r.trainer.progress}


def give_up_a_walk(r: Rank) -> bool:
    """Rank 0 takes three tensors and gives up, the others join; afterwards a full walk is right again."""
    before = r.weights()
    if r.rank == 0:
        walk = r.trainer.iter_weights()
        for _ in range(3):
            next(walk)
        walk.close()  # type: ignore[attr-defined]
    else:
        r.trainer.join_gather()
    if r.rank == 0:
        r.trainer.iter_weights().close()  # type: ignore[attr-defined]  # given up before it began
    else:
        r.trainer.join_gather()
    after = r.weights()
    return all(np.array_equal(before[name], after[name]) for name in before)


def offload(r: Rank) -> dict[str, Any]:
    before = r.weights()
    kept = r.trainer.offload(keep_parameters=True)
    during = r.weights()
    rest = r.trainer.offload(keep_parameters=False)
    refused = ""
    try:
        r.trainer.iter_weights()
    except HybridschedError as error:
        refused = str(error)
    r.trainer.onload()
    after = r.weights()
    same = [all(np.array_equal(before[n], other[n]) for n in before) for other in (during, after)]
    return {"freed": (kept, rest), "same": same, "refused": refused}


def memory(r: Rank) -> dict[str, Any]:
    """Resident bytes along an offload, and the highest while weights are handed out and written."""
    r.trainer.train(r.batch(0))
    out = {"trained": _resident()}
    out["freed_state"] = r.trainer.offload(keep_parameters=True)
    out["without_state"] = _resident()
    out["freed_parameters"] = r.trainer.offload(keep_parameters=False)
    out["without_parameters"] = _resident()
    r.trainer.onload()
    out["back"] = _resident()
    for _ in range(2):  # the allocator finds its size
        out["largest"] = max(tensor.numel() * tensor.element_size() for _, tensor in r.trainer.iter_weights())
    before = _resident()
    for _ in range(3):
        r.trainer.join_gather()
    out["growth_by_walks"] = _resident() - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _resident()
    folder = r.folder / "export"
    folder.mkdir(exist_ok=True)
    megatron_checkpoint.save_model(folder, r.trainer._weights, r.rank, r.model)
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    out["peak_of_handing_out"] = int(peak.split()[1]) * 1024 - before
    return out


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def checkpoint_before_the_first_step(r: Rank) -> bool:
    """As every run does: back at its beginning, the first step is the one it took."""
    folder = r.folder / "checkpoint0"
    folder.mkdir(exist_ok=True)
    r.trainer.save_checkpoint(folder)
    r.trainer.train(r.batch(0))
    first = r.weights()
    r.trainer.load_checkpoint(folder)
    r.trainer.train(r.batch(0))
    second = r.weights()
    r.trainer.load_checkpoint(folder)
    return all(np.array_equal(first[name], second[name]) for name in first)


def checkpoint(r: Rank) -> dict[str, Any]:
    """Save; go on; go back; go on again: the same bits, as if nothing had happened between."""
    folder = r.folder / "checkpoint"
    folder.mkdir(exist_ok=True)
    r.begin_cycle(1)  # checkpoints are written right after a sync
    saved = r.weights()
    r.trainer.save_checkpoint(folder)
    first = r.trainer.train(r.batch(7))
    moved = r.weights()
    r.trainer.load_checkpoint(folder)
    restored = r.weights()
    second = r.trainer.train(r.batch(7))
    again = r.weights()
    exported = load_file(folder / "model" / "model.safetensors")
    return {
        "moved": any(not np.array_equal(saved[n], moved[n]) for n in saved),
        "restored": all(np.array_equal(saved[n], restored[n]) for n in saved),
        "repeated": all(np.array_equal(moved[n], again[n]) for n in saved),
        "metrics": (first.metrics, second.metrics),
        "exported": sorted(exported) == sorted(saved)
        and all(np.array_equal(exported[n].float().numpy(), saved[n]) for n in saved),
        "saved": saved,
        "moved_weights": moved,
    }


def full_disk(r: Rank) -> dict[str, Any]:
    """No file may grow beyond a few bytes: saving fails everywhere, and works when there is space again."""
    folder = r.folder / "full"
    folder.mkdir(exist_ok=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = ""
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
        r.trainer.save_checkpoint(folder)
    except HybridschedError as error:
        said = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    weights = r.weights()
    r.trainer.save_checkpoint(folder)
    r.trainer.train(r.batch(8))
    r.trainer.load_checkpoint(folder)
    after = r.weights()
    return {"said": said, "works_again": all(np.array_equal(weights[n], after[n]) for n in weights)}


def damaged_shard(r: Rank) -> str:
    """A file of the newest checkpoint was cut short."""
    folder = r.folder / "checkpoint"
    if r.rank == 0:
        for path in (folder / "megatron").glob("*.distcp"):
            os.truncate(path, 100)
    try:
        r.trainer.load_checkpoint(folder)
    except HybridschedError as error:
        return str(error)
    return ""


def resume(r: Rank) -> dict[str, Any]:
    """From the checkpoint of a job of other sizes."""
    r.trainer.load_checkpoint(Path(r.job["checkpoint"]))
    restored = r.weights()
    r.version = WeightVersion(0, 1)
    result = r.trainer.train(r.batch(7))
    return {"restored": restored, "metrics": result.metrics, "moved_weights": r.weights()}


def resume_refused(r: Rank) -> str:
    """What is said of a checkpoint that these sizes cannot take over."""
    try:
        r.trainer.load_checkpoint(Path(r.job["checkpoint"]))
    except HybridschedError as error:
        return str(error)
    return ""


def refuse_poison(r: Rank) -> dict[str, Any]:
    """A sample whose log-prob makes the loss infinite."""
    before = r.weights()
    try:
        r.trainer.train(r.batch(11, poison=2))
    except HybridschedError as error:
        after = r.weights()
        return {"error": str(error), "unchanged": all(np.array_equal(before[n], after[n]) for n in before)}
    return {"error": "", "unchanged": False}


def lose_a_peer(r: Rank) -> str:
    """The last rank is killed; the others have to notice within the group's timeout."""
    if r.rank == r.world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        r.trainer.train(r.batch(12))
    except HybridschedError as error:
        return str(error)
    return ""


def run_stage(stage: dict[str, Any], rank: int, answers: dict[str, Any]) -> None:
    """A stage that fails leaves its traceback as "error"; the next one starts anew."""
    r = Rank(stage, rank)
    try:
        for name in ("start", *stage["checks"]):
            check: Callable[[Rank], Any] = Rank.start if name == "start" else globals()[name]
            began = time.monotonic()
            answers[name] = check(r)
            print(f"rank {rank}, {stage['name']}: {name} {time.monotonic() - began:.1f} s", flush=True)
    except Exception:
        answers["error"] = traceback.format_exc()
        print(answers["error"], flush=True)
    r.trainer.shutdown()


def main() -> None:
    path, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    answers: dict[str, dict[str, Any]] = {}
    for stage in json.loads(path.read_text()):
        answers[stage["name"]] = {}
        run_stage(stage, rank, answers[stage["name"]])
        (path.parent / f"rank{rank}.pickle").write_bytes(pickle.dumps(answers))


if __name__ == "__main__":
    main()
