"""Ownership of tensors: only one optimizer, algorithm or wrapper may train a tensor, as two would both mix it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# The ownership and the owner of a tensor, which count only while both are alive.
_Holder = tuple["weakref.ref[Ownership]", "weakref.ref[object]"]
_holders: WeakIdKeyDictionary = WeakIdKeyDictionary()


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
        self._tensors: list[Tensor] = []
        self._displaced: dict[Tensor, _Holder] = {}  # the previous holders, until `take_over`

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, in the order of the calls of `take`."""
        return list(self._tensors)

    def check_free(self, labels: Mapping[Tensor, str]) -> None:
        """Raises ValueError if a tensor has another living owner that may not be replaced.

        Args:
            labels: The tensors, with their names for the message.
        """
        if self._held(labels) is None:
            return
        gc.collect()  # a dropped owner may be part of a reference cycle
        label = self._held(labels)
        if label is not None:
            raise ValueError(
                f"{label} must belong to one distributed optimizer, algorithm or wrapper, got it while another one has "
                "it: both would mix it in each step. Delete that one before (`del`), or end it (`close`, "
                "`unregister_window`)"
            )

    def take(self, labels: Mapping[Tensor, str]) -> None:
        """Takes more tensors; arguments and errors of `check_free`."""
        owner = self._owner()
        if owner is None:
            return
        self.check_free(labels)
        for tensor in labels:
            if tensor in _holders:
                self._displaced[tensor] = _holders[tensor]
            _holders[tensor] = weakref.ref(self), weakref.ref(owner)
        self._tensors.extend(labels)

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Releases the tensors if an owner's construction fails; the error's traceback keeps the owner alive."""
        try:
            yield
        except BaseException:
            self.release()
            raise

    def take_over(self) -> None:
        """Ends the tensors' previous owners. Call it after ranks agree: until then `release` gives the tensors back."""
        displaced, self._displaced = self._displaced, {}
        ended: list[object] = [self._owner()]
        for _, reference in displaced.values():
            other = reference()
            if isinstance(other, Replaceable) and not any(other is each for each in ended):
                ended.append(other)
                other._fog_give_up()

    def release(self) -> None:
        """Releases the tensors. Before `take_over` they go back to their previous owners."""
        displaced, self._displaced = self._displaced, {}
        for tensor in self._tensors:
            if tensor in _holders and _holders[tensor][0]() is self:
                del _holders[tensor]
                if tensor in displaced:
                    _holders[tensor] = displaced[tensor]

    def _held(self, labels: Mapping[Tensor, str]) -> str | None:
        owner = self._owner()
        for tensor, label in labels.items():
            if tensor in _holders:
                ownership, reference = _holders[tensor]
                other = reference()
                if ownership() is None or other is None or other is owner:
                    continue
                if not (self._takes_over and isinstance(other, Replaceable)):
                    return label
        return None
