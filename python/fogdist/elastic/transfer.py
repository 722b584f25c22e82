"""How the state of a rank travels to a process that joins: a copy of it, while the rank trains on.

The process connects with a thread of the rank, both prove that they know the job's secret, and the thread sends the copy.
The connection also shows each side that the other one still runs.

A rank gives whatever its state dicts hold, and the process reads it without running code that the state names
(`fogdist.nested.plain`).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import mmap
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import torch
import torch.distributed as dist

from fog_pg import environment
from fog_pg._store import watch_silence
from fog_pg._timeouts import LONGEST
from fogdist.nested import from_plain, plain
from fogdist.streams import Mark

_log = logging.getLogger("fogdist")

# Proves something that several texts say; the proof of one purpose is none for another.
Prove = Callable[..., str]

# The pause between two samples of a process, in seconds.
_LIFE_PAUSE = 0.5
# A process that was promised a state comes for it within this time, in seconds.
_PATIENCE = 15.0
# Who connects proves within this time that it knows the secret; who does not keeps the process waiting no longer.
_GREETING_TIMEOUT = 2.0
_NONCE_BYTES = 16
_PROOF_BYTES = 64  # in hexadecimal digits
_SIZE = struct.Struct("!q")  # as system calls take it


class Offer:
    """A copy of a state that one process may fetch, at a port of its own, where a thread waits for it.

    Args:
        state: The state, of which this makes a copy at once.
        addresses: Those of this host for the others; none if only this host can come.
        prove: Proves that this process knows the secret, for this transfer.

    Attributes:
        place: Where the process finds it.
        is_wanted: Whether the process may still come, or is connected.
    """

    def __init__(self, state: Mapping[str, Any], addresses: Sequence[str], prove: Prove) -> None:
        self._devices: set[torch.device] = set()
        self._state: Any = plain(state, self._copied)
        # The thread reads copies on devices by other streams than those that they are made on.
        self._marks = [Mark(device) for device in self._devices]
        addresses = list(addresses) or ["127.0.0.1"]
        self._prove = prove
        self._nonces = "", ""
        self._is_over = threading.Event()
        self.is_wanted = True
        with contextlib.ExitStack() as opened:  # closed again where there are too many files or threads
            self._listener = opened.enter_context(_listener(addresses))
            self.place = {"addresses": addresses, "port": self._listener.getsockname()[1]}
            self._file = opened.enter_context(_anonymous_file())
            threading.Thread(target=self._serve, daemon=True).start()
            opened.pop_all()

    def close(self) -> None:
        """Ends it as soon as the state is sent, without waiting for that."""
        self._is_over.set()

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        self._devices.add(tensor.device)
        return tensor.detach().clone()

    def _serve(self) -> None:
        try:
            with self._file as file:
                with self._listener:
                    connection = self._accepted()
                with connection:
                    self._write(file)
                    self._send(connection, file)
                    while not self._is_over.is_set() and not _has_news(connection, _LIFE_PAUSE):
                        pass
        except OSError as error:  # TimeoutError too
            _log.info("a process that joins has not fetched the state: %s", error)
        finally:
            self._state = None
            self.is_wanted = False

    def _write(self, file: IO[bytes]) -> None:
        """Writes the state; the file is empty if that fails."""
        try:
            for mark in self._marks:
                mark.wait()
            torch.save(self._state, file)
            file.flush()
        except Exception:
            _log.exception("the state for a process that joins could not be written")
            file.truncate(0)
        self._state = None

    def _accepted(self) -> socket.socket:
        """Returns the connection of the process, which has proved that it knows the secret."""
        end = time.monotonic() + _PATIENCE
        while not self._is_over.is_set():
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"nobody came within {_PATIENCE:g} s")
            if not _has_news(self._listener, min(left, _LIFE_PAUSE)):
                continue
            connection = _prepared(self._listener.accept()[0])
            try:
                nonce = secrets.token_bytes(_NONCE_BYTES)
                connection.sendall(nonce)
                greeting = _received(connection, _NONCE_BYTES + _PROOF_BYTES, min(left, _GREETING_TIMEOUT))
                self._nonces = nonce.hex(), greeting[:_NONCE_BYTES].hex()
                if hmac.compare_digest(
                    greeting[_NONCE_BYTES:], self._prove("fetches", *self._nonces).encode()
                ):
                    connection.sendall(self._prove("gives", *self._nonces).encode())
                    connection.settimeout(environment.HOST_TIMEOUT.get())
                    return connection
            except OSError:
                pass
            connection.close()
        raise ConnectionAbortedError("another rank answers")

    def _send(self, connection: socket.socket, file: IO[bytes]) -> None:
        size = os.fstat(file.fileno()).st_size
        # Before the size is told: the process waits longest for that.
        proof = self._prove("state", *self._nonces, _digest(file, size)).encode()
        connection.sendall(_SIZE.pack(size) + self._prove("size", *self._nonces, str(size)).encode())
        connection.sendfile(file, 0)
        connection.sendall(proof)


class Source:
    """The connection of a process with the rank that gives it a state, between hosts.

    Args:
        place: Of an `Offer`.
        prove: Proves that this process knows the secret, for this transfer.
    """

    def __init__(self, place: Mapping[str, Any], prove: Prove) -> None:
        self._prove = prove
        self._connection = _prepared(_connected(place["addresses"], place["port"]))

    def read(self, timeout: float) -> dict[str, Any] | None:
        """Returns the state; None if the rank could not write it.

        Args:
            timeout: For how long the rank may take to write it, in seconds.

        Raises:
            OSError: The connection broke, or the other side has proved nothing.
        """
        connection, nonce = self._connection, secrets.token_bytes(_NONCE_BYTES)
        nonces = _received(connection, _NONCE_BYTES).hex(), nonce.hex()
        connection.sendall(nonce + self._prove("fetches", *nonces).encode())
        self._check(_received(connection, _PROOF_BYTES), "gives", *nonces)
        connection.settimeout(min(timeout, LONGEST.total_seconds()))
        (size,) = _SIZE.unpack(_received(connection, _SIZE.size))
        connection.settimeout(environment.HOST_TIMEOUT.get())
        self._check(_received(connection, _PROOF_BYTES), "size", *nonces, str(size))
        with _anonymous_file() as file:
            file.truncate(size)
            if size:
                with mmap.mmap(file.fileno(), size) as memory, memoryview(memory) as whole:
                    _receive_into(connection, whole)
            self._check(_received(connection, _PROOF_BYTES), "state", *nonces, _digest(file, size))
            return loaded(file) if size else None

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()

    def _check(self, given: bytes, *what: str) -> None:
        if not hmac.compare_digest(given, self._prove(*what).encode()):
            raise ConnectionRefusedError("the other side does not know the job's secret")


def loaded(file: IO[bytes]) -> dict[str, Any]:
    """Returns the state in a whole file, in the memory of the host.

    Raises:
        torch.distributed.DistBackendError: It cannot be read, for example because of a type in it.
    """
    try:
        file.seek(0)
        state: dict[str, Any] = from_plain(torch.load(file, weights_only=True, map_location="cpu"))
    except Exception as error:
        raise dist.DistBackendError(f"its state cannot be read: {error}") from error
    return state


def _listener(addresses: Sequence[str]) -> socket.socket:
    """Returns a socket that listens at the only address, or at all addresses of the machine."""
    if len(addresses) == 1:
        family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
        return socket.create_server((addresses[0], 0), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _connected(addresses: Sequence[str], port: int) -> socket.socket:
    """Returns a connection to the first address that answers."""
    error: OSError = ConnectionRefusedError("no address is known")
    timeout = environment.HOST_TIMEOUT.get() / max(len(addresses), 1)
    for address in addresses:
        try:
            return socket.create_connection((address, port), timeout)
        except OSError as its:
            error = its
    raise error


def _prepared(connection: socket.socket) -> socket.socket:
    timeout = environment.HOST_TIMEOUT.get()
    connection.settimeout(timeout)
    watch_silence(connection, timeout)
    return connection


def _received(connection: socket.socket, size: int, within: float | None = None) -> bytes:
    memory = bytearray(size)
    _receive_into(connection, memoryview(memory), within)
    return bytes(memory)


def _receive_into(connection: socket.socket, memory: memoryview, within: float | None = None) -> None:
    """Fills the memory: within that time in all, in seconds, or within the connection's timeout for each part."""
    end, done = None if within is None else time.monotonic() + within, 0
    while done < len(memory):
        if end is not None:
            if (left := end - time.monotonic()) <= 0:
                raise TimeoutError(f"only {done} of {len(memory)} bytes came within {within:g} s")
            connection.settimeout(left)
        count = connection.recv_into(memory[done:])
        if not count:
            raise ConnectionResetError("the other side has closed the connection")
        done += count


def _digest(file: IO[bytes], size: int) -> str:
    if not size:
        return hashlib.sha256().hexdigest()
    with mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as memory:
        return hashlib.sha256(memory).hexdigest()


def _has_news(waited_for: socket.socket, patience: float) -> bool:
    """Waits that long for a connection, or for the end of one on which nothing more comes; returns whether it came."""
    poll = select.poll()
    poll.register(waited_for, select.POLLIN)
    return bool(poll.poll(1000.0 * patience))


def _anonymous_file() -> IO[bytes]:
    """Returns a file without a name, in memory."""
    return os.fdopen(os.memfd_create("fog_state"), "w+b")
