"""The collective check that the ranks' arguments describe the same dynamic exchange.

The check is a sum of fixed size. The ranks gather their arguments, for the message, only if they disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from fogdist.agreement import Claim, agree, gather, mark, ring
from fogdist.context import Context
from fogdist.exchange import GATHERING_RANKS, MACHINES, Exchange


def verify(context: Context, exchange: Exchange, tensors: Sequence[Tensor], name: str) -> None:
    """Checks that all ranks agree on a dynamic exchange. Collective and blocking.

    Args:
        context: The group.
        exchange: The exchange that this rank requests.
        tensors: The tensors that this rank sends.
        name: Name of the operation, or "".

    Raises:
        ValueError: On all ranks alike. The message lists the edges that only one end requests, the edges whose tensors do
            not match, and the machines whose ranks request different exchanges.
    """
    name = f"{name}.check" if name else ""
    places = context.machines if exchange.nodes is MACHINES else None
    if agree(context.backend, claims(exchange, tensors, context.rank, context.size, places), name):
        return
    asked = {
        "operation": exchange.nodes.operation,
        "tensors": [_describe(tensor) for tensor in tensors],
        "fits": str(_fitting(exchange, tensors)),
        "weights": str(exchange.weights),
        "sources": [source for source, _ in exchange.sources],
        "destinations": [destination for destination, _ in exchange.destinations],
    }
    problems = list(_problems(exchange, gather(context.backend, asked, name), places))
    if problems:
        raise ValueError("ranks disagree on an exchange with neighbors:\n  " + "\n  ".join(problems))


def claims(
    exchange: Exchange, tensors: Sequence[Tensor], rank: int, size: int, machines: list[list[int]] | None
) -> list[Claim]:
    """Returns the claims of a rank. They do not contain the call itself, because messages are matched by the call.

    Args:
        exchange: The exchange that the rank requests.
        tensors: The tensors that the rank sends.
        rank: The rank.
        size: The size of the group.
        machines: The ranks of each machine, for an exchange between machines.
    """
    operation = exchange.nodes.operation
    fits = mark(operation, _fitting(exchange, tensors))
    if machines is None:
        return [(exchange.edges, fits), (ring(rank, size), mark(operation))]
    ranks = machines[exchange.node]
    same = ring(ranks.index(rank), len(ranks), "machine", exchange.node)
    claimed = [(ring(rank, size), fits), (same, mark(exchange.weights))]
    return [*claimed, (exchange.edges, mark(operation))] if rank == ranks[0] else claimed


def _fitting(exchange: Exchange, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    # neighbor_allgather concatenates on dimension 0, which may differ.
    first = 1 if exchange.nodes is GATHERING_RANKS else 0
    return tuple((tensor.dtype, tensor.shape[first:]) for tensor in tensors)


def _problems(
    exchange: Exchange, asked: list[dict[str, Any]], machines: list[list[int]] | None
) -> Iterable[str]:
    if len({each["operation"] for each in asked}) > 1:
        yield from (f"rank {rank} calls {each['operation']}" for rank, each in enumerate(asked))
        return
    nodes = asked
    if machines is not None:
        nodes = [asked[ranks[0]] for ranks in machines]
        for machine, ranks in enumerate(machines):
            for rank in ranks[1:]:
                if asked[rank]["weights"] != asked[ranks[0]]["weights"]:
                    yield (
                        f"ranks {ranks[0]} and {rank} of machine {machine} differ in self_weight, "
                        "src_machine_weights or dst_machine_weights"
                    )
    node, source, destination = exchange.nodes.node, exchange.nodes.sources, exchange.nodes.destinations
    sent = {(i, j) for i, each in enumerate(nodes) for j in each["destinations"]}
    received = {(i, j) for j, each in enumerate(nodes) for i in each["sources"]}
    for i, j in sorted(sent ^ received):
        if (i, j) in sent:
            yield (
                f"{node} {i} sends to {node} {j} ({destination}), "
                f"but {node} {j} does not receive from {node} {i} ({source})"
            )
        else:
            yield (
                f"{node} {j} receives from {node} {i} ({source}), "
                f"but {node} {i} does not send to {node} {j} ({destination})"
            )
    # In an exchange between machines all ranks take part.
    pairs = sorted(sent & received) if machines is None else [(0, rank) for rank in range(1, len(asked))]
    for i, j in pairs:
        if asked[i]["fits"] != asked[j]["fits"]:
            yield _misfit(i, j, asked[i]["tensors"], asked[j]["tensors"])


def _misfit(sender: int, receiver: int, sent: list[str], held: list[str]) -> str:
    if len(sent) != len(held):
        return f"rank {sender} sends {len(sent)} tensors to rank {receiver}, which has {len(held)}"
    place = next((place for place, pair in enumerate(zip(sent, held, strict=True)) if pair[0] != pair[1]), 0)
    item = f" as tensor[{place}]" if len(sent) > 1 else ""
    return f"rank {sender} sends {sent[place]}{item} to rank {receiver}, which has {held[place]}"


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
