"""Tests of the Stores of a job that may lose the host of the one in use: begin, move, find; what is wrong is named soon.

tests/test_keep_going.py has hosts that are lost while ranks train.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch.distributed as dist
from fogdist.elastic.tickets import _objects, publish_object

from fog_pg import _standby, environment
from fog_pg._store import connections

SOON = 10.0


class Server:
    """A Store of a host, which ends with this object's `end`."""

    def __init__(self, port: int = 0) -> None:
        self.store: dist.TCPStore | None = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False
        )
        self.port = self.store.port
        self.address = f"127.0.0.1:{self.port}"

    def end(self) -> None:
        self.store = None


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., _standby.Standby]:
    """Begins as a rank of a job, with the Store of the first server."""

    def call(
        *addresses: str, rank: int = 0, name: str = "a job", secret: str = "the secret of a job"
    ) -> _standby.Standby:
        monkeypatch.setenv("FOG_STORES", ",".join(addresses))
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
        monkeypatch.setenv("FOG_JOB_SECRET", secret)
        port = int(addresses[0].rpartition(":")[2])
        first = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        found = _standby.begin(dist.PrefixStore("of torch", first), rank)
        assert found is not None
        return found

    return call


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_without_the_variable_there_is_no_standby(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOG_STORES", raising=False)
    assert _standby.begin(dist.HashStore(), 0) is None and _standby.find() is None


@pytest.mark.parametrize("text", ["a", "a:", ":1", "a:1,,b:1", "a:0", "a:65536", "fe80::1:29500", "a:1 b:1"])
def test_lists_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="FOG_STORES: got '.*'; allowed are lists host:port,host:port"):
        environment.STORES.get({"FOG_STORES": text})
    assert environment.STORES.get({"FOG_STORES": "a:1,[fe80::1]:2"}) == "a:1,[fe80::1]:2"


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1", "no.such.host.invalid"])
def test_a_standby_that_is_not_there_is_named_on_all_ranks(
    begin: Callable[..., _standby.Standby], host: str
) -> None:
    """It was never started, does not answer, or has no such name."""
    first, missing = Server(), f"{host}:{free_port()}"
    started = time.monotonic()
    for rank in range(2):
        with pytest.raises(
            RuntimeError, match=f"FOG_STORES: the Store at {missing} cannot be reached; is it started"
        ):
            begin(first.address, missing, rank=rank)
    assert time.monotonic() - started < SOON


def close_all(listener: socket.socket, seconds: float) -> None:
    """Accepts connections and closes them, for some time."""
    listener.settimeout(0.05)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(TimeoutError):
            listener.accept()[0].close()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::ffff:127.0.0.1]"])
@pytest.mark.parametrize("closes", [0.0, 0.8])
def test_a_server_that_accepts_and_does_not_answer_is_named(
    begin: Callable[..., _standby.Standby], monkeypatch: pytest.MonkeyPatch, host: str, closes: float
) -> None:
    """As another service may do, or one that begins just now. Connections that were there before stay."""
    monkeypatch.setattr(_standby, "_START_TIMEOUT", 1.0)
    first = Server()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = silent.getsockname()
        closing = threading.Thread(target=close_all, args=(silent, closes))
        with socket.create_connection(place) as before:
            closing.start()
            address = f"{host}:{place[1]}"
            with pytest.raises(RuntimeError, match=f"the Store at {re.escape(address)} cannot be reached"):
                begin(first.address, address)
            assert before.getpeername() == place
        closing.join()


def test_a_store_of_another_job_is_named(begin: Callable[..., _standby.Standby]) -> None:
    servers = [Server(), Server(), Server()]
    begin(servers[0].address, servers[1].address)
    begin(servers[0].address, servers[1].address)  # the same job makes its group again
    for values, which in (
        ({"secret": "the secret of another"}, "the same name"),
        ({"name": "b"}, "the name 'a job'"),
    ):
        for rank in range(2):
            with pytest.raises(
                RuntimeError,
                match=f"{servers[1].address} belongs to another job, of {which}; this job's name",
            ):
                begin(servers[2].address, servers[1].address, rank=rank, **values)
        servers[2] = Server()


