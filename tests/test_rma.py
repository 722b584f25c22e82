"""Tests of data between hosts by MPI RMA: the MPI calls that move it, results, and targets that are stopped or killed.

All ranks are on this host, and to fog and MPI each is a node of its own. The library is a wrapper of the real one that
counts calls and bytes (mpi_counter.c). test_window_rma tests windows, and test_mpi_library settings that cannot work.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path

import fogdist
import fogdist.bluefog.torch as bf
import pytest
import torch
import torch.distributed as dist
from fogdist import topology as topologies
from harness import RUN_TIMEOUT, World, WorldPool, case, error_of
from hosts import address, emulated_hosts, move_to_host
from reference import Checks, make_input, mix, sum_in_rank_order
from scripts import run_script
from test_machines import VARIABLE, mean_matrix, mix_machines
from test_window_rma import logged
from torch import Tensor
from window_interfaces import pids, stopped
from wrapped_mpi import compile_wrapper

pytestmark = pytest.mark.usefixtures("no_shared_memory_left")

KIB, MIB = 1 << 10, 1 << 20
RANKS, PER_MACHINE = 4, 2
APART = {"_FOG_LOCAL_LINKS": "0"}
RMA = {**APART, "FOG_BETWEEN_HOSTS": "rma"}
SIZES = [400_000, 5 * MIB]
# The functions that move data.
ONE_SIDED = ["MPI_Put", "MPI_Get"]
FLUSH = "MPI_Win_flush"
# Functions with defects in MPI libraries, or which wait for the target; and those that send messages, which go by TCP.
FORBIDDEN = [
    "MPI_Isend",
    "MPI_Issend",
    "MPI_Irecv",
    "MPI_Rput",
    "MPI_Rget",
    "MPI_Raccumulate",
    "MPI_Rget_accumulate",
    "MPI_Accumulate",
    "MPI_Get_accumulate",
    "MPI_Fetch_and_op",
    "MPI_Compare_and_swap",
    "MPI_Win_create_dynamic",
]
COUNTED = [*ONE_SIDED, FLUSH, *FORBIDDEN]
# The bytes of all versions and credits on all ranks in one operation.
HEADERS = 64 * KIB
# The overhead in the bytes that are put: versions, and the header of a slot.
OVERHEAD = 0.02

# For each function: calls, bytes, and bytes of the largest call.
Counts = dict[str, tuple[int, int, int]]
Operation = Callable[[], Tensor]


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the path of the library that counts."""
    return compile_wrapper("mpi_counter.c", tmp_path_factory.mktemp("counter"))


@pytest.fixture(scope="module")
def world_of(counter: str) -> Iterator[Callable[[str], World]]:
    """Returns a world for a value of FOG_BETWEEN_HOSTS; worlds are kept for the module."""
    worlds: dict[str, World] = {}

    def world(setting: str) -> World:
        if setting not in worlds or worlds[setting].broken:
            variables = {"FOG_MPI_LIBRARY": counter, "FOG_BETWEEN_HOSTS": setting, VARIABLE: str(PER_MACHINE)}
            worlds[setting] = World(RANKS, environment=APART | variables, finalizing=1)
        return worlds[setting]

    yield world
    for each in worlds.values():
        each.close()


def counts() -> Counts:
    """Returns this rank's calls since it began, or since `reset`."""
    library = ctypes.CDLL(os.environ["FOG_MPI_LIBRARY"])
    found = {}
    for name in COUNTED:
        of_name = []
        for function in (library.fog_test_calls, library.fog_test_bytes, library.fog_test_largest):
            function.restype, function.argtypes = ctypes.c_longlong, [ctypes.c_char_p]
            of_name.append(function(name.encode()))
        assert min(of_name) >= 0, f"{name} is not counted"
        found[name] = (of_name[0], of_name[1], of_name[2])
    return found


def counted(operation: Operation) -> tuple[Tensor, Counts]:
    """Returns the result of an operation that all ranks call together, and this rank's calls for it."""
    dist.barrier()
    ctypes.CDLL(os.environ["FOG_MPI_LIBRARY"]).fog_test_reset()
    dist.barrier()  # no request from before is counted
    result = operation()
    dist.barrier()  # a rank may have received all its data before the sender's calls are done
    return result, counts()


def total(of_ranks: list[Counts], names: list[str], what: int = 1) -> int:
    """Returns a sum over ranks and functions, by default of bytes; 0 selects calls."""
    return sum(found[name][what] for found in of_ranks for name in names)


# --- exchanges and collectives ------------------------------------------------------------------------------


