"""Tests of MPI RMA between hosts: targets that are stopped or killed, and settings that cannot work."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import fogdist
import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, Outcome, World, init_process_group
from hosts import emulated_hosts, move_to_host, run_on_hosts
from scripts import Job
from torch import Tensor

pytestmark = [
    pytest.mark.skipif(BACKEND != "fog", reason="tests fog's MPI"),
    pytest.mark.usefixtures("nothing_left"),
]

APART = {"FOG_LOCAL_LINKS": "0"}
RMA = {**APART, "FOG_BETWEEN_HOSTS": "rma"}
# To MPI too, every rank is a node of its own. There is only TCP, so a transfer needs its target.
TCP = {**APART, "MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self"}
LONG_TIMEOUT = 60.0
# Seconds in which, on a busy machine, a survivor notices a loss, and a call towards a stopped rank returns.
SOON = 10.0
NUMEL = 500_000
# Rounds of an operation that a death ends; they never come to their end.
ENDLESS = 1_000_000


# --- stopped targets ----------------------------------------------------------------------------------------


def state_of(pid: int) -> str:
    """Returns the state of a process: "T" if it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops a process in this block; a timer continues it if this process hangs."""
    os.kill(pid, signal.SIGSTOP)
    safety = threading.Timer(SOON, os.kill, (pid, signal.SIGCONT))
    safety.start()
    try:
        while state_of(pid) != "T":
            time.sleep(0.01)
        yield
    finally:
        safety.cancel()
        os.kill(pid, signal.SIGCONT)


def pids() -> list[int]:
    found: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(found, os.getpid())
    return found


def values(seed: int) -> Tensor:
    return torch.rand(NUMEL, generator=torch.Generator().manual_seed(seed))


def put_to_a_stopped_target(rounds: int) -> list[str]:
    """Rank 0 puts; returns a list of problems."""
    fogdist.init(fogdist.FullyConnectedGraph)
    window, targets, problems = fogdist.Window(torch.zeros(NUMEL), zero_init=True), pids(), []
    dist.barrier()
    if dist.get_rank() == 0:
        with stopped(targets[1]):
            for number in range(rounds):
                window.put(values(number))
                if state_of(targets[1]) != "T":
                    problems.append(f"put {number} returned when the target went on")
    dist.barrier()
    if dist.get_rank() == 1:
        slot = window.update(self_weight=0.0, neighbor_weights={0: 1.0}, clone=True)
        if not torch.equal(slot, values(rounds - 1)):
            problems.append("the slot has something else than the last put")
        if window.version(0) != 0:
            problems.append(f"version {window.version(0)} after an update")
    dist.barrier()
    window.free()
    return problems


def get_from_a_stopped_target(rounds: int) -> list[str]:
    fogdist.init(fogdist.FullyConnectedGraph)
    window, targets, problems = fogdist.Window(values(dist.get_rank())), pids(), []
    dist.barrier()
    if dist.get_rank() == 0:
        with stopped(targets[1]):
            for number in range(rounds):
                window.get()
                if state_of(targets[1]) != "T":
                    problems.append(f"get {number} returned when the target went on")
            slot = window.update(self_weight=0.0, neighbor_weights={1: 1.0}, clone=True)
            if not torch.equal(slot, values(1)):
                problems.append("the slot has something else than the target's tensor")
    dist.barrier()
    window.free()
    return problems


def send_to(peer: int, x: Tensor) -> int:
    """Starts an exchange in which this rank only sends."""
    return fogdist.neighbor_allreduce_nonblocking(
        x, self_weight=1.0, src_weights={}, dst_weights={peer: 1.0}, enable_topo_check=False
    )


def receive_from(peer: int, x: Tensor) -> int:
    return fogdist.neighbor_allreduce_nonblocking(
        x, self_weight=0.5, src_weights={peer: 0.5}, dst_weights={}, enable_topo_check=False
    )


def exchange_with_a_stopped_target(rounds: int) -> list[str]:
    """Rank 0 sends to rank 1, which is stopped before it has called the exchange."""
    fogdist.init()
    rank, targets, problems = dist.get_rank(), pids(), []
    own = values(100 + rank)

    def exchange(number: int) -> int:
        return send_to(1, values(number)) if rank == 0 else receive_from(0, own)

    def check(number: int, handle: int) -> None:
        expected = values(number) if rank == 0 else 0.5 * own + 0.5 * values(number)
        if not torch.allclose(fogdist.wait(handle), expected, rtol=1e-6, atol=0):
            problems.append(f"exchange {number}: wrong result on rank {rank}")

    for number in range(3):  # the first exchanges grant the slots
        check(number, exchange(number))
    dist.barrier()
    numbers, handles = range(3, 3 + rounds), []
    if rank == 0:
        with stopped(targets[1]):
            handles = [exchange(number) for number in numbers]
            end = time.monotonic() + SOON / 2
            while not fogdist.poll(handles[0]) and time.monotonic() < end:
                time.sleep(0.01)
            if not fogdist.poll(handles[0]):
                problems.append("the sender's part did not end while the target was stopped")
            if state_of(targets[1]) != "T":
                problems.append("the target went on too early")
    else:
        time.sleep(0.5)  # it is stopped during this time
        handles = [exchange(number) for number in numbers]
    for number, handle in zip(numbers, handles):
        check(number, handle)
    dist.barrier()
    return problems


STOPPED: dict[str, Callable[[int], list[str]]] = {
    "put": put_to_a_stopped_target,
    "get": get_from_a_stopped_target,
    "exchange": exchange_with_a_stopped_target,
}


@pytest.mark.parametrize("kind", STOPPED)
def test_a_stopped_target(new_world: Callable[..., World], kind: str) -> None:
    """A put, a get and the sender's part of an exchange complete meanwhile; all data is there afterwards."""
    # Without confirmations, a sender does not wait until its receiver agrees.
    variables = {**RMA, "FOG_CONFIRM": "0"}
    problems = new_world(2, timeout=LONG_TIMEOUT, environment=variables).run(STOPPED[kind], 2)
    assert not any(problems), problems


