"""The Store of a job that may lose the host that serves it: one server on each host, of which one is in use.

`FOG_STORES` lists the servers. When the one in use is lost, the next one of the list that answers takes its place. While
a link is cut, other ones may answer for other ranks. So the rank that answers joiners tells all servers which one it
uses, and all others go there. What a job has told a server is lost with it: who follows the job's Store tells the next
one anew.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import hashlib
import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from fog_pg import _store, environment

_log = logging.getLogger("fog_pg")

# Above all keys, so that they have the same names in each of the servers.
_PREFIX = "fog/job"
# The keys with the name of the job that a server belongs to, with what rank 0 has found at the start, with the list of a
# process that has joined, whose host may be a new one. The last two end with the address of a server, after what orders these
# texts: that of the server itself, if ranks use it, and that which the rank that answers joiners uses.
_OWNER, _FOUND, _LIST, _MARK, _USE = "owner", "found/{owner}", "list", "mark", "use"
# The time that a host may take to accept a connection, in seconds, and the time in which a server must answer: at the
# start its process may still import torch.
_REACH_TIMEOUT = 3.0
_ANSWER_TIMEOUT, _START_TIMEOUT = 5.0, 60.0
# The pause between two requests that show whether the Store in use still answers, in seconds.
_PERIOD = 0.5
# The pause before servers that did not answer are told again which one is in use, in seconds.
_TELL_PERIOD = 5.0


class Standby:
    """The Store of this process's job, and those that may take its place.

    Args:
        addresses: Of all servers, in the order of their use.
        address: That of the one in use.
        store: Its Store.
        owner: The name of the job, as in each of them.

    Attributes:
        store: That which is in use now.
        moves: How often it has become another one.
    """

    def __init__(self, addresses: Sequence[str], address: str, store: dist.Store, owner: str) -> None:
        self._addresses, self._address, self.store, self._owner = addresses, address, store, owner
        self.moves = 0
        # What this process tells all servers if it answers joiners, those that know it, and when it tells others again.
        self._use, self._told, self._tell_at = "", set[str](), 0.0
        self._must_tell = False
        self._end = threading.Event()
        self._watcher: threading.Thread | None = None

    def follow(self, moved: Callable[[], object]) -> None:
        """Calls a function from a thread until `end`: whenever another Store is in use, and after `tell_again`."""
        self._watcher = threading.Thread(target=self._watch, args=(moved,), daemon=True)
        self._watcher.start()
        atexit.register(
            self.end
        )  # the end of the interpreter in a request of the thread would abort the process

    def tell_again(self) -> None:
        """Lets the thread call the function once more, although the same Store is in use."""
        self._must_tell = True

    def end(self) -> None:
        """Ends the thread."""
        self._end.set()
        if self._watcher is not None:
            self._watcher.join()

    def _watch(self, moved: Callable[[], object]) -> None:
        has_warned = False
        while not self._end.wait(_PERIOD):
            try:
                has_moved = self.move_if_lost()
            except RuntimeError as error:
                if (
                    not threading.main_thread().is_alive()
                ):  # the interpreter ends, and starts no threads any more
                    return
                if not has_warned:
                    _log.warning("processes cannot join until one answers: %s", error)
                has_warned = True
                continue
            has_warned = False
            must_tell, self._must_tell = has_moved or self._must_tell, False
            try:
                must_tell = must_tell or self._go_along()
                if must_tell:
                    moved()
                self._tell_use()
            except RuntimeError:  # it has just been lost, or its connection
                self._must_tell |= must_tell

    def move_if_lost(self) -> bool:
        """Returns whether another Store is in use from now on, because the one in use does not answer.

        Raises:
            RuntimeError: None of the servers answers.
        """
        try:
            self.store.check([_OWNER])
            return False
        except RuntimeError as error:
            listed, before = self._addresses, self._address
            # The next one in order comes first, and the one in use last: there it may be that of a host that was replaced.
            place = listed.index(before) + 1
            found = _answering([*listed[place:], *listed[:place]])
            found = [(address, store) for address, store in found if _take(store, self._owner)]
            if self._end.is_set():
                return False
            if not found:
                raise RuntimeError(
                    f"none of the job's Stores answers ({environment.STORES.name}): {', '.join(listed)}: {error}"
                ) from None
            # One that ranks use already, or still, as only the connection of this one was lost.
            address, store = _last_used(found) or found[0]
            self._move(address, store)
            _log.warning(
                "the job's Store is now that of %s: that of %s does not answer: %s",
                address,
                before,
                str(error).partition("\n")[0],
            )
            return True

    def _move(self, address: str, store: dist.Store) -> None:
        self._address, self.store, self.moves = address, store, self.moves + 1

    def _go_along(self) -> bool:
        """Returns whether another Store is in use from now on: that of the rank that answers joiners."""
        address = _address_in(_text(self.store, _USE))
        if address == self._address or address not in self._addresses:
            return False
        # That rank may not know yet that it is lost; and after that, there may be another one.
        if (store := _connected(address)) is None or not _text(store, _MARK):
            return False
        self._move(address, store)
        _log.warning(
            "the job's Store is now that of %s, as on the rank that answers processes that join", address
        )
        return True

    def begin_use(self, epoch: int, answers: bool) -> None:
        """Tells the server in use that this rank uses it from an epoch on.

        Args:
            epoch: The epoch.
            answers: Whether this rank answers joiners: then a thread tells all servers which one that is.
        """
        use = f"{epoch:012d} {self.moves:012d} {self._address}"
        self.store.set(_MARK, use)
        if answers:
            self.store.set(_USE, use)
            self._use, self._told, self._tell_at = use, {self._address}, 0.0

    def _tell_use(self) -> None:
        untold = [address for address in self._addresses if address not in self._told]
        if not self._use or not untold or time.monotonic() < self._tell_at:
            return
        use, told = self._use, self._told
        self._tell_at = time.monotonic() + _TELL_PERIOD
        with concurrent.futures.ThreadPoolExecutor(len(untold)) as pool:
            for address, store in zip(untold, pool.map(_connected, untold), strict=True):
                if store is not None:
                    _tell(store, use)
                    told.add(address)

    def tell_list(self) -> None:
        """Tells the others where the servers are, as this process, which joins them, has been told."""
        self.store.set(_LIST, ",".join(self._addresses))

    def renew_list(self) -> None:
        """Takes the list of a process that joins, which may know new hosts, and may not know all others."""
        if self.store.check([_LIST]):
            told = self.store.get(_LIST).decode().split(",")
            self._addresses = list(dict.fromkeys((*told, *self._addresses)))


def addresses() -> list[str]:
    """Returns the addresses of the servers of this process's job; none if there is no standby."""
    return [each for each in environment.STORES.get().split(",") if each]


