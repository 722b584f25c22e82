"""Tests of exchanges that are made from the arguments of a call: made once, kept, and never outdated."""

from __future__ import annotations

from collections import OrderedDict
from fractions import Fraction
from typing import Any

import fogdist
import numpy as np
import pytest
import torch
from fogdist import topology as topologies
from fogdist.context import current
from fogdist.exchange import KEPT_EXCHANGES, RANKS, Exchanges
from harness import on_ranks
from reference import Checks


def exchanges_of() -> Exchanges:
    """Returns the exchanges of rank 0 of 4, whose neighbors are all others."""
    return Exchanges(RANKS, 0, 4, [1, 2, 3], [1, 2, 3], None)


def test_a_bounded_number_is_kept():
    exchanges = exchanges_of()
    for step in range(2 * KEPT_EXCHANGES + 10):
        exchange = exchanges.weighted(float(step), {1: 0.5}, [], True)
        assert exchange.self_weight == step
        assert 0 < len(exchanges) <= KEPT_EXCHANGES
    assert exchanges.weighted(float(step), {1: 0.5}, [], True) is exchange


def test_what_is_equal_to_a_weight_or_rank_is_none_for_that():
    """A kept exchange must not hide errors in arguments that compare equal to its own."""
    exchanges = exchanges_of()
    exchanges.weighted(1.0, {1: 1.0}, {1: 1.0}, True)
    exchanges.weighted(1.0, {}, {}, True)
    exchanges.gathering([1], [1], True)
    wrong: list[tuple[tuple[Any, ...], str]] = [
        ((True, {1: 1.0}, {1: 1.0}), "self_weight must be a real number, got True of type bool"),
        ((1.0, {1: True}, {1: 1.0}), r"src_weights\[1\] must be a real number, got True"),
        ((1.0, {1: 1.0}, {1: True}), r"dst_weights\[1\] must be a real number, got True"),
        ((1.0, {True: 1.0}, {1: 1.0}), r"src_weights\[0\] must be an integer, got True of type bool"),
        ((1.0, {1: 1.0}, {1.0: 1.0}), r"dst_weights\[0\] must be an integer, got 1.0"),
        ((1.0, [], {}), "src_weights must be a dict of ranks to weights, got list"),
        ((1.0, {1: 1.0}, [True]), r"dst_weights\[0\] must be an integer, got True"),
        ((1.0, {1: float("nan")}, {}), r"src_weights\[1\] must be finite as a float, got nan"),
    ]
    for arguments, message in wrong:
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match=message):
                exchanges.weighted(*arguments, True)
    with pytest.raises(TypeError, match=r"src_ranks\[0\] must be an integer, got True"):
        exchanges.gathering([True], [1], True)


def test_numbers_of_other_types_are_weights_and_ranks_too():
    exchanges = exchanges_of()
    plain = exchanges.weighted(0.5, {1: 0.5}, {2: 1.0}, True)
    for arguments in [
        (np.float32(0.5), {np.int64(1): Fraction(1, 2)}, {2: np.float64(1)}),
        (0.5, OrderedDict({1: 0.5}), {2}),
        (0.5, {1: 0.5}, iter([2])),
        (0.5, {1: 0.5}, np.array([2])),
    ]:
        assert exchanges.weighted(*arguments, True) == plain
    assert len(exchanges) == 1


def test_zeros_of_both_signs_are_one_weight():
    """Ranks of a machine compare their weights bit by bit, so the sign of the first zero must not matter."""
    for order in [(0.0, -0.0), (-0.0, 0.0)]:
        exchanges = exchanges_of()
        first, second = (exchanges.weighted(zero, {1: zero}, {2: zero}, True) for zero in order)
        assert str(first.sources + first.destinations) == "((1, 0.0), (2, 0.0))"
        assert (repr(first.weights), first.plan) == (repr(second.weights), second.plan)


# --- in a group ---------------------------------------------------------------------------------------------


@on_ranks(3)
def test_another_topology_has_other_exchanges() -> None:
    """The plan of one topology is never used in another, where the same call has other peers."""
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    x = torch.tensor([float(rank)], dtype=torch.float64)
    everyone = torch.tensor([sum(range(size)) / size], dtype=torch.float64)
    before = (rank - 1) % size
    ring = topologies.ring(size, connect_style=1)
    with Checks() as checks:
        for step in range(3):
            fogdist.set_topology(topologies.fully_connected(size))
            full = current().topology.exchanges
            for _ in range(2):
                checks.close(f"{step} mean of all", fogdist.neighbor_allreduce(x), everyone)
                mixed = fogdist.neighbor_allreduce(x, self_weight=0.0, src_weights={before: 1.0})
                checks.equal(f"{step} one of all", mixed.item(), float(before))
                checks.equal(f"{step} gather of all", fogdist.neighbor_allgather(x).numel(), size - 1)
            fogdist.set_topology(ring)
            checks.true(f"{step} begins anew", len(current().topology.exchanges) == 0)
            checks.true(f"{step} others", current().topology.exchanges is not full)
            (source,) = fogdist.in_neighbor_ranks()
            for _ in range(2):
                checks.equal(f"{step} mean", fogdist.neighbor_allreduce(x).item(), (rank + source) / 2)
                mixed = fogdist.neighbor_allreduce(x, self_weight=0.0, src_weights={source: 1.0})
                checks.equal(f"{step} the only one", mixed.item(), float(source))
                checks.equal(f"{step} gather", fogdist.neighbor_allgather(x).item(), float(source))
            other = next(r for r in range(size) if r not in (rank, source))
            with pytest.raises(ValueError, match=rf"src_weights must name in-neighbors of rank {rank} only"):
                fogdist.neighbor_allreduce(x, self_weight=0.0, src_weights={other: 1.0})


@on_ranks(2)
def test_weights_that_change_between_calls() -> None:
    """One dict changes between calls, and each call uses its present contents."""
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    x = torch.tensor([float(rank + 1)], dtype=torch.float64)
    before, after = (rank - 1) % size, (rank + 1) % size
    sources, destinations = {before: 0.0}, {after: 1.0}
    with Checks() as checks:
        for step in range(1, 4):
            sources[before] = float(step)
            for check in (True, False):
                output = fogdist.neighbor_allreduce(
                    x,
                    self_weight=0.0,
                    src_weights=sources,
                    dst_weights=destinations,
                    enable_topo_check=check,
                )
                checks.equal(f"{step} {check}", output.item(), step * (before + 1.0))
