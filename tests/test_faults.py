"""Ranks that are killed or stopped during every kind of operation, and programs that are interrupted or fork.

A rank is killed while operations of all kinds are in flight, each in its own group, for every rank and both moments.
With FOG_FAULTS=all, as in `make faults`, each combination of a kind, a rank and a moment also runs in its own world.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fogdist.compression import Int8
from harness import BACKEND, Outcome, World, error_of
from hosts import run_on_hosts
from torch import Tensor

pytestmark = [
    pytest.mark.skipif(BACKEND != "fog", reason="other backends hang or crash here"),
    pytest.mark.usefixtures("nothing_left"),
]

FULL = os.environ.get("FOG_FAULTS", "") == "all"
RANKS = 3
# Much longer than any of these tests may take, so an error that arrives only at the timeout fails the test.
LONG_TIMEOUT = 60.0
# The value of FOG_HOST_TIMEOUT: the smallest that is allowed.
HOST_TIMEOUT = 4
SOON = 5.0
SHORT_TIMEOUT = 2.0
# More than a message carries inline, and more than MPI sends before the receiver has agreed.
LARGE = 300_000
# Rounds of an operation that is interrupted in the middle; they never come to their end.
ENDLESS = 1_000_000
# Machines of one rank each, and one machine of all ranks.
APART = [[rank] for rank in range(RANKS)]
TOGETHER = [list(range(RANKS))]
REFUSED = "has failed and takes no more work: "


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


def _lists(numel: int) -> list[Tensor]:
    return [_zeros(numel) for _ in range(RANKS)]


def _backend(group: dist.ProcessGroup) -> dist.Backend:
    return group._get_backend(torch.device("cpu"))


def _ring(rank: int) -> object:
    from fog_pg import _C

    return _C.NeighborPlan(rank, RANKS, 0.5, [((rank - 1) % RANKS, 0.5)], [((rank + 1) % RANKS, 1.0)])


def _hierarchical(rank: int, machines: list[list[int]], numel: int, group: dist.ProcessGroup) -> dist.Work:
    """Uses the weights of a ring of machines, or one machine alone."""
    from fog_pg import _C

    machine = next(m for m, ranks in enumerate(machines) if rank in ranks)
    plan = _ring(rank) if len(machines) == RANKS else _C.NeighborPlan(machine, len(machines), 1.0, [], [])
    return _backend(group).hierarchical_neighbor_allreduce(_zeros(numel), machines, plan)


def _gather(rank: int, root: int, numel: int, group: dist.ProcessGroup) -> dist.Work | None:
    into = _lists(numel) if rank == root else None
    return dist.gather(_zeros(numel), into, group=group, group_dst=root, async_op=True)


def _scatter(rank: int, root: int, numel: int, group: dist.ProcessGroup) -> dist.Work | None:
    given = _lists(numel) if rank == root else None
    return dist.scatter(_zeros(numel), given, group=group, group_src=root, async_op=True)


def _message(rank: int, source: int, target: int, numel: int, group: dist.ProcessGroup) -> dist.Work | None:
    if rank == source:
        return dist.isend(_zeros(numel), group=group, group_dst=target)
    return dist.irecv(_zeros(numel), group=group, group_src=source) if rank == target else None


# Starts an operation on one rank, given the rank, the victim of the case and the group. Returns None if the rank takes
# no part.
_Start = Callable[[int, int, dist.ProcessGroup], "dist.Work | None"]


def _broadcast(root: int, numel: int, group: dist.ProcessGroup) -> dist.Work | None:
    return dist.broadcast(_zeros(numel), group=group, group_src=root, async_op=True)


def _reduce(root: int, numel: int, group: dist.ProcessGroup) -> dist.Work | None:
    return dist.reduce(_zeros(numel), group=group, group_dst=root, async_op=True)


def _reduce_scatter(numel: int, group: dist.ProcessGroup) -> dist.Work | None:
    return dist.reduce_scatter(_zeros(numel), _lists(numel), group=group, async_op=True)


def _next(v: int) -> int:
    return (v + 1) % RANKS


KINDS: dict[str, _Start] = {
    "allreduce": lambda r, v, g: dist.all_reduce(_zeros(100), group=g, async_op=True),
    "large allreduce": lambda r, v, g: dist.all_reduce(_zeros(LARGE), group=g, async_op=True),
    "broadcast from it": lambda r, v, g: _broadcast(v, 100, g),
    "large broadcast": lambda r, v, g: _broadcast(_next(v), LARGE, g),
    "reduce to it": lambda r, v, g: _reduce(v, 100, g),
    "large reduce": lambda r, v, g: _reduce(_next(v), LARGE, g),
    "allgather": lambda r, v, g: dist.all_gather(_lists(100), _zeros(100), group=g, async_op=True),
    "large allgather": lambda r, v, g: dist.all_gather(_lists(LARGE), _zeros(LARGE), group=g, async_op=True),
    "gather to it": lambda r, v, g: _gather(r, v, LARGE, g),
    "gather": lambda r, v, g: _gather(r, _next(v), 100, g),
    "scatter from it": lambda r, v, g: _scatter(r, v, LARGE, g),
    "scatter": lambda r, v, g: _scatter(r, _next(v), 100, g),
    "reduce_scatter": lambda r, v, g: _reduce_scatter(LARGE, g),
    "alltoall": lambda r, v, g: dist.all_to_all(_lists(100), _lists(100), group=g, async_op=True),
    "large alltoall": lambda r, v, g: dist.all_to_all(_lists(LARGE), _lists(LARGE), group=g, async_op=True),
    "barrier": lambda r, v, g: dist.barrier(g, async_op=True),
    "send": lambda r, v, g: _message(r, _next(v), v, 100, g),
    "large send": lambda r, v, g: _message(r, _next(v), v, LARGE, g),
    "recv": lambda r, v, g: _message(r, v, _next(v), 100, g),
    "large recv": lambda r, v, g: _message(r, v, _next(v), LARGE, g),
    "neighbor_allreduce": lambda r, v, g: _backend(g).neighbor_allreduce(_zeros(100), _ring(r)),
    "large neighbor_allreduce": lambda r, v, g: _backend(g).neighbor_allreduce(_zeros(LARGE), _ring(r)),
    "hierarchical_neighbor_allreduce": lambda r, v, g: _hierarchical(r, APART, 100, g),
    "large hierarchical_neighbor_allreduce": lambda r, v, g: _hierarchical(r, TOGETHER, LARGE, g),
    "local_allreduce": lambda r, v, g: _backend(g).local_allreduce(
        _zeros(LARGE), TOGETHER, dist.ReduceOp.SUM
    ),
    "neighbor_allgather": lambda r, v, g: _backend(g).neighbor_allgather(_zeros(LARGE, 1), _ring(r)),
    "allgather_concat": lambda r, v, g: _backend(g).allgather_concat(_zeros(100 + r, 1)),
    "compressed neighbor_allreduce": lambda r, v, g: _backend(g).neighbor_allreduce(
        _zeros(LARGE), _ring(r), compression=Int8().backend
    ),
}


def operation_of(kind: str) -> str:
    """Returns the name of a kind's operation in messages."""
    name = re.sub(r"^(large|compressed) | (from|to) it$", "", kind)
    return "send/recv" if name in ("send", "recv") else name


