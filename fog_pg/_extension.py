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

# What to do about an extension that is missing, or for another torch.
_REBUILD = (
    "To build it for the torch that is installed: pip install --no-build-isolation --force-reinstall --no-deps ., in the "
    "folder of fog's sources"
)
_LIBRARY_NAMES = ("libmpi_abi.so.1", "libmpi_abi.so.0", "libmpi_abi.so")


def confirm_by_default() -> bool:
    """Returns whether torch debugs collectives, unless a test decides; must be the same on all ranks."""
    debugging = environment.DISTRIBUTED_DEBUG.get().upper() == "DETAIL"
    return environment.CONFIRM.get() if environment.CONFIRM.is_set() else debugging


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def folder_for_torch() -> Path:
    """Returns the folder with the extension for this torch: a released wheel has one for each minor version (.ci/wheels.py).

    Raises:
        ImportError: If the extension is not built, or for another torch.
    """
    import torch

    try:
        from fog_pg._build_info import TORCH_VERSIONS
    except ImportError as error:
        raise ImportError(f"fog_pg: the C++ extension is not built. {_REBUILD}") from error
    own = _minor(torch.__version__)
    if own not in map(_minor, TORCH_VERSIONS):
        advice = _REBUILD
        if any(Path(__file__).parent.glob("torch-*")):  # in a released wheel, whose users have no sources
            advice = (
                f"To install a torch that it was built for: pip install 'torch=={_minor(TORCH_VERSIONS[-1])}.*'. A newer "
                f"fogdist may be built for torch {own}, or build one: fog's sources say how in docs/install.md"
            )
        raise ImportError(
            f"fog_pg: the C++ extension was built for torch {' and '.join(TORCH_VERSIONS)}, this is torch {torch.__version__}. "
            f"C++ interfaces differ from one minor version to the next. {advice}"
        )
    folder = Path(__file__).with_name(f"torch-{own}")
    return folder if folder.is_dir() else folder.parent


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
    sets_cpp_level = _logging.set_up()
    folder_for_torch()  # or an error
    # UCX, inside MPI, uses SIGHUP for its debug mode, so a rank would outlive its terminal. UCX reads this when loaded.
    os.environ.setdefault(environment.UCX_SIGNAL.name, "0")
    from fog_pg import _monitored_barrier, _nccl

    try:
        from fog_pg import _C
    except ImportError as error:
        raise ImportError(f"fog_pg: the C++ extension cannot be loaded ({error}). {_REBUILD}") from error
    from fog_pg._build_info import VERSION

    if sets_cpp_level:  # torch may have been imported before
        _C.init_logging()
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