def begin(store: dist.Store, rank: int) -> Standby | None:
    """Returns the Stores of a job that begins; None if there is no standby.

    Args:
        store: That of the first group, in the first server.
        rank: This process's.

    Raises:
        RuntimeError: A server does not answer, or belongs to another job.
    """
    if not (listed := addresses()):
        return None
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    own = dist.PrefixStore(_PREFIX, store)
    # The secret tells jobs of one name apart.
    secret = hmac.new(environment.JOB_SECRET.get().encode(), b"fog owner", hashlib.sha256).hexdigest()
    owner = f"{environment.TORCHELASTIC_RUN_ID.get()} {secret[:16]}"
    key = _FOUND.format(owner=owner)
    if rank == 0:
        with concurrent.futures.ThreadPoolExecutor(len(listed)) as pool:
            found = pool.map(lambda address: _claimed(address, owner), listed)
            own.set(key, "; ".join(filter(None, found)))
    if problem := own.get(key).decode():
        raise RuntimeError(f"{environment.STORES.name}: {problem}")
    return Standby(listed, listed[0], own, owner)


def find() -> Standby | None:
    """Returns the Stores of the job that this process joins; None if there is no standby.

    Raises:
        RuntimeError: No server answers.
    """
    if not (listed := addresses()):
        return None
    # The ranks may not know yet that the Store in use is lost.
    deadline = time.monotonic() + environment.HOST_TIMEOUT.get() + _ANSWER_TIMEOUT
    while True:
        if not (found := _answering(listed)):
            raise RuntimeError(
                f"{environment.STORES.name}: none of the job's Stores answers: {', '.join(listed)}"
            )
        named = _named(found)
        if named and named not in listed:  # this process's list may be an older one
            listed.append(named)
            continue
        used = _last_used(found)
        if used is not None or time.monotonic() >= deadline:
            address, store = used or found[0]
            owner, use = _text(store, _OWNER), max(_text(each, _USE) for _, each in found)
            # A host that was replaced has a new one. Until it is taken, hosts that start take it for that of a new job.
            for _, other in found if owner else []:
                if _take(other, owner) and use:
                    _tell(other, use)
            return Standby(listed, address, store, owner)
        time.sleep(_PERIOD)


