"""Ownership of tensors: only one optimizer, algorithm or wrapper may train a tensor, as two would both mix it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from torch import Tensor

# No weak references to tensors: `torch.utils.swap_tensors` refuses those that have any.
_all: weakref.WeakSet[Ownership] = weakref.WeakSet()


@runtime_checkable
class Replaceable(Protocol):
    """An owner that releases its tensors when another one takes over."""

    def _fog_give_up(self) -> None: ...


class Ownership:
    """The tensors of an owner while it and this object live. Other owners cannot get them, or take them over.

    Args:
        owner: The owner, which may have the same tensors in several ownerships.
        takes_over: Whether `owner` may have tensors of an owner that is `Replaceable`, which `take_over` then ends.
    """

    def __init__(self, owner: object, *, takes_over: bool = False) -> None:
        self._owner = weakref.ref(owner)
        self._takes_over = takes_over
        self._tensors: dict[Tensor, str] = {}
        _all.add(self)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, in the order of the calls of `take`."""
        return list(self._tensors)

    def take(self, labels: Mapping[Tensor, str]) -> None:
        """Takes more tensors. Until `take_over`, their previous owners have them too.

        Args:
            labels: The tensors, with their names for the message.

        Raises:
            ValueError: One has another living owner that may not be replaced.
        """
        if self._kept(labels) is not None:
            gc.collect()  # a dropped owner may be part of a reference cycle
            label = self._kept(labels)
            if label is not None:
                raise ValueError(
                    f"{label} must belong to one distributed optimizer, algorithm or wrapper, got it while another one "
                    "has it: both would mix it in each step. Delete that one before (`del`), or end it (`close`)"
                )
        self._tensors.update(labels)

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Releases the tensors if an owner's construction fails; the error's traceback keeps the owner alive."""
        try:
            yield
        except BaseException:
            self.release()
            raise

    def take_over(self) -> None:
        """Ends the tensors' previous owners. Call it after ranks agree."""
        for other in {id(other): other for other, _ in self._others(self._tensors)}.values():
            if isinstance(other, Replaceable):
                other._fog_give_up()

    def release(self) -> None:
        """Releases the tensors."""
        self._tensors.clear()

    def _others(self, labels: Mapping[Tensor, str]) -> list[tuple[object, str]]:
        """Returns the other owners of tensors, with the name of one that each has."""
        found = []
        for ownership in list(_all):
            other = ownership._owner()
            shared = (label for tensor, label in labels.items() if tensor in ownership._tensors)
            if other is not None and other is not self._owner() and (label := next(shared, None)):
                found.append((other, label))
        return found

    def _kept(self, labels: Mapping[Tensor, str]) -> str | None:
        """Returns the name of a tensor whose owner may not be replaced."""
        kept = (
            label
            for other, label in self._others(labels)
            if not (self._takes_over and isinstance(other, Replaceable))
        )
        return next(kept, None)
