"""The connections of this process to the job's TCPStore, which torch has no access to."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

# Of <netinet/tcp.h>, for Python 3.10.
_TCP_USER_TIMEOUT = 18
# Probes of an idle connection before it counts as broken.
_PROBES = 9
# The pause before connections of a server that does not answer are broken again, in seconds.
_BREAK_PAUSE = 0.1


def connections(store: dist.Store) -> Iterator[socket.socket]:
    """Yields the connections to a TCPStore, or to one below a PrefixStore, and those of clients if it is served here.

    For another Store there are none. They are as in `_connections_of`.
    """
    import torch.distributed as dist

    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        yield from _connections_of(store.port)


@contextlib.contextmanager
def answer_within(seconds: float, host: str, port: int) -> Iterator[None]:
    """Breaks the connections that this process makes to a server meanwhile, from this time on.

    torch waits without an end for the first answer of a server that accepts a connection and says nothing. When its own
    time is over, it makes no further one.

    Args:
        seconds: The time.
        host: The server's address, as a number.
        port: The server's.
    """
    before = {connection.getsockname() for connection in _connections_of(port)}
    done = threading.Event()

    def is_new(connection: socket.socket) -> bool:
        at, at_port = connection.getpeername()[:2]
        is_its = (_plain(at), at_port) == (_plain(host), port)
        return is_its and connection.getsockname() not in before

    def end() -> None:
        pause = seconds
        while not done.wait(pause):
            pause = _BREAK_PAUSE
            with contextlib.suppress(OSError):  # no descriptor is left, or a connection has just ended
                for connection in _connections_of(port):
                    if is_new(connection):
                        connection.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=end, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def limit_silence(store: dist.Store, seconds: int) -> None:
    """Lets requests to a TCPStore raise `torch.distributed.DistNetworkError` after this time without a sign of its host.

    torch waits for the answer of a host that is cut off as long as TCP repeats what it sent: a quarter of an hour, and
    forever if it sent nothing.

    Args:
        store: As in `connections`.
        seconds: At least 4.
    """
    for connection in connections(store):
        watch_silence(connection, seconds)


def watch_silence(connection: socket.socket, seconds: int) -> None:
    """Makes the system break a connection after this time without a sign of the other host.

    Args:
        connection: Over TCP.
        seconds: At least 4.
    """
    interval, probes = max(1, seconds // 11), min(_PROBES, seconds - 1)
    options = {
        socket.TCP_KEEPIDLE: seconds - probes * interval,
        socket.TCP_KEEPINTVL: interval,
        socket.TCP_KEEPCNT: probes,
        _TCP_USER_TIMEOUT: 1000 * seconds,
    }
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _plain(address: str) -> str:
    """Returns an address without what says that it is one of IPv4, or on which link it is."""
    return address.removeprefix("::ffff:").partition("%")[0]


def _connections_of(port: int) -> Iterator[socket.socket]:
    """Yields the connections of this process with a port; each is closed after its turn, which does not end it."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if _is_of(connection, port):
                    yield connection


def _is_of(connection: socket.socket, port: int) -> bool:
    """Whether a socket is a TCP connection with this port at one end."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return False
    if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # it listens
        return False
    return port in (connection.getpeername()[1], connection.getsockname()[1])
