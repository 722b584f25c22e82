"""Faults of what a process communicates with: its group is aborted, its Store does not answer any more."""

from __future__ import annotations

import contextlib
import socket

import torch.distributed as dist

from fog_pg._store import connections


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
    tcp = store
    while isinstance(tcp, dist.PrefixStore):
        tcp = tcp.underlying_store
    if not isinstance(tcp, dist.TCPStore):
        raise TypeError(f"store must be a TCPStore or a PrefixStore of one, got {type(tcp).__name__}")
    broken = 0
    # What listens stays: the thread that serves the Store does not expect its end.
    for connection in connections(tcp):
        with contextlib.suppress(OSError):  # the other side was faster
            connection.shutdown(socket.SHUT_RDWR)
            broken += 1
    return broken