def test_the_next_store_that_answers_takes_over(begin: Callable[..., _standby.Standby]) -> None:
    """With the calls of the function that follows, once for each move."""
    servers = [Server() for _ in range(4)]
    addresses = [server.address for server in servers]
    standby = begin(*addresses)
    assert not standby.move_if_lost()
    moved = threading.Semaphore(0)
    standby.follow(moved.release)
    standby.store.set("key", "first")
    servers[1].end()
    servers[0].end()
    assert moved.acquire(timeout=SOON) and not standby.store.check(["key"])
    standby.store.set("key", "third")
    assert servers[2].store is not None and servers[2].store.get("fog/job/key") == b"third"
    back = Server(servers[0].port)  # its host has been replaced
    servers[2].end()
    assert moved.acquire(timeout=SOON) and servers[3].store is not None
    standby.store.set("key", "fourth")
    assert servers[3].store.get("fog/job/key") == b"fourth" and not back.store.check(["fog/job/key"])
    assert _standby.is_of_a_job(back.address)  # hosts that start now join it
    servers[3].end()
    assert moved.acquire(timeout=SOON) and not standby.store.check(["key"])
    standby.store.set("list", addresses[3])
    standby.renew_list()
    assert standby.moves == 3
    back.end()
    with pytest.raises(
        RuntimeError, match=f"none of the job's Stores answers .*: {addresses[3]}, {addresses[0]}, "
    ):
        standby.move_if_lost()
    standby.end()
    assert not moved.acquire(blocking=False)


