"""What every operation does when a rank is killed, stopped, cut off, absent or interrupted.

`KINDS` has every operation. A case names a failure, its moment and the way between the ranks; it starts all operations
at the same time, each in its own group. In `make faults`, each operation, rank and moment also has its own world. An
error that comes only at the timeout of a group fails a test, because the harness ends its world before.
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
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fogdist.compression import Int8
from harness import RUN_TIMEOUT, World, error_of, exception_of
from hosts import run_on_hosts
from torch import Tensor
from window_interfaces import has_stopped, pids

pytestmark = pytest.mark.usefixtures("nothing_left")

RANKS = 3
LONG_TIMEOUT = 4 * RUN_TIMEOUT
SHORT_TIMEOUT = 2.0
# More than a message carries inline, and more than a rank of another host sends before the receiver has agreed.
LARGE = 300_000
# Machines of one rank each, and one machine of all ranks.
APART = [[rank] for rank in range(RANKS)]
TOGETHER = [list(range(RANKS))]
REFUSED = "has failed and takes no more work: "


def _lists(numel: int) -> list[Tensor]:
    return [torch.zeros(numel) for _ in range(RANKS)]


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
    return _backend(group).hierarchical_neighbor_allreduce(torch.zeros(numel), machines, plan)


def _message(rank: int, source: int, target: int, numel: int, group: dist.ProcessGroup) -> dist.Work | None:
    if rank == source:
        return dist.isend(torch.zeros(numel), group=group, group_dst=target)
    return dist.irecv(torch.zeros(numel), group=group, group_src=source) if rank == target else None


# How rank `r` starts each kind of operation in group `g`, whose backend is `b`, if `v` is the victim of the case and `n`
# the next rank; None if the rank takes no part.
_KINDS = """
allreduce | dist.all_reduce(zeros(100), **later)
large allreduce | dist.all_reduce(zeros(LARGE), **later)
broadcast from it | dist.broadcast(zeros(100), group_src=v, **later)
large broadcast | dist.broadcast(zeros(LARGE), group_src=n, **later)
reduce to it | dist.reduce(zeros(100), group_dst=v, **later)
large reduce | dist.reduce(zeros(LARGE), group_dst=n, **later)
allgather | dist.all_gather(lists(100), zeros(100), **later)
large allgather | dist.all_gather(lists(LARGE), zeros(LARGE), **later)
gather to it | dist.gather(zeros(LARGE), lists(LARGE) if r == v else None, group_dst=v, **later)
gather | dist.gather(zeros(100), lists(100) if r == n else None, group_dst=n, **later)
scatter from it | dist.scatter(zeros(LARGE), lists(LARGE) if r == v else None, group_src=v, **later)
scatter | dist.scatter(zeros(100), lists(100) if r == n else None, group_src=n, **later)
reduce_scatter | dist.reduce_scatter(zeros(LARGE), lists(LARGE), **later)
alltoall | dist.all_to_all(lists(100), lists(100), **later)
large alltoall | dist.all_to_all(lists(LARGE), lists(LARGE), **later)
barrier | dist.barrier(**later)
send | message(r, n, v, 100, g)
large send | message(r, n, v, LARGE, g)
recv | message(r, v, n, 100, g)
large recv | message(r, v, n, LARGE, g)
neighbor_allreduce | b.neighbor_allreduce(zeros(100), ring(r))
large neighbor_allreduce | b.neighbor_allreduce(zeros(LARGE), ring(r))
hierarchical_neighbor_allreduce | hierarchical(r, APART, 100, g)
large hierarchical_neighbor_allreduce | hierarchical(r, TOGETHER, LARGE, g)
local_allreduce | b.local_allreduce(zeros(LARGE), TOGETHER, dist.ReduceOp.SUM)
neighbor_allgather | b.neighbor_allgather(zeros(LARGE, 1), ring(r))
allgather_concat | b.allgather_concat(zeros(100 + r, 1))
compressed neighbor_allreduce | b.neighbor_allreduce(zeros(LARGE), ring(r), compression=Int8().backend)
"""
KINDS = {
    name: compile(call, name, "eval") for name, call in (row.split(" | ") for row in _KINDS.split("\n")[1:-1])
}


def start(kind: str, rank: int, victim: int, group: dist.ProcessGroup) -> dist.Work | None:
    """Starts an operation on one rank."""
    names = {"r": rank, "v": victim, "n": _next(victim), "g": group, "b": _backend(group)}
    names["later"] = {"group": group, "async_op": True}
    helpers = {
        "zeros": torch.zeros,
        "lists": _lists,
        "message": _message,
        "Int8": Int8,
        "ring": _ring,
        "hierarchical": _hierarchical,
    }
    return eval(KINDS[kind], globals() | helpers, names)


def _next(v: int) -> int:
    return (v + 1) % RANKS


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


def groups_of(kinds: list[str], timeout: float = LONG_TIMEOUT) -> dict[str, dist.ProcessGroup]:
    """Returns a group for each kind; the operations that fail are not the first in their groups."""
    groups = {kind: dist.new_group(timeout=timedelta(seconds=timeout)) for kind in kinds}
    for group in groups.values():
        dist.barrier(group)
    return groups


# --- killed ranks -------------------------------------------------------------------------------------------


def lose_a_rank(victim: int, moment: str, way: str, folder: str, kinds: list[str]) -> list[str]:
    """Runs operations, each in its own group, while a rank is killed; then the survivors go on.

    Args:
        victim: The rank that is killed.
        moment: "before" it calls any of them, while the others wait; "during" loops of them; or "earlier": the others
            know of the loss when they call them.
        way: A key of `WAYS`.
        folder: Folder for files by which the survivors tell that they have noticed the loss.
        kinds: The operations.

    Returns:
        A description of each problem.
    """
    rank = dist.get_rank()
    groups = groups_of(kinds)
    living = dist.new_group([r for r in range(RANKS) if r != victim])
    dist.barrier()
    if rank == victim:
        if moment == "before" and os.fork() == 0:  # a child that inherits descriptors must not hide the end
            end = time.monotonic() + RUN_TIMEOUT / 2
            while len(list(Path(folder).glob("noticed*"))) < RANKS - 1 and time.monotonic() < end:
                time.sleep(0.05)
            os._exit(0)
        after = 0.0 if moment == "earlier" else 0.3
        threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if moment != "during":
            time.sleep(LONG_TIMEOUT)
    if moment == "earlier":
        world: Any = _backend(dist.group.WORLD)
        world.watch([victim])
        while victim not in world.lost_ranks():
            time.sleep(0.01)
    errors: dict[str, str] = {}
    while not errors:
        works: dict[str, dist.Work | None] = {}
        for kind, group in groups.items():
            try:
                works[kind] = start(kind, rank, victim, group)
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
        at_once = way != "memory" and kind == "large send"
        if moment != "during" and not at_once and not may_complete(kind, rank, victim) and kind not in errors:
            problems.append(f"{kind}: completed on rank {rank}")
        # Now the loss is known, so even a send can only fail.
        text = error_of(lambda k=kind, g=group: wait_for(start(k, rank, victim, g)))
        if not (f"rank {victim} " in text or (not text and may_complete(kind, rank, victim))):
            problems.append(f"{kind}: rank {rank} got {text!r} afterwards")
        # A failed group takes no more work, and its error gives the reason. The first error may be a refusal itself.
        why = errors.get(kind, "").removeprefix("fog: ").rpartition(REFUSED)[2]
        if why and not (REFUSED in text and text.endswith(why)):
            problems.append(f"{kind}: rank {rank} got {errors[kind]!r} and then {text!r}")
    Path(folder, f"noticed by {rank}").touch()
    for step in range(3):
        sums = torch.full((LARGE,), 1.0 + step)
        dist.all_reduce(sums, group=living)
        if not sums.eq((RANKS - 1) * (1.0 + step)).all():
            problems.append(f"the survivors summed up {sums}")
    return problems


# For each way: the host of each rank, and the options of `run_on_hosts`; one host with shared memory has none.
TCP = {"_FOG_CONFIRM": "1"}
RMA = {"FOG_BETWEEN_HOSTS": "rma", "UCX_TLS": "shm,self", "_FOG_CONFIRM": "1"}
WAYS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "memory": ([0, 0, 0], {}),
    "tcp, with a witness": ([0, 1, 1], {"environment": TCP, "rate": "1gbit"}),
    "tcp, alone": ([0, 0, 1], {"environment": TCP}),
    "rma, alone": ([0, 0, 1], {"environment": RMA}),
}
MOMENTS = ["before", "during", "earlier"]
KILLS = [("memory", 0, "before"), ("memory", 1, "during"), ("memory", 2, "earlier"), ("memory", 2, "before")]
KILLS += [("tcp, with a witness", 2, "during"), ("tcp, alone", 2, "before")]
MORE_KILLS = [
    (way, 2, moment)
    for way in WAYS
    for moment in MOMENTS
    if way != "memory" and (way, 2, moment) not in KILLS and (way, moment) != ("rma, alone", "during")
]


@pytest.mark.parametrize(
    ("way", "victim", "moment"),
    [*KILLS, *(pytest.param(*each, marks=pytest.mark.long) for each in MORE_KILLS)],
)
def test_a_killed_rank(
    new_world: Callable[..., World], tmp_path: Path, way: str, victim: int, moment: str
) -> None:
    """The survivors raise at once, with its number, and go on without it; their processes end well."""
    check_loss(new_world, tmp_path, way, victim, moment, [*KINDS])


@pytest.mark.long
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", range(RANKS))
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_rank_in_one_operation(
    new_world: Callable[..., World], tmp_path: Path, kind: str, victim: int, moment: str
) -> None:
    kinds = list(dict.fromkeys([kind, "barrier"]))  # the barrier tells those that the kind leaves out
    check_loss(new_world, tmp_path, "memory", victim, moment, kinds)


def check_loss(
    new_world: Callable[..., World], folder: Path, way: str, victim: int, moment: str, kinds: list[str]
) -> None:
    arguments = (victim, moment, way, str(folder), kinds)
    placement, options = WAYS[way]
    if way == "memory":
        outcomes = new_world(RANKS, timeout=LONG_TIMEOUT, finalizing=None).run_raw(lose_a_rank, *arguments)
        assert outcomes[victim].state == "died" and "SIGKILL" in outcomes[victim].details, outcomes[victim]
        assert all(o.state == "returned" for o in outcomes if o.rank != victim), "\n".join(map(str, outcomes))
        problems = [outcome.value for outcome in outcomes if outcome.rank != victim]
    else:
        calls = [("lose_a_rank", arguments)]
        found = run_on_hosts(folder, placement, "test_faults", calls, killed=[victim], **options)
        problems = [of_rank[0] for rank, of_rank in enumerate(found) if rank != victim]
    assert not any(problems), "\n".join(itertools.chain(*problems))


def lose_a_host(victim: int) -> str:
    """Cuts the network of the victim's host; returns the error of an allreduce."""
    dist.barrier()
    if dist.get_rank() == victim:
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    return error_of(lambda: dist.all_reduce(torch.zeros(LARGE)))


