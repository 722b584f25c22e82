"""Tests of one-sided windows between nodes that reach each other's memory by RMA.

All ranks are on this host, and each is a node of its own to fog and MPI. The contents of windows are tested as for the
other ways (tests/test_window_backend.py, and its sample in tests/window_hosts.py). These tests check the properties of
RMA: the target may be stopped, values come through a mailbox, and RMA and messages keep the order of the calls.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_window_backend as windows
import torch
import torch.distributed as dist
import window_hosts
from harness import ALL, BACKEND, World, WorldPool
from hosts import run_on_hosts
from test_window_backend import WAYS, backend, create, full, others, slot
from torch import Tensor

from fog_pg import _C

pytestmark = pytest.mark.skipif(BACKEND != "fog", reason="windows of backend fog")

KIB, MIB = 1 << 10, 1 << 20
RMA = WAYS["rma"]
# The bits of a double's fraction limit this: values are powers of two, so a sum tells which of them were added.
MOST_OPERATIONS = 50
LIMIT = 20.0


@pytest.fixture(scope="module")
def rma() -> Iterator[Callable[[int], World]]:
    pool = WorldPool(environment=RMA)
    yield pool
    pool.close()


def test_a_sample_of_everything(rma, tmp_path):
    rma(2).run(window_hosts.everything, str(tmp_path / "done"))


@pytest.mark.long
def test_everything_on_more_ranks(rma, tmp_path):
    rma(4).run(window_hosts.everything, str(tmp_path / "done"))


@pytest.mark.usefixtures("no_shared_memory_left")
@pytest.mark.parametrize("placement", [[0, 1], [0, 0, 1, 1]], ids=["1+1", "2+2"])
@pytest.mark.long
def test_between_hosts(tmp_path, placement):
    """Each rank has neighbors on both hosts; UCX's shared memory reaches both, and stands in for RDMA."""
    environment = {"FOG_BETWEEN_HOSTS": "rma", "UCX_TLS": "shm,self", "FOG_CONFIRM": "1"}
    run_on_hosts(tmp_path, placement, "window_hosts", [("everything", [])], environment=environment)


# --- the target does not take part --------------------------------------------------------------------------


def pids() -> list[int]:
    parts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, torch.tensor([os.getpid()]))
    return [int(part) for part in parts]


def stop(pid: int) -> None:
    """Stops all threads of a process, and returns after they have stopped."""
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + LIMIT
    while any(
        status.read_text().rpartition(")")[2].split()[0] not in ("T", "t")
        for status in Path(f"/proc/{pid}/task").glob("*/stat")
    ):
        assert time.monotonic() < end
        time.sleep(0.001)


def stopped_target(numel: int) -> None:
    """Rank 0 puts to rank 1 and gets from it, while all threads of rank 1 are stopped."""
    rank = dist.get_rank()
    pid = pids()[1]
    mine = torch.arange(numel, dtype=torch.float32) + rank
    window = create(mine, zero_init=True)
    assert window.transport == "rma"
    dist.barrier()
    if rank == 0:
        stop(pid)
        try:
            for weight in (3.0, 0.25, 1.0):
                window.p = weight
                window.put(mine + weight, [(1, weight)], with_p=True).wait()
            window.get([(1, 0.5)]).wait()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert torch.equal(slot(window, 1), (torch.arange(numel, dtype=torch.float32) + 1) * 0.5)
    dist.barrier()
    if rank == 1:
        assert window.version(0) == 3
        window.p = 0.0
        found = window.update(0.0, [(0, 1.0)], clone=True, with_p=True)
        assert torch.equal(found, torch.arange(numel, dtype=torch.float32) + 1.0)
        assert window.p == 1.0 and window.version(0) == 0
    dist.barrier()
    window.free()


def test_a_target_that_is_stopped(rma):
    for numel in (1, 1000, 4 * MIB + 3):
        rma(2).run(stopped_target, numel)


# --- reads are whole ----------------------------------------------------------------------------------------


