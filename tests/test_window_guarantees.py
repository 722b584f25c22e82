"""Tests the guarantees of one-sided windows with ranks that race, are busy, idle or dead, on one host and on several.

Ranks use fogdist as its users do. Each guarantee is one function, which the ranks of a world run, and those of hosts
that are network namespaces. No test depends on the speed of the machine; times are printed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import resource
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import fogdist
import networkx as nx
import pytest
import torch
import torch.distributed as dist
from fogdist import topology as topologies
from harness import ALL, BACKEND
from hosts import run_on_hosts

pytestmark = pytest.mark.skipif(BACKEND != "fog", reason="windows of backend fog")

MIB = 1 << 20
# The least time for which writers and readers race. On a busy machine they go on until they have seen enough, or until
# the limit.
RACE_SECONDS = 0.4 if ALL else 0.1
RACE_LIMIT = 20.0
LOOP_SECONDS = 0.3
LOOP_LIMIT = 20.0
# The rate of a host's link for the busy target; the emulated switch does not limit it.
RATE_BITS = 1e9
IDLE_SECONDS = 1.0
# The share of a core. Between hosts, 1% is promised; the rest is for other load on the machine.
MOST_IDLE = 0.05
LIMIT = timedelta(seconds=5)


def one_way(size: int) -> nx.DiGraph:
    """Returns a graph in which rank 0 writes to all others."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(size))
    graph.add_edges_from((0, rank) for rank in range(1, size))
    return graph


def gather(value: float) -> list[float]:
    parts = [torch.zeros(1, dtype=torch.float64) for _ in range(fogdist.size())]
    dist.all_gather(parts, torch.tensor([value], dtype=torch.float64))
    return [part.item() for part in parts]


# --- the target does not take part --------------------------------------------------------------------------


def busy_target(seconds: float, folder: str) -> list[list[Any]]:
    """Rank 1 is in a Python loop that never releases the GIL; rank 0 puts, accumulates and gets 16 MiB.

    Args:
        seconds: The least duration of the loop. On a busy machine it lasts until rank 0 is done, or LOOP_LIMIT.
        folder: Folder for a file by which rank 0 tells that it is done.

    Returns:
        On rank 1 the begin and end of the loop, on rank 0 each operation with its begin and end, by the system's clock.
    """
    fogdist.init(topologies.FullyConnectedGraph)
    rank = fogdist.rank()
    x = torch.full((2 * MIB,), 1.0 + rank, dtype=torch.float64)
    amount = torch.full_like(x, 5.0)
    fogdist.win_create(x, "w")
    operations = [
        ("put", lambda: fogdist.win_put(amount, "w")),
        ("accumulate", lambda: fogdist.win_accumulate(amount, "w")),
        ("get", lambda: fogdist.win_get("w")),
        ("put with the mutex", lambda: fogdist.win_put(amount, "w", require_mutex=True)),
        ("accumulate with the mutex", lambda: fogdist.win_accumulate(amount, "w", require_mutex=True)),
        ("get with the mutex", lambda: fogdist.win_get("w", require_mutex=True)),
    ]
    times: list[list[Any]] = []
    path = Path(folder, "done")
    if rank == 0:
        path.write_bytes(b"0")
        for _ in range(2):  # the first use of memory takes the system's time
            for _, operation in operations:
                operation()
    fogdist.barrier()
    with path.open("r+b") as file:
        done = mmap.mmap(file.fileno(), 1)  # reading memory does not release the GIL
    if rank == 1:
        sys.setswitchinterval(1000.0)
        begin = time.monotonic()
        while time.monotonic() < begin + (seconds if done[0] == ord("1") else LOOP_LIMIT):
            pass
        times.append(["loop", begin, time.monotonic()])
        sys.setswitchinterval(0.005)
    else:
        time.sleep(0.1)
        for name, operation in operations:
            begin = time.monotonic()
            operation()
            times.append([name, begin, time.monotonic()])
        done[0] = ord("1")
        assert fogdist.win_update("w", 0.0, {1: 1.0}, clone=True).eq(2).all()
    fogdist.barrier()
    if rank == 1:
        assert fogdist.win_update("w", 0.0, {0: 1.0}, clone=True).eq(10).all()
    fogdist.barrier()
    fogdist.win_free()
    return times


