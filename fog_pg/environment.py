"""All environment variables that fog reads, with their descriptions, and functions to read them in Python.

`docs/environment.md` has the same list for users; tests/test_environment.py compares the list, this module and the
variables that Python and C++ code reads. C++ code gets the values by `fog_pg/_settings.py`; it reads only what others
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
        meaning: One or two sentences.
        owner: The program that defines the variable; "fog" for fog's own variables, "tests" for private ones.
        is_secret: Whether nothing may show the value.
    """

    name: str
    kind: Kind[T]
    default: T
    reader: str
    meaning: str
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

MPI_LIBRARY = Variable(
    "FOG_MPI_LIBRARY",
    TEXT,
    "",
    "Python",
    "Path or name of the MPI library to load. It must have the standard ABI (MPICH 5, Intel MPI, Open MPI 6). "
    "By default it is the library of the PyPI package mpich, then the system's.",
)
BETWEEN_HOSTS = Variable(
    "FOG_BETWEEN_HOSTS",
    choice("auto", "tcp", "rma", note=" (tcp has replaced MPI's messages)"),
    "auto",
    "Python",
    "The transport of large data between hosts; headers and small data always go by connections of fog's own. tcp: "
    "these connections; MPI is neither loaded nor started. rma: MPI RMA, the sender puts the data into the receiver's "
    "memory. auto: TCP, unless each host has a device for RDMA, or a variable that chooses MPI's fabric (UCX_TLS, "
    "FI_PROVIDER, MPICH_CH4_NETMOD), and a probe at the start shows that puts complete and are faster than TCP; then RMA, for "
    "windows only if a put completes while its target is outside of MPI. It must be the same on all ranks.",
)
RMA_BYTES = Variable(
    "FOG_RMA_BYTES",
    whole(1 << 20, (1 << 48) - 1, "bytes"),
    256 << 20,
    "Python",
    "The size of a rank's memory into which ranks of other hosts can put data. Data for which there is no room goes by "
    "TCP. Each rank that sends in exchanges is lent 32 MiB, or a quarter of the "
    "free memory if that is less; a window of n bytes takes about n bytes, and 2 n for each neighbor that puts.",
)
HOST_TIMEOUT = Variable(
    "FOG_HOST_TIMEOUT",
    whole(4, 32767, "seconds"),
    11,
    "Python",
    "After this time without a sign of life on the job's network, a host and its ranks count as lost. Requests to a Store "
    "on such a host raise.",
)
INTERFACE = Variable(
    "FOG_INTERFACE",
    TEXT,
    "",
    "Python",
    "Name of the network interface for the connections between ranks of different hosts. By default it is the interface "
    "that reaches the job's store.",
)
TIMELINE = Variable(
    "FOG_TIMELINE",
    TEXT,
    "",
    "Python",
    "Each rank records its operations, from the first group on, in the file of this prefix, its rank and `.json`: "
    "docs/observing.md.",
)
WARN_AFTER = Variable(
    "FOG_WARN_AFTER",
    whole(0, 1_000_000, "seconds"),
    30,
    "Python",
    "An operation that has waited for this time warns once and names the ranks that have not come; 0 turns the warning "
    "off.",
)
LOST_AFTER = Variable(
    "FOG_LOST_AFTER",
    whole(0, 1_000_000, "seconds"),
    0,
    "Python",
    "A rank that still runs, but shows no sign of life for at least this time while others wait for it, is declared "
    "lost; 0: never. All other times of this judgement follow from it: docs/hangs.md.",
)
NODES_PER_MACHINE = Variable(
    "FOG_NODES_PER_MACHINE",
    whole(1, (1 << 31) - 1, "numbers of ranks"),
    0,
    "Python",
    "Read by fogdist.init: this number of consecutive ranks form one machine for hierarchical operations and the "
    "machine numbers, regardless of their hosts. It must divide the number of ranks. By default a machine is a host.",
)
JOIN = Variable(
    "FOG_JOIN",
    FLAG,
    False,
    "Python",
    "With 1, this process joins a running job, as the rank of its variables: docs/membership.md.",
)
MAX_RANKS = Variable(
    "FOG_MAX_RANKS",
    whole(1, 1 << 12, "numbers of ranks"),
    0,
    "Python",
    "The most ranks that the job can have, counting those that join with numbers beyond the first ones: "
    "docs/membership.md. By default it is the number of ranks at the start. It must be the same on all ranks.",
)
RUN = Variable(
    "FOG_RUN",
    FLAG,
    False,
    "Python",
    "Set to 1 by `fog run`: a rank that ends by an exception because it has lost another one prints one line and has exit "
    "status 75, so the rank that failed by itself is the one that is named. With 0 it prints its whole traceback.",
)
JOB_SECRET = Variable(
    "FOG_JOB_SECRET",
    secret(16),
    "",
    "Python",
    "The job's secret, the same on all ranks. Ranks of other hosts that connect, and ranks that join, prove that they "
    "know it. `fog run` makes one; without it rank 0 does, and passes it on through the Store, unless that is a file: "
    "docs/security.md.",
    is_secret=True,
)
LOG_LEVEL = Variable(
    "FOG_LOG_LEVEL",
    choice("debug", "info", "warning", "error"),
    "warning",
    "Python",
    "The level of the loggers fogdist and fog_pg, which print on standard error. If TORCH_CPP_LOG_LEVEL is not set, "
    "fog sets it to the same level, because fog's C++ code uses torch's logging.",
)

