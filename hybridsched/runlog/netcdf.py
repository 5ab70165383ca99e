"""HDF5 files that xarray, ncdump, h5dump and pandas open: the NetCDF-4 layout of the run log, written and read.

Owns: how a table of equally long columns lies in a file (1-D variables over a dimension scale, CF attributes, NaN for
missing, strings as variable-length UTF-8), and that a name always stands for a complete file (tmp, fsync, rename).
Invariants: readable by HDF5 1.10 and later (libver v108..v110); no locks, so that any tool may look while a run writes.
Does not: know what the columns mean (writer.py, reader.py). h5py is imported on first use.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SECONDS_SINCE_EPOCH = "seconds since 1970-01-01T00:00:00Z"
CONVENTIONS = "CF-1.11"

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Variable:
    """One column: float64 or int64 numbers, or a list of strings; attributes such as long_name and units."""

    values: Array | Sequence[str]
    attrs: Mapping[str, str | int | float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Table:
    """Equally long columns over one dimension. ``dimension`` is itself a column (its coordinate)."""

    dimension: str
    columns: Mapping[str, Variable]
    coordinates: tuple[str, ...] = ()  #: columns that describe the others (CF: auxiliary coordinates)


def write_netcdf(path: Path, tables: Sequence[Table], attrs: Mapping[str, str | int | float]) -> None:
    """Write ``path`` whole or not at all. Raises OSError, or RuntimeError (how HDF5 reports a full disk)."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        image = _image(path.name, tables, attrs)
        with open(temporary, "wb") as written:
            written.write(image)
            written.flush()
            os.fsync(written.fileno())
        os.replace(temporary, path)
        fsync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _image(name: str, tables: Sequence[Table], attrs: Mapping[str, str | int | float]) -> bytes:
    """The file as bytes. HDF5 never meets the disk: on a full one it would take the process down (SIGSEGV)."""
    import h5py

    with h5py.File(
        name, "w", driver="core", backing_store=False, libver=("v108", "v110"), locking=False, track_order=True
    ) as file:
        for name, value in {"Conventions": CONVENTIONS, **attrs}.items():
            file.attrs[name] = storable(value) if isinstance(value, str) else value
        for number, table in enumerate(tables):
            scale = _dataset(file, table.dimension, table.columns[table.dimension])
            scale.make_scale(table.dimension)
            scale.attrs["_Netcdf4Dimid"] = np.int32(number)
            others = " ".join(table.coordinates)
            for name, variable in table.columns.items():
                if name == table.dimension:
                    continue
                dataset = _dataset(file, name, variable)
                dataset.dims[0].attach_scale(scale)
                if others and name not in table.coordinates:
                    dataset.attrs["coordinates"] = others
        file.flush()
        image: bytes = file.id.get_file_image()
    return image


def _dataset(file: Any, name: str, variable: Variable) -> Any:
    import h5py

    if isinstance(variable.values, np.ndarray):
        dataset = file.create_dataset(name, data=variable.values, track_order=True)
        if variable.values.dtype.kind == "f":
            dataset.attrs["_FillValue"] = np.array([np.nan])
    else:
        strings = [storable(text) for text in variable.values]
        dataset = file.create_dataset(name, data=strings, dtype=h5py.string_dtype("utf-8"), track_order=True)
    for key, value in variable.attrs.items():
        dataset.attrs[key] = storable(value) if isinstance(value, str) else value
    return dataset


def read_netcdf(path: Path) -> tuple[dict[str, Variable], dict[str, Any]]:
    """(columns, global attributes) of one file. Raises OSError when it is no HDF5 file or not there."""
    import h5py

    columns: dict[str, Variable] = {}
    with h5py.File(path, "r", locking=False) as file:
        attrs = {key: _plain(value) for key, value in file.attrs.items() if not key.startswith("_")}
        for name, dataset in file.items():
            described = {key: _plain(dataset.attrs[key]) for key in ("long_name", "units") if key in dataset.attrs}
            values = dataset.asstr()[:].tolist() if h5py.check_string_dtype(dataset.dtype) else dataset[:]
            columns[name] = Variable(values, described)
    return columns, attrs


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def storable(text: str) -> str:
    """What HDF5 can hold of a string: no NUL characters, no lone surrogates (shown as escapes instead)."""
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")


def fsync_folder(folder: Path) -> None:
    """Make creations, renames and removals in ``folder`` survive a host crash."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
