"""MPI below fog: a library of another version, calls that do not return, and another user of MPI.

Ranks of one host use MPI RMA here, as ranks of several hosts do on a fabric, by libraries that wrap the real one
(another_mpi.c, stuck_mpi.c).
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from harness import RUN_TIMEOUT, World, error_of, exception_of, init_process_group
from test_bootstrap import join, launcher_store, my_rank
from wrapped_mpi import compile_wrapper

from fog_pg import _extension

pytestmark = pytest.mark.usefixtures("no_shared_memory_left")

TCP = {"_FOG_LOCAL_LINKS": "0", "FOG_BETWEEN_HOSTS": "tcp"}
RMA = {"_FOG_LOCAL_LINKS": "0", "FOG_BETWEEN_HOSTS": "rma"}
# The timeout of the stuck operations, in seconds; calls are ended half a second later at the earliest.
TIMEOUT = 0.5


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """Returns a function that compiles a C file once, and returns the setting of fog's MPI to it."""
    made: dict[str, str] = {}

    def get(source: str) -> dict[str, str]:
        if source not in made:
            made[source] = compile_wrapper(source, tmp_path_factory.mktemp("library"))
        return {"FOG_MPI_LIBRARY": made[source]}

    return get


def wrapper() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ["FOG_MPI_LIBRARY"])


# --- versions ---------------------------------------------------------------------------------------------------


def join_with_another_mpi(library: str, rank: int) -> str:
    if my_rank() == rank:
        os.environ["FOG_MPI_LIBRARY"] = library
    return error_of(lambda: join(launcher_store()))


def test_another_version_of_mpi_is_an_error(
    new_world: Callable[..., World], library: Callable[[str], dict[str, str]]
) -> None:
    """All ranks get an error that names both versions."""
    world = new_world(3, initialize=False, environment=RMA)
    for text in world.run(join_with_another_mpi, *library("another_mpi.c").values(), 2):
        zero, other = text.split("different versions in one job: ")[1].split("; ")
        assert zero.startswith("rank 0 has fog ") and ", MPI MPICH " in zero, text
        assert other.startswith("rank 2 has fog ") and ", MPI AnotherMPI 7.8.9." in other, text


# --- calls that do not return -------------------------------------------------------------------------------


def hang(call: str, sleeps: bool = False) -> None:
    """From now on the call does not return on this rank; "" restores later calls."""
    wrapper().fog_test_hang(call.encode(), int(sleeps))


def another() -> int:
    return (dist.get_rank() + 1) % dist.get_world_size()


def stuck_while_it_waits() -> tuple[str, str]:
    """The call sleeps, in the thread that makes progress first; the user waits for a Work."""
    work = dist.irecv(torch.ones(3), another())
    hang("MPI_Iprobe", sleeps=True)
    return error_of(work.wait), r"send/recv #\d+ .*MPI_Iprobe .*not there: rank \d"


def stuck_in_the_background() -> tuple[str, str]:
    """Only a callback of a Future waits."""
    work = dist.irecv(torch.ones(3), another())
    seen: list[str] = []
    work.get_future().add_done_callback(lambda done: seen.append("called"))
    hang("MPI_Iprobe")
    while not (work.is_completed() and seen):
        time.sleep(0.01)
    return str(exception_of(work)), r"send/recv #\d+ .*MPI_Iprobe .*not there: rank \d"


def stuck_before_anything() -> tuple[str, str]:
    """The background thread is in the call while nothing is in flight; then an operation comes."""
    hang("MPI_Iprobe")
    time.sleep(0.1)
    return error_of(lambda: dist.send(torch.ones(3), another())), "MPI_Iprobe"


PARTS = [stuck_while_it_waits, stuck_in_the_background, stuck_before_anything]


def get_stuck() -> tuple[list[str], str, str]:
    """Each rank runs its part. Afterwards all its calls raise at once, and its groups can be destroyed."""
    other = dist.new_group()
    dist.barrier()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    backend.set_timeout(timedelta(seconds=TIMEOUT))
    message, pattern = PARTS[dist.get_rank()]()
    errors = [
        error_of(lambda: dist.all_reduce(torch.ones(3))),
        error_of(lambda: dist.all_reduce(torch.ones(3), group=other)),
        error_of(lambda: dist.all_reduce(torch.ones(100_000), group=other)),
    ]
    dist.destroy_process_group()
    hang("")
    return errors, message, pattern


