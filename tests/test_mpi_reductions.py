"""Tests of reduce="mpi": allreduce, reduce and reduce_scatter by MPI's own nonblocking reductions.

Most ranks here are on this host and exchange everything over MPI, whose library is a wrapper that counts calls
(mpi_counter.c).
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import fogdist
import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, World, init_process_group
from hosts import run_on_hosts
from operations import REDUCING, Prepared, prepare
from reference import Checks, make_input
from scripts import Job
from test_collectives import sweep, sweep_roots, sweep_sizes, sweep_types
from test_rma_failures import started
from wrapped_mpi import compile_wrapper

pytestmark = [
    pytest.mark.skipif(BACKEND != "fog", reason="tests fog's MPI"),
    pytest.mark.usefixtures("no_shared_memory_left"),
]

MPI = {"FOG_LOCAL_LINKS": "0", "FOG_REDUCE": "mpi"}
# To MPI, every rank is a node of its own, and there is only TCP.
TCP = {**MPI, "MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self"}
CALLS = {
    "all_reduce": "MPI_Iallreduce",
    "all_reduce_coalesced": "MPI_Iallreduce",
    "reduce": "MPI_Ireduce",
    "reduce_scatter_tensor": "MPI_Ireduce_scatter_block",
}
# Types that MPI or its standard does not have.
FOGS_OWN = [torch.bool, torch.float16, torch.bfloat16]
SOON = 10.0
ENDLESS = 1_000_000
# The largest piece that MPI gets in one call.
PIECE = 256 << 20


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the path of the library that counts calls."""
    return compile_wrapper("mpi_counter.c", tmp_path_factory.mktemp("counter"))


@pytest.fixture(scope="module")
def world_of(counter: str) -> Iterator[Callable[[str], World]]:
    """Returns a world for a value of FOG_REDUCE; worlds are kept for the module."""
    worlds: dict[str, World] = {}

    def world(setting: str) -> World:
        if setting not in worlds or worlds[setting].broken:
            variables = {**MPI, "FOG_REDUCE": setting, "FOG_MPI_LIBRARY": counter}
            worlds[setting] = World(3, environment=variables, finalizing=1)
        return worlds[setting]

    yield world
    for each in worlds.values():
        each.close()


def calls(name: str) -> int:
    """Returns how often this rank has called a function of MPI."""
    function = ctypes.CDLL(os.environ["FOG_MPI_LIBRARY"]).fog_test_calls
    function.restype, function.argtypes = ctypes.c_longlong, [ctypes.c_char_p]
    found: int = function(name.encode())
    assert found >= 0, f"{name} is not counted"
    return found


def reductions() -> int:
    """Returns the number of MPI reductions that this rank has called."""
    return sum(calls(name) for name in set(CALLS.values()))


def options(reduce: str) -> object:
    from fog_pg._extension import load

    made = load().ProcessGroupFog.Options()
    made.reduce = reduce
    return made


# --- results ------------------------------------------------------------------------------------------------


def test_values(world_of: Callable[[str], World]) -> None:
    """Checks all types and reductions, those of MPI and fog's own."""
    world_of("mpi").run(sweep, sweep_types, REDUCING, timeout=120)


def test_sizes_and_roots(world_of: Callable[[str], World]) -> None:
    world_of("mpi").run(sweep, sweep_sizes, REDUCING, timeout=120)
    world_of("mpi").run(sweep, sweep_roots, ["reduce"], timeout=120)


def who_does_it() -> None:
    """An operation is one call of MPI if MPI does it, and none otherwise."""
    with Checks() as checks:
        for operation in REDUCING:
            for dtype in (torch.float32, torch.float64, torch.int8, torch.uint16, torch.complex64, *FOGS_OWN):
                for reduction in ("SUM", "AVG", "PREMUL_SUM") if dtype.is_floating_point else ("SUM",):
                    label = f"{operation} {reduction} {dtype}"
                    before = reductions()
                    prepare(operation, dtype, (1000,), reduction=reduction).start(False)
                    by_mpi = (
                        operation != "reduce_scatter" and dtype not in FOGS_OWN and reduction != "PREMUL_SUM"
                    )
                    checks.equal(label, reductions() - before, int(by_mpi))
                    if by_mpi:
                        name = CALLS[operation]
                        prepare(operation, dtype, (1000,), reduction=reduction).start(False)
                        checks.true(f"{label}: {name}", calls(name) > 0)
        before = reductions()
        fogdist.init()
        handle = fogdist.allreduce_nonblocking(torch.ones(10), name="by name")
        checks.equal("of a name", fogdist.wait(handle), torch.ones(10))
        dist.barrier()
        dist.all_reduce(torch.ones(0))
        checks.equal("a name, no elements, no reduction", reductions() - before, 0)


