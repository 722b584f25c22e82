"""A table that compares topologies on the same number of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import SupportsIndex

from fogdist.topology.base_graph import base_graph
from fogdist.topology.errors import TopologyError
from fogdist.topology.registry import by_name
from fogdist.topology.sequences import (
    inner_outer_exponential,
    inner_outer_ring,
    one_peer_exponential,
    one_peer_hypercube,
    random_matching,
)
from fogdist.topology.topology import Topology
from fogdist.topology.validation import check_int

_STATIC = ("ring", "ring-right", "mesh", "torus", "star", "symexp", "exp2", "full")


@dataclass(frozen=True)
class SummaryRow:
    """The costs and the properties of one topology.

    Attributes:
        name: Of the topology.
        period: Rounds after which it repeats; None if never.
        degree: The most peers that a rank sends to in a round.
        tensors_per_step: Mean number of tensors that a rank sends in a round. Multiply it by the size of the tensor to
            get bytes.
        spectral_gap: As `Topology.spectral_gap`: of the product over a period.
        exact_rounds: Rounds to the exact average; None if it is only approached.
        rounds_to_tolerance: Rounds until the consensus distance is below the tolerance; None above the limit.
        tensors_to_tolerance: Tensors that a rank sends until then, the mean.
    """

    name: str
    period: int | None
    degree: int
    tensors_per_step: float
    spectral_gap: float
    exact_rounds: int | None
    rounds_to_tolerance: int | None
    tensors_to_tolerance: float | None


@dataclass(frozen=True)
class Summary:
    """The table of `summary`; `print` shows it.

    Attributes:
        size: Number of ranks.
        tolerance: Consensus distance, relative to the start, of the last two columns.
        limit: The most rounds that were tried to reach it.
        rows: One a topology.
    """

    size: int
    tolerance: float
    limit: int
    rows: tuple[SummaryRow, ...]

    def __str__(self) -> str:
        goal = f"{self.tolerance:.0e}".replace("e-0", "e-")
        header = (
            f"{self.size} ranks", "period", "degree", "tensors sent a step", "spectral gap",
            "rounds to exact", f"rounds to {goal}", f"tensors to {goal}",
        )  # fmt: skip
        lines = [header]
        for row in self.rows:
            lines.append(
                (
                    row.name,
                    "endless" if row.period is None else str(row.period),
                    str(row.degree),
                    f"{row.tensors_per_step:.2f}",
                    f"{row.spectral_gap:.4f}",
                    "-" if row.exact_rounds is None else str(row.exact_rounds),
                    f"> {self.limit}" if row.rounds_to_tolerance is None else str(row.rounds_to_tolerance),
                    "-" if row.tensors_to_tolerance is None else f"{row.tensors_to_tolerance:.1f}",
                )
            )
        widths = [max(len(line[column]) for line in lines) for column in range(len(fields(SummaryRow)))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        )


def summary(
    size: SupportsIndex,
    topologies: Iterable[Topology] | None = None,
    *,
    local_size: SupportsIndex | None = None,
    tolerance: float = 1e-6,
    limit: SupportsIndex = 1000,
) -> Summary:
    """Returns a table that compares topologies; `print` it.

    Args:
        size: Number of ranks, at least 1.
        topologies: The topologies to compare, all of `size` ranks. By default all topologies of this package for the
            size: the static graphs with their weights, the one-peer sequences (the hypercube for powers of two), Base-2
            and Base-3 graphs, random matchings, and, given `local_size`, rings and exponentials
            inside and between machines.
        local_size: Ranks of a machine, at least 3 and a divisor of `size`.
        tolerance: Consensus distance, relative to the start, to which rounds are counted; at least 1e-12.
        limit: The most rounds that are counted.

    Raises:
        TypeError: `size`, `local_size` or `limit` is not an integer.
        TopologyError: `size` is below 1, a topology has another size, `local_size` does not fit, `tolerance`
            is below 1e-12 or `limit` negative.
    """
    size = check_int(size, "size", minimum=1)
    compared = list(_all(size, local_size) if topologies is None else topologies)
    for topology in compared:
        if topology.size != size:
            raise TopologyError(f"topologies must have size = {size}, got {topology}")
    limit = check_int(limit, "limit", minimum=0)
    return Summary(size, tolerance, limit, tuple(_row(topology, tolerance, limit) for topology in compared))


def _all(size: int, local_size: SupportsIndex | None) -> Iterable[Topology]:
    for name in _STATIC:
        yield Topology.from_graph(name, by_name(name, size))
    yield one_peer_exponential(size)
    if size & (size - 1) == 0:
        yield one_peer_hypercube(size)
    yield base_graph(size, 1)
    yield base_graph(size, 2)
    yield random_matching(size)
    if local_size is not None:
        yield inner_outer_ring(size, local_size)
        yield inner_outer_exponential(size, local_size)


def _row(topology: Topology, tolerance: float, limit: int) -> SummaryRow:
    rounds = topology.rounds_to(tolerance, limit)
    sent = None
    if rounds is not None:
        sent = sum(topology.bytes_per_step(1.0, t) for t in range(rounds))
    return SummaryRow(
        name=topology.name,
        period=topology.period,
        degree=topology.max_degree,
        tensors_per_step=topology.bytes_per_step(1.0),
        spectral_gap=topology.spectral_gap,
        exact_rounds=topology.rounds_to_exact_consensus,
        rounds_to_tolerance=rounds,
        tensors_to_tolerance=sent,
    )
