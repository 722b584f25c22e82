"""Ranks to which the system refuses memory or threads; tests/test_refusals.py preloads injection/refusals.cpp for them.

Arguments: names of CASES, by default all. Each case has two ranks, forked from this process, which has imported torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

import fog_pg  # noqa: F401  registers "fog"

TIMEOUT = timedelta(seconds=10)
SECONDS = 90  # a rank that hangs is ended after this time
# Every allocation of the thread fails once, in order. There are fewer allocations than this in any case.
MOST_ALLOCATIONS = 400
# With so many refusals in a row, fog cannot even write its error messages.
ROWS = [(0, 12), (5, 12), (10, 30)]

system = ctypes.CDLL(None)
system.refuse_memory.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_long]
system.allow_memory.restype = ctypes.c_long


class Ranks:
    """Two ranks of one world, and a way to communicate without fog."""

    def __init__(self, rank: int, store: dist.Store) -> None:
        self.rank = rank
        self.store = store
        self.said = 0

    def join(self) -> None:
        dist.init_process_group(
            "fog",
            store=dist.PrefixStore("world", self.store),
            rank=self.rank,
            world_size=2,
            timeout=TIMEOUT,
        )

    def say(self, source: int, text: str = "") -> str:
        """Returns rank `source`'s text on both ranks."""
        self.said += 1
        key = f"said-{self.said}"
        if self.rank == source:
            self.store.set(key, text)
            return text
        return self.store.get(key).decode()


def each_refusal(ranks: Ranks, attempt: Callable[[int, int], None]) -> int:
    """Calls attempt(first, count) for each refusal on rank 0; returns the number of allocations that were refused."""
    for first in range(MOST_ALLOCATIONS):
        attempt(first, 1)
        asked = system.allow_memory()
        if ranks.say(0, "more" if asked > first else "all") == "all":
            break
    for first, count in ROWS:
        attempt(first, count)
        system.allow_memory()
    return first


def outcome_of(wait: Callable[[], object]) -> str:
    try:
        wait()
    except dist.DistBackendError as error:
        return str(error)
    return ""


def operations_without_memory(ranks: Ranks) -> None:
    """Regression: the first refusal in the thread that makes progress ended the process."""
    ranks.join()
    failures = set()
    for numel in (3, 1 << 16):

        def attempt(first: int, count: int, numel: int = numel) -> None:
            group = dist.new_group(timeout=TIMEOUT)
            x = torch.ones(numel)
            if ranks.rank == 0:
                work = dist.all_reduce(x, group=group, async_op=True)
                future = work.get_future()  # waiting for it makes no progress
                system.refuse_memory(b"fog_progress", first, count)
                ranks.say(0)
                error = outcome_of(future.wait)
                assert (error == "") == (outcome_of(work.wait) == "")
                assert "all_reduce" in error or "allreduce" in error or not error, error
                failures.add(error != "")
            else:
                ranks.say(0)
                error = outcome_of(lambda: dist.all_reduce(x, group=group))
            assert error or (x == 2.0).all(), x

        each_refusal(ranks, attempt)
    if ranks.rank == 0:
        assert failures == {False, True}
    dist.destroy_process_group()


def windows_without_memory(ranks: Ranks) -> None:
    """Regression: a request whose data got no memory was applied nevertheless, without data."""
    os.environ["_FOG_LOCAL_LINKS"] = "0"  # everything goes by messages
    ranks.join()
    numel = 1 << 15
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    neighbors = [1 - ranks.rank]
    tensor = torch.zeros(numel)
    window = backend.create_window(tensor, "w", neighbors, neighbors, zero_init=True)
    put = 0.0
    refused = set()

    def attempt(first: int, count: int) -> None:
        nonlocal put
        if ranks.rank == 0:
            system.refuse_memory(b"fog_progress", first, count)
            ranks.say(0)
            error = ranks.say(1)
            window.update(0.0, [(1, 1.0)])
            value = tensor[0].item()
            assert (tensor == value).all(), (tensor.min(), tensor.max())
            if error:
                assert value in (put, put + 1.0), (value, put, error)
                refused.add(count)
            else:
                assert value == put + 1.0, (value, put)
            put = value
            ranks.say(0, str(put))
        else:
            ranks.say(0)
            # If lack of memory prevents the reply, the timeout ends the wait.
            timeout = timedelta(seconds=5.0 if count == 1 else 0.2)
            work = window.put(torch.full((numel,), put + 1.0), [(0, 1.0)], timeout=timeout)
            ranks.say(1, outcome_of(work.wait))
            put = float(ranks.say(0))

    each_refusal(ranks, attempt)
    if ranks.rank == 0:
        assert 1 in refused
    window.free()
    dist.destroy_process_group()


