"""The model of time behind benchmarks/model.py: by hand, and against itself."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fog_pg._C import VirtualWorld

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(1, str(BENCHMARKS))

import schedules  # noqa: E402
from fog_cli import advice  # noqa: E402
from loggops import Graph, Parameters, replay, step_seconds  # noqa: E402
from training_model import (  # noqa: E402
    WAYS,
    Cluster,
    Workload,
    graph_of,
    seconds_of,
    work_seconds,
)

P = Parameters(L=3e-3, o=1e-3, O=1e-7, G=1e-6, W=1e-5, l=1e-4, M=1e-8)
WORK = Workload(0.5, 0.5 / 3, (1.6e5, 0.8e5, 0.4e5), (0.3, 0.6, 1.0), local_steps=4)


def close(got: float, expected: float) -> None:
    assert got == pytest.approx(expected, rel=1e-9)


def cluster(way: str, hosts: int, centers: int = 1) -> Cluster:
    return Cluster(hosts, 2 if way == "hierarchical" else 1, centers)


# --- what virtual ranks record ---


def test_a_recording_has_each_message_and_what_had_come_before_it() -> None:
    world = VirtualWorld(4)
    tensors = [torch.ones(30_000) for _ in range(4)]
    for _ in range(2):  # what was before record() is forgotten
        world.record()
        works = [group.allreduce([tensors[rank]]) for rank, group in enumerate(world.groups)]
        world.progress()
        assert all(work.is_completed() for work in works)
    messages, arrivals = world.recorded()
    # Around a ring: each rank sends three partial sums of slices, and then three sums.
    assert sorted((sender, to) for sender, to, *_ in messages) == sorted(6 * [(0, 1), (1, 2), (2, 3), (3, 0)])
    assert {size for _, _, size, *_ in messages} == {30_000}
    for rank in range(4):
        assert [messages[place][0] for place in arrivals[rank]] == 6 * [(rank - 1) % 4]
        before = [arrived for sender, _, _, _, _, arrived in messages if sender == rank]
        assert all(came >= number for number, came in enumerate(before)) and before[0] == 0


@pytest.mark.parametrize("size", [31, 32, 48])
def test_the_formula_of_fogs_sums_is_what_virtual_ranks_send(size: int) -> None:
    recorded = schedules.rotated(schedules.by_place(schedules.allreduce(size, 360_000)))
    assert recorded is not None
    formula = schedules.circulant(size, 360_000)
    assert [(m.hop, m.requires) for m in recorded.messages] == [(m.hop, m.requires) for m in formula.messages]
    for one, other in zip(recorded.messages, formula.messages, strict=True):
        assert one.size == pytest.approx(other.size, rel=1e-3)


@pytest.mark.parametrize(("size", "tensors"), [(16, 2 * 15 / 16), (32, 1)])
def test_fogs_sums_cross_the_line_between_two_halves_twice_or_once(size: int, tensors: float) -> None:
    count = 360_000
    crossing = sum(m.size for m in schedules.allreduce(size, count).messages if m.rank < size // 2 <= m.to)
    # In a ring the slices of all ranks, as sums and as results. With more ranks the last round of the sums, and the first
    # one of the results: a slice of each rank, half of which go one way.
    assert crossing == pytest.approx(tensors * count, rel=1e-3)


@pytest.mark.parametrize("size", [2, 4, 9, 16, 31])
def test_advice_counts_what_virtual_ranks_send(size: int) -> None:
    count = 360_000
    sent: dict[tuple[int, int], float] = {}
    for m in schedules.allreduce(size, count).messages:
        sent[m.rank, m.to] = sent.get((m.rank, m.to), 0.0) + m.size / count
    hosts = advice.Network(range(size), [0] * size, 1e-4, 1e-4, [1e9] * size, [1e9] * size, {}, 1e9)
    (way,) = [each for each in advice.ways(hosts) if each.name == "all-reduce"]
    assert way.traffic[0].between == pytest.approx(sent, rel=0.01)


def test_machines_exchange_what_their_ranks_have_averaged() -> None:
    one = schedules.rotated(schedules.hierarchical(4, 2, 40_000, 1))
    assert one is not None
    assert [(m.leaves, m.size, len(m.requires)) for m in one.messages] == [
        (False, 20_000, 0),
        (False, 20_000, 0),
        (True, 20_000, 1),
        (True, 20_000, 1),
        (False, 20_000, 2),
        (False, 20_000, 2),
    ]


# --- by hand ---


def way(size: float, count: int = 1) -> float:
    """Returns when the last of `count` messages over one link has come."""
    return 2 * (P.o + P.O * size) + P.L + count * P.G * size


def test_messages_by_hand() -> None:
    k, pairs = 50_000, [(0, 1, 0), (2, 3, 0), (4, 5, 0)]
    within, agreeing, free = 2 * (P.o + P.O * k) + P.l + P.M * k, replace(P, S=k), Parameters(o=1.0)
    slow = [way(k) + (n * P.W - P.G) * k for n in (1, 2)]
    for name, places, sends, parameters, expected in (
        ("two ranks", [[0, 1]], [(0, 1, k)], P, [way(k)]),
        ("within a host no link is needed", [[0, 0]], [(0, 1, k)], P, [within]),
        ("from S bytes on both agree first", [[0, 1]], [(0, 1, k)], agreeing, [way(k) + 2 * P.L]),
        ("below S bytes they do not", [[0, 1]], [(0, 1, k - 1)], agreeing, [way(k - 1)]),
        ("ranks of a host share its link", [[0, 0, 1, 2]], [(0, 2, k), (1, 3, k)], P, [way(k), way(k, 2)]),
        ("two send to one host", [[0, 1, 2]], [(0, 2, k), (1, 2, k)], P, [way(k), way(k, 2)]),
        ("a slow line of two centers", [[0, 1, 2, 3], [0, 0, 1, 1]], [(0, 2, k), (1, 3, k)], P, slow),
        ("three pairs", [[*range(6)]], pairs, free, [2.0] * 3),
        ("three pairs on one core", [[*range(6)]], pairs, replace(free, cores=1), [4.0, 5.0, 6.0]),
    ):
        graph = Graph(*places)
        tasks = [graph.send(*each) for each in sends]
        done = replay(graph, parameters)
        assert sorted(done[task] for task in tasks) == pytest.approx(expected, rel=1e-9), name


def test_a_ring_of_four() -> None:
    """Six rounds of two segments: a segment is on its way while the other one is worked on."""
    p = replace(P, O=0.0, o=0.0)
    graph = Graph([0, 1, 2, 3])
    waits = schedules.gloo_ring(4, 80_000).append_to(graph, [[] for _ in range(4)])
    done = replay(graph, p)
    segment = p.G * 80_000 / 8
    assert segment > p.L
    # The link is never idle: twelve segments, and the way of the last one.
    for rank in range(4):
        close(max(done[place] for place in waits[rank]), 12 * segment + p.L)


def test_tasks_that_require_each_other_are_refused() -> None:
    graph = Graph([0])
    graph.compute(0, 1.0, [1])
    graph.compute(0, 1.0, [0])
    with pytest.raises(ValueError, match="requires itself"):
        replay(graph, P)


# --- training steps ---


@pytest.mark.parametrize("way", WAYS)
def test_more_of_anything_takes_no_less(way: str) -> None:
    here = cluster(way, 8)
    base = seconds_of(way, here, WORK, P)
    assert base >= WORK.compute
    # Nearly: a message that is a little later may let a more urgent one go first.
    least = 0.995 * base
    for name in ("L", "o", "O", "G"):
        assert seconds_of(way, here, WORK, replace(P, **{name: 3 * getattr(P, name)})) >= least, name
    larger = replace(WORK, buckets=tuple(3 * size for size in WORK.buckets))
    assert seconds_of(way, here, larger, P) >= least
    assert seconds_of(way, here, replace(WORK, host_s=0.1), P) >= least
    if way in ("ddp_gloo", "ddp_fog", "static_exp"):
        for some in ((2, 4, 8), (32, 64, 128)):  # fog's sums change between them
            times = [seconds_of(way, cluster(way, hosts), WORK, P) for hosts in some]
            assert times == sorted(times)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "base_k"])
def test_one_host_stands_for_all(way: str) -> None:
    here = cluster(way, 8)
    graph = graph_of(way, here, WORK, whole=True)
    whole = step_seconds(graph, replay(graph, P))
    if way in ("local_sgd", "gossip_diloco"):
        whole /= WORK.local_steps
    assert seconds_of(way, here, WORK, P) == pytest.approx(whole, rel=0.02)


def test_an_exchange_is_hidden_or_seen() -> None:
    """One peer: the longer one of compute and exchange; local steps: their sum, now and then."""
    here, p = Cluster(4), Parameters(G=1e-6)
    exchange = p.G * sum(WORK.buckets)
    close(seconds_of("one_peer_exp", here, WORK, p), max(WORK.compute, exchange))
    close(seconds_of("one_peer_exp", here, replace(WORK, compute=0.2, forward=0.06), p), exchange)
    close(seconds_of("gossip_diloco", here, WORK, p), WORK.compute + exchange / WORK.local_steps)
    # Of DDP the last bucket cannot be hidden.
    ring = 2 * 3 / 4 * p.G * WORK.buckets[-1]
    assert seconds_of("ddp_gloo", here, WORK, p) >= WORK.compute + ring - 1e-12


def test_work_on_shared_cores() -> None:
    here = cluster("one_peer_exp", 8)
    p = Parameters(L=0.0, o=1e-3, O=1e-8, G=1e-9)
    # Each bucket is sent once and comes once.
    work = 2 * sum(p.o + p.O * size for size in WORK.buckets)
    close(work_seconds("one_peer_exp", here, WORK, p), work)
    close(work_seconds("gossip_diloco", here, WORK, p), work / WORK.local_steps)
    # 8 ranks on 2 cores: the cores are busy for 4 times the work of one, and a rank waits its part of that.
    short = replace(WORK, compute=0.1, forward=0.0)
    slowness = 1 / (1 - 4 * work / short.compute)
    shared = seconds_of("one_peer_exp", here, short, replace(p, cores=2))
    alone = seconds_of("one_peer_exp", here, short, replace(p, o=slowness * p.o, O=slowness * p.O))
    assert 1.3 < slowness < 10.0
    close(shared, alone)
