"""Checks whether the ranks of a group agree, by one sum of fixed size. Ranks gather data only if they disagree.

An edge represents a fact that two ranks must agree on. The rank at one end adds a mark of the fact, and the rank at the
other end subtracts its own mark. The sum over the group is zero if both ends of all edges match; otherwise it is zero
with a probability of 2^-128. To check that all ranks give the same value, the edges form a ring of the ranks.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from fog_pg._C import ProcessGroupFog

# Two numbers of 64 bits; sums and products are elementwise, modulo 2^64.
Pair: TypeAlias = "tuple[int, int]"
# The mark of the ends of edges, and the mark of the contents that must match at both ends.
Claim: TypeAlias = "tuple[Pair, Pair]"

# The most versions that an error message shows, and in each version the most items that differ.
_SHOWN_VERSIONS = 4
_SHOWN_ITEMS = 5
_SEPARATOR = "\0"


def check_same_everywhere(backend: ProcessGroupFog, argument: str, items: Sequence[str]) -> None:
    """Raises the same error on all ranks of a group unless all give the same items. Collective and blocking.

    Args:
        backend: The group's backend.
        argument: Name of the argument that the items describe, for the message.
        items: The items, each of them once, without null characters.

    Raises:
        ValueError: On all ranks alike; the message names the ranks that differ and the items that differ.
        torch.distributed.DistBackendError: A rank has not reached this check within the group's timeout, or
            has called another operation.
    """
    try:
        ranks_of = different_ranks(backend, digest(_SEPARATOR.join(items)))
        if not ranks_of:
            return
        shown = ranks_of[:_SHOWN_VERSIONS]
        speaks = backend.rank() in [ranks[0] for ranks in shown]
        items_of = [each for each in gather(backend, list(items) if speaks else None) if each is not None]
    except dist.DistBackendError as error:
        raise dist.DistBackendError(f"while all ranks compare their {argument}: {error}") from error
    common = set(items_of[0]).intersection(*items_of[1:])
    lines = [
        f"only on ranks {ranks}: {some(special)}"
        for ranks, version in zip(shown, items_of, strict=True)
        if (special := [item for item in version if item not in common])
    ]
    if len(ranks_of) > len(shown):
        lines.append(f"and {len(ranks_of) - len(shown)} more versions")
    raise ValueError(
        f"{argument} must be the same on all ranks, but differs between the ranks "
        f"{' and '.join(str(ranks) for ranks in ranks_of)}:\n  " + "\n  ".join(lines)
    )


def different_ranks(backend: ProcessGroupFog, text: str) -> list[list[int]]:
    """Returns the ranks of each version of a text, in order of their first ranks; an empty list if all are equal."""
    if agree(backend, [(ring(backend.rank(), backend.size()), mark(text))]):
        return []
    versions: dict[str, list[int]] = {}
    for rank, version in enumerate(gather(backend, text)):
        versions.setdefault(version, []).append(rank)
    return list(versions.values())


def agree(backend: ProcessGroupFog, claims: Iterable[Claim], name: str = "") -> bool:
    """Returns whether the claims of both ends match on all edges, on all ranks alike. Collective and blocking.

    Args:
        backend: The group's backend.
        claims: This rank's claims about its edges.
        name: Name of the operation; "" to match calls by their order.
    """
    sums = torch.tensor(total(claims), dtype=torch.uint64, device="cpu")
    backend.agree(sums, name=name).wait()
    return not any(sums.tolist())


def total(claims: Iterable[Claim]) -> Pair:
    """Returns the contribution of a rank's claims to the sum."""
    first = second = 0
    for ends, content in claims:
        first += ends[0] * content[0]
        second += ends[1] * content[1]
    return first % 2**64, second % 2**64


def edges(begun: Iterable[Hashable], ended: Iterable[Hashable]) -> Pair:
    """Returns the mark of a rank's outgoing and incoming edges, which are given by their names."""
    first = second = 0
    for sign, names in ((1, begun), (-1, ended)):
        for name in names:
            stands = mark(name)
            first += sign * stands[0]
            second += sign * stands[1]
    return first, second


@functools.lru_cache(maxsize=64)
def ring(place: int, size: int, *which: Hashable) -> Pair:
    """Returns the `edges` of a place in a ring of `size`; `which` names the ring."""
    return edges([("ring", *which, (place + 1) % size)], [("ring", *which, place)])


@functools.lru_cache(maxsize=4096)
def mark(*what: Hashable) -> Pair:
    """Returns the mark of the arguments, the same in every process."""
    number = int(digest(repr(what)), 16)
    # Odd numbers are invertible modulo 2^64, so a product with one loses no bits.
    return number % 2**64 | 1, number >> 64 | 1


def digest(text: str) -> str:
    """Returns a hash of 128 bits of a text as hexadecimal digits, the same in every process."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def gather(backend: ProcessGroupFog, value: Any, name: str = "") -> list[Any]:
    """Returns the values of all ranks, of JSON's types, in order of ranks; collective, arguments as of `agree`."""
    line = list(json.dumps(value).encode() + b"\n")
    work = backend.allgather_concat(torch.tensor(line, dtype=torch.uint8, device="cpu"), name=name)
    work.wait()
    table: torch.Tensor = work.get_future().value()[0]
    return [json.loads(line) for line in bytes(table.tolist()).splitlines()]


def some(items: Sequence[str], separator: str = ", ") -> str:
    """Returns the first of some items as text, and how many more there are."""
    more = len(items) - _SHOWN_ITEMS
    return separator.join(items[:_SHOWN_ITEMS]) + (f" and {more} more" if more > 0 else "")
