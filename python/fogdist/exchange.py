"""One exchange with neighbors: its peers and weights, from the arguments of a call.

All operations that take weights of peers convert them to an `Exchange`, which is checked once and never changes.
`Exchanges` creates them for one node of one topology, and caches them, because a training loop uses the same few again
and again.

The peers of a dynamic exchange come from each rank's own arguments, so ranks can disagree about them;
`fogdist.verification` has the collective check.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

from fogdist.agreement import Pair, edges
from fogdist.topology import check_neighbor_ranks

if TYPE_CHECKING:
    from fog_pg._C import NeighborPlan

# Peers with weights, in the order in which sums are computed.
Peers: TypeAlias = "tuple[tuple[int, float], ...]"

# The numbers of exchanges that a node caches and of plans that the process caches. A script with more different ones,
# such as random weights, creates them anew.
KEPT_EXCHANGES = 256
_KEPT_PLANS = 1024
# The types that a key of a cached exchange may hold. Other types may change, or may equal numbers without being
# weights.
_NUMBERS = (float, int)


@dataclass(frozen=True)
class Nodes:
    """The nodes of an operation, ranks or machines, and the names of its arguments.

    Attributes:
        operation: Name of the operation.
        node: "rank", or "machine", whose ranks must all pass the same arguments.
        sources: Name of the argument that gives the sources.
        destinations: Name of the argument that gives the destinations.
    """

    operation: str
    node: str
    sources: str
    destinations: str


RANKS = Nodes("neighbor_allreduce", "rank", "src_weights", "dst_weights")
GATHERING_RANKS = Nodes("neighbor_allgather", "rank", "src_ranks", "dst_ranks")
MACHINES = Nodes("hierarchical_neighbor_allreduce", "machine", "src_machine_weights", "dst_machine_weights")


@dataclass(frozen=True)
class Exchange:
    """One exchange, seen from one node; its ranks and weights are valid.

    Attributes:
        nodes: The kind of nodes.
        node: The node itself.
        size: How many nodes there are.
        self_weight: Weight of the node's own tensor.
        sources: The nodes that it receives from, with the weights of their tensors.
        destinations: The nodes that it sends to, with the weights of its own tensor.
        mean: Whether the plain mean is taken; all weights are 1 then.
        is_dynamic: Whether the peers come from arguments, not from the topology.
        check: Whether ranks are to check that they agree on it.
    """

    nodes: Nodes
    node: int
    size: int
    self_weight: float
    sources: Peers
    destinations: Peers
    mean: bool = False
    is_dynamic: bool = False
    check: bool = False

    def __post_init__(self) -> None:
        # Turns -0.0 into 0.0, so that equal weights are equal to the bit and plans can be found by their weights.
        for name in ("sources", "destinations"):
            object.__setattr__(
                self, name, tuple((peer, weight + 0.0) for peer, weight in getattr(self, name))
            )
        object.__setattr__(self, "self_weight", self.self_weight + 0.0)

    @functools.cached_property
    def plan(self) -> NeighborPlan:
        """The peers and weights in the form that the backend takes."""
        return _plan(self.node, self.size, self.self_weight, self.sources, self.destinations, self.mean)

    @functools.cached_property
    def is_verified(self) -> bool:
        """Whether `fogdist.verification` checks it. Ranks have compared the edges of a topology already."""
        return self.check and self.is_dynamic

    @functools.cached_property
    def confirm(self) -> bool | None:
        """Whether a sender waits until the receivers have accepted its tensor; None for the group's option."""
        return True if self.check and not self.is_dynamic else None

    @property
    def weights(self) -> tuple[float, Peers, Peers]:
        """The part of the exchange that differs between nodes."""
        return self.self_weight, self.sources, self.destinations

    @functools.cached_property
    def edges(self) -> Pair:
        """The marks of its edges at this node; see `fogdist.agreement`."""
        return edges(
            [(self.nodes.node, self.node, destination) for destination, _ in self.destinations],
            [(self.nodes.node, source, self.node) for source, _ in self.sources],
        )