def test_a_call_that_does_not_return(
    new_world: Callable[..., World], library: Callable[[str], dict[str, str]]
) -> None:
    """The operation fails and names the call; later ones fail at once; the process ends normally."""
    world = new_world(len(PARTS), timeout=4 * RUN_TIMEOUT, environment=RMA | library("stuck_mpi.c"))
    for rank, (errors, message, pattern) in enumerate(world.run(get_stuck)):
        assert re.search(pattern, message), f"rank {rank}: {message}"
        assert [error for error in errors if "cannot be used any more" not in error] == [], rank


def get_stuck_by_rma(call: str, by_window: bool) -> str:
    """A call of MPI on rank 0 does not return; by then both ranks know each other's slots."""
    import fogdist

    rank = dist.get_rank()
    fogdist.init()
    x = torch.ones(500_000)
    for _ in range(2):
        fogdist.neighbor_allreduce(x)
    window = fogdist.Window(x, name="w") if by_window else None
    dist.barrier()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    backend.set_timeout(timedelta(seconds=TIMEOUT))
    if rank == 0:
        hang(call)
    if window is None:
        message = error_of(lambda: fogdist.neighbor_allreduce(x))
    else:
        message = error_of(lambda: window.put(x, timeout=timedelta(seconds=TIMEOUT))) if rank == 0 else ""
    hang("")
    return message


@pytest.mark.parametrize(
    ("call", "by_window"),
    [
        ("MPI_Put", False),
        ("MPI_Win_flush", True),
        pytest.param("MPI_Put", True, marks=pytest.mark.long),
        pytest.param("MPI_Win_flush", False, marks=pytest.mark.long),
    ],
)
def test_a_call_of_rma_that_does_not_return(
    new_world: Callable[..., World], library: Callable[[str], dict[str, str]], call: str, by_window: bool
) -> None:
    """The operation ends with an error that names the call and the peer."""
    world = new_world(2, environment=RMA | library("stuck_mpi.c"), finalizing=None)
    message = world.run(get_stuck_by_rma, call, by_window)[0]
    operation = "Window.put" if by_window else "neighbor_allreduce"
    assert re.search(rf"{operation}.*{call} with rank 1", message), message
    world.close()


def start_with_a_stuck_rank() -> tuple[str, str]:
    import fog_pg  # noqa: F401

    if os.environ["RANK"] == "1":
        hang("MPI_Comm_dup")
    first = error_of(lambda: dist.init_process_group("fog", timeout=timedelta(seconds=3)))
    return first, error_of(lambda: dist.init_process_group("fog", timeout=timedelta(seconds=60)))


def test_a_start_that_does_not_return(
    new_world: Callable[..., World], library: Callable[[str], dict[str, str]]
) -> None:
    world = new_world(2, initialize=False, environment=RMA | library("stuck_mpi.c"))
    for first, second in world.run(start_with_a_stuck_rank):
        assert "did not start within 3000 ms: MPI_Comm_dup does not return" in first
        assert "cannot be started a second time" in second and "MPI_Comm_dup" in second


