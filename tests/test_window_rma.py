"""Tests of one-sided windows by RMA: the bits of their values, the pool of memory, and several hosts.

test_windows.py and test_window_guarantees.py test what windows promise by RMA too, between ranks of this host that each
are a node of their own to fog and MPI.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World
from hosts import run_on_hosts
from reference import Checks
from test_windows import CONTENTS, operations_on
from torch import Tensor
from window_interfaces import LIMIT, WAYS, WorldsByWay, backend, create, full, others, slot

from fog_pg import _C

MIB = 1 << 20


@pytest.mark.long
@pytest.mark.usefixtures("no_shared_memory_left")
def test_contents_between_hosts(tmp_path: Path) -> None:
    """Ranks have neighbors on both hosts; UCX's shared memory reaches both, and stands in for RDMA."""
    environment = {"FOG_BETWEEN_HOSTS": "rma", "UCX_TLS": "shm,self", "_FOG_CONFIRM": "1"}
    calls = [("by_every_interface", [promise]) for promise in CONTENTS]
    run_on_hosts(tmp_path, [0, 0, 1], "test_windows", calls, environment=environment)


# --- the same bits as by other ways -------------------------------------------------------------------------


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
            results += [slot(window, other) for other in others()]
            window.get([(other, weight) for other in others()]).wait()
            results += [slot(window, other) for other in others()]
            dist.barrier()
        window.free()
    return [result.view(torch.uint8) for result in results]


def test_weighted_values_have_the_bits_of_other_ways(world_of: WorldsByWay) -> None:
    for ours, theirs in zip(world_of("rma").run(weighted), world_of("memory").run(weighted), strict=True):
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
    with Checks() as checks:
        operations_on("_C", MIB, checks)


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


def test_what_the_pool_has_no_room_for(new_world: Callable[..., World]) -> None:
    new_world(2, environment=WAYS["rma"] | {"FOG_RMA_BYTES": str(5 * MIB)}).run(larger_than_the_pool)


def test_the_pool_gets_back_what_windows_had(new_world: Callable[..., World]) -> None:
    new_world(2, environment=WAYS["rma"] | {"FOG_RMA_BYTES": str(8 * MIB)}).run(many_windows, 20)


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


def test_the_pool_gets_back_what_groups_had(new_world: Callable[..., World]) -> None:
    new_world(2, environment=WAYS["rma"] | {"FOG_RMA_BYTES": str(8 * MIB)}).run(many_groups, 12)