@pytest.mark.parametrize("way", ["tcp", "rma"])
def test_a_host_that_vanishes(tmp_path: Path, way: str) -> None:
    # The shortest silence that is allowed; test_bootstrap tests that the setting holds.
    setting = (RMA if way == "rma" else TCP) | {"FOG_HOST_TIMEOUT": "4"}
    calls = [("lose_a_host", [2])]
    found = run_on_hosts(tmp_path, [0, 1, 2], "test_faults", calls, timeout=LONG_TIMEOUT, environment=setting)
    for (error,), expected in zip(
        found, [r"rank 2 .* was lost: its host"] * 2 + ["rank [01] .*"], strict=True
    ):
        assert re.search(rf"{expected} does not answer", error), error


def outlast_a_cut(victim: int) -> str:
    """Cuts the network of the victim's host for a second, which is no loss; returns the error of the steps, or none."""
    dist.barrier()
    if dist.get_rank() == victim:
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
        threading.Timer(1.0, subprocess.run, [["ip", "link", "set", "eth0", "up"]], {"check": True}).start()
    for step in range(20):
        sums = torch.full((LARGE,), 1.0 + step)
        if error := error_of(lambda sums=sums: dist.all_reduce(sums)):
            return error
        if not sums.eq(RANKS * (1.0 + step)).all():
            return f"step {step}: {sums}"
    return ""


