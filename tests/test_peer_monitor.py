"""Tests of the connections that detect the end of ranks on other hosts, and that only exchanging ranks make."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import World, error_of
from hosts import (
    ACROSS,
    INTERFACE,
    PORT,
    address,
    await_silences,
    emulated_hosts,
    ip,
    move_to_host,
    run_on_hosts,
    silences,
)

# The default of FOG_HOST_TIMEOUT.
SILENCE = 11.0
SOON = 5.0


def backend() -> dist.Backend:
    return dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]


def exchange_along_ring() -> list[float]:
    """Returns the connections from before the exchange."""
    from fog_pg import _C

    before = silences()
    rank, size = dist.get_rank(), dist.get_world_size()
    peers = [((rank + step) % size, 1.0) for step in (1, size - 1)]
    plan = _C.NeighborPlan(rank, size, 0.0, peers, peers)
    for _ in range(3):
        (result,) = backend().neighbor_allreduce_blocking(torch.full((1000,), float(rank)), plan)  # type: ignore[attr-defined]
        assert result.eq(sum(peer for peer, _ in peers)).all()
    return before


def exchange_with_all() -> None:
    """Each rank exchanges with all others at once, first of all."""
    size = dist.get_world_size()
    inputs = [torch.full((3,), float(dist.get_rank()))] * size
    outputs = [torch.zeros(3) for _ in range(size)]
    for _ in range(3):
        dist.all_to_all(outputs, inputs)
    assert [output.tolist() for output in outputs] == [[float(rank)] * 3 for rank in range(size)]


def settle(expected: list[int]) -> None:
    """Waits until each rank has the expected number of connections, and checks that it stays."""
    connections = [SILENCE] * expected[dist.get_rank()]
    time.sleep(0.3)  # two ranks that connect to each other at once have two connections for a moment
    await_silences(connections)
    time.sleep(0.3)
    assert silences() == connections


def test_only_who_is_messaged_is_watched(tmp_path: Path) -> None:
    """On a ring over three hosts, each rank has one neighbor elsewhere; both begin at once and keep one connection."""
    placement = [0, 0, 1, 1, 2, 2]
    calls = [
        ("exchange_along_ring", []),
        ("settle", [[1] * 6]),
        ("exchange_with_all", []),
        ("settle", [[4] * 6]),
        ("exchange_with_all", []),
    ]
    for found in run_on_hosts(tmp_path, placement, __name__, calls):
        assert found[0] == []


def test_mpi_may_speak_with_all(tmp_path: Path) -> None:
    """If MPI sums for a group, all its ranks are connected, because fog cannot check a rank before MPI sends to it."""
    run_on_hosts(tmp_path, [0, 1, 2, 3], __name__, [("settle", [[3] * 4])], environment={"FOG_REDUCE": "mpi"})


def lose_a_stranger(victim: int, moment: str) -> tuple[str, float, str]:
    """The victim dies before it has communicated with any rank.

    Rank 0 waits for it, rank 1 sends it a large message, and the others exchange with it repeatedly.

    Args:
        victim: The rank that dies.
        moment: "before" these calls, or "during" them.

    Returns:
        The error, the seconds until it came, and the error of an operation among the survivors.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    living = dist.new_group([r for r in range(size) if r != victim])
    if rank == victim:
        time.sleep(0.2 if moment == "before" else 1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.0 if moment == "before" else 0.0)
    begin = time.monotonic()

    def speak() -> None:
        if rank == 0:
            dist.recv(torch.zeros(3), victim)
        elif rank == 1:
            dist.isend(torch.ones(1_000_000), victim).wait()  # type: ignore[union-attr]
        else:
            while time.monotonic() < begin + 2 * SOON:
                dist.send(torch.ones(3), victim)
                time.sleep(0.01)

    error = error_of(speak)
    seconds = time.monotonic() - begin
    return error, seconds, error_of(lambda: dist.all_reduce(torch.ones(3), group=living))