def test_where_the_library_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That of the package mpich, one in the folders of Python, and that of the system, in this order."""
    monkeypatch.delenv("FOG_MPI_LIBRARY", raising=False)
    monkeypatch.setattr(_extension, "find_library", lambda name: f"lib{name}.so of the system")
    for name in ("prefix", "base_prefix"):
        monkeypatch.setattr(sys, name, str(tmp_path))
    missing = importlib.metadata.PackageNotFoundError("mpich")
    for files in (Mock(side_effect=missing), Mock(return_value=None)):
        monkeypatch.setattr(importlib.metadata, "files", files)
        assert _extension.find_mpi_library() == "libmpi_abi.so of the system"
    own, package = tmp_path / "lib" / "libmpi_abi.so.0", tmp_path / "libmpi_abi.so.1"
    own.parent.mkdir()
    own.touch()
    assert _extension.find_mpi_library() == str(own)
    package.touch()
    files.return_value = [SimpleNamespace(name=each.name, locate=each.resolve) for each in (own, package)]
    assert _extension.find_mpi_library() == str(package)


def test_a_package_that_was_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fog_pg._build_info", None)
    monkeypatch.delattr("fog_pg._build_info")
    with pytest.raises(
        ImportError,
        match="the C\\+\\+ extension is not built. To build it for the torch that is installed: pip install",
    ):
        _extension.folder_for_torch()


# --- another user of MPI ------------------------------------------------------------------------------------


def mpi_of_another(level: int) -> str:
    """Returns fog's error if another user of the library has started MPI with a thread level."""
    import fog_pg  # noqa: F401
    from fog_pg._extension import find_mpi_library

    provided = ctypes.c_int()
    library = ctypes.CDLL(find_mpi_library())
    os.environ["MPIR_CVAR_ENABLE_GPU"] = "0"
    assert library.MPI_Init_thread(None, None, level, ctypes.byref(provided)) == 0 and provided.value == level
    return error_of(lambda: dist.init_process_group("fog", timeout=timedelta(seconds=20)))


@pytest.mark.parametrize(("name", "level"), [("FUNNELED", 1024), ("SERIALIZED", 2048), ("MULTIPLE", 4096)])
def test_mpi_that_another_user_has_started(new_world: Callable[..., World], name: str, level: int) -> None:
    """In MPI's world each rank is alone, which is an error at level MULTIPLE."""
    world = new_world(2, initialize=False, environment=RMA)
    for message in world.run(mpi_of_another, level):
        if name == "MULTIPLE":
            assert "MPI started as rank 0 of 1" in message
        else:
            assert f"with MPI_THREAD_{name}" in message and 'mpi4py.rc.thread_level = "multiple"' in message


# --- settings -----------------------------------------------------------------------------------------------


def start(of_ranks: list[Mapping[str, str]]) -> tuple[str, str]:
    """Starts fog with different settings on each rank; returns the type and text of the error."""
    os.environ.update(of_ranks[my_rank()])
    try:
        init_process_group(30.0)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


# The settings of each rank, the type of the error, and patterns in its text.
SETTINGS: dict[str, tuple[list[Mapping[str, str]], str, list[str]]] = {
    "no such way": (
        [TCP | {"FOG_BETWEEN_HOSTS": "xyz"}] * 2,
        "ValueError",
        ["xyz", "auto.*tcp.*rma"],
    ),
    "a way of old": (
        [TCP | {"FOG_BETWEEN_HOSTS": "messages"}] * 2,
        "ValueError",
        ["messages.*tcp has replaced MPI's messages"],
    ),
    "no number": ([RMA | {"FOG_RMA_BYTES": "abc"}] * 2, "ValueError", ["FOG_RMA_BYTES", "abc", "bytes"]),
    "negative": ([RMA | {"FOG_RMA_BYTES": "-5"}] * 2, "ValueError", ["FOG_RMA_BYTES", "-5", "bytes"]),
    "no network for MPI": (
        [RMA, RMA | {"UCX_TLS": "none"}],
        "DistBackendError",
        ["MPI_Session_init failed: .*No such device", "With FOG_BETWEEN_HOSTS=tcp"],
    ),
    "different ways": (
        [RMA, TCP, RMA],
        "DistBackendError",
        ["FOG_BETWEEN_HOSTS", "rma", "tcp", r"ranks? .*\b1\b"],
    ),
    "auto and rma": (
        [RMA | {"FOG_BETWEEN_HOSTS": "auto"}, RMA],
        "DistBackendError",
        ["FOG_BETWEEN_HOSTS", "auto", "rma", r"ranks? .*\b1\b"],
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_cannot_work(new_world: Callable[..., World], name: str) -> None:
    """All ranks get an error at the start that gives the reason."""
    of_ranks, kind, patterns = SETTINGS[name]
    for found, text in new_world(len(of_ranks), initialize=False).run(start, of_ranks):
        assert found == kind, text
        assert all(re.search(pattern, text) for pattern in patterns), text