# --- options of tests, which the documentation does not list ----------------------------------------------------

LOCAL_LINKS = Variable(
    "_FOG_LOCAL_LINKS",
    FLAG,
    True,
    "Python",
    "With 0, ranks of one host reach this one as if they were on other hosts; for MPI each is a node of its own.",
    owner="tests",
)
CONFIRM = Variable(
    "_FOG_CONFIRM",
    FLAG,
    False,
    "Python",
    "The default of `ProcessGroupFog.Options.confirm`, in place of TORCH_DISTRIBUTED_DEBUG=DETAIL.",
    owner="tests",
)

# --- fog's own variables for a build ---------------------------------------------------------------------------

MPICXX = Variable(
    "FOG_MPICXX",
    TEXT,
    "",
    "build",
    "Path of an mpicxx: fog is then built against that MPI itself instead of the standard ABI, which Open MPI 4 and 5 "
    "do not have.",
)
SANITIZE = Variable(
    "FOG_SANITIZE",
    TEXT,
    "",
    "build",
    "Sanitizers of the compiler, such as `address,undefined` or `thread`: `make test-asan` and `make test-tsan`; "
    "`coverage` counts the lines that run: `make coverage`.",
)
MAX_JOBS = Variable(
    "MAX_JOBS",
    whole(1, 4096, "numbers of files"),
    0,
    "build",
    "The number of files that are compiled at the same time; by default one per core.",
    owner="torch",
)
NO_COMPILER_WRAPPER = Variable(
    "TORCH_NO_COMPILER_WRAPPER",
    TEXT,
    "",
    "build",
    "If it is set, ccache and sccache are not used.",
    owner="torch",
)

# --- variables of other programs -------------------------------------------------------------------------------


def _whole_of(owner: str, name: str, reader: str, meaning: str) -> Variable[int]:
    return Variable(name, whole(0, (1 << 31) - 1, "numbers"), -1, reader, meaning, owner)