def updates_without_memory(ranks: Ranks) -> None:
    """Regression: after an update that lacked memory, neighbors waited without end for the end of it."""
    ranks.join()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    neighbors = [1 - ranks.rank]
    window = backend.create_window(torch.zeros(8), "w", neighbors, neighbors, zero_init=True)
    with open("/proc/thread-self/comm", "rb") as name:
        thread = name.read().strip()

    def attempt(first: int, count: int) -> None:
        if ranks.rank == 0:
            system.refuse_memory(thread, first, count)
            with contextlib.suppress(MemoryError):
                window.update(0.5, [(1, 1.0)])
            system.allow_memory()
            ranks.say(0)
        else:
            ranks.say(0)
            assert outcome_of(window.get([(0, 1.0)]).wait) == ""
        ranks.say(1)  # before the next update, whose end would also end this one

    each_refusal(ranks, attempt)
    window.free()
    dist.destroy_process_group()


def futures_without_threads(ranks: Ranks) -> None:
    """Regression: the first refused thread ended the process."""
    ranks.join()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    neighbors = [1 - ranks.rank]
    window = backend.create_window(torch.zeros(4), "w", neighbors, neighbors)
    dist.barrier()
    system.refuse_threads(1)
    second = torch.ones(3)

    def average(future: torch.futures.Future) -> torch.Tensor:
        other = dist.all_reduce(second, async_op=True)
        return future.value()[0] + other.get_future().wait()[0]

    for _ in range(3):
        second.fill_(1.0)
        work = dist.all_reduce(torch.ones(3), async_op=True)
        assert work.get_future().then(average).wait()[0].item() == 4.0
    if ranks.rank == 0:
        taken = window.wait_signal(1)
        while taken.is_completed():  # refused: the only thread must first return from its last callback
            taken = window.wait_signal(1)
        with_none = outcome_of(window.wait_signal(1).wait)
        assert "thread" in with_none and "wait_signal" in with_none, with_none
        ranks.say(0)
        taken.wait()
    else:
        ranks.say(0)
        window.signal(0).wait()
    system.refuse_threads(0)
    window.free()
    dist.destroy_process_group()


def start_without_threads(ranks: Ranks) -> None:
    system.refuse_threads(1)
    error = outcome_of(ranks.join)
    assert "thread" in error, error
    system.refuse_threads(0)


ALL = (
    operations_without_memory,
    windows_without_memory,
    updates_without_memory,
    futures_without_threads,
    start_without_threads,
)
CASES = {case.__name__: case for case in ALL}


def run_rank(rank: int, port: tuple[int, int], case: Callable[[Ranks], None]) -> None:
    signal.alarm(SECONDS)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(port[1], f"{store.port}\n".encode())
    else:
        store = dist.TCPStore("127.0.0.1", int(os.read(port[0], 100)), is_master=False)
    ranks = Ranks(rank, store)
    case(ranks)
    # Rank 0 owns the store, so it ends last.
    if rank == 0:
        store.get("ended")
    else:
        store.set("ended", "")
    print(f"rank {rank}: {case.__name__}: done", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    children = {}
    for case in [CASES[name] for name in sys.argv[1:]] or CASES.values():
        port = os.pipe()
        for rank in range(2):
            child = os.fork()
            if child == 0:
                run_rank(rank, port, case)
                sys.exit()
            children[child] = f"{case.__name__}, rank {rank}"
    ends = {name: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child, name in children.items()}
    bad = [f"{name} ended with {status}" for name, status in ends.items() if status != 0]
    sys.exit("; ".join(bad) or None)


if __name__ == "__main__":
    main()
