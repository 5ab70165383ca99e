"""Sections of run.yaml about machines and faults (slurm, local, queue, weight_sync, ...) and the emulated engine.

The docstring under a key is its documentation. Import these names from `hybridsched.config.schema`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hybridsched.config.schema_base import Section


class ComponentConfig(Section):
    """Slurm request of one heterogeneous component."""

    partition: str | None = None
    """Partition."""
    account: str | None = None
    """Account."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Node features."""
    reservation: str | None = None
    """Reservation."""
    cpus_per_task: int | None = Field(None, ge=1)
    """Cores of a node agent and its workers; null: what the site gives (device: cpu: one a GPU, one for the agent)."""
    mem: str | None = None
    """Memory per node, e.g. 480G."""
    exclusive: bool = False
    """Whole nodes."""
    gres: str | None = None
    """Own spelling of the GPU request, {n} for the number, e.g. "gpu:h100:{n}"; null: the site profile's."""
    time: str | None = None
    """Own time limit; null: slurm.time."""
    extra: dict[str, str] = Field(default_factory=dict)
    """Further sbatch options by long name, e.g. {switches: "1"}."""


class SlurmConfig(Section):
    """Submission: hybridsched render, submit, watch, cancel."""

    site: str | None = None
    """Site profile: name in slurm/sites, or path; null: what HYBRIDSCHED_SITE names, else generic."""
    time: str = "24:00:00"
    """Time limit."""
    job_name: str | None = None
    """Null: the experiment's name."""
    trainer: ComponentConfig = Field(default_factory=ComponentConfig)
    """Request of the trainer nodes."""
    rollout: ComponentConfig = Field(default_factory=ComponentConfig)
    """Request of the rollout nodes."""
    signal_before_end_s: int = Field(300, ge=1)
    """So long before the time limit the run checkpoints and asks to be started again."""


class LocalConfig(Section):
    """launcher: local (one machine, mpiexec)."""

    cores: list[int] | None = None
    """Cores to use; null: all this process may use."""
    allow_oversubscribe: bool = False
    """Share cores when fewer are there than GPUs asked for."""
    threads_per_worker: int = Field(1, ge=1)
    """Compute threads of a worker."""


class QueueConfig(Section):
    """The sample queue on the shared filesystem."""

    seal_bytes: int = Field(16 << 20, ge=1)
    """Seal a segment at this many payload bytes."""
    seal_samples: int = Field(64, ge=1)
    """... or at this many samples."""
    seal_age_s: float = Field(5.0, gt=0)
    """... or when its first sample is this old."""
    durability: Literal["host-crash", "process-crash"] = "host-crash"
    """host-crash: fsync file and folder."""
    min_free_bytes: int = Field(64 << 20, ge=0)
    """Admission stops below this much free space."""
    retry_s: float = Field(2.0, gt=0)
    """Pause between attempts while the disk is full."""
    scan_s: float = Field(5.0, gt=0)
    """Fallback discovery by directory listing."""


class WeightSyncConfig(Section):
    """Trainer to replicas."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: nccl on CUDA, gloo otherwise."""
    bucket_bytes: int = Field(16 << 20, ge=1024)
    """Size of a transfer bucket."""
    attempts: int = Field(3, ge=1)
    """Attempts of one sync before the run ends."""
    interface: str | None = None
    """Network interface; null: chosen from the peer's address."""
    verify: Literal["off", "checksum", "probe"] = "checksum"
    """probe: also teacher-force a probe set in trainer and receivers after every sync."""
    probe_count: int = Field(4, ge=1)
    """Sequences of the probe set."""
    probe_tolerance: float = Field(1e-4, gt=0)
    """Largest accepted log-prob difference (fp32)."""


