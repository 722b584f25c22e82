"""Tests of how a state travels to a process of another host: whole, to one that knows the secret, or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from fogdist import state_transfer
from fogdist.state_transfer import Copy, Offer, Source, read_file

SOON = 20.0
STATE = {"one": {"values": torch.arange(300_000.0), "steps": 7, "names": ["a", "b"]}}


class Secret:
    """What a process knows: proofs of one transfer by one secret."""

    def __init__(self, secret: str, ticket: int = 1) -> None:
        self.key, self.ticket = secret.encode(), ticket

    def __call__(self, purpose: str, *parts: str) -> str:
        text = "\0".join((purpose, str(self.ticket), *parts))
        return hmac.new(self.key, text.encode(), hashlib.sha256).hexdigest()


@pytest.fixture
def offer() -> Iterator[Offer]:
    made = Offer(STATE, [], Secret("right"))
    yield made
    made.close()
    until_over(made)


def until_over(offer: Offer) -> None:
    deadline = time.monotonic() + SOON
    while offer.is_wanted:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_state_arrives_whole(offer: Offer) -> None:
    """As it was when it was offered; the rank sees the connection until the process closes it."""
    before = STATE["one"]["values"].clone()
    source = Source(offer.place, Secret("right"))
    state = source.read(timedelta.max.total_seconds())
    assert state is not None
    assert torch.equal(state["one"]["values"], before)
    assert (state["one"]["steps"], state["one"]["names"]) == (7, ["a", "b"])
    time.sleep(0.1)
    assert offer.is_wanted
    source.close()
    until_over(offer)


def test_a_rank_with_many_open_files_gives_its_state() -> None:
    """Regression: it waited for the process by select(), which knows no descriptors above 1,023."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(1024)]
    try:
        test_a_state_arrives_whole(Offer(STATE, [], Secret("right")))
    finally:
        for file in opened:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_nobody_changes_or_executes_the_file_of_a_state() -> None:
    copy = Copy(STATE, None)
    assert read_file(os.getpid(), copy.file, SOON) is not None
    seals = fcntl.fcntl(copy.file, fcntl.F_GET_SEALS)
    for seal in (fcntl.F_SEAL_WRITE, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL):
        assert seals & seal, seals
    assert os.fstat(copy.file).st_mode & 0o111 == 0
    copy.close()


def test_tensors_may_change_after_the_offer() -> None:
    values = torch.ones(1000)
    offer = Offer({"values": values}, ["127.0.0.1"], Secret("right"))
    values.zero_()
    source = Source(offer.place, Secret("right"))
    state = source.read(SOON)
    assert state is not None and state["values"].eq(1).all()
    source.close()
    until_over(offer)


@pytest.mark.parametrize("wrong", [Secret("wrong"), Secret("right", 2)], ids=["secret", "ticket"])
def test_a_stranger_gets_nothing(offer: Offer, wrong: Secret) -> None:
    """The port stays open for the process that the state is for."""
    with pytest.raises(OSError):
        Source(offer.place, wrong).read(SOON)
    with socket.create_connection(("127.0.0.1", offer.place["port"]), SOON) as silent:
        assert len(silent.recv(100)) == 16
        source = Source(offer.place, Secret("right"))
        assert source.read(SOON) is not None
        source.close()


@pytest.mark.parametrize("at", [-1, 5000, 0], ids=["proof", "data", "size"])
def test_a_state_that_was_changed_on_its_way_is_not_loaded(offer: Offer, at: int) -> None:
    """By one that passes everything on, and changes one byte after the proofs of the beginning."""
    with (
        relay(offer.place["port"], at) as port,
        pytest.raises(ConnectionRefusedError, match="does not know the job's secret"),
    ):
        Source({"addresses": ["127.0.0.1"], "port": port}, Secret("right")).read(SOON)


@contextlib.contextmanager
def relay(port: int, at: int) -> Iterator[int]:
    """Passes one connection on, and changes the byte at that place of all that the rank sends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client = listener.accept()[0]
            server = socket.create_connection(("127.0.0.1", port))
            with client, server:
                client.sendall(server.recv(16, socket.MSG_WAITALL))
                server.sendall(client.recv(80, socket.MSG_WAITALL))
                client.sendall(server.recv(64, socket.MSG_WAITALL))
                head = server.recv(8 + 64, socket.MSG_WAITALL)
                whole = bytearray(
                    head + server.recv(int.from_bytes(head[:8], "big") + 64, socket.MSG_WAITALL)
                )
                whole[at] ^= 1
                with contextlib.suppress(OSError):  # it may have refused the size
                    client.sendall(whole)
                    client.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(SOON)
        assert not thread.is_alive()


def test_a_rank_that_closes_its_offer_ends_the_connection() -> None:
    """Before the process has come, and after."""
    offer = Offer(STATE, [], Secret("right"))
    offer.close()
    until_over(offer)
    with pytest.raises(OSError):
        Source(offer.place, Secret("right")).read(SOON)


def test_nobody_waits_for_a_process_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the copy kept for it."""
    monkeypatch.setattr(state_transfer, "_PATIENCE", 0.1)
    offer = Offer(STATE, [], Secret("right"))
    until_over(offer)
    assert not any("fog_state" in name for name in files())
    assert offer._state is None


def test_a_stranger_that_sends_byte_by_byte_keeps_no_port_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_transfer, "_PATIENCE", 1.0)
    offer = Offer(STATE, [], Secret("right"))
    begin = time.monotonic()
    with (
        socket.create_connection(("127.0.0.1", offer.place["port"]), SOON) as stranger,
        contextlib.suppress(OSError),
    ):
        while offer.is_wanted:
            assert time.monotonic() < begin + 10.0
            stranger.sendall(b"x")
            time.sleep(0.2)
    assert time.monotonic() < begin + 5.0


def test_the_proof_of_a_state_does_not_keep_the_process_waiting(
    offer: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes seconds for a large state. So it is made before the size is told, for which the process waits longest."""
    may_go_on = threading.Event()
    digest = state_transfer._digest

    def slow(file: int, size: int) -> str:
        assert may_go_on.wait(SOON)
        return digest(file, size)

    monkeypatch.setattr(state_transfer, "_digest", slow)
    prove = Secret("right")
    with socket.create_connection(("127.0.0.1", offer.place["port"]), SOON) as process:
        nonces = process.recv(16, socket.MSG_WAITALL).hex(), "00" * 16
        process.sendall(bytes(16) + prove("fetches", *nonces).encode())
        assert process.recv(64, socket.MSG_WAITALL) == prove("gives", *nonces).encode()
        process.settimeout(0.5)
        with pytest.raises(TimeoutError):
            process.recv(8)
        may_go_on.set()
        process.settimeout(SOON)
        (size,) = state_transfer._SIZE.unpack(state_transfer._received(process, 8))
        state_transfer._received(process, 64 + size + 64)  # raises if less comes


def files() -> list[str]:
    found: list[Any] = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found
