"""The torch trainer: one process and two; learning, checkpoints, offloading, correction, failures."""

from __future__ import annotations

import math
import multiprocessing
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_kit import V0, batch, random_samples, response, run_config, sample, started, weights_of, write_model

from hybridsched.config.schema import RunConfig
from hybridsched.errors import ConfigError, FaultError, InternalError, RunFolderError
from hybridsched.model import WeightVersion
from hybridsched.models import hf_folder
from hybridsched.trainers.base import TrainerGroup
from hybridsched.trainers.torch_trainer import TorchTrainer

PLAIN_GRPO = {"norm_adv_by_std_in_grpo": False}
HUGE = 1e300  # a finite reward whose advantage is infinite in float32


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_same_weights(first, second):
    a, b = weights_of(first), weights_of(second)
    assert list(a) == list(b)
    assert [] == [name for name in a if not np.array_equal(a[name], b[name])]


# -- learning and metrics --------------------------------------------------------------------------------------------


def test_rewarded_tokens_become_likelier(model, tmp_path):
    trainer = started(run_config(model), tmp_path)
    good, bad = np.array([4, 4, 4], np.int32), np.array([9, 9, 9], np.int32)
    prompt = np.array([1, 2, 3], np.int32)

    def likelihood():
        return [float(np.sum(x)) for x in trainer.logprobs([(prompt, good), (prompt, bad)], 1.0)]

    before = likelihood()
    for _ in range(4):
        logps = trainer.logprobs([(prompt, good), (prompt, bad)], 1.0)
        group = sample(0, [response([4, 4, 4], 1.0), response([9, 9, 9], 0.0)])
        for r, logp in zip(group.responses, logps, strict=True):
            r.logprobs[:] = logp
        trainer.train(batch((group,)))
    after = likelihood()
    assert after[0] > before[0] + 0.3
    assert after[1] < before[1] - 0.3


