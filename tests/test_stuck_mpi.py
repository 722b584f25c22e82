"""Tests of MPI that another library has started, and of MPI calls that do not return.

Ranks of one host communicate over MPI here, and the library is a proxy of the real one (stuck_mpi.c).
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, World, exception_of
from wrapped_mpi import compile_wrapper

pytestmark = [
    pytest.mark.skipif(BACKEND != "fog", reason="tests fog's MPI"),
    pytest.mark.usefixtures("no_shared_memory_left"),
]

# The timeout of the stuck operations, in seconds; calls are ended half a second later at the earliest.
TIMEOUT = 0.5
# Seconds in which each rank's part has to end on a busy machine. A lock that is never released would block forever.
SOON = 20.0


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the path of the library whose calls can be made to hang."""
    return compile_wrapper("stuck_mpi.c", tmp_path_factory.mktemp("proxy"))


def hang(call: str, sleeps: bool = False) -> None:
    """From now on the call does not return on this rank; "" restores later calls."""
    ctypes.CDLL(os.environ["FOG_MPI_LIBRARY"]).fog_test_hang(call.encode(), int(sleeps))


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(dist.DistBackendError) as failure:
        call()
    return str(failure.value)


def until_completed(work: dist.Work) -> str:
    """Returns the error of an operation without a waiting caller."""
    end = time.monotonic() + SOON
    while not work.is_completed():
        assert time.monotonic() < end, "it does not complete"
        time.sleep(0.01)
    return str(exception_of(work))


def stuck_in_its_own_call() -> tuple[str, str]:
    """The sending thread itself makes the call that hangs."""
    hang("MPI_Isend")
    return error_of(
        lambda: dist.send(torch.ones(3), 1)
    ), r"send/recv #\d+ .*MPI_Isend with rank 1 of MPI's world"


def stuck_while_it_waits() -> tuple[str, str]:
    """The call sleeps, in the thread that makes progress first; the user waits for a Work."""
    work = dist.irecv(torch.ones(3), 0)
    hang("MPI_Improbe", sleeps=True)
    return error_of(work.wait), r"send/recv #\d+ .*MPI_Improbe .*not there: rank 0"


def stuck_in_the_background() -> tuple[str, str]:
    """Only a callback of a Future waits."""
    work = dist.irecv(torch.ones(3), 0)
    seen: list[str] = []
    future = work.get_future()
    future.add_done_callback(lambda done: seen.append("called"))
    hang("MPI_Improbe")
    message = until_completed(work)
    end = time.monotonic() + SOON
    while not seen and time.monotonic() < end:
        time.sleep(0.01)
    assert seen == ["called"]
    return message, r"send/recv #\d+ .*MPI_Improbe .*not there: rank 0"


def stuck_before_anything() -> tuple[str, str]:
    """The background thread is in the call while nothing is in flight; then an operation comes."""
    hang("MPI_Improbe")
    time.sleep(0.1)
    return error_of(lambda: dist.send(torch.ones(3), 0)), "MPI_Improbe"


PARTS = [stuck_in_its_own_call, stuck_while_it_waits, stuck_in_the_background, stuck_before_anything]


def get_stuck() -> tuple[list[str], str, str, float]:
    """Each rank runs its part. Afterwards all its calls raise at once, and its groups can be destroyed."""
    other = dist.new_group()
    dist.barrier()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    backend.set_timeout(timedelta(seconds=TIMEOUT))
    begin = time.monotonic()
    message, pattern = PARTS[dist.get_rank()]()
    errors = [
        error_of(lambda: dist.all_reduce(torch.ones(3))),
        error_of(lambda: dist.all_reduce(torch.ones(3), group=other)),
        error_of(lambda: dist.all_reduce(torch.ones(100_000), group=other)),
    ]
    dist.destroy_process_group()
    hang("")
    return errors, message, pattern, time.monotonic() - begin