def exchanges(numel: int) -> Iterator[tuple[str, Operation, Tensor]]:
    """Yields name, call, and the expected result on this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    graph = topologies.exponential(size)
    fogdist.set_topology(graph)
    machines = topologies.fully_connected(size // PER_MACHINE)
    fogdist.set_machine_topology(machines)
    inputs = [make_input(r, torch.float32, numel) for r in range(size)]
    x = inputs[rank]

    mean = mix(inputs, mean_matrix(graph))[rank]
    yield "neighbor_allreduce", lambda: fogdist.neighbor_allreduce(x), mean
    gathered = torch.cat([inputs[r] for r in fogdist.in_neighbor_ranks()])
    yield "neighbor_allgather", lambda: fogdist.neighbor_allgather(x), gathered
    between = mix_machines(inputs, PER_MACHINE, mean_matrix(machines))[rank]
    yield "hierarchical_neighbor_allreduce", lambda: fogdist.hierarchical_neighbor_allreduce(x), between
    summed = sum_in_rank_order(inputs)
    yield "allreduce", lambda: bf.allreduce(x, average=False), summed
    yield "broadcast", lambda: bf.broadcast(x, root_rank=1), inputs[1]


def run_exchanges(nbytes: int) -> dict[str, Counts]:
    """Returns the calls before the first operation, and those of each operation."""
    found = {"before": counts()}
    fogdist.init()
    peers = {fogdist.transport(peer) for peer in range(dist.get_world_size()) if peer != dist.get_rank()}
    assert peers == {os.environ["FOG_BETWEEN_HOSTS"]}, peers
    with Checks() as checks:
        for name, operation, expected in exchanges(nbytes // 4):
            for again in range(3):  # the buffers alternate
                result, found[name] = counted(operation)
                checks.close(f"{name} of {nbytes} bytes, {again}", result, expected)
    return found


def least_tensors(name: str) -> int:
    """Returns the least number of tensors that all ranks together have to move."""
    degree = 2  # the degree of the exponential-2 graph of 4 ranks
    if name.startswith("neighbor"):
        return RANKS * degree
    return RANKS - 1 if name == "broadcast" else RANKS


@pytest.mark.parametrize("nbytes", [*SIZES, pytest.param(MIB, marks=pytest.mark.long)])
def test_exchanges_move_their_data_by_puts(world_of: Callable[[str], World], nbytes: int) -> None:
    results = world_of("rma").run(run_exchanges, nbytes)
    for name in set(results[0]) - {"before"}:
        of_ranks = [found[name] for found in results]
        least = least_tensors(name) * nbytes
        with case(operation=name, counts=of_ranks):
            put = total(of_ranks, ONE_SIDED)
            assert put >= least
            if name.startswith("neighbor"):
                assert put <= least * (1 + OVERHEAD) + HEADERS
            for found in of_ranks:
                assert found[FLUSH][0] > 0 or sum(found[way][0] for way in ONE_SIDED) == 0
            assert total(of_ranks, FORBIDDEN, 0) == 0


# --- data that does not fit into the pool -------------------------------------------------------------------


def exchange_and_check(sizes: list[int]) -> list[str]:
    """Returns how large data travels to the others."""
    fogdist.init()
    with Checks() as checks:
        for nbytes in sizes:
            for name, operation, expected in exchanges(nbytes // 4):
                for _ in range(2):
                    checks.close(f"{name} of {nbytes} bytes", operation(), expected)
    return [fogdist.transport(peer) for peer in range(dist.get_world_size()) if peer != dist.get_rank()]


@pytest.mark.parametrize("pool", [MIB, pytest.param(4 * MIB, marks=pytest.mark.long)])
def test_a_small_pool(new_world: Callable[..., World], pool: int) -> None:
    """Data without room in the pool goes by TCP, or waits."""
    variables = {"FOG_RMA_BYTES": str(pool), VARIABLE: str(PER_MACHINE)}
    new_world(RANKS, environment=RMA | variables).run(exchange_and_check, SIZES)


# --- windows ------------------------------------------------------------------------------------------------


def run_windows(nbytes: int) -> dict[str, Counts]:
    """Returns the calls for a put and for a get."""
    fogdist.init()
    rank, numel, found = dist.get_rank(), nbytes // 4, {}
    fogdist.set_topology(topologies.exponential(dist.get_world_size()))
    x = make_input(rank, torch.float32, numel)
    own = x.clone()
    window = fogdist.Window(own, zero_init=True)

    def slots() -> Mapping[int, Tensor]:
        return {
            source: window.update(self_weight=0.0, neighbor_weights={source: 1.0}, clone=True)
            for source in fogdist.in_neighbor_ranks()
        }

    def put(weight: float) -> Tensor:
        window.put(x, dst_weights=dict.fromkeys(fogdist.out_neighbor_ranks(), weight))
        return x

    def get(weight: float) -> Tensor:
        window.get(src_weights=dict.fromkeys(fogdist.in_neighbor_ranks(), weight))
        return x

    with Checks() as checks:
        for name, operation in {"put": put, "get": get}.items():
            for weight in (1.0, 0.5, 1.0):  # the buffers alternate
                _, found[name] = counted(partial(operation, weight))
                for source, slot in slots().items():
                    expected = weight * make_input(source, torch.float32, numel)
                    checks.equal(f"{name} of {nbytes} bytes, slot of {source}", slot, expected)
                dist.barrier()
    assert set(window.transports.values()) == {os.environ["FOG_BETWEEN_HOSTS"]}, window.transports
    window.free()
    return found


@pytest.mark.parametrize("nbytes", SIZES)
def test_windows_move_their_data_one_sidedly(world_of: Callable[[str], World], nbytes: int) -> None:
    results = world_of("rma").run(run_windows, nbytes)
    for name in results[0]:
        of_ranks = [found[name] for found in results]
        least = 2 * RANKS * nbytes
        with case(operation=name, counts=of_ranks):
            assert least <= total(of_ranks, [f"MPI_{name.capitalize()}"])
            assert total(of_ranks, ONE_SIDED) <= least * (1 + OVERHEAD) + HEADERS
            assert all(found[FLUSH][0] > 0 for found in of_ranks)
            assert total(of_ranks, FORBIDDEN, 0) == 0


# --- targets that are stopped or killed ---------------------------------------------------------------------

NUMEL = 500_000
LONG_TIMEOUT = 4 * RUN_TIMEOUT


def exchange_with_a_stopped_target() -> None:
    """Rank 0 sends twice to rank 1, which is stopped before it has called these exchanges."""
    fogdist.init()
    rank, targets = dist.get_rank(), pids()
    store = dist.distributed_c10d._get_default_store()
    own = make_input(100 + rank, torch.float32, NUMEL)

    def exchange(number: int) -> int:
        is_sender = rank == 0
        return bf.neighbor_allreduce_nonblocking(
            make_input(number, torch.float32, NUMEL) if is_sender else own,
            self_weight=1.0 if is_sender else 0.5,
            src_weights={} if is_sender else {0: 0.5},
            dst_weights={1: 1.0} if is_sender else {},
            enable_topo_check=False,
        )

    handles = [exchange(number) for number in range(3)]  # the first exchanges grant the slots
    results = [bf.wait(handle) for handle in handles]
    dist.barrier()
    if rank == 0:
        with stopped(targets[1]):
            handles = [exchange(number) for number in (3, 4)]
            while not bf.poll(handles[0]):
                time.sleep(0.01)
            store.set("the sender's part has ended", "")
    else:
        store.wait(["the sender's part has ended"])
        handles = [exchange(number) for number in (3, 4)]
    results += [bf.wait(handle) for handle in handles]
    for number, result in enumerate(results):
        sent = make_input(number, torch.float32, NUMEL)
        torch.testing.assert_close(result, sent if rank == 0 else 0.5 * own + 0.5 * sent)


def test_the_senders_part_ends_while_the_target_is_stopped(new_world: Callable[..., World]) -> None:
    """All data is there afterwards. Without confirmations, a sender does not wait until its receiver agrees."""
    variables = {**RMA, "_FOG_CONFIRM": "0"}
    new_world(2, timeout=LONG_TIMEOUT, environment=variables).run(exchange_with_a_stopped_target)


def until_killed(kind: str, moment: str) -> str:
    """Rank 1 is killed, "during" a loop of operations or "before" one; returns the other one's error."""
    fogdist.init(topologies.fully_connected)
    x = torch.ones(NUMEL)
    window = fogdist.Window(x)
    once: Callable[[], object] = {
        "exchange": lambda: fogdist.neighbor_allreduce(x),
        "put": lambda: window.put(x),
        "get": window.get,
    }[kind]
    for _ in range(3):
        once()
    assert fogdist.transport(1 - dist.get_rank()) == "rma"
    dist.barrier()
    if dist.get_rank() == 1:
        if moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    elif moment == "before":
        time.sleep(0.5)
    error = ""
    while not error:
        error = error_of(once)
    return error


