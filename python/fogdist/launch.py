"""Connects the ranks of a job, with rank, size and address from torchrun or an MPI launcher.

Under torchrun, or any launcher that sets RANK and WORLD_SIZE, this is torch's own environment rendezvous. mpiexec and
srun do not set these variables. There the launcher gives each process its rank, and rank 0 opens a TCPStore and sends
its address to the other ranks over MPI.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

import fog_pg  # registers the backend
from fog_pg import _extension, _settings, environment
from fog_pg._timeouts import within_reach

__all__ = ["connect"]


def connect(timeout: timedelta = default_pg_timeout) -> None:
    """Makes the default process group with backend fog from the launcher's environment.

    A process that no launcher started becomes the only rank of a group of one.

    Args:
        timeout: Of the rendezvous and of every operation of the group. Default: torch's own, 30 minutes.

    Raises:
        ImportError: If the extension or an MPI library is missing.
        torch.distributed.DistBackendError: If the ranks do not come together within ``timeout``.
    """
    fog_pg.register()
    timeout = within_reach(timeout)
    if environment.RANK.is_set() and environment.WORLD_SIZE.is_set():
        dist.init_process_group("fog", timeout=timeout)
        return
    extension = _extension.load()
    if _settings.launcher_world() is None:
        dist.init_process_group("fog", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    rank, size = extension.start_from_launcher(timeout)
    store = _store_of_rank_zero(extension, rank, size, timeout)
    dist.init_process_group("fog", store=store, rank=rank, world_size=size, timeout=timeout)


def _store_of_rank_zero(extension: object, rank: int, size: int, timeout: timedelta) -> dist.TCPStore:
    store = None
    address = ""
    if rank == 0:
        host = environment.MASTER_ADDR.get() or _own_address(size)
        port = environment.MASTER_PORT.get()  # 0: any free one
        store = dist.TCPStore(host, port, size, is_master=True, timeout=timeout, wait_for_workers=False)
        address = f"{host} {store.port}"
    host, port = extension.broadcast_from_rank_zero(address, timeout).split()  # type: ignore[attr-defined]
    if store is None:
        store = dist.TCPStore(host, int(port), size, is_master=False, timeout=timeout)
    # The rest of the program may read these variables, as under torchrun.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR=host, MASTER_PORT=port)
    for variable in (environment.MPICH_LOCAL_RANK, environment.OPEN_MPI_LOCAL_RANK):
        if variable.is_set():
            os.environ.setdefault("LOCAL_RANK", str(variable.get()))
    return store


def _own_address(size: int) -> str:
    """Returns an address of this host that the other ranks can reach."""
    if size in (environment.MPICH_LOCAL_SIZE.get(), environment.OPEN_MPI_LOCAL_SIZE.get()):
        return "127.0.0.1"
    name = socket.getfqdn()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        name = socket.gethostname()
    return name