# --- killed ranks -------------------------------------------------------------------------------------------


def operation(kind: str) -> Callable[[], object]:
    """Returns a function that runs one operation between both ranks; all ranks call this together."""
    fogdist.init(fogdist.FullyConnectedGraph)
    x = values(dist.get_rank())
    if kind in ("exchange", "allreduce"):
        return lambda: (fogdist.neighbor_allreduce if kind == "exchange" else fogdist.allreduce)(x)
    window = fogdist.Window(x)
    dist.barrier()
    return (lambda: window.put(x)) if kind == "put" else window.get


def until_killed(kind: str, after: float) -> tuple[str, float, str]:
    """Rank 1 is killed in the middle of operations.

    Returns:
        The survivor's error, the seconds from the kill until it came, and the transport to the peer.
    """
    once = operation(kind)
    transport = fogdist.transport(1 - dist.get_rank())
    dist.barrier()
    begin = time.monotonic()
    if dist.get_rank() == 1:
        threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        for _ in range(ENDLESS):
            once()
    except dist.DistBackendError as error:
        return str(error), time.monotonic() - begin - after, transport
    return "", time.monotonic() - begin - after, transport


def after_a_death(kind: str) -> tuple[str, float, str]:
    """Rank 1 is killed between two operations, and rank 0 calls the next one later; returns as `until_killed` does."""
    once = operation(kind)
    transport = fogdist.transport(1 - dist.get_rank())
    for _ in range(3):
        once()
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    begin = time.monotonic()
    try:
        once()
    except dist.DistBackendError as error:
        return str(error), time.monotonic() - begin, transport
    return "", time.monotonic() - begin, transport


# The kinds of operations, and the seconds until the kill.
KINDS = ["exchange", "put", "get", "allreduce"]
SAMPLE = [("exchange", 0.3), ("put", 0.3)]
MORE = [(kind, after) for kind in KINDS for after in (0.2, 0.25, 0.35)]
KILLS = [*SAMPLE, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE)]


@pytest.mark.parametrize(("kind", "after"), KILLS)
def test_a_killed_rank_with_rma(new_world: Callable[..., World], kind: str, after: float) -> None:
    """The survivor raises, or UCX ends it: in UCX, a copy from a dead process is a fatal error."""
    world = new_world(2, timeout=LONG_TIMEOUT, environment=RMA, finalizing=None)
    survivor, victim = world.run_raw(until_killed, kind, after, timeout=2 * SOON)
    assert victim.state == "died" and "SIGKILL" in victim.details, str(victim)
    check_survivor(survivor, "rma", may_die=True)


@pytest.mark.parametrize(("kind", "after"), KILLS)
def test_a_killed_rank_over_tcp(tmp_path: Path, kind: str, after: float) -> None:
    """Here `auto` chooses messages, and the survivor raises."""
    (found, _) = run_on_hosts(
        tmp_path,
        [0, 1],
        "test_rma_failures",
        [("until_killed", [kind, after])],
        timeout=LONG_TIMEOUT,
        killed=[1],
        environment={"FOG_BETWEEN_HOSTS": "auto"},
    )
    check_survivor(Outcome(0, "returned", found[0]), "messages", may_die=False)


@pytest.mark.parametrize(
    "kind", [*KINDS[:2], *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS[2:])]
)
def test_a_rank_killed_before_the_operation(new_world: Callable[..., World], kind: str) -> None:
    """Nothing is put or flushed towards the dead rank, so the survivor raises, and lives."""
    world = new_world(2, timeout=LONG_TIMEOUT, environment=RMA, finalizing=None)
    survivor, victim = world.run_raw(after_a_death, kind, timeout=2 * SOON)
    assert victim.state == "died" and "SIGKILL" in victim.details, str(victim)
    check_survivor(survivor, "rma", may_die=False)


def check_survivor(survivor: Outcome, transport: str, *, may_die: bool) -> None:
    if may_die and survivor.state == "died":
        assert "SIGABRT" in survivor.details, str(survivor)
        return
    assert survivor.state == "returned", str(survivor)
    error, seconds, used = survivor.value
    assert "rank 1 " in error and used == transport, survivor.value
    assert seconds < SOON, survivor.value


