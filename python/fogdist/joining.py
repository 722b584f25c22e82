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

# Keys of the Store.
_COUNT = "fog/join/count"
_OBJECTS = "fog/join/objects"
# The pauses between two looks of a newcomer at the Store, in seconds, and between two looks at the ranks' processes.
_PAUSE = 2e-3
_LIFE_PAUSE = 0.5
# A newcomer that has waited so long for an answer says so.
_WARN_AFTER = 30.0


def _key(ticket: int, what: str) -> str:
    return f"fog/join/{ticket}/{what}"


def _proof(purpose: str, *parts: str) -> str:
    """Returns the proof that this process knows the job's secret."""
    secret = _extension.load().job_secret().encode()
    text = "\0".join(("fog join", purpose, *parts))
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


# --- the objects of the job -------------------------------------------------------------------------------------


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
            f"{', '.join(objects) or 'nothing that can be joined'}"
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
    """

    ticket: int
    rank: int
    entry: str
    seats: tuple[str, ...]
    seat: str


class Door:
    """Looks for newcomers, on a rank of the job.

    Args:
        store: That of the first group.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        extension = _extension.load()
        self._announced, self._is_there = extension.announced, extension.announce
        self._seen = self._epoch = 0
        self._waits = False
        self._over: set[int] = set()
        self._copies: dict[int, _Copy] = {}

    def is_quiet(self, epoch: int) -> bool:
        """Returns whether nothing has happened since the last look. It asks nobody, and makes no system call."""
        return not self._waits and self._announced() == self._seen and epoch == self._epoch

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
        ready: dict[int, Request] = {}
        for ticket in range(1, self._store.add(_COUNT, 0) + 1):
            if ticket in self._over or not self._has(ticket, "request"):
                continue
            told = json.loads(self._store.get(_key(ticket, "request")))
            try:
                request = Request(
                    ticket, int(told["rank"]), str(told["entry"]), tuple(told["seats"]), str(told["seat"])
                )
                given = str(told["proof"])
            except (KeyError, TypeError, ValueError) as error:
                self._refuse(ticket, f"its request is not complete: {error!r}")
                continue
            if not self._is_there(request.entry) or self._has(ticket, "admitted"):
                self._end(ticket)
                continue
            is_known = hmac.compare_digest(
                given.encode(), _proof("request", str(ticket), request.entry).encode()
            )
            reason = judge(request) if is_known else "it does not know the job's secret (FOG_JOB_SECRET)"
            if reason is None:
                self._waits = True
            elif reason:
                self._refuse(ticket, reason)
            elif self._has(ticket, "ready"):
                ready.setdefault(request.rank, request)
            elif not self._has(ticket, "answer"):
                copy = self._copies[ticket] = _Copy(save())
                place = json.dumps({"pid": os.getpid(), "file": copy.file})
                answer = {"place": place, "proof": _proof("answer", str(ticket), place)}
                self._store.set(_key(ticket, "answer"), json.dumps(answer))
        return list(ready.values())

    def look_again(self) -> None:
        """Makes the next step look again, although nothing has happened."""
        self._waits = True

    def admit(self, ticket: int, decision: Mapping[str, Any]) -> None:
        """Tells a newcomer what the ranks have decided."""
        self._store.set(_key(ticket, "admitted"), json.dumps(decision))
        self._end(ticket)

    def _refuse(self, ticket: int, reason: str) -> None:
        _log.warning("a process that wants to join (ticket %d) is refused: %s", ticket, reason)
        self._store.set(_key(ticket, "refused"), reason)
        self._end(ticket)

    def _has(self, ticket: int, what: str) -> bool:
        return bool(self._store.check([_key(ticket, what)]))

    def _end(self, ticket: int) -> None:
        self._over.add(ticket)
        if (copy := self._copies.pop(ticket, None)) is not None:
            copy.close()