class Exchanges:
    """A cache of the exchanges of one node.

    It belongs to one topology. A new topology has a new cache, so no entry can be out of date.

    Args:
        nodes: `RANKS` or `MACHINES`.
        node: The node.
        size: How many nodes there are.
        in_neighbors: The node's in-neighbors in the topology; empty if there is no topology.
        out_neighbors: The node's out-neighbors, likewise.
        along: The exchange with all neighbors; None if there is no topology.
    """

    def __init__(
        self,
        nodes: Nodes,
        node: int,
        size: int,
        in_neighbors: Sequence[int],
        out_neighbors: Sequence[int],
        along: Exchange | None,
    ) -> None:
        self._nodes = nodes
        self._node, self._size = node, size
        self._in_neighbors, self._out_neighbors = sorted(in_neighbors), sorted(out_neighbors)
        # Indexed by the argument that turns the check on or off.
        self._along = None if along is None else (replace(along, check=False), replace(along, check=True))
        self._kept: dict[Hashable, Exchange] = {}

    def __len__(self) -> int:
        """Returns the number of cached exchanges that calls requested by weights or ranks."""
        return len(self._kept)

    def weighted(
        self,
        self_weight: float | None,
        src_weights: Mapping[int, float] | None,
        dst_weights: Iterable[int] | Mapping[int, float] | None,
        check: bool,
    ) -> Exchange:
        """Returns the exchange for the arguments of `neighbor_allreduce` or of an average between machines.

        Args:
            self_weight: The argument of the operation.
            src_weights: `src_weights` or `src_machine_weights`.
            dst_weights: `dst_weights` or `dst_machine_weights`.
            check: `enable_topo_check`.
        """
        if self_weight is None and src_weights is None and dst_weights is None and self._along is not None:
            return self._along[bool(check)]
        key = _key(self._nodes, self_weight, src_weights, dst_weights, check)
        exchange = self._kept.get(key)
        if exchange is None:
            between = self._of_machines if self._nodes is MACHINES else self._of_ranks
            exchange = self._keep(key, between(self_weight, src_weights, dst_weights, bool(check)))
        return exchange

    def gathering(
        self,
        src_ranks: Iterable[SupportsIndex] | None,
        dst_ranks: Iterable[SupportsIndex] | None,
        check: bool,
    ) -> Exchange:
        """Returns the exchange of a `neighbor_allgather`; `check` is its `enable_topo_check`."""
        key = _key(GATHERING_RANKS, None, src_ranks, dst_ranks, check)
        exchange = self._kept.get(key)
        if exchange is None:
            exchange = self._keep(key, self._of_gathering(src_ranks, dst_ranks, bool(check)))
        return exchange

    def gossip(
        self, target_rank: SupportsIndex, self_weight: float | None, pair_weight: float | None
    ) -> Exchange:
        """Returns the exchange of a `pair_gossip`, whose only source is also its only destination."""
        (peer,) = check_neighbor_ranks([target_rank], self._node, self._size, "target_rank")
        if self_weight is None or pair_weight is None:
            check_together(self_weight=self_weight, pair_weight=pair_weight)
            return self._exchange(RANKS, 1.0, _ones([peer]), _ones([peer]), mean=True)
        own, other = check_weight(self_weight, "self_weight"), check_weight(pair_weight, "pair_weight")
        return self._exchange(RANKS, own, [(peer, other)], _ones([peer]))

    def _keep(self, key: Hashable, exchange: Exchange) -> Exchange:
        if key is not None:
            if len(self._kept) >= KEPT_EXCHANGES:
                self._kept.clear()
            self._kept[key] = exchange
        return exchange

    def _exchange(
        self,
        nodes: Nodes,
        self_weight: float,
        sources: Iterable[tuple[int, float]],
        destinations: Iterable[tuple[int, float]],
        **more: bool,
    ) -> Exchange:
        return Exchange(
            nodes, self._node, self._size, self_weight, tuple(sources), tuple(destinations), **more
        )

    # --- from arguments: all errors about a user's weights are raised here ---

    def _of_ranks(
        self,
        self_weight: float | None,
        src_weights: Mapping[int, float] | None,
        dst_weights: Iterable[int] | Mapping[int, float] | None,
        check: bool,
    ) -> Exchange:
        if self_weight is None or src_weights is None:
            check_together(self_weight=self_weight, src_weights=src_weights)
            raise ValueError("dst_weights must come with self_weight and src_weights, got dst_weights alone")
        if dst_weights is not None:
            return self._dynamic(self_weight, src_weights, dst_weights, check)
        own, sources = check_weight(self_weight, "self_weight"), dict(self._source_weights(src_weights))
        _check_neighbors(sources, self._in_neighbors, "src_weights", f"in-neighbors of rank {self._node}")
        # Every in-neighbor sends. One that is not in `src_weights` has the weight 0.
        every = [(source, sources.get(source, 0.0)) for source in self._in_neighbors]
        return self._exchange(RANKS, own, every, _ones(self._out_neighbors), check=check)

    def _of_machines(
        self,
        self_weight: float | None,
        src_machine_weights: Mapping[int, float] | None,
        dst_machine_weights: Iterable[int] | Mapping[int, float] | None,
        check: bool,
    ) -> Exchange:
        if self_weight is None or src_machine_weights is None or dst_machine_weights is None:
            check_together(
                self_weight=self_weight,
                src_machine_weights=src_machine_weights,
                dst_machine_weights=dst_machine_weights,
            )
            raise RuntimeError(
                "hierarchical_neighbor_allreduce needs weights or a machine topology, as Machines() does; call "
                "fogdist.set_machine_topology(fogdist.topology.exponential(fogdist.machine_size())) first"
            )
        exchange = self._dynamic(self_weight, src_machine_weights, dst_machine_weights, check)
        for argument, peers, neighbors, what in (
            (MACHINES.sources, exchange.sources, self._in_neighbors, "in"),
            (MACHINES.destinations, exchange.destinations, self._out_neighbors, "out"),
        ):
            _check_neighbors(
                [peer for peer, _ in peers], neighbors, argument, f"{what}-neighbors of machine {self._node}"
            )
        return exchange

    def _of_gathering(
        self,
        src_ranks: Iterable[SupportsIndex] | None,
        dst_ranks: Iterable[SupportsIndex] | None,
        check: bool,
    ) -> Exchange:
        if src_ranks is None or dst_ranks is None:
            check_together(src_ranks=src_ranks, dst_ranks=dst_ranks)
            peers = _ones(self._in_neighbors), _ones(self._out_neighbors)
            return self._exchange(GATHERING_RANKS, 1.0, *peers, check=check)
        sources = check_neighbor_ranks(src_ranks, self._node, self._size, "src_ranks")
        destinations = check_neighbor_ranks(dst_ranks, self._node, self._size, "dst_ranks")
        return self._exchange(
            GATHERING_RANKS, 1.0, _ones(sources), _ones(destinations), is_dynamic=True, check=check
        )

    def _dynamic(
        self,
        self_weight: float,
        src_weights: Mapping[int, float],
        dst_weights: Iterable[int] | Mapping[int, float],
        check: bool,
    ) -> Exchange:
        own, sources = check_weight(self_weight, "self_weight"), self._source_weights(src_weights)
        if isinstance(dst_weights, Mapping):
            destinations = self._weights(dst_weights, self._nodes.destinations)
        else:
            destinations = _ones(sorted(self._peers(dst_weights, self._nodes.destinations)))
        return self._exchange(self._nodes, own, sources, destinations, is_dynamic=True, check=check)

    def _source_weights(self, src_weights: Mapping[int, float]) -> list[tuple[int, float]]:
        if not isinstance(src_weights, Mapping):
            raise TypeError(
                f"{self._nodes.sources} must be a dict of {self._nodes.node}s to weights, "
                f"got {type(src_weights).__name__}"
            )
        return self._weights(src_weights, self._nodes.sources)

    def _weights(self, weights: Mapping[Any, float], argument: str) -> list[tuple[int, float]]:
        return weighted_peers(self._peers(weights, argument), weights, argument)

    def _peers(self, ranks: Iterable[SupportsIndex], argument: str) -> list[int]:
        return check_neighbor_ranks(ranks, self._node, self._size, argument)