def test_a_call_that_does_not_return(new_world: Callable[..., World], proxy: str) -> None:
    """The operation fails and names the call; later ones fail at once; the process ends normally."""
    environment = {"FOG_MPI_LIBRARY": proxy, "FOG_LOCAL_LINKS": "0"}
    for rank, (errors, message, pattern, seconds) in enumerate(
        new_world(len(PARTS), environment=environment).run(get_stuck)
    ):
        assert re.search(pattern, message), f"rank {rank}: {message}"
        assert [error for error in errors if "cannot be used any more" not in error] == [], rank
        assert seconds < SOON, f"rank {rank}: {seconds} s"


def get_stuck_by_rma(call: str, by_window: bool) -> tuple[str, float]:
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
    begin = time.monotonic()
    if window is None:
        message = error_of(lambda: fogdist.neighbor_allreduce(x))
    else:
        message = error_of(lambda: window.put(x, timeout=timedelta(seconds=TIMEOUT))) if rank == 0 else ""
    seconds = time.monotonic() - begin
    hang("")
    return message, seconds


@pytest.mark.parametrize("by_window", [False, True])
@pytest.mark.parametrize("call", ["MPI_Put", "MPI_Win_flush"])
def test_a_call_of_rma_that_does_not_return(
    new_world: Callable[..., World], proxy: str, call: str, by_window: bool
) -> None:
    """The operation ends with an error that names the call and the peer."""
    environment = {"FOG_MPI_LIBRARY": proxy, "FOG_LOCAL_LINKS": "0", "FOG_BETWEEN_HOSTS": "rma"}
    world = new_world(2, environment=environment, finalizing=None)
    outcomes = world.run(get_stuck_by_rma, call, by_window)
    message, seconds = outcomes[0]
    assert re.search(rf"{'win_put' if by_window else 'neighbor_allreduce'}.*{call} with rank 1", message), (
        message
    )
    assert seconds < SOON
    world.close()


def end_while_stuck() -> None:
    """The process exits with an operation in flight whose deadline is far in the future."""
    global kept
    kept = dist.irecv(torch.ones(3), 1 - dist.get_rank())
    hang("MPI_Improbe", sleeps=True)
    time.sleep(0.05)


@pytest.mark.long
def test_exit_while_a_call_does_not_return(new_world: Callable[..., World], proxy: str) -> None:
    world = new_world(2, environment={"FOG_MPI_LIBRARY": proxy, "FOG_LOCAL_LINKS": "0"})
    world.run(end_while_stuck)
    begin = time.monotonic()
    world.close()  # raises if a rank does not end
    assert time.monotonic() - begin < SOON


def start_with_a_stuck_rank() -> tuple[str, str]:
    import fog_pg  # noqa: F401

    if os.environ["RANK"] == "1":
        hang("MPI_Comm_dup")
    join = [error_of(lambda: dist.init_process_group("fog", timeout=timedelta(seconds=3)))]
    join.append(error_of(lambda: dist.init_process_group("fog", timeout=timedelta(seconds=60))))
    return join[0], join[1]


def test_a_start_that_does_not_return(new_world: Callable[..., World], proxy: str) -> None:
    environment = {"FOG_MPI_LIBRARY": proxy, "FOG_LOCAL_LINKS": "0"}
    world = new_world(2, initialize=False, environment=environment)
    for first, second in world.run(start_with_a_stuck_rank):
        assert "did not start within 3000 ms: MPI_Comm_dup does not return" in first
        assert "cannot be started a second time" in second and "MPI_Comm_dup" in second


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
    world = new_world(2, initialize=False, environment={"FOG_LOCAL_LINKS": "0"})
    for message in world.run(mpi_of_another, level):
        if name == "MULTIPLE":
            assert "MPI started as rank 0 of 1" in message
        else:
            assert f"with MPI_THREAD_{name}" in message and 'mpi4py.rc.thread_level = "multiple"' in message
