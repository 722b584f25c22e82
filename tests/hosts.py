"""Several hosts on one machine: network namespaces, joined by a bridge in one of their own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts import ROOT, Job, started

CLONE_NEWNET = 0x40000000
# What keeps an MPI from using memory that namespaces share, as hosts do not.
ACROSS = {
    "UCX": {"UCX_TLS": "tcp"},
    "OFI": {"MPICH_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"},
}


def ip(*words: str) -> str:
    return _output("ip", *words)


def _output(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=10).stdout


def namespace_names() -> set[str]:
    directory = Path("/run/netns")
    return {entry.name for entry in directory.iterdir()} if directory.exists() else set()


def address(host: int) -> str:
    """The address of a host of `emulated_hosts`, counted from 0."""
    return f"10.213.77.{host + 1}"


def sent_bytes(name: str) -> int:
    """What a host has sent to others since it was made."""
    return json.loads(ip("-n", name, "-s", "-json", "link", "show", "eth0"))[0]["stats64"]["tx"]["bytes"]


@contextlib.contextmanager
def emulated_hosts(count: int, rate: str | None = None) -> Iterator[list[str]]:
    """Names of network namespaces that reach each other; skips where it cannot make them.

    Args:
        count: how many.
        rate: limit of what each can send, in the words of tc: "400mbit".
    """
    if os.geteuid() != 0:
        pytest.skip("several hosts: needs root to make network namespaces")
    for program in ["ip"] if rate is None else ["ip", "tc"]:
        if shutil.which(program) is None:
            pytest.skip(f"several hosts: needs the program {program}")
    names = [f"fog-{os.getpid()}-{number}" for number in range(count)]
    switch = f"fog-{os.getpid()}-switch"
    made = []
    try:
        try:
            for name in [switch, *names]:
                ip("netns", "add", name)
                made.append(name)
            ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", switch, "link", "set", "bridge", "up")
            for number, name in enumerate(names):
                port = f"port{number}"
                ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
                ip("-n", switch, "link", "set", port, "master", "bridge", "up")
                ip("-n", name, "address", "add", f"{address(number)}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
                ip("-n", name, "link", "set", "lo", "up")
                if rate is not None:
                    limit = ["tbf", "rate", rate, "burst", "64kb", "latency", "50ms"]
                    _output("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *limit)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"several hosts: {' '.join(error.cmd)}: {error.stderr.strip()}")
        yield names
    finally:
        for name in made:
            ip("netns", "delete", name)


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
                ["ip", "netns", "exec", names[host], sys.executable],
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
