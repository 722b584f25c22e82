"""Counts bytes on the links of emulated hosts: each link carries each tensor once, and the least possible for a sum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hosts import run_on_hosts

pytestmark = pytest.mark.usefixtures("no_shared_memory_left")

TENSOR = 8 << 20
SUMMED = 1 << 20
COMPRESSED = 32 << 20
# Overhead as a share of a tensor: headers of Ethernet, IP and TCP are 66 of 1514 bytes, acknowledgements half as much.
# Both are far smaller if segments are cut and joined behind the link. fog's own messages have some hundred bytes.
OVERHEAD = 0.08


def counts(folder: Path, placement: list[int], name: str, *arguments: Any) -> list[dict[str, Any]]:
    """Runs a function of exchange_bytes; returns, for each rank, by exchange, the bytes received and sent by its host."""
    found = run_on_hosts(folder, placement, "exchange_bytes", [(name, arguments)])
    return [of_rank for (of_rank,) in found]


@pytest.mark.parametrize(
    ("placement", "tensors"),
    [([0, 1, 2, 3], {"exp2": 2, "one-peer 0": 1, "one-peer 1": 1}), ([0, 0, 1, 1], {"hierarchical": 1})],
    ids=["ranks", "machines"],
)
def test_one_tensor_for_each_peer(tmp_path: Path, placement: list[int], tensors: dict[str, int]) -> None:
    """Between machines, the number of their ranks does not matter."""
    found = counts(tmp_path, placement, "measure", TENSOR, "hierarchical" in tensors)
    for name, number in tensors.items():
        least, most = number * TENSOR, number * TENSOR * (1 + OVERHEAD)
        assert all(least <= count <= most for exchanges in found for count in exchanges[name]), found
    assert all(list(exchanges) == list(tensors) for exchanges in found), found


@pytest.mark.parametrize(("name", "size"), [("measure_compressed", COMPRESSED), ("measure_algorithms", 3000)])
def test_compressed_tensors_take_the_bytes_of_their_codec(tmp_path: Path, name: str, size: int) -> None:
    """Each host sends, and receives, what a codec or an algorithm promises; and acknowledgements and a few headers."""
    for found in counts(tmp_path, [0, 1], name, size):
        for exchange, (promised, counted) in found.items():
            assert all(promised <= count <= 1.02 * promised for count in counted), (
                exchange,
                promised,
                counted,
            )


@pytest.mark.parametrize(
    "placement",
    [
        [0, 0, 1, 1],
        [0, 1, 0, 1, 0],
        [0, 0, 1, 2, 2],
        *(pytest.param(each, marks=pytest.mark.long) for each in ([0, 1], [0, 1, 2])),
    ],
    ids=lambda hosts: "".join(map(str, hosts)),
)
def test_sums_carry_the_least(placement: list[int], tmp_path: Path) -> None:
    """2 (H - 1)/H tensors go to and from each host with ranks of the group, independent of their number."""
    for host, found in zip(placement, counts(tmp_path, placement, "measure_sums", SUMMED), strict=True):
        for name, members in (("all", placement), ("part", placement[::2])):
            hosts = set(members)
            least = 2 * (len(hosts) - 1) / len(hosts) * SUMMED if host in hosts else 0
            # The barriers around it send some kilobytes.
            most = least * (1 + OVERHEAD) + (64 << 10)
            assert all(least <= count <= most for count in found[name]), (name, found, least)