def test_metrics_of_a_collection_by_hand(model, tmp_path):
    trainer = started(run_config(model), tmp_path)
    first = sample(0, [response([4, 5], 1.0), response([6], 0.0), response([7, 7, 7], None)])
    second = sample(1, [response([4, 5, 6, 7], 3.0), response([6], 2.0)], prompt=(1,))
    result = trainer.train(batch((first, second)))
    m = result.metrics
    assert (1.5, 3.0, 0.0) == (m["critic/rewards/mean"], m["critic/rewards/max"], m["critic/rewards/min"])
    assert (2.0, 4.0) == (m["response_length/mean"], m["response_length/max"])
    assert 2.0 == m["prompt_length/mean"]
    a = 0.5 / (0.5**0.5 + 1e-6)
    assert (2 * a - a + 4 * a - a) / 8 == pytest.approx(m["critic/advantages/mean"], abs=1e-6)
    assert (1.0, 0.01) == (m["optimizer_steps"], m["actor/lr"])
    assert 16 == result.n_tokens  # 2 x 3 + 2 x 1 of prompts, 8 of responses; the failed response counts nowhere
    assert {"adv", "old_log_prob", "ref", "update_actor"} == set(result.timing_s)
    for name in ("actor/pg_loss", "actor/entropy", "actor/grad_norm", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"):
        assert math.isfinite(m[name])


def test_gap_metrics_are_those_of_the_weights_before_the_step(model, tmp_path):
    trainer = started(run_config(model), tmp_path)
    group = sample(0, [response([4, 5], 1.0, logprob=-2.0), response([6], 0.0, logprob=-3.0)])
    logps = trainer.logprobs([(group.prompt_tokens, r.token_ids) for r in group.responses], 1.0)
    expected = float(np.mean(np.concatenate([r.logprobs - p for r, p in zip(group.responses, logps, strict=True)])))
    result = trainer.train(batch((group,)))
    assert expected == pytest.approx(result.metrics["rollout_corr/kl"], abs=1e-5)
    assert expected == pytest.approx(result.metrics["actor/ppo_kl"], abs=1e-5)
    assert {0: pytest.approx(expected, abs=1e-5)} == result.lag_kl


def test_kl_is_reported_by_version_lag(model, tmp_path):
    trainer = started(run_config(model), tmp_path)
    trainer.begin_cycle(WeightVersion(0, 3))
    old = random_samples(1, version=WeightVersion(0, 1))
    new = tuple(s for s in random_samples(2, version=WeightVersion(0, 3)) if s.sample_uid == 1)
    result = trainer.train(batch(old + new, version=WeightVersion(0, 3)))
    assert [0, 2] == sorted(result.lag_kl)
    assert 2.0 == result.metrics["rollout_corr/version_lag/max"]


def test_each_mini_batch_and_epoch_is_one_step(model, tmp_path):
    trainer = started(run_config(model, {"ppo_epochs": 2}), tmp_path)
    samples = random_samples(4)
    result = trainer.train(batch(samples[:2], samples[2:]))
    assert 4.0 == result.metrics["optimizer_steps"]


def test_progress_grows_with_micro_batches(model, tmp_path):
    few = started(run_config(model), tmp_path)
    many = started(run_config(model, {"ppo_max_token_len_per_gpu": 16}), tmp_path)
    before = few.progress, many.progress
    few.train(batch(random_samples(4)))
    many.train(batch(random_samples(4)))
    assert few.progress > before[0]
    assert many.progress - before[1] >= few.progress - before[0] + 3


def test_micro_batch_size_does_not_change_the_result(model, tmp_path):
    few = started(run_config(model), tmp_path)
    many = started(run_config(model, {"ppo_max_token_len_per_gpu": 16}), tmp_path)
    for trainer in (few, many):
        trainer.train(batch(random_samples(4)))
    for a, b in zip(weights_of(few).values(), weights_of(many).values(), strict=True):
        assert np.allclose(a, b, rtol=0, atol=2e-5)


def test_logprobs_equal_a_full_forward_pass_at_temperature(model, tmp_path):
    trainer = started(run_config(model), tmp_path)
    prompt, answer = np.array([1, 2], np.int32), np.array([3, 4, 5], np.int32)
    with torch.no_grad():
        logits = hf_folder.load_hf(model)(torch.tensor([[1, 2, 3, 4, 5]]))[0] / 0.7
    expected = torch.log_softmax(logits, -1)[[1, 2, 3], [3, 4, 5]].tolist()
    other, ours, empty = trainer.logprobs([(answer, prompt), (prompt, answer), (prompt, answer[:0])], 0.7)
    assert expected == pytest.approx(ours.tolist(), abs=1e-5)
    assert (np.float32, (2,), (0,)) == (ours.dtype, other.shape, empty.shape)


def test_norms_do_not_decay(model, tmp_path):
    config = run_config(model, {"optim": {"lr": 0.1, "weight_decay": 0.5}})
    trainer = started(config, tmp_path)
    before = weights_of(trainer)
    trainer.train(batch((sample(0, [response([4, 5], 1.0), response([4, 5], 1.0)]),)))  # no advantage, no gradient
    after = weights_of(trainer)
    for name, value in before.items():
        factor = 1.0 if name.endswith("norm.weight") else 0.95
        assert np.allclose(after[name], factor * value, atol=1e-6), name


# -- off-policy correction and reference ----------------------------------------------------------------------------


def decoupled(model, **kwargs):
    correction = {"bypass_mode": False, **kwargs}
    return run_config(model, {"optim": {"lr": 1e-2}}, algorithm={"rollout_correction": correction})


def test_decoupled_ratio_is_one_at_the_start_of_the_cycle(model, tmp_path):
    trainer = started(decoupled(model, rollout_is="token"), tmp_path)
    result = trainer.train(batch(random_samples(2)))
    assert 0.0 == pytest.approx(result.metrics["actor/ppo_kl"], abs=1e-6)
    assert 0.0 == result.metrics["actor/pg_clipfrac"]
    assert abs(result.metrics["rollout_corr/kl"]) > 0.01


def test_decoupled_keeps_the_proximal_weights_through_the_cycle(model, tmp_path):
    trainer = started(decoupled(model, rollout_is="token"), tmp_path)
    first = trainer.train(batch(random_samples(2)))
    second = trainer.train(batch(random_samples(2)))
    assert first.metrics["rollout_corr/kl"] == second.metrics["rollout_corr/kl"]  # same samples, same proximal weights
    assert abs(second.metrics["actor/ppo_kl"]) > 1e-4  # the trained weights have moved away from them
    trainer.begin_cycle(WeightVersion(0, 1))
    third = trainer.train(batch(random_samples(2)))
    assert third.metrics["rollout_corr/kl"] != first.metrics["rollout_corr/kl"]
    assert 0.0 == pytest.approx(third.metrics["actor/ppo_kl"], abs=1e-6)


def test_looking_at_the_proximal_weights_leaves_the_trained_ones_alone(model, tmp_path):
    trainer = started(decoupled(model), tmp_path)
    trainer.train(batch(random_samples(2)))
    before = weights_of(trainer)
    trainer.train(batch((sample(0, [response([4], None), response([5], 1.0)]),)))  # zero advantage
    trained = started(run_config(model), tmp_path)
    assert set(before) == set(weights_of(trained))
    snapshot = trainer._snapshot
    assert snapshot is not None
    inside = weights_of(trainer)
    with snapshot.in_place():
        assert_same_weights(trainer, trained)  # the cycle began with the file's weights
    assert [] == [n for n, value in weights_of(trainer).items() if not np.array_equal(value, inside[n])]


def test_when_everything_is_rejected_no_step_is_taken(model, tmp_path):
    config = run_config(
        model,
        algorithm={"rollout_correction": {"rollout_rs": "token", "rollout_rs_threshold": 1.0001}},
    )
    trainer = started(config, tmp_path)
    before = weights_of(trainer)
    result = trainer.train(batch((sample(0, [response([4], 1.0, logprob=-9.0), response([5], 0.0, logprob=-9.0)]),)))
    assert (1.0, 0.0) == (result.metrics["rollout_corr/rejected_fraction"], result.metrics["optimizer_steps"])
    assert [] == [n for n, value in weights_of(trainer).items() if not np.array_equal(value, before[n])]


def test_a_rejected_response_does_not_count_in_the_normaliser(model, tmp_path):
    config = run_config(
        model,
        {"loss_agg_mode": "seq-mean-token-sum"},
        algorithm={"rollout_correction": {"rollout_rs": "sequence", "rollout_rs_threshold": 1.5}},
    )
    trainer = started(config, tmp_path)
    group = sample(0, [response([4, 4], 1.0), response([9, 9], 0.0)])
    logps = trainer.logprobs([(group.prompt_tokens, r.token_ids) for r in group.responses], 1.0)
    group.responses[0].logprobs[:] = logps[0]
    group.responses[1].logprobs[:] = logps[1] + 1.0  # weight exp(-2): rejected
    result = trainer.train(batch((group,)))
    advantage = 0.5 / (0.5**0.5 + 1e-6)
    assert -2 * advantage == pytest.approx(result.metrics["actor/pg_loss"], abs=1e-5)  # divided by one response
    assert 0.5 == result.metrics["rollout_corr/rejected_fraction"]


def test_reference_model_is_frozen_at_the_start(model, tmp_path):
    trainer = started(run_config(model, {"use_kl_loss": True, "kl_loss_coef": 0.01}), tmp_path)
    first = trainer.train(batch(random_samples(2)))
    second = trainer.train(batch(random_samples(2)))
    assert 0.0 == pytest.approx(first.metrics["actor/kl_loss"], abs=1e-6)
    assert second.metrics["actor/kl_loss"] > 1e-5
    assert second.timing_s["ref"] > 0


# -- memory ------------------------------------------------------------------------------------------------------------


def storage_bytes(trainer):
    tensors = [*trainer._model.parameters(), *trainer._optimizer.state_tensors()]
    return sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.parametrize("keep_first", [True, False])
def test_offload_frees_and_onload_brings_back_bit_for_bit(model, tmp_path, keep_first):
    plain, lent = started(decoupled(model), tmp_path), started(decoupled(model), tmp_path)
    for trainer in (plain, lent):
        trainer.train(batch(random_samples(2)))
    held = storage_bytes(lent)
    freed = 0
    if keep_first:
        freed += lent.offload(keep_parameters=True)
        assert_same_weights(plain, lent)  # the hand-over reads them
        assert 0 < storage_bytes(lent) < held
    freed += lent.offload(keep_parameters=False)
    assert 0 == storage_bytes(lent)
    assert 0 == lent.offload(keep_parameters=False)
    snapshot = sum(t.nbytes for t in plain._snapshot.tensors)
    assert held + snapshot == freed
    assert [] == list(tmp_path.iterdir())  # the file has no name
    lent.onload()
    lent.onload()
    assert held == storage_bytes(lent)
    for trainer in (plain, lent):
        trainer.train(batch(random_samples(2, seed=1)))
    assert_same_weights(plain, lent)


def test_parameters_looked_at_through_numpy_can_be_offloaded(model, tmp_path):
    trainer = started(run_config(model), tmp_path)
    views = [tensor.numpy() for _, tensor in trainer.iter_weights()]
    before = [view.copy() for view in views]
    del views
    trainer.offload(keep_parameters=False)
    assert 0 == storage_bytes(trainer)
    trainer.onload()
    assert [] == [i for i, (_, t) in enumerate(trainer.iter_weights()) if not np.array_equal(t.numpy(), before[i])]
    trainer.train(batch(random_samples(2)))
    assert any(not np.array_equal(t.numpy(), before[i]) for i, (_, t) in enumerate(trainer.iter_weights()))


def test_nothing_but_onload_while_offloaded(model, tmp_path):
    trainer = started(run_config(model), tmp_path)
    trainer.offload(keep_parameters=False)
    for use in (
        lambda: trainer.train(batch(random_samples(1))),
        lambda: trainer.begin_cycle(V0),
        trainer.iter_weights,
        lambda: trainer.save_checkpoint(tmp_path),
    ):
        with pytest.raises(InternalError, match="onload it first"):
            use()


def test_offload_into_a_full_or_forbidden_folder_frees_nothing(model, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    trainer = started(run_config(model), blocked)
    held = storage_bytes(trainer)
    with pytest.raises(FaultError, match="nothing was freed"):
        trainer.offload(keep_parameters=False)
    assert held == storage_bytes(trainer)
    trainer.train(batch(random_samples(1)))


RSS = """
import sys
from pathlib import Path
import psutil, torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[2])
from dataclasses import replace
from trainer_kit import TINY, batch, random_samples, run_config, started, write_model
folder = Path(sys.argv[1])
big = replace(TINY, hidden_size=64, vocab_size=240_000)
trainer = started(run_config(write_model(folder / "m", big)), folder / "scratch")
trainer.train(batch(random_samples(1)))
rss = lambda: psutil.Process().memory_info().rss
before = rss()
freed = trainer.offload(keep_parameters=False)
during = rss()
trainer.onload()
print(freed, before - during, rss() - during)
"""


def test_offload_gives_the_memory_back_to_the_system(tmp_path):
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", RSS, str(tmp_path), here], capture_output=True, text=True, timeout=100, check=True
    )
    freed, dropped, returned = map(int, done.stdout.split())
    assert freed >= 3 * 60_000_000  # parameters and two moments of a 61 MB model
    assert dropped >= 0.9 * freed
    assert returned >= 0.9 * freed


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_checkpoint_goes_on_bit_for_bit(model, tmp_path, dtype):
    optim = {"lr": 1e-2, "lr_warmup_steps": 3, "lr_scheduler_type": "cosine", "total_training_steps": 10}
    config = run_config(
        model,
        {"dtype": dtype, "optim": optim},
        algorithm={"rollout_correction": {"bypass_mode": False, "rollout_is": "token"}},
    )
    rounds = [batch(random_samples(2, seed=seed)) for seed in range(4)]
    straight = started(config, tmp_path)
    for one in rounds[:2]:
        straight.train(one)
    straight.begin_cycle(WeightVersion(0, 1))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    straight.save_checkpoint(folder)
    noise = torch.rand(3).tolist()

    resumed = started(config, tmp_path)
    resumed.train(batch(random_samples(2, seed=9)))
    resumed.load_checkpoint(folder)
    assert noise == torch.rand(3).tolist()
    results = [[t.train(one).metrics for one in rounds[2:]] for t in (straight, resumed)]
    assert results[0] == results[1]
    weights = [{n: w.float().numpy() for n, w in t.iter_weights()} for t in (straight, resumed)]
    assert [] == [n for n in weights[0] if not np.array_equal(weights[0][n], weights[1][n])]


def test_a_checkpoint_is_a_model_folder_others_can_read(model, tmp_path):
    trainer = started(run_config(model), tmp_path)
    trainer.train(batch(random_samples(1)))
    trainer.save_checkpoint(tmp_path)
    loaded = dict(hf_folder.named_weights(hf_folder.load_hf(tmp_path / "model")))
    assert [] == [n for n, t in trainer.iter_weights() if not torch.equal(t, loaded[n])]
    assert {"model", "trainer_state.pt", "rng_rank0.pt"} == {path.name for path in tmp_path.iterdir()}


def test_a_torn_checkpoint_is_refused_by_name(model, tmp_path):
    trainer = started(run_config(model), tmp_path)
    trainer.save_checkpoint(tmp_path)
    state = tmp_path / "trainer_state.pt"
    state.write_bytes(state.read_bytes()[:200])
    with pytest.raises(RunFolderError, match=r"trainer_state\.pt cannot be read"):
        trainer.load_checkpoint(tmp_path)


def test_a_missing_checkpoint_folder_is_a_fault_when_saving(model, tmp_path):
    trainer = started(run_config(model), tmp_path)
    target = tmp_path / "file"
    target.write_text("")
    with pytest.raises(FaultError, match="cannot be written"):
        trainer.save_checkpoint(target)


def test_a_checkpoint_of_fewer_ranks_is_told(model, tmp_path):
    lines: list[str] = []
    trainer = TorchTrainer(run_config(model), scratch=tmp_path, log=lines.append)
    trainer.start(TrainerGroup(0, 1, "", 20.0))
    trainer.save_checkpoint(tmp_path)
    (tmp_path / "rng_rank0.pt").unlink()
    trainer.load_checkpoint(tmp_path)
    assert 1 == len(lines)
    assert "rng_rank0.pt does not exist" in lines[0]


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_sample_without_valid_response_is_named(model, tmp_path):
    trainer = started(run_config(model), tmp_path)
    with pytest.raises(FaultError, match=r"sample 5 \(prompt p5\) has no response with a reward.*function raised"):
        trainer.train(batch((sample(5, [response([4], None)]),)))


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
def test_the_sample_behind_a_non_finite_loss_is_named_and_nothing_changes(model, tmp_path):
    trainer = started(run_config(model, algorithm=PLAIN_GRPO), tmp_path)
    before = weights_of(trainer)
    bad = sample(77, [response([4, 5], HUGE), response([6], 0.0)])
    with pytest.raises(FaultError, match=r"optimizer step 1 was not taken: loss .*from sample\(s\) 77$"):
        trainer.train(batch((*random_samples(3), bad)))
    assert [] == [n for n, value in weights_of(trainer).items() if not np.array_equal(value, before[n])]
    assert 1.0 == trainer.train(batch(random_samples(3))).metrics["optimizer_steps"]


def test_without_a_model_folder_there_is_no_trainer(model, tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path is null"):
        TorchTrainer(RunConfig(), scratch=tmp_path)


# -- two processes -----------------------------------------------------------------------------------------------------


def rank_main(rank, addresses, results, model, scratch, correction):
    """One of two trainer ranks: trains twice (idle in one mini-batch), then meets a bad sample on rank 1."""
    torch.set_num_threads(1)
    config = run_config(model, {"ppo_max_token_len_per_gpu": 24}, algorithm=correction)
    trainer = TorchTrainer(config, scratch=scratch, log=lambda text: None)
    if rank == 0:
        address = trainer.open_rendezvous()
        addresses.put(address)
    else:
        address = addresses.get(timeout=60)
    trainer.start(TrainerGroup(rank, 2, address, 30.0))
    trainer.begin_cycle(V0)
    samples = random_samples(5)
    shares = ((samples[:2], ()), (samples[2:3], samples[3:]))
    result = trainer.train(batch(*shares[rank]))
    checkpoint = scratch / "checkpoint"
    trainer.save_checkpoint(checkpoint)
    trainer.load_checkpoint(checkpoint)
    weights = weights_of(trainer)
    errors = []
    for bad in (sample(40, [response([4], None)]), sample(41, [response([4], HUGE), response([5], 0.0)])):
        try:
            trainer.train(batch((bad,) if rank else ()))
        except FaultError as error:
            errors.append(str(error))
    if rank == 0:  # the other rank is leaving: no hang, but a fault
        try:
            trainer.train(batch(samples))
        except FaultError as error:
            errors.append(str(error))
    trainer.shutdown()
    trainer.shutdown()
    results.put((rank, weights, result.metrics, result.lag_kl, result.n_tokens, errors))


@pytest.mark.parametrize(
    "algorithm",
    [
        PLAIN_GRPO,
        {
            "adv_estimator": "reinforce_plus_plus",
            "gamma": 0.9,
            "rollout_correction": {"bypass_mode": False, "rollout_is": "token", "rollout_rs": "token"},
        },
    ],
    ids=["grpo-bypass", "reinforce-decoupled"],
)
def test_two_ranks_equal_one(model, tmp_path, algorithm):
    (tmp_path / "checkpoint").mkdir()
    context = multiprocessing.get_context("spawn")
    addresses, results = context.Queue(), context.Queue()
    processes = [
        context.Process(target=rank_main, args=(rank, addresses, results, model, tmp_path, algorithm), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    by_rank = {rank: rest for rank, *rest in (results.get(timeout=90) for _ in processes)}
    for process in processes:
        process.join(timeout=30)
    assert [0, 0] == [process.exitcode for process in processes]

    alone = started(run_config(model, algorithm=algorithm), tmp_path)
    samples = random_samples(5)
    expected = alone.train(batch(samples[:3], samples[3:]))
    for rank in range(2):
        weights, metrics, lag_kl, n_tokens, errors = by_rank[rank]
        for name, value in weights_of(alone).items():
            assert np.array_equal(weights[name], by_rank[0][0][name]), name
            assert np.allclose(value, weights[name], rtol=0, atol=2e-5), name
        assert expected.metrics == pytest.approx(metrics, abs=1e-4)
        assert (expected.n_tokens, sorted(expected.lag_kl)) == (n_tokens, sorted(lag_kl))
        assert "trainer rank 1: sample 40 (prompt p40) has no response with a reward" in errors[0]
        if algorithm is PLAIN_GRPO:  # whitening takes the size out of a huge reward
            assert "trainer rank 1: optimizer step 3 was not taken" in errors[1]
            assert "from sample(s) 41" in errors[1]
    assert "trainer rank 0 of 2: reducing metrics failed" in by_rank[0][4][-1]
    assert {"model", "trainer_state.pt", "rng_rank0.pt", "rng_rank1.pt"} == {
        path.name for path in (tmp_path / "checkpoint").iterdir()
    }


def test_a_rank_that_never_comes_is_a_fault_not_a_hang(model, tmp_path):
    trainer = TorchTrainer(run_config(model), scratch=tmp_path, log=lambda text: None)
    address = trainer.open_rendezvous()
    with pytest.raises(FaultError, match=r"trainer rank 0 of 2: joining at .* failed or took longer than 1 s"):
        trainer.start(TrainerGroup(0, 2, address, 1.0))
    trainer.shutdown()
