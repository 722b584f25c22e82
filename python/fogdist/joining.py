"""How a process comes into a job that trains already: what it and the job's ranks tell each other, up to the meeting.

A process that joins takes a *ticket* in the Store of the job's first group, and tells what it is: its rank, how to
connect with it, its objects, and a proof that it knows the job's secret. It draws the attention of the ranks by a
counter in their shared memory, so a rank that looks for newcomers in each step reads a number and asks nobody
(`Door.is_quiet`). The rank with the lowest number answers: it refuses, with the reason, or copies the state of its
objects into an anonymous file and trains on, while the newcomer reads that. When the newcomer has loaded the state it
says that it is ready. Only then do the ranks meet, as after a loss (`fogdist.membership`), and all that they do for it
is to agree.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fog_pg import _extension, _joining
from fog_pg._joining import World

_log = logging.getLogger("fogdist")

# Keys of the Store: how many tickets there are, the first that is not over, and the nonce of the rank that answers.
_COUNT = "fog/join/count"
_FIRST = "fog/join/first"
_NONCE = "fog/join/nonce"
_OBJECTS = "fog/join/objects"
# The pauses between two looks of a newcomer at the Store, in seconds, and between two looks at the ranks' processes.
_PAUSE = 2e-3
_LIFE_PAUSE = 0.5
# A newcomer that has waited so long for an answer says so.
_WARN_AFTER = 30.0


def _key(ticket: int, what: str) -> str:
    return f"fog/join/{ticket}/{what}"


def _delete(store: dist.Store, ticket: int, *whats: str) -> None:
    for what in whats:
        with contextlib.suppress(NotImplementedError):  # some of torch's Stores cannot
            store.delete_key(_key(ticket, what))


def _proof(purpose: str, group: int, ticket: int, *parts: str) -> str:
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
    """Tells the Store what a newcomer's object of this name must be like."""
    objects = _objects(store)
    objects[name] = list(items)
    store.set(_OBJECTS, json.dumps(objects))


