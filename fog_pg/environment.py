"""All environment variables that fog reads, and functions to read them in Python.

`docs/environment.md` has the same list with what each means; tests/test_environment.py compares the list, this module and
the variables that Python and C++ code reads. C++ code gets the values by `fog_pg/_settings.py`; it reads only what others
have set for MPI ("C++" in `reader`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

# Returned by a parser for a text that is not allowed.
_REFUSED = object()


@dataclass(frozen=True)
class Kind(Generic[T]):
    """A type of values.

    Attributes:
        name: For the table in the documentation.
        allowed: Completes "allowed are ..." in errors.
        parse: Returns the value of a non-empty text, or `_REFUSED` if it is not allowed.
    """

    name: str
    allowed: str
    parse: Callable[[str], T | object]


def choice(*values: str, note: str = "") -> Kind[str]:
    """One of several words; errors add the note to them."""
    listed = ", ".join(values[:-1]) + f" and {values[-1]}{note}"
    return Kind(" or ".join(values), listed, lambda text: text if text in values else _REFUSED)


def whole(least: int, most: int, unit: str) -> Kind[int]:
    """A whole number of a unit, from `least` to `most`."""

    def parse(text: str) -> int | object:
        return int(text) if text.isascii() and text.isdecimal() and least <= int(text) <= most else _REFUSED

    end = f"from {least} on" if most >= 2**47 else f"from {least} to {most}"
    return Kind(unit, f"whole {unit} {end}", parse)


def secret(least: int) -> Kind[str]:
    """A text of at least so many characters."""
    allowed = f"texts of at least {least} characters"
    return Kind("text", allowed, lambda text: text if len(text.encode()) >= least else _REFUSED)


def _addresses(text: str) -> str | object:
    """Parses addresses with ports; IPv6 addresses are in brackets."""
    for host, _, port in (each.rpartition(":") for each in text.split(",")):
        if not host or (":" in host and host[0] + host[-1] != "[]"):
            return _REFUSED
        if not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
            return _REFUSED
    return text


ADDRESSES: Kind[str] = Kind("addresses", "lists host:port,host:port", _addresses)
FLAG: Kind[bool] = Kind("0 or 1", "0 and 1", lambda text: {"0": False, "1": True}.get(text, _REFUSED))
TEXT: Kind[str] = Kind("text", "any text", lambda text: text)


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable.

    Attributes:
        name: Its name.
        kind: The type of its values.
        default: The value if the variable is not set or empty.
        reader: "Python", "C++", or "build" (setup.py and the programs that it calls).
        owner: The program that defines the variable; "fog" for fog's own variables, "tests" for private ones.
        is_secret: Whether nothing may show the value.
    """

    name: str
    kind: Kind[T]
    default: T
    reader: str = "Python"
    owner: str = "fog"
    is_secret: bool = False

    def get(self, environment: Mapping[str, str] | None = None) -> T:
        """Returns the value.

        Args:
            environment: Where to look; by default the process's environment.

        Raises:
            ValueError: The value is not allowed.
        """
        text = (os.environ if environment is None else environment).get(self.name, "")
        if not text:
            return self.default
        value = self.kind.parse(text)
        if value is _REFUSED:
            shown = f"{len(text.encode())} characters" if self.is_secret else f"'{text}'"
            raise ValueError(f"{self.name}: got {shown}; allowed are {self.kind.allowed}")
        return value  # type: ignore[return-value]

    def is_set(self) -> bool:
        """Returns whether the variable has a non-empty value."""
        return bool(os.environ.get(self.name))


# --- fog's own variables for a run -----------------------------------------------------------------------------

MPI_LIBRARY = Variable("FOG_MPI_LIBRARY", TEXT, "")
BETWEEN_HOSTS = Variable(
    "FOG_BETWEEN_HOSTS", choice("auto", "tcp", "rma", note=" (tcp has replaced MPI's messages)"), "auto"
)
RMA_BYTES = Variable("FOG_RMA_BYTES", whole(1 << 20, (1 << 48) - 1, "bytes"), 256 << 20)
HOST_TIMEOUT = Variable("FOG_HOST_TIMEOUT", whole(4, 32767, "seconds"), 11)
INTERFACE = Variable("FOG_INTERFACE", TEXT, "")
TIMELINE = Variable("FOG_TIMELINE", TEXT, "")
WARN_AFTER = Variable("FOG_WARN_AFTER", whole(0, 1_000_000, "seconds"), 30)
LOST_AFTER = Variable("FOG_LOST_AFTER", whole(0, 1_000_000, "seconds"), 0)
NODES_PER_MACHINE = Variable("FOG_NODES_PER_MACHINE", whole(1, (1 << 31) - 1, "numbers of ranks"), 0)
JOIN = Variable("FOG_JOIN", FLAG, False)
MAX_RANKS = Variable("FOG_MAX_RANKS", whole(1, 1 << 12, "numbers of ranks"), 0)
STORES = Variable("FOG_STORES", ADDRESSES, "")
RUN = Variable("FOG_RUN", FLAG, False)
JOB_SECRET = Variable("FOG_JOB_SECRET", secret(16), "", is_secret=True)
LOG_LEVEL = Variable("FOG_LOG_LEVEL", choice("debug", "info", "warning", "error"), "warning")