RANK = _whole_of("torchrun", "RANK", "Python", "This process's rank.")
WORLD_SIZE = _whole_of("torchrun", "WORLD_SIZE", "Python", "The number of ranks.")
LOCAL_WORLD_SIZE = _whole_of("torchrun", "LOCAL_WORLD_SIZE", "Python", "The number of ranks of this host.")
TORCHELASTIC_RUN_ID = Variable(
    "TORCHELASTIC_RUN_ID",
    TEXT,
    "",
    "Python",
    "If it is set, torchrun started this process, and the variables of an MPI launcher belong to torchrun itself.",
    owner="torchrun",
)
MASTER_ADDR = Variable(
    "MASTER_ADDR",
    TEXT,
    "",
    "Python",
    "Under mpiexec and srun: the address on which rank 0 serves the job's store. By default it is rank 0's host name. "
    "With `fog run` on several hosts: the address of the first host, by default its name.",
    owner="torch",
)
MASTER_PORT = Variable(
    "MASTER_PORT",
    whole(0, 65535, "port numbers"),
    0,
    "Python",
    "Under mpiexec and srun, and with `fog run` on several hosts: the store's port. By default (0) it is any free one.",
    owner="torch",
)
DISTRIBUTED_DEBUG = Variable(
    "TORCH_DISTRIBUTED_DEBUG",
    TEXT,
    "",
    "Python",
    "With DETAIL, ranks that only send in an operation (the root of a broadcast) wait until the receivers have accepted the "
    "messages, as with `ProcessGroupFog.Options.confirm`. A disagreement of ranks then raises in the same call on both "
    "sides, instead of the sender's next call.",
    owner="torch",
)
USE_NCCL2 = Variable(
    "TORCH_DIST_USE_NCCL2",
    TEXT,
    "",
    "Python",
    "0 makes torch 2.15 use the NCCL backend of earlier versions; fog does the same.",
    owner="torch",
)
CPP_LOG_LEVEL = Variable(
    "TORCH_CPP_LOG_LEVEL",
    TEXT,
    "",
    "Python",
    "The log level of torch's and fog's C++ code: INFO, WARNING, ERROR or FATAL. It takes precedence over FOG_LOG_LEVEL.",
    owner="torch",
)
UCX_SIGNAL = Variable(
    "UCX_DEBUG_SIGNO",
    TEXT,
    "",
    "Python",
    "The signal of UCX's debug mode, SIGHUP by default. Unless it is set, fog sets it to 0 (no signal), so that a "
    "hangup ends a rank.",
    owner="UCX",
)
GPU_SUPPORT = Variable(
    "MPIR_CVAR_ENABLE_GPU",
    TEXT,
    "",
    "C++",
    "MPICH's own handling of GPU memory. Unless it is set, fog sets it to 0, because fog copies GPU memory itself.",
    owner="MPICH",
)
_FABRIC = "If it is set, FOG_BETWEEN_HOSTS=auto starts MPI to try RMA, as where there is a device for RDMA."
UCX_TRANSPORTS = Variable("UCX_TLS", TEXT, "", "C++", f"The transports of UCX. {_FABRIC}", owner="UCX")
OFI_PROVIDER = Variable(
    "FI_PROVIDER", TEXT, "", "C++", f"The provider of libfabric. {_FABRIC}", owner="libfabric"
)
MPICH_NETMOD = Variable(
    "MPICH_CH4_NETMOD", TEXT, "", "C++", f"MPICH's network, ucx or ofi. {_FABRIC}", owner="MPICH"
)
BLUEFOG_NODES_PER_MACHINE = Variable(
    "BLUEFOG_NODES_PER_MACHINE",
    NODES_PER_MACHINE.kind,
    0,
    "Python",
    "With fogdist.bluefog: the same as FOG_NODES_PER_MACHINE, which takes precedence.",
    owner="BlueFog",
)
BLUEFOG_LOG_LEVEL = Variable(
    "BLUEFOG_LOG_LEVEL",
    choice("trace", "debug", "info", "warning", "error", "fatal"),
    "",
    "Python",
    "With fogdist.bluefog: FOG_LOG_LEVEL, which takes precedence; trace is debug, and fatal is error.",
    owner="BlueFog",
)
BLUEFOG_TIMELINE = Variable(
    "BLUEFOG_TIMELINE",
    TEXT,
    "",
    "Python",
    "The same as FOG_TIMELINE, which takes precedence.",
    owner="BlueFog",
)
PMI_RANK = _whole_of("MPICH", "PMI_RANK", "Python", "This process's rank, from mpiexec.")
PMI_SIZE = _whole_of("MPICH", "PMI_SIZE", "Python", "The number of ranks, from mpiexec.")
PMI_FD = Variable(
    "PMI_FD", TEXT, "", "Python", "If it is set, srun or mpiexec serves PMI to this process.", owner="MPICH"
)
PMIX_RANK = Variable(
    "PMIX_RANK", TEXT, "", "Python", "If it is set, srun or mpirun serves PMIx to this process.", owner="PMIx"
)
MPICH_LOCAL_RANK = _whole_of("MPICH", "MPI_LOCALRANKID", "Python", "This process's rank on its host.")
MPICH_LOCAL_SIZE = _whole_of("MPICH", "MPI_LOCALNRANKS", "Python", "The number of ranks of this host.")
OPEN_MPI_RANK = _whole_of("Open MPI", "OMPI_COMM_WORLD_RANK", "Python", "This process's rank.")
OPEN_MPI_SIZE = _whole_of("Open MPI", "OMPI_COMM_WORLD_SIZE", "Python", "The number of ranks.")
OPEN_MPI_LOCAL_RANK = _whole_of(
    "Open MPI", "OMPI_COMM_WORLD_LOCAL_RANK", "Python", "This process's rank on its host."
)
OPEN_MPI_LOCAL_SIZE = _whole_of(
    "Open MPI", "OMPI_COMM_WORLD_LOCAL_SIZE", "Python", "The number of ranks of this host."
)
SLURM_RANK = _whole_of("Slurm", "SLURM_PROCID", "Python", "This process's rank, if PMI or PMIx is served.")
SLURM_SIZE = _whole_of("Slurm", "SLURM_NTASKS", "Python", "The number of ranks, if PMI or PMIx is served.")

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
