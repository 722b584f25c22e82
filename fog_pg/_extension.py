"""Loads the C++ extension and the MPI library it uses, with errors that say what to do."""

from __future__ import annotations

import atexit
import importlib.metadata
import logging
import os
import sys
from ctypes.util import find_library
from functools import cache
from pathlib import Path
from types import ModuleType

from fog_pg import _logging, _settings, environment

_log = logging.getLogger("fog_pg")

_LIBRARY_NAMES = ("libmpi_abi.so.1", "libmpi_abi.so.0", "libmpi_abi.so")


def confirm_by_default() -> bool:
    """Returns whether torch debugs collectives, unless a test decides; must be the same on all ranks."""
    debugging = environment.DISTRIBUTED_DEBUG.get().upper() == "DETAIL"
    return environment.CONFIRM.get() if environment.CONFIRM.is_set() else debugging


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


def _check_build() -> None:
    import torch

    try:
        from fog_pg import _build_info
    except ImportError as error:
        raise ImportError(
            "fog_pg: the C++ extension is not built. In fog's checkout run: pip install --no-build-isolation ."
        ) from error
    if _minor(_build_info.TORCH_VERSION) != _minor(torch.__version__):
        raise ImportError(
            f"fog_pg: the C++ extension was built for torch {_build_info.TORCH_VERSION}, this is torch {torch.__version__}. "
            "C++ interfaces differ from one minor version to the next; rebuild it in fog's checkout with: "
            "pip install --no-build-isolation --force-reinstall --no-deps ."
        )


def _mpich_package_library() -> Path | None:
    """The library of the PyPI package mpich in this environment."""
    try:
        files = importlib.metadata.files("mpich") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == "libmpi_abi.so.1":
            return Path(file.locate()).resolve()
    return None


def find_mpi_library() -> str:
    """Returns the path of the MPI library: FOG_MPI_LIBRARY, or the mpich package's, or the system's.

    Raises:
        ImportError: If FOG_MPI_LIBRARY names no file, or if none is found.
    """
    if named := environment.MPI_LIBRARY.get():
        if os.sep in named and not Path(named).is_file():
            raise ImportError(f"fog_pg: {environment.MPI_LIBRARY.name} is {named!r}, which is not a file")
        return named
    package = _mpich_package_library()
    if package is not None and package.is_file():
        return str(package)
    for folder in (Path(sys.prefix) / "lib", Path(sys.base_prefix) / "lib"):
        for name in _LIBRARY_NAMES:
            if (folder / name).is_file():
                return str(folder / name)
    if system := find_library("mpi_abi"):
        return system
    raise ImportError(
        "fog_pg: no MPI library with the MPI standard ABI (libmpi_abi.so) was found. Install one with: pip install 'mpich>=5'; "
        f"or name your site's (MPICH 5, Intel MPI, Open MPI 6) in {environment.MPI_LIBRARY.name}; or build fog against your site's MPI "
        "with FOG_MPICXX=/path/to/mpicxx pip install --no-build-isolation ."
    )


@cache
def load() -> ModuleType:
    """Loads the extension module and finds the MPI library, which is opened only when ranks have to use it.

    Raises:
        ImportError: If the extension is missing or built for another torch, or if no MPI library can be used.
        ValueError: If a variable of `fog_pg.environment` has a value that is not allowed.
    """
    environment.check()
    _logging.set_up()
    _check_build()
    # UCX, inside MPI, uses SIGHUP for its debug mode, so a rank would outlive its terminal. UCX reads this when loaded.
    os.environ.setdefault(environment.UCX_SIGNAL.name, "0")
    from fog_pg import _monitored_barrier, _nccl

    try:
        from fog_pg import _C
    except ImportError as error:
        raise ImportError(
            f"fog_pg: the C++ extension cannot be loaded ({error}). Rebuild it in fog's checkout with: "
            "pip install --no-build-isolation --force-reinstall --no-deps ."
        ) from error
    from fog_pg._build_info import VERSION

    _C.init_logging()  # torch may have been imported before the level was set
    _C.set_version(VERSION)
    _settings.apply(_C)
    try:
        library = "" if _C.native_mpi else find_mpi_library()
        _C.choose_mpi(library)
        if _C.native_mpi or environment.MPI_LIBRARY.is_set():  # report an unusable explicit choice now
            _C.load_mpi()
    except RuntimeError as error:
        raise ImportError(f"fog_pg: {error}. Install one with: pip install 'mpich>=5'") from error
    _C.set_delegate_factory("cuda", _nccl.create)
    _monitored_barrier.serve()
    _log.info("fog %s, extension %s, MPI %s", VERSION, _C.__file__, library or "that of the build")
    # Before the interpreter ends, because the progress thread may run Python callbacks.
    atexit.register(_C.shutdown)
    return _C
