"""Validation right after a sync, on exactly that version, beside training.

Owns: one running validation. Its leases are outside window, queue, counts and wait signals. It ends before the next
sync (finish), so every response is of one version. Results: mean@n and best@n per data source.
"""

from __future__ import annotations

from collections import defaultdict

from hybridsched.model import SamplingParams
from hybridsched.runtime.cycle_record import CycleRecord
from hybridsched.runtime.flights import ValidationRun
from hybridsched.runtime.parts import Parts


class Validation:
    """Held-out prompts under one weight version."""

    def __init__(self, parts: Parts) -> None:
        self._p = parts
        self._run: ValidationRun | None = None
        self._number = 0
        self._began = 0.0

    @property
    def running(self) -> bool:
        """True between start and finish."""
        return self._run is not None

    def start(self) -> None:
        """Give out the held-out prompts under the current version."""
        p, config = self._p, self._p.services.config
        kwargs = config.actor_rollout_ref.rollout.val_kwargs
        params = SamplingParams(
            n=kwargs.n,
            max_new_tokens=config.data.max_response_length,
            temperature=kwargs.temperature,
            top_p=kwargs.top_p,
            top_k=kwargs.top_k,
            stop_token_ids=p.services.stop_token_ids,
            seed=config.trainer.seed + 1,
        )
        self._number = p.version.number
        self._began = p.clock.now()
        self._run = p.rollouter.start_validation(p.services.validation_prompts, params)
        p.log.event("validation", str(p.version), new="begun", reason=f"{len(self._run.prompts)} prompts")
        p.rollouter.pump()

    async def finish(self, cycle: CycleRecord) -> None:
        """Wait for the rest, at most deadlines.validate_s; what is missing then is reported and left out."""
        run, p = self._run, self._p
        if run is None:
            return
        began = p.clock.now()
        deadlines = p.services.config.deadlines
        bound = deadlines.validate_s * deadlines.scale
        while not run.done:
            p.fleet.check()
            p.rollouter.pump()
            left = began + bound - p.clock.now()
            if left <= 0 or not await p.changed.wait(left):
                missing = len(run.prompts) - len(run.results)
                p.log.event(
                    "fault", "validation", new="incomplete", reason=f"{missing} prompts missing after {bound:g} s"
                )
                break
        cycle.validate_s += p.clock.now() - began
        p.rollouter.cancel_validation()
        self._run = None
        self._report(run)

    def _report(self, run: ValidationRun) -> None:
        p = self._p
        groups: dict[str, list[list[float]]] = defaultdict(list)
        failed = 0
        lengths: list[int] = []
        for index, done in sorted(run.results.items()):
            rewards = [r for r in done.rewards if r is not None]
            failed += len(done.rewards) - len(rewards)
            lengths += done.n_tokens
            if rewards:
                groups[run.prompts[index].data_source or "all"].append(rewards)
        n = run.params.n
        values: dict[str, float] = {
            "val/failed_responses": float(failed),
            "val/prompts": float(len(run.results)),
            "val/seconds": p.clock.now() - self._began,
        }
        if lengths:
            values["val/response_length/mean"] = sum(lengths) / len(lengths)
        every = [rewards for rows in groups.values() for rewards in rows]
        for source, rows in [("", every), *sorted(groups.items())]:
            if rows and (source == "" or len(groups) > 1):
                where = f"val/{source}/" if source else "val/"
                values[f"{where}reward/mean@{n}"] = sum(sum(r) / len(r) for r in rows) / len(rows)
                if n > 1:
                    values[f"{where}reward/best@{n}"] = sum(max(r) for r in rows) / len(rows)
        p.log.metrics(self._number, values)
        mean = values.get(f"val/reward/mean@{n}", float("nan"))
        p.log.event("validation", str(self._number), new="done", reason=f"reward mean@{n} {mean:.4f}", values=values)