def is_of_a_job(address: str) -> bool | None:
    """Returns whether a job has taken the server at an address; None if it does not answer."""
    store = _connected(address)
    return None if store is None else bool(store.check([_OWNER]))


def _claimed(address: str, owner: str) -> str:
    """Takes a server for the job; returns why that is not possible, "" if it is."""
    store = _connected(address, _START_TIMEOUT)
    if store is not None and _take(store, owner):
        return ""
    if store is None or not (before := _text(store, _OWNER)):
        return f"the Store at {address} cannot be reached; is it started?"
    name, other = owner.rpartition(" ")[0], before.rpartition(" ")[0]
    which = "the same name" if other == name else f"the name '{other}'"
    return f"the Store at {address} belongs to another job, of {which}; this job's name is '{name}'"


def _answering(addresses: Sequence[str]) -> list[tuple[str, dist.Store]]:
    """Returns the Stores at these addresses that answer, with their addresses, in this order."""
    with concurrent.futures.ThreadPoolExecutor(len(addresses)) as pool:
        stores = list(pool.map(_connected, addresses))
    return [(address, store) for address, store in zip(addresses, stores, strict=True) if store is not None]


def _last_used(stores: Sequence[tuple[str, dist.Store]]) -> tuple[str, dist.Store] | None:
    """Returns which of some Stores, with their addresses, the rank that answers joiners uses, or other ranks used last.

    None if no rank uses any of them.
    """
    used = {address: (address, store) for address, store in stores if _text(store, _MARK)}
    last = max(used.values(), key=lambda each: _text(each[1], _MARK), default=None)
    return used.get(_named(stores), last)


def _named(stores: Sequence[tuple[str, dist.Store]]) -> str:
    """Returns the address that the rank that answers joiners told some Stores last, "" if none."""
    return _address_in(max(_text(store, _USE) for _, store in stores))


def _tell(store: dist.Store, use: str) -> None:
    """Tells a server which one is in use, unless it knows that of a later rank that answers joiners."""
    before = _text(store, _USE)
    while before < use:
        after = store.compare_set(_USE, before, use).decode()
        if after == before:  # it has been lost
            return
        before = after


def _take(store: dist.Store, owner: str) -> bool:
    """Takes a server for a job, if it belongs to none; returns whether it is that of this job."""
    with contextlib.suppress(RuntimeError):  # it has been lost meanwhile
        return store.compare_set(_OWNER, "", owner).decode() == owner
    return False


def _text(store: dist.Store, key: str) -> str:
    """Returns what a server has been told, "" if nothing, or if it is lost."""
    with contextlib.suppress(RuntimeError):
        return store.get(key).decode() if store.check([key]) else ""
    return ""


def _address_in(use: str) -> str:
    return use.rpartition(" ")[2]


def _connected(address: str, timeout: float = _ANSWER_TIMEOUT) -> dist.Store | None:
    """Returns the Store at an address; None if it does not answer."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    with contextlib.suppress(OSError, RuntimeError):
        with socket.create_connection((host, int(port)), _REACH_TIMEOUT) as connection:
            numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
            number = socket.getnameinfo(connection.getpeername(), numeric)[0]
        limit = timedelta(seconds=timeout)
        with _store.answer_within(timeout, number, int(port)):
            store = dist.TCPStore(number, int(port), is_master=False, timeout=limit, wait_for_workers=False)
        _store.limit_silence(store, environment.HOST_TIMEOUT.get())
        return dist.PrefixStore(_PREFIX, store)
    return None
