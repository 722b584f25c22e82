"""Actions of every rank that succeed or fail on all ranks alike, such as reading and writing files."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from fogdist.agreement import gather
from fogdist.context import Context

_Result = TypeVar("_Result")

# The types that a caller may tell apart; any other error of a rank is a RuntimeError on all ranks.
_KINDS: dict[str, type[Exception]] = {"TypeError": TypeError, "ValueError": ValueError}


def together(context: Context, what: str, action: Callable[[], _Result]) -> _Result:
    """Runs an action on this rank and returns its result if no rank's action failed. Collective.

    Args:
        context: The group.
        what: What the ranks do, for messages, such as "write the checkpoint of step 7".
        action: It must not communicate.

    Raises:
        OSError: A rank's action failed so; the message names the ranks. ValueError, TypeError and RuntimeError alike.
        torch.distributed.DistBackendError: A rank did not come.
    """
    failure: Exception | None = None
    result: Any = None
    try:
        result = action()
    except Exception as error:
        failure = error
    ranks_of: dict[tuple[str, int, str], list[str]] = {}
    for rank, described in enumerate(tell(context, what, failure and _described(failure))):
        if described is not None:
            ranks_of.setdefault(tuple(described), []).append(str(rank))
    if ranks_of:
        lines = [
            text
            if len(ranks) == context.size
            else f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}: {text}"
            for (_, _, text), ranks in ranks_of.items()
        ]
        kind, number, _ = next(iter(ranks_of))
        message = f"could not {what}: {'; '.join(lines)}"
        raise (OSError(number, message) if number else _KINDS.get(kind, RuntimeError)(message)) from failure
    return result  # type: ignore[no-any-return]


def tell(context: Context, what: str, value: Any) -> list[Any]:
    """Returns the values of all ranks, of JSON's types, in order of ranks. Collective; arguments as of `together`."""
    try:
        return gather(context.backend, value)
    except dist.DistBackendError as error:
        raise dist.DistBackendError(f"while all ranks {what}: {error}") from error


def _described(error: Exception) -> tuple[str, int, str]:
    """Returns an error's type, its number if the system reported it, and its text."""
    kind = next((name for name, base in _KINDS.items() if isinstance(error, base)), type(error).__name__)
    seen: BaseException | None = None if kind in _KINDS else error
    while seen is not None:  # torch's writer of zip files hides the error of the file below
        if isinstance(seen, OSError):
            return "OSError", seen.errno or errno.EIO, str(seen)
        seen = seen.__cause__ or seen.__context__
    return kind, 0, str(error) or kind
