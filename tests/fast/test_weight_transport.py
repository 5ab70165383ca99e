"""Weights between real workers' ends: a tiny torch trainer sends, torch engines receive, over gloo and shared memory.

Sender and receivers share one event loop; their transfers run in threads, as in worker processes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from trainer_kit import TINY, batch, random_samples, run_config, started, write_model

from hybridsched.config.schema import EmulatedConfig
from hybridsched.engines.emulated import EmulatedEngine
from hybridsched.engines.torch_engine import TorchEngine
from hybridsched.errors import InternalError, WeightSyncError
from hybridsched.model import ReplicaKind, WeightVersion
from hybridsched.runtime import messages as m
from hybridsched.runtime.adapters.emulated_transport import EmulatedReceiver, EmulatedSender
from hybridsched.runtime.adapters.transfer import Cut, TransportSettings
from hybridsched.runtime.adapters.weight_transport import GroupReceiver, GroupSender
from hybridsched.runtime.gather import outcomes
from hybridsched.simulation.clock import VirtualClock, run_virtual
from hybridsched.trainers.torch_trainer import TorchTrainer

HANGS_S = 60.0  # a bound that only a hang reaches
V1, V2 = WeightVersion(0, 1), WeightVersion(0, 2)
PROBE = [(np.array([1, 2, 3], np.int32), np.array([4, 5, 6, 7], np.int32))]
T = TypeVar("T")


class StuckEngine(TorchEngine):
    """Waits in load_bucket while ``stuck`` is set."""

    stuck: asyncio.Event | None = None
    reached: asyncio.Event

    async def load_bucket(self, tensors: Mapping[str, Any]) -> None:
        if self.stuck is not None:
            self.reached.set()
            await self.stuck.wait()
        await super().load_bucket(tensors)


@dataclass
class World:
    """A trainer that has learned something, and replicas that still hold the first weights."""

    trainer: TorchTrainer
    sender: GroupSender
    engines: dict[str, StuckEngine]
    receivers: dict[str, GroupReceiver]
    settings: TransportSettings
    attempt: int = 0

    @property
    def members(self) -> list[str]:
        return ["trainer.0", *self.receivers]

    async def open(self, fresh: bool) -> m.SyncAddress:
        self.attempt += 1
        return await self.sender.open(m.OpenSync(self.attempt, self.members, fresh))

    def receive(self, name: str, version: WeightVersion, address: m.SyncAddress) -> Awaitable[m.SyncDone]:
        rank = self.members.index(name)
        return self.receivers[name].receive(
            m.ReceiveWeights(self.attempt, version, self.members, rank, address, keep_kv=False)
        )

    async def sync(self, version: WeightVersion, *, fresh: bool = True) -> list[m.SyncDone | BaseException]:
        """What the controller does: the first member that fails has all others aborted."""
        address = await self.open(fresh)
        calls = [self.sender.send(m.SendWeights(self.attempt, version, self.members))]
        calls += [self.receive(name, version, address) for name in self.receivers]

        async def watched(call: Awaitable[m.SyncDone]) -> m.SyncDone:
            try:
                return await call
            except WeightSyncError:
                self.abort("another member failed")
                raise

        return await outcomes([watched(call) for call in calls])

    def abort(self, reason: str) -> None:
        for end in (self.sender, *self.receivers.values()):
            end.abort(reason)

    async def difference(self, name: str) -> float:
        """Largest log-prob difference between the trainer and a replica."""
        ours = self.trainer.logprobs(PROBE, 1.0)
        theirs = await self.engines[name].logprobs(PROBE, 1.0)
        return float(np.max(np.abs(ours[0] - theirs[0])))


async def engine_of(model: Path, dtype: str = "float32") -> StuckEngine:
    engine = StuckEngine(model, dtype=dtype, max_num_seqs=2, kv_cache_tokens=64)
    engine.reached = asyncio.Event()
    await engine.start()
    await engine.pause("abort")
    return engine


def make_settings(tmp_path: Path, **changes: Any) -> TransportSettings:
    config = run_config(tmp_path / "model")
    settings = TransportSettings.of(
        config, run_id="run-1", secret="s3cret", device="cpu", hostname="localhost", scratch=tmp_path
    )
    return replace(settings, **{"bucket_bytes": 2048, "bucket_s": 30.0, "handover_folder": tmp_path, **changes})


@asynccontextmanager
async def world(tmp_path: Path, *names: str, dtype: str = "float32", **changes: Any) -> AsyncIterator[World]:
    torch.set_num_threads(1)
    model = write_model(tmp_path / "model")
    settings = make_settings(tmp_path, wire_dtype=dtype, **changes)
    trainer = started(run_config(model), tmp_path)
    trainer.train(batch(random_samples(4)))
    engines = {name: await engine_of(model, dtype) for name in names}
    receivers = {name: GroupReceiver(name, engine, asyncio.to_thread, settings) for name, engine in engines.items()}
    sender = GroupSender("trainer.0", trainer, asyncio.to_thread, settings)
    try:
        yield World(trainer, sender, engines, receivers, settings)
    finally:
        for receiver in receivers.values():
            receiver.close()
        sender.close()
        trainer.shutdown()


def run(main: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(HANGS_S):
            return await main()

    return asyncio.run(bounded())


# --- broadcast ----------------------------------------------------------------------------------------------------


def test_every_receiver_holds_the_trainers_weights_and_reports_the_same_checksum(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, "standalone.0", "standalone.1") as w:
            before = await w.difference("standalone.0")
            done = [d for d in await w.sync(V1) if isinstance(d, m.SyncDone)]
            after = [await w.difference(name) for name in w.receivers]
            assert before > 1e-3
            assert len(done) == 3
            assert max(after) < 1e-5
            assert len({(d.checksum, d.n_bytes) for d in done}) == 1
            assert done[0].checksum != ""
            assert [e.version for e in w.engines.values()] == [V1, V1]

    run(main)


def test_a_group_is_kept_while_the_members_stay_and_carries_new_weights(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, "standalone.0") as w:
            await w.sync(V1)
            first = w.receivers["standalone.0"]._group
            w.trainer.train(batch(random_samples(4, seed=5)))
            results = await w.sync(V2, fresh=False)
            assert [type(r) for r in results] == [m.SyncDone, m.SyncDone]
            assert w.receivers["standalone.0"]._group is first
            assert await w.difference("standalone.0") < 1e-5

    run(main)


def test_other_members_make_a_new_group(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, "standalone.0", "standalone.1") as w:
            await w.sync(V1)
            first = w.receivers["standalone.0"]._group
            w.receivers.pop("standalone.1").close()
            results = await w.sync(V2)
            assert [type(r) for r in results] == [m.SyncDone, m.SyncDone]
            assert w.receivers["standalone.0"]._group is not first

    run(main)


def test_a_replica_that_was_restarted_says_at_once_that_it_lacks_the_group(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, "standalone.0") as w:
            await w.sync(V1)
            w.receivers["standalone.0"].close()
            failed = await w.sync(V2, fresh=False)
            again = await w.sync(V2)
            assert [isinstance(r, WeightSyncError) for r in failed] == [True, True]
            assert "did not join" in str(failed[1])
            assert [type(r) for r in again] == [m.SyncDone, m.SyncDone]
            assert await w.difference("standalone.0") < 1e-5

    run(main)


def test_abort_in_the_middle_ends_both_sides_and_the_next_attempt_succeeds(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, "standalone.0") as w:
            engine = w.engines["standalone.0"]
            engine.stuck = asyncio.Event()
            syncing = asyncio.ensure_future(w.sync(V1))
            await engine.reached.wait()
            w.abort("told to")
            failed = await syncing
            engine.stuck = None
            assert [isinstance(r, WeightSyncError) for r in failed] == [True, True]
            assert "told to" in str(failed[1])
            assert engine.version == WeightVersion(0, 0)
            with pytest.raises(InternalError, match="not whole"):
                await engine.logprobs(PROBE, 1.0)
            results = await w.sync(V1)
            assert [type(r) for r in results] == [m.SyncDone, m.SyncDone]
            assert (engine.version, await w.difference("standalone.0") < 1e-5) == (V1, True)

    run(main)


def test_an_abort_between_open_and_send_is_not_lost(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, "standalone.0") as w:
            await w.open(fresh=True)
            w.sender.abort("a receiver died")
            with pytest.raises(WeightSyncError, match="a receiver died"):
                await w.sender.send(m.SendWeights(w.attempt, V1, w.members))

    run(main)


def test_a_newer_order_ends_the_one_that_still_runs(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, "standalone.0") as w:
            address = await w.open(fresh=True)
            lonely = asyncio.ensure_future(w.receive("standalone.0", V1, address))  # nobody sends
            await asyncio.sleep(0.2)
            results = await w.sync(V1)
            assert [type(r) for r in results] == [m.SyncDone, m.SyncDone]
            with pytest.raises(WeightSyncError, match="attempt 2 was ordered meanwhile"):
                await lonely

    run(main)


def test_a_receiver_that_never_comes_is_named_after_the_deadline(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, "standalone.0", bucket_s=0.5) as w:
            await w.open(fresh=True)
            with pytest.raises(WeightSyncError, match=r"rank 1 \(standalone\.0\) did not arrive within"):
                await w.sender.send(m.SendWeights(w.attempt, V1, w.members))

    run(main)


def test_an_engine_that_does_not_take_a_bucket_ends_the_sync(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, "standalone.0", bucket_s=1.0) as w:
            w.engines["standalone.0"].stuck = asyncio.Event()
            failed = await w.sync(V1)
            assert [isinstance(r, WeightSyncError) for r in failed] == [True, True]
            assert "did not take a bucket in 1 s" in str(failed[1])

    run(main)


def test_weights_travel_in_the_engines_dtype(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, "standalone.0", dtype="bfloat16") as w:
            address = await w.open(fresh=True)
            full = sum(t.numel() * 4 for _, t in w.trainer.iter_weights())
            results = await w.sync(V1)
            assert {spec.dtype for spec in address.specs} == {"bfloat16"}
            assert isinstance(results[1], m.SyncDone)
            assert results[1].n_bytes < 0.6 * full
            assert await w.difference("standalone.0") < 0.2

    run(main)


def test_large_tensors_are_received_where_they_belong_and_only_the_others_are_loaded(tmp_path: Path) -> None:
    loaded: set[str] = set()

    class Noting(StuckEngine):
        async def load_bucket(self, tensors: Mapping[str, Any]) -> None:
            loaded.update(tensors)
            await super().load_bucket(tensors)

    async def main() -> None:
        async with world(tmp_path, "standalone.0") as w:
            w.engines["standalone.0"].__class__ = Noting
            await w.sync(V1)
            large = {s.name for s in w.trainer.weight_specs() if 4 * math.prod(s.shape) >= w.settings.bucket_bytes // 2}
            assert large
            assert loaded
            assert not large & loaded
            assert await w.difference("standalone.0") < 1e-5

    run(main)


# --- hand-over ----------------------------------------------------------------------------------------------------


def test_hand_over_fills_a_woken_hybrid(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, "hybrid.0", "hybrid.1") as w:
            for engine in w.engines.values():
                await engine.sleep()
                await engine.wake_weights()
            w.trainer.offload(keep_parameters=True)
            calls = [r.read_handover(m.ReadHandover(V1, "handover-1", [])) for r in w.receivers.values()]
            calls.append(w.sender.write_handover(m.WriteHandover(V1, "handover-1", [*w.receivers])))
            done = [d for d in await outcomes(calls) if isinstance(d, m.SyncDone)]
            w.trainer.onload()
            assert len(done) == 3
            assert len({d.checksum for d in done}) == 1
            for name, engine in w.engines.items():
                await engine.wake_kv()
                assert (engine.version, await w.difference(name) < 1e-5) == (V1, True)

    run(main)


def test_a_hybrid_of_another_model_refuses_and_the_writer_hears_why(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as w:
            other = write_model(tmp_path / "other", replace(TINY, num_hidden_layers=1))
            receiver = GroupReceiver("hybrid.0", await engine_of(other), asyncio.to_thread, w.settings)
            read, wrote = await outcomes(
                [
                    receiver.read_handover(m.ReadHandover(V1, "h", [])),
                    w.sender.write_handover(m.WriteHandover(V1, "h", ["hybrid.0"])),
                ]
            )
            assert "not in this model" in str(read)
            assert "not in this model" in str(wrote)

    run(main)


@pytest.mark.parametrize("side", ["reader", "writer"])
def test_a_hand_over_that_waits_for_the_other_side_can_be_aborted(tmp_path: Path, side: str) -> None:
    async def main() -> None:
        async with world(tmp_path, "hybrid.0") as w:
            if side == "writer":
                waiting = asyncio.ensure_future(w.sender.write_handover(m.WriteHandover(V1, "h", ["hybrid.0"])))
            else:
                w.engines["hybrid.0"].stuck = asyncio.Event()
                reading = w.receivers["hybrid.0"].read_handover(m.ReadHandover(V1, "h", []))
                waiting = asyncio.ensure_future(reading)
                writing = asyncio.ensure_future(w.sender.write_handover(m.WriteHandover(V1, "h", ["hybrid.0"])))
                await w.engines["hybrid.0"].reached.wait()
            await asyncio.sleep(0.1)
            w.abort("never mind")
            with pytest.raises(WeightSyncError, match="never mind"):
                await waiting
            if side == "reader":
                with pytest.raises(WeightSyncError):
                    await writing

    run(main)


# --- the emergency stop -------------------------------------------------------------------------------------------


def test_an_order_before_there_is_anything_to_stop_is_kept() -> None:
    cut, acted = Cut("sync"), list[str]()
    cut.order("first")
    cut.order("second")
    with pytest.raises(WeightSyncError, match="sync aborted: first"), cut.stops(acted.append):
        acted.append("ran")
    assert acted == []


def test_an_order_while_it_runs_is_passed_on_and_afterwards_not() -> None:
    cut, acted = Cut("sync"), list[str]()
    with cut.stops(acted.append):
        cut.order("now")
    cut.order("late")
    assert acted == ["now"]


# --- emulated -----------------------------------------------------------------------------------------------------


def emulated(kind: ReplicaKind) -> tuple[VirtualClock, EmulatedConfig, EmulatedEngine]:
    clock, config = VirtualClock(), EmulatedConfig(sync_s=3.0, handover_s=2.0)
    return clock, config, EmulatedEngine(config, kind=kind, kv_tokens=100, max_num_seqs=2, wall=clock.wall)


def members_at(address: m.SyncAddress, version: WeightVersion) -> m.ReceiveWeights:
    return m.ReceiveWeights(1, version, ["trainer.0", "standalone.0"], 1, address, keep_kv=False)


def test_an_emulated_sync_takes_its_time_and_sets_the_version() -> None:
    async def main() -> tuple[Sequence[Any], WeightVersion]:
        clock, config, engine = emulated(ReplicaKind.STANDALONE)
        sender = EmulatedSender("trainer.0", config, clock)
        receiver = EmulatedReceiver("standalone.0", engine, clock)
        await engine.start()
        await engine.pause("abort")
        address = await sender.open(m.OpenSync(1, ["trainer.0", "standalone.0"], True))
        send = sender.send(m.SendWeights(1, V1, ["trainer.0", "standalone.0"]))
        return await outcomes([send, receiver.receive(members_at(address, V1))]), engine.version

    done, version = run_virtual(main())
    assert version == V1
    assert [(d.seconds, d.n_bytes, d.phases) for d in done] == [(3.0, 0, {"emulated": 3.0})] * 2


def test_an_emulated_hand_over_takes_its_own_time() -> None:
    async def main() -> tuple[Any, WeightVersion]:
        clock, _config, engine = emulated(ReplicaKind.HYBRID)
        receiver = EmulatedReceiver("hybrid.0", engine, clock)
        await engine.start()
        await engine.sleep()
        await engine.wake_weights()
        return await receiver.read_handover(m.ReadHandover(V1, "h", [])), engine.version

    done, version = run_virtual(main())
    assert (done.seconds, version) == (2.0, V1)


def test_an_emulated_sync_can_be_aborted_and_repeated() -> None:
    async def main() -> tuple[list[str], float, WeightVersion]:
        clock, config, engine = emulated(ReplicaKind.STANDALONE)
        sender = EmulatedSender("trainer.0", config, clock)
        receiver = EmulatedReceiver("standalone.0", engine, clock)
        await engine.start()
        await engine.pause("abort")
        address = await sender.open(m.OpenSync(1, [], True))
        tasks = [
            asyncio.ensure_future(sender.send(m.SendWeights(1, V1, []))),
            asyncio.ensure_future(receiver.receive(members_at(address, V1))),
        ]
        await asyncio.sleep(1.0)
        sender.abort("a member died")
        receiver.abort("a member died")
        failed = [str(e) for e in await outcomes(tasks)]
        at = clock.now()
        await receiver.receive(members_at(address, V2))
        return failed, at, engine.version

    failed, at, version = run_virtual(main())
    assert failed == [
        "trainer.0: sync of 0.1 aborted: a member died",
        "standalone.0: sync of 0.1 aborted: a member died",
    ]
    assert (at, version) == (1.0, V2)


# -- a trainer whose weights are gathered from several ranks --------------------------------------------------


class Walk:
    """Iterates like a sharded trainer's weights, and knows how often its end was asked for."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.taken, self.closed = inner, 0, 0

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> Any:
        found = next(self.inner)
        self.taken += 1
        return found

    def close(self) -> None:
        self.closed += 1


