"""Checks of the arguments that every part of the topology package takes: integers, ranks and graphs; their error."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable
from typing import Any, SupportsIndex, TypeVar, get_args

from fogdist.lazy import nx


class TopologyError(ValueError, AssertionError):
    """A size, rank, shape, base or graph that no topology can be built from.

    It is a ValueError, as every bad argument value in fogdist. It is an AssertionError too because BlueFog
    checked these same arguments with ``assert``: scripts and tests written for it catch AssertionError, and
    keep working. Arguments of a wrong type raise TypeError instead.
    """


_Value = TypeVar("_Value")


def check_choice(value: _Value, argument: str, choices: Any) -> _Value:
    """Returns `value`; ValueError unless it is one of the values of `choices`, a `typing.Literal`."""
    if value not in get_args(choices):
        raise ValueError(
            f"{argument} must be one of {', '.join(map(repr, get_args(choices)))}, got {value!r}"
        )
    return value


def check_int(value: SupportsIndex, argument: str, *, minimum: int | None = None) -> int:
    """Returns `value` as a Python int; NumPy integers and 0-d integer arrays are, floats and bools are not.

    Raises:
        TypeError: `value` is not an integer.
        TopologyError: `value` is below `minimum`.
    """
    try:
        if isinstance(value, bool):  # an older version of the function had a flag in this position
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{argument} must be an integer, got {value!r} of type {type(value).__name__}"
        ) from None
    if minimum is not None and number < minimum:
        raise TopologyError(f"{argument} must be an integer >= {minimum}, got {number}")
    return number


def check_flags(**flags: bool) -> None:
    """Raises TypeError for a flag that is not a bool, probably because an older version had another argument there.

    Args:
        **flags: Name of an argument and what was given for it.
    """
    for argument, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{argument} must be True or False, got {value!r} of type {type(value).__name__}")


def check_rank(value: SupportsIndex, size: int, argument: str) -> int:
    """Returns `value` as an int in [0, size).

    Raises:
        TypeError: `value` is not an integer.
        TopologyError: `value` is outside [0, size).
    """
    rank = check_int(value, argument)
    if not 0 <= rank < size:
        raise TopologyError(f"{argument} must be a rank in [0, {size - 1}], got {rank}")
    return rank


def check_neighbor_ranks(
    ranks: Iterable[SupportsIndex], rank: SupportsIndex, size: SupportsIndex, argument: str
) -> list[int]:
    """Returns the peers that `rank` names in a group of `size`, as Python ints in the order given.

    Args:
        ranks: Peers of `rank`; any iterable of integers, a 1-d NumPy integer array included; may be empty.
        rank: The rank whose peers these are.
        size: Number of ranks in the group.
        argument: Name of the caller's argument, for the message.

    Raises:
        TypeError: `ranks` is not an iterable of integers.
        TopologyError: A peer is out of range, named twice, or is `rank` itself.
    """
    size = check_int(size, "size", minimum=1)
    rank = check_rank(rank, size, "rank")
    try:
        given = list(ranks)
    except TypeError:
        raise TypeError(
            f"{argument} must be an iterable of ranks, got {ranks!r} of type {type(ranks).__name__}"
        ) from None
    peers = [check_rank(peer, size, f"{argument}[{place}]") for place, peer in enumerate(given)]
    if rank in peers:
        raise TopologyError(f"{argument} must not contain the rank itself, got {peers} on rank {rank}")
    if len(set(peers)) != len(peers):
        raise TopologyError(f"{argument} must not contain a rank twice, got {peers}")
    return peers


def check_topology(topology: nx.DiGraph, argument: str = "topology") -> int:
    """Returns the number of ranks of `topology`, whose nodes must be exactly 0 ... n-1, in any order.

    Raises:
        TypeError: Not a networkx.DiGraph, or a multigraph, where an edge has no single weight.
        TopologyError: The graph is empty, or its nodes are not the ranks 0 ... n-1.
    """
    if not isinstance(topology, nx.DiGraph) or topology.is_multigraph():
        raise no_topology(topology, "a networkx.DiGraph", argument)
    size: int = topology.number_of_nodes()
    if size == 0:
        raise TopologyError(f"{argument} must have at least one node, got an empty graph")
    strange = [node for node in topology if node not in range(size)]
    if strange:
        raise TopologyError(
            f"{argument} must have the nodes 0 to {size - 1}, one a rank, got the node {strange[0]!r}"
        )
    return size


def no_topology(value: object, kinds: str, argument: str = "topology") -> TypeError:
    """Returns the error for a value that is none of the kinds of topologies that are allowed."""
    is_undirected = isinstance(value, nx.Graph) and not value.is_directed()
    hint = "; an undirected graph has to_directed()" if is_undirected else ""
    return TypeError(f"{argument} must be {kinds}, got {type(value).__name__}{hint}")


def edge_weight(topology: nx.DiGraph, source: int, destination: int) -> float:
    """Returns the weight of the edge source -> destination; an edge without one weighs 1, as in networkx.

    Raises:
        TypeError: The weight is not a real number.
        TopologyError: The weight is infinite or not a number.
    """
    weight = topology.edges[source, destination].get("weight", 1.0)
    message = f"weight of the edge {source} -> {destination} must be a finite real number, got {weight!r}"
    if not isinstance(weight, numbers.Real):
        raise TypeError(message)
    if not math.isfinite(weight):
        raise TopologyError(message)
    return float(weight)
