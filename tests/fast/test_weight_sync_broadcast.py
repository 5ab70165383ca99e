"""A sync over gloo: bit for bit, or an error that says who, which bucket and why, on every rank and in time.

Ranks are threads of this process (a BroadcastGroup has no global state), except where one is killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import weight_sync_peer as peer

from hybridsched.errors import WeightSyncError
from hybridsched.model import TensorSpec, WeightVersion
from hybridsched.weight_sync.broadcast import receive_weights, send_weights
from hybridsched.weight_sync.group import BroadcastGroup, RendezvousStore, WeightSyncBroken, open_store
from hybridsched.weight_sync.plan import plan_buckets
from hybridsched.weight_sync.watchdog import BucketWatchdog
from hybridsched.weight_sync.wire import SyncReport

VERSION = WeightVersion(0, 5)
BUCKET = 4096
LABELS = ("trainer-0", "rollout-0", "rollout-1")
HANGS_S = 60  # a bound that only a hang reaches


@pytest.fixture
def store() -> Iterator[RendezvousStore]:
    opened = open_store("127.0.0.1", 20)
    yield opened
    opened.close()


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    """Mixed dtypes and shapes; "embed" is longer than a bucket, "empty" has no bytes."""
    g = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(50, 64, generator=g),
        "norm": torch.randn(63, generator=g).to(torch.bfloat16),
        "scale": torch.randn((), generator=g, dtype=torch.float64),
        "transposed": torch.randn(16, 24, generator=g).to(torch.float16).t(),
        "mask": torch.randn(7, generator=g) > 0,
        "empty": torch.empty(0, 3),
        "ids": torch.randint(-100, 100, (33,), generator=g, dtype=torch.int8),
        "head": torch.randn(50, 64, generator=g).to(torch.bfloat16),
    }


def specs_of(tensors: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()]


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Run the calls side by side; what each returned or raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [f.exception(HANGS_S) or f.result() for f in futures]


def in_group(
    rank: int,
    store: RendezvousStore,
    act: Callable[[BroadcastGroup], Any],
    *,
    world: int = 3,
    cls: Any = BroadcastGroup,
) -> Callable[[], Any]:
    """Join as this rank, act, close."""

    def call() -> Any:
        group = cls(rank=rank, world_size=world, secret="s", attempt=1, labels=LABELS[:world])
        try:
            group.join(store if rank == 0 else store.address, 20)
            return act(group)
        finally:
            group.close()

    return call


def sending(tensors: dict[str, torch.Tensor], **options: Any) -> Callable[[BroadcastGroup], SyncReport]:
    settings: dict[str, Any] = {"version": VERSION, "bucket_bytes": BUCKET, "bucket_timeout_s": 20, **options}
    specs = settings.pop("specs", specs_of(tensors))
    return lambda group: send_weights(group, specs, tensors.items(), **settings)


def receiving(tensors: dict[str, torch.Tensor], load: Any, **options: Any) -> Callable[[BroadcastGroup], SyncReport]:
    settings: dict[str, Any] = {"version": VERSION, "bucket_bytes": BUCKET, "bucket_timeout_s": 20, **options}
    specs = settings.pop("specs", specs_of(tensors))
    return lambda group: receive_weights(group, specs, load=load, **settings)


def keeper(into: dict[str, torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: into.update({n: t.clone() for n, t in tensors.items()})


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    def raw(t: torch.Tensor) -> tuple[Any, ...]:
        return (t.dtype, tuple(t.shape), bytes(t.contiguous().reshape(-1).view(torch.uint8).numpy()))

    return {n: raw(t) for n, t in a.items()} == {n: raw(t) for n, t in b.items()}


def test_two_receivers_get_every_dtype_bit_for_bit(store: RendezvousStore) -> None:
    sent = model()
    got: list[dict[str, torch.Tensor]] = [{}, {}]
    reports = at_once(
        in_group(0, store, sending(sent)),
        in_group(1, store, receiving(sent, keeper(got[0]))),
        in_group(2, store, receiving(sent, keeper(got[1]))),
    )
    assert [same_bits(sent, g) for g in got] == [True, True]
    assert [r.rank for r in reports] == [0, 1, 2]
    assert reports[0].checksums == reports[1].checksums == reports[2].checksums
    assert len(reports[0].checksums) == reports[0].buckets > 4
    assert {"pack", "transfer", "checksum", "total"} <= reports[0].seconds.keys()
    assert {"load", "transfer", "checksum", "total"} <= reports[1].seconds.keys()


def test_fresh_buffers_survive_the_loader_and_reused_ones_do_not(store: RendezvousStore) -> None:
    sent = model()
    fresh: dict[str, torch.Tensor] = {}
    reused: dict[str, torch.Tensor] = {}
    at_once(
        in_group(0, store, sending(sent)),
        in_group(1, store, receiving(sent, fresh.update, fresh_buffers=True)),
        in_group(2, store, receiving(sent, reused.update)),
    )
    assert [same_bits(sent, fresh), same_bits(sent, reused)] == [True, False]


def test_a_long_tensor_can_be_taken_in_slices(store: RendezvousStore) -> None:
    sent = model()
    got = {"embed": torch.zeros(50, 64), "head": torch.zeros(50, 64, dtype=torch.bfloat16)}
    slices: list[tuple[str, int, int]] = []

    def load_slice(name: str, first: int, part: torch.Tensor) -> None:
        slices.append((name, first, part.numel()))
        got[name].view(-1)[first : first + part.numel()].copy_(part)

    whole: dict[str, torch.Tensor] = {}
    at_once(
        in_group(0, store, sending(sent), world=2),
        in_group(1, store, receiving(sent, keeper(whole), load_slice=load_slice), world=2),
    )
    assert same_bits(sent, {**whole, **got})
    assert [s for s in slices if s[0] == "embed"] == [
        ("embed", 0, 1024),
        ("embed", 1024, 1024),
        ("embed", 2048, 1024),
        ("embed", 3072, 128),
    ]


def test_large_tensors_are_received_in_place_and_the_rest_is_loaded(store: RendezvousStore) -> None:
    sent = model()
    places = {"embed": torch.zeros(50, 64), "head": torch.zeros(50, 64, dtype=torch.bfloat16), "ids": torch.zeros(33)}
    loaded: dict[str, torch.Tensor] = {}
    at_once(
        in_group(0, store, sending(sent), world=2),
        in_group(1, store, receiving(sent, keeper(loaded), into=places.get), world=2),
    )
    assert sorted(loaded) == sorted(set(sent) - {"embed", "head"})
    assert same_bits(sent, {**loaded, "embed": places["embed"], "head": places["head"]})


def test_a_place_that_does_not_fit_is_named(store: RendezvousStore) -> None:
    sent = model()
    errors = at_once(
        in_group(0, store, sending(sent), world=2),
        in_group(1, store, receiving(sent, keeper({}), into={"embed": torch.zeros(64, 50)}.get), world=2),
    )
    assert ["place for a tensor is TensorSpec(name='embed', shape=(64, 50)" in str(e) for e in errors] == [True] * 2


def test_progress_counts_every_bucket_on_both_sides(store: RendezvousStore) -> None:
    sent, seen = model(), ([], [])
    report, _ = at_once(
        in_group(0, store, sending(sent, on_progress=lambda *at: seen[0].append(at)), world=2),
        in_group(1, store, receiving(sent, keeper({}), on_progress=lambda *at: seen[1].append(at)), world=2),
    )
    expected = [(i + 1, report.buckets) for i in range(report.buckets)]
    assert [expected, expected] == [*seen]


def test_without_verification_no_checksum_is_taken(store: RendezvousStore) -> None:
    sent: dict[str, torch.Tensor] = model()
    got: dict[str, torch.Tensor] = {}
    reports = at_once(
        in_group(0, store, sending(sent, verify=False), world=2),
        in_group(1, store, receiving(sent, keeper(got)), world=2),
    )
    assert [r.checksums for r in reports] == [(), ()]
    assert same_bits(sent, got)


class Flipping(BroadcastGroup):
    """Flips one bit of the bucket that holds "mask" after it arrived."""

    def wait(self, handle: Any) -> None:
        super().wait(handle)
        if "mask" in handle[2]:
            handle[1][5] ^= 1


def test_a_flipped_bit_is_found_on_every_rank_with_bucket_and_tensors(store: RendezvousStore) -> None:
    sent = model()
    errors = at_once(
        in_group(0, store, sending(sent)),
        in_group(1, store, receiving(sent, keeper({}))),
        in_group(2, store, receiving(sent, keeper({})), cls=Flipping),
    )
    assert [type(errors[0]), type(errors[2])] == [WeightSyncBroken, WeightSyncBroken]
    for error in (errors[0], errors[2]):
        assert f"1 of {len(plan_buckets(specs_of(sent), BUCKET))} buckets arrived damaged" in str(error)
        assert "norm, scale, transposed, mask" in str(error)
    assert "rank 2 (rollout-1)" in str(errors[0])


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"version": WeightVersion(1, 5)}, "offers version 0.5, this receiver expects 1.5"),
        ({"bucket_bytes": 8192}, "buckets of 4096 bytes, this receiver 8192"),
        ({"specs": specs_of({**model(), "norm": torch.zeros(64)})}, "norm: sender bfloat16.63., receiver float32.64."),
    ],
)
def test_a_mismatch_stops_both_sides_before_the_first_bucket(
    store: RendezvousStore, options: dict[str, Any], word: str
) -> None:
    sent = model()
    loaded: dict[str, torch.Tensor] = {}
    sender, receiver = at_once(
        in_group(0, store, sending(sent), world=2),
        in_group(1, store, receiving(sent, loaded.update, **options), world=2),
    )
    for error in (sender, receiver):
        with pytest.raises(WeightSyncBroken, match=word):
            raise error
    assert loaded == {}


def test_a_loader_that_raises_ends_the_sync_everywhere_with_its_words(store: RendezvousStore) -> None:
    sent = model()

    def load(tensors: dict[str, torch.Tensor]) -> None:
        raise KeyError("no such parameter")

    errors = at_once(
        in_group(0, store, sending(sent)),
        in_group(1, store, receiving(sent, load)),
        in_group(2, store, receiving(sent, keeper({}))),
    )
    assert [type(e) for e in errors] == [WeightSyncBroken] * 3
    assert [("no such parameter" in str(e), 1 in e.failed) for e in errors] == [(True, True)] * 3


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda m: m.pop("head"), "ended before tensor 7 .'head'. of 8"),
        (lambda m: m.update(extra=torch.zeros(2)), "yields 'extra' after the last of 8"),
        (lambda m: m.update(mask=torch.zeros(7)), "tensor 4 of the weight source is .*'float32'"),
    ],
)
def test_a_source_that_does_not_fit_its_specs_is_named(
    store: RendezvousStore, change: Callable[[dict[str, torch.Tensor]], Any], word: str
) -> None:
    specs, source = specs_of(model()), model()
    change(source)
    errors = at_once(
        in_group(0, store, sending(source, specs=specs), world=2),
        in_group(1, store, receiving(model(), keeper({})), world=2),
    )
    for error in errors:
        with pytest.raises(WeightSyncBroken, match=word):
            raise error


def test_an_empty_model_is_refused(store: RendezvousStore) -> None:
    errors = at_once(in_group(0, store, sending({}), world=2), in_group(1, store, receiving({}, keeper({})), world=2))
    assert ["nothing to sync" in str(e) for e in errors] == [True, True]


def test_a_rank_that_never_joins_is_named_by_all_who_did(store: RendezvousStore) -> None:
    def join(rank: int) -> Callable[[], Any]:
        def call() -> None:
            group = BroadcastGroup(rank=rank, world_size=3, secret="s", attempt=1, labels=LABELS)
            try:
                group.join(store if rank == 0 else store.address, 1.0)
            finally:
                group.close()

        return call

    errors = at_once(join(0), join(1))
    assert [(type(e), e.missing) for e in errors] == [(WeightSyncBroken, (2,))] * 2
    assert all("rank 2 (rollout-1)" in str(e) for e in errors)


def test_a_store_that_is_gone_blames_the_sender_at_once() -> None:
    store = open_store("127.0.0.1", 5)
    address = store.address
    store.close()
    group = BroadcastGroup(rank=1, world_size=2, secret="s", attempt=1)
    with pytest.raises(WeightSyncBroken, match="cannot reach the store of rank 0") as caught:
        group.join(address, HANGS_S)
    assert caught.value.missing == (0,)


def test_a_store_that_closes_in_the_middle_ends_the_wait() -> None:
    store = open_store("127.0.0.1", 5)
    group = BroadcastGroup(rank=1, world_size=2, secret="s", attempt=1)
    threading.Timer(0.3, store.close).start()
    with pytest.raises(WeightSyncBroken, match=r"store of rank 0 .* is gone") as caught:
        group.join(store.address, HANGS_S)
    assert caught.value.missing == (0,)


def test_a_receiver_that_hangs_in_its_loader_is_named_after_the_deadline(store: RendezvousStore) -> None:
    sent, release = model(), threading.Event()

    def stuck(tensors: dict[str, torch.Tensor]) -> None:
        assert release.wait(HANGS_S)

    def send(group: BroadcastGroup) -> SyncReport:
        try:
            return sending(sent, bucket_timeout_s=1.0)(group)
        finally:
            release.set()

    sender, receiver = at_once(in_group(0, store, send, world=2), in_group(1, store, receiving(sent, stuck), world=2))
    assert (type(sender), sender.missing) == (WeightSyncBroken, (1,))
    assert isinstance(receiver, WeightSyncError)


def test_abort_frees_a_thread_blocked_in_a_transfer_and_really_ends_it(store: RendezvousStore) -> None:
    handles: list[Any] = []
    aborted = threading.Event()

    def send(group: BroadcastGroup) -> None:
        handles.append(group.start(torch.zeros(64 << 20, dtype=torch.uint8), HANGS_S, "bucket 0"))
        threading.Timer(0.3, group.abort, ["the agent says so"]).start()
        try:
            group.wait(handles[0])
        finally:
            end = time.monotonic() + HANGS_S / 2  # gloo's own timeout would be HANGS_S
            while not handles[0][0].is_completed() and time.monotonic() < end:
                time.sleep(0.01)
            aborted.set()

    def idle(group: BroadcastGroup) -> None:
        assert aborted.wait(HANGS_S)

    sender, _ = at_once(in_group(0, store, send, world=2), in_group(1, store, idle, world=2))
    with pytest.raises(WeightSyncBroken, match="bucket 0: aborted: the agent says so"):
        raise sender
    assert handles[0][0].is_completed()


def test_the_watchdog_cuts_a_gather_that_hangs_and_the_receiver_learns_why(store: RendezvousStore) -> None:
    sent, free = model(), threading.Event()

    def hanging() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(iter(sent.items()))
        free.wait(HANGS_S)  # a collective whose peer is dead
        yield from list(sent.items())[1:]

    def send(group: BroadcastGroup) -> SyncReport:
        def expire(reason: str) -> None:
            group.abort(reason)
            free.set()

        with BucketWatchdog(0.5, expire) as dog:
            return send_weights(
                group,
                specs_of(sent),
                hanging(),
                version=VERSION,
                bucket_bytes=BUCKET,
                bucket_timeout_s=20,
                on_progress=dog.progress,
            )

    errors = at_once(in_group(0, store, send, world=2), in_group(1, store, receiving(sent, keeper({})), world=2))
    for error in errors:
        with pytest.raises(WeightSyncBroken):
            raise error
    assert "no bucket finished within 0.5 s" in str(errors[0])
    assert "no bucket finished within 0.5 s" in errors[1].failed[0]


def test_one_group_serves_one_sync_after_the_other(store: RendezvousStore) -> None:
    versions = [WeightVersion(0, number) for number in range(1, 4)]
    models = [model(seed) for seed in range(3)]
    got: list[dict[str, torch.Tensor]] = [{}, {}, {}]

    def send(group: BroadcastGroup) -> list[str]:
        return [sending(m, version=v)(group).version for m, v in zip(models, versions, strict=True)]

    def receive(group: BroadcastGroup) -> list[str]:
        turns = zip(models, got, versions, strict=True)
        return [receiving(m, keeper(g), version=v)(group).version for m, g, v in turns]

    results = at_once(in_group(0, store, send, world=2), in_group(1, store, receive, world=2))
    assert results == [["0.1", "0.2", "0.3"]] * 2
    assert [same_bits(m, g) for m, g in zip(models, got, strict=True)] == [True] * 3


def test_attempts_on_one_store_do_not_hear_each_other(store: RendezvousStore) -> None:
    first = BroadcastGroup(rank=0, world_size=2, secret="s", attempt=1)
    with pytest.raises(WeightSyncBroken):
        first.join(store, 0.2)
    first.close()
    sent: dict[str, torch.Tensor] = model()
    got: dict[str, torch.Tensor] = {}

    def attempt_two(rank: int, act: Callable[[BroadcastGroup], Any]) -> Callable[[], Any]:
        def call() -> Any:
            group = BroadcastGroup(rank=rank, world_size=2, secret="s", attempt=2)
            group.join(store if rank == 0 else store.address, 20)
            try:
                return act(group)
            finally:
                group.close()

        return call

    results = at_once(attempt_two(0, sending(sent)), attempt_two(1, receiving(sent, keeper(got))))
    assert [type(r) for r in results] == [SyncReport, SyncReport]
    assert same_bits(sent, got)


def test_an_address_that_cannot_be_bound_names_the_cure() -> None:
    with pytest.raises(WeightSyncError, match=r"weight_sync\.interface"):
        open_store("203.0.113.7", 5)


def test_a_killed_receiver_ends_the_sync_on_the_survivors_and_the_next_attempt_succeeds() -> None:
    store = open_store("127.0.0.1", 30)
    here = Path(peer.__file__)
    start = [sys.executable, str(here), store.address, "s"]
    doomed = subprocess.Popen([*start, "1:1:3:4"], stdout=subprocess.PIPE, text=True)
    survivor = subprocess.Popen([*start, "1:2:3:-1", "2:1:2:-1"], stdout=subprocess.PIPE, text=True)
    tensors = {s.name: torch.full(s.shape, float(i + 1)) for i, s in enumerate(peer.SPECS)}
    try:

        def attempt(number: int, world: int) -> SyncReport:
            group = BroadcastGroup(rank=0, world_size=world, secret="s", attempt=number)
            try:
                group.join(store, 30)
                return send_weights(
                    group,
                    peer.SPECS,
                    tensors.items(),
                    version=peer.VERSION,
                    bucket_bytes=peer.BUCKET,
                    bucket_timeout_s=30,
                )
            finally:
                group.close()

        with pytest.raises(WeightSyncBroken) as caught:
            attempt(1, 3)
        assert caught.value.missing == (1,)
        assert attempt(2, 2).buckets == len(peer.SPECS)
        lines = [json.loads(line) for line in survivor.communicate(timeout=HANGS_S)[0].splitlines()]
        assert [line["ok"] for line in lines] == [False, True]
        assert lines[0]["missing"] == [1]
        assert lines[1]["sums"] == {name: float(t.double().sum()) for name, t in tensors.items()}
        assert doomed.wait(HANGS_S) == -9
    finally:
        for process in (doomed, survivor):
            process.kill()
            process.communicate(timeout=HANGS_S)
        store.close()