class _Copy:
    """A state in an anonymous file, which a thread writes. It is sealed when it is whole, and empty if that failed.

    Args:
        state: The state, of which this makes a copy at once.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.file = os.memfd_create("fog_state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._lock = threading.Lock()
        self._is_written = self._is_over = False
        threading.Thread(target=self._write, args=(_copied(state),), daemon=True).start()

    def _write(self, state: Any) -> None:
        try:
            with os.fdopen(os.dup(self.file), "wb") as file:
                torch.save(state, file)
        except Exception:
            _log.exception("the state for a process that joins could not be written")
            os.ftruncate(self.file, 0)
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        with self._lock:
            self._is_written = True
            if self._is_over:
                os.close(self.file)

    def close(self) -> None:
        """Closes the file as soon as it is written, without waiting for that."""
        with self._lock:
            self._is_over = True
            if self._is_written:
                os.close(self.file)


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
        size: The number of ranks of the first group.
        timeout: For how long it waits for an answer, in seconds.
    """

    def __init__(self, world: World, rank: int, size: int, timeout: float) -> None:
        self.world = world
        self._store, self._rank, self._size, self._timeout = world.store, rank, size, timeout
        self._extension = _extension.load()
        self._entry = self._extension.own_entry()
        self._ticket = 0

    def pull(self, seats: Sequence[str], seat: str) -> dict[str, Any]:
        """Returns the state that a rank of the job gives this process.

        Args:
            seats: The names of this process's seats.
            seat: That at whose next exchange it wants to come in.

        Raises:
            torch.distributed.DistBackendError: It is refused; no rank is left; or the timeout.
        """
        while True:
            self._ticket = ticket = self._store.add(_COUNT, 1)
            request = {
                "rank": self._rank,
                "entry": self._entry,
                "seats": sorted(seats),
                "seat": seat,
                "proof": _proof("request", str(ticket), self._entry),
            }
            self._store.set(_key(ticket, "request"), json.dumps(request))
            self._announce()
            answer = json.loads(self._await("answer"))
            if not hmac.compare_digest(answer["proof"], _proof("answer", str(ticket), answer["place"])):
                raise dist.DistBackendError(
                    f"the answer to this process, which joins as rank {self._rank}, does not come from a process that knows "
                    "the job's secret"
                )
            place = json.loads(answer["place"])
            state = self._read(place["pid"], place["file"])
            if state is not None:
                return state

    def enter(self) -> dict[str, Any]:
        """Says that this process is ready; returns the decision by which it is a member. Errors as of `pull`."""
        _joining.publish(self._store, self._rank, self.world.id, self._entry)
        self._store.set(_key(self._ticket, "ready"), "1")
        self._announce()
        decision: dict[str, Any] = json.loads(self._await("admitted"))
        return decision

    def entries(self, ranks: Sequence[int]) -> dict[int, str]:
        """Returns how to connect with these ranks of the job, as they are now."""
        now = _joining.read_world(self._store, self._size).entries
        return {rank: now[rank] for rank in ranks}

    def _announce(self) -> bool:
        """Draws the attention of all ranks; returns whether any is left."""
        told = [self._extension.announce(entry) for entry in self._others()]
        return any(told)

    def _others(self) -> list[str]:
        entries = _joining.read_world(self._store, self._size).entries
        return [entry for rank, entry in entries.items() if rank != self._rank]

    def _await(self, what: str) -> str:
        """Waits for a value of the ticket."""
        begin = looked = time.monotonic()
        has_warned = False
        while not self._store.check([_key(self._ticket, what)]):
            if self._store.check([_key(self._ticket, "refused")]):
                reason = self._store.get(_key(self._ticket, "refused")).decode()
                raise dist.DistBackendError(
                    f"this process, which wants to join the job as rank {self._rank}, is refused: {reason}"
                )
            now = time.monotonic()
            if now >= looked + _LIFE_PAUSE:
                looked = now
                # It also makes ranks look that have become the lowest one meanwhile.
                if not self._announce():
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
