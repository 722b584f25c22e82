"""How a process comes into a job that trains already: what it and the job's ranks tell each other, up to the meeting.

A process that joins takes a *ticket* in the Store of the job's first group, and tells what it is: its rank, how to
connect with it, its objects, and a proof that it knows the job's secret. It draws the attention of the ranks by a
counter in their shared memory, so a rank that looks for joiners in each step reads a number and asks nobody
(`Admission.is_quiet`). The rank with the lowest number answers: it refuses, with the reason, or copies the state of its
objects and trains on, while the joiner reads that (`fogdist.state_transfer`). When the joiner has loaded the state it
says that it is ready. Only then do the ranks meet, as after a loss (`fogdist.membership`), and all that they do for it
is to agree.

Between hosts, the joiner calls each rank at the port where that one listens for messages, and
proves that it knows the secret; then the rank counts the call by itself. The joiner is ready only when all ranks have
heard it, so a link that is cut keeps it away, and delays nobody.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from fogdist.state_transfer import Copy, Offer, Source, read_file

from fog_pg import _extension, _joining, environment
from fog_pg._joining import World

_log = logging.getLogger("fogdist")

# Keys of the Store: how many tickets there are, the first that is not over, and the nonce of the rank that answers.
_COUNT = "fog/join/count"
_FIRST = "fog/join/first"
_NONCE = "fog/join/nonce"
_OBJECTS = "fog/join/objects"
# The pauses between two looks of a joiner at the Store, in seconds, and between two looks at the ranks' processes.
_PAUSE = 2e-3
_LIFE_PAUSE = 0.5
# How long ranks of other hosts may take to hear a joiner, before it asks anew which ranks are left.
_REACH_TIMEOUT = 3.0
# A ticket without a request to the rank that answers is over after this time, in seconds. A joiner takes a ticket a moment
# before it asks, and asks anew within _LIFE_PAUSE when another rank answers.
_EMPTY_TIMEOUT = 60.0
# A joiner that has waited so long for an answer says so.
_WARN_AFTER = 30.0


def _key(ticket: int, what: str) -> str:
    return f"fog/join/{ticket}/{what}"


def _delete(store: dist.Store, ticket: int, *whats: str) -> None:
    for what in whats:
        with contextlib.suppress(NotImplementedError):  # some of torch's Stores cannot
            store.delete_key(_key(ticket, what))


def _proof(purpose: str, *parts: str, group: int, ticket: int) -> str:
    """Returns the proof that this process knows the secret. `group` and a nonce in `parts` bind it to this job."""
    secret = _extension.load().job_secret().encode()
    text = "\0".join(("fog join", purpose, str(group), str(ticket), *parts))
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def _proves(given: object, proof: str) -> bool:
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), proof.encode())


# --- the objects of the job -------------------------------------------------------------------------------------


# The name of the topology among the objects.
TOPOLOGY = "topology"


def publish_object(store: dist.Store, name: str, items: Sequence[str]) -> None:
    """Tells the Store what a joiner's object of this name must be like."""
    objects = _objects(store)
    objects[name] = list(items)
    store.set(_OBJECTS, json.dumps(objects))


def check_object(world: World, name: str, argument: str, items: Sequence[str]) -> None:
    """Compares an object of a joiner with that of the job.

    Args:
        world: The job.
        name: The object's.
        argument: What the items describe, for the message.
        items: As the ranks of the job compare them among themselves.

    Raises:
        ValueError: The job has no such object, or another one.
    """
    objects = _objects(world.store)
    if name not in objects:
        raise ValueError(
            f"{argument} must be as on the ranks of the job that this process joins: it makes {name}, the job has "
            f"{', '.join(each for each in objects if each != TOPOLOGY) or 'nothing that can be joined'}"
        )
    mine, theirs = set(items), set(objects[name])
    if mine != theirs:
        raise ValueError(
            f"{argument} must be the same as on the ranks of the job that this process joins, but differs:\n"
            f"  only here: {_some(mine - theirs)}\n  only there: {_some(theirs - mine)}"
        )


def _objects(store: dist.Store) -> dict[str, list[str]]:
    if not store.check([_OBJECTS]):
        return {}
    objects: dict[str, list[str]] = json.loads(store.get(_OBJECTS))
    return objects


def _some(items: set[str]) -> str:
    shown = sorted(items)[:5]
    return (
        ", ".join(shown) + (f" and {len(items) - 5} more" if len(items) > 5 else "") if items else "nothing"
    )


