"""How a process comes into a job that trains already; see `fogdist.elastic.tickets`."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from fog_pg import _extension, _joining, environment
from fog_pg._joining import World
from fogdist.elastic import protocol
from fogdist.elastic.protocol import Action, Ask, Fail, TakeTicket
from fogdist.elastic.tickets import COUNT, NONCE, delete, key, opened, proof_of, signed
from fogdist.elastic.transfer import Source

_log = logging.getLogger("fogdist")

# The pauses between two reads of the Store by a joiner, in seconds, and between two samples of the ranks' processes.
_PAUSE = 2e-3
_LIFE_PAUSE = 0.5
# How long ranks of other hosts may take to hear a joiner, before it asks anew which ranks are left.
_REACH_TIMEOUT = 3.0
# A joiner that has waited so long for an answer says so.
_WARN_AFTER = 30.0


class Joiner:
    """A process that joins a job.

    Args:
        world: The job.
        rank: Its rank there.
        timeout: For how long it waits for an answer, in seconds.
    """

    def __init__(self, world: World, rank: int, timeout: float) -> None:
        self.world = world
        self._store, self._rank, self._timeout = world.store, rank, timeout
        self.protocol = protocol.Joiner(rank, timeout, environment.HOST_TIMEOUT.get())
        self._is_anyone_left = True
        self._extension = _extension.load()
        self._entry = self._extension.own_entry()
        self._nonce = secrets.token_hex(16)
        self._objects: tuple[list[str], str] = [], ""
        self._ticket = 0
        self._asked = 0, ""  # the ticket, and the random number of the rank that answered
        self._calls = _Calls(self._extension.announce)
        self._source: Source | None = None
        self._failure = "the rank that gave it has ended"  # why no state came at last

    def pull(self, objects: Sequence[str], at: str) -> dict[str, Any]:
        """Returns the state that a rank of the job gives this process.

        Args:
            objects: The names of this process's objects.
            at: That at whose next exchange it wants to come in.

        Raises:
            torch.distributed.DistBackendError: It is refused; no rank is left; or the timeout.
        """
        self._objects = sorted(objects), at
        actions = self.protocol.start(time.monotonic())
        while True:
            self._do(actions)
            place = self._opened("answer", self._await("answer"))
            state = self._read(place)
            unreached = [] if state is None else self._not_reached(place["living"])
            actions = self.protocol.loaded(
                time.monotonic(), state is not None, self._described(unreached), self._failure
            )
            if state is not None and not actions:
                return state

    def enter(self) -> dict[str, Any]:
        """Says that this process is ready; returns the decision by which it is a member. Errors as of `pull`."""
        _joining.tell_stores()
        self._store.set(key(self._ticket, "ready"), "1")
        self._announce()
        return self._opened("admitted", self._await("admitted"))

    def entries(self, ranks: Sequence[int]) -> dict[int, str]:
        """Returns how to connect with these ranks of the job, as they are now."""
        end = time.monotonic() + _REACH_TIMEOUT
        while not (now := self._entries()).keys() >= set(ranks):  # they tell a new Store one after the other
            if time.monotonic() >= end:
                missing = sorted(set(ranks) - now.keys())
                raise self._error(f"the job's Store does not know how to reach the ranks {missing}")
            time.sleep(_PAUSE)
        return {rank: now[rank] for rank in ranks}

    def numbers(self) -> frozenset[int]:
        """Returns the numbers that processes of the job have or have had."""
        return frozenset([*range(self.world.size), *self._entries()])

    def leave(self) -> None:
        """Ends its ticket, when all ranks have taken it in or it has failed to join."""
        self._disconnect()
        with contextlib.suppress(RuntimeError):  # of the Store
            delete(self._store, self._ticket, "request", "answer", "ready", "admitted", "refused")

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case TakeTicket():
                    self._disconnect()
                    if self._ticket:
                        delete(self._store, self._ticket, "request", "answer")
                    self._ticket = self._store.add(COUNT, 1)
                case Ask():
                    self._request()
                case Fail(reason):
                    raise dist.DistBackendError(reason)

    def _request(self) -> None:
        """Asks the rank that answers, with its random number, if it has not yet."""
        challenge = self._store.get(NONCE).decode() if self._store.check([NONCE]) else ""
        if (self._ticket, challenge) != self._asked:
            self._asked = self._ticket, challenge
            objects, at = self._objects
            told: dict[str, Any] = {"rank": self._rank, "entry": self._entry, "objects": objects, "at": at}
            told |= {"nonce": self._nonce, "challenge": challenge}
            text = signed("request", told, group=self.world.id, ticket=self._ticket)
            self._store.set(key(self._ticket, "request"), text)
        self._announce()

    def _opened(self, purpose: str, text: str) -> dict[str, Any]:
        """Returns what a rank has told; raises DistBackendError if it does not come from one that knows the secret."""
        try:
            return opened(text, purpose, self._nonce, group=self.world.id, ticket=self._ticket)
        except (PermissionError, ValueError, TypeError, KeyError, RecursionError):
            raise dist.DistBackendError(
                f"the answer to this process, which joins as rank {self._rank}, does not come from a process that knows "
                "the job's secret"
            ) from None

    def _announce(self) -> None:
        """Draws the attention of all ranks."""
        left = [self._call(entry) for entry in self._others()]
        self._is_anyone_left = any(left)

    def _call(self, entry: str) -> bool:
        """Draws the attention of a rank; returns whether that one is left, as far as is known."""
        is_visible = self._extension.read_entry(entry)["is_visible"]
        return bool(self._extension.announce(entry)) if is_visible else self._calls.call(entry)

    def _others(self) -> list[str]:
        # One that has this process's number may run, and be the rank that answers.
        return [entry for entry in self._entries().values() if entry != self._entry]

    def _entries(self) -> dict[int, str]:
        return _joining.read_world(self._store, self.world.size).entries

    def _await(self, what: str) -> str:
        """Waits for a value of the ticket."""
        begin = looked = time.monotonic()
        has_warned = False
        while not self._store.check([key(self._ticket, what)]):
            if self._store.check([key(self._ticket, "refused")]):
                self._do(self.protocol.refused(self._store.get(key(self._ticket, "refused")).decode()))
            now = time.monotonic()
            if now >= looked + _LIFE_PAUSE:
                looked = now
                self._do(
                    self.protocol.sampled(
                        now, is_anyone_left=self._is_anyone_left, is_forgotten=self._is_forgotten(what)
                    )
                )
            if now >= begin + _WARN_AFTER and not has_warned:
                has_warned = True
                _log.warning(
                    "joining as rank %d: no answer yet; ranks answer when they begin an exchange", self._rank
                )
            time.sleep(_PAUSE)
        return self._store.get(key(self._ticket, what)).decode()

    def _is_forgotten(self, what: str) -> bool:
        """Returns whether its ticket is over, without a word to it."""
        if self._store.check([key(self._ticket, "request")]):
            return False
        # It was there when the ticket was ended, if it was.
        return not any(self._store.check([key(self._ticket, word)]) for word in (what, "refused"))

    def _read(self, place: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns the state at a place; None if the rank that gives it is gone."""
        try:
            prove = partial(proof_of, group=self.world.id, ticket=self._ticket)
            self._source = Source(place, prove)
            state = self._source.read(self._timeout)
            if state is None:
                raise dist.DistBackendError("the rank that answered could not write its state")
            return state
        except dist.DistBackendError as error:
            raise self._error(error) from None
        except OSError as error:
            self._failure = str(error)
            _log.info("joining as rank %d: no state came: %s", self._rank, error)
            return None

    def _disconnect(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None

    def _not_reached(self, living: Sequence[int]) -> list[int]:
        """Returns those of these ranks that have not heard this process, after some time for them to do so."""
        end = time.monotonic() + _REACH_TIMEOUT
        left = self.entries(living)
        while left:
            left = {rank: entry for rank, entry in left.items() if not self._has_heard(entry)}
            if time.monotonic() >= end:
                break
            time.sleep(_PAUSE)
        return sorted(left)

    def _has_heard(self, entry: str) -> bool:
        if self._extension.read_entry(entry)["is_visible"] or self._calls.was_heard(entry):
            return True
        self._calls.call(entry)
        return False

    def _described(self, ranks: Sequence[int]) -> str:
        entries = self.entries(ranks).items()
        hosts = {rank: self._extension.read_entry(entry)["host_name"] for rank, entry in entries}
        return ", ".join(f"rank {rank} on host {host}" for rank, host in hosts.items())

    def _error(self, reason: object) -> dist.DistBackendError:
        """Returns the error of a process that cannot join."""
        return dist.DistBackendError(f"this process cannot join the job as rank {self._rank}: {reason}")


class _Calls:
    """Calls for the attention of ranks of other hosts. Each has a thread, because a rank may not answer for seconds.

    Args:
        announce: Of the extension.
    """

    def __init__(self, announce: Callable[[str], bool]) -> None:
        self._announce = announce
        self._threads: dict[str, threading.Thread] = {}
        self._heard: dict[str, bool] = {}  # whether the last call to an entry was

    def call(self, entry: str) -> bool:
        """Calls a rank, unless a call is under way. Returns whether it heard the last call; True before that is known."""
        if entry not in self._threads or not self._threads[entry].is_alive():
            # No daemon: the end of the process waits for the call, which must not be torn out of the extension.
            thread = self._threads[entry] = threading.Thread(target=self._do, args=(entry,), daemon=False)
            thread.start()
        return self._heard.get(entry, True)

    def was_heard(self, entry: str) -> bool:
        """Returns whether the last call was heard."""
        return self._heard.get(entry, False)

    def _do(self, entry: str) -> None:
        self._heard[entry] = bool(self._announce(entry))
