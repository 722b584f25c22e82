"""The first group of a process that joins a running job: it takes no work, and connects nobody.

The members of a job that can be joined have told the job's Store how to connect with them. What follows, from here to
the first exchange, is in `fogdist.elastic`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fog_pg import environment

if TYPE_CHECKING:
    from torch.distributed import Store

    from fog_pg._C import ProcessGroupFog
    from fog_pg._standby import Standby

# Keys of the job's Store. Each rank's entry, with the group's id; the secret, if rank 0 has made it.
_ENTRY = "fog/world/entry/{rank}"
_SECRET = "fog/world/secret"
# The hosts of the ranks at the start.
_HOSTS = "fog/world/hosts"
# No job has as many ranks: a reader of the Store asks for each of them.
_MOST = dict.fromkeys(("size", "max_ranks"), 1 << 16)
# Why nobody can join, if that is so.
_CLOSED = "fog/world/closed"

_REASON = (
    "this process joins a running job as rank {rank}, so operations of the whole group are not possible; objects with "
    'on_loss="continue" join the other ranks in their first exchange, and fogdist.reconfigure() returns a group from then on'
)


@dataclass(frozen=True)
class World:
    """What a job's Store says about its members.

    Attributes:
        store: The job's.
        id: The id of the first group.
        size: The number of ranks of the first group.
        entries: How to connect with each rank.
        hosts: The number of the host of each rank with which the job started.
        max_ranks: The most ranks that the job can have; at least `size`.
    """

    store: Store
    id: int
    size: int
    entries: dict[int, str]
    hosts: Sequence[int]
    max_ranks: int


# The id of this process's first group, and the job's Store: as its backend has got it, if there is no standby.
_first: tuple[int, Store] | None = None
_standby: Standby | None = None
# The job that this process joins.
_world: World | None = None


def wants_to_join() -> bool:
    """Returns whether this process is to join a job that runs already."""
    return environment.JOIN.get()


def world_to_join(backend: ProcessGroupFog) -> World | None:
    """Returns the world of the job that this process joins with its first group; None if it does not."""
    return _world if _world is not None and _world.id == backend.id else None


def note_first(backend: ProcessGroupFog, store: Store, standby: Standby | None) -> None:
    """Remembers the process's first group."""
    global _first, _standby
    if _standby is not None:  # of a group that was destroyed
        _standby.end()
    _first, _standby = (backend.id, store if standby is None else standby.store), standby
    if _world is None:
        note_member()


def note_member() -> None:
    """Marks this process as a member of its job, for `fog run --keep-going`, which starts a lost rank again.

    The mark is an open anonymous file. It shows in /proc, also while the process hangs, and ends with it.
    """
    if environment.JOIN.is_set():  # `fog run --keep-going` sets it to 0 or 1
        os.memfd_create("fog_member")


def follow_store(moved: Callable[[], object]) -> None:
    """Calls a function from a thread of its own whenever the job's Store has become another one, which knows nothing yet.

    From now on, torch makes its groups over the job's Store. A process that joins began at the Store of its own host.
    """
    if (standby := _standby) is None:
        return
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    def use() -> None:
        global _first
        assert _first is not None  # it is a group of several ranks
        _first = _first[0], standby.store
        groups, first = distributed_c10d._world.pg_map, distributed_c10d._get_default_group()
        groups[first] = groups[first][0], dist.PrefixStore("torch", standby.store)

    def move() -> None:
        if dist.is_initialized():
            use()
            moved()

    use()
    standby.follow(move)


def tell_store_again() -> None:
    """Calls the function of `follow_store` soon, because this rank now answers joiners."""
    if _standby is not None:
        _standby.tell_again()


def tell_stores() -> None:
    """Tells the ranks of the job that this process joins where its Stores are: its host may be a new one."""
    if _standby is not None:
        _standby.tell_list()


def renew_stores() -> None:
    """Takes what `tell_stores` of a process that joins has told."""
    if _standby is not None:
        _standby.renew_list()


def store_of_first(backend: ProcessGroupFog) -> Store | None:
    """Returns the Store in which the job of this process's first group can be joined; None for the backend of another one."""
    return _first[1] if _first is not None and _first[0] == backend.id else None


def publish(store: Store, rank: int, group: int, size: int, entry: str, epoch: int = 0) -> None:
    """Tells the Store how to connect with the process that has a rank from an epoch on, unless it knows a later one.

    Args:
        store: The job's.
        rank: The process's rank.
        group: The id of the first group.
        size: The number of its ranks.
        entry: Of `fog_pg._C.own_entry`.
        epoch: One in which the process is a member.
    """
    key = _ENTRY.format(rank=rank)
    told = {
        "entry": entry,
        "id": group,
        "size": size,
        "epoch": epoch,
        "max_ranks": max_ranks(size),
    }
    text = json.dumps(told)
    before = store.get(key).decode() if store.check([key]) else ""
    # A rank that was stopped may tell of an epoch that is long past.
    while not before or json.loads(before)["epoch"] < epoch:
        after = store.compare_set(key, before, text).decode()
        if after == text:
            return
        before = after


def close(store: Store, reason: str) -> None:
    """Tells processes that want to join why they cannot."""
    store.set(_CLOSED, reason)


def publish_secret(store: Store, secret: str) -> None:
    """Passes the job's secret on to processes that join."""
    store.set(_SECRET, secret)


