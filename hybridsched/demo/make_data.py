"""Writes the demo's data set: train and val, as JSONL and as parquet, in the layout users of the peer have.

    python -m hybridsched.demo.make_data OUT [--train N] [--val N] [--seed S]

Invariants: no start number is in both splits; equal arguments give equal rows in equal order. Files are written under
a temporary name and renamed, so an interrupted call leaves no half file.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from hybridsched.data.stream import stable_permutation
from hybridsched.demo import task
from hybridsched.errors import DataError, UserError

SPLITS = ("train", "val")


def make_data(out: str | Path, n_train: int = 2048, n_val: int = 128, seed: int = 0) -> dict[str, Path]:
    """Write ``{train,val}.{jsonl,parquet}`` into `out` (made if missing); returns their paths by file name.

    Raises DataError when the splits together need more start numbers than there are, or `out` cannot be written.
    """
    available = task.MAX_START + 1
    if n_train < 1 or n_val < 1 or n_train + n_val > available:
        raise DataError(
            f"{n_train} + {n_val} prompts cannot be made: each split needs at least one, and there are {available} "
            "different start numbers for both."
        )
    starts = stable_permutation(available, seed).tolist()
    chosen = {"train": starts[:n_train], "val": starts[n_train : n_train + n_val]}
    folder = Path(out)
    paths: dict[str, Path] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for split in SPLITS:
            rows = [task.row(start, split, index) for index, start in enumerate(chosen[split])]
            paths[f"{split}.jsonl"] = _write_jsonl(folder / f"{split}.jsonl", rows)
            paths[f"{split}.parquet"] = _write_parquet(folder / f"{split}.parquet", rows)
    except OSError as error:
        raise DataError(f"the demo's data cannot be written to {folder}: {error.strerror or error}.") from error
    return paths


def _write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(part, path)
    return path


def _write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    # Imported here: pyarrow takes long to load.
    import pyarrow as pa
    import pyarrow.parquet as pq

    part = path.with_suffix(".part")
    pq.write_table(pa.Table.from_pylist(rows), part)
    os.replace(part, path)
    return path


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hybridsched.demo.make_data", description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="folder to write into")
    parser.add_argument("--train", type=int, default=2048, help="training prompts (default: %(default)s)")
    parser.add_argument("--val", type=int, default=128, help="held-out prompts (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="which start numbers, in which order (default: %(default)s)"
    )
    given = parser.parse_args(arguments)
    try:
        paths = make_data(given.out, given.train, given.val, given.seed)
    except UserError as error:
        parser.exit(error.exit_code, f"{error}\n")
    for path in paths.values():
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
