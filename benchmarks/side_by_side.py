"""Starts ranks that use fog, Gloo and raw MPI in the same processes, so that one run measures all of them.

`run_ranks` starts a script under the mpiexec of the mpich package; there each rank calls `join`:

- mpi4py starts first, with the launcher's variables, and loads `libmpi.so.12` of the mpich package. This is raw MPI.
- Then the launcher's variables are removed and fog starts as under torchrun: from a TCPStore, with its own
  PMI server. It loads `libmpi_abi.so.1` of the same package, which is the same MPICH with other symbol names. Both
  libraries are loaded privately, so neither sees the state of the other.
- Gloo, and torch's "fake" backend, which sends nothing, are groups made by `new_group`.

The systems do not take time from each other. MPICH runs only inside its calls. Gloo's threads sleep in epoll until a
message arrives. fog's thread checks its messages every 10 ms, which affects all systems alike.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from emulated_hosts import inside

import fog_pg  # noqa: F401  registers "fog" also where torch does not look for entry points

if TYPE_CHECKING:
    from mpi4py import MPI

    from fog_pg._C import ProcessGroupFog

# mpi4py reads the path of its MPI library from this variable.
MPI4PY_VARIABLE = "MPI4PY_LIBMPI"
# The prefixes of the variables that an MPI launcher sets.
_LAUNCHER_PREFIXES = ("PMI", "HYD", "MPI_LOCAL")
# The timeout of the groups.
TIMEOUT = timedelta(minutes=2)


def require(*packages: str) -> None:
    """Ends the program if a package is missing, with a message that names the packages to install."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        sys.exit(
            f"{', '.join(missing)}: not installed. In fog's checkout: "
            "pip install --no-build-isolation '.[benchmarks]'; or: pip install " + " ".join(missing)
        )


def run_ranks(
    ranks: int,
    script: Path,
    arguments: Sequence[str],
    hosts: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Runs a script on `ranks` processes of this machine and waits for its end.

    Args:
        ranks: Number of processes.
        script: The Python script, whose ranks call `join`.
        arguments: The script's arguments.
        hosts: Emulated hosts, one for each rank; by default all ranks are on this one. Raw MPI does not know them: it
            uses memory that all ranks share, so its traffic does not load their links.
        environment: Additional environment variables.

    Raises:
        SystemExit: The script failed, or there is no mpiexec.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        sys.exit("mpiexec: not found. pip install 'mpich>=5'")
    variables = {"OMP_NUM_THREADS": "1"} | os.environ | dict(environment or {})
    if library := _mpich_package_library():
        variables.setdefault(MPI4PY_VARIABLE, str(library))
    rank = [sys.executable, str(script), *arguments]
    command = [mpiexec, "-n", str(ranks), *rank]
    if hosts is not None:
        parts = [["-n", "1", *inside(host), *rank] for host in hosts]
        command = [mpiexec, *itertools.chain.from_iterable([*part, ":"] for part in parts)][:-1]
    status = subprocess.run(command, env=variables, stdin=subprocess.DEVNULL, check=False).returncode
    if status:
        sys.exit(f"{ranks} ranks of {script.name} ended with status {status}")


def _mpich_package_library() -> Path | None:
    """Returns libmpi.so.12 of the PyPI package mpich, if it is installed; otherwise mpi4py finds an MPI by itself."""
    try:
        files = importlib.metadata.files("mpich") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())).resolve() for file in files if file.name == "libmpi.so.12"), None)


@dataclass(frozen=True)
class Systems:
    """One rank's access to each system; all systems have the same ranks.

    Attributes:
        mpi: Raw MPI, which benchmarks also use to coordinate.
        fog: The default group, on fog.
        gloo: The group on Gloo.
        nothing: The group of a backend whose operations return at once and send nothing.
    """

    mpi: MPI.Intracomm
    fog: dist.ProcessGroup
    gloo: dist.ProcessGroup
    nothing: dist.ProcessGroup

    @property
    def rank(self) -> int:
        """This rank."""
        return self.mpi.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.mpi.size

    @property
    def backend(self) -> ProcessGroupFog:
        """fog's own object of `fog`."""
        return self.fog._get_backend(torch.device("cpu"))  # type: ignore[return-value]


def join(master: str = "127.0.0.1", ranks: MPI.Intracomm | None = None) -> Systems:
    """Starts all systems in a process that `run_ranks` started.

    Args:
        master: Address of rank 0's host.
        ranks: Raw MPI's communicator of the ranks of one torch world; by default all ranks.
    """
    from mpi4py import MPI  # the import initializes MPI

    mpi = MPI.COMM_WORLD if ranks is None else ranks
    for name in list(os.environ):
        if name.startswith(_LAUNCHER_PREFIXES):
            del os.environ[name]

    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers "fake"

    torch.set_num_threads(1)
    # torch 2.13 renamed operations, but 2.11 has only the old names.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.", category=FutureWarning)
    if mpi.rank == 0:
        store = dist.TCPStore(master, 0, is_master=True, wait_for_workers=False)
        mpi.bcast(store.port)
    else:
        store = dist.TCPStore(master, mpi.bcast(None), is_master=False)
    dist.init_process_group("fog", store=store, rank=mpi.rank, world_size=mpi.size, timeout=TIMEOUT)
    assert dist.group.WORLD is not None
    gloo, nothing = (dist.new_group(backend=name, timeout=TIMEOUT) for name in ("gloo", "fake"))
    return Systems(mpi, dist.group.WORLD, gloo, nothing)