def check_object(world: World, name: str, argument: str, items: Sequence[str]) -> None:
    """Compares an object of a newcomer with that of the job.

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
    """What a newcomer tells.

    Attributes:
        ticket: Its ticket.
        rank: The rank that it takes.
        entry: How to connect with it.
        seats: The names of its seats, ascending.
        seat: The name of the seat at whose next exchange it comes in.
        nonce: The newcomer's random number, for proofs that the ranks know the job's secret.
        challenge: The random number of the rank that answered when the newcomer asked.
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
            ValueError: Its proof or its form is wrong; the message is the reason for the newcomer.
        """
        try:
            signed = json.loads(text)
            asked, proof = signed["request"], signed["proof"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ValueError("its request is not complete") from None
        if not isinstance(asked, str) or not _proves(proof, _proof("request", group, ticket, asked)):
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


class Door:
    """Looks for newcomers, on a rank of the job.

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
        self._copies: dict[int, _Copy] = {}

    def is_quiet(self, epoch: int) -> bool:
        """Returns whether nothing has happened since the last look. It asks nobody, and makes no system call."""
        return not self._waits and self._announced() == self._seen and epoch == self._epoch

    def publish_nonce(self) -> None:
        """Tells newcomers the random number that their proofs must contain, on the rank that answers."""
        self._store.set(_NONCE, self._nonce)

    def leave_to_another(self, epoch: int) -> None:
        """Does nothing for newcomers, because another rank answers in this epoch."""
        self._seen, self._epoch, self._waits = self._announced(), epoch, False
        for ticket in list(self._copies):
            self._copies.pop(ticket).close()

    def look(
        self, epoch: int, judge: Callable[[Request], str | None], save: Callable[[], Mapping[str, Any]]
    ) -> list[Request]:
        """Answers newcomers.

        Args:
            epoch: The present one.
            judge: Returns why a newcomer is refused, "" if it is not, None if that is not known yet.
            save: Returns the state for a newcomer; its tensors may change later.

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
            if ticket in self._over or not self._has(ticket, "request"):
                continue
            try:
                text = self._store.get(_key(ticket, "request")).decode(errors="replace")
                request = Request.from_text(self._group, ticket, text)
            except ValueError as error:
                self._refuse(ticket, str(error))
                continue
            try:
                is_there = self._is_there(request.entry)
            except (ValueError, RuntimeError) as error:
                self._refuse(ticket, f"its address cannot be read: {error}")
                continue
            if not is_there or self._has(ticket, "admitted"):
                self._end(ticket)
                continue
            if request.challenge != self._nonce:
                continue  # it asks again, with this rank's number
            reason = judge(request)
            if reason is None:
                self._waits = True
            elif reason:
                self._refuse(ticket, reason)
            elif self._has(ticket, "ready"):
                ready.setdefault(request.rank, request)
            elif not self._has(ticket, "answer"):
                self._give(request, save())
        before = first
        while first in self._over:
            self._over.discard(first)
            first += 1
        if first > before:
            self._store.set(_FIRST, str(first))
        return list(ready.values())

    def look_again(self) -> None:
        """Makes the next step look again, although nothing has happened."""
        self._waits = True

    def admit(self, ticket: int, nonce: str, decision: Mapping[str, Any]) -> None:
        """Tells a newcomer what the ranks have decided."""
        text = json.dumps(decision)
        signed = {"decision": text, "proof": _proof("admitted", self._group, ticket, nonce, text)}
        self._store.set(_key(ticket, "admitted"), json.dumps(signed))
        self._end(ticket)

    def _give(self, request: Request, state: Mapping[str, Any]) -> None:
        """Gives a newcomer a copy of the state."""
        ticket = request.ticket
        copy = self._copies[ticket] = _Copy(state, _extension.load().read_entry(request.entry)["pid"])
        place = json.dumps({"pid": os.getpid(), "file": copy.file})
        answer = {"place": place, "proof": _proof("answer", self._group, ticket, request.nonce, place)}
        self._store.set(_key(ticket, "answer"), json.dumps(answer))

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
        """Ends a ticket; what the newcomer has not read yet, it deletes itself."""
        self._over.add(ticket)
        _delete(self._store, ticket, "request", "answer", "ready")
        if (copy := self._copies.pop(ticket, None)) is not None:
            copy.close()


class _Copy:
    """A state in an anonymous file, which a thread writes. It is sealed when it is whole, and empty if that failed.

    The file is closed when it is whole and this is closed, or the process that it is for has ended.

    Args:
        state: The state, of which this makes a copy at once.
        pid: The process that it is for.
    """

    def __init__(self, state: Mapping[str, Any], pid: int) -> None:
        self.file = os.memfd_create("fog_state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._is_over = threading.Event()
        self._state = _copied(state)
        threading.Thread(target=self._serve, args=(pid,), daemon=True).start()

    def _serve(self, pid: int) -> None:
        try:
            with os.fdopen(os.dup(self.file), "wb") as file:
                torch.save(self._state, file)
        except Exception:
            _log.exception("the state for a process that joins could not be written")
            os.ftruncate(self.file, 0)
        self._state = None
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        while not self._is_over.wait(_LIFE_PAUSE) and _runs(pid):
            pass
        os.close(self.file)

    def close(self) -> None:
        """Closes the file as soon as it is written, without waiting for that."""
        self._is_over.set()


def _copied(state: Any) -> Any:
    """Returns a state with copies of its tensors."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, Mapping):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map(_copied, state))
    return state


# --- a newcomer -------------------------------------------------------------------------------------------------


