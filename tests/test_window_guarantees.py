"""Tests of the guarantees of one-sided windows with ranks that race, hold mutexes, are busy, idle, ending or dead.

Each guarantee is one function, which the ranks run by the interfaces and ways of window_interfaces.py. Of three ranks,
the last one is on another host if there are hosts. No test depends on the speed of the machine.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import random
import resource
import signal
import sys
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
from harness import ALL, World, error_of
from window_interfaces import (
    INTERFACES,
    LIMIT,
    SHORT,
    SIZE,
    SOON,
    WAYS,
    AnyWindow,
    WorldsByWay,
    create,
    full,
    new_by_way,
    one_way,
    others,
    pids,
    slot,
    stopped,
)

MIB = 1 << 20
LAST = SIZE - 1
# The least time for which ranks race. On a busy machine they go on until they have seen enough, or until the limit.
RACE_SECONDS = 0.5 if ALL else 0.1
# The share of a core that an idle rank may use: 1% is promised, the rest is for other load on the machine.
IDLE_SECONDS, MOST_IDLE = 1.0, 0.05
# The interface of tests that need a new world.
INTERFACE_OF = {"memory": "name", "tcp": "object", "rma": "_C", "hosts": "object"}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def interfaces(cases: list[Any]) -> list[tuple[str, Any]]:
    """Returns cases with interfaces that take turns."""
    return [(INTERFACES[number % len(INTERFACES)], case) for number, case in enumerate(cases)]


def synchronize(device: str) -> None:
    """Waits for the work on a device, which test_device_windows.py races with."""
    if device != "cpu":
        torch.accelerator.synchronize()


def meet(async_op: bool = False) -> Any:
    """A barrier, by a sum on the CPU; `dist.barrier` would use the device if there is one."""
    return dist.all_reduce(torch.zeros(1), async_op=async_op)


# --- nothing is torn, lost or counted twice -----------------------------------------------------------------


def race(interface: str, nbytes: int, mutex: bool, kind: str, device: str = "cpu") -> tuple[int, int, float]:
    """Rank 0 writes as fast as it can, or changes a tensor that the others get; these look for mixed values.

    All elements of a value have the same number, so a mixture of two values shows; p is that number too.

    Returns:
        On a reader, how often it looked, the number of different values that it saw, and the sum of the values that it
        took away. On rank 0, the sum of the values that it sent.
    """
    rank = dist.get_rank()
    dtype = torch.uint8 if nbytes < 8 else torch.int64
    x = torch.ones(nbytes // dtype.itemsize, dtype=dtype, device=device)
    window = AnyWindow(interface, x, one_way)
    # Slots hold whole numbers below 2**53, so p is exact.
    values = [torch.full_like(x, value) for value in range(1, 6)]
    looks, seen, total = 0, set(), 0.0

    def send() -> None:
        nonlocal total
        for number, value in enumerate(values, 1):
            window.p = float(number)
            if kind in ("put", "accumulate", "get and accumulate"):
                window.write(kind.split()[-1], value, p=True, mutex=mutex).wait()
                total += number
            elif mutex:
                with window.hold(others(), own=True):
                    x.mul_(3)  # the owner's own arithmetic
            elif number % 2:
                window.update(3.0, {})
            else:
                window.put(x, {}, keep=3.0)

    def look(reset: bool) -> None:
        nonlocal looks, total
        if kind == "get":
            window.get(mutex=mutex)
        elif kind != "put" and kind != "accumulate":  # gets into the slot to which rank 0 adds
            for weight in (looks % 50, looks % 50 + 50):
                window.get({0: float(weight)}, mutex=mutex)
        found = window.update(0.0, reset=reset, clone=True, mutex=mutex, p=True)
        low, high = (int(value) for value in torch.aminmax(found.cpu()))
        assert low == high, f"torn after {looks} looks: {low} and {high}"
        if not kind.startswith("get"):
            assert (window.p % 256 if dtype == torch.uint8 else window.p) == low, (window.p, low)
        seen.add(low)
        looks += 1
        total += window.p * reset

    meet()
    end = time.monotonic() + RACE_SECONDS
    over = meet(async_op=True) if rank == 0 else None  # the others join once they have seen enough
    while over is not None and not over.is_completed():
        send()
        synchronize(device)
    while rank != 0 and (now := time.monotonic()) < end + LIMIT and (now < end or looks < 4 or len(seen) < 3):
        look(reset=looks % 3 == 0 and not kind.startswith("get"))
    if rank != 0:
        meet()
    synchronize(device)
    meet()
    if rank != 0 and kind == "accumulate":
        look(reset=True)  # takes what is left
    window.free()
    return looks, len(seen), total


RACES = [
    (nbytes, mutex, kind)
    for nbytes, mutex in [
        *[(1, False), (100_000, True), (MIB, False)],
        *([(4096, False), (100_000, False), (MIB, True), (16 * MIB, False), (16 * MIB, True)] if ALL else []),
    ]
    for kind in ("put", "accumulate", "get", "get and accumulate")
]


def test_nothing_is_torn_or_counted_twice(world_of: WorldsByWay, way: str) -> None:
    for interface, case in interfaces(RACES):
        (*_, sent), *readers = world_of(way).run(race, interface, *case)
        for looks, seen, taken in readers:
            assert looks > 3 and seen > 2, f"too little was seen: {interface} {case} {readers}"
            assert case[-1] != "accumulate" or taken == sent, (interface, case)


def tokens(
    interface: str, dtype_name: str, numel: int, device: str = "cpu"
) -> tuple[float, float, float, int]:
    """Ranks pass on random parts of their values, in whole pieces, and collect from some, at random times.

    There are so few pieces that every dtype holds them, and every sum of them, exactly.

    Returns:
        The least and the largest sum of an element over all ranks, the sum of p, and how often this rank passed on or
        collected, whichever is less.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    chance = random.Random(rank)
    torch.manual_seed(rank)
    x = torch.full((numel,), 60 // size, dtype=getattr(torch, dtype_name), device=device)
    window = AnyWindow(interface, x)
    passed = collected = 0
    end = time.monotonic() + RACE_SECONDS
    while (now := time.monotonic()) < end or (min(passed, collected) < 2 and now < end + LIMIT):
        part = (torch.rand(numel).to(device) * (x.to(torch.float32) + 1)).floor().to(x.dtype)
        x -= part
        # passes on all of p
        started = window.write(
            "accumulate", part, {chance.choice(others()): 1.0}, keep=0.0, p=True, mutex=chance.random() < 0.3
        )
        if chance.random() < 0.5:
            while not started.done():
                time.sleep(0)
        started.wait()
        assert window.p == 0.0 and not part.any().item(), "nothing of it was to be kept"
        passed += 1
        if chance.random() < 0.6:
            some = {other: 1.0 for other in others() if chance.random() < 0.8}
            window.update(1.0, some, reset=True, p=True, mutex=chance.random() < 0.3)
            collected += len(some)
        if chance.random() < 0.1:
            time.sleep(chance.random() * 0.003)
    synchronize(device)
    meet()
    window.update(1.0, reset=True, p=True)
    total, p = x.cpu().to(torch.int64), torch.tensor([window.p], dtype=torch.float64)
    dist.all_reduce(total)
    dist.all_reduce(p)
    window.free()
    return total.min().item(), total.max().item(), p.item(), min(passed, collected)


def test_mass_is_conserved(world_of: WorldsByWay, way: str) -> None:
    cases = [("float64", 1), ("float32", 100_000), ("bfloat16", 1000), ("int64", 300_000), ("uint8", 100_000)]
    for interface, case in interfaces(cases):
        for least, most, p, moves in world_of(way).run(tokens, interface, *case):
            assert (least, most, p) == (60, 60, SIZE) and moves > 1, (interface, case)


def from_several_threads() -> None:
    """Several threads of one rank add and read at the same time."""
    window = create(full(0, 1000, torch.int64), zero_init=True)
    everyone = [(other, 1.0) for other in others()]
    torn = []

    def add() -> None:
        for _ in range(100):
            window.accumulate(full(1, 1000, torch.int64), everyone).wait()

    def read() -> None:
        for _ in range(100):
            found = window.update(0.0, everyone, clone=True)
            if found.min() != found.max():
                torn.append(found)

    threads = [threading.Thread(target=target) for target in (add, add, add, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.barrier()
    assert not torn
    assert all(slot(window, other).eq(300).all() for other in others())
    dist.barrier()
    window.free()


def test_threads_of_one_rank(world_of: WorldsByWay, way: str) -> None:
    world_of(way).run(from_several_threads)


# --- the order of calls -------------------------------------------------------------------------------------

# The calls of rank 0: "put" or "accumulate", and whether p went along. Call number k had value and p 2**k.
Calls = list[tuple[str, bool]]
# The values and p that another rank took.
Takes = list[tuple[int, int]]
# The bits of a double's fraction limit this: values are powers of two, so a sum tells which of them were added.
MOST_OPERATIONS = 50


def mixed_operations(interface: str, seed: int, numel: int, with_p: str) -> Any:
    """Rank 0 puts and accumulates alternately, without waiting; the others take the values that are there."""
    rank = dist.get_rank()
    chance = random.Random(SIZE * seed + rank)
    window = AnyWindow(interface, full(0, numel), one_way)
    calls: Calls = []
    takes: Takes = []

    def take() -> None:
        found = window.update(0.0, reset=True, clone=True, p=True)
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
            works.append(window.write(kind, full(2**number, numel), p=p))
            if chance.random() < 0.2:
                works.pop(chance.randrange(len(works))).wait()
            if chance.random() < 0.3:
                time.sleep(chance.random() * 0.002)
        for work in works:
            work.wait()
        dist.barrier()
    else:
        over = dist.barrier(async_op=True)
        while not over.is_completed():
            take()
            if chance.random() < 0.5:
                time.sleep(chance.random() * 0.003)
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
    puts = [number for number, (kind, with_p) in enumerate(calls) if with_p and kind == "put"]
    last_put = max(puts, default=-1)
    for number, (_, with_p) in enumerate(calls):
        found = sum(amount >> number & 1 for amount in taken)
        assert found <= with_p and (found == 1 or not with_p or number < last_put), (number, calls, taken)


def check_order(world: World, interface: str, seed: int, numel: int, with_p: str) -> None:
    """Runs `mixed_operations` and checks that what the readers took is a result of the calls in their order."""
    calls, *readers = world.run(mixed_operations, interface, seed, numel, with_p)
    for takes in readers:
        what = (interface, seed, numel, calls, takes)
        assert is_in_order(calls, [value for value, _ in takes]), what
        check_p(calls, [p for _, p in takes])
        if with_p == "all":  # then p goes the way of the values
            assert [p for _, p in takes] == [value for value, _ in takes], what
        if with_p == "accumulates":
            given = sum(2**number for number, (kind, _) in enumerate(calls) if kind == "accumulate")
            assert sum(p for _, p in takes) == given, what


def test_puts_and_accumulates_keep_their_order_and_mass(world_of: WorldsByWay, way: str) -> None:
    kinds = ["all", "accumulates", "some"]
    cases = [
        (seed, numel, p) for seed in range(20 if ALL else 2) for numel in (1, 3000, 200_000) for p in kinds
    ]
    # Each kind of p meets each interface within two seeds.
    for number, case in enumerate(cases):
        check_order(world_of(way), INTERFACES[(number + number // 3) % 3], *case)


def signals_and_writes(rounds: int) -> None:
    """Nothing overtakes another call if the target could see the difference."""
    rank = dist.get_rank()
    window = create(full(0, 20_000), zero_init=True)
    dist.barrier()
    for turn in range(1, rounds + 1):
        if rank == 0:
            window.put(full(turn, 20_000), [(LAST, 1.0)])
            window.signal(LAST)
            window.write(full(turn, 20_000), LAST, 0)
            window.get([(LAST, 1.0)]).wait()  # gets the values of the write
            assert slot(window, LAST).eq(turn).all()
        elif rank == LAST:
            window.wait_signal(0).wait()
            assert slot(window, 0).eq(turn).all()
        dist.barrier()
    window.free()


def test_puts_come_before_signals_and_gets_after_writes(world_of: WorldsByWay, way: str) -> None:
    world_of(way).run(signals_and_writes, 1000 if ALL else 30)


# --- the target does not take part --------------------------------------------------------------------------


def busy_target(interface: str, flag: str) -> bool:
    """The last rank holds the GIL in a Python loop, while rank 0 calls all operations and then writes to a file.

    Returns:
        Whether rank 0 was done while the loop ran.
    """
    rank = dist.get_rank()
    if rank == 0:
        Path(flag).write_bytes(b"0")
    dist.barrier()
    with open(flag, "r+b") as file:
        done = mmap.mmap(file.fileno(), 1)  # reading a byte of it does not release the GIL
    window = AnyWindow(interface, full(rank, 2 * MIB))  # 16 MiB
    amount = full(5, 2 * MIB)
    window.put(amount)
    dist.barrier()
    was_done = True
    if rank == LAST:
        sys.setswitchinterval(1000.0)
        end = time.monotonic() + LIMIT
        while done[0] == ord("0") and time.monotonic() < end:
            pass
        sys.setswitchinterval(0.005)
        was_done = done[0] == ord("1")
    elif rank == 0:
        for mutex in (False, True):
            window.put(amount, {LAST: 1.0}, mutex=mutex)
            window.accumulate(amount, {LAST: 1.0}, mutex=mutex)
            window.get({LAST: 1.0}, mutex=mutex)
        done[0] = ord("1")
        assert window.slot(LAST).eq(LAST).all()
    dist.barrier()
    if rank == LAST:
        assert window.slot(0).eq(10).all()
    dist.barrier()
    window.free()
    return was_done


def test_a_target_that_keeps_the_gil(world_of: WorldsByWay, way: str, tmp_path: Path) -> None:
    assert all(world_of(way).run(busy_target, INTERFACE_OF[way], str(tmp_path / "done")))


def stopped_target(numel: int) -> None:
    """Rank 0 puts to the last rank and gets from it, while all threads of that rank are stopped."""
    rank, pid = dist.get_rank(), pids()[LAST]
    mine = torch.arange(numel, dtype=torch.float32) + rank
    window = create(mine, zero_init=True)
    dist.barrier()
    if rank == 0:
        with stopped(pid):
            for weight in (3.0, 0.25, 1.0):
                window.p = weight
                window.put(mine + weight, [(LAST, weight)], with_p=True).wait()
            window.get([(LAST, 0.5)]).wait()
        assert torch.equal(slot(window, LAST), (torch.arange(numel, dtype=torch.float32) + LAST) * 0.5)
    dist.barrier()
    if rank == LAST:
        assert window.version(0) == 3
        window.p = 0.0
        found = window.update(0.0, [(0, 1.0)], clone=True, with_p=True)
        assert torch.equal(found, torch.arange(numel, dtype=torch.float32) + 1.0)
        assert window.p == 1.0 and window.version(0) == 0
    dist.barrier()
    window.free()


@pytest.mark.parametrize("way", ["memory", "rma"])  # by the others, the engine of the target takes part
def test_a_target_that_is_stopped(world_of: WorldsByWay, way: str) -> None:
    for numel in (1, 1000, 4 * MIB + 3):
        world_of(way).run(stopped_target, numel)


def idle() -> float:
    """Returns the share of a core that this process uses while its windows are open and there are no calls."""
    window = create(torch.zeros(1000))
    window.put(torch.ones(1000), [(other, 1.0) for other in others()]).wait()
    dist.barrier()
    time.sleep(0.5)  # until work that follows the barrier is done
    begin = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(IDLE_SECONDS)
    end = resource.getrusage(resource.RUSAGE_SELF)
    dist.barrier()
    window.free()
    return (end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime) / IDLE_SECONDS


@pytest.mark.parametrize("way", ["memory", "hosts"])
def test_an_idle_rank(world_of: WorldsByWay, way: str) -> None:
    assert max(world_of(way).run(idle)) < MOST_IDLE


# --- mutexes ------------------------------------------------------------------------------------------------


def exclusion(interface: str, rounds: int, marks: str) -> int:
    """The rank that has the mutex, which rank 0 owns with the last one, makes a file that must not exist yet.

    Returns:
        The number of times that this rank had the mutex twice in a row.
    """
    rank = dist.get_rank()
    window = AnyWindow(interface, full(0))
    held, previous, *queues = (Path(marks, f"{interface} {what}") for what in ("held", "previous", 0, 1, 2))
    other, unfair = LAST - rank, 0
    dist.barrier()
    for _ in range(rounds if rank in (0, LAST) else 0):
        queues[rank].touch()
        with window.hold([other], own=rank == 0):
            queues[rank].unlink()
            held.touch(exist_ok=False)
            with previous.open("a+") as file:
                file.seek(0)
                again = file.read()[-1:] == str(rank)
                file.write(str(rank))
            unfair += again
            while not queues[other].exists():  # until the other rank queues again, or has done all its rounds
                time.sleep(0.001)
            time.sleep(0.1 if again else 0.001)  # its call has come by then; the next turn has to be its
            held.unlink()
    queues[rank].touch()
    dist.barrier()
    window.free()
    return unfair


def test_mutexes_exclude_and_are_fair(world_of: WorldsByWay, way: str, tmp_path: Path) -> None:
    rounds = 20
    for interface in INTERFACES:
        unfair = world_of(way).run(exclusion, interface, rounds, str(tmp_path))
        # The calls of a rank that is late each cost the other one a second turn, of all turns at most every second one.
        assert sum(unfair) < 1.5 * rounds, (interface, unfair)


def mutex_of_operations(interface: str) -> None:
    """An operation with the mutex waits without blocking its caller; the thread that has the mutex may proceed."""
    rank = dist.get_rank()
    window = AnyWindow(interface, full(rank))
    mine, theirs = contextlib.ExitStack(), contextlib.ExitStack()
    first, last = rank == 0, rank == LAST
    if last:
        mine.enter_context(window.hold([0], own=True))
    dist.barrier()
    if first:
        value = full(7)
        waiting = window.write("put", value, {LAST: 1.0}, mutex=True)
        behind = window.write("accumulate", value, {LAST: 1.0})
        assert not waiting.done()
    dist.barrier()
    if last:
        assert window.slot(0).eq(0).all()
        window.update(0.0, {0: 1.0}, clone=True, mutex=True)  # this thread holds the mutex
        mine.close()
    elif first:
        waiting.wait()
        behind.wait()
    dist.barrier()
    if last:
        assert window.slot(0).eq(14).all()
    dist.barrier()
    if first:
        theirs.enter_context(window.hold([LAST]))
        theirs.enter_context(window.hold([LAST]))  # again, which it may
        window.put(full(1), {LAST: 1.0}, mutex=True)
    dist.barrier()
    if last:
        message = error_of(window.hold([0], own=True, timeout=SHORT).__enter__)
        assert "Window.mutex of window 'w'" in message and f"owner {LAST} and rank 0" in message, message
        late = [(0, 1.0)]
        assert "timed out" in error_of(lambda: window.raw.update(1.0, late, mutex=True, timeout=SHORT))
    dist.barrier()
    theirs.close()
    if last:
        mine.enter_context(window.hold([0], own=True))
    dist.barrier()
    if first:
        assert "timed out" in error_of(window.hold([LAST], timeout=SHORT).__enter__)
        put = window.write("put", full(9), {LAST: 1.0}, mutex=True, timeout=SHORT)
        assert "timed out" in error_of(put.wait)
    dist.barrier()
    mine.close()
    dist.barrier()
    if first:  # the calls that timed out no longer wait
        with window.hold([LAST]):
            pass
    window.free()


def many_mutexes(interface: str) -> None:
    """All ranks take all mutexes of both kinds, again and again, without a deadlock."""
    window = AnyWindow(interface, full(0))
    dist.barrier()
    for turn in range(20):
        ranks = others()[::-1] if turn % 2 else others()
        with window.hold(ranks, own=(turn + dist.get_rank()) % 2 == 0):
            window.put(full(1))
    dist.barrier()
    window.free()


def unlock_late() -> None:
    """A thread that holds a mutex when its window is freed may unlock it afterwards, or not at all."""
    for turn in range(10):
        window = create(full(1, 1000))
        hold = window.hold(others(), own=True)
        dist.barrier()
        window.free()
        # they take the memory of the freed window
        fresh = [create(full(turn, 1000), f"fresh {number}", zero_init=True) for number in range(3)]
        hold.release()
        for each in fresh:
            each.hold(others(), own=True, timeout=SOON).release()
            assert all(slot(each, other).eq(0).all() for other in others())
        dist.barrier()
        for each in fresh:
            each.free()


def test_mutexes(world_of: WorldsByWay, way: str) -> None:
    for interface in INTERFACES[:2]:  # functions that take names have no timeout
        world_of(way).run(mutex_of_operations, interface)
    for interface in INTERFACES:
        world_of(way).run(many_mutexes, interface)
    world_of(way).run(unlock_late)


# --- the end of a window ------------------------------------------------------------------------------------


def free_late(unlocks: bool) -> None:
    """One rank frees the window while its operations wait for a mutex, which the other one releases, or frees too."""
    rank = dist.get_rank()
    window = create(full(rank), zero_init=True)
    hold = window.hold([LAST], own=True) if rank == 0 else None
    dist.barrier()
    if rank == LAST:
        works = [window.put(full(number), [(0, 1.0)], mutex=True) for number in range(5)]
        window.free()  # waits for the operations
        for work in works:
            work.wait()
    elif rank == 0:
        time.sleep(0.2)
    if hold and unlocks:
        hold.release()
        deadline = time.monotonic() + LIMIT
        while not slot(window, LAST).eq(4).all():
            assert time.monotonic() < deadline
        window.get([(LAST, 1.0)]).wait()  # the last rank is in free(), but its memory is still there
        window.put(full(1), [(LAST, 1.0)]).wait()
        window.accumulate(slot(window, LAST), [(LAST, 1.0)], mutex=True).wait()
    window.free()


def free_in_different_orders() -> None:
    """Each rank waits in the end of another window: an error names the missing rank, and no other window ends."""
    rank = dist.get_rank()
    windows = [create(full(0), name) for name in ("a", "b")]
    dist.barrier()
    first, second = windows if rank == 0 else windows[::-1]
    message = (
        rf"Window.free of window '{first.name}' .* timed out.*not there: .*\b{int(rank == 0)}\b.*same order"
    )
    with pytest.raises(dist.DistBackendError, match=message):
        first.free(timedelta(milliseconds=300))
    # otherwise the first rank to time out would free the window that the other one still waits for
    dist.barrier()
    second.free(SOON)  # the others have left this window
    dist.barrier()
    create(full(0), "a").free()


def drop_windows() -> None:
    """If windows are dropped without free(), their memory waits until the neighbors have dropped theirs."""
    rank = dist.get_rank()
    for turn in range(5):
        window = create(full(turn, 1000), f"w{turn}")
        dist.barrier()
        if rank == 0:
            del window
            gc.collect()
        dist.barrier()
        if rank != 0:
            # The memory still belongs to the slot, even if other windows ask for memory.
            late = window.put(full(99, 1000), [(0, 1.0)])
            assert (message := error_of(late.wait)) == "" or "no such window" in message
            del window, late
        fresh = create(full(0, 1000), f"fresh{turn}")
        assert all(slot(fresh, other).eq(0).all() for other in others())
        dist.barrier()
        fresh.free()


def test_the_end_of_a_window(world_of: WorldsByWay, way: str) -> None:
    for unlocks in (True, False):
        world_of(way).run(free_late, unlocks)
    for promise in (free_in_different_orders, drop_windows):
        world_of(way).run(promise)


def end_in_any_order(interface: str, how: str) -> None:
    """Windows, group and process end while operations are in flight, some of which wait for a mutex of rank 0."""
    rank = dist.get_rank()
    x = full(rank, 300_000)
    windows = [AnyWindow(interface, x.clone(), name=f"w{number}") for number in range(3)]
    held = contextlib.ExitStack()
    if rank == 0:
        held.enter_context(windows[1].hold(others(), own=True))
    dist.barrier()
    waiting = windows[1].write("put", x, {0: 1.0}, mutex=True) if rank != 0 else None
    works: list[Any] = [window.write("put", x, mutex=window is windows[1]) for window in windows]
    works += [window.raw.get([(other, 1.0) for other in others()]) for window in windows]
    globals()["kept"] = windows, held, waiting, works  # until the interpreter ends
    if how == "free":
        held.close()
        for window in windows:
            window.free()
        for work in works:
            work.wait()
    elif how in ("shutdown", "destroy"):
        held.close()
        fogdist.shutdown() if how == "shutdown" else dist.destroy_process_group()
        for window in windows:
            with pytest.raises(RuntimeError, match="shut down|destroyed"):
                window.put(x)
    elif how == "one frees, one destroys" and rank == 1:
        assert waiting is not None and not waiting.done()
        dist.destroy_process_group()
        assert "Window.put" in (message := error_of(waiting.wait)) or "Window.mutex" in message, message
        with pytest.raises(RuntimeError, match="destroyed"):
            windows[0].put(x)
    elif how == "one frees, one destroys" and rank == LAST:
        assert "Window.free of window 'w2'" in error_of(lambda: windows[2].free(timedelta(milliseconds=300)))
    elif how == "drop":
        globals().pop("kept")
        del windows, held, waiting, works
        gc.collect()
    # with "exit", all stays as it is


ENDS = ["free", "shutdown", "destroy", "one frees, one destroys", "drop", "exit"]
# All ends in memory, and every second way for each end.
SOME_ENDS = [
    (way, how)
    for number, way in enumerate(list(WAYS)[:-1])
    for index, how in enumerate(ENDS)
    if way == "memory" or (number + index) % 2
]
OTHER_ENDS = [(way, how) for way in WAYS for how in ENDS if (way, how) not in SOME_ENDS]


@pytest.mark.usefixtures("no_shared_memory_left")
@pytest.mark.parametrize(
    ("way", "how"), [*SOME_ENDS, *(pytest.param(*end, marks=pytest.mark.long) for end in OTHER_ENDS)]
)
def test_the_end_in_any_order(
    world_of: WorldsByWay, new_world: Callable[..., World], way: str, how: str
) -> None:
    world = new_by_way(world_of, new_world, way, finalizing=None)
    world.run(end_in_any_order, "object" if how == "shutdown" else INTERFACE_OF[way], how)
    world.close()


# --- losses -------------------------------------------------------------------------------------------------


def lose_a_neighbor(interface: str, kind: str) -> None:
    """The last rank is killed while it holds mutexes: operations on it fail, and all others go on.

    Args:
        interface: Of the window.
        kind: The operation that notices the loss.
    """
    rank, victim = dist.get_rank(), LAST
    window = AnyWindow(interface, full(rank, 50_000))
    window.put(full(rank, 50_000))
    if rank == victim:
        held = [window.raw.hold([1]), window.raw.hold([0], own=True)]  # noqa: F841 (until the process's end)
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    alive = 1 - rank
    value, message = full(10 + rank, 50_000), ""
    deadline = time.monotonic() + LIMIT
    while not message:
        message = error_of(lambda: window.write(kind, value.fill_(10 + rank), keep=0.5).wait())
        assert time.monotonic() < deadline, "the loss was not noticed"
    assert value.eq(10 + rank).all(), "the failed operation has scaled it"
    assert f"Window.{kind} of window 'w' of group" in message and f"rank {victim}" in message, message

    def on_all(skip_lost: bool) -> Iterator[str]:
        yield error_of(lambda: window.put(value, skip_lost=skip_lost))
        yield error_of(lambda: window.accumulate(value, skip_lost=skip_lost))
        yield error_of(lambda: window.get(skip_lost=skip_lost))

    while any(messages := [*on_all(skip_lost=True)]):  # they fail even so until the loss is known
        assert time.monotonic() < deadline and all(f"rank {victim}" in each for each in messages if each)
    assert all(f"rank {victim} (pid" in each and "was lost" in each for each in on_all(skip_lost=False))
    # The group has not failed. After this exchange, neither remaining rank puts any more.
    got = torch.zeros(3)
    exchange = [dist.P2POp(dist.isend, torch.ones(3), alive), dist.P2POp(dist.irecv, got, alive)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    assert got.eq(1).all()
    window.get(skip_lost=True)
    assert window.slot(alive).eq(alive).all()
    assert window.slot(victim).eq(victim).all()  # the last value that it put
    in_memory = window.raw.transport_to(victim) in (
        "shared memory",
        "staged",
    )  # the latter on a device of this host
    if rank == 0 and not in_memory:  # the mutex was lost with its owner
        assert f"rank {victim}" in error_of(lambda: window.raw.hold([victim], timeout=SOON))
    else:
        with window.hold([victim], own=rank == 1):
            pass
    window.free()


@pytest.mark.usefixtures("no_shared_memory_left")
@pytest.mark.parametrize("way", [*WAYS, "alone on its host"])
def test_a_lost_neighbor(world_of: WorldsByWay, new_world: Callable[..., World], way: str) -> None:
    """On hosts, another rank is on the host of the lost one, or none."""
    # UCX terminates a process that writes by RMA to a process of this machine that has just been killed; see
    # tests/test_rma.py.
    kind = "accumulate" if way == "rma" else "put"
    alone = way not in WAYS
    world = world_of.on_hosts([0, 0, 1]) if alone else new_by_way(world_of, new_world, way)
    outcomes = world.run_raw(lose_a_neighbor, "_C" if alone else INTERFACE_OF[way], kind)
    assert [outcome.state for outcome in outcomes] == ["returned", "returned", "died"], [*map(str, outcomes)]
    world.close()
