"""Between hosts each link carries each tensor once: bytes counted on the links of emulated hosts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness import BACKEND
from hosts import ACROSS, address, emulated_hosts
from scripts import ROOT, Job, started

pytestmark = [
    pytest.mark.skipif(BACKEND != "fog", reason="tests fog's exchanges"),
    pytest.mark.usefixtures("no_shared_memory_left"),
]

TENSOR = 8 << 20
# Of a tensor: headers of Ethernet, IP and TCP are 66 bytes of each 1514, acknowledgements half as much; where
# segments are cut and joined behind the link both are far less. fog's own messages are some hundred bytes.
OVERHEAD = 0.08
TIMEOUT = 300.0  # room for a busy machine
PORT = 29512


def counts(ranks_on_hosts: Sequence[int], log: Path, *options: str) -> list[dict[str, list[int]]]:
    """Runs tests/exchange_bytes.py.

    Args:
        ranks_on_hosts: The host of each rank.
        log: Directory for what they print.
        options: Of the script.

    Returns:
        For each rank, and each exchange, what its host received and sent.
    """
    script = [ROOT / "tests" / "exchange_bytes.py", str(TENSOR), *options]
    place = {"WORLD_SIZE": str(len(ranks_on_hosts)), "MASTER_ADDR": address(0), "MASTER_PORT": str(PORT)}
    with emulated_hosts(max(ranks_on_hosts) + 1) as names:
        jobs = []
        for rank, host in enumerate(ranks_on_hosts):
            launcher = ["ip", "netns", "exec", names[host], sys.executable]
            environment = ACROSS["UCX"] | place | {"RANK": str(rank), "PYTHONWARNINGS": "ignore"}
            jobs.append(Job(script, 1, log / f"rank{rank}.txt", launcher, environment))
        with started(jobs):
            statuses = [job.wait(TIMEOUT) for job in jobs]
    output = "\n".join(job.output for job in jobs)
    assert statuses == [0] * len(jobs), output
    lines = [line for job in jobs for line in job.output.splitlines() if line.startswith("bytes ")]
    assert len(lines) == len(jobs), output
    return [json.loads(line.removeprefix("bytes ")) for line in lines]


def check(found: list[dict[str, list[int]]], tensors: dict[str, int]) -> None:
    """Every host has received, and sent, so many tensors in each exchange."""
    assert all(list(exchanges) == list(tensors) for exchanges in found), found
    for name, number in tensors.items():
        least, most = number * TENSOR, number * TENSOR * (1 + OVERHEAD)
        assert all(least <= count <= most for exchanges in found for count in exchanges[name]), found


def test_one_tensor_for_each_peer(tmp_path: Path) -> None:
    found = counts([0, 1, 2, 3], tmp_path)
    check(found, {"exp2": 2, "one-peer 0": 1, "one-peer 1": 1})


def test_one_tensor_for_each_machine(tmp_path: Path) -> None:
    """However many ranks a machine has."""
    found = counts([0, 0, 1, 1], tmp_path, "--machines")
    check(found, {"hierarchical": 1})
