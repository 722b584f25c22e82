"""What one exchange with neighbors is: its peers and weights, from the arguments of a call.

The peers of a dynamic exchange come from each rank's own arguments, so ranks can disagree about them;
`verify` is the collective check of that.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor

from fogdist.context import Context
from fogdist.topology import check_neighbor_ranks

if TYPE_CHECKING:
    from fog_pg._C import NeighborPlan

# Places in this tuple stand for dtypes on the wire of `verify`.
_DTYPES = tuple(sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str))
_RENAMED = {"neighbor_weights": "src_weights", "send_neighbors": "dst_weights"}


@dataclass(frozen=True)
class Exchange:
    """One exchange, seen from this rank.

    Attributes:
        operation: Name of the operation, for messages.
        source_argument: Name of the argument that gave the sources.
        destination_argument: Name of the argument that gave the destinations.
        sources: Ranks to receive from.
        destinations: Ranks to send to.
        plan: The same with weights, for the backend.
        is_dynamic: Whether the peers come from arguments, not from the topology.
    """

    operation: str
    source_argument: str
    destination_argument: str
    sources: list[int]
    destinations: list[int]
    plan: NeighborPlan
    is_dynamic: bool


def reject_unknown_arguments(operation: str, arguments: Mapping[str, object]) -> None:
    """Raises TypeError for a keyword that `operation` does not have, with the new name of an old one."""
    for name in arguments:
        if name in _RENAMED:
            raise TypeError(
                f"{operation}() has no argument {name!r} any more; use {_RENAMED[name]!r} instead"
            )
        raise TypeError(f"{operation}() got an unexpected keyword argument {name!r}")


def weighted_exchange(
    context: Context,
    self_weight: float | None,
    src_weights: Mapping[int, float] | None,
    dst_weights: Iterable[int] | Mapping[int, float] | None,
) -> Exchange:
    """Returns the exchange of a `neighbor_allreduce`; the arguments are those of that function."""
    from fog_pg._C import NeighborPlan

    operation, rank, size = "neighbor_allreduce", context.rank, context.size
    topology = context.topology
    if (self_weight is None) != (src_weights is None):
        given, missing = (
            ("src_weights", "self_weight") if self_weight is None else ("self_weight", "src_weights")
        )
        raise ValueError(f"self_weight and src_weights must be given together, got {given} without {missing}")
    if self_weight is None:
        if dst_weights is not None:
            raise ValueError("dst_weights must come with self_weight and src_weights, got dst_weights alone")
        return _static_exchange(operation, context, topology.plan)
    own = _weight(self_weight, "self_weight")
    if not isinstance(src_weights, Mapping):
        raise TypeError(f"src_weights must be a dict of ranks to weights, got {type(src_weights).__name__}")
    sources = _weights(src_weights, rank, size, "src_weights")
    if dst_weights is not None:
        if isinstance(dst_weights, Mapping):
            destinations = _weights(dst_weights, rank, size, "dst_weights")
        else:
            destinations = dict.fromkeys(check_neighbor_ranks(dst_weights, rank, size, "dst_weights"), 1.0)
        plan = NeighborPlan(rank, size, own, list(sources.items()), list(destinations.items()))
        return Exchange(
            operation, "src_weights", "dst_weights", list(sources), list(destinations), plan, True
        )
    strangers = [source for source in sources if source not in topology.in_neighbors]
    if strangers:
        raise ValueError(
            f"src_weights must name in-neighbors of rank {rank} only, in the current topology "
            f"{sorted(topology.in_neighbors)}, got {strangers}; other peers need dst_weights too"
        )
    # Every in-neighbor sends, whatever this rank makes of it: one that is left out weighs 0.
    plan = NeighborPlan(
        rank,
        size,
        own,
        [(source, sources.get(source, 0.0)) for source in sorted(topology.in_neighbors)],
        [(destination, 1.0) for destination in sorted(topology.out_neighbors)],
    )
    return _static_exchange(operation, context, plan)


def gathering_exchange(
    context: Context, src_ranks: Iterable[SupportsIndex] | None, dst_ranks: Iterable[SupportsIndex] | None
) -> Exchange:
    """Returns the exchange of a `neighbor_allgather`; the arguments are those of that function."""
    from fog_pg._C import NeighborPlan

    operation, rank, size = "neighbor_allgather", context.rank, context.size
    if (src_ranks is None) != (dst_ranks is None):
        given, missing = ("src_ranks", "dst_ranks") if dst_ranks is None else ("dst_ranks", "src_ranks")
        raise ValueError(f"src_ranks and dst_ranks must be given together, got {given} without {missing}")
    if src_ranks is None or dst_ranks is None:
        sources, destinations = sorted(context.topology.in_neighbors), sorted(context.topology.out_neighbors)
    else:
        sources = check_neighbor_ranks(src_ranks, rank, size, "src_ranks")
        destinations = check_neighbor_ranks(dst_ranks, rank, size, "dst_ranks")
    plan = NeighborPlan(rank, size, 1.0, [(s, 1.0) for s in sources], [(d, 1.0) for d in destinations])
    return Exchange(operation, "src_ranks", "dst_ranks", sources, destinations, plan, src_ranks is not None)


def verify(context: Context, exchange: Exchange, tensor: Tensor, name: str) -> None:
    """Checks that all ranks agree on a dynamic exchange. Collective and blocking; tens of bytes a rank.

    Every rank tells all others its peers, dtype and shape, so that all of them come to the same verdict.

    Args:
        context: The group.
        exchange: What this rank asks for.
        tensor: What this rank sends.
        name: Name of the operation, or "".

    Raises:
        ValueError: On all ranks alike, with every edge that only one of its ends asks for, and every edge
            between tensors that do not fit.
    """
    vector = torch.tensor(
        [
            _OPERATIONS.index(exchange.operation),
            _DTYPES.index(tensor.dtype),
            *_with_length(tensor.shape),
            *_with_length(exchange.sources),
            *_with_length(exchange.destinations),
        ]
    )
    work = context.backend.allgather_concat(vector, name=f"{name}.check" if name else "")
    work.wait()
    table = work.get_future().value()[0].tolist()
    requests, place = [], 0
    for _ in range(context.size):
        request, place = _read_request(table, place)
        requests.append(request)
    problems = list(_disagreements(exchange, requests))
    if problems:
        raise ValueError("ranks disagree on an exchange with neighbors:\n  " + "\n  ".join(problems))


@dataclass(frozen=True)
class _Request:
    operation: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    sources: list[int]
    destinations: list[int]

    def fits(self, other: _Request) -> bool:
        if self.operation == "neighbor_allgather":  # concatenates on dimension 0
            return self.dtype == other.dtype and self.shape[1:] == other.shape[1:]
        return self.dtype == other.dtype and self.shape == other.shape


_OPERATIONS = ("neighbor_allreduce", "neighbor_allgather")


def _disagreements(exchange: Exchange, requests: list[_Request]) -> Iterable[str]:
    operations = sorted({request.operation for request in requests})
    if len(operations) > 1:
        for rank, request in enumerate(requests):
            yield f"rank {rank} calls {request.operation}"
        return
    for i, sender in enumerate(requests):
        for j, receiver in enumerate(requests):
            sends, receives = j in sender.destinations, i in receiver.sources
            if sends and not receives:
                yield (
                    f"rank {i} sends to rank {j} ({exchange.destination_argument}), "
                    f"but rank {j} does not receive from rank {i} ({exchange.source_argument})"
                )
            elif receives and not sends:
                yield (
                    f"rank {j} receives from rank {i} ({exchange.source_argument}), "
                    f"but rank {i} does not send to rank {j} ({exchange.destination_argument})"
                )
            elif sends and not sender.fits(receiver):
                yield (f"rank {i} sends {_describe(sender)} to rank {j}, which has {_describe(receiver)}")


def _describe(request: _Request) -> str:
    return f"{str(request.dtype).removeprefix('torch.')} of shape {request.shape}"


def _with_length(numbers_: Iterable[int]) -> list[int]:
    listed = list(numbers_)
    return [len(listed), *listed]


def _read_request(table: list[int], place: int) -> tuple[_Request, int]:
    operation, dtype = _OPERATIONS[table[place]], _DTYPES[table[place + 1]]
    place += 2
    lists = []
    for _ in range(3):
        end = place + 1 + table[place]
        lists.append(table[place + 1 : end])
        place = end
    shape, sources, destinations = lists
    return _Request(operation, dtype, tuple(shape), sources, destinations), place


def _static_exchange(operation: str, context: Context, plan: NeighborPlan) -> Exchange:
    topology = context.topology
    neighbors = topology.in_neighbors, topology.out_neighbors
    return Exchange(operation, "src_weights", "dst_weights", *neighbors, plan, is_dynamic=False)


def _weights(weights: Mapping[Any, float], rank: int, size: int, argument: str) -> dict[int, float]:
    peers = check_neighbor_ranks(weights, rank, size, argument)
    return {
        peer: _weight(value, f"{argument}[{peer}]")
        for peer, value in zip(peers, weights.values(), strict=True)
    }


def _weight(value: float, argument: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{argument} must be a real number, got {value!r} of type {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{argument} must be finite, got {value}")
    return float(value)