def may_complete(kind: str, rank: int, victim: int) -> bool:
    """Returns whether the rank's part does not depend on the victim, for example if it exchanges with the root only."""
    if kind == "send":  # a send is complete when the message is on its way
        return rank != victim
    rooted = kind in ("large broadcast", "large reduce", "gather", "scatter")
    return (rooted or takes_no_part(kind, rank, victim)) and rank not in (victim, _next(victim))


def takes_no_part(kind: str, rank: int, victim: int) -> bool:
    """Returns whether the kind is a message between two other ranks."""
    return operation_of(kind) == "send/recv" and rank not in (victim, _next(victim))


def wait_for(work: dist.Work | None) -> None:
    """Waits for an operation if this rank takes part in it."""
    if work is not None:
        work.wait()


# Killed ranks


def lose_a_rank(kind: str, victim: int, moment: str) -> tuple[str, float, str, float]:
    """Runs on each rank. Returns the error of the operation and its seconds, and those of a later operation.

    The victim dies before it calls the operation, or in the middle of a loop of operations.
    """
    rank = dist.get_rank()
    start, group = KINDS[kind], dist.new_group(timeout=timedelta(seconds=LONG_TIMEOUT))
    dist.barrier(group)

    def run() -> None:
        for _ in range(1 if moment == "before" else ENDLESS):
            work = start(rank, victim, group)
            if work is None:
                return
            work.wait()

    if rank == victim:
        if moment == "before":
            time.sleep(0.2)  # the other ranks have called the operation by then
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    begin = time.monotonic()
    first = error_of(run)
    came = time.monotonic()
    if rank == victim:
        time.sleep(SOON)  # if it takes no part in the operation, it is killed here
    later = error_of(lambda: dist.barrier(group))
    return first, came - begin, later, time.monotonic() - came