class Newcomer:
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

    def pull(self, seats: Sequence[str], seat: str) -> dict[str, Any]:
        """Returns the state that a rank of the job gives this process.

        Args:
            seats: The names of this process's seats.
            seat: That at whose next exchange it wants to come in.

        Raises:
            torch.distributed.DistBackendError: It is refused; no rank is left; or the timeout.
        """
        self._seats = sorted(seats), seat
        while True:
            self._ticket = ticket = self._store.add(_COUNT, 1)
            self._request()
            answer = json.loads(self._await("answer"))
            self._check("answer", answer["place"], answer["proof"])
            place = json.loads(answer["place"])
            state = self._read(place["pid"], place["file"])
            if state is not None:
                return state
            _delete(self._store, ticket, "request", "answer")

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
        now = _joining.read_world(self._store, self.world.size).entries
        return {rank: now[rank] for rank in ranks}

    def leave(self) -> None:
        """Ends its ticket, when all ranks have taken it in or it is refused."""
        _delete(self._store, self._ticket, "request", "answer", "ready", "admitted", "refused")

    def _request(self) -> bool:
        """Asks the rank that answers, with its random number, if it has not yet; returns whether any rank is left."""
        challenge = self._store.get(_NONCE).decode() if self._store.check([_NONCE]) else ""
        if (self._ticket, challenge) != self._asked:
            self._asked = self._ticket, challenge
            seats, seat = self._seats
            told = {"rank": self._rank, "entry": self._entry, "seats": seats, "seat": seat}
            text = json.dumps({**told, "nonce": self._nonce, "challenge": challenge})
            proof = _proof("request", self.world.id, self._ticket, text)
            self._store.set(_key(self._ticket, "request"), json.dumps({"request": text, "proof": proof}))
        return self._announce()

    def _check(self, purpose: str, text: str, proof: object) -> None:
        """Raises DistBackendError if what a rank has told does not come from a rank that knows the secret."""
        if not _proves(proof, _proof(purpose, self.world.id, self._ticket, self._nonce, text)):
            raise dist.DistBackendError(
                f"the answer to this process, which joins as rank {self._rank}, does not come from a process that knows "
                "the job's secret"
            )

    def _announce(self) -> bool:
        """Draws the attention of all ranks; returns whether any is left."""
        told = [self._extension.announce(entry) for entry in self._others()]
        return any(told)

    def _others(self) -> list[str]:
        entries = _joining.read_world(self._store, self.world.size).entries
        return [entry for rank, entry in entries.items() if rank != self._rank]

    def _await(self, what: str) -> str:
        """Waits for a value of the ticket."""
        begin = looked = time.monotonic()
        has_warned = False
        while not self._store.check([_key(self._ticket, what)]):
            if self._store.check([_key(self._ticket, "refused")]):
                reason = self._store.get(_key(self._ticket, "refused")).decode()
                self.leave()
                raise dist.DistBackendError(
                    f"this process, which wants to join the job as rank {self._rank}, is refused: {reason}"
                )
            now = time.monotonic()
            if now >= looked + _LIFE_PAUSE:
                looked = now
                # It also makes ranks look that have become the lowest one meanwhile.
                if not self._request():
                    raise dist.DistBackendError(
                        f"this process cannot join the job as rank {self._rank}: no rank of the job is left"
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

    def _read(self, pid: int, number: int) -> dict[str, Any] | None:
        """Returns the state in a file of another process; None if that process has ended before the file was whole."""
        try:
            file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            while not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:
                if not _runs(pid):
                    return None
                time.sleep(_PAUSE)
            with os.fdopen(os.dup(file), "rb") as whole:
                if not os.fstat(file).st_size:
                    raise dist.DistBackendError(
                        f"this process cannot join the job as rank {self._rank}: process {pid} could not write its state"
                    )
                state: dict[str, Any] = torch.load(whole, weights_only=True)
                return state
        finally:
            os.close(file)


def _runs(pid: int) -> bool:
    """Returns whether a process has not ended; one that its parent has not waited for has."""
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] not in "ZX"
    return False