def publish_hosts(store: Store, hosts: Sequence[int], epoch: int, answers: bool) -> None:
    """Tells on which hosts the job's first ranks are or were, and that this rank uses this Store from an epoch on.

    All else that processes need to join is told before.

    Args:
        store: The job's Store.
        hosts: The host of each rank.
        epoch: The epoch.
        answers: Whether this rank answers processes that join: then the others go to its Store.
    """
    store.set(_HOSTS, json.dumps(list(hosts)))
    if _standby is not None:
        _standby.begin_use(epoch, answers)


def entry_of(store: Store, rank: int) -> str | None:
    """Returns how to connect with the last process that had a rank; None if there was none."""
    key = _ENTRY.format(rank=rank)
    return json.loads(store.get(key))["entry"] if store.check([key]) else None


def read_world(store: Store, size: int) -> World:
    """Returns what the Store says now; without entries if nobody can join.

    Args:
        store: The job's.
        size: A number of ranks, one of which at least is the job's.

    Raises:
        RuntimeError: The job has another version.
    """
    entries: dict[int, str] = {}
    group, its_size, most = 0, size, size
    rank = 0
    while rank < most:
        key = _ENTRY.format(rank=rank)
        if store.check([key]):
            told = _told(store.get(key), rank)
            entries[rank] = told["entry"]
            group, its_size, most = told["id"], told["size"], told["max_ranks"]
        rank += 1
    hosts = json.loads(store.get(_HOSTS)) if store.check([_HOSTS]) else [0] * its_size
    if len(hosts) != its_size or not all(type(host) is int and 0 <= host < _MOST["size"] for host in hosts):
        raise RuntimeError(f"the job tells {hosts!r} as the hosts of its {its_size} ranks")
    return World(store, group, its_size, entries, hosts, most)


def _told(text: bytes, rank: int) -> dict[str, Any]:
    """Returns what a rank has told the Store; raises RuntimeError if that is not what this version tells."""
    whose = "the job has another version of fog than this process: rank"
    try:
        told = json.loads(text)
    except ValueError as error:
        raise RuntimeError(f"{whose} {rank} tells no JSON: {error}") from None
    for name in ("entry", "id", "size", "max_ranks"):
        if not isinstance(told, dict) or name not in told:
            raise RuntimeError(f"{whose} {rank} does not tell its '{name}'")
        kind, most = (str, 0) if name == "entry" else (int, _MOST.get(name, 1 << 64))
        if type(told[name]) is not kind or (kind is int and not 0 <= told[name] < most):
            raise RuntimeError(f"{whose} {rank} tells {told[name]!r} as its '{name}'")
    return dict(told)


def max_ranks(size: int) -> int:
    """Returns the most ranks that this process's job can have.

    Args:
        size: The number of ranks at its start.
    """
    return max(environment.MAX_RANKS.get(), size) if _world is None else _world.max_ranks


def check_max_ranks(size: int) -> None:
    """Raises ValueError if a job of so many ranks begins with more than it can have."""
    most = environment.MAX_RANKS.get()
    if most and most < size:
        raise ValueError(
            f"{environment.MAX_RANKS.name}: got {most}; allowed are numbers from the number of ranks at the start on, {size}"
        )


def begin(extension: Any, options: Any, backend_options: Any, standby: Standby | None) -> ProcessGroupFog:
    """Creates the backend of the first group on a process that joins a job, which may have a standby of its Store.

    Raises:
        RuntimeError: The job cannot be joined, or has another version.
        ValueError: It has another number of ranks, or cannot have that rank; or FOG_JOB_SECRET is not allowed.
            torch.distributed.DistBackendError: Its ranks have another version, or cannot be reached.
    """
    global _world
    rank, size = options.group_rank, options.group_size
    store = options.store if standby is None else standby.store
    world = read_world(store, size)
    who = f"this process was started to join a running job as rank {rank}"
    if not world.entries and store.check([_CLOSED]):
        raise RuntimeError(f"{who}, but the job cannot be joined: {store.get(_CLOSED).decode()}")
    if not world.entries:
        raise RuntimeError(
            f'{who}, but the job cannot be joined: its ranks have no object with on_loss="continue", or have not begun '
            "to train"
        )
    if world.size != size:
        raise ValueError(
            f"WORLD_SIZE: got {size}; allowed for a process that joins this job is {world.size}, as at its start"
        )
    if rank >= world.max_ranks:
        raise ValueError(
            f"RANK: got {rank}; allowed for a process that joins this job are ranks below {world.max_ranks}, the most "
            "that it can have (FOG_MAX_RANKS)"
        )
    if not extension.job_secret():
        if not store.check([_SECRET]):
            raise RuntimeError(
                f"{who}, but does not know the job's secret: set FOG_JOB_SECRET as for the other ranks"
            )
        extension.set_job_secret(store.get(_SECRET).decode())
    extension.prepare_to_join(rank, size, list(world.entries.values()), store, backend_options._timeout)
    backend: ProcessGroupFog = extension.add_whole(
        world.id,
        rank,
        [*world.hosts, *[0] * (rank + 1 - size)],  # new numbers are for jobs on one host
        _REASON.format(rank=rank),
        store,
        backend_options,
    )
    _world = world
    return backend