def watch_walks(trainer: TorchTrainer) -> list[Walk]:
    """The walks the trainer hands out from now on."""
    walks: list[Walk] = []
    plain = trainer.iter_weights

    def iter_weights() -> Walk:
        walks.append(Walk(plain()))
        return walks[-1]

    trainer.iter_weights = iter_weights  # type: ignore[method-assign,assignment]
    return walks


def test_the_walk_of_a_sync_is_closed_however_it_ends(tmp_path: Path) -> None:
    """Other ranks gather along: a sender that stops early, or before it begins, must not leave them waiting."""

    async def main() -> None:
        async with world(tmp_path, "standalone.0") as w:
            walks = watch_walks(w.trainer)
            assert all(not isinstance(result, BaseException) for result in await w.sync(V1))
            with pytest.raises(WeightSyncError, match="was not opened"):
                await w.sender.send(m.SendWeights(99, V2, ["trainer.0", "nobody"]))
            engine = w.engines["standalone.0"]
            engine.stuck = asyncio.Event()
            address = await w.open(fresh=True)
            calls = [
                asyncio.ensure_future(w.sender.send(m.SendWeights(w.attempt, V2, w.members))),
                asyncio.ensure_future(w.receive("standalone.0", V2, address)),
            ]
            await engine.reached.wait()
            w.abort("test")
            engine.stuck.set()
            assert all(isinstance(result, WeightSyncError) for result in await outcomes(calls))
            assert [1, 1, 1] == [walk.closed for walk in walks]
            assert 0 == walks[1].taken

    run(main)


def test_the_walk_of_a_hand_over_nobody_comes_to_is_closed(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, bucket_s=0.5) as w:
            walks = watch_walks(w.trainer)
            with pytest.raises(WeightSyncError):
                await w.sender.write_handover(m.WriteHandover(V1, "handover-1", ["hybrid.0"]))
            assert [1] == [walk.closed for walk in walks]

    run(main)