def racing_reads(numel: int, looks: int, kind: str) -> int:
    """Rank 0 puts values of equal elements, with p as their number, or changes its tensor; rank 1 reads `looks` times.

    Returns:
        The number of different values that rank 1 read.
    """
    rank = dist.get_rank()
    neighbors: tuple[list[int], list[int]] = ([], [1]) if rank == 0 else ([0], [])
    tensor = torch.ones(numel, dtype=torch.int64)
    window = backend().create_window(tensor, "race", *neighbors, zero_init=True)
    values = [torch.full((numel,), value, dtype=torch.int64) for value in range(1, 8)]
    seen = set()
    dist.barrier()
    if rank == 0:
        over = dist.barrier(async_op=True)
        while not over.is_completed():
            for value, tensor_of_it in enumerate(values, 1):
                if kind == "put":
                    window.p = float(value)
                    window.put(tensor_of_it, [(1, 1.0)], with_p=True).wait()
                else:
                    window.update(3.0, [])
    else:
        for look in range(looks):
            if kind == "get":
                window.get([(0, 1.0)]).wait()
            found = window.update(0.0, [(0, 1.0)], clone=True, with_p=True)
            low, high = (int(number) for number in torch.aminmax(found))
            assert low == high, f"torn after {look} looks: {low} and {high}"
            assert kind == "get" or window.p == low, f"after {look} looks: p {window.p} with {low}"
            seen.add(low)
        dist.barrier()
    window.free()
    return len(seen)


