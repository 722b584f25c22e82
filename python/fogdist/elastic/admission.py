"""How the ranks of a job answer processes that join; see `fogdist.elastic.tickets`."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from fog_pg import _extension
from fogdist.elastic.protocol import Action, Give, Refuse, Request
from fogdist.elastic.tickets import COUNT, FIRST, NONCE, delete, key, proof_of, request_from, signed
from fogdist.elastic.transfer import Offer

_log = logging.getLogger("fogdist")

# A ticket without a request to the rank that answers is over after this time, in seconds. A joiner takes a ticket a moment
# before it asks, and asks anew when another rank answers, within half a second.
_EMPTY_TIMEOUT = 60.0


class Admission:
    """Looks for joiners, on a rank of the job.

    Args:
        store: That of the first group.
        group: The id of the first group.

    Attributes:
        store: The same.
        told_epoch: The epoch of which this rank has told the Store that it answers joiners; -1 for none.
    """

    def __init__(self, store: dist.Store, group: int) -> None:
        self.store, self._group = store, group
        self.told_epoch = -1
        extension = _extension.load()
        self._announced, self._is_there = extension.announced, extension.announce
        self._seen = self._epoch = 0
        self._nonce = secrets.token_hex(16)
        self._over: set[int] = set()
        # Tickets without a request to this rank, and when they were first seen.
        self._silent: dict[int, float] = {}
        self._copies: dict[int, Offer] = {}

    def is_quiet(self, epoch: int) -> bool:
        """Returns whether nothing has happened since the last poll. It asks nobody, and makes no system call."""
        return self._announced() == self._seen and epoch == self._epoch

    def answers(self) -> bool:
        """Returns whether joiners know that this rank answers; before, another one may have done so."""
        return bool(
            self.store.check([NONCE]) and self.store.get(NONCE).decode(errors="replace") == self._nonce
        )

    def publish_nonce(self) -> None:
        """Tells joiners the random number that their proofs must contain, on the rank that answers."""
        self.store.set(NONCE, self._nonce)

    def leave_to_another(self, epoch: int) -> None:
        """Does nothing for joiners, because another rank answers in this epoch."""
        self._seen, self._epoch = self._announced(), epoch
        for ticket in list(self._copies):
            self._close(ticket)

    def poll(
        self,
        epoch: int,
        asked: Callable[[Request, bool, bool], Sequence[Action]],
        save: Callable[[], Mapping[str, Any]],
        living: Sequence[int],
    ) -> None:
        """Answers joiners.

        Args:
            epoch: The present one.
            asked: Returns what is to be done for a joiner, which is ready or not, and was given a state or not.
            save: Returns the state for a joiner; its tensors may change later.
            living: The ranks that a joiner must reach; this one is the first.
        """
        self._seen, self._epoch = self._announced(), epoch
        last = self.store.add(COUNT, 0)
        first = self._first()
        for ticket in range(first, last + 1):
            if ticket in self._over:
                continue
            if not self._has(ticket, "request"):
                self._close(ticket)  # its process has left it, and asks anew
                self._end_if_silent(ticket)
                continue
            try:
                text = self.store.get(key(ticket, "request")).decode(errors="replace")
                request = request_from(self._group, ticket, text)
            except ValueError as error:
                self._refuse(ticket, str(error))
                continue
            try:
                is_there = self._is_still_there(request)
            except (ValueError, RuntimeError) as error:
                self._refuse(ticket, f"its address cannot be read: {error}")
                continue
            if not is_there or self._has(ticket, "admitted"):
                self._end(ticket)
                continue
            if request.challenge != self._nonce:
                self._end_if_silent(ticket)  # it asks again, with this rank's number
                continue
            self._silent.pop(ticket, None)
            for action in asked(request, self._has(ticket, "ready"), self._has(ticket, "answer")):
                match action:
                    case Refuse(_, reason):
                        self._refuse(ticket, reason)
                    case Give():
                        self._give(request, save, living)
        before = first
        while first in self._over:
            self._over.discard(first)
            self._silent.pop(first, None)
            first += 1
        if first > before:
            self.store.set(FIRST, str(first))

    def admit(self, request: Request, decision: Mapping[str, Any]) -> None:
        """Tells a joiner what the ranks have decided."""
        self._tell(request, "admitted", decision)
        self._end(request.ticket)

    def _is_still_there(self, request: Request) -> bool:
        """Returns whether a joiner has not ended, as far as that is known."""
        if _extension.load().read_entry(request.entry)["is_visible"]:
            return bool(self._is_there(request.entry))
        copy = self._copies.get(request.ticket)
        return copy is None or copy.is_wanted

    def _give(self, request: Request, save: Callable[[], Mapping[str, Any]], living: Sequence[int]) -> None:
        """Gives a joiner a copy of the state of this rank, or refuses it if there is no memory or file for that."""
        ticket, extension = request.ticket, _extension.load()
        try:
            addresses = extension.read_entry(extension.own_entry())["addresses"]
            prove = partial(proof_of, group=self._group, ticket=ticket)
            copy = self._copies[ticket] = Offer(save(), addresses, prove)
        except Exception as error:
            _log.exception("the state for a process that joins could not be copied")
            self._refuse(
                ticket, f"rank {living[0]} could not copy its state: {type(error).__name__}: {error}"
            )
            return
        self._tell(request, "answer", {**copy.place, "living": list(living)})

    def _tell(self, request: Request, what: str, values: Mapping[str, Any]) -> None:
        """Tells a joiner values, with the proof that they come from the job."""
        text = signed(what, values, request.nonce, group=self._group, ticket=request.ticket)
        self.store.set(key(request.ticket, what), text)

    def _first(self) -> int:
        """Returns the first ticket that is not over."""
        with contextlib.suppress(ValueError):
            return max(int(self.store.get(FIRST)), 1) if self.store.check([FIRST]) else 1
        return 1

    def _refuse(self, ticket: int, reason: str) -> None:
        _log.warning("a process that wants to join (ticket %d) is refused: %s", ticket, reason)
        self.store.set(key(ticket, "refused"), reason)
        self._end(ticket)

    def _has(self, ticket: int, what: str) -> bool:
        return bool(self.store.check([key(ticket, what)]))

    def _end(self, ticket: int) -> None:
        """Ends a ticket; what the joiner has not read yet, it deletes itself."""
        self._over.add(ticket)
        delete(self.store, ticket, "request", "answer", "ready")
        self._close(ticket)

    def _end_if_silent(self, ticket: int) -> None:
        """Ends a ticket whose process has asked for nothing that this rank answers, for a long time."""
        if time.monotonic() > self._silent.setdefault(ticket, time.monotonic()) + _EMPTY_TIMEOUT:
            self._end(ticket)

    def _close(self, ticket: int) -> None:
        """Ends the copy of a ticket, if there is one."""
        if (copy := self._copies.pop(ticket, None)) is not None:
            copy.close()
