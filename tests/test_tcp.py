"""Tests of messages over TCP (FOG_BETWEEN_HOSTS=tcp): data, connections, unknown processes, forked children.

``make test-tcp`` runs the tests of exchanges, collectives and windows over it; test_faults tests losses, and
test_wire_bytes counts its bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import os
import re
import resource
import signal
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import fogdist
import pytest
import torch
import torch.distributed as dist
from harness import RUN_TIMEOUT, World, error_of
from hosts import address, count_connections, data_connections, ip, run_on_hosts
from test_bootstrap import mapped
from test_machines import VARIABLE
from test_rma import PER_MACHINE, exchange_and_check

from fog_pg import _C

pytestmark = pytest.mark.usefixtures("no_shared_memory_left")

KIB, MIB = 1 << 10, 1 << 20
RANKS = 4
TCP = {"FOG_BETWEEN_HOSTS": "tcp"}
APART = {**TCP, "_FOG_LOCAL_LINKS": "0"}
# From small data, which comes with its header, to data of many parts.
SIZES = [4, 8 * KIB, 32 * KIB, 32 * KIB + 4, 300 * KIB, 5 * MIB]
# An unknown process has five seconds to say who it is; the rest is for a busy machine.
UNKNOWN_PATIENCE = 5.0
PATIENCE = 30.0


# At least so much of 1 MiB comes before it is asked for, where the path is long and has carried more than that before.
EARLY = 256 * KIB
# Of <asm-generic/socket.h> and <netinet/tcp.h>.
SO_MAX_PACING_RATE = 47
TCP_INFO = 11


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Ranks of one host that reach each other by TCP."""
    made = World(RANKS, environment={**APART, VARIABLE: str(PER_MACHINE)}, finalizing=1)
    yield made
    made.close()


# --- data ---------------------------------------------------------------------------------------------------


def test_exchanges_without_mpi(world: World) -> None:
    assert world.run(exchange_and_check, SIZES) == [["tcp"] * (RANKS - 1)] * RANKS
    assert world.run(mapped, "libmpi") == [[]] * RANKS


def test_between_hosts(tmp_path: Path) -> None:
    """By default, and without MPI where nothing tells of a fabric."""
    placement, environment = [0, 0, 1, 1], {VARIABLE: str(PER_MACHINE)}
    calls = [("exchange_and_check", [SIZES]), ("mapped", ["libmpi"])]
    found = run_on_hosts(tmp_path, placement, __name__, calls, environment=environment)
    for rank, (ways, libraries) in enumerate(found):
        assert libraries == [], libraries
        others = [host for peer, host in enumerate(placement) if peer != rank]
        assert ways == ["shared memory" if host == placement[rank] else "tcp" for host in others]


