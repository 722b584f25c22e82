"""Handles of operations in flight, of any group: integers that a script polls and waits for.

Until it is waited for, a handle keeps the operation and its output. Windows and collectives share their handles.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fogdist.context import current

Function = Callable[..., Any]
# An operation in flight, and what returns its output once it is complete.
Begun = tuple[dist.Work, Callable[[dist.Work], Any]]
FOR_SCRIPTS = ("poll", "synchronize", "wait", "win_cancel", "win_poll", "win_wait")

# There is one counter per process, so a handle from before `shutdown` never refers to an operation after the next
# `init`.
_numbers = itertools.count()
# The operations for which `wait` was not called yet, each with what returns its output once it is complete.
_in_flight: dict[int, Begun] = {}


def add(work: dist.Work, finish: Callable[[dist.Work], Any]) -> int:
    """Returns a new handle; `finish` is called once with the completed work, and returns what `wait` returns."""
    handle = next(_numbers)
    _in_flight[handle] = work, finish
    return handle


def forms(
    begin: Callable[..., Begun], name: str, *first: Any, doc: str | None = None
) -> tuple[Function, Function]:
    """Returns the form of an operation that waits for it, which has this name, and the one that returns a handle.

    `begin` begins the operation, with the arguments `first` and those of a call. `doc` is by default its docstring.
    """

    def waits(*arguments: Any, **options: Any) -> Any:
        work, finish = begin(*first, *arguments, **options)
        work.wait()
        return finish(work)

    def starts(*arguments: Any, **options: Any) -> int:
        return add(*begin(*first, *arguments, **options))

    waits.__name__, waits.__doc__ = name, doc or begin.__doc__
    base = name.rstrip("_")
    starts.__name__, starts.__doc__ = (
        f"{base}_nonblocking{name[len(base) :]}",
        f"Starts `{name}` and returns its handle.",
    )
    waits.__module__ = starts.__module__ = begin.__module__
    return waits, starts


def settle() -> None:
    """Waits until all operations are complete, successfully or not. Their handles stay valid."""
    for work, _ in list(_in_flight.values()):
        with contextlib.suppress(RuntimeError):  # `wait` raises it
            work.wait()


def forget_all() -> None:
    """Makes all handles invalid."""
    _in_flight.clear()


def poll(handle: int) -> bool:
    """Returns whether an operation is complete, whether well or not. A bad handle is a ValueError."""
    return bool(_in_flight[_known(handle)][0].is_completed())


def wait(handle: int) -> Any:
    """Waits for an operation, frees its handle (also if the operation failed) and returns its output.

    That is a tensor, or a list of tensors where the operation was given a list; True of a window's operation. A
    handle that is unknown or was waited for already is a ValueError.
    """
    work, finish = _in_flight.pop(_known(handle))
    work.wait()
    return finish(work)


synchronize = wait
win_poll = poll


def win_wait(handle: int) -> bool:
    """As `wait`, but returns False, with a warning, if the handle is unknown or was waited for already."""
    if not _knows(handle):
        warnings.warn(f"win_wait: {_UNKNOWN}, got {handle}", stacklevel=2)
        return False
    wait(handle)
    return True


def win_cancel(handle: int) -> None:
    """Frees a handle that will not be waited for, as asyncddp does. Its operation continues; an unknown handle is ignored."""
    _in_flight.pop(handle, None)


_UNKNOWN = "handle must be of an operation in flight that was not waited for"


def _knows(handle: int) -> bool:
    if not isinstance(handle, int) or isinstance(handle, bool):
        raise TypeError(f"handle must be an int from a nonblocking call, got {type(handle).__name__}")
    if handle in _in_flight:
        return True
    current()  # raises before `init` and after `shutdown`
    return False


def _known(handle: int) -> int:
    if not _knows(handle):
        raise ValueError(f"{_UNKNOWN}, got {handle}")
    return handle