@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        ("exchange", "during"),
        ("put", "before"),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("put", "during"), ("get", "before"))),
    ],
)
def test_a_killed_rank(new_world: Callable[..., World], kind: str, moment: str) -> None:
    """The other one raises. Only in the middle of operations, UCX may end it, as a copy from a dead process is fatal.

    test_faults kills ranks before operations of all kinds.
    """
    world = new_world(2, timeout=LONG_TIMEOUT, environment=RMA, finalizing=None)
    survivor, victim = world.run_raw(until_killed, kind, moment)
    assert victim.state == "died" and "SIGKILL" in victim.details, str(victim)
    if moment == "during" and survivor.state == "died":
        assert "SIGABRT" in survivor.details, str(survivor)
    else:
        assert survivor.state == "returned" and "rank 1 " in survivor.value, str(survivor)


# --- what is chosen -----------------------------------------------------------------------------------------


EXCHANGES = "rma, exchanges only"


def choose(name: str, tls: str) -> tuple[str, str]:
    """Returns, on an emulated host, the transport to the other rank, and what the start has written."""
    move_to_host(name)
    os.environ["UCX_TLS"] = tls
    rank = int(os.environ["RANK"])

    def join() -> None:
        store = dist.TCPStore(address(0), 29515, 2, rank == 0)
        dist.init_process_group("fog", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
        fogdist.init()

    _, log = logged(join)
    x = torch.full((NUMEL,), float(rank))
    assert fogdist.neighbor_allreduce(x).eq(0.5).all()
    return fogdist.transport(1 - rank), log


# UCX's transports on each rank, the rate of the link, and the transport. "posix" waits for the target, and is faster than
# such a link; "none" does not exist, so MPI does not start.
@pytest.mark.parametrize(
    ("tls", "rate", "transport"),
    [
        (["tcp,self"] * 2, None, "tcp"),
        (["shm,self"] * 2, "400mbit", "rma"),
        (["posix,self"] * 2, "200mbit", EXCHANGES),
        (["shm,self", "none"], None, "tcp"),
    ],
)
def test_auto(new_world: Callable[..., World], tls: list[str], rate: str | None, transport: str) -> None:
    """`auto` chooses the transport that suits the fabric, on all ranks; rank 0 says once why it is not RMA."""
    with emulated_hosts(2, rate) as names:
        variables = {"UCX_TLS": "tcp", "FOG_BETWEEN_HOSTS": "auto", "FOG_LOG_LEVEL": "info"}
        world = new_world(2, initialize=False, environment=variables)
        outcomes = world.run_by_rank(choose, list(zip(names, tls, strict=True)))
        assert [outcome.value[0] for outcome in outcomes] == [transport] * 2, list(map(str, outcomes))
        said = [outcome.value[1].count("between hosts data goes by ") for outcome in outcomes]
        why = {"tcp": "MPI did not start: " if "none" in tls else "puts by MPI take "}.get(transport, "RMA")
        assert said == [1, 0] and why in outcomes[0].value[1], outcomes[0].value[1]
        world.close()


def put_and_get() -> set[str]:
    """Returns the transports of a window, after its operations."""
    fogdist.init(topologies.fully_connected)
    rank = dist.get_rank()
    source = (rank + 1) % dist.get_world_size()
    x = torch.full((NUMEL,), float(rank))
    window = fogdist.Window(x, zero_init=True)

    def slot() -> Tensor:
        return window.update(self_weight=0.0, neighbor_weights={source: 1.0}, clone=True)

    window.put(x)
    dist.barrier()
    assert slot().eq(source).all()
    window.get(src_weights={source: 2.0})
    assert slot().eq(2 * source).all()
    transports = set(window.transports.values())
    window.free()
    return transports


@pytest.mark.parametrize(
    "fabric", [{"UCX_TLS": "tcp,self"}, {"MPICH_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}], ids=["ucx", "ofi"]
)
def test_puts_that_wait_for_their_target(
    new_world: Callable[..., World], counter: str, fabric: dict[str, str]
) -> None:
    """They carry exchanges and collectives, in which both ranks call MPI, but not the data of windows."""
    variables = {"FOG_MPI_LIBRARY": counter, VARIABLE: str(PER_MACHINE)}
    world = new_world(RANKS, environment=RMA | fabric | variables)
    assert world.run(exchange_and_check, [KIB, SIZES[1]]) == [[EXCHANGES] * (RANKS - 1)] * RANKS
    of_ranks = world.run(counts)
    assert total(of_ranks, ["MPI_Put"]) > RANKS * SIZES[1] and total(of_ranks, FORBIDDEN, 0) == 0, of_ranks
    assert world.run(put_and_get) == [{"messages"}] * RANKS


def test_the_log_says_once_what_is_used(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group('fog')\n")
    pool = WorldPool(initialize=False, environment=RMA | {"FOG_LOG_LEVEL": "info"})
    output = run_script([script], 2, tmp_path / "log", pool)
    pool.close()
    assert output.count("between hosts data goes by RMA") == 1, output
