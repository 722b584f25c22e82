"""Tests of the start and the end of a job over MPI, with libraries that wrap the real one.

Ranks of one host communicate over MPI here, as ranks of several hosts do.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, World
from test_bootstrap import join, launcher_store, my_rank
from wrapped_mpi import compile_wrapper

pytestmark = [
    pytest.mark.skipif(BACKEND != "fog", reason="tests fog's MPI"),
    pytest.mark.usefixtures("no_shared_memory_left"),
]

APART = {"FOG_LOCAL_LINKS": "0"}


def join_with_another_mpi(library: str, rank: int) -> str:
    if my_rank() == rank:
        os.environ["FOG_MPI_LIBRARY"] = library
    with pytest.raises(dist.DistBackendError) as failure:
        join(launcher_store())
    return str(failure.value)


def test_another_version_of_mpi_is_an_error(new_world: Callable[..., World], tmp_path: Path) -> None:
    """All ranks get an error that names both versions."""
    library = compile_wrapper("another_mpi.c", tmp_path)
    for text in new_world(3, initialize=False, environment=APART).run(join_with_another_mpi, library, 2):
        zero, other = text.split("different versions in one job: ")[1].split("; ")
        assert zero.startswith("rank 0 has fog ") and ", MPI MPICH " in zero, text
        assert other.startswith("rank 2 has fog ") and ", MPI AnotherMPI 7.8.9." in other, text


def sends() -> int:
    """Returns the number of messages that this rank has sent by MPI."""
    library = ctypes.CDLL(os.environ["FOG_MPI_LIBRARY"])
    library.fog_test_calls.restype = ctypes.c_longlong
    return sum(library.fog_test_calls(name) for name in (b"MPI_Isend", b"MPI_Issend"))


def leave() -> int:
    """Ranks 0 and 1 exchange a message, then rank 0 ends; returns how many messages this rank sends afterwards."""
    from fog_pg import _C

    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    tensor = torch.ones(4)
    if rank == 0:
        dist.send(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
    before = sends()
    store.set(f"counted/{rank}", "1")
    store.wait([f"counted/{each}" for each in range(dist.get_world_size())])
    if rank == 0:
        _C.shutdown()
        store.set("gone", "1")
    store.wait(["gone"])
    return sends() - before


def test_goodbyes_go_to_those_that_were_messaged(new_world: Callable[..., World], tmp_path: Path) -> None:
    """Rank 0 says goodbye to rank 1, which answers; the others get no message."""
    library = compile_wrapper("mpi_counter.c", tmp_path)
    world = new_world(4, environment=APART | {"FOG_MPI_LIBRARY": library, "FOG_CONFIRM": "0"})
    assert world.run(leave) == [1, 1, 0, 0]
