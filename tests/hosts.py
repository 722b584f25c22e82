"""Several hosts on one machine, as tests use them: the benchmarks' emulated hosts, and ranks on them."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness import Outcome, RankFailures, World
from scripts import ROOT

# Last, so that no name of the tests' is taken for one of the benchmarks'.
sys.path.append(str(ROOT / "benchmarks"))

from emulated_hosts import ACROSS, INTERFACE, Unavailable, address, ip, move_to_host
from emulated_hosts import emulated_hosts as _emulated_hosts

# Of <netinet/tcp.h>.
TCP_USER_TIMEOUT = 18
# On which the ranks of several hosts meet.
PORT = 29514


def namespace_names() -> set[str]:
    """The network namespaces of this process's hosts; other programs come and go with their own."""
    return {entry.name for entry in Path("/run/netns").glob(f"fog-{os.getpid()}-*")}


def sent_bytes(name: str) -> int:
    """What a host has sent to others since it was made."""
    shown = ip("-n", name, "-s", "-json", "link", "show", INTERFACE)
    return json.loads(shown)[0]["stats64"]["tx"]["bytes"]


@contextlib.contextmanager
def emulated_hosts(count: int, rate: str | None = None) -> Iterator[list[str]]:
    """As that of the benchmarks; skips where it cannot make hosts."""
    with contextlib.ExitStack() as stack:
        try:
            names = stack.enter_context(_emulated_hosts(count, rate))
        except Unavailable as reason:
            pytest.skip(f"several hosts: {reason}")
        yield names


def silences() -> list[float]:
    """Of this process's TCP connections that the system ends when nothing is heard for some time: these seconds."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        connection = None
        with contextlib.suppress(OSError):  # it is no TCP connection, or closed by now
            connection = socket.socket(fileno=int(name))
            limit = connection.getsockopt(socket.IPPROTO_TCP, TCP_USER_TIMEOUT) / 1000
            if limit > 0:
                connection.getpeername()  # else it is not made yet
                probes = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT]
                idle, interval, count = (connection.getsockopt(socket.IPPROTO_TCP, probe) for probe in probes)
                assert idle + interval * count == limit and min(idle, interval) > 0
                found.append(limit)
        if connection is not None:
            connection.detach()  # it is not this function's
    return found


def await_silences(expected: list[float], patience: float = 25.0) -> None:
    """Waits until there are these connections; those in the making come and go."""
    deadline = time.monotonic() + patience
    while silences() != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    assert silences() == expected


def _join_on_host(name: str, folder: str, timeout: float) -> None:
    move_to_host(name)
    os.chdir(folder)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    import fog_pg  # noqa: F401  registers "fog" also where the entry point is not installed

    store = dist.TCPStore(address(0), PORT, size, rank == 0)
    dist.init_process_group(
        "fog", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )


def _call(module: str, function: str, arguments: Sequence[Any]) -> Any:
    return getattr(importlib.import_module(module), function)(*arguments)


def run_on_hosts(
    folder: Path,
    placement: Sequence[int],
    module: str,
    calls: Sequence[tuple[str, Sequence[Any]]],
    *,
    rate: str | None = None,
    timeout: float = 60.0,
    killed: Sequence[int] = (),
    mortal: Sequence[int] = (),
    netmod: str = "UCX",
    environment: Mapping[str, str] | None = None,
    finalizing: int | None = 1,
) -> list[list[Any]]:
    """Runs functions of a test module, one after the other, on ranks of several emulated hosts.

    Args:
        folder: The ranks' directory.
        placement: The host of each rank.
        module: The test module's name.
        calls: Names of functions, with their arguments.
        rate: As for `emulated_hosts`.
        timeout: Of the group, in seconds.
        killed: Ranks that end by SIGKILL.
        mortal: Ranks that MPI may end then, by a signal.
        netmod: Of MPICH, a key of `ACROSS`.
        environment: More variables of the ranks.
        finalizing: As for `World`.

    Returns:
        For each rank what its functions returned; less of those that ended.

    Raises:
        RankFailures: A rank did not end in time, or not as it should.
    """
    # Fog's own defaults, unless the test has set something else.
    variables = ACROSS[netmod] | {"FOG_CONFIRM": os.environ.get("FOG_CONFIRM", "0")} | dict(environment or {})
    found: list[list[Any]] = [[] for _ in placement]
    with emulated_hosts(max(placement) + 1, rate) as names:
        world = World(len(placement), initialize=False, environment=variables, finalizing=finalizing)
        try:
            outcomes = world.run_by_rank(
                _join_on_host, [(names[host], str(folder), timeout) for host in placement]
            )
            _check(outcomes, (), ())
            for name, arguments in calls:
                outcomes = world.run_raw(_call, module, name, arguments, timeout=120.0)
                _check(outcomes, killed, mortal)
                for outcome in outcomes:
                    if outcome.state == "returned":
                        found[outcome.rank].append(outcome.value)
            assert (
                set(range(world.size)) - set(killed) - set(mortal)
                <= set(world.living())
                <= set(range(world.size)) - set(killed)
            )
        except BaseException:
            world.abandon()
            raise
        world.close()
    return found


def _check(outcomes: Sequence[Outcome], killed: Sequence[int], mortal: Sequence[int]) -> None:
    for outcome in outcomes:
        if outcome.rank in killed and outcome.state == "died" and "SIGKILL" in outcome.details:
            continue
        ended = any(signal in outcome.details for signal in ("SIGSEGV", "SIGABRT"))
        if outcome.rank in mortal and outcome.state == "died" and ended:
            continue
        if outcome.state != "returned":
            raise RankFailures("on several hosts", outcomes)
