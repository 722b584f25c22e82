"""Tests of the connections that detect the end of ranks on other hosts, and that only exchanging ranks make."""

from __future__ import annotations

import os
import resource
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import RUN_TIMEOUT, error_of
from hosts import address, await_silences, run_on_hosts, silences
from test_tcp import exchange_along_ring, exchange_with_all  # noqa: F401  run_on_hosts finds them here by their names

# The default of FOG_HOST_TIMEOUT.
SILENCE = 11.0
SOON = 5.0


def backend() -> dist.Backend:
    return dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]


def settle(expected: list[int]) -> None:
    """Waits until each rank has the expected number of connections, and checks that it stays."""
    connections = [SILENCE] * expected[dist.get_rank()]
    time.sleep(0.3)  # two ranks that connect to each other at once have two connections for a moment
    await_silences(connections)
    time.sleep(0.3)
    assert silences() == connections


def test_only_who_is_messaged_is_watched(tmp_path: Path) -> None:
    """On a ring over three hosts, each rank has one neighbor elsewhere; both begin at once and keep one connection."""
    placement = [0, 0, 1, 1, 2, 2]
    calls = [
        ("silences", []),
        ("exchange_along_ring", []),
        ("settle", [[1] * 6]),
        ("exchange_with_all", []),
        ("settle", [[4] * 6]),
        ("exchange_with_all", []),
    ]
    for found in run_on_hosts(tmp_path, placement, __name__, calls):
        assert found[0] == []


def lose_a_stranger(victim: int, moment: str) -> tuple[str, str]:
    """The victim dies before it has communicated with any rank.

    Rank 0 waits for it, rank 1 sends it a large message, and the others exchange with it repeatedly.

    Args:
        victim: The rank that dies.
        moment: "before" these calls, or "during" them.

    Returns:
        The error, and that of an operation among the survivors.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    living = dist.new_group([r for r in range(size) if r != victim])
    if rank == victim:
        time.sleep(0.2 if moment == "before" else 1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.0 if moment == "before" else 0.0)

    def speak() -> None:
        if rank == 0:
            dist.recv(torch.zeros(3), victim)
        elif rank == 1:
            dist.isend(torch.ones(1_000_000), victim).wait()  # type: ignore[union-attr]
        else:
            while True:
                dist.send(torch.ones(3), victim)
                time.sleep(0.01)

    return error_of(speak), error_of(lambda: dist.all_reduce(torch.ones(3), group=living))


@pytest.mark.parametrize("moment", ["before", "during"])
@pytest.mark.parametrize("placement", [[0, 1, 2, 3], [0, 1, 1, 0]], ids=["alone", "with others"])
def test_a_stranger_that_is_lost(tmp_path: Path, moment: str, placement: list[int]) -> None:
    calls, options = [("lose_a_stranger", [3, moment])], {"timeout": 4 * RUN_TIMEOUT}
    found = run_on_hosts(tmp_path, placement, __name__, calls, killed=[3], **options)
    for ((error, later),) in found[:3]:
        assert "rank 3 " in error and "was lost: its process ended" in error, error
        assert later == "", later


@contextmanager
def stderr_in_file() -> Iterator[Path]:
    """Redirects descriptor 2 to a file in this block."""
    with tempfile.NamedTemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield Path(file.name)
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def watch_beside_strangers(folder: str, descriptors: int) -> str:
    """Before rank 0 watches rank 1, strangers on that host connect with it and say nothing; returns rank 0's log."""
    from fog_pg import _C

    told, connected = Path(folder, "told"), Path(folder, "connected")
    if dist.get_rank() == 1:
        while not told.exists():
            time.sleep(0.01)
        place = address(0), int(told.read_text())
        strangers = [socket.create_connection(place) for _ in range(descriptors // 2 + 10)]
        connected.touch()
        dist.barrier()
        for stranger in strangers:
            stranger.close()
        return ""
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    with stderr_in_file() as log:
        listener = _C.own_entry().splitlines()[16]
        Path(folder, "port").write_text(listener.split()[0])
        before = len(os.listdir("/proc/self/fd"))
        Path(folder, "port").rename(told)
        while not connected.exists() or len(os.listdir("/proc/self/fd")) < before + descriptors // 8:
            time.sleep(0.01)
        backend().watch([1])  # type: ignore[attr-defined]
        dist.barrier()
        return log.read_text()


def test_strangers_keep_no_rank_from_its_peers(tmp_path: Path) -> None:
    """Regression: their connections counted, and the rank gave up those to its peers for ever."""
    calls = [("watch_beside_strangers", [str(tmp_path), 256])]
    (text,), _ = run_on_hosts(tmp_path, [0, 1], __name__, calls)
    assert "ulimit -n" not in text, text
