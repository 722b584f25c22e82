"""Faults of what a process communicates with: its group is aborted, its Store does not answer any more."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import torch.distributed as dist


def abort(group: dist.ProcessGroup | None = None) -> None:
    """Aborts a group in this process only: its operations in flight fail, and it takes no more.

    The group is not destroyed, so the training notices it by the errors of its operations, and other ranks by the
    absence of this one.

    Args:
        group: By default that of all ranks.

    Raises:
        TypeError: `group` is no group of this process.
        RuntimeError: There is no default group.
    """
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError("there is no group to abort: init_process_group was not called")
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup of this process, got {type(group).__name__}")
    group.abort()


def lose_store(store: dist.Store | None = None) -> int:
    """Breaks this process's connections to a TCPStore, as if the host that serves it had gone; returns how many.

    If this process serves the Store itself, those of all clients break. From now on requests raise
    `torch.distributed.DistNetworkError`.

    Args:
        store: A TCPStore, or a PrefixStore of one. By default that of the default group.

    Raises:
        TypeError: It is no TCPStore.
        RuntimeError: There is no default group.
    """
    if store is None:
        if not dist.is_initialized():
            raise RuntimeError("there is no Store to lose: init_process_group was not called")
        store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        raise TypeError(f"store must be a TCPStore or a PrefixStore of one, got {type(store).__name__}")
    broken = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile; or not connected
            if not str(Path("/proc/self/fd", name).readlink()).startswith("socket:"):
                continue
            broken += _shut_down(int(name), store.port)
    return broken


def _shut_down(descriptor: int, port: int) -> bool:
    """Shuts a TCP connection down that has this port at one end; returns whether it has."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if (
            connection.family not in (socket.AF_INET, socket.AF_INET6)
            or connection.type != socket.SOCK_STREAM
        ):
            return False
        # One that listens stays: the thread that serves the Store does not expect its end.
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        if port not in (connection.getpeername()[1], connection.getsockname()[1]):
            return False
        connection.shutdown(socket.SHUT_RDWR)
        return True
