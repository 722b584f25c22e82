"""Handles of operations in flight, of any group: integers that a caller polls and waits for.

Until it is waited for, a handle keeps everything alive that its operation needs, including the tensors that it reads.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

# There is one counter per process, so a handle from before `shutdown` never refers to an operation after the next
# `init`.
_numbers = itertools.count()


class _InFlight(NamedTuple):
    work: dist.Work
    finish: Callable[[dist.Work], Any]
    reads: tuple[Tensor, ...]


class HandleTable:
    """The operations for which `wait` was not called yet, from `init` to `shutdown`."""

    def __init__(self) -> None:
        self._in_flight: dict[int, _InFlight] = {}

    def add(self, work: dist.Work, finish: Callable[[dist.Work], Any], *reads: Tensor) -> int:
        """Returns a new handle.

        Args:
            work: The operation.
            finish: Called once with the completed work; returns what the user gets from `wait`.
            reads: Tensors that must live as long as the operation.
        """
        handle = next(_numbers)
        self._in_flight[handle] = _InFlight(work, finish, reads)
        return handle

    def poll(self, handle: int) -> bool:
        """Returns whether the operation is complete, whether well or not; `wait` tells which.

        Raises:
            TypeError: `handle` is not an integer.
            ValueError: No operation in flight has this handle.
        """
        return bool(self._in_flight[self._known(handle)].work.is_completed())

    def wait(self, handle: int) -> Any:
        """Waits for the operation, frees the handle (also if the operation failed) and returns the output.

        Raises:
            TypeError: `handle` is not an integer.
            ValueError: No operation in flight has this handle.
            torch.distributed.DistBackendError: The operation failed.
        """
        operation = self._in_flight.pop(self._known(handle))
        operation.work.wait()
        return operation.finish(operation.work)

    def complete(self, handle: int) -> None:
        """Returns when the operation is complete, even if `wait` was called for it before.

        Raises:
            torch.distributed.DistBackendError: The operation failed.
        """
        if handle in self._in_flight:
            self._in_flight[handle].work.wait()

    def forget(self, handle: int) -> None:
        """Frees a handle that will not be waited for. Its operation continues and keeps its tensors alive itself."""
        self._in_flight.pop(handle, None)

    def settle(self) -> None:
        """Waits until all operations are complete, successfully or not. Their handles stay valid."""
        for operation in list(self._in_flight.values()):
            with contextlib.suppress(RuntimeError):  # `wait` raises it
                operation.work.wait()

    def knows(self, handle: int) -> bool:
        """Returns whether this is the handle of an operation for which `wait` was not called yet.

        Raises:
            TypeError: `handle` is not an integer.
        """
        if not isinstance(handle, int) or isinstance(handle, bool):
            raise TypeError(f"handle must be an int from a nonblocking call, got {type(handle).__name__}")
        return handle in self._in_flight

    def _known(self, handle: int) -> int:
        if not self.knows(handle):
            raise ValueError(
                f"handle must be of an operation in flight, got {handle}; it was waited for already, or it is no handle"
            )
        return handle
