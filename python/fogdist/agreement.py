"""What all ranks of a group must have given alike: one small exchange that says whether they did.

A rank sends 8 bytes. Only if ranks differ do they send more, so that the error can say how; it is then the
same error on all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

    from fog_pg._C import ProcessGroupFog

# What a message shows of a difference: versions, and of each version the items that not all others have.
_SHOWN_VERSIONS = 4
_SHOWN_ITEMS = 5
_SEPARATOR = "\0"


def check_same_everywhere(backend: ProcessGroupFog, argument: str, items: Sequence[str]) -> None:
    """Raises the same error on all ranks of a group unless all give the same items. Collective and blocking.

    Args:
        backend: The group's.
        argument: Name of what the items describe, for the message.
        items: Each once, without null characters.

    Raises:
        ValueError: On all ranks alike, with the ranks that differ and the items that not all have.
        torch.distributed.DistBackendError: A rank has not come to this check within the group's timeout, or
            has called something else.
    """
    if backend.size() == 1:
        return
    text = _SEPARATOR.join(items)
    try:
        versions: dict[int, list[int]] = {}
        for rank, number in enumerate(gather_numbers(backend, [digest(text)])):
            versions.setdefault(number[0], []).append(rank)
        if len(versions) == 1:
            return
        ranks_of = list(versions.values())
        shown = ranks_of[:_SHOWN_VERSIONS]
        speaks = backend.rank() in [ranks[0] for ranks in shown]
        texts = gather_texts(backend, text if speaks else "")
    except dist.DistBackendError as error:
        raise dist.DistBackendError(f"while all ranks compare their {argument}: {error}") from error
    items_of = [texts[ranks[0]].split(_SEPARATOR) for ranks in shown]
    common = set(items_of[0]).intersection(*items_of[1:])
    lines = [
        f"only on ranks {ranks}: {_some(special)}"
        for ranks, version in zip(shown, items_of, strict=True)
        if (special := [item for item in version if item not in common])
    ]
    if len(ranks_of) > len(shown):
        lines.append(f"and {len(ranks_of) - len(shown)} more versions")
    raise ValueError(
        f"{argument} must be the same on all ranks, but differs between the ranks "
        f"{' and '.join(str(ranks) for ranks in ranks_of)}:\n  " + "\n  ".join(lines)
    )


def digest(text: str) -> int:
    """Returns 64 bits that stand for a text, the same in every process, as a signed integer."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def gather_numbers(backend: ProcessGroupFog, numbers: Iterable[int], name: str = "") -> list[list[int]]:
    """Returns what every rank gave, in order of ranks. Collective and blocking.

    Args:
        backend: The group's.
        numbers: 64-bit integers; each rank may give as many as it likes.
        name: As of an operation; "" for the order of calls.
    """
    mine = list(numbers)
    counted = torch.tensor([len(mine), *mine], dtype=torch.int64, device="cpu")
    table = iter(_gather(backend, counted, name).tolist())
    return [[next(table) for _ in range(length)] for length in table]


def gather_texts(backend: ProcessGroupFog, text: str, name: str = "") -> list[str]:
    """Returns the text of every rank, in order of ranks; collective, arguments as of `gather_numbers`."""
    data = text.encode()
    lengths = [length for (length,) in gather_numbers(backend, [len(data)], name)]
    mine = torch.tensor(list(data), dtype=torch.uint8, device="cpu")
    table = bytes(_gather(backend, mine, name).tolist())
    texts, place = [], 0
    for length in lengths:
        texts.append(table[place : place + length].decode())
        place += length
    return texts


def _gather(backend: ProcessGroupFog, numbers: Tensor, name: str) -> Tensor:
    work = backend.allgather_concat(numbers, name=name)
    work.wait()
    result: Tensor = work.get_future().value()[0]
    return result


def _some(items: list[str]) -> str:
    more = len(items) - _SHOWN_ITEMS
    return ", ".join(items[:_SHOWN_ITEMS]) + (f" and {more} more" if more > 0 else "")
