"""An object that takes part in exchanges in step with other ranks, through losses and joins."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from fogdist.context import Context

if TYPE_CHECKING:
    from fogdist.elastic.membership import Members
    from fogdist.elastic.protocol import Decision


class Joinable(Protocol):
    """The state of an object that a process gets when it joins."""

    def save(self) -> dict[str, Any]:
        """Returns the values; tensors may change later."""

    def load(self, state: dict[str, Any]) -> None:
        """Takes the values that another rank has saved."""

    def counts(self) -> dict[str, int]:
        """Returns the numbers that are the same on all ranks at the beginning of an exchange.

        All that decides which operations with other ranks follow is among them: a process that joins has the values of
        `load` from an earlier exchange, and those of the ranks' decision here.
        """

    def set_counts(self, counts: dict[str, int]) -> None:
        """Sets these numbers to those of the other ranks, before the first exchange with them."""


class Participant:
    """One object that makes exchanges in step with the same object of other ranks.

    Exchanges are numbered by `take`, and completed in that order. Both must be the same on all ranks.

    Attributes:
        name: The same on all ranks.
        completed: The number of exchanges completed, or given up, on this rank.
        resume: Exchanges with smaller numbers are given up, because other ranks have completed them already.
        told: What each rank has told of its `Joinable.counts` in the last agreement round.
    """

    def __init__(self, members: Members, name: str, state: Joinable | None) -> None:
        self._members = members
        self.name = name
        self.state = state
        self._begun: tuple[int, dict[str, int]] | None = None
        self.completed = self.resume = 0
        self.told: list[dict[str, int]] = []
        self._taken = 0
        self._listener: weakref.WeakMethod[Callable[[], None]] | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the membership that the rank knows of."""
        return self._members.epoch

    @property
    def context(self) -> Context:
        """The group of the living."""
        return self._members.context

    def take(self) -> int:
        """Returns the number of the next exchange."""
        self._taken += 1
        return self._taken - 1

    def enter(self) -> bool:
        """Call it where a rank can join, before an exchange (or a step with several) is begun.

        On a rank of the job it looks for joiners, which costs a comparison if there is none. On a process that joins
        it gets the state of all objects, and joins the others.

        Returns:
            Whether this process has joined just now.
        """
        self._begun = self._now()  # before an agreement round, which tells a process that joins to begin here
        has_joined = self._members.enter(self)
        if has_joined:
            self._begun = self._now()
        return has_joined

    def report(self) -> dict[str, Any]:
        """Returns what an agreement round has to know of this participant."""
        first, counts = self._begun or self._now()
        return {"completed": self.completed, "taken": self._taken, "first": first, "counts": counts}

    def _now(self) -> tuple[int, dict[str, int]]:
        return self._taken, {} if self.state is None else self.state.counts()

    def start_at(self, number: int, report: Mapping[str, Any] | None) -> None:
        """Takes up the exchanges of the others, on a process that joins.

        Args:
            number: Where all go on.
            report: Of a rank that is there.
        """
        self._taken = self.completed = number if report is None else report["first"]
        self.resume = number
        if report is not None and self.state is not None:
            self.state.set_counts(report["counts"])

    def on_change(self, listener: Callable[[], None]) -> None:
        """Sets a method that is called after each change of the membership, before an exchange is repeated."""
        self._listener = weakref.WeakMethod(listener)

    def agree(self, failure: BaseException) -> None:
        """Agrees on the next membership with the other ranks, after an exchange of this epoch has failed.

        Raises:
            torch.distributed.DistBackendError: As `reconfigure`.
        """
        # Usually the group has failed. If not, the ranks that do not know of the loss learn of it by this.
        context = self._members.context
        if not context.is_joining:  # its first group is none of the job's
            context.backend.abort()
        self._members.agree(failure)

    def tell_of_change(self, decision: Decision) -> None:
        """Calls the listener after a change of the membership.

        Args:
            decision: The change.
        """
        reports = (objects.get(self.name) for objects in decision.living.values())
        self.told = [report["counts"] for report in reports if report is not None]
        listener = None if self._listener is None else self._listener()
        if listener is not None:
            listener()
