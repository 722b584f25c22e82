"""Tests of the check that ranks agree: the differences that its sum finds among many ranks, and its cost."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import fogdist
import pytest
import torch
from fogdist import agreement, verification
from fogdist.agreement import Pair, mark, ring, total
from fogdist.exchange import GATHERING_RANKS, MACHINES, RANKS, Exchange, Nodes
from fogdist.verification import claims
from harness import World, error_of
from torch import Tensor

from fog_pg._C import VirtualWorld

MANY = 1024
RANKS_PER_MACHINE = 8
MACHINE_RANKS = [list(range(first, first + RANKS_PER_MACHINE)) for first in range(0, MANY, RANKS_PER_MACHINE)]


def exchanges(nodes: Nodes, size: int, most: int) -> list[Exchange]:
    """Returns exchanges of nodes that send to up to `most` others each."""
    draw = random.Random(size)
    destinations = [
        draw.sample([j for j in range(size) if j != i], draw.randint(0, most)) for i in range(size)
    ]
    return [
        Exchange(
            nodes,
            node,
            size,
            0.5,
            sources=tuple((i, 0.25) for i in range(size) if node in destinations[i]),
            destinations=tuple((j, 1.0) for j in sorted(destinations[node])),
            is_dynamic=True,
            check=True,
        )
        for node in range(size)
    ]


def changed(exchange: Exchange, draw: random.Random) -> Exchange:
    """Returns the exchange with one peer more, one fewer, or another one."""
    side = draw.choice(["sources", "destinations"])
    peers = dict(getattr(exchange, side))
    others = [peer for peer in range(exchange.size) if peer != exchange.node and peer not in peers]
    what = draw.choice(["more", "less", "other"]) if peers else "more"
    if what != "more":
        del peers[draw.choice(list(peers))]
    if what != "less":
        peers[draw.choice(others)] = 1.0
    return replace(exchange, **{side: tuple(sorted(peers.items()))})


def pair_of(exchange: Exchange, rank: int, tensors: list[Tensor]) -> Pair:
    """Returns the contribution of a rank to the sum."""
    return total(claims(exchange, tensors, rank, MANY, MACHINE_RANKS if exchange.nodes is MACHINES else None))


def is_zero(pairs: list[Pair]) -> bool:
    return all(sum(lane) % 2**64 == 0 for lane in zip(*pairs, strict=True))


# --- differences that it finds ------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [RANKS, GATHERING_RANKS, MACHINES])
def test_whatever_one_rank_of_many_asks_for_differently_is_found(nodes: Nodes) -> None:
    of_machines = nodes is MACHINES
    of_nodes = exchanges(nodes, MANY // RANKS_PER_MACHINE if of_machines else MANY, 5)
    asked = [of_nodes[rank // RANKS_PER_MACHINE if of_machines else rank] for rank in range(MANY)]
    x = [torch.empty(rank + 1 if nodes is GATHERING_RANKS else 2, 3) for rank in range(MANY)]
    pairs = [pair_of(exchange, rank, [x[rank]]) for rank, exchange in enumerate(asked)]
    assert is_zero(pairs)

    def is_found(rank: int, exchange: Exchange, *tensors: Tensor) -> bool:
        return not is_zero([*pairs[:rank], pair_of(exchange, rank, list(tensors)), *pairs[rank + 1 :]])

    draw = random.Random(2)
    for _ in range(200):
        rank = draw.randrange(MANY)
        false = changed(asked[rank], draw)
        assert is_found(rank, false, x[rank]), (rank, asked[rank], false)

    # A rank that exchanges with others is found; a rank without peers may pass any tensor.
    alone = not of_machines and next(
        r for r, each in enumerate(asked) if not (each.sources or each.destinations)
    )
    rank = next(r for r, each in enumerate(asked) if r > 0 and each.sources)
    assert is_found(rank, asked[rank], torch.empty(2, 4))
    assert is_found(rank, asked[rank], x[rank].double())
    assert is_found(rank, asked[rank], x[rank], x[rank])
    assert is_found(rank, replace(asked[rank], nodes=replace(nodes, operation="another")), x[rank])
    if of_machines:
        assert is_found(rank, replace(asked[rank], self_weight=0.25), x[rank])
    else:
        assert not is_found(rank, replace(asked[rank], self_weight=0.25), x[rank])
        assert not is_found(alone, asked[alone], torch.empty(7))
        assert is_found(alone, replace(asked[alone], nodes=replace(nodes, operation="another")), x[alone])


def test_false_edges_that_look_alike_do_not_make_up_for_each_other() -> None:
    """Two ranks each send to the wrong one of two; or one rank sends instead of another."""
    asked = exchanges(RANKS, MANY, 0)
    for first, second in (((0, 1), (2, 3)), ((0, 1), (1, 0)), ((5, 9), (9, 6))):
        false = [*asked]
        false[first[0]] = replace(false[first[0]], destinations=((first[1], 1.0),))
        false[second[1]] = replace(false[second[1]], sources=((second[0], 1.0),))
        assert not is_zero([pair_of(exchange, rank, []) for rank, exchange in enumerate(false)])


def test_all_the_same_or_not() -> None:
    for odd in (None, 0, 1, MANY // 2, MANY - 1):
        texts = ["other" if rank == odd else "this" for rank in range(MANY)]
        assert is_zero([total([(ring(r, MANY), mark(t))]) for r, t in enumerate(texts)]) == (odd is None)
    halves = ["a" if rank < MANY // 2 else "b" for rank in range(MANY)]
    assert not is_zero([total([(ring(r, MANY), mark(t))]) for r, t in enumerate(halves)])


# --- the sum, whose cost is in test_scale.py ---------------------------------------------------------------


def test_sums_wrap() -> None:
    world = VirtualWorld(3)
    sums = [torch.tensor([2**64 - 1, 2**63], dtype=torch.uint64) for _ in range(3)]
    for group, each in zip(world.groups, sums, strict=True):
        group.agree(each)
    world.progress()
    assert [each.tolist() for each in sums] == [[2**64 - 3, 2**63]] * 3


def test_an_error_has_no_word_of_the_sum() -> None:
    """A rank that calls something else learns what the others do, and not which numbers they add."""
    world = VirtualWorld(2)
    first, second = world.groups
    works = [
        first.agree(torch.zeros(2, dtype=torch.uint64)),
        second.allreduce([torch.zeros(2, dtype=torch.int64)]),
    ]
    world.progress()
    for text in (error_of(work.wait) for work in works):
        assert "called a comparison of arguments" in text and "uint64" not in text, text


def agreeing() -> None:
    """While ranks agree, nothing is gathered."""

    def refuse(*_: object) -> list[Any]:
        raise AssertionError("gathered")

    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    agreement.gather = verification.gather = refuse
    ends = {"src_weights": {(rank - 1) % size: 0.5}, "dst_weights": [(rank + 1) % size]}
    for name in (None, "named"):
        y = fogdist.neighbor_allreduce(torch.ones(2), self_weight=0.5, **ends, name=name)
        assert y.tolist() == [1.0, 1.0]
    fogdist.set_topology(fogdist.topology.ring(size))
    fogdist.allreduce_parameters({"x": torch.ones(2)})
    with pytest.raises(AssertionError, match="gathered"):
        agreement.check_same_everywhere(fogdist.context.current().backend, "text", [str(rank)])


def test_nothing_is_gathered_while_ranks_agree(new_world: Callable[..., World]) -> None:
    new_world(3).run(agreeing)