def weighted_peers(
    peers: Sequence[int], weights: Mapping[Any, float], argument: str
) -> list[tuple[int, float]]:
    """Returns peers with their weights in ascending order, so that rounding does not depend on the order of a dict.

    Args:
        peers: The keys of `weights`, checked.
        weights: As the user gave them.
        argument: The user's name for them.

    Raises:
        TypeError: As `check_weight`.
        ValueError: As `check_weight`.
    """
    return sorted(
        (peer, check_weight(weight, f"{argument}[{peer}]"))
        for peer, weight in zip(peers, weights.values(), strict=True)
    )


def check_together(**arguments: object) -> None:
    """Raises ValueError if some of the arguments are given, and others, which are None, are not."""
    given = [name for name, value in arguments.items() if value is not None]
    if 0 < len(given) < len(arguments):
        raise ValueError(f"{', '.join(arguments)} must be given together, got {', '.join(given)} alone")


def check_weight(value: float, argument: str) -> float:
    """Returns a weight as a float.

    Raises:
        TypeError: Not a real number.
        ValueError: Not finite.
    """
    if type(value) is float and math.isfinite(value):  # the most frequent case
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{argument} must be a real number, got {value!r} of type {type(value).__name__}")
    try:
        weight = float(value)
    except OverflowError:  # of an int or a Fraction
        weight = math.inf
    if not math.isfinite(weight):
        raise ValueError(f"{argument} must be finite as a float, got {value}")
    return weight