# --- the ranks of the job ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What a joiner tells.

    Attributes:
        ticket: Its ticket.
        rank: The rank that it takes.
        entry: How to connect with it.
        seats: The names of its seats, ascending.
        seat: The name of the seat at whose next exchange it comes in.
        nonce: The joiner's random number, for proofs that the ranks know the job's secret.
        challenge: The random number of the rank that answered when the joiner asked.
    """

    ticket: int
    rank: int
    entry: str
    seats: tuple[str, ...]
    seat: str
    nonce: str
    challenge: str

    @classmethod
    def from_text(cls, group: int, ticket: int, text: str) -> Request:
        """Returns the request of a ticket.

        Raises:
            ValueError: Its proof or its form is wrong; the message is the reason for the joiner.
        """
        try:
            signed = json.loads(text)
            asked, proof = signed["request"], signed["proof"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ValueError("its request is not complete") from None
        if not isinstance(asked, str) or not _proves(
            proof, _proof("request", asked, group=group, ticket=ticket)
        ):
            raise ValueError("it does not know the job's secret (FOG_JOB_SECRET)")
        try:
            told = json.loads(asked)
            request = cls(ticket, **{**told, "seats": tuple(told["seats"])})
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ValueError("its request is not complete: it has another version") from None
        texts = (request.entry, request.seat, request.nonce, request.challenge, *request.seats)
        if type(request.rank) is not int or not all(isinstance(each, str) for each in texts):
            raise ValueError("its request is not complete: it has another version")
        return request


class Admission:
    """Looks for joiners, on a rank of the job.

    Args:
        store: That of the first group.
        group: The id of the first group.
    """

    def __init__(self, store: dist.Store, group: int) -> None:
        self._store, self._group = store, group
        extension = _extension.load()
        self._announced, self._is_there = extension.announced, extension.announce
        self._seen = self._epoch = 0
        self._waits = False
        self._nonce = secrets.token_hex(16)
        self._over: set[int] = set()
        self._silent: dict[
            int, float
        ] = {}  # tickets without a request to this rank, and when they were first seen
        self._copies: dict[int, Copy] = {}
        self._helped: dict[int, str] = {}  # entries of joiners that another rank answers

    def is_quiet(self, epoch: int) -> bool:
        """Returns whether nothing has happened since the last look. It asks nobody, and makes no system call."""
        return not self._waits and self._announced() == self._seen and epoch == self._epoch

    def publish_nonce(self) -> None:
        """Tells joiners the random number that their proofs must contain, on the rank that answers."""
        self._store.set(_NONCE, self._nonce)

    def leave_to_another(self, epoch: int) -> None:
        """Does nothing for joiners, because another rank answers in this epoch."""
        self._seen, self._epoch, self._waits = self._announced(), epoch, False
        for ticket in list(self._copies):
            self._close(ticket)

    def help(self, epoch: int, rank: int, save: Callable[[], Mapping[str, Any]]) -> None:
        """Gives the state to the joiners of this host that the rank that answers has left to this one.

        Args:
            epoch: The present one.
            rank: This one.
            save: As of `look`.
        """
        self._seen, self._epoch, self._waits = self._announced(), epoch, False
        for ticket in list(self._copies):
            if not self._has(ticket, "giver"):  # the joiner has come in, or another rank answers
                self._close(ticket)
            elif ticket in self._helped and not self._is_there(self._helped[ticket]):
                self._end(ticket)
        for ticket in range(self._first(), self._store.add(_COUNT, 0) + 1):
            if ticket in self._copies or self._has(ticket, "answer") or not self._has(ticket, "giver"):
                continue
            try:
                text = self._store.get(_key(ticket, "request")).decode(errors="replace")
                request = Request.from_text(self._group, ticket, text)
                given = json.loads(self._store.get(_key(ticket, "giver")))
                told, proof = given["told"], given["proof"]
            except (ValueError, TypeError, KeyError):
                continue  # the rank that answers refuses it
            mine = _proof("giver", request.nonce, told, group=self._group, ticket=ticket)
            if _proves(proof, mine) and json.loads(told)["rank"] == rank:
                self._helped[ticket] = request.entry
                self._give(request, save, json.loads(told)["living"], rank)

    def look(
        self,
        epoch: int,
        judge: Callable[[Request], str | None],
        save: Callable[[], Mapping[str, Any]],
        living: Sequence[int],
        giver: Callable[[Request], int | None] = lambda _: None,
    ) -> list[Request]:
        """Answers joiners.

        Args:
            epoch: The present one.
            judge: Returns why a joiner is refused, "" if it is not, None if that is not known yet.
            save: Returns the state for a joiner; its tensors may change later.
            living: The ranks that a joiner must reach; this one is the first.
            giver: Returns the rank that gives a joiner its state; None if it is this one.

        Returns:
            The requests of those that are ready, of several for one rank the first.
        """
        self._seen, self._epoch, self._waits = self._announced(), epoch, False
        if not self._store.check([_NONCE]) or self._store.get(_NONCE).decode(errors="replace") != self._nonce:
            self.publish_nonce()  # another rank has answered before
        ready: dict[int, Request] = {}
        last = self._store.add(_COUNT, 0)
        first = self._first()
        for ticket in range(first, last + 1):
            if ticket in self._over:
                continue
            if not self._has(ticket, "request"):
                self._close(ticket)  # its process has left it, and asks anew
                self._end_if_silent(ticket)
                continue
            try:
                text = self._store.get(_key(ticket, "request")).decode(errors="replace")
                request = Request.from_text(self._group, ticket, text)
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
            reason = judge(request)
            if reason is None:
                self._waits = True
            elif reason:
                self._refuse(ticket, reason)
            elif self._has(ticket, "ready"):
                ready.setdefault(request.rank, request)
            elif not self._has(ticket, "answer"):
                rank = giver(request)
                if rank is None:
                    self._give(request, save, living, living[0])
                else:
                    told = json.dumps({"rank": rank, "living": list(living)})
                    proof = _proof("giver", request.nonce, told, group=self._group, ticket=ticket)
                    self._store.set(_key(ticket, "giver"), json.dumps({"told": told, "proof": proof}))
        before = first
        while first in self._over:
            self._over.discard(first)
            self._silent.pop(first, None)
            first += 1
        if first > before:
            self._store.set(_FIRST, str(first))
        return list(ready.values())

    def look_again(self) -> None:
        """Makes the next step look again, although nothing has happened."""
        self._waits = True

    def admit(self, ticket: int, nonce: str, decision: Mapping[str, Any]) -> None:
        """Tells a joiner what the ranks have decided."""
        text = json.dumps(decision)
        signed = {
            "decision": text,
            "proof": _proof("admitted", nonce, text, group=self._group, ticket=ticket),
        }
        self._store.set(_key(ticket, "admitted"), json.dumps(signed))
        self._end(ticket)

    def _is_still_there(self, request: Request) -> bool:
        """Returns whether a joiner has not ended, as far as that is known."""
        if _extension.load().read_entry(request.entry)["is_visible"]:
            return bool(self._is_there(request.entry))
        copy = self._copies.get(request.ticket)
        return not isinstance(copy, Offer) or copy.is_wanted

    def _give(
        self, request: Request, save: Callable[[], Mapping[str, Any]], living: Sequence[int], rank: int
    ) -> None:
        """Gives a joiner a copy of the state of this rank, or refuses it if there is no memory or file for that."""
        ticket = request.ticket
        try:
            copy = self._copies[ticket] = self._copy(request, save())
        except Exception as error:
            _log.exception("the state for a process that joins could not be copied")
            self._refuse(ticket, f"rank {rank} could not copy its state: {type(error).__name__}: {error}")
            return
        place = json.dumps({**copy.place, "living": list(living)})
        answer = {
            "place": place,
            "proof": _proof("answer", request.nonce, place, group=self._group, ticket=ticket),
        }
        self._store.set(_key(ticket, "answer"), json.dumps(answer))

    def _copy(self, request: Request, state: Mapping[str, Any]) -> Copy:
        extension = _extension.load()
        entry = extension.read_entry(request.entry)
        if entry["is_visible"]:
            return Copy(state, entry["pid"])
        addresses = extension.read_entry(extension.own_entry())["addresses"]
        return Offer(state, addresses, partial(_proof, group=self._group, ticket=request.ticket))

    def _first(self) -> int:
        """Returns the first ticket that is not over."""
        with contextlib.suppress(ValueError):
            return max(int(self._store.get(_FIRST)), 1) if self._store.check([_FIRST]) else 1
        return 1

    def _refuse(self, ticket: int, reason: str) -> None:
        _log.warning("a process that wants to join (ticket %d) is refused: %s", ticket, reason)
        self._store.set(_key(ticket, "refused"), reason)
        self._end(ticket)

    def _has(self, ticket: int, what: str) -> bool:
        return bool(self._store.check([_key(ticket, what)]))

    def _end(self, ticket: int) -> None:
        """Ends a ticket; what the joiner has not read yet, it deletes itself."""
        self._over.add(ticket)
        _delete(self._store, ticket, "request", "giver", "answer", "ready")
        self._close(ticket)

    def _end_if_silent(self, ticket: int) -> None:
        """Ends a ticket whose process has asked for nothing that this rank answers, for a long time."""
        if time.monotonic() > self._silent.setdefault(ticket, time.monotonic()) + _EMPTY_TIMEOUT:
            self._end(ticket)

    def _close(self, ticket: int) -> None:
        """Ends the copy of a ticket, if there is one."""
        self._helped.pop(ticket, None)
        if (copy := self._copies.pop(ticket, None)) is not None:
            copy.close()


# --- a joiner -------------------------------------------------------------------------------------------------


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
        self._extension = _extension.load()
        self._entry = self._extension.own_entry()
        self._nonce = secrets.token_hex(16)
        self._seats: tuple[list[str], str] = [], ""
        self._ticket = 0
        self._asked = 0, ""  # the ticket, and the random number of the rank that answered
        self._calls = _Calls(self._extension.announce)
        self._source: Source | None = None
        self._failure = "the rank that gave it has ended"  # why no state came at last

    def pull(self, seats: Sequence[str], seat: str) -> dict[str, Any]:
        """Returns the state that a rank of the job gives this process.

        Args:
            seats: The names of this process's seats.
            seat: That at whose next exchange it wants to come in.

        Raises:
            torch.distributed.DistBackendError: It is refused; no rank is left; or the timeout.
        """
        self._seats = sorted(seats), seat
        begin = time.monotonic()
        while True:
            self._ticket = ticket = self._store.add(_COUNT, 1)
            self._request()
            answer = json.loads(self._await("answer"))
            self._check("answer", answer["place"], answer["proof"])
            place = json.loads(answer["place"])
            state = self._read(place)
            # Ranks may be lost meanwhile, so those that have not answered are asked for anew.
            unreached = [] if state is None else self._not_reached(place["living"])
            if state is not None and not unreached:
                return state
            self._disconnect()
            _delete(self._store, ticket, "request", "giver", "answer")
            waited = time.monotonic() - begin
            if unreached and waited >= environment.HOST_TIMEOUT.get():
                self._refuse_to_go_on(unreached)
            if waited >= self._timeout:
                raise dist.DistBackendError(
                    f"this process cannot join the job as rank {self._rank}: no state came within {self._timeout:g} s; "
                    f"{self._failure}"
                )

    def enter(self) -> dict[str, Any]:
        """Says that this process is ready; returns the decision by which it is a member. Errors as of `pull`."""
        self._store.set(_key(self._ticket, "ready"), "1")
        self._announce()
        admitted = json.loads(self._await("admitted"))
        self._check("admitted", admitted["decision"], admitted["proof"])
        decision: dict[str, Any] = json.loads(admitted["decision"])
        return decision

    def entries(self, ranks: Sequence[int]) -> dict[int, str]:
        """Returns how to connect with these ranks of the job, as they are now."""
        now = self._entries()
        return {rank: now[rank] for rank in ranks}

    def numbers(self) -> frozenset[int]:
        """Returns the numbers that processes of the job have or have had."""
        return frozenset([*range(self.world.size), *self._entries()])

    def leave(self) -> None:
        """Ends its ticket, when all ranks have taken it in or it has failed to join."""
        self._disconnect()
        with contextlib.suppress(RuntimeError):  # of the Store
            _delete(self._store, self._ticket, "request", "giver", "answer", "ready", "admitted", "refused")

    def _request(self) -> bool:
        """Asks the rank that answers, with its random number, if it has not yet; returns whether any rank is left."""
        challenge = self._store.get(_NONCE).decode() if self._store.check([_NONCE]) else ""
        if (self._ticket, challenge) != self._asked:
            self._asked = self._ticket, challenge
            seats, seat = self._seats
            told = {"rank": self._rank, "entry": self._entry, "seats": seats, "seat": seat}
            text = json.dumps({**told, "nonce": self._nonce, "challenge": challenge})
            proof = _proof("request", text, group=self.world.id, ticket=self._ticket)
            self._store.set(_key(self._ticket, "request"), json.dumps({"request": text, "proof": proof}))
        return self._announce()

    def _check(self, purpose: str, text: str, proof: object) -> None:
        """Raises DistBackendError if what a rank has told does not come from a rank that knows the secret."""
        if not _proves(proof, _proof(purpose, self._nonce, text, group=self.world.id, ticket=self._ticket)):
            raise dist.DistBackendError(
                f"the answer to this process, which joins as rank {self._rank}, does not come from a process that knows "
                "the job's secret"
            )

    def _announce(self) -> bool:
        """Draws the attention of all ranks; returns whether any is left."""
        told = [self._call(entry) for entry in self._others()]
        return any(told)

    def _call(self, entry: str) -> bool:
        """Draws the attention of a rank; returns whether that one is left, as far as is known."""
        is_visible = self._extension.read_entry(entry)["is_visible"]
        return bool(self._extension.announce(entry)) if is_visible else self._calls.call(entry)

    def _others(self) -> list[str]:
        return [entry for rank, entry in self._entries().items() if rank != self._rank]

    def _entries(self) -> dict[int, str]:
        return _joining.read_world(self._store, self.world.size).entries

    def _await(self, what: str) -> str:
        """Waits for a value of the ticket."""
        begin = looked = time.monotonic()
        has_warned = False
        is_given = what != "answer"
        while not self._store.check([_key(self._ticket, what)]):
            if self._store.check([_key(self._ticket, "refused")]):
                reason = self._store.get(_key(self._ticket, "refused")).decode()
                raise dist.DistBackendError(
                    f"this process, which wants to join the job as rank {self._rank}, is refused: {reason}"
                )
            now = time.monotonic()
            if not is_given and self._store.check([_key(self._ticket, "giver")]):
                is_given = True
                self._announce()  # the rank that is to answer looks again
            if now >= looked + _LIFE_PAUSE:
                looked = now
                # It also makes ranks look that have become the lowest one meanwhile.
                if not self._request():
                    raise dist.DistBackendError(
                        f"this process cannot join the job as rank {self._rank}: no rank of the job is left"
                    )
                if self._is_forgotten(what):
                    raise dist.DistBackendError(
                        f"this process cannot join the job as rank {self._rank}: the rank that answers has taken it for "
                        "ended, because the connection between them broke"
                    )
            if now >= begin + self._timeout:
                raise dist.DistBackendError(
                    f"this process, which wants to join the job as rank {self._rank}, had no answer within "
                    f"{self._timeout:g} s: ranks answer when they begin an exchange"
                )
            if now >= begin + _WARN_AFTER and not has_warned:
                has_warned = True
                _log.warning(
                    "joining as rank %d: no answer yet; ranks answer when they begin an exchange", self._rank
                )
            time.sleep(_PAUSE)
        return self._store.get(_key(self._ticket, what)).decode()

    def _is_forgotten(self, what: str) -> bool:
        """Returns whether its ticket is over, without a word to it."""
        if self._store.check([_key(self._ticket, "request")]):
            return False
        # It was there when the ticket was ended, if it was.
        return not any(self._store.check([_key(self._ticket, word)]) for word in (what, "refused"))

    def _read(self, place: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns the state at a place; None if the rank that gives it is gone."""
        try:
            if "pid" in place:
                return read_file(place["pid"], place["file"], self._timeout)
            prove = partial(_proof, group=self.world.id, ticket=self._ticket)
            self._source = Source(place, prove)
            state = self._source.read(self._timeout)
            if state is None:
                raise dist.DistBackendError("the rank that answered could not write its state")
            return state
        except dist.DistBackendError as error:
            raise dist.DistBackendError(
                f"this process cannot join the job as rank {self._rank}: {error}"
            ) from None
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

    def _refuse_to_go_on(self, unreached: Sequence[int]) -> None:
        ranks = [
            f"rank {rank} on host {self._extension.read_entry(entry)['host_name']}"
            for rank, entry in self.entries(unreached).items()
        ]
        raise dist.DistBackendError(
            f"this process cannot join the job as rank {self._rank}, because it does not reach {', '.join(ranks)} over TCP"
        )


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
