"""Libraries between fog and the system, by which a test refuses or observes fog's requests to the system."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from device_double import build

_HERE = Path(__file__).resolve().parent


def refusals() -> Path:
    """Compiles the library for ``LD_PRELOAD`` that refuses memory and threads; see refusals.cpp.

    Returns:
        The path of the library.
    """
    return build(
        "librefusals", ["refusals.cpp"], flags=["-O2", "-fvisibility=default"], library=True, where=_HERE
    )


def mpi_buffers() -> Path | None:
    """Compiles the library for ``FOG_MPI_LIBRARY`` that watches MPI's buffers; see mpi_buffers.cpp.

    Returns:
        The path of the library; None without the PyPI package mpich, whose library it wraps.
    """
    try:
        files = importlib.metadata.files("mpich") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = {file.name: Path(str(file.locate())).resolve() for file in files}
    if "mpi_abi.h" not in found:
        return None
    header = found["mpi_abi.h"]
    library = next(path for name, path in sorted(found.items()) if name.startswith("libmpi_abi.so."))
    flags = ["-O2", "-fvisibility=default", f"-I{header.parent}"]
    links = [str(library), f"-Wl,-rpath,{library.parent}"]
    return build("libmpi_buffers", ["mpi_buffers.cpp"], flags=flags, links=links, library=True, where=_HERE)