@pytest.mark.parametrize(
    ("netmod", "moment"),
    [("UCX", "before"), ("UCX", "during"), pytest.param("OFI", "before", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("placement", [[0, 1, 2, 3], [0, 1, 1, 0]], ids=["alone", "with others"])
def test_a_stranger_that_is_lost(tmp_path: Path, netmod: str, moment: str, placement: list[int]) -> None:
    """MPI would end, or block, a rank that sends to it."""
    found = run_on_hosts(
        tmp_path, placement, __name__, [("lose_a_stranger", [3, moment])], killed=[3], netmod=netmod
    )
    for (result,) in found[:3]:
        error, seconds, later = result
        assert "rank 3 " in error and "was lost: its process ended" in error, result
        assert seconds < SOON and later == "", result


def lose_a_strange_host(victim: int) -> tuple[str, float]:
    """The victim's host vanishes before any communication with it; as in `lose_a_stranger`, without small messages."""
    rank = dist.get_rank()
    if rank == victim:
        ip("link", "set", INTERFACE, "down")
        return "", 0.0
    time.sleep(0.5)
    begin = time.monotonic()
    if rank == 0:
        error = error_of(lambda: dist.recv(torch.zeros(3), victim))
    else:
        error = error_of(dist.isend(torch.ones(1_000_000), victim).wait)  # type: ignore[union-attr]
    return error, time.monotonic() - begin


@pytest.mark.long
def test_a_strange_host_that_vanishes(tmp_path: Path) -> None:
    """The host's address has answered before, so its silence counts as its end."""
    environment = {"FOG_HOST_TIMEOUT": "4"}
    calls = [("lose_a_strange_host", [2])]
    found = run_on_hosts(tmp_path, [0, 1, 2], __name__, calls, environment=environment)
    for ((error, seconds),) in found[:2]:
        assert "rank 2 " in error and "was lost: its host does not answer" in error, error
        assert 2.5 < seconds < 4 + SOON, seconds


@contextmanager
def stderr_in_file() -> Iterator[Path]:
    """Redirects descriptor 2 to a file in this block."""
    with tempfile.NamedTemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield Path(file.name)
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def reach_the_limit(folder: str) -> str:
    """Rank 0 cannot open more descriptors when the two ranks first communicate; returns its log."""
    ready, limited = Path(folder, "ready"), Path(folder, "limited")
    if dist.get_rank() != 0:
        while not limited.exists():
            time.sleep(0.01)
        exchange_with_all()
        # rank 0 does not notice this rank's end, but this rank would notice that of rank 0
        await_silences([SILENCE])
        return ""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with stderr_in_file() as log:
        ready.touch()
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free // 2, hard))  # other threads may close descriptors
        ready.rename(limited)
        try:
            exchange_with_all()
            # The exchange does not wait for the connection. No file can be opened here, so this reads by descriptor 2.
            deadline = time.monotonic() + SOON
            while b"ulimit -n" not in os.pread(2, 1 << 16, 0) and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await_silences([SILENCE])  # the waiting connection is accepted
        return log.read_text()


def test_the_limit_of_descriptors(tmp_path: Path) -> None:
    """One line of the log says so, and everything works."""
    calls = [("reach_the_limit", [str(tmp_path)]), ("exchange_with_all", [])]
    (text, _), _ = run_on_hosts(tmp_path, [0, 1], __name__, calls)
    (line,) = [line for line in text.splitlines() if "ulimit -n" in line]
    assert "world rank 0" in line and "the end of world rank 1" in line, line


def watch_beside_strangers(folder: str, descriptors: int) -> str:
    """Before rank 0 watches rank 1, strangers on that host connect with it and say nothing; returns rank 0's log."""
    from fog_pg import _C

    told, connected = Path(folder, "told"), Path(folder, "connected")
    if dist.get_rank() == 1:
        while not told.exists():
            time.sleep(0.01)
        place = address(0), int(told.read_text())
        strangers = [socket.create_connection(place) for _ in range(descriptors // 2 + 10)]
        connected.touch()
        dist.barrier()
        for stranger in strangers:
            stranger.close()
        return ""
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    with stderr_in_file() as log:
        listener = _C.own_entry().splitlines()[17]
        Path(folder, "port").write_text(listener.split()[0])
        before = len(os.listdir("/proc/self/fd"))
        Path(folder, "port").rename(told)
        while not connected.exists() or len(os.listdir("/proc/self/fd")) < before + descriptors // 8:
            time.sleep(0.01)
        backend().watch([1])  # type: ignore[attr-defined]
        dist.barrier()
        return log.read_text()


def test_strangers_keep_no_rank_from_its_peers(tmp_path: Path) -> None:
    """Regression: their connections counted, and the rank gave up those to its peers for ever."""
    calls = [("watch_beside_strangers", [str(tmp_path), 256])]
    (text,), _ = run_on_hosts(tmp_path, [0, 1], __name__, calls, environment={"FOG_BETWEEN_HOSTS": "tcp"})
    assert "ulimit -n" not in text, text


def nobody_is_watched() -> float:
    """Returns the seconds of a first exchange."""
    begin = time.monotonic()
    exchange_with_all()
    seconds = time.monotonic() - begin
    assert silences() == [], silences()
    return seconds


def test_where_connections_are_refused(tmp_path: Path) -> None:
    """Messages also reach ranks whose listening address cannot be reached."""
    calls = [("nobody_is_watched", []), ("exchange_along_ring", [])]
    found = run_on_hosts(tmp_path, [0, 1, 2], __name__, calls, environment={"FOG_INTERFACE": "lo"})
    assert all(seconds < SOON for seconds, _ in found), found


def join_unheard(name: str) -> None:
    """Joins as one of two hosts; the address on which it listens cannot be reached from the other."""
    move_to_host(name)
    rank = int(os.environ["RANK"])
    ip("link", "add", "unheard", "type", "veth", "peer", "name", "end")
    ip("address", "add", f"10.213.78.{rank + 1}/24", "dev", "unheard")
    for interface in ("unheard", "end"):
        ip("link", "set", interface, "up")
    import fog_pg  # noqa: F401  registers "fog" also where the entry point is not installed

    store = dist.TCPStore(address(0), PORT, 2, rank == 0)
    dist.init_process_group("fog", store=store, rank=rank, world_size=2)


def test_where_nobody_answers(new_world: Callable[..., World]) -> None:
    with emulated_hosts(2) as names:
        environment = {**ACROSS["UCX"], "UCX_NET_DEVICES": INTERFACE, "FOG_INTERFACE": "unheard"}
        world = new_world(2, initialize=False, environment=environment)
        outcomes = world.run_by_rank(join_unheard, [(name,) for name in names])
        assert [outcome.state for outcome in outcomes] == ["returned"] * 2, list(map(str, outcomes))
        assert all(seconds < SOON for seconds in world.run(nobody_is_watched))
        world.run(exchange_with_all)
        world.close()


class LateStore(dist.Store):
    """The job's store, for a rank that gets no core after it knows which hosts can be reached."""

    def __init__(self, store: dist.Store, seconds: float) -> None:
        super().__init__()
        self._store = store
        self._seconds = seconds

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        if "reached" in key:
            time.sleep(self._seconds)
        return value

    def append(self, key: str, value: bytes) -> None:
        self._store.append(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._store.multi_get(keys)
        if any("reached" in key for key in keys):
            time.sleep(self._seconds)
        return values

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        self._store.multi_set(keys, values)

    def has_extended_api(self) -> bool:
        return True

    def add(self, key: str, number: int) -> int:
        return self._store.add(key, number)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._store.wait(keys, *timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=30)


def join_late(rank: int, host: str, late: int, seconds: float) -> None:
    move_to_host(host)
    os.environ.update(ACROSS["UCX"])
    import fog_pg  # noqa: F401

    store: dist.Store = dist.TCPStore(address(0), PORT, 2, rank == 0, timeout=timedelta(seconds=30))
    if rank == late:
        store = LateStore(store, seconds)
    dist.init_process_group("fog", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [2.0] * 3
    dist.destroy_process_group()


def test_a_rank_that_is_late_to_know_the_others_is_not_lost() -> None:
    """The rank listens already; connections that arrive before it knows the other ranks have to wait."""
    spawn = multiprocessing.get_context("spawn")
    with emulated_hosts(2) as names:
        ranks = [
            spawn.Process(target=join_late, args=(rank, name, 1, 1.0)) for rank, name in enumerate(names)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
            process.kill()
            process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