def _ones(peers: Iterable[int]) -> list[tuple[int, float]]:
    return [(peer, 1.0) for peer in peers]


def _key(nodes: Nodes, self_weight: object, sources: object, destinations: object, check: bool) -> Hashable:
    """Returns a cache key of the arguments of a call, or None if they hold anything but plain numbers."""
    if self_weight is not None and type(self_weight) not in _NUMBERS:
        return None
    key: list[Hashable] = [nodes.operation, self_weight, bool(check)]
    for given in (sources, destinations):
        if type(given) is dict:
            for peer, weight in given.items():
                if type(peer) is not int or type(weight) not in _NUMBERS:
                    return None
            # A frozenset and not a tuple, so that an empty dict differs from an empty list.
            key.append(frozenset(given.items()))
        elif type(given) is list or type(given) is tuple:
            for peer in given:
                if type(peer) is not int:
                    return None
            key.append(tuple(given))
        elif given is None:
            key.append(None)
        else:
            return None
    return tuple(key)


@functools.lru_cache(maxsize=_KEPT_PLANS)
def _plan(
    node: int, size: int, self_weight: float, sources: Peers, destinations: Peers, mean: bool
) -> NeighborPlan:
    # Imported here because it loads the extension, which a program that only uses topologies does not need.
    from fog_pg._C import NeighborPlan

    return NeighborPlan(node, size, self_weight, sources, destinations, mean=mean)


def _check_neighbors(peers: Iterable[int], neighbors: Sequence[int], argument: str, what: str) -> None:
    others = [peer for peer in peers if peer not in neighbors]
    if others:
        hint = "; other peers need dst_weights too" if argument == "src_weights" else ""
        raise ValueError(
            f"{argument} must name {what} only, in the current topology {sorted(neighbors)}, "
            f"got {others}{hint}"
        )
