"""Several hosts on one machine, as tests use them: the benchmarks' emulated hosts, and ranks on them."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts import ROOT, Job, started

# Last, so that no name of the tests' is taken for one of the benchmarks'.
sys.path.append(str(ROOT / "benchmarks"))

from emulated_hosts import ACROSS, INTERFACE, Unavailable, address, inside, ip
from emulated_hosts import emulated_hosts as _emulated_hosts

CLONE_NEWNET = 0x40000000


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


def run_on_hosts(
    folder: Path,
    placement: Sequence[int],
    module: str,
    calls: Sequence[tuple[str, Sequence[Any]]],
    *,
    rate: str | None = None,
    timeout: float = 60.0,
    killed: Sequence[int] = (),
    netmod: str = "UCX",
) -> list[list[Any]]:
    """Runs functions of a test module, one after the other, on ranks of several emulated hosts.

    Args:
        folder: Takes what the ranks print.
        placement: The host of each rank.
        module: The test module's name.
        calls: Names of functions, with arguments that JSON can carry.
        rate: As for `emulated_hosts`.
        timeout: Of the group, in seconds.
        killed: Ranks that end by SIGKILL.
        netmod: Of MPICH, a key of `ACROSS`.

    Returns:
        For each rank what its functions returned, as JSON carries it.

    Raises:
        AssertionError: A rank did not end in time, or not as it should; or processes are left.
    """
    world = {"WORLD_SIZE": str(len(placement)), "MASTER_ADDR": address(0), "MASTER_PORT": "29514"}
    words = [ROOT / "tests" / "on_host.py", module, str(timeout), json.dumps(calls)]
    with emulated_hosts(max(placement) + 1, rate) as names:
        jobs = [
            Job(
                words,
                1,
                folder / f"rank{rank}.txt",
                [*inside(names[host]), sys.executable],
                ACROSS[netmod] | world | {"RANK": str(rank)},
            )
            for rank, host in enumerate(placement)
        ]
        with started(jobs):
            statuses = [job.wait(120.0) for job in jobs]
    output = "\n".join(f"== rank {rank}\n{job.output}" for rank, job in enumerate(jobs))
    assert statuses == [-9 if rank in killed else 0 for rank in range(len(jobs))], f"{statuses}\n{output}"
    mark = '{"returned": '
    return [
        [json.loads(line)["returned"] for line in job.output.splitlines() if line.startswith(mark)]
        for job in jobs
    ]