@pytest.mark.parametrize("kind", ["put", "get"])
def test_nothing_is_torn(rma, kind):
    every = [(KIB, 50_000), (100 * KIB, 20_000), (MIB, 2_000), (16 * MIB, 100)]  # each takes a few seconds
    looks_in_all = dict.fromkeys((nbytes for nbytes, _ in every), 0)
    goals = [700_000, 250_000, 50_000, 1_000] if kind == "put" else [50_000, 20_000, 4_000, 200]
    if not ALL:
        every, goals = [(KIB, 3000), (100 * KIB, 1000), (MIB, 300)], [3000, 1000, 300]
    for (nbytes, looks), goal in zip(every, goals, strict=True):
        most, end = 0, time.monotonic() + LIMIT
        while looks_in_all[nbytes] < goal or (most < 3 and time.monotonic() < end):
            most = max(most, rma(2).run(racing_reads, nbytes // 8, looks, kind)[1])
            looks_in_all[nbytes] += looks
        assert most > 2, f"{nbytes} bytes: too little was seen to say anything"


# --- the order of calls, and mass ---------------------------------------------------------------------------

# The calls of rank 0: "put" or "accumulate", and whether p went along. Call number k had value and p 2**k.
Calls = list[tuple[str, bool]]
# The values and p that rank 1 took.
Takes = list[tuple[int, int]]


def mixed_operations(seed: int, numel: int, with_p: str) -> Any:
    """Rank 0 puts and accumulates alternately, without waiting; rank 1 takes the values that are there."""
    rank = dist.get_rank()
    chance = random.Random(2 * seed + rank)
    neighbors: tuple[list[int], list[int]] = ([], [1]) if rank == 0 else ([0], [])
    window = backend().create_window(
        torch.zeros(numel, dtype=torch.int64), "mixed", *neighbors, zero_init=True
    )
    calls: Calls = []
    takes: Takes = []

    def take() -> None:
        found = window.update(0.0, [(0, 1.0)], reset=True, clone=True, with_p=True)
        low, high = (int(number) for number in torch.aminmax(found))
        assert low == high, f"torn: {low} and {high}"
        takes.append((low, int(window.p)))

    dist.barrier()
    if rank == 0:
        works = []
        for number in range(MOST_OPERATIONS):
            kind = chance.choice(["put", "accumulate", "accumulate"])
            p = {"all": True, "accumulates": kind == "accumulate", "some": chance.random() < 0.5}[with_p]
            calls.append((kind, p))
            window.p = float(2**number)
            amount = torch.full((numel,), 2**number, dtype=torch.int64)
            works.append(getattr(window, kind)(amount, [(1, 1.0)], with_p=p))
            if chance.random() < 0.2:
                works[chance.randrange(len(works))].wait()
            if chance.random() < 0.3:
                time.sleep(chance.random() * 0.002)
        for work in works:
            work.wait()
        dist.barrier()
    else:
        over = threading.Event()
        waiter = threading.Thread(target=lambda: (dist.barrier(), over.set()))
        waiter.start()
        while not over.is_set():
            take()
            if chance.random() < 0.5:
                time.sleep(chance.random() * 0.003)
        waiter.join()
        take()
    dist.barrier()
    window.free()
    return calls if rank == 0 else takes


def is_in_order(calls: Calls, taken: list[int]) -> bool:
    """Returns whether calls in this order, with takes between them, can give this result, with nothing left."""
    cuts = {0}  # places at which the last take can have been
    for amount in taken:
        reached = set()
        for cut in cuts:
            held = 0
            for place in range(cut, len(calls) + 1):
                if held == amount:
                    reached.add(place)
                if place < len(calls):
                    held = 2**place if calls[place][0] == "put" else held + 2**place
        cuts = reached
    return len(calls) in cuts


def check_p(calls: Calls, taken: list[int]) -> None:
    """Checks that each p is collected once, unless a later put with p has replaced it."""
    last_put = max(
        (number for number, (kind, with_p) in enumerate(calls) if with_p and kind == "put"), default=-1
    )
    for number, (_, with_p) in enumerate(calls):
        found = sum(amount >> number & 1 for amount in taken)
        assert found == 1 if with_p and number >= last_put else found <= (1 if with_p else 0), (
            number,
            calls,
            taken,
        )


@pytest.mark.parametrize("with_p", ["all", "accumulates", "some"])
def test_puts_and_accumulates_keep_their_order_and_mass(rma, with_p):
    for seed in range(100 if ALL else 4):
        for numel in (1, 3000, 200_000):
            calls, takes = rma(2).run(mixed_operations, seed, numel, with_p)
            assert is_in_order(calls, [value for value, _ in takes]), (seed, numel, calls, takes)
            check_p(calls, [p for _, p in takes])
            if with_p == "all":  # then p goes the way of the values
                assert [p for _, p in takes] == [value for value, _ in takes], (seed, numel, calls, takes)
            if with_p == "accumulates":
                given = sum(2**number for number, (kind, _) in enumerate(calls) if kind == "accumulate")
                assert sum(p for _, p in takes) == given, (seed, numel, calls, takes)


def in_the_order_of_calls(rounds: int) -> None:
    """RMA does not overtake messages if the target could see the difference."""
    rank = dist.get_rank()
    mine = full(0, 20_000)
    window = create(mine, zero_init=True)
    dist.barrier()
    for turn in range(1, rounds + 1):
        if rank == 0:
            window.put(full(turn, 20_000), [(1, 1.0)])
            window.signal(1)
            window.write(full(turn, 20_000), 1, 0)
            window.get([(1, 1.0)]).wait()  # gets the values of the write
            assert slot(window, 1).eq(turn).all()
        else:
            window.wait_signal(0).wait()
            assert slot(window, 0).eq(turn).all()
        dist.barrier()
    window.free()


def test_puts_come_before_signals_and_gets_after_writes(rma):
    rma(2).run(in_the_order_of_calls, 1000 if ALL else 50)


# --- the same bits as by messages ---------------------------------------------------------------------------


def weighted() -> list[Tensor]:
    """Returns, as bytes, the results of puts and gets of several chunks, with weights that round."""
    results = []
    rank = dist.get_rank()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.int16):
        numel = (2 * MIB + 1000) // dtype.itemsize
        generator = torch.Generator().manual_seed(rank)
        mine = (torch.randn(numel, generator=generator) * 1000).to(dtype)
        window = create(mine, zero_init=True)
        for weight in (1 / 3, -0.7, 1e-3):
            window.put(mine, [(other, weight) for other in others()]).wait()
            dist.barrier()
            results.append(slot(window, 1 - rank))
            window.get([(other, weight) for other in others()]).wait()
            results.append(slot(window, 1 - rank))
            dist.barrier()
        window.free()
    return [result.view(torch.uint8) for result in results]


def test_weighted_values_have_the_bits_that_messages_bring(rma, new_world):
    by_rma = rma(2).run(weighted)
    by_messages = new_world(2, environment=WAYS["messages"]).run(weighted)
    for ours, theirs in zip(by_rma, by_messages, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


# --- the pool -----------------------------------------------------------------------------------------------


def logged(action: Callable[[], Any]) -> tuple[Any, str]:
    """Returns the result of the action, and the text that it writes to this process's standard error."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            result = action()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        return result, file.read().decode()


def larger_than_the_pool() -> None:
    rank = dist.get_rank()
    # The tensor of one rank fits into the pool, the mailbox of the other rank does not.
    neighbors: tuple[list[int], list[int]] = ([], [1]) if rank == 0 else ([0], [])
    window = backend().create_window(full(rank, 3 * MIB // 8), "one way", *neighbors, zero_init=True)
    assert window.transport == ("messages" if rank == 0 else "rma")
    if rank == 0:
        window.put(full(7, 3 * MIB // 8), [(1, 1.0)]).wait()
        window.accumulate(full(1, 3 * MIB // 8), [(1, 1.0)]).wait()
    dist.barrier()
    if rank == 1:
        assert slot(window, 0).eq(8).all()
        window.get([(0, 5.0)]).wait()
        assert slot(window, 0).eq(0).all()
    dist.barrier()
    window.free()
    window, log = logged(lambda: create(full(0), "small"))
    assert window.transport == "rma" and "FOG_RMA_BYTES" not in log
    window.free()
    window, log = logged(lambda: create(full(0, MIB), "large"))  # 8 MiB, more than the pool
    assert window.transport == window.transport_to(1 - rank) == "messages"
    lines = [line for line in log.splitlines() if "FOG_RMA_BYTES" in line]
    assert len(lines) == 1 and "window 'large'" in lines[0] and f"rank {rank}" in lines[0], log
    assert any(int(word) > 24 * MIB for word in lines[0].split() if word.isdigit()), lines
    window.free()
    windows.operations(MIB)


def many_windows(count: int) -> None:
    """The pool has room for two windows at a time, each of 1 MiB and 2 MiB for the mailbox."""
    rank = dist.get_rank()
    for turn in range(count):
        window = create(full(turn, MIB // 8), f"window {turn}")
        assert window.transport == "rma", turn
        window.put(window.tensor, [(1 - rank, 1.0)]).wait()
        dist.barrier()
        if turn % 2:
            window.free()
        else:  # the memory of a dropped window waits until the neighbor has dropped its own
            if rank == 0:
                time.sleep(0.01)
            del window
            gc.collect()
        dist.barrier()
        dist.barrier()  # by then the earlier message about leaving the window has been processed


def test_what_the_pool_has_no_room_for(new_world):
    new_world(2, environment=RMA | {"FOG_RMA_BYTES": str(5 * MIB)}).run(larger_than_the_pool)


def test_the_pool_gets_back_what_windows_had(new_world):
    new_world(2, environment=RMA | {"FOG_RMA_BYTES": str(8 * MIB)}).run(many_windows, 20)


def many_groups(count: int) -> None:
    """Windows end with their group, which one of the ranks destroys earlier."""
    rank = dist.get_rank()
    for turn in range(count):
        group = dist.new_group([0, 1])
        window = group._get_backend(torch.device("cpu")).create_window(
            full(turn, MIB // 8), "w", [1 - rank], [1 - rank]
        )
        assert window.transport == "rma", turn
        window.put(window.tensor, [(1 - rank, 1.0)]).wait()
        dist.barrier()
        if turn % 3 != 2 and rank == turn % 3:
            time.sleep(0.02)
        dist.destroy_process_group(group)
        with pytest.raises(dist.DistBackendError, match="group that was destroyed"):
            window.put(window.tensor, [(1 - rank, 1.0)])
        del window
        gc.collect()
        dist.barrier()
        end = time.monotonic() + LIMIT
        while _C.bookkeeping()["deferred_windows"] > 0:
            assert time.monotonic() < end
            time.sleep(0.001)
        dist.barrier()


def test_the_pool_gets_back_what_groups_had(new_world):
    new_world(2, environment=RMA | {"FOG_RMA_BYTES": str(8 * MIB)}).run(many_groups, 12)
