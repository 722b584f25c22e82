"""Tests of large data in both directions between hosts: it waits for the other side's header, and the wait ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import fogdist
import pytest
import torch
import torch.distributed as dist
from harness import BACKEND
from hosts import run_on_hosts

pytestmark = [
    pytest.mark.skipif(BACKEND != "fog", reason="tests fog's exchanges"),
    pytest.mark.usefixtures("no_shared_memory_left"),
]

# Data of this size goes by messages, waits for the other side's header, and is sent in one part.
WAITING = 2 << 20


def disagree(first: int) -> str:
    """Two ranks exchange tensors of different sizes; either one begins."""
    fogdist.init()
    fogdist.barrier()
    if fogdist.rank() != first:
        time.sleep(0.05)  # the other rank's header has arrived, and its data waits for this rank's header
    x = torch.ones(WAITING // 4 + fogdist.rank())
    with pytest.raises(dist.DistBackendError, match="ranks disagree") as failed:
        fogdist.neighbor_allreduce(x, enable_topo_check=False)
    return str(failed.value)


@pytest.mark.parametrize("first", [0, 1])
def test_a_disagreement_ends_what_waits(new_world, first: int) -> None:
    texts = new_world(2, environment={"FOG_LOCAL_LINKS": "0"}).run(disagree, first)
    assert all("neighbor_allreduce" in text for text in texts), texts


def exchange_with_one_that_dies() -> str:
    """Rank 1 ends before it has sent the header for which rank 0 waits."""
    fogdist.init()
    x = torch.ones(WAITING // 4)
    fogdist.barrier()
    if fogdist.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError) as failed:
        fogdist.neighbor_allreduce(x, enable_topo_check=False)
    return str(failed.value)


def test_a_killed_rank_ends_what_waits(tmp_path: Path) -> None:
    found = run_on_hosts(tmp_path, [0, 1], __name__, [("exchange_with_one_that_dies", [])], killed=[1])
    assert "rank 1" in found[0][0], found
