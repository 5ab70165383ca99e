"""Rank 0 for real: files, real clock, the controller beside the node agent, and how its end becomes an exit code.

The counterpart for virtual time is `simulation/world.py`: both hand the same `Services` to the same `Parts` and
`Controller`. The only module of `runtime/` that knows where things lie in a run folder, besides `prepare.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridsched.config.derived import derive
from hybridsched.config.schema import RunConfig
from hybridsched.data.stream import PromptSet, PromptStream, synthetic_prompts
from hybridsched.data.tokenizer import Tokenizer, stop_token_ids
from hybridsched.errors import AgentSilent, FaultError, HybridschedError, Interrupted, RunFolderError
from hybridsched.model import Prompt
from hybridsched.runlog.sinks import TeeRunLog, mirrors
from hybridsched.runlog.writer import HDF5RunLog
from hybridsched.runtime import messages as m
from hybridsched.runtime.adapters import slurm
from hybridsched.runtime.adapters.attempt import ATTEMPT_FILE, read_attempt
from hybridsched.runtime.adapters.chains import file_chains
from hybridsched.runtime.adapters.checkpoints import FileCheckpointStore
from hybridsched.runtime.clock import RealClock
from hybridsched.runtime.context import RunContext
from hybridsched.runtime.controller import Controller
from hybridsched.runtime.cycle_record import RunSummary
from hybridsched.runtime.endpoint import Endpoint
from hybridsched.runtime.garbage import collect_rarely
from hybridsched.runtime.node_agent import NodeAgent
from hybridsched.runtime.parts import Parts
from hybridsched.runtime.plan import CONTROLLER, RunPlan
from hybridsched.runtime.policy_loader import load_policy
from hybridsched.runtime.services import Services, StopFlag
from hybridsched.sample_queue.owner import OwnerFence, OwnerIdentity, identity_of_this_process
from hybridsched.sample_queue.store import FileSegmentStore

RunLogSink = HDF5RunLog | TeeRunLog

STATUS_PREFIX = "@status "
RESULT_FILE = "result.json"


async def run_rank0(
    agent: NodeAgent,
    config: RunConfig,
    plan: RunPlan,
    context: RunContext,
    stop: StopFlag,
    *,
    resume: bool,
) -> int:
    """Run agent and controller to the end; returns the exit code (errors.py). The result is left in result.json."""
    folder, attempt = Path(context.run_folder), Path(context.attempt_folder)
    job = slurm.this_job()  # attempts are numbered over requeues, too: a later start of a job has a higher number
    fence = OwnerFence.claim(folder, identity_of_this_process(job, context.attempt), slurm_says_gone=_slurm_says_gone)
    clock = RealClock()
    collect_rarely()
    try:
        log = _run_log(config, context, clock)
    except BaseException:
        fence.release()  # nothing has begun: the next start need not wait for this owner to be found dead
        raise
    parts = [f"attempt {context.attempt}", *["resumed"] * resume, *[f"job {job}"] * bool(job)]
    log.event("run", "run", new="started", reason=", ".join([*parts, *_notes(attempt)]))
    endpoint = Endpoint(CONTROLLER, agent.route)
    endpoint.on_error = lambda error, where: log.event(
        "fault", "controller", new=type(error).__name__, reason=f"{where}: {error}"
    )
    early: list[m.Envelope] = []  # agents and workers may be up before the data is read
    agent.attach_controller(early.append)
    serving = asyncio.ensure_future(agent.run())
    flushing = asyncio.ensure_future(_flush_forever(log, config.runlog.flush_s))
    error: BaseException | None = None
    summary: RunSummary | None = None
    try:
        services = await asyncio.to_thread(_services, config, plan, context, endpoint, clock, log, stop, fence.check)
        controller = Controller(Parts(services))
        for envelope in early:
            endpoint.deliver(envelope)
        agent.attach_controller(endpoint.deliver)
        resume_from = _newest_checkpoint(services) if resume else None
        endpoint.on_error = lambda problem, where: controller.fail(problem, where)
        summary = await _either(controller.run(resume_from), serving)
    except BaseException as problem:  # noqa: BLE001 - becomes the exit code below
        error = problem
        _log_end(log, problem)
    for rank in range(plan.world_size):
        endpoint.tell(f"agent.{rank}", m.Shutdown("run ended" if error is None else str(error)))
    await asyncio.wait([serving], timeout=config.deadlines.stop_s * config.deadlines.scale + 5.0)
    await endpoint.close()
    flushing.cancel()
    log.close()
    code = _exit_code(error)
    _write_result(attempt, summary, error, code)
    fence.release()
    return code


def _run_log(config: RunConfig, context: RunContext, clock: RealClock) -> RunLogSink:
    """The HDF5 run log, and the mirrors that trainer.logger names. Raises ConfigError for a package that is missing."""
    folder = Path(context.run_folder) / "log"
    truth = HDF5RunLog(
        folder,
        "controller",
        run_id=context.run_id,
        wall=clock.wall,
        now=clock.now,
        flush_s=config.runlog.flush_s,
        rows_per_file=config.runlog.rows_per_file,
        attrs={"attempt": context.attempt},
    )
    trainer = config.trainer
    try:
        others = mirrors(
            trainer.logger,
            folder,
            run_id=context.run_id,
            project=trainer.project_name,
            name=trainer.experiment_name,
        )
    except BaseException:
        truth.close()
        raise
    return TeeRunLog([truth, *others]) if others else truth


def _slurm_says_gone(owner: OwnerIdentity) -> bool:
    return slurm.job_is_gone(owner.job_id)


def _notes(attempt: Path) -> list[str]:
    """What the launcher has to say about this attempt."""
    note = read_attempt(attempt).note if (attempt / ATTEMPT_FILE).exists() else ""
    return [note] if note else []


async def _either(running: Any, serving: asyncio.Future[Any]) -> RunSummary:
    """The controller's result; an agent that ends first ends the run."""
    main: asyncio.Future[Any] = asyncio.ensure_future(running)
    try:
        await asyncio.wait([main, serving], return_when=asyncio.FIRST_COMPLETED)
        if main.done():
            summary: RunSummary = main.result()
            return summary
        failure = serving.exception() if not serving.cancelled() else None
        raise failure or FaultError("the node agent of rank 0 ended before the run")
    finally:
        if not main.done():
            main.cancel()
            await asyncio.gather(main, return_exceptions=True)