def test_a_process_that_ends_does_not_wait_for_all_silent_hosts(
    begin: Callable[..., _standby.Standby], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = [Server() for _ in range(4)]
    standby = begin(*(server.address for server in servers))
    tried = threading.Event()

    def silent(_: str) -> None:
        tried.set()
        time.sleep(1.0)

    monkeypatch.setattr(_standby, "_connected", silent)
    standby.follow(lambda: None)
    servers[0].end()
    assert tried.wait(SOON)
    started = time.monotonic()
    standby.end()
    assert time.monotonic() - started < 2.0


def test_ranks_that_notice_a_loss_at_other_times_move_to_the_same_store(
    begin: Callable[..., _standby.Standby], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host of the lost one, and that of the next one after it, have been replaced before the last rank looks."""
    connected = _standby._connected
    monkeypatch.setattr(_standby, "_connected", lambda address, *_: connected(address, 30.0))
    servers = [Server() for _ in range(3)]
    ranks = [begin(*(server.address for server in servers), rank=rank) for rank in range(3)]
    ranks[0].begin_use(1, answers=False)
    servers[0].end()
    assert ranks[0].move_if_lost()
    servers[0] = Server(servers[0].port)
    assert ranks[1].move_if_lost()
    ranks[0].store.set("key", "second")
    assert ranks[1].store.get("key") == b"second"
    servers[1].end()
    assert ranks[0].move_if_lost()
    ranks[0].begin_use(2, answers=False)
    servers[1] = Server(servers[1].port)
    assert ranks[1].move_if_lost() and ranks[2].move_if_lost()
    ranks[0].store.set("key", "third")
    assert ranks[1].store.get("key") == ranks[2].store.get("key") == b"third"


def test_a_connection_that_is_lost_is_made_again(begin: Callable[..., _standby.Standby]) -> None:
    first, second = Server(), Server()
    standby = begin(first.address, second.address)
    standby.store.set("key", "value")
    standby.begin_use(1, answers=False)
    for connection in connections(standby.store):
        if connection.getpeername()[1] == first.port:
            connection.shutdown(socket.SHUT_RDWR)
    assert standby.move_if_lost() and standby.store.get("key") == b"value"


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_all_ranks_go_to_the_store_of_the_rank_that_answers(
    begin: Callable[..., _standby.Standby], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has found another one, as after a cut; a server that did not answer is told later."""
    monkeypatch.setattr(_standby, "_TELL_PERIOD", 0.1)
    servers = [Server() for _ in range(4)]
    addresses = [server.address for server in servers]
    ranks = [begin(*addresses) for _ in range(3)]
    calls = [threading.Semaphore(0) for _ in ranks]
    for at, (rank, called) in enumerate(zip(ranks, calls, strict=True)):
        rank._move(addresses[at], _standby._connected(addresses[at]))
        rank.follow(called.release)
    servers[3].end()
    ranks[1].begin_use(5, answers=True)
    for place in (0, 2):
        assert calls[place].acquire(timeout=SOON)
        ranks[place].store.set("key", str(place))
        assert servers[1].store is not None and servers[1].store.get("fog/job/key") == str(place).encode()
    again = Server(servers[3].port)
    until(lambda: again.store is not None and again.store.check(["fog/job/use"]))
    ranks[2].begin_use(4, answers=True)  # it answered in an earlier epoch
    ranks[0].begin_use(6, answers=True)
    ranks[0].tell_again()
    assert calls[0].acquire(timeout=SOON)
    until(lambda: again.store is not None and again.store.get("fog/job/use").startswith(b"000000000006"))
    for rank in ranks:
        rank.end()
    assert not calls[1].acquire(blocking=False)


def test_a_store_is_used_again_after_none_has_answered(begin: Callable[..., _standby.Standby]) -> None:
    server, moved = Server(), threading.Semaphore(0)
    standby = begin(server.address)
    standby.follow(moved.release)
    server.end()
    assert not moved.acquire(timeout=2.0)
    back = Server(server.port)
    assert moved.acquire(timeout=SOON) and not standby.store.check(["key"])
    standby.end()
    back.end()


def test_a_list_that_lacks_hosts_or_has_another_order_moves_nobody(
    begin: Callable[..., _standby.Standby],
) -> None:
    servers = [Server() for _ in range(3)]
    addresses = [server.address for server in servers]
    standby = begin(*addresses)
    standby._move(addresses[2], _standby._connected(addresses[2]))
    standby.begin_use(1, answers=True)
    for told in (addresses[0], ",".join(reversed(addresses))):
        standby.store.set("list", told)
        standby.renew_list()
        assert not standby._go_along() and standby.moves == 1
        assert {*standby._addresses} == {*addresses}
    servers[2].end()
    assert standby.move_if_lost()


class SlowStore(dist.HashStore):
    """After its first read of a key, another rank is faster."""

    is_first = True

    def get(self, key: str) -> bytes:
        value = super().get(key)
        if self.is_first:
            self.is_first = False
            publish_object(self, "another", ["b"])
        return value


def test_ranks_that_tell_objects_at_the_same_time_lose_none() -> None:
    store = SlowStore()
    for name in ("first", "second"):
        publish_object(store, name, ["a"])
    assert _objects(store) == {"first": ["a"], "second": ["a"], "another": ["b"]}


def test_a_server_that_belongs_to_no_job_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    monkeypatch.setenv("FOG_STORES", server.address)
    monkeypatch.setenv("FOG_HOST_TIMEOUT", "4")
    monkeypatch.setattr(_standby, "_ANSWER_TIMEOUT", -4.0)
    monkeypatch.setattr(_standby, "_connected", partial(_standby._connected, timeout=SOON))
    assert _standby.find() is not None
    assert _standby.is_of_a_job(server.address) is False


def test_a_process_that_joins_finds_the_store_in_use(
    begin: Callable[..., _standby.Standby], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = [Server() for _ in range(4)]
    addresses = [server.address for server in servers]
    begin(*addresses)
    assert [_standby.is_of_a_job(address) for address in addresses] == [True] * 4
    assert _standby.is_of_a_job(Server().address) is False
    for server, epoch, at in zip(servers[1:], "132", (2, 1, 0), strict=True):
        assert server.store is not None
        server.store.set("fog/job/use", f"{epoch} {addresses[at]}")
    for server, mark in zip(servers, "123", strict=False):  # ranks use, or have used, the first three
        assert server.store is not None
        server.store.set("fog/job/mark", mark)
    with monkeypatch.context() as older:
        older.setenv("FOG_STORES", addresses[3])  # a list without the one in use
        found = _standby.find()
    assert found is not None and found.store.get("mark") == b"1"
    # That of the rank that answers, and the one to which ranks moved last.
    for place, mark in ((1, b"2"), (2, b"3")):
        found = _standby.find()
        assert found is not None and found.store.get("mark") == mark
        assert _standby.is_of_a_job(servers[0].address)
        servers[place].end()
    servers[0].end()
    servers[0] = Server(servers[0].port)  # its host has been replaced
    monkeypatch.setenv("FOG_HOST_TIMEOUT", "4")
    monkeypatch.setattr(_standby, "_ANSWER_TIMEOUT", 0.0)
    threading.Timer(
        1.0, lambda: servers[3].store.set("fog/job/mark", "4")
    ).start()  # ranks move there meanwhile
    found = _standby.find()
    assert found is not None and found.store.get("mark") == b"4"
    servers[3].end()
    found = _standby.find()  # nobody says where the job is
    assert found is not None and not found.store.check(["mark"])
    for server in servers:
        server.end()
    assert _standby.is_of_a_job(addresses[0]) is None
    with pytest.raises(RuntimeError, match="FOG_STORES: none of the job's Stores answers: 127.0.0.1:"):
        _standby.find()