# --- settings -----------------------------------------------------------------------------------------------


def start(of_ranks: Sequence[Mapping[str, str]], timeout: float, log: str) -> tuple[str, str, str]:
    """Starts fog with different settings on each rank.

    Args:
        of_ranks: Environment variables of each rank.
        timeout: The timeout of the group, in seconds.
        log: Name of a file for the output, to which the rank's number is appended.

    Returns:
        The type and text of the error, empty if there was none, and the output.
    """
    rank = int(os.environ["RANK"])
    os.environ.update(of_ranks[rank])
    file = os.open(f"{log}{rank}", os.O_RDWR | os.O_CREAT)
    kept = os.dup(2)
    os.dup2(file, 2)
    kind = text = ""
    try:
        init_process_group(timeout)
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    finally:
        os.dup2(kept, 2)
    return kind, text, Path(f"{log}{rank}").read_text()


def started(
    new_world: Callable[..., World], folder: Path, of_ranks: Sequence[Mapping[str, str]], **options: Any
) -> list[tuple[str, str, str]]:
    """Returns the results of `start` on all ranks."""
    world = new_world(len(of_ranks), initialize=False, **options)
    found: list[tuple[str, str, str]] = world.run(start, list(of_ranks), 30.0, str(folder / "log"))
    return found


def alike(variables: Mapping[str, str], ranks: int = 2) -> list[Mapping[str, str]]:
    return [variables] * ranks


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("FOG_BETWEEN_HOSTS", "xyz", ["auto", "rma", "messages", "tcp"]),
        ("FOG_RMA_BYTES", "abc", ["bytes"]),
        pytest.param("FOG_RMA_BYTES", "-5", ["bytes"], marks=pytest.mark.long),
        pytest.param("FOG_BETWEEN_HOSTS", "RMA", ["auto", "rma", "messages"], marks=pytest.mark.long),
    ],
)
def test_a_setting_that_means_nothing(
    new_world: Callable[..., World], tmp_path: Path, name: str, value: str, allowed: list[str]
) -> None:
    for kind, text, _ in started(new_world, tmp_path, alike({**RMA, name: value})):
        assert kind == "ValueError", (kind, text)
        assert all(word in text for word in [name, value, *allowed]), text


def test_rma_where_the_fabric_cannot(new_world: Callable[..., World], tmp_path: Path) -> None:
    """All ranks get an error at the start that gives the reason."""
    found = started(new_world, tmp_path, alike({**TCP, "FOG_BETWEEN_HOSTS": "rma"}))
    for kind, text, _ in found:
        assert kind == "DistBackendError", (kind, text)
        assert "FOG_BETWEEN_HOSTS=rma" in text, text
        assert re.search("not complete within .* while that rank was outside of MPI", text), text


@pytest.mark.parametrize(("first", "second"), [("rma", "messages"), ("auto", "rma")])
def test_ranks_with_different_settings(
    new_world: Callable[..., World], tmp_path: Path, first: str, second: str
) -> None:
    """All ranks get an error that names the ranks and their settings."""
    of_ranks = [{**APART, "FOG_BETWEEN_HOSTS": setting} for setting in (first, second, first)]
    for kind, text, _ in started(new_world, tmp_path, of_ranks):
        assert kind == "DistBackendError", (kind, text)
        assert all(word in text for word in ("FOG_BETWEEN_HOSTS", first, second)), text
        assert re.search(r"ranks? .*\b1\b", text), text


def choose(name: str, master: str) -> str:
    """Returns, on an emulated host, the transport to the other rank."""
    move_to_host(name)
    rank = int(os.environ["RANK"])
    store = dist.TCPStore(master, 29515, 2, rank == 0)
    dist.init_process_group(
        "fog", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=LONG_TIMEOUT)
    )
    fogdist.init()
    x = torch.full((NUMEL,), float(rank))
    assert fogdist.neighbor_allreduce(x).eq(0.5).all()
    return fogdist.transport(1 - rank)


@pytest.mark.parametrize(("tls", "transport"), [("tcp,self", "messages"), ("shm,self", "rma")])
def test_auto(new_world: Callable[..., World], tls: str, transport: str) -> None:
    """`auto` chooses the transport that suits the fabric."""
    with emulated_hosts(2) as names:
        world = new_world(2, initialize=False, environment={"UCX_TLS": tls, "FOG_BETWEEN_HOSTS": "auto"})
        outcomes = world.run_by_rank(choose, [(name, "10.213.77.1") for name in names])
        assert [outcome.state for outcome in outcomes] == ["returned"] * 2, list(map(str, outcomes))
        assert [outcome.value for outcome in outcomes] == [transport] * 2
        world.close()


def test_the_log_says_once_what_is_used(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group('fog')\n")
    variables = {**RMA, "TORCH_CPP_LOG_LEVEL": "INFO"}
    job = Job([script], 2, tmp_path / "log", environment=variables)
    try:
        assert job.wait(60) == 0, job.output
    finally:
        job.stop()
    assert job.output.count("between hosts data goes by RMA") == 1, job.output
