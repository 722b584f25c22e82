"""Several hosts on one machine for tests: the emulated hosts of the benchmarks, and ranks on them."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness import Outcome, RankFailures, World
from scripts import ROOT

from fog_pg._store import connections

# Appended at the end, so modules of the tests come before modules of the benchmarks with the same name.
sys.path.append(str(ROOT / "benchmarks"))

from emulated_hosts import ACROSS as ACROSS
from emulated_hosts import INTERFACE, Unavailable, address, ip, move_to_host
from emulated_hosts import cut_link as cut_link
from emulated_hosts import emulated_hosts as unskipped_hosts
from emulated_hosts import inside as inside
from emulated_hosts import limit_rate as limit_rate
from emulated_hosts import lossy_link as lossy_link
from emulated_hosts import slow_link as slow_link

# A constant of <netinet/tcp.h>.
TCP_USER_TIMEOUT = 18
# The port of the rendezvous of the ranks.
PORT = 29514


def namespace_names() -> set[str]:
    """Returns the network namespaces of this process's hosts; other programs may have their own."""
    return {entry.name for entry in Path("/run/netns").glob(f"fog-{os.getpid()}-*")}


def sent_bytes(name: str) -> int:
    """Returns the bytes that a host has sent to others since it was made."""
    shown = ip("-n", name, "-s", "-json", "link", "show", INTERFACE)
    return json.loads(shown)[0]["stats64"]["tx"]["bytes"]


@contextlib.contextmanager
def emulated_hosts(count: int, rate: str | None = None, **network: Any) -> Iterator[list[str]]:
    """Makes hosts as the benchmarks do; skips the test if that is not possible."""
    with contextlib.ExitStack() as stack:
        try:
            names = stack.enter_context(unskipped_hosts(count, rate, **network))
        except Unavailable as reason:
            pytest.skip(f"several hosts: {reason}")
        yield names


def data_connections() -> list[socket.socket]:
    """Returns duplicates of this process's open connections to other ranks; those to the Store are left out.

    Each of them has the limit of silence that FOG_HOST_TIMEOUT sets, or 11 seconds.
    """
    store = dist.distributed_c10d._get_default_store()
    of_store = {each.getsockname() for each in connections(store)}
    found = []
    for name in os.listdir("/proc/self/fd"):
        # not a connection, or closed by now
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as each:
            each.getpeername()
            own = each.family in (socket.AF_INET, socket.AF_INET6) and each.getsockname() not in of_store
            endless = own and each.getsockopt(socket.IPPROTO_TCP, TCP_USER_TIMEOUT) == 0
            if endless and each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY):
                probes = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT]
                idle, interval, count = (each.getsockopt(socket.IPPROTO_TCP, probe) for probe in probes)
                assert idle + interval * count == int(os.environ.get("FOG_HOST_TIMEOUT", "11"))
                # socket.dup() would make the connection blocking, for fog too
                found.append(socket.socket(fileno=os.dup(each.fileno())))
    return found


def count_connections() -> int:
    found = data_connections()
    for each in found:
        each.close()
    return len(found)


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


def world_on_hosts(
    names: Sequence[str],
    placement: Sequence[int],
    folder: Path,
    environment: Mapping[str, str],
    *,
    timeout: float = 60.0,
    finalizing: int | None = 1,
) -> World:
    """Returns a world whose ranks are on emulated hosts; at most one at a time, because of the rendezvous' port.

    Args:
        names: Of the hosts.
        placement: The host of each rank.
        folder: The ranks' directory.
        environment: Variables of the ranks.
        timeout: The timeout of the group, in seconds.
        finalizing: As for `World`.

    Raises:
        RankFailures: A rank did not come.
    """
    world = World(len(placement), initialize=False, environment=dict(environment), finalizing=finalizing)
    try:
        arguments = [(names[host], str(folder), timeout) for host in placement]
        _check(world.run_by_rank(_join_on_host, arguments), (), ())
    except BaseException:
        world.abandon()
        raise
    return world


def run_on_hosts(
    folder: Path,
    placement: Sequence[int],
    module: str,
    calls: Sequence[tuple[str, Sequence[Any]]],
    *,
    rate: str | None = None,
    between: str | None = None,
    delay: float = 0.0,
    timeout: float = 60.0,
    killed: Sequence[int] = (),
    mortal: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
    finalizing: int | None = 1,
) -> list[list[Any]]:
    """Runs functions of a test module, one after the other, on ranks of several emulated hosts.

    Args:
        folder: The ranks' directory.
        placement: The host of each rank.
        module: The name of the test module.
        calls: Names of functions, with their arguments.
        rate: As for `emulated_hosts`.
        between: The hosts are in two centers, with a link of this rate.
        delay: The hosts are in two centers, with a link that takes so many seconds each way.
        timeout: The timeout of the group, in seconds.
        killed: Ranks that end by SIGKILL.
        mortal: Ranks that MPI may then end by a signal.
        environment: More environment variables of the ranks.
        finalizing: As for `World`.

    Returns:
        For each rank the results of its functions, as far as it got.

    Raises:
        RankFailures: A rank did not end in time, or not as it should.
    """
    # fog's own default, unless the test has set something else
    variables = {"_FOG_CONFIRM": os.environ.get("_FOG_CONFIRM", "0")} | dict(environment or {})
    found: list[list[Any]] = [[] for _ in placement]
    centers = 2 if between or delay else 1
    with emulated_hosts(max(placement) + 1, rate, centers=centers, between=between, delay=delay) as names:
        world = world_on_hosts(names, placement, folder, variables, timeout=timeout, finalizing=finalizing)
        try:
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