def check_busy_target(results: list[list[list[Any]]]) -> None:
    operations, [[_, begin, end]] = results
    for name, start, done in operations:
        print(f"{name} of 16 MiB: {1e3 * (done - start):.1f} ms")
        assert begin < start and done < end, f"{name} waited for the target"


def test_a_target_in_a_loop(worlds, tmp_path):
    check_busy_target(worlds(2).run(busy_target, LOOP_SECONDS, str(tmp_path)))


def test_a_target_in_a_loop_on_another_host(tmp_path):
    """16 MiB take 134 ms on such a link."""
    rate = f"{RATE_BITS / 1e6:.0f}mbit"
    calls = [("busy_target", [LOOP_SECONDS, str(tmp_path)])]
    results = run_on_hosts(tmp_path, [0, 1], "test_window_guarantees", calls, rate=rate)
    check_busy_target([result for (result,) in results])


# --- nothing is torn ----------------------------------------------------------------------------------------


def race(nbytes: int, kind: str, mutex: bool, seconds: float) -> list[int]:
    """Rank 0 writes as fast as it can, or changes a tensor that the others get; these look for mixed values.

    All elements of a value have the same number, so a mixture of two values shows; p is that number too.

    Returns:
        On a reader, the number of reads, and the number of different values that it saw.
    """
    fogdist.init(one_way)
    rank = fogdist.rank()
    dtype = torch.uint8 if nbytes < 8 else torch.int64
    x = torch.ones(nbytes // dtype.itemsize, dtype=dtype)
    # Slots hold whole numbers below 2**53, so p is exact.
    values = [torch.full_like(x, value) for value in range(1, 6)]
    looks, seen = 0, set()
    with fogdist.Window(x, zero_init=True) as window:
        fogdist.barrier()
        end = time.monotonic() + seconds
        over = (
            dist.barrier(async_op=True) if rank == 0 else None
        )  # the others join once they have seen enough values
        while over is None or not over.is_completed():
            if rank != 0:
                now = time.monotonic()
                if now > end + RACE_LIMIT or (now > end and looks > 3 and len(seen) > 2):
                    dist.barrier()
                    break
                if kind == "get":
                    window.get(require_mutex=mutex)
                found = window.update(
                    self_weight=0.0,
                    neighbor_weights={0: 1.0},
                    reset=kind != "get" and looks % 3 == 0,
                    clone=True,
                    require_mutex=mutex,
                    with_p=True,
                )
                low, high = (int(value) for value in torch.aminmax(found))
                assert low == high, f"torn after {looks} looks: {low} and {high}"
                if kind != "get":
                    assert window.p == low or (dtype == torch.uint8 and window.p % 256 == low), (
                        window.p,
                        low,
                    )
                seen.add(low)
                looks += 1
                continue
            for number, value in enumerate(values, 1):
                window.p = float(number)
                if kind == "put":
                    window.put(value, require_mutex=mutex, with_p=True)
                elif kind == "accumulate":
                    window.accumulate(value, require_mutex=mutex, with_p=True)
                elif mutex:
                    with window.lock():
                        x.mul_(3)  # the owner's own arithmetic
                elif number % 2:
                    window.update(self_weight=3.0, neighbor_weights={})
                else:
                    window.put(x, dst_weights={}, self_weight=3.0)
        fogdist.barrier()
    return [looks, len(seen)]


KINDS = ["put", "accumulate", "get"]
# Sizes in bytes, and whether the mutex is taken.
SIZES = [(nbytes, mutex) for nbytes in (1, 100_000, MIB, 16 * MIB) for mutex in (False, True)]
CASES = [
    (nbytes, kind, mutex)
    for nbytes, mutex in (SIZES if ALL else [(1, False), (100_000, True), (MIB, False)])
    for kind in KINDS
]


def test_nothing_is_torn(worlds):
    for case in CASES:
        _, *readers = worlds(3).run(race, *case, RACE_SECONDS)
        assert all(looks > 3 and seen > 2 for looks, seen in readers), (
            f"too little was seen: {case} {readers}"
        )


def test_nothing_is_torn_between_hosts(tmp_path):
    calls = [("race", [*case, RACE_SECONDS]) for case in CASES]
    _, *readers = run_on_hosts(tmp_path, [0, 0, 1], "test_window_guarantees", calls)
    few = [
        (case, *found)
        for case, *found in zip(CASES, *readers, strict=True)
        if any(looks <= 3 or seen <= 2 for looks, seen in found)
    ]
    assert not few, f"too little was seen: {few}"


# --- nothing is lost ----------------------------------------------------------------------------------------


def tokens(dtype_name: str, numel: int, seconds: float) -> list[float]:
    """Ranks pass on random parts of their values, in whole pieces, and collect, at random times.

    There are so few pieces that every dtype holds them, and every sum of them, exactly.

    Returns:
        The least and the largest sum of an element over all ranks, the sum of p, and how often this rank passed on and
        collected.
    """
    fogdist.init(topologies.FullyConnectedGraph)
    rank, size = fogdist.rank(), fogdist.size()
    dtype = getattr(torch, dtype_name)
    chance = random.Random(rank)
    torch.manual_seed(rank)
    x = torch.full((numel,), 60 // size, dtype=dtype)
    passed = collected = 0
    fogdist.turn_on_win_ops_with_associated_p()
    fogdist.win_create(x, "w", zero_init=True)
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end or (min(passed, collected) < 2 and now < end + RACE_LIMIT):
        other = chance.choice(fogdist.out_neighbor_ranks())
        part = (torch.rand(numel) * (x.to(torch.float32) + 1)).floor().to(dtype)
        x -= part
        write = (part, "w", 0.0, {other: 1.0}, chance.random() < 0.3)  # passes on all of p
        if chance.random() < 0.5:
            fogdist.win_accumulate(*write)
        else:
            fogdist.win_wait(fogdist.win_accumulate_nonblocking(*write))
        assert fogdist.win_associated_p("w") == 0.0 and not part.any(), "nothing of it was to be kept"
        passed += 1
        if chance.random() < 0.6:
            fogdist.win_update_then_collect("w", require_mutex=chance.random() < 0.3)
            collected += 1
        if chance.random() < 0.1:
            time.sleep(chance.random() * 0.003)
    fogdist.barrier()
    fogdist.win_update_then_collect("w")
    total_p = sum(gather(fogdist.win_associated_p("w")))
    fogdist.turn_off_win_ops_with_associated_p()
    total = x.to(torch.int64)
    dist.all_reduce(total)
    fogdist.win_free()
    return [total.min().item(), total.max().item(), total_p, passed, collected]


def check_tokens(results: list[list[float]], what: Any = None) -> None:
    size = len(results)
    expected = size * (60 // size)
    for least, most, p, passed, collected in results:
        assert (least, most, p) == (expected, expected, size), what
        assert min(passed, collected) > 1, what


def test_mass_is_conserved(worlds):
    for dtype in ("float64", "float32", "bfloat16", "int64", "uint8"):
        for numel in (1, 100_000):
            check_tokens(worlds(3).run(tokens, dtype, numel, RACE_SECONDS), (dtype, numel))


def shares(numel: int, seconds: float) -> list[float]:
    """Sends random shares that sum to one, at random times; returns the sums over all ranks, in float64."""
    fogdist.init(topologies.ExponentialTwoGraph)
    rank = fogdist.rank()
    chance = random.Random(rank)
    x = torch.full((numel,), float(rank + 1), dtype=torch.float64)
    fogdist.turn_on_win_ops_with_associated_p()
    fogdist.win_create(x, "w", zero_init=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        parts = [chance.random() for _ in range(1 + len(fogdist.out_neighbor_ranks()))]
        own, *others = (part / sum(parts) for part in parts)
        weights = dict(zip(fogdist.out_neighbor_ranks(), others, strict=True))
        fogdist.win_wait(fogdist.win_accumulate_nonblocking(x, "w", own, weights, chance.random() < 0.3))
        if chance.random() < 0.5:
            fogdist.win_update_then_collect("w", require_mutex=chance.random() < 0.3)
    fogdist.barrier()
    fogdist.win_update_then_collect("w")
    total_p = sum(gather(fogdist.win_associated_p("w")))
    fogdist.turn_off_win_ops_with_associated_p()
    dist.all_reduce(x)
    result = [x.min().item(), x.max().item(), total_p]
    fogdist.win_free()
    return result


def test_mass_is_conserved_between_hosts(tmp_path):
    cases = [(dtype, numel) for numel in (1, 100_000) for dtype in ("float32", "bfloat16", "int64")]
    calls: list[tuple[str, list[Any]]] = [("tokens", [*case, 2 * RACE_SECONDS]) for case in cases]
    calls.append(("shares", [5000, 5 * RACE_SECONDS]))
    ranks = [0, 1, 1]
    results = run_on_hosts(tmp_path, ranks, "test_window_guarantees", calls)
    for number, case in enumerate(cases):
        check_tokens([result[number] for result in results], case)
    for *_, (least, most, p) in results:
        assert p == pytest.approx(len(ranks), rel=1e-11)
        total = sum(range(1, len(ranks) + 1))
        assert least == pytest.approx(total, rel=1e-11) and most == pytest.approx(total, rel=1e-11)


# --- an open window uses no CPU -----------------------------------------------------------------------------


def idle(seconds: float) -> float:
    """Returns the share of a core that this process uses while its windows are open and there are no calls."""
    fogdist.init(topologies.FullyConnectedGraph)
    fogdist.win_create(torch.zeros(1000), "w")
    fogdist.win_put(torch.ones(1000), "w")
    fogdist.barrier()
    time.sleep(0.5)  # until work that follows the barrier is done
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(seconds)
    after = resource.getrusage(resource.RUSAGE_SELF)
    fogdist.barrier()
    fogdist.win_free()
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"an open window costs {used / seconds:.3%} of a core")
    return used / seconds


def test_an_idle_rank(worlds):
    assert max(worlds(3).run(idle, IDLE_SECONDS)) < MOST_IDLE


def test_an_idle_rank_between_hosts(tmp_path):
    results = run_on_hosts(tmp_path, [0, 1], "test_window_guarantees", [("idle", [IDLE_SECONDS])])
    assert max(share for (share,) in results) < MOST_IDLE


# --- the end ------------------------------------------------------------------------------------------------


def end_in_disorder(how: str) -> None:
    """Windows, group and process end while puts are in flight, some of which wait for a mutex."""
    fogdist.init(topologies.FullyConnectedGraph)
    rank = fogdist.rank()
    x = torch.full((300_000,), float(rank))
    windows = [fogdist.Window(x.clone(), name=f"w{number}") for number in range(3)]
    held = contextlib.ExitStack()
    if rank == 0:
        held.enter_context(windows[1].lock())
    fogdist.barrier()
    handles = [
        window.put_nonblocking(x, require_mutex=number % 2 == 1, timeout=LIMIT)
        for _ in range(3)
        for number, window in enumerate(windows)
    ]
    globals()["left"] = windows, held  # keeps them until the interpreter ends
    if how == "free":
        held.close()
        fogdist.win_free()
        assert all(fogdist.win_wait(handle) for handle in handles)
    elif how == "one frees, one destroys":
        if rank == 0:
            for window in windows[:2]:
                with contextlib.suppress(dist.DistBackendError):  # fails if rank 1 has ended by now
                    window.free(timeout=timedelta(milliseconds=500))
        elif rank == 1:
            dist.destroy_process_group()
    elif how == "shutdown":
        fogdist.shutdown()
    elif how == "destroy":
        dist.destroy_process_group()
        for window in windows:
            with pytest.raises(RuntimeError):
                window.put(x)
    # with "exit", all stays as it is


ENDS = ["free", "shutdown", "destroy", "one frees, one destroys", "exit"]


@pytest.mark.usefixtures("no_shared_memory_left")
@pytest.mark.parametrize("how", ENDS)
def test_the_end_in_any_order(new_world, how):
    new_world(3, finalizing=None).run(end_in_disorder, how)


@pytest.mark.usefixtures("no_shared_memory_left")
@pytest.mark.parametrize("how", [ENDS[0], ENDS[3], ENDS[4]])
def test_the_end_in_any_order_between_hosts(tmp_path, how):
    run_on_hosts(tmp_path, [0, 1, 1], "test_window_guarantees", [("end_in_disorder", [how])], finalizing=None)


def lose_a_neighbor(victim: int) -> list[str]:
    """Kills a rank; returns the errors of operations on it. The others must go on."""
    fogdist.init(topologies.FullyConnectedGraph)
    rank = fogdist.rank()
    x = torch.full((50_000,), float(rank))
    window = fogdist.Window(x, name="w", zero_init=True)
    window.put(x)
    fogdist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    survivors = [other for other in fogdist.out_neighbor_ranks() if other != victim]
    messages = []
    deadline = time.monotonic() + 30.0
    while not messages:
        try:
            window.put(x, self_weight=0.5, timeout=LIMIT)
        except dist.DistBackendError as error:
            messages.append(str(error))
        else:
            x.fill_(rank)  # the loss is not known yet
        assert time.monotonic() < deadline
    assert x.eq(rank).all()  # the failed put has not scaled it
    # The other neighbors got this value, and get the next ones.
    for value in (10.0, 20.0):
        window.put(torch.full_like(x, value + rank), dst_weights=survivors, timeout=LIMIT)
        done = set()
        while len(done) < len(survivors):
            for other in set(survivors) - done:
                found = window.update(self_weight=0.0, neighbor_weights={other: 1.0}, clone=True)
                if found.ge(value).all():
                    done.add(other)
            assert time.monotonic() < deadline
            time.sleep(0.001)
    # Until the loss is known, operations on the lost rank fail even with skip_lost.
    while True:
        try:
            window.put(x, dst_weights=[victim], skip_lost=True, timeout=timedelta(seconds=1))
            window.accumulate(x, dst_weights=[victim], skip_lost=True, timeout=timedelta(seconds=1))
            window.get(src_weights=[victim], skip_lost=True, timeout=timedelta(seconds=1))
            break
        except dist.DistBackendError as error:
            messages.append(str(error))
        assert time.monotonic() < deadline, messages
    window.free(timeout=LIMIT)
    return messages


def check_messages(messages: list[str], victim: int) -> None:
    assert messages and all("'w'" in each and f"rank {victim}" in each for each in messages), messages


@pytest.mark.usefixtures("no_shared_memory_left")
def test_a_lost_neighbor(new_world):
    outcomes = new_world(3).run_raw(lose_a_neighbor, 1)
    assert [outcome.state for outcome in outcomes] == ["returned", "died", "returned"], outcomes
    for outcome in outcomes[::2]:
        check_messages(outcome.value, 1)


@pytest.mark.usefixtures("no_shared_memory_left")
@pytest.mark.parametrize("placement", [[0, 1, 1], [0, 0, 1]], ids=["with a witness", "alone"])
def test_a_lost_neighbor_on_another_host(tmp_path: Path, placement: list[int]) -> None:
    """Rank 2 is lost; its host has another rank, or only this one."""
    calls = [("lose_a_neighbor", [2])]
    results = run_on_hosts(tmp_path, placement, "test_window_guarantees", calls, killed=[2])
    for (messages,) in results[:2]:
        check_messages(messages, 2)