def test_a_link_that_is_cut_for_a_second(tmp_path: Path) -> None:
    """Nobody is lost, and all that was in flight arrives once."""
    [*errors] = run_on_hosts(
        tmp_path, [0, 1, 2], "test_faults", [("outlast_a_cut", [2])], timeout=LONG_TIMEOUT, environment=TCP
    )
    assert errors == [[""]] * RANKS, errors


def receive_from_the_lost(numel: int) -> tuple[str, bool]:
    """Rank 1 sends a message and dies; rank 0 receives it afterwards."""
    message = torch.arange(numel, dtype=torch.float32)
    dist.barrier()
    if dist.get_rank() == 1:
        dist.isend(message, 0)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.6)
    received = torch.zeros(numel)
    error = error_of(lambda: dist.recv(received, 1))
    return error, received.equal(message)


@pytest.mark.parametrize(("numel", "arrives"), [(30_000, True), (1_000_000, False)])
def test_a_message_of_a_rank_lost_since(new_world: Callable[..., World], numel: int, arrives: bool) -> None:
    """A message that fits into the ring arrives; of a longer one the rest is lost, and the receiver must not wait."""
    world = new_world(2, timeout=LONG_TIMEOUT, environment={"_FOG_LOCAL_LINKS": "1"})
    survivor = world.run_raw(receive_from_the_lost, numel)[0]
    assert survivor.state == "returned", str(survivor)
    error, equal = survivor.value
    assert equal == arrives, str(survivor.value)
    assert not error if arrives else "rank 1" in error and "was lost" in error, error


# --- a rank that does not answer, or does not come ----------------------------------------------------------


