"""Tests of windows on ranks of several hosts; tests/test_window_backend.py runs them."""

from __future__ import annotations

import os

import test_window_backend as windows
import torch
import torch.distributed as dist


def transports() -> None:
    """Checks the transport to each neighbor against its host and the environment."""
    hosts = windows.backend().hosts
    linked = os.environ.get("FOG_LOCAL_LINKS") != "0"
    between = "rma" if os.environ.get("FOG_BETWEEN_HOSTS") == "rma" else "messages"
    window = windows.create(windows.full(0))
    mapped = {rank: linked and hosts[rank] == hosts[dist.get_rank()] for rank in windows.others()}
    for rank, here in mapped.items():
        assert window.transport_to(rank) == ("shared memory" if here else between)
    assert window.transport == (f"shared memory and {between}" if any(mapped.values()) else between)
    window.free()


def everything(done: str = "done") -> None:
    """Runs all tests; `done` is a file that the ranks share, by default in the job's folder."""
    transports()
    for numel in (0, 1, 1000, 4097, 300_001):
        windows.operations(numel)
    windows.starts_as_a_copy()
    windows.with_p()
    windows.many_in_flight()
    windows.several_windows()
    windows.many_mutexes()
    for mutex in (False, True):
        _, mine, p, first = windows.move_mass(20_000, torch.int64, 2 * windows.RACE_SECONDS, mutex)
        totals = torch.tensor([int(mine.sum()), int(p), int(first)])
        dist.all_reduce(totals)
        size = dist.get_world_size()
        assert totals[0] == sum(
            int((torch.arange(20_000) % 1000 + rank * 1000 + 1).sum()) for rank in range(size)
        )
        assert totals[1] == totals[2]
    if dist.get_world_size() == 2:
        assert windows.collect_meanwhile(130_000) > 3
        windows.mutex_of_operations()
        assert windows.busy_target(done)
        for nbytes in (8, 100_000, 1 << 20):
            for kind in ("put", "accumulate", "get"):
                looks, _ = windows.race(nbytes // 8, torch.int64, kind, False)
                assert looks > 3 or dist.get_rank() == 0