def cases() -> list[tuple[str, int, str]]:
    """Returns the kinds, ranks and moments to test."""
    moments = ["before", "during"]
    if FULL:
        return list(itertools.product(KINDS, range(RANKS), moments))
    return [(kind, n % RANKS, moments[n // RANKS % 2]) for n, kind in enumerate(KINDS)]


@pytest.mark.parametrize(
    ("kind", "victim", "moment"),
    [pytest.param(*case, marks=[] if FULL else [pytest.mark.long]) for case in cases()],
)
def test_killed_rank_in_each_kind(
    new_world: Callable[..., World], kind: str, victim: int, moment: str
) -> None:
    world = new_world(RANKS, timeout=LONG_TIMEOUT, finalizing=None)
    outcomes = world.run_raw(lose_a_rank, kind, victim, moment, timeout=20)
    assert outcomes[victim].state == "died" and "SIGKILL" in outcomes[victim].details, str(outcomes[victim])
    survivors: list[Outcome] = [o for o in outcomes if o.rank != victim]
    for survivor in survivors:
        assert survivor.state == "returned", str(survivor)
        first, seconds, later, later_seconds = survivor.value
        if first:
            assert f"rank {victim} " in first, str(survivor.value)
            # The later operation is refused with the text of the first error. In a loop of operations, the first error
            # may be a refusal itself.
            text = first.removeprefix("fog: ").rpartition(REFUSED)[2]
            assert REFUSED in later and later.endswith(text), str(survivor.value)
        elif moment == "before":
            assert may_complete(kind, survivor.rank, victim), f"completed: {survivor}"
        else:
            assert takes_no_part(kind, survivor.rank, victim), f"completed: {survivor}"
        assert f"rank {victim} " in later, str(survivor.value)
        assert seconds < SOON and later_seconds < SOON, str(survivor.value)
    # The survivors leave cleanly: the end of the world checks their exit status.


def lose_a_rank_in_all_kinds(victim: int, moment: str, over_sockets: bool, folder: str) -> list[str]:
    """Runs all kinds at the same time, each in its own group, while a rank is killed; then the survivors go on.

    The victim dies before it calls any of them, or in the middle of loops of them.

    Args:
        victim: The rank that is killed.
        moment: "before" or "during".
        over_sockets: Whether the victim is on another host.
        folder: Folder for files by which the survivors tell that they have noticed the loss.

    Returns:
        A description of each problem.
    """
    rank = dist.get_rank()
    groups = {kind: dist.new_group(timeout=timedelta(seconds=LONG_TIMEOUT)) for kind in KINDS}
    living = dist.new_group([r for r in range(RANKS) if r != victim])
    for group in groups.values():
        dist.barrier(group)
    if rank == victim:
        if moment == "before" and os.fork() == 0:  # a child that inherits descriptors must not hide the end
            end = time.monotonic() + SOON + 1.0
            while len(list(Path(folder).glob("noticed*"))) < RANKS - 1 and time.monotonic() < end:
                time.sleep(0.05)
            os._exit(0)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if moment == "before":
            time.sleep(LONG_TIMEOUT)
    begin = time.monotonic()
    errors: dict[str, str] = {}
    while not errors:
        works: dict[str, dist.Work | None] = {}
        for kind, group in groups.items():
            try:
                works[kind] = KINDS[kind](rank, victim, group)
            except dist.DistBackendError as error:
                errors[kind] = str(error)
        for kind, work in works.items():
            if error_text := error_of(lambda w=work: wait_for(w)):
                errors[kind] = error_text
    problems = [
        f"{kind}: rank {rank} got {text!r}" for kind, text in errors.items() if f"rank {victim} " not in text
    ]
    for kind, group in groups.items():
        # Sockets also accept a large message.
        at_once = over_sockets and kind == "large send"
        expected = moment == "before" and not at_once and not may_complete(kind, rank, victim)
        if expected and kind not in errors:
            problems.append(f"{kind}: completed on rank {rank}")
        # Now the loss is known, so even a send can only fail.
        text = error_of(lambda k=kind, g=group: wait_for(KINDS[k](rank, victim, g)))
        if not (f"rank {victim} " in text or (not text and may_complete(kind, rank, victim))):
            problems.append(f"{kind}: rank {rank} got {text!r} afterwards")
        # A failed group takes no more work, and its error gives the reason. The first error may be a refusal itself.
        why = errors.get(kind, "").removeprefix("fog: ").rpartition(REFUSED)[2]
        if why and not (REFUSED in text and text.endswith(why)):
            problems.append(f"{kind}: rank {rank} got {errors[kind]!r} and then {text!r}")
    seconds = time.monotonic() - begin
    if seconds > SOON:
        problems.append(f"the errors came after {seconds:.1f} s")
    Path(folder, f"noticed by {rank}").touch()
    sums = torch.ones(LARGE)
    dist.all_reduce(sums, group=living)
    if not sums.eq(RANKS - 1).all():
        problems.append(f"the survivors summed up {sums}")
    return problems


@pytest.mark.parametrize(("victim", "moment"), [(0, "before"), (1, "during"), (2, "before"), (0, "during")])
def test_killed_rank(new_world: Callable[..., World], tmp_path: Path, victim: int, moment: str) -> None:
    world = new_world(RANKS, timeout=LONG_TIMEOUT, finalizing=None)
    arguments = (victim, moment, False, str(tmp_path))
    outcomes = world.run_raw(lose_a_rank_in_all_kinds, *arguments, timeout=40)
    assert outcomes[victim].state == "died" and "SIGKILL" in outcomes[victim].details, str(outcomes[victim])
    for survivor in (o for o in outcomes if o.rank != victim):
        assert survivor.state == "returned", str(survivor)
        assert not survivor.value, "\n".join(survivor.value)
    # The survivors leave cleanly: the end of the world checks their exit status.


@pytest.mark.parametrize("netmod", ["UCX", "OFI"] if FULL else ["UCX"])
@pytest.mark.parametrize("moment", ["before", "during"])
@pytest.mark.parametrize("placement", [[0, 1, 1], [0, 0, 1]], ids=["with a witness", "alone"])
def test_killed_rank_of_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: list[int], moment: str, netmod: str
) -> None:
    """Rank 2 is lost; its host has another rank, or only this one."""
    monkeypatch.setenv("FOG_CONFIRM", "1")
    calls = [("lose_a_rank_in_all_kinds", [2, moment, True, str(tmp_path)])]
    problems = run_on_hosts(tmp_path, placement, "test_faults", calls, killed=[2], netmod=netmod)
    assert not any(found for (found,) in problems[:2]), problems


def lose_a_host(victim: int) -> tuple[str, float]:
    """Cuts the network of the victim's host; returns the error of an allreduce, and the seconds until it came."""
    dist.barrier()
    begin = time.monotonic()
    if dist.get_rank() == victim:
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    return error_of(lambda: dist.all_reduce(_zeros(LARGE))), time.monotonic() - begin


@pytest.mark.skipif(not FULL, reason="takes 10 s; set FOG_FAULTS=all")
def test_host_that_vanishes(tmp_path: Path) -> None:
    setting = {"FOG_HOST_TIMEOUT": str(HOST_TIMEOUT)}
    calls = [("lose_a_host", [2])]
    *survivors, alone = run_on_hosts(tmp_path, [0, 1, 2], "test_faults", calls, environment=setting)
    for error, seconds in [value for (value,) in survivors]:
        assert re.search(r"rank 2 .* was lost: its host does not answer", error), error
        # The time depends neither on the default of eleven seconds nor on the group's timeout.
        assert HOST_TIMEOUT - 1.5 < seconds < HOST_TIMEOUT + 5.0, seconds
    assert re.search("rank [01] .* does not answer", alone[0][0]), alone


def lose_a_rank_later(victim: int) -> tuple[str, float]:
    """The victim is dead before the others call the operation."""
    dist.barrier()
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    begin = time.monotonic()
    return error_of(lambda: dist.all_gather(_lists(4), _zeros(4))), time.monotonic() - begin


@pytest.mark.parametrize("victim", [0, 1])
def test_rank_lost_before_the_operation(new_world: Callable[..., World], victim: int) -> None:
    outcomes = new_world(RANKS, timeout=LONG_TIMEOUT).run_raw(lose_a_rank_later, victim, timeout=20)
    for survivor in (o for o in outcomes if o.rank != victim):
        assert survivor.state == "returned", str(survivor)
        error, seconds = survivor.value
        assert re.search(rf"(?i)\brank {victim}\b", error) and seconds < SOON, str(survivor.value)


def receive_from_the_lost(numel: int) -> tuple[str, bool, float]:
    """Rank 1 sends a message and dies; rank 0 receives it afterwards."""
    message = torch.arange(numel, dtype=torch.float32)
    dist.barrier()
    if dist.get_rank() == 1:
        dist.isend(message, 0)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.0)
    begin = time.monotonic()
    received = torch.zeros(numel)
    error = error_of(lambda: dist.recv(received, 1))
    return error, received.equal(message), time.monotonic() - begin


# Without the ring, a message arrives as a whole if its data comes with its header.
WHOLE = 2_000 if os.environ.get("FOG_LOCAL_LINKS") == "0" else 30_000


@pytest.mark.parametrize(("numel", "arrives"), [(WHOLE, True), (1_000_000, False)])
def test_message_of_a_rank_lost_since(new_world: Callable[..., World], numel: int, arrives: bool) -> None:
    """A message that fits into the ring arrives; of a longer one the rest is lost, and the receiver must not wait."""
    survivor = new_world(2, timeout=LONG_TIMEOUT).run_raw(receive_from_the_lost, numel, timeout=20)[0]
    assert survivor.state == "returned", str(survivor)
    error, equal, seconds = survivor.value
    assert equal == arrives and seconds < SOON, str(survivor.value)
    if arrives:
        assert not error
    else:
        assert "rank 1" in error and "was lost" in error, error


def go_on_without(victim: int) -> list[list[float]]:
    """Ranks that do not need the lost one go on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group([r for r in range(size) if r != victim])
    for _ in range(
        2
    ):  # by TCP, the last messages of the first barrier may wait in the victim for a connection
        dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    sums = []
    for step in range(20):
        tensor = torch.full((5000,), float(rank + step))
        dist.all_reduce(tensor, group=group)
        sums.append(tensor.unique().tolist())
    return sums


def test_survivors_go_on_in_their_own_group(new_world: Callable[..., World]) -> None:
    outcomes = new_world(4, timeout=LONG_TIMEOUT).run_raw(go_on_without, 2, timeout=20)
    assert outcomes[2].state == "died", str(outcomes[2])
    for survivor in (o for o in outcomes if o.rank != 2):
        assert survivor.state == "returned", str(survivor)
        assert survivor.value == [[0.0 + 1 + 3 + 3 * step] for step in range(20)]


# A stopped rank: its process exists, but does not answer


def stop_a_rank(victim: int, per_call: bool) -> list[str]:
    """Rank `victim` is stopped while the others call all kinds of operations, each in its own group.

    The timeout is either the group's or that of the call of `wait`. In the second case the operations go on.
    """
    rank = dist.get_rank()
    survivors = [r for r in range(RANKS) if r != victim]
    timeout = timedelta(seconds=LONG_TIMEOUT if per_call else SHORT_TIMEOUT)
    groups = {kind: dist.new_group(timeout=timeout) for kind in KINDS}
    living = dist.new_group(survivors, timeout=timedelta(seconds=LONG_TIMEOUT))
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(RANKS)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    for group in groups.values():  # so the operations that time out are not the first in their groups
        dist.barrier(group)
    problems = []
    started: dict[str, dist.Work | None] = {}
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)  # a survivor continues it later
        if per_call:
            started = {kind: KINDS[kind](rank, victim, group) for kind, group in groups.items()}
    else:
        time.sleep(0.2)
        started = {kind: KINDS[kind](rank, victim, group) for kind, group in groups.items()}
        begin = time.monotonic()
        for kind, work in started.items():
            if work is None:
                continue
            error = error_of((lambda w=work: w.wait(timedelta(seconds=0.2))) if per_call else work.wait)
            if error or not may_complete(kind, rank, victim):
                problems += wrong_in_timeout(error, kind, groups[kind], victim)
        seconds = time.monotonic() - begin
        if not (per_call or SHORT_TIMEOUT - 0.5 < seconds < SHORT_TIMEOUT + SOON):
            problems.append(f"the errors came after {seconds:.1f} s, the timeout is {SHORT_TIMEOUT} s")
        dist.barrier(living)
        if rank == survivors[0]:
            os.kill(int(pids[victim].item()), signal.SIGCONT)
    for kind, group in groups.items():
        if per_call:
            work = started[kind]
            error, expected = error_of(work.wait) if work else "", "^$"
        else:
            if rank == victim:
                # The rank learns of the failure now, unless all the data that it needs came before.
                error = error_of(lambda k=kind, g=group: wait_for(KINDS[k](rank, victim, g)))
                if error and "timed out" not in error:
                    problems.append(f"{kind}: the stopped rank got {error!r}")
            error = error_of(lambda g=group: dist.barrier(g))
            expected = "timed out" if rank == victim else f"{REFUSED}.* timed out"
            if kind == "send":  # nothing has failed: the message was on its way, and has arrived by now
                expected = "^$"
        if not re.search(expected, error):
            problems.append(f"{kind}: rank {rank} got {error!r} at last, not {expected!r}")
    tensor = torch.ones(5)
    dist.all_reduce(tensor)
    if tensor.tolist() != [float(RANKS)] * 5:
        problems.append(f"the group of the world summed up {tensor}")
    return problems


def wrong_in_timeout(error: str, kind: str, group: dist.ProcessGroup, victim: int) -> list[str]:
    """Returns the parts that the message lacks: operation, number, group, this rank or the absent one."""
    patterns = [
        rf"{operation_of(kind)} #\d+",
        rf"group '{re.escape(group.group_name)}'",
        rf"on rank {dist.get_rank()}\b",
        "timed out",
        # A large message to several ranks goes at the pace of the slowest, so its sender may be named as waiting for
        # the victim.
        rf"not there: rank {victim}\b" + (r"|waiting for rank \d" if kind.startswith("large") else ""),
    ]
    return [f"{kind}: {p!r} is not in {error!r}" for p in patterns if not re.search(p, error)]


@pytest.mark.parametrize("victim", range(RANKS) if FULL else [1])
@pytest.mark.parametrize("per_call", [False, True], ids=["timeout of the group", "timeout of the wait"])
def test_stopped_rank(new_world: Callable[..., World], victim: int, per_call: bool) -> None:
    problems = new_world(RANKS, timeout=LONG_TIMEOUT).run(stop_a_rank, victim, per_call)
    assert not any(problems), "\n".join(itertools.chain(*problems))


# Ctrl-C


def interrupt_waits(kinds: list[str]) -> list[str]:
    """Rank 0 waits for an absent rank and gets SIGINT, in a separate group for each kind."""
    rank, absent = dist.get_rank(), 1
    groups = [dist.new_group(timeout=timedelta(seconds=LONG_TIMEOUT)) for _ in kinds]
    problems = []
    if rank == 0:
        for kind, group in zip(kinds, groups, strict=True):
            work = KINDS[kind](rank, absent, group)
            assert work is not None, kind
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            begin = time.monotonic()
            try:
                work.wait()
                problems.append(f"{kind}: completed")
            except KeyboardInterrupt:
                pass
            except dist.DistBackendError as error:
                problems.append(f"{kind}: {error}")
            if time.monotonic() - begin > SOON:
                problems.append(f"{kind}: took {time.monotonic() - begin:.1f} s")
    dist.barrier()
    return problems


def test_interrupt_ends_every_wait(new_world: Callable[..., World]) -> None:
    # In these kinds, rank 0 needs the absent rank.
    kinds = [kind for kind in KINDS if not may_complete(kind, 0, 1) and not takes_no_part(kind, 0, 1)]
    assert len(kinds) > 10
    problems = new_world(RANKS, timeout=LONG_TIMEOUT).run(interrupt_waits, kinds)
    assert not any(problems), "\n".join(itertools.chain(*problems))


def interrupt_a_blocking_call() -> list[str]:
    """Like `interrupt_waits`, for a call that submits and waits; afterwards such a call works in another group."""
    group, problems = dist.new_group(timeout=timedelta(seconds=LONG_TIMEOUT)), []
    if dist.get_rank() == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        try:
            _backend(group).neighbor_allreduce_blocking(_zeros(100), _ring(0))
            problems.append("completed")
        except KeyboardInterrupt:
            pass
        if time.monotonic() - begin > SOON:
            problems.append(f"took {time.monotonic() - begin:.1f} s")
    dist.barrier()
    (result,) = _backend(dist.group.WORLD).neighbor_allreduce_blocking(_zeros(3), _ring(dist.get_rank()))
    return problems if torch.equal(result, _zeros(3)) else [*problems, f"got {result}"]


def test_interrupt_ends_a_blocking_call(new_world: Callable[..., World]) -> None:
    problems = new_world(RANKS, timeout=LONG_TIMEOUT).run(interrupt_a_blocking_call)
    assert not any(problems), "\n".join(itertools.chain(*problems))


# fork


class _Rows(torch.utils.data.Dataset):
    """A data set in which row i is i, i, i."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3,), float(index))


def load_while_reducing() -> list[float]:
    """Worker processes are forked, work and end while operations are in flight."""
    rank = dist.get_rank()
    loader = torch.utils.data.DataLoader(_Rows(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    sums = []
    for _ in range(2):  # each epoch forks new workers
        ahead = torch.full((LARGE,), float(rank))
        work = dist.all_reduce(ahead, async_op=True)
        total = 0.0
        for batch in loader:
            dist.all_reduce(batch)
            total += batch.sum().item()
        work.wait()
        sums += [total, ahead.unique().item()]
    return sums


def test_data_loader_workers(new_world: Callable[..., World]) -> None:
    # Both ranks have the same rows, so the sum is 2 * 3 * (0 + 1 + ... + 39).
    expected = [2 * 3 * 780.0, 1.0] * 2
    assert new_world(2, timeout=LONG_TIMEOUT).run(load_while_reducing, timeout=40) == [expected] * 2