def _services(
    config: RunConfig,
    plan: RunPlan,
    context: RunContext,
    endpoint: Endpoint,
    clock: RealClock,
    log: RunLogSink,
    stop: StopFlag,
    check_owner: Callable[[], None],
) -> Services:
    """Everything that reads files, in a thread: the event loop keeps serving agents meanwhile."""
    folder = Path(context.run_folder)
    prompts, validation, stops = _prompts(config)
    derived = derive(config, prompts[1])
    counter = [0]

    def new_incarnation() -> str:
        counter[0] += 1
        return f"a{context.attempt:03d}.{time.time_ns()}.{counter[0]}"

    return Services(
        config=config,
        derived=derived,
        plan=plan,
        run_id=context.run_id,
        endpoint=endpoint,
        clock=clock,
        log=log,
        offload=asyncio.to_thread,
        store=FileSegmentStore(folder, context.run_id, config.queue.durability),
        chains=file_chains(folder, context.run_id, new_incarnation, config.queue.durability),
        checkpoints=FileCheckpointStore(folder),
        prompts=PromptStream(
            prompts[0],
            shuffle=config.data.shuffle,
            seed=config.data.seed,
            total_epochs=config.trainer.total_epochs,
            limit=derived.total_samples,
        ),
        validation_prompts=validation,
        stop_token_ids=stops,
        policy=load_policy(config.async_training, only_hybrid=derived.only_hybrid),
        stop=stop,
        check_owner=check_owner,
        on_status=print_status,
        beat_s=0.5,
    )


def _prompts(config: RunConfig) -> tuple[tuple[Sequence[Prompt], int | None], Sequence[Prompt], tuple[int, ...]]:
    """((training prompts, their number or None), validation prompts, stop tokens)."""
    if config.actor_rollout_ref.actor.strategy == "emulated":  # whatever data.train_files names
        emulated = config.emulated
        return (synthetic_prompts(emulated.dataset_size, emulated.prompt_tokens), None), (), ()
    model = config.actor_rollout_ref.model
    folder = model.tokenizer_path or model.path
    assert folder is not None  # checked before submission
    tokenizer = Tokenizer.from_folder(folder)
    train = PromptSet.build(config.data, tokenizer)
    held_out: Sequence[Prompt] = PromptSet.build(config.data, tokenizer, split="val") if config.data.val_files else ()
    return (train, len(train)), held_out, stop_token_ids(model.path or folder, tokenizer)


def _newest_checkpoint(services: Services) -> str | None:
    complete = services.checkpoints.complete()
    if not complete:
        services.log.event("run", "run", new="fresh start", reason="there is no checkpoint to resume from yet")
        return None
    config = services.config.trainer
    if config.resume_mode == "resume_path" and config.resume_from_path is not None:
        wanted = str(Path(config.resume_from_path).resolve()).rstrip("/")
        for ref in complete:
            if str(Path(ref.folder).resolve()) == wanted:
                return ref.folder
        known = ", ".join(Path(ref.folder).name for ref in complete)
        raise RunFolderError(
            f"trainer.resume_from_path: {wanted} is no complete checkpoint of this run; there are {known}"
        )
    return complete[-1].folder


async def _flush_forever(log: RunLogSink, period_s: float) -> None:
    while True:
        await asyncio.sleep(min(1.0, period_s))
        await asyncio.to_thread(log.maybe_flush)


def print_status(status: dict[str, Any]) -> None:
    """One line for the launcher, which shows it to people."""
    sys.stdout.write(STATUS_PREFIX + json.dumps(status) + "\n")
    sys.stdout.flush()


def _log_end(log: RunLogSink, problem: BaseException) -> None:
    kind = "stopped" if isinstance(problem, Interrupted) else "failed"
    log.event("run", "run", new=kind, reason=f"{type(problem).__name__}: {problem}")


def _exit_code(error: BaseException | None) -> int:
    if error is None:
        return 0
    if isinstance(error, HybridschedError):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt | asyncio.CancelledError) else 1


def _write_result(attempt: Path, summary: RunSummary | None, error: BaseException | None, code: int) -> None:
    """The marker the launch loop believes; an exit code alone proves nothing."""
    result: dict[str, Any] = {"exit_code": code, "ok": error is None}
    if summary is not None:
        result["summary"] = {**asdict(summary), "version": list(summary.version)}
    if error is not None:
        result["error"] = {"kind": type(error).__name__, "text": str(error)}
        if isinstance(error, AgentSilent):
            result["error"]["suspects"] = list(error.ranks)
        if not isinstance(error, HybridschedError):
            import traceback

            result["error"]["traceback"] = "".join(traceback.format_exception(error))
    tmp = attempt / (RESULT_FILE + ".tmp")
    tmp.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(tmp, attempt / RESULT_FILE)
