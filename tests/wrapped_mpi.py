"""Compiles libraries that wrap the real MPI for tests; FOG_MPI_LIBRARY loads them."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from pathlib import Path

import pytest


def compile_wrapper(source: str, folder: Path) -> str:
    """Compiles a wrapper library and links it with the MPI of the package mpich; skips the test if that is not
    possible.

    Args:
        source: Name of its C file, in this folder.
        folder: The folder for the library.

    Returns:
        Path of the library.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    files = importlib.metadata.files("mpich") or []
    places = {file.name: Path(str(file.locate())).resolve() for file in files}
    if compiler is None or "mpi_abi.h" not in places or "libmpi_abi.so.1" not in places:
        pytest.skip("needs a C compiler and the package mpich")
    header, real = places["mpi_abi.h"], places["libmpi_abi.so.1"]
    file = Path(__file__).with_name(source)
    library = folder / f"lib{file.stem}.so"
    linked = [str(real), f"-Wl,-rpath,{real.parent}"]
    subprocess.run(
        [compiler, "-shared", "-fPIC", f"-I{header.parent}", str(file), "-o", str(library), *linked],
        check=True,
    )
    return str(library)