def wait_for_a_rank(victim: int, how: str) -> list[str]:
    """The others call all kinds of operations, each in its own group, while the victim takes no part.

    It is "stopped", or "absent", until the groups' timeout; or "stopped for a while", until the timeout of each call of
    `wait`, and the operations go on.
    """
    rank = dist.get_rank()
    survivors = [r for r in range(RANKS) if r != victim]
    per_call = how == "stopped for a while"
    groups = groups_of([*KINDS], LONG_TIMEOUT if per_call else SHORT_TIMEOUT)
    living = dist.new_group(survivors, timeout=timedelta(seconds=LONG_TIMEOUT))
    all_pids = pids()
    store = dist.distributed_c10d._get_default_store()
    problems = []
    started: dict[str, dist.Work | None] = {}
    if rank == victim:
        if how == "absent":
            store.wait(["timed out"])
        else:
            os.kill(os.getpid(), signal.SIGSTOP)  # a survivor continues it later
        if per_call:
            started = {kind: start(kind, rank, victim, group) for kind, group in groups.items()}
    else:
        while how != "absent" and not has_stopped(all_pids[victim]):
            time.sleep(0.01)
        begin = time.monotonic()
        started = {kind: start(kind, rank, victim, group) for kind, group in groups.items()}
        for kind, work in started.items():
            if work is None:
                continue
            error = error_of((lambda w=work: w.wait(timedelta(seconds=0.2))) if per_call else work.wait)
            if error or not may_complete(kind, rank, victim):
                problems += wrong_in_timeout(error, kind, groups[kind], victim)
                if not per_call and exception_of(work) is None:
                    problems.append(f"{kind}: exception() is None")
        if not per_call and time.monotonic() - begin < SHORT_TIMEOUT - 0.5:
            problems.append("the errors came before the timeout")
        dist.barrier(living)
        if rank == survivors[0]:
            os.kill(all_pids[victim], signal.SIGCONT)
            store.set("timed out", "")
    for kind, group in groups.items():
        if per_call:
            work = started[kind]
            error, expected = error_of(work.wait) if work else "", "^$"
        else:
            if rank == victim:
                # The rank learns of the failure now, unless all the data that it needs came before.
                error = error_of(lambda k=kind, g=group: wait_for(start(k, rank, victim, g)))
                if error and "timed out" not in error:
                    problems.append(f"{kind}: the rank that was missing got {error!r}")
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


@pytest.mark.parametrize("victim", [1, *(pytest.param(rank, marks=pytest.mark.long) for rank in (0, 2))])
@pytest.mark.parametrize("how", ["stopped", "absent", "stopped for a while"])
def test_a_rank_that_takes_no_part(new_world: Callable[..., World], victim: int, how: str) -> None:
    problems = new_world(RANKS, timeout=LONG_TIMEOUT).run(wait_for_a_rank, victim, how)
    assert not any(problems), "\n".join(itertools.chain(*problems))


# --- Ctrl-C -------------------------------------------------------------------------------------------------


def interrupt_waits(kinds: list[str]) -> list[str]:
    """Rank 0 waits for an absent rank and gets SIGINT, for each kind; all of them are in flight."""
    problems = []
    groups = groups_of([*kinds, "blocking"])
    if dist.get_rank() == 0:
        works = {kind: start(kind, 0, 1, groups[kind]) for kind in kinds}
        waits: dict[str, Callable[[], object]] = {kind: work.wait for kind, work in works.items() if work}
        blocking = _backend(groups["blocking"])
        waits["blocking"] = lambda: blocking.neighbor_allreduce_blocking(torch.zeros(100), _ring(0))
        for kind, wait in waits.items():
            try:
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
                wait()
                problems.append(f"{kind}: completed")
            except KeyboardInterrupt:
                pass
            except dist.DistBackendError as error:
                problems.append(f"{kind}: {error}")
    dist.barrier()
    (result,) = _backend(dist.group.WORLD).neighbor_allreduce_blocking(torch.ones(3), _ring(dist.get_rank()))
    return problems if result.equal(torch.ones(3)) else [*problems, f"got {result}"]


def test_an_interrupt_ends_every_wait(new_world: Callable[..., World]) -> None:
    # In these kinds, rank 0 needs the absent rank.
    kinds = [kind for kind in KINDS if not may_complete(kind, 0, 1) and not takes_no_part(kind, 0, 1)]
    assert len(kinds) > 10
    problems = new_world(RANKS, timeout=LONG_TIMEOUT).run(interrupt_waits, kinds)
    assert not any(problems), "\n".join(itertools.chain(*problems))


# --- fork ---------------------------------------------------------------------------------------------------


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
    assert new_world(2, timeout=LONG_TIMEOUT).run(load_while_reducing) == [expected] * 2
