"""The model of time behind benchmarks/model.py, by hand; what virtual ranks send, beside what it and `fog advise` count."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fogdist.tuning import prediction
from fogdist.tuning.network import Network

from fog_pg._C import VirtualWorld

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(1, str(BENCHMARKS))

from model import Fitted, Load, extrapolate, halved_crossing, modelled, step_seconds  # noqa: E402

COUNT = 360_000
FITTED = Fitted({"o_fog": 1e-3, "o_gloo": 2e-3, "wait_s": 0.01}, {"none": 0.02, "one_peer_exp": 0.05})
# A byte takes 1.05 us on a link.
POINT: dict[str, Any] = {
    "scenario": "a", "model": "resnet50", "scaling": "weak", "hosts": 4, "ranks_per_host": 1, "rate_bits_per_s": 8e6,
    "latency_s": 1e-3, "compute_s": 0.5, "forward_s": 0.2, "bucket_bytes": [1.6e5, 0.8e5, 0.4e5], "local_steps": 1,
    "dilation": {"size": 32.0, "time": 1.0},
}  # fmt: skip


def sent_by_virtual_ranks(size: int) -> dict[tuple[int, int], float]:
    """Returns what an allreduce sends from rank to rank, in tensors."""
    world = VirtualWorld(size)
    tensors = [torch.ones(COUNT // 4) for _ in range(size)]
    works = [group.allreduce([tensors[rank]]) for rank, group in enumerate(world.groups)]
    world.progress()
    assert all(work.is_completed() for work in works)
    return {pair: bytes_ / COUNT for pair, (_, bytes_) in world.sent.items()}


@pytest.mark.parametrize("size", [2, 4, 9, 16, 31, 32, 48])
def test_advice_and_the_model_count_what_virtual_ranks_send(size: int) -> None:
    sent = sent_by_virtual_ranks(size)
    hosts = Network(range(size), [0] * size, 1e-4, 1e-4, [1e9] * size, [1e9] * size, {}, 1e9)
    (way,) = [each for each in prediction.ways(hosts) if each.name == "all-reduce"]
    assert way.traffic[0].between == pytest.approx(sent, rel=0.01)
    for rank in range(size):
        left = sum(tensors for (sender, _), tensors in sent.items() if sender == rank)
        assert left == pytest.approx(Load.of("ddp_fog", size).sent, rel=0.01)
    across = sum(tensors for (sender, to), tensors in sent.items() if sender < size // 2 <= to)
    if size > 31 and size % 2 == 0:  # not around a ring
        assert across == pytest.approx(halved_crossing(size, 2), rel=0.01)
    elif size < 31:
        assert across == pytest.approx(2 * (size - 1) / size, rel=0.01)


@pytest.mark.parametrize(
    ("way", "hosts", "centers", "expected"),
    [
        ("ddp_gloo", 4, 1, Load(6, 1.5, 0)),
        ("ddp_gloo", 4, 2, Load(6, 1.5, 1.5)),
        ("ddp_fog", 8, 1, Load(6, 1.75, 0)),
        ("static_exp", 8, 1, Load(3, 3, 0)),
        ("static_exp", 8, 2, Load(3, 3, 1 + 2 + 4)),
        ("one_peer_exp", 8, 2, Load(1, 1, 7 / 3)),
        ("base_k", 8, 1, Load(1, 1, 0)),
        ("base_k", 6, 1, Load(2, 2, 0)),
        ("gossip_diloco", 8, 2, Load(1, 1, 1)),
    ],
)
def test_what_an_exchange_costs_a_host(way: str, hosts: int, centers: int, expected: Load) -> None:
    assert Load.of(way, hosts, centers) == expected


def seconds(way: str, **changes: Any) -> float:
    return step_seconds({**POINT, "way": way, **changes}, FITTED)


def test_an_exchange_is_hidden_or_seen() -> None:
    # Three buckets of a message each, and 280,000 bytes.
    exchange = 3 * (1e-3 + 1e-3) + 1.05e-6 * 2.8e5
    assert seconds("none", bucket_bytes=[]) == 0.5
    assert seconds("one_peer_exp") == 0.5
    assert seconds("one_peer_exp", compute_s=0.1) == pytest.approx(exchange)
    assert seconds("gossip_diloco", local_steps=4) == pytest.approx(0.5 + exchange / 4)
    # The line between data centers is slower than the links.
    slow = seconds("gossip_diloco", scenario="c", between_bits_per_s=8e5)
    assert slow == pytest.approx(0.5 + 6e-3 + 1.05e-5 * 2.8e5)
    # Of DDP the last bucket, whose gradients are there at the end, cannot be hidden: six messages, and 1.5 tensors.
    last = 6 * (1e-3 + 2e-3) + 1.5 * 1.05e-6 * 4e6
    assert seconds("ddp_gloo", bucket_bytes=[4e6]) == pytest.approx(0.5 + last)
    # Two buckets have as many bytes and twice the messages, and the first one need not wait for the end.
    assert 0.2 + last < seconds("ddp_gloo", bucket_bytes=[2e6, 2e6]) < 0.5 + last + 18e-3


def test_steps_of_emulated_hosts_and_of_others() -> None:
    point = {**POINT, "way": "one_peer_exp"}
    # Four ranks on two cores: one more on each.
    assert modelled(point, FITTED, 2) == pytest.approx(0.5 + 0.05 + 0.01)
    (far,) = extrapolate([point], FITTED, [1024])
    assert far["ranks"] == 1024 and far["step_s"] == pytest.approx(0.5 + 0.05 - 0.02)
    times = [
        step_seconds({**point, "way": "static_exp", "compute_s": 0.1}, FITTED, hosts)
        for hosts in (4, 64, 4096)
    ]
    assert times == sorted(times) and times[0] < times[-1]