def test_who_does_it(world_of: Callable[[str], World]) -> None:
    world_of("mpi").run(who_does_it)


def in_place() -> None:
    """Checks reduce_scatter into its own input, and tensors that are not contiguous."""
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = [make_input(each, torch.int32, 40 * size) for each in range(size)]
    expected = torch.stack(inputs).sum(0, dtype=torch.int32).chunk(size)[rank]
    with Checks() as checks:
        whole = inputs[rank].clone()
        part = whole.chunk(size)[rank]
        dist.reduce_scatter_tensor(part, whole)
        checks.equal("reduce_scatter_tensor in place", part, expected)
        matrix = make_input(rank, torch.int32, (30, 20)).t()
        dist.all_reduce(matrix)
        of_all = torch.stack([make_input(each, torch.int32, (30, 20)) for each in range(size)])
        checks.equal("all_reduce of a transposed one", matrix, of_all.sum(0, dtype=torch.int32).t())


def test_in_place(world_of: Callable[[str], World]) -> None:
    world_of("mpi").run(in_place)


def several_pieces(numel: int) -> int:
    """Sums elements of one byte; returns the number of MPI calls."""
    before = reductions()
    x = torch.full((numel,), 1 + dist.get_rank(), dtype=torch.uint8)
    dist.all_reduce(x)
    size = dist.get_world_size()
    assert x.eq(size * (size + 1) // 2).all()
    return reductions() - before


@pytest.mark.long
def test_several_pieces(world_of: Callable[[str], World]) -> None:
    """MPI counts in int, so larger tensors go in several pieces."""
    assert world_of("mpi").run(several_pieces, PIECE) == [1] * 3
    assert world_of("mpi").run(several_pieces, PIECE + 1) == [2] * 3


def test_on_several_hosts(tmp_path: Path) -> None:
    """Hosts have two ranks and one: TCP goes between the hosts, MPI's shared memory within one."""
    run_on_hosts(
        tmp_path,
        [0, 0, 1],
        "test_collectives",
        [("sweep", [sweep_types, ["all_reduce"]]), ("sweep", [sweep_sizes, REDUCING])],
        environment={"FOG_REDUCE": "mpi"},
    )


# --- order and groups ---------------------------------------------------------------------------------------


def interleaved(rounds: int) -> None:
    """Many operations are in flight in overlapping groups, some of them fog's own; ranks are late, in any order."""
    rank = dist.get_rank()
    late = random.Random(rank)
    pair = dist.new_group([0, 1])
    groups = [None, pair, dist.new_group([0, 1, 2])]
    before, by_mpi = reductions(), 0
    with Checks() as checks:
        for number in range(rounds):
            together = random.Random(number)
            pending: list[tuple[str, Prepared, dist.Work]] = []
            for seed in range(12):
                group = together.choice(groups)
                operation = together.choice(["all_reduce", "reduce", "reduce_scatter_tensor", "broadcast"])
                dtype = together.choice([torch.int32, torch.int64, torch.bfloat16])
                numel = together.choice([1, 1000, 100_000])
                if group is pair and rank == 2:
                    continue
                ready = prepare(operation, dtype, (numel,), seed=seed, root=seed % 2, group=group)
                if late.random() < 0.2:
                    time.sleep(0.002)
                work = ready.start(True)
                assert isinstance(work, dist.Work)
                pending.append((f"round {number}: {operation} {dtype} of {numel}", ready, work))
                by_mpi += int(operation in CALLS and dtype not in FOGS_OWN)
            late.shuffle(pending)
            for label, ready, work in pending:
                work.wait()
                ready.verify(checks, label)
        checks.equal("calls of MPI", reductions() - before, by_mpi)
    for group in groups[1:]:
        if group is not pair or rank < 2:
            dist.destroy_process_group(group)


def test_interleaved(world_of: Callable[[str], World]) -> None:
    world_of("mpi").run(interleaved, 25)


def makes_and_frees(times: int) -> tuple[int, int]:
    """Returns the numbers of communicators that were made and freed."""
    before = calls("MPI_Comm_create_group"), calls("MPI_Comm_free")
    for _ in range(times):
        group = dist.new_group(pg_options=options("mpi"))
        x = torch.ones(3)
        dist.all_reduce(x, group=group)
        assert x.eq(dist.get_world_size()).all()
        dist.destroy_process_group(group)
    return calls("MPI_Comm_create_group") - before[0], calls("MPI_Comm_free") - before[1]


def test_communicators_are_freed(world_of: Callable[[str], World]) -> None:
    """Groups that choose MPI for themselves free their communicators."""
    assert world_of("fog").run(makes_and_frees, 10) == [(10, 10)] * 3


def one_of_two_groups() -> None:
    before = reductions()
    dist.all_reduce(torch.ones(3))
    assert reductions() == before
    group = dist.new_group(pg_options=options("mpi"))
    dist.all_reduce(torch.ones(3), group=group)
    assert reductions() == before + 1
    dist.all_reduce(torch.ones(3))
    assert reductions() == before + 1
    dist.destroy_process_group(group)


def test_the_option_of_a_group(world_of: Callable[[str], World]) -> None:
    world_of("fog").run(one_of_two_groups)


# --- disagreement -------------------------------------------------------------------------------------------


def disagree(what: str) -> str:
    """Rank 1 makes another call; returns the error. Another group still works."""
    group = dist.new_group()
    other = dist.get_rank() == 1
    x = torch.ones(
        4 if other and what == "shape" else 3, dtype=torch.int32 if other and what == "dtype" else None
    )
    before = reductions()
    error = ""
    try:
        if other and what == "operation":
            dist.reduce(x, 0, group=group)
        else:
            op = dist.ReduceOp.MAX if other and what == "reduction" else dist.ReduceOp.SUM
            dist.all_reduce(x, op, group=group)
    except dist.DistBackendError as raised:
        error = str(raised)
    assert reductions() == before
    y = torch.ones(3)
    dist.all_reduce(y)
    assert y.eq(dist.get_world_size()).all()
    return error


@pytest.mark.parametrize(
    ("what", "sides"),
    [
        ("shape", ["float32[3]", "float32[4]"]),
        ("dtype", ["float32[3]", "int32[3]"]),
        ("reduction", ["SUM", "MAX"]),
        ("operation", ["allreduce(", "reduce("]),
    ],
)
def test_disagreement(world_of: Callable[[str], World], what: str, sides: list[str]) -> None:
    """All ranks get an error that names both sides, before MPI is called."""
    for error in world_of("mpi").run(disagree, what):
        assert "disagree" in error and all(side in error for side in sides), error


# --- lost ranks ---------------------------------------------------------------------------------------------


def until_lost(victim: int, after: float, numel: int, how: int) -> tuple[str, float, str]:
    """Repeats allreduces, and sends a signal to one rank in the middle.

    Returns:
        The survivor's error, the seconds from the signal until it came, and the error of a further operation.
    """
    x = torch.ones(numel)
    dist.all_reduce(x)
    dist.barrier()
    begin = time.monotonic()
    if dist.get_rank() == victim:
        threading.Timer(after, os.kill, (os.getpid(), how)).start()
    try:
        for _ in range(ENDLESS):
            works = [dist.all_reduce(torch.ones(numel), async_op=True) for _ in range(3)]
            for work in works:
                work.wait()
    except dist.DistBackendError as error:
        seconds = time.monotonic() - begin - after
        try:
            dist.all_reduce(x)
        except dist.DistBackendError as refused:
            return str(error), seconds, str(refused)
        return str(error), seconds, ""
    return "", 0.0, ""


@pytest.mark.parametrize("numel", [1000, pytest.param(4_000_000, marks=pytest.mark.long)])
def test_a_killed_rank(tmp_path: Path, numel: int) -> None:
    """The others raise an error with its name, and end. In rare cases MPI ends one of them (docs/launchers.md)."""
    found = run_on_hosts(
        tmp_path,
        [0, 1, 2],
        "test_mpi_reductions",
        [("until_lost", [1, 0.3, numel, int(signal.SIGKILL)])],
        timeout=60.0,
        killed=[1],
        mortal=[0, 2],
        environment={"FOG_REDUCE": "mpi"},
    )
    reports = found[0] + found[2]
    assert reports
    for error, seconds, refused in reports:
        assert "rank 1 " in error and "allreduce" in error and seconds < SOON, (error, seconds)
        assert refused


def test_a_rank_that_does_not_answer(new_world: Callable[..., World]) -> None:
    """The timeout ends the Work with an error that names the rank, and nothing hangs at the end."""
    world = new_world(2, timeout=3.0, environment=TCP, finalizing=None)
    pid = world.pid(1)
    thread = threading.Timer(SOON, os.kill, (pid, signal.SIGKILL))
    thread.start()
    survivor, victim = world.run_raw(until_lost, 1, 0.3, 1_000_000, int(signal.SIGSTOP))
    thread.join()
    assert victim.state == "died", str(victim)
    assert survivor.state == "returned", str(survivor)
    error, seconds, refused = survivor.value
    assert "timed out" in error and re.search(r"\brank 1\b", error) and seconds < SOON, survivor.value
    assert refused


# --- settings -----------------------------------------------------------------------------------------------


def test_a_setting_that_means_nothing(new_world: Callable[..., World], tmp_path: Path) -> None:
    for kind, text, _ in started(new_world, tmp_path, [{"FOG_REDUCE": "xyz"}] * 2):
        assert kind == "ValueError", (kind, text)
        assert all(word in text for word in ("FOG_REDUCE", "xyz", "fog", "mpi")), text


def bad_option() -> str:
    init_process_group(30.0)
    try:
        dist.new_group(pg_options=options("MPI"))
    except ValueError as error:
        return str(error)
    return ""


def test_an_option_that_means_nothing(new_world: Callable[..., World]) -> None:
    for text in new_world(2, initialize=False).run(bad_option):
        assert all(word in text for word in ("reduce", "'MPI'", "'fog'", "'mpi'")), text


@pytest.mark.parametrize("apart", [True, False])
def test_ranks_with_different_settings(new_world: Callable[..., World], tmp_path: Path, apart: bool) -> None:
    """All ranks get an error that names both settings, even if MPI would not be used."""
    variables: Mapping[str, str] = MPI if apart else {}
    of_ranks = [{**variables, "FOG_REDUCE": setting} for setting in ("fog", "mpi", "fog")]
    for kind, text, _ in started(new_world, tmp_path, of_ranks):
        assert kind == "DistBackendError", (kind, text)
        assert all(word in text for word in ("FOG_REDUCE", "rank 0 has 'fog'", "rank 1 has 'mpi'")), text


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group('fog')
x = torch.ones(5)
dist.all_reduce(x)
assert x.eq(2).all()
import sys
there = 'there' if 'libmpi' in open('/proc/self/maps').read() else 'not there'
sys.stdout.write(f'MPI is {there}\\n')  # one write, so that ranks do not mix
"""


@pytest.mark.parametrize("apart", [True, False])
def test_the_log_says_what_is_used(tmp_path: Path, apart: bool) -> None:
    """On one host with shared memory, the option changes nothing: MPI is not even loaded."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    variables = {**MPI, "TORCH_CPP_LOG_LEVEL": "INFO", "FOG_LOCAL_LINKS": "0" if apart else "1"}
    job = Job([script], 2, tmp_path / "log", environment=variables)
    try:
        assert job.wait(60) == 0, job.output
    finally:
        job.stop()
    said = "MPI does allreduce, reduce and reduce_scatter" if apart else 'reduce="mpi" changes nothing'
    assert job.output.count(said) == 1, job.output
    assert job.output.count("MPI is there" if apart else "MPI is not there") == 2, job.output


def test_of_the_first_group(new_world: Callable[..., World], counter: str) -> None:
    """The option is given to init_process_group."""
    variables = {"FOG_LOCAL_LINKS": "0", "FOG_MPI_LIBRARY": counter}
    assert new_world(2, initialize=False, environment=variables).run(first_group) == [1, 1]


def first_group() -> int:
    import fog_pg  # noqa: F401

    dist.init_process_group("fog", timeout=timedelta(seconds=30), pg_options=options("mpi"))
    dist.all_reduce(torch.ones(3))
    return reductions()