class DeadlinesConfig(Section):
    """Every bounded wait, in seconds; all are multiplied by `scale`."""

    scale: float = Field(1.0, gt=0)
    """Factor for slow machines."""
    start_s: float = Field(600.0, gt=0)
    """All workers up and weights loaded."""
    agent_silence_s: float = Field(30.0, gt=0)
    """A node agent (or the controller) unheard of for this long is lost."""
    decode_s: float = Field(120.0, gt=0)
    """A generating worker without a new token."""
    train_s: float = Field(1800.0, gt=0)
    """A training worker without a finished micro-batch."""
    call_s: float = Field(60.0, gt=0)
    """Small control calls (abort, resume, flush)."""
    switch_s: float = Field(120.0, gt=0)
    """One phase of activation or deactivation."""
    sync_s: float = Field(300.0, gt=0)
    """One attempt of a weight sync."""
    bucket_s: float = Field(60.0, gt=0)
    """One bucket of a weight sync."""
    drain_s: float = Field(60.0, gt=0)
    """Draining where aborting is not allowed."""
    lending_s: float = Field(3600.0, gt=0)
    """Hybrids active without a deactivation."""
    collect_s: float = Field(3600.0, gt=0)
    """Waiting for samples without one arriving."""
    checkpoint_s: float = Field(600.0, gt=0)
    """Writing or reading a checkpoint."""
    validate_s: float = Field(1800.0, gt=0)
    """One validation."""
    stop_s: float = Field(20.0, gt=0)
    """Orderly stop before processes are killed."""


class FaultsConfig(Section):
    """How much may go wrong before the run gives up."""

    worker_restarts: int = Field(5, ge=0)
    """Restarts of one worker per attempt."""
    trainer_restarts: int = Field(3, ge=0)
    """Restarts of the trainer group per attempt."""
    attempts: int = Field(3, ge=1)
    """Starts of the job step by the launch loop."""
    backoff_s: float = Field(1.0, ge=0)
    """First pause between attempts; doubles."""
    requeues: int = Field(20, ge=0)
    """launcher: slurm. Starts of the job after which a lost node is no reason to put it back into the queue."""


class RunlogConfig(Section):
    """The HDF5 log of the run."""

    flush_s: float = Field(10.0, gt=0)
    """How often the open file is rewritten."""
    rows_per_file: int = Field(4096, ge=16)
    """Rows before a file is sealed."""


class EmulatedConfig(Section):
    """Timing models of the emulated engine and trainer (tests, simulation)."""

    prompt_tokens: int = Field(64, ge=1)
    """Length of generated prompts."""
    response_mean_tokens: float = Field(512.0, gt=0)
    """Mean response length."""
    response_sigma: float = Field(0.8, ge=0)
    """Sigma of the log-normal response length; 0: constant."""
    response_growth_per_1000: float = Field(0.0, ge=0)
    """Growth of the mean length over the run: after 1000 samples it is (1 + this) x response_mean_tokens."""
    response_block_samples: int = Field(0, ge=0)
    """Alternating load: every other block of this many samples has its mean length x response_block_factor; 0: off."""
    response_block_factor: float = Field(1.0, gt=0)
    """See response_block_samples."""
    decode_base_s: float = Field(0.02, ge=0)
    """Time of one decode step with an empty batch."""
    decode_per_seq_s: float = Field(0.0001, ge=0)
    """More time per running sequence."""
    prefill_tokens_per_s: float = Field(20000.0, gt=0)
    """Prefill and re-prefill speed."""
    hybrid_speed: float = Field(1.0, gt=0)
    """Speed of a hybrid replica relative to a standalone one."""
    replica_speed: dict[str, float] = Field(default_factory=dict)
    """Factor on the speed of single replicas, e.g. {standalone.1: 0.5}."""
    worker_lost_at_s: dict[str, float] = Field(default_factory=dict)
    """Simulated runs only: this worker dies for good at this second, e.g. {standalone.1: 600} (a lost rollout node)."""
    wake_s: float = Field(1.0, ge=0)
    """Waking a hybrid."""
    sleep_s: float = Field(1.0, ge=0)
    """Putting a hybrid to sleep."""
    sync_s: float = Field(1.0, ge=0)
    """Weight broadcast."""
    handover_s: float = Field(0.5, ge=0)
    """Same-node hand-over."""
    train_tokens_per_s: float = Field(20000.0, gt=0)
    """Training speed of one GPU."""
    train_fixed_s: float = Field(0.5, ge=0)
    """Fixed time of one optimizer step."""
    train_efficiency: float = Field(1.0, gt=0, le=1)
    """Scaling efficiency over trainer GPUs."""
    reward_equal_fraction: float = Field(0.0, ge=0, le=1)
    """Share of samples whose rewards are all equal (for the group filter)."""
    reward_failed_fraction: float = Field(0.0, ge=0, le=1)
    """Share of responses whose reward fails."""
    dataset_size: int = Field(1_000_000, ge=0)
    """Prompts in one epoch when no files are given."""
