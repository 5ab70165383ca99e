#!/usr/bin/env python3
"""`make slurm-demo`: boots a cluster of four nodes here, runs the demo on it as a heterogeneous job, takes it down.

The same model, data and run.yaml as `hybridsched demo`, submitted as users submit it: `hybridsched submit --watch`.

Exit code: of the run, and 4 when the reward has not risen as it must in a whole demo (20 cycles).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CLUSTER = [sys.executable, "-B", str(HERE / "cluster.py")]
NODES = "trn[0-1],gpu[0-1]"
WHOLE = 20  #: cycles of the demo; with fewer the reward need not rise


def main() -> int:
    """Boot, run, take down."""
    parser = argparse.ArgumentParser(prog="slurm-demo", description="The demo as a job on a cluster of this machine.")
    parser.add_argument("--folder", type=Path, default=Path("runs/slurm-demo"), help="model, data, run, cluster")
    parser.add_argument("--cycles", type=int, default=WHOLE, help="sync cycles of 64 samples")
    parser.add_argument("--plain", action="store_true", help="all nodes on this host, without namespaces")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    folder = options.folder.absolute()
    cluster = folder / "cluster"
    if (cluster / "cluster.json").exists():  # of a demo that was killed
        subprocess.run([*CLUSTER, "down", str(cluster)], check=False)
    shutil.rmtree(cluster, ignore_errors=True)
    shared = ["--share", str(folder), "--share", str(Path.cwd()), "--share", sys.prefix]
    plain = ["--plain"] * options.plain
    up = [*CLUSTER, "up", str(cluster), "--nodes", NODES, "--owner", str(os.getpid()), *shared, *plain]
    if (code := subprocess.run(up, check=False).returncode) != 0:
        return code
    try:
        return _run(folder, cluster, options)
    finally:
        subprocess.run([*CLUSTER, "down", str(cluster)], check=False)
        print("the cluster is down")


def _run(folder: Path, cluster: Path, options: argparse.Namespace) -> int:
    """What `hybridsched demo` does, with a submission in place of a local start."""
    os.environ["PATH"] = f"{cluster / 'bin'}:{os.environ['PATH']}"
    from hybridsched.cli.demo import MIN_RISE
    from hybridsched.cli.templates import template_text
    from hybridsched.cli.watch import watch_run
    from hybridsched.config import load_config
    from hybridsched.demo import inputs
    from hybridsched.errors import HybridschedError
    from hybridsched.report import summarize
    from hybridsched.slurm.submission import submit_run

    try:
        paths = inputs.make_inputs(folder, 0)
        run_yaml = inputs.write_run_yaml(folder, template_text("demo.yaml"), paths, folder / "run")
        changes = inputs.overrides(cycles=options.cycles, seed=0, static=False, engine="torch", trainer="torch")
        placed = ["launcher=slurm", "slurm.trainer.partition=trn", "slurm.rollout.partition=gpu", "trainer.device=cpu"]
        run = submit_run(load_config(run_yaml, [*changes, *placed, *options.overrides]), force=True)
        print(f"job {run.job_id}; its log: {run.log}", flush=True)
        code = watch_run(run)
        if code == 0 and options.cycles >= WHOLE:
            inputs.require_rise(summarize(run.folder), MIN_RISE)
    except HybridschedError as error:
        print(f"slurm-demo: {error}", file=sys.stderr)
        return error.exit_code
    return code


if __name__ == "__main__":
    sys.exit(main())
