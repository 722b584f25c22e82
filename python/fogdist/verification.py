"""The collective check of a dynamic exchange: do all ranks ask for the same one?

A rank tells all others its peers and what stands for its tensors, tens of bytes in all, so all ranks come to
the same verdict. Only if tensors do not fit do ranks send their shapes and dtypes, for the message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from fogdist.agreement import digest, gather_numbers, gather_texts
from fogdist.context import Context
from fogdist.exchange import GATHERING_RANKS, MACHINES, RANKS, Exchange

# Places in this tuple stand for operations on the wire.
_OPERATIONS = (RANKS.operation, GATHERING_RANKS.operation, MACHINES.operation)
_SEPARATOR = "\n"


@dataclass(frozen=True)
class _Request:
    """What one rank asks for."""

    operation: str
    tensors: int
    plan: int
    sources: list[int]
    destinations: list[int]


def verify(context: Context, exchange: Exchange, tensors: Sequence[Tensor], name: str) -> None:
    """Checks that all ranks agree on a dynamic exchange. Collective and blocking.

    Args:
        context: The group.
        exchange: What this rank asks for.
        tensors: What this rank sends.
        name: Name of the operation, or "".

    Raises:
        ValueError: On all ranks alike, with every edge that only one of its ends asks for, every edge between
            tensors that do not fit, and every machine whose ranks ask for different things.
    """
    name = f"{name}.check" if name else ""
    requests = [
        _read(numbers) for numbers in gather_numbers(context.backend, _written(exchange, tensors), name)
    ]
    problems = list(_different_operations(requests))
    if not problems:
        leaders = requests
        if exchange.nodes is MACHINES:
            problems += _divided_machines(context.machines, requests)
            leaders = [requests[ranks[0]] for ranks in context.machines]
        problems += _one_sided_edges(exchange, leaders)
        misfits = _misfits(context, exchange, requests)
        if misfits:
            mine = any(context.rank in pair for pair in misfits)
            texts = gather_texts(
                context.backend, _SEPARATOR.join(map(_describe, tensors)) if mine else "", name
            )
            problems += [_misfit(sender, receiver, texts) for sender, receiver in misfits]
    if problems:
        raise ValueError("ranks disagree on an exchange with neighbors:\n  " + "\n  ".join(problems))


def _written(exchange: Exchange, tensors: Sequence[Tensor]) -> list[int]:
    # neighbor_allgather concatenates on dimension 0, which may differ.
    first = 1 if exchange.nodes is GATHERING_RANKS else 0
    return [
        _OPERATIONS.index(exchange.nodes.operation),
        digest(str([(str(tensor.dtype), *tensor.shape[first:]) for tensor in tensors])),
        exchange.digest,
        len(exchange.sources),
        *(source for source, _ in exchange.sources),
        *(destination for destination, _ in exchange.destinations),
    ]


def _read(numbers: list[int]) -> _Request:
    operation, tensors, plan, count = numbers[:4]
    peers = numbers[4:]
    return _Request(_OPERATIONS[operation], tensors, plan, peers[:count], peers[count:])


def _different_operations(requests: list[_Request]) -> Iterable[str]:
    if len({request.operation for request in requests}) > 1:
        for rank, request in enumerate(requests):
            yield f"rank {rank} calls {request.operation}"


def _divided_machines(machines: list[list[int]], requests: list[_Request]) -> Iterable[str]:
    for machine, ranks in enumerate(machines):
        for rank in ranks[1:]:
            if requests[rank].plan != requests[ranks[0]].plan:
                yield (
                    f"ranks {ranks[0]} and {rank} of machine {machine} differ in self_weight, "
                    "src_machine_weights or dst_machine_weights"
                )


def _one_sided_edges(exchange: Exchange, nodes: list[_Request]) -> Iterable[str]:
    node, source, destination = exchange.nodes.node, exchange.nodes.sources, exchange.nodes.destinations
    for i, sender in enumerate(nodes):
        for j, receiver in enumerate(nodes):
            sends, receives = j in sender.destinations, i in receiver.sources
            if sends and not receives:
                yield (
                    f"{node} {i} sends to {node} {j} ({destination}), "
                    f"but {node} {j} does not receive from {node} {i} ({source})"
                )
            elif receives and not sends:
                yield (
                    f"{node} {j} receives from {node} {i} ({source}), "
                    f"but {node} {i} does not send to {node} {j} ({destination})"
                )


def _misfits(context: Context, exchange: Exchange, requests: list[_Request]) -> list[tuple[int, int]]:
    """Pairs of sender and receiver whose tensors differ; of all ranks where machines exchange."""
    if exchange.nodes is MACHINES:
        return [(0, r) for r in range(1, context.size) if requests[r].tensors != requests[0].tensors]
    return [
        (i, j)
        for i, sender in enumerate(requests)
        for j in sender.destinations
        if i in requests[j].sources and sender.tensors != requests[j].tensors
    ]


def _misfit(sender: int, receiver: int, texts: list[str]) -> str:
    sent, held = (texts[rank].split(_SEPARATOR) for rank in (sender, receiver))
    if len(sent) != len(held):
        return f"rank {sender} sends {len(sent)} tensors to rank {receiver}, which has {len(held)}"
    place = next((place for place, pair in enumerate(zip(sent, held, strict=True)) if pair[0] != pair[1]), 0)
    item = f" as tensor[{place}]" if len(sent) > 1 else ""
    return f"rank {sender} sends {sent[place]}{item} to rank {receiver}, which has {held[place]}"


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