# --- options of tests, which the documentation does not list ----------------------------------------------------

# With 0, ranks of one host reach this one as if they were on other hosts; for MPI each is a node of its own.
LOCAL_LINKS = Variable("_FOG_LOCAL_LINKS", FLAG, True, owner="tests")
# By so many TCP connections large data goes to a rank, however long the path is. By default that is measured.
CONNECTIONS = Variable("_FOG_CONNECTIONS", whole(1, 4, "connections"), 0, owner="tests")
# The default of `ProcessGroupFog.Options.confirm`, in place of TORCH_DISTRIBUTED_DEBUG=DETAIL.
CONFIRM = Variable("_FOG_CONFIRM", FLAG, False, owner="tests")

# --- fog's own variables for a build ---------------------------------------------------------------------------

MPICXX = Variable("FOG_MPICXX", TEXT, "", reader="build")
SANITIZE = Variable("FOG_SANITIZE", TEXT, "", reader="build")
MAX_JOBS = Variable("MAX_JOBS", whole(1, 4096, "numbers of files"), 0, reader="build", owner="torch")
NO_COMPILER_WRAPPER = Variable("TORCH_NO_COMPILER_WRAPPER", TEXT, "", reader="build", owner="torch")

# --- variables of other programs -------------------------------------------------------------------------------


def _whole_of(owner: str, name: str) -> Variable[int]:
    return Variable(name, whole(0, (1 << 31) - 1, "numbers"), -1, owner=owner)


RANK = _whole_of("torchrun", "RANK")
WORLD_SIZE = _whole_of("torchrun", "WORLD_SIZE")
LOCAL_WORLD_SIZE = _whole_of("torchrun", "LOCAL_WORLD_SIZE")
TORCHELASTIC_RUN_ID = Variable("TORCHELASTIC_RUN_ID", TEXT, "", owner="torchrun")
MASTER_ADDR = Variable("MASTER_ADDR", TEXT, "", owner="torch")
MASTER_PORT = Variable("MASTER_PORT", whole(0, 65535, "port numbers"), 0, owner="torch")
DISTRIBUTED_DEBUG = Variable("TORCH_DISTRIBUTED_DEBUG", TEXT, "", owner="torch")
USE_NCCL2 = Variable("TORCH_DIST_USE_NCCL2", TEXT, "", owner="torch")
CPP_LOG_LEVEL = Variable("TORCH_CPP_LOG_LEVEL", TEXT, "", owner="torch")
UCX_SIGNAL = Variable("UCX_DEBUG_SIGNO", TEXT, "", owner="UCX")
GPU_SUPPORT = Variable("MPIR_CVAR_ENABLE_GPU", TEXT, "", reader="C++", owner="MPICH")
UCX_TRANSPORTS = Variable("UCX_TLS", TEXT, "", reader="C++", owner="UCX")
OFI_PROVIDER = Variable("FI_PROVIDER", TEXT, "", reader="C++", owner="libfabric")
MPICH_NETMOD = Variable("MPICH_CH4_NETMOD", TEXT, "", reader="C++", owner="MPICH")
BLUEFOG_NODES_PER_MACHINE = Variable("BLUEFOG_NODES_PER_MACHINE", NODES_PER_MACHINE.kind, 0, owner="BlueFog")
BLUEFOG_LOG_LEVEL = Variable(
    "BLUEFOG_LOG_LEVEL", choice("trace", "debug", "info", "warning", "error", "fatal"), "", owner="BlueFog"
)
BLUEFOG_TIMELINE = Variable("BLUEFOG_TIMELINE", TEXT, "", owner="BlueFog")
PMI_RANK = _whole_of("MPICH", "PMI_RANK")
PMI_SIZE = _whole_of("MPICH", "PMI_SIZE")
PMI_FD = Variable("PMI_FD", TEXT, "", owner="MPICH")
PMIX_RANK = Variable("PMIX_RANK", TEXT, "", owner="PMIx")
MPICH_LOCAL_RANK = _whole_of("MPICH", "MPI_LOCALRANKID")
MPICH_LOCAL_SIZE = _whole_of("MPICH", "MPI_LOCALNRANKS")
OPEN_MPI_RANK = _whole_of("Open MPI", "OMPI_COMM_WORLD_RANK")
OPEN_MPI_SIZE = _whole_of("Open MPI", "OMPI_COMM_WORLD_SIZE")
OPEN_MPI_LOCAL_RANK = _whole_of("Open MPI", "OMPI_COMM_WORLD_LOCAL_RANK")
OPEN_MPI_LOCAL_SIZE = _whole_of("Open MPI", "OMPI_COMM_WORLD_LOCAL_SIZE")
SLURM_RANK = _whole_of("Slurm", "SLURM_PROCID")
SLURM_SIZE = _whole_of("Slurm", "SLURM_NTASKS")

VARIABLES: tuple[Variable[object], ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Variable)
)
"""All variables, in the order of the documentation."""


def check(environment: Mapping[str, str] | None = None) -> None:
    """Validates the values of fog's own variables, in whichever language they are read.

    Args:
        environment: Where to look; by default the process's environment.

    Raises:
        ValueError: A value is not allowed.
    """
    for variable in VARIABLES:
        if variable.owner == "fog" and variable.reader != "build":
            variable.get(environment)