def bytes_before_asked(other: int) -> int:
    """Rank 0 sends 1 MiB to a rank that asks for it late; returns how much of it had come before, on that rank."""
    counter = Path("/sys/class/net/eth0/statistics/rx_bytes")
    data = torch.arange(MIB // 4, dtype=torch.float32)
    dist.barrier()
    if dist.get_rank() == 0:
        dist.send(data, other)
        return 0
    before = int(counter.read_text())
    time.sleep(0.5)
    come = int(counter.read_text()) - before
    received = torch.zeros_like(data)
    dist.recv(received, 0)
    assert received.equal(data)
    return come


def send_over_a_long_path() -> list[int]:
    """Exchanges data of all sizes, and returns how much comes early: at first, afterwards, and after data was left."""
    other = 1 - dist.get_rank()
    found = [bytes_before_asked(other)]
    for number in range(3):
        for size in SIZES:
            sent = torch.full((size // 4,), float(number + other))
            received = torch.zeros_like(sent)
            works = [dist.isend(sent, other), dist.irecv(received, other)]
            for work in works:
                work.wait()
            assert received.eq(number + 1 - other).all(), (size, received)
    found.append(bytes_before_asked(other))
    for _ in range(
        5
    ):  # together more than the limit of what comes early, in pieces that come early as a whole
        group = dist.new_group([0, 1])
        for _ in range(8 if other == 1 else 0):
            dist.isend(torch.zeros(EARLY // 8), 1, group=group)
        time.sleep(0.1)  # it is on its way
        dist.destroy_process_group(group)
    return [*found, bytes_before_asked(other)]


def send_to_a_late_rank() -> bool:
    """Returns whether the receiver of data that comes early as a whole had called when its sender's operation ended."""
    store = dist.distributed_c10d._get_default_store()
    data = torch.ones(EARLY // 8)
    if dist.get_rank() == 0:
        dist.send(data, 1)
        return store.check(["called"])
    time.sleep(0.5)
    store.set("called", "")
    dist.recv(data, 0)
    return True


def test_a_long_path(tmp_path: Path) -> None:
    """Data does not wait for its receiver's answer there, also after a receiver has left some; all of it arrives.

    Its sender waits for the receiver: one that ends before would leave nothing to receive.
    """
    calls = [("send_over_a_long_path", ()), ("send_to_a_late_rank", ())]
    found = run_on_hosts(tmp_path, [0, 1], "test_tcp", calls, delay=0.02, environment=TCP)
    first, then, after = found[1][0]
    assert first < EARLY <= min(then, after), found
    assert found[0][1], "send() ended before recv() began"


def test_parts_that_end_within_an_element(world: World) -> None:
    """A connection delivers any number of bytes, and data beyond 4 MiB takes the place of what has been summed."""
    assert world.run(sum_long_ones) == [0] * RANKS


def sum_long_ones() -> int:
    """Returns how many elements of long sums are wrong."""
    rank, numel = dist.get_rank(), 16 * MIB // 8 + 1
    whole = torch.arange(numel) * 1_000_003_000_007  # every byte differs between elements
    given = [whole * (rank + 1)] * RANKS
    output = torch.empty_like(whole)
    wrong = 0
    for _ in range(16):
        dist.reduce_scatter(output, given)
        wrong += int((output != whole * sum(range(1, RANKS + 1))).sum())
    return wrong


def test_messages_overtake_data_that_nobody_takes(world: World) -> None:
    """Data waits in its sender, so neither side's small messages wait for it, and the receiver keeps none of it."""
    assert world.run(send_long_before) == [None] * RANKS


def send_long_before() -> None:
    rank, numel = dist.get_rank(), 16 * MIB // 4
    other = dist.new_group(list(range(RANKS)))
    sends = (
        [dist.isend(torch.full((numel,), float(tag)), 1, tag=tag) for tag in range(4)] if rank == 0 else []
    )
    for _ in range(20):
        x = torch.full((100,), float(rank))
        dist.all_reduce(x, group=other)
        assert x.eq(sum(range(RANKS))).all()
    if rank == 1:
        for tag in reversed(range(4)):
            x = torch.zeros(numel)
            dist.recv(x, 0, tag=tag)
            assert x.eq(tag).all()
    for send in sends:
        assert send is not None
        send.wait()
    dist.barrier()


def put_after_each_wait(rounds: int) -> None:
    """Rank 0 puts into windows of ranks that have just waited in fog, and call it no more until the put is there."""
    fogdist.init()
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    with fogdist.Window(torch.zeros(4)) as window:
        _C.emulate(longest_sleep=timedelta(hours=1))
        for number in range(rounds):
            dist.all_reduce(torch.ones(4))
            if rank == 0:
                time.sleep(0.003)
                window.put(torch.ones(4), timeout=timedelta(seconds=10))
                store.set(f"put {number}", "")
            store.get(f"put {number}")
        _C.emulate()
        dist.barrier()


def test_a_put_after_a_wait_is_served_at_once(world: World) -> None:
    """Regression: until the background thread's sleep ended, nothing woke it for requests of other hosts."""
    assert world.run(put_after_each_wait, 30) == [None] * RANKS


# --- connections --------------------------------------------------------------------------------------------


def exchange_along_ring() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    peers = [((rank + step) % size, 1.0) for step in (1, size - 1)]
    plan = _C.NeighborPlan(rank, size, 0.0, peers, peers)
    backend: Any = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    for numel in (10, 100_000):
        (result,) = backend.neighbor_allreduce_blocking(torch.full((numel,), float(rank)), plan)
        assert result.eq(sum(peer for peer, _ in peers)).all()


def exchange_with_all(times: int = 3) -> None:
    """Each rank exchanges with all others at once."""
    size = dist.get_world_size()
    for numel in (3, 50_000) * times:
        inputs = [torch.full((numel,), float(dist.get_rank()))] * size
        outputs = [torch.zeros(numel) for _ in range(size)]
        dist.all_to_all(outputs, inputs)
        assert all(output.eq(rank).all() for rank, output in enumerate(outputs))


def test_connections_are_made_on_first_use(new_world: Callable[..., World]) -> None:
    """Of two ranks that connect to each other at once, one gives way: one connection for each pair."""
    world = new_world(6, environment=APART)
    assert world.run(count_connections) == [0] * 6
    world.run(exchange_along_ring)
    assert world.run(count_connections) == [2] * 6
    world.run(exchange_with_all)
    assert world.run(count_connections) == [5] * 6


@pytest.mark.parametrize("again", [0, *(pytest.param(again, marks=pytest.mark.long) for again in (1, 2))])
def test_all_connect_at_once(new_world: Callable[..., World], again: int) -> None:
    world = new_world(5, environment=APART)
    world.run(exchange_with_all, 1)
    assert world.run(count_connections) == [4] * 5


def listening_ports() -> list[int]:
    """Returns the ports at which this process listens for messages; the Store's are left out."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.append(int(fields[1].rpartition(":")[2], 16))
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return [port for port in ports if port != getattr(store, "port", None)]


HELLO = struct.Struct("<8siiQQ16s")


def visit(port: int, word: bytes) -> socket.socket:
    address = next((line for line in _own_addresses() if _connects(line, port)), None)
    assert address is not None, f"nobody listens at port {port}"
    unknown = socket.create_connection((address, port), timeout=PATIENCE)
    unknown.sendall(word)
    return unknown


def _own_addresses() -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 1))
        return ["127.0.0.1", probe.getsockname()[0]]
    return ["127.0.0.1"]


def _connects(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1.0):
        return True
    return False


def bother(victim: int) -> list[int]:
    """Visits a rank as unknown processes do; returns the bytes that each of them got before it was dropped."""
    ports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ports, listening_ports())
    assert all(len(each) == 1 for each in ports), ports
    (port,) = ports[victim]
    marks: list[Any] = [None] * dist.get_world_size()
    (mark,) = (line.rpartition("=")[2] for line in _C.own_entry().splitlines() if " mark=" in line)
    dist.all_gather_object(marks, int(mark, 16))
    found: list[int] = []
    crowd: list[socket.socket] = []
    if dist.get_rank() == (victim + 1) % dist.get_world_size():
        hello = HELLO.pack(b"fog tcp2", dist.get_rank(), victim, 0, marks[victim], b"0" * 16)
        words = [
            b"GET / HTTP/1.0\r\n\r\n" + b"x" * 100,  # garbage
            HELLO.pack(b"fog tcp2", 1000, victim + 1, 0, marks[victim], b"0" * 16),  # meant for another rank
            HELLO.pack(b"fog tcp2", 1000, victim, 0, 1, b"0" * 16),  # meant for another process
            hello + b"1" * 32,  # a proof without the secret
            b"fog tcp+" + hello[8:] + b"1" * 32,  # the same of an additional connection
            hello,  # silent from now on
            hello[:5],
            b"",
        ]
        found = [heard(unknown) for unknown in [visit(port, word) for word in words]]
        crowd = [visit(port, b"") for _ in range(300)]
    exchange_with_all()
    for unknown in crowd:
        assert heard(unknown) == 0
    return found


def heard(unknown: socket.socket) -> int:
    """Returns the number of bytes that an unknown process gets before it is dropped; raises if that takes too long."""
    got = b""
    with contextlib.suppress(ConnectionError):
        while more := unknown.recv(1000):
            got += more
    unknown.close()
    return len(got)


def test_strangers_are_dropped(new_world: Callable[..., World]) -> None:
    """Nobody learns more than a nonce of 16 bytes, and the job goes on; first connections come through the crowd."""
    found = new_world(3, environment=APART).run(bother, 0, timeout=60)
    assert found[1][:3] == [0, 0, 0] and found[1][3:5] == [16, 16] and max(found[1]) == 16, found


# --- several connections to a peer -----------------------------------------------------------------------------

MOST = 4
# So many from the beginning, also on one host.
SEVERAL = {**APART, "_FOG_CONNECTIONS": str(MOST)}
BY_SEVERAL = f"tcp: {MOST} connections"


def connect_by_several() -> None:
    """Ranks 0 and 1 send each other data until it goes by all connections."""
    other = 1 - dist.get_rank()
    for number in range(1000):
        send_both_ways(number)
        enough = torch.tensor(float(way_to(other) == BY_SEVERAL and count_connections() == 2 * MOST - 1))
        dist.all_reduce(enough)
        if enough == 2:
            return
    raise AssertionError(f"{way_to(other)}, {count_connections()} connections")


def send_both_ways(number: int, group: dist.ProcessGroup | None = None) -> None:
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    whole = torch.arange(MIB)  # 8 MiB, and every part differs
    received = torch.zeros_like(whole)
    works = [
        dist.isend(whole * (number + rank + 1), other, group=group),
        dist.irecv(received, other, group=group),
    ]
    for work in works:
        assert work is not None
        work.wait()
    assert received.equal(whole * (number + other + 1)), "wrong data"


def way_to(other: int) -> str:
    backend: Any = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    return backend.transport(other)


def connections_by_use() -> tuple[list[socket.socket], list[socket.socket], list[socket.socket]]:
    """Returns the first connection, those by which this rank sends, and those by which the other one does.

    Both ranks call it.
    """
    found: tuple[list[socket.socket], ...] = ([], [], [])
    for number in range(50):  # until each has carried data
        send_both_ways(number)
    for each in data_connections():
        acknowledged, received = struct.unpack_from(
            "QQ", each.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 136), 120
        )
        words = 200  # of the handshake, at most
        found[1 if received < words else 2 if acknowledged < words else 0].append(each)
    assert [len(each) for each in found] == [1, MOST - 1, MOST - 1], found
    return found  # type: ignore[return-value]


def close_all(*connections: list[socket.socket]) -> None:
    for each in itertools.chain(*connections):
        each.close()


def exchange_by_several() -> int:
    """Returns how many elements of long sums are wrong; fails if data of other operations is."""
    connect_by_several()
    ways = exchange_and_check(SIZES)
    assert ways == [BY_SEVERAL], ways
    wrong = 0
    for numel in (1001, 300 * KIB // 8, 2 * MIB + 1):
        whole = torch.arange(numel) * 1_000_003_000_007
        output = torch.empty_like(whole)
        for _ in range(3):
            dist.reduce_scatter(output, [whole * (dist.get_rank() + 1)] * 2)
            wrong += int((output != whole * 3).sum())
    assert count_connections() == 2 * MOST - 1
    return wrong


def test_several_connections(new_world: Callable[..., World]) -> None:
    """Each rank makes three more for what it sends; all data arrives in its place."""
    assert new_world(2, environment=SEVERAL).run(exchange_by_several, timeout=RUN_TIMEOUT) == [0, 0]


def send_until_grown() -> tuple[int, str]:
    """Rank 0 sends data over a long path; returns the number of connections, and how data goes."""
    Path("/proc/sys/net/ipv4/tcp_wmem").write_text("4096 65536 262144")  # of this host
    x = torch.zeros(MIB)
    for _ in range(100):
        (dist.send if dist.get_rank() == 0 else dist.recv)(x, 1 - dist.get_rank())
        grown = torch.tensor(float("connections" in way_to(1 - dist.get_rank())))
        dist.all_reduce(grown)
        if grown:
            break
    return count_connections(), way_to(1 - dist.get_rank())


def test_a_long_path_takes_several(tmp_path: Path) -> None:
    """By default, where little may be in flight in one; the other direction, which has no data, keeps one."""
    ((sender,), (receiver,)) = run_on_hosts(
        tmp_path, [0, 1], __name__, [("send_until_grown", ())], delay=0.01, environment=TCP
    )
    assert sender[0] == receiver[0] == 2 and receiver[1] == "tcp", (sender, receiver)
    parts = re.fullmatch(r"tcp: 2 connections, round trip (\d+\.\d) ms, \d+ Mbit/s", sender[1])
    assert parts is not None and 20 <= float(parts[1]) < 100, sender


def send_much() -> tuple[str, int]:
    """Rank 0 sends rank 1 long data; returns how it goes, and how many connections there are."""
    send_long()
    return way_to(1 - dist.get_rank()), count_connections()


def send_long() -> None:
    for _ in range(8):
        (dist.send if dist.get_rank() == 0 else dist.recv)(torch.zeros(MIB), 1 - dist.get_rank())
    dist.barrier()


def test_one_connection_fills_the_link(tmp_path: Path) -> None:
    found = run_on_hosts(
        tmp_path, [0, 1], __name__, [("send_much", ())], rate="400mbit", delay=0.002, environment=TCP
    )
    assert found == [[("tcp", 1)]] * 2


def send_with_few_descriptors() -> tuple[str, int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * free, hard))
    send_long()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return way_to(1 - dist.get_rank()), count_connections()


def test_descriptors_are_kept_for_first_connections(new_world: Callable[..., World]) -> None:
    assert new_world(2, environment=SEVERAL).run(send_with_few_descriptors) == [("tcp", 1)] * 2


def break_one(how: str, whose: str) -> str:
    """Ends one additional connection while data goes; returns the error."""
    connect_by_several()
    rank = dist.get_rank()
    group = dist.new_group([0, 1], timeout=timedelta(seconds=4 * RUN_TIMEOUT))
    found = connections_by_use()
    victim = found[1 if whose == "own" else 2][1]

    def end_one() -> None:
        if how == "reset":
            reset(victim)
        else:
            victim.shutdown(socket.SHUT_WR if how == "half-closed" else socket.SHUT_RDWR)

    def exchange() -> None:
        if rank == 0:
            threading.Timer(0.2, end_one).start()
        for number in range(10_000):
            send_both_ways(number, group)

    error = error_of(exchange)
    close_all(*found)
    return error


def reset(connection: socket.socket) -> None:
    """As if the other side had sent a reset, which it does get."""
    libc = ctypes.CDLL(None, use_errno=True)
    unspecified = struct.pack("H14x", socket.AF_UNSPEC)
    assert libc.connect(connection.fileno(), unspecified, len(unspecified)) == 0


@pytest.mark.parametrize(
    ("how", "whose"),
    [("half-closed", "own"), ("closed", "own"), ("closed", "other"), ("reset", "own"), ("reset", "other")],
)
def test_an_additional_connection_that_ends(new_world: Callable[..., World], how: str, whose: str) -> None:
    """The end of one that is used is that of all: an error on both sides, and no wrong data."""
    found = new_world(2, environment=SEVERAL, finalizing=None).run(break_one, how, whose, timeout=RUN_TIMEOUT)
    for rank, error in enumerate(found):
        assert f"rank {1 - rank} " in error, found
        assert "the connection to it has broken" in error or "counts this rank as lost" in error, error


def leave_after_data(slow: str) -> bool:
    """Rank 0 leaves when its data is in the system's buffers, and some connections are slow; rank 1 gets all."""
    connect_by_several()
    found = connections_by_use()
    x = torch.arange(MIB // 2, dtype=torch.float32)
    if dist.get_rank() == 0:
        for each in found[0 if slow == "first" else 1]:
            each.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 400 * KIB)
    close_all(*found)
    if dist.get_rank() == 0:
        dist.send(x, 1)
        _C.shutdown()
        return True
    received = torch.zeros_like(x)
    dist.recv(received, 0)
    return received.equal(x)


@pytest.mark.parametrize("slow", ["first", "additional"])
def test_a_rank_leaves_when_its_data_is_on_the_way(new_world: Callable[..., World], slow: str) -> None:
    """Its goodbye, or the ends of other connections, overtake data, and count only after that."""
    world = new_world(2, environment=SEVERAL, finalizing=None)
    assert world.run(leave_after_data, slow, timeout=RUN_TIMEOUT) == [True, True]


def lose_by_several(how: str) -> str:
    """Rank 0 dies, or is cut off, while data goes by several connections."""
    connect_by_several()
    if dist.get_rank() == 0 and how == "killed":
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if dist.get_rank() == 0 and how == "cut off":
        threading.Timer(0.1, ip, ("link", "set", "eth0", "down")).start()

    def exchange() -> None:
        for number in range(10_000):
            send_both_ways(number)

    return error_of(exchange)


@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_a_peer_of_several_connections_is_lost(tmp_path: Path, how: str) -> None:
    found = run_on_hosts(
        tmp_path,
        [0, 1],
        __name__,
        [("lose_by_several", [how])],
        killed=[0] if how == "killed" else [],
        environment={**SEVERAL, "FOG_HOST_TIMEOUT": "4"},
        finalizing=None,
    )
    (error,) = found[1]
    reason = "was lost: its process ended" if how == "killed" else "was lost: its host"
    assert "rank 0 " in error and reason in error, error


def wait_for_a_killed_rank() -> str:
    """Rank 0 ends while rank 1 sleeps."""
    exchange_with_all()
    _C.emulate(longest_sleep=timedelta(hours=1))
    if dist.get_rank() == 0:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    error = error_of(lambda: dist.recv(torch.zeros(3), 0))
    _C.emulate()
    return error


def test_the_end_of_a_process_of_another_host_is_noticed_at_once(tmp_path: Path) -> None:
    """Regression: until its sleep ended, a rank did not take note of what its sockets had found out."""
    calls = [("wait_for_a_killed_rank", [])]
    found = run_on_hosts(tmp_path, [0, 1], __name__, calls, killed=[0], finalizing=None)
    (error,) = found[1]
    assert "rank 0 " in error and "was lost: its process ended" in error, error


def ask_for_more() -> list[bytes]:
    """Rank 1 makes additional connections to rank 0 by hand, and does not use them.

    Returns:
        The first bytes of rank 0's answers: to four at once, to one more after the end of one, and what has come by the
        others after longer than an unknown process has.
    """
    exchange_with_all()
    told: list[Any] = [None] * 2
    (mark,) = (line.rpartition("=")[2] for line in _C.own_entry().splitlines() if " mark=" in line)
    dist.all_gather_object(told, (listening_ports(), int(mark, 16)))
    answers = []
    if dist.get_rank() == 1:
        (port,), its_mark = told[0]
        hello = HELLO.pack(b"fog tcp+", 1, 0, told[1][1], its_mark, b"0" * 16)

        def ask() -> socket.socket:
            connection = visit(port, hello)
            nonce = connection.recv(16, socket.MSG_WAITALL)
            connection.sendall(_C.hmac_sha256(_C.job_secret(), b"fog tcp connects" + hello + nonce))
            answers.append(connection.recv(33, socket.MSG_WAITALL)[:1])
            return connection

        made = [ask() for _ in range(MOST)]
        made[0].close()
        deadline = time.monotonic() + PATIENCE
        while answers[-1] == b"l" and time.monotonic() < deadline:  # until rank 0 has noticed
            made.append(ask())
        made[-2].close()
        time.sleep(1.2 * UNKNOWN_PATIENCE)
        for each in (made[1], made[2], made[-1]):
            each.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                answers.append(each.recv(1))
            each.close()
    exchange_with_all()
    return answers


def test_additional_connections_that_are_not_used(new_world: Callable[..., World]) -> None:
    """At most three at once, for as long as the side that has made them likes; their ends do no harm."""
    _, answers = new_world(2, environment=APART).run(ask_for_more, timeout=RUN_TIMEOUT)
    assert (
        answers[:3] == [b"y"] * 3 and answers[3:-1] == [b"l"] * (len(answers) - 4) and answers[-1] == b"y"
    ), answers


# How many connections fill the link, with times and bytes that the tests choose.

ROUND_TRIP = 0.04


class Sender:
    """Data over a link to which `Growth` adds connections, each of which carries so many bytes a second at most."""

    def __init__(self, each: float, link: float) -> None:
        self.each, self.link = each, link
        self.growth = _C.Growth()
        self.now, self.written, self.limited = 100.0, 0.0, 0.0
        self.asked: list[float] = []
        self.opens = True  # whether attempts to connect succeed
        self.round_trip = ROUND_TRIP  # the present one, which data that waits in the link makes longer
        self.starts_slowly = 0.0  # for so long a new connection carries nothing

    def pause(self, seconds: float) -> Sender:
        """The receiver reads nothing for so long, while data waits."""
        self.now += seconds
        self.limited += seconds
        if self.growth.look(self.now, int(self.written), ROUND_TRIP, self.round_trip, self.limited):
            self.asked.append(self.now)
        return self

    def send(self, seconds: float, burst: float = math.inf) -> Sender:
        """Sends for so long, with a rest of a second after each burst."""
        self.growth.begin()
        began = self.now
        end = self.now + seconds
        while self.now < end:
            self.now += 0.01
            used = self.growth.used
            if self.starts_slowly and self.asked and self.now < self.asked[-1] + self.starts_slowly:
                used -= 1
            rate = min(self.each * (1 + used), self.link)
            self.written += 0.01 * rate
            self.limited += 0.01 * (rate < self.link)
            if self.growth.look(self.now, int(self.written), ROUND_TRIP, self.round_trip, self.limited):
                self.asked.append(self.now)
                if self.opens:
                    self.growth.on_open()
            if self.now >= began + burst:
                self.now += 1.0
                end += 1.0
                began = self.now
                self.growth.begin()
        return self


@pytest.mark.parametrize(
    ("each", "link", "used", "asked"),
    [
        (200, 100, 0, 0),  # one fills it
        (60, 125, 1, 2),  # a third one adds 4 %
        (60, 125.5 * 1.2, 2, 2),  # and here a quarter
        (10, 1000, 3, 3),
    ],
)
def test_growth(each: float, link: float, used: int, asked: int) -> None:
    sender = Sender(each * 1e6, link * 1e6).send(10)
    assert (sender.growth.used, len(sender.asked)) == (used, asked), sender.asked
    assert sender.growth.rate == pytest.approx(1e6 * min(link, each * (1 + used)), rel=0.01)


def test_growth_takes_four_round_trips_for_a_measurement() -> None:
    sender = Sender(10e6, 1e9).send(3)
    first, second, third = sender.asked
    assert first == pytest.approx(100.01 + 4 * ROUND_TRIP, abs=0.021)
    assert second - first == pytest.approx(
        4 * (0.01 + 4 * ROUND_TRIP), abs=0.1
    )  # three that judge, and the next one
    assert third - second == pytest.approx(second - first, abs=0.02)


def test_growth_of_data_in_bursts() -> None:
    """Each is shorter than two round trips; the time between them does not count."""
    sender = Sender(10e6, 1e9).send(3, burst=0.07)
    assert sender.growth.used == 3
    assert sender.growth.rate == pytest.approx(40e6, rel=0.01)


def test_growth_where_round_trips_become_longer() -> None:
    """Data waits in the link then, which is full."""
    sender = Sender(10e6, 1e9)
    sender.round_trip = 1.6 * ROUND_TRIP
    assert sender.send(3).asked == []
    sender.round_trip = 1.4 * ROUND_TRIP
    assert sender.send(3).growth.used == 3


def test_growth_waits_for_a_connection_that_starts_slowly() -> None:
    sender = Sender(50e6, 1e9)
    sender.starts_slowly = 8 * ROUND_TRIP
    assert sender.send(5).growth.used == 3


def test_growth_and_pauses_of_the_receiver() -> None:
    """They are no limit of the path; and where that has one, they do not hide it."""
    sender = Sender(200e6, 100e6)
    for _ in range(3):
        sender.send(1).pause(0.5)
    assert sender.send(1).asked == []
    sender = Sender(10e6, 1e9)
    for _ in range(20):
        sender.send(0.25).pause(0.3)
    assert sender.growth.used == 3


def test_growth_where_connections_are_refused() -> None:
    """It asks again after a second."""
    sender = Sender(10e6, 1e9)
    sender.opens = False
    sender.send(5)
    assert sender.growth.used == 0 and 4 <= len(sender.asked) <= 5, sender.asked
    sender.opens = True
    assert sender.send(5).growth.used == 3


# --- broken connections, and forks -------------------------------------------------------------------------------------------------


def cut(first: int, second: int) -> str:
    """Ends the connection between two ranks that live on."""
    exchange_with_all()
    rank = dist.get_rank()
    group = dist.new_group([first, second], timeout=timedelta(seconds=4 * RUN_TIMEOUT))
    if rank == first:
        for each in data_connections():  # to all: its other peers lose it too
            each.shutdown(socket.SHUT_RDWR)
            each.close()
    if rank not in (first, second):
        return ""
    return error_of(lambda: dist.all_reduce(torch.ones(100_000), group=group))


def test_a_connection_that_is_cut(new_world: Callable[..., World]) -> None:
    """Messages may be lost, so each of the two counts the other as lost."""
    found = new_world(3, environment=APART, finalizing=None).run(cut, 0, 1)
    for rank, error in enumerate(found[:2]):
        assert "allreduce" in error and f"rank {1 - rank} " in error, error
        assert "the connection to it has broken" in error or "counts this rank as lost" in error, error


def look_in_children() -> tuple[int, int]:
    """Returns how many connections a forked child has, and how many of its files are gone in a child of its own."""
    exchange_with_all()
    statuses = []
    for of_child in (True, False):
        child = os.fork()
        if child == 0:
            if of_child:
                os._exit(count_connections() + len(listening_ports()))
            # These get the numbers that fog has closed.
            files = [os.open("/dev/null", os.O_RDONLY) for _ in range(64)]
            grandchild = os.fork()
            if grandchild == 0:
                os._exit(sum(not os.path.exists(f"/proc/self/fd/{each}") for each in files))
            os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    exchange_with_all()
    return statuses[0], statuses[1]


def test_a_forked_child_has_no_connections_and_its_children_keep_their_files(world: World) -> None:
    assert world.run(look_in_children) == [(0, 0)] * RANKS


def send_and_change(timeout: float) -> tuple[str, list[float]]:
    """Rank 0 sends slowly, gives up after the timeout, and changes its tensor."""
    Path("/proc/sys/net/ipv4/tcp_wmem").write_text("4096 4096 4096")  # of this host
    exchange_with_all()
    rank = dist.get_rank()
    group = dist.new_group([0, 1], timeout=timedelta(seconds=timeout if rank == 0 else 60.0))
    dist.barrier()
    x = torch.full((64_000,), 1.0 if rank == 0 else 0.0)
    error = error_of(lambda: dist.send(x, 1, group=group) if rank == 0 else dist.recv(x, 0, group=group))
    if rank == 0:
        x.fill_(2.0)
        time.sleep(4.0)  # until the rest of the part is there
    return error, x.unique().tolist()


def test_data_that_is_withdrawn_within_a_part_does_not_change(tmp_path: Path) -> None:
    found = run_on_hosts(
        tmp_path, [0, 1], __name__, [("send_and_change", [1.0])], rate="1mbit", environment=TCP
    )
    ((sent, _),), ((received, values),) = found
    assert "send" in sent and "1000 ms" in sent, sent
    assert received or values == [1.0], (received, values)


# --- ends, limits and unknown processes -----------------------------------------------------------------------------


def lose_a_stranger(victim: int, moment: str) -> tuple[str, str]:
    """The victim dies before it has communicated with any rank.

    Rank 0 waits for it, rank 1 sends it a large message, and the others exchange with it repeatedly.

    Args:
        victim: The rank that dies.
        moment: "before" these calls, or "during" them.

    Returns:
        The error, and that of an operation among the survivors.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    living = dist.new_group([r for r in range(size) if r != victim])
    if rank == victim:
        time.sleep(0.2 if moment == "before" else 1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.0 if moment == "before" else 0.0)

    def speak() -> None:
        if rank == 0:
            dist.recv(torch.zeros(3), victim)
        elif rank == 1:
            dist.isend(torch.ones(1_000_000), victim).wait()  # type: ignore[union-attr]
        else:
            while True:
                dist.send(torch.ones(3), victim)
                time.sleep(0.01)

    return error_of(speak), error_of(lambda: dist.all_reduce(torch.ones(3), group=living))


@pytest.mark.parametrize("moment", ["before", "during"])
@pytest.mark.parametrize("placement", [[0, 1, 2, 3], [0, 1, 1, 0]], ids=["alone", "with others"])
def test_a_stranger_that_is_lost(tmp_path: Path, moment: str, placement: list[int]) -> None:
    calls, options = [("lose_a_stranger", [3, moment])], {"timeout": 4 * RUN_TIMEOUT}
    found = run_on_hosts(tmp_path, placement, __name__, calls, killed=[3], **options)
    for ((error, later),) in found[:3]:
        assert "rank 3 " in error and "was lost: its process ended" in error, error
        assert later == "", later


@contextlib.contextmanager
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
        return ""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with stderr_in_file() as log:
        ready.touch()
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free // 2, hard))  # other threads may close descriptors
        ready.rename(limited)
        exchange = threading.Thread(target=exchange_with_all)
        exchange.start()
        try:
            # No file can be opened here, so this reads by descriptor 2.
            while b"ulimit -n" not in os.pread(2, 1 << 16, 0):
                time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        exchange.join()
        return log.read_text()


def test_the_limit_of_descriptors(tmp_path: Path) -> None:
    """One line of the log says so, and the connection is made once there are descriptors."""
    calls = [("reach_the_limit", [str(tmp_path)]), ("exchange_with_all", [])]
    (text, _), _ = run_on_hosts(tmp_path, [0, 1], __name__, calls)
    (line,) = [line for line in text.splitlines() if "ulimit -n" in line]
    assert "world rank 0" in line and "a connection to world rank 1" in line, line


def watch_beside_strangers(folder: str, descriptors: int) -> str:
    """Before rank 0 watches rank 1, unknown processes on that host connect with it and say nothing; returns rank 0's log."""
    told, connected = Path(folder, "told"), Path(folder, "connected")
    if dist.get_rank() == 1:
        while not told.exists():
            time.sleep(0.01)
        place = address(0), int(told.read_text())
        crowd = [socket.create_connection(place) for _ in range(descriptors // 2 + 10)]
        connected.touch()
        dist.barrier()
        for unknown in crowd:
            unknown.close()
        return ""
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    with stderr_in_file() as log:
        (listener,) = (line for line in _C.own_entry().splitlines() if " mark=" in line)
        Path(folder, "port").write_text(listener.split()[0])
        before = len(os.listdir("/proc/self/fd"))
        Path(folder, "port").rename(told)
        while not connected.exists() or len(os.listdir("/proc/self/fd")) < before + descriptors // 8:
            time.sleep(0.01)
        backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        backend.watch([1])
        dist.barrier()
        return log.read_text()


def test_strangers_keep_no_rank_from_its_peers(tmp_path: Path) -> None:
    """Regression: their connections counted, and the rank gave up those to its peers for ever."""
    calls = [("watch_beside_strangers", [str(tmp_path), 256])]
    (text,), _ = run_on_hosts(tmp_path, [0, 1], __name__, calls)
    assert "ulimit -n" not in text, text


def barrier_error() -> str:
    return error_of(dist.barrier)


def test_where_connections_are_refused(tmp_path: Path) -> None:
    """Nobody listens where the others look for a rank, for example because its interface is not the job's."""
    setting = {"FOG_INTERFACE": "lo"}
    found = run_on_hosts(tmp_path, [0, 1], __name__, [("barrier_error", [])], environment=setting)
    for rank, (error,) in enumerate(found):
        assert f"rank {1 - rank} " in error and "its process ended (its port refuses connections)" in error, (
            error
        )
