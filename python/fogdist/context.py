"""The groups that operations run on, and the topology of each.

From `init` to `shutdown` a process has a session: the group that `init` made or found, and any other group that
a call has named since. Everything above asks here for a group's backend and
neighbors; only `init` and `shutdown` create or destroy process groups.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist

from fog_pg import environment
from fog_pg._joining import world_to_join
from fog_pg._known import backend_of
from fogdist import launch
from fogdist.agreement import check_same_everywhere
from fogdist.lazy import nx
from fogdist.static_topology import StaticTopology, one_graph, see_topology
from fogdist.topology import Topology, exponential

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fog_pg._C import ProcessGroupFog

_log = logging.getLogger("fogdist")


class PreconditionError(ValueError, AssertionError):
    """The arguments or the layout of the ranks do not allow this call.

    It is a ValueError, as every bad argument value in fogdist, and an AssertionError too because BlueFog
    checked these conditions with ``assert``: scripts and tests written for it keep working.
    """


@dataclass
class Gossips:
    """The exchanges of this rank with one other rank each, which do not count in the group's order of calls.

    Attributes:
        begun: The number of exchanges begun with each other rank.
        in_flight: The last exchange of each name that is not known to be complete.
    """

    begun: Counter[int] = field(default_factory=Counter)
    in_flight: dict[str, dist.Work] = field(default_factory=dict)

    def keep(self, name: str, work: dist.Work) -> None:
        """Keeps an exchange that nobody has waited for, and drops those that are complete, with their outputs."""
        going = {each: it for each, it in self.in_flight.items() if not it.is_completed()}
        self.in_flight = {**going, name: work}


# Numbers by group and not by context: objects made after the next `init` must not get the names of older ones that
# still exist.
_made: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


# A mixing of `fogdist.training`, which is above this module.
_Mixing = TypeVar("_Mixing")


class OpenWindow(Protocol):
    """The interface of a one-sided window that a session needs to end it."""

    def abandon(self, reason: str) -> None: ...


@dataclass(frozen=True)
class Survivors:
    """The ranks of a group that are left, as a group of their own.

    Attributes:
        living: Their ranks in that group, ascending: rank i of the smaller group is `living[i]`.
        size: The number of ranks that it began with. Ranks with larger numbers have joined since.
    """

    living: tuple[int, ...]
    size: int

    @property
    def numbers(self) -> int:
        """The number of ranks up to the last one, counting those that are gone."""
        return max(self.size, self.living[-1] + 1)


@dataclass
class Context:
    """A group from the point of view of this rank.

    Attributes:
        group: torch's process group.
        backend: Its fog backend, without the wrapper of torch's debug mode.
        rank: This rank in the group.
        size: Number of ranks in the group.
        machine_of: The machine of every rank, numbered in the order of their first ranks.
        topology: The topology that exchanges between ranks follow.
        machine_topology: The topology that exchanges between machines follow; None until it is set.
        gossips: The unnamed gossips of this rank with single other ranks.
        windows: The open windows by name, the same names on all ranks. While any is open, the topology cannot change.
        survivors: The ranks that this group is of, if it has taken the place of one that has lost some.
        is_joining: Whether this process is about to join a job that runs already, of which this is the first group.
            What all ranks do together before they train is then left out: the process gets it from the others.
    """

    group: dist.ProcessGroup
    backend: ProcessGroupFog
    rank: int
    size: int
    machine_of: list[int]
    topology: StaticTopology
    machine_topology: StaticTopology | None = None
    gossips: Gossips = field(default_factory=Gossips)
    windows: MutableMapping[str, OpenWindow] = field(default_factory=dict)
    survivors: Survivors | None = None
    is_joining: bool = False
    # Tests and benchmarks set it: a rank alone then does the work of one of several, with exchanges without peers.
    exchanges_alone: ClassVar[bool] = False

    def along(self, edges: NDArray[np.bool_]) -> Context:
        """Returns the same group with other neighbors, for windows that only their owner keeps.

        Args:
            edges: Which rank sends to which one.
        """
        topology = see_topology(nx.DiGraph(edges), False, self.rank, self.size)
        return replace(self, topology=topology, windows=WeakValueDictionary())

    def next_number(self) -> int:
        """Returns the next number of an object that the ranks make collectively, for the names of its messages."""
        return next(_made.setdefault(self.group, itertools.count()))

    @cached_property
    def machines(self) -> list[list[int]]:
        """The ranks of each machine, in ascending order."""
        ranks: list[list[int]] = [[] for _ in range(max(self.machine_of) + 1)]
        for rank, machine in enumerate(self.machine_of):
            ranks[machine].append(rank)
        return ranks

    @property
    def viewpoint(self) -> int:
        """The rank from whose point of view the topology is seen: this one.

        On a process that joins a job as a rank that this did not begin with, it is another one, until it has joined.
        """
        return min(self.rank, self.size - 1)

    def machine_of_later(self, rank: int) -> int:
        """Returns the machine of a rank of this group, or of one that has come later, to the host of all ranks."""
        if rank < self.size:
            return self.machine_of[rank]
        return rank // (environment.NODES_PER_MACHINE.get() or rank + 1)

    @property
    def is_alone(self) -> bool:
        """Whether this rank is the only one of the group, so that training needs no exchange."""
        return self.size == 1 and not self.exchanges_alone

    @property
    def held(self) -> int:
        """How many ranks' values this process holds: its own; all of them in tests/virtual_training.py."""
        return 1

    def carried_out(self, mixing: _Mixing) -> _Mixing:
        """Returns what makes the averages of a mixing in this group: the mixing itself, which exchanges messages.

        Where one process holds all ranks, it is a product with the mixing's matrix.
        """
        return mixing


@dataclass
class _Session:
    main: Context
    owns_group: bool
    ranks_per_machine: int | None
    contexts: dict[dist.ProcessGroup, Context]


_session: _Session | None = None
_was_shut_down = False


def current(group: dist.ProcessGroup | Context | None = None) -> Context:
    """Returns the context of a group; a context as it is.

    Args:
        group: By default the group of `init`. Another one needs a fog backend for CPU tensors and begins with
            the topology that `init` gives by default.

    Raises:
        TypeError: `group` is not a process group.
        ValueError: `init` was never called; `group` has no fog backend, or this rank is not in it.
        RuntimeError: After `shutdown`, or the group was destroyed.
    """
    if isinstance(group, Context):
        return group
    session = require_session()
    if group is None or group is session.main.group:
        if not _is_registered(session.main.group):
            raise RuntimeError(
                "the process group of fogdist was destroyed; call fogdist.init() to start it again"
            )
        return session.main
    context = session.contexts.get(group) if isinstance(group, dist.ProcessGroup) else None
    if context is None:
        context = _join(session, group)
    elif not _is_registered(group):
        del session.contexts[group]
        raise RuntimeError("group must be a process group that torch still knows; it was destroyed")
    return context


def adopt(context: Context) -> None:
    """Makes `current` return this context for its group.

    Raises:
        ValueError: `init` was never called.
        RuntimeError: After `shutdown`.
    """
    require_session().contexts[context.group] = context


def init(topology_fn: Callable[[int], nx.DiGraph] | None = None) -> None:
    """Connects this process to the group and sets the topology. Collective.

    A default process group that exists is adopted; if it has no fog backend for CPU tensors, a fog group of
    the same ranks is made in addition. If there is none, the default process group is made from the environment of
    torchrun, mpiexec or srun. Calling `init` again keeps the group and the operations in flight; everything
    else is as after the first call: the topology is set anew, there is no machine topology, and other groups
    are back at their default. Only a group that has windows keeps its topology, with a line in the log.

    The environment variable FOG_NODES_PER_MACHINE makes each so many consecutive ranks of the default process
    group a machine, whatever hosts they run on.

    Args:
        topology_fn: Returns the topology for a number of ranks; by default `exponential`.

    Raises:
        TypeError: `topology_fn` is not callable, or as in `set_topology`.
        ValueError: As in `set_topology`; the environment does not say which rank this is; or
            FOG_NODES_PER_MACHINE is not a divisor of the number of ranks, or not the same on all ranks.
    """
    start(topology_fn, None)


def start(topology_fn: Callable[[int], nx.DiGraph] | None, is_weighted: bool | None) -> None:
    """See `init`; `is_weighted` is that of `see_topology`."""
    global _session, _was_shut_down
    if topology_fn is not None and not callable(topology_fn):
        raise TypeError(
            f"topology_fn must be a callable of the number of ranks, got {type(topology_fn).__name__}"
        )
    make = topology_fn or exponential
    previous = _session if is_initialized() else None
    if previous is not None:
        group, backend, owns_group = previous.main.group, previous.main.backend, previous.owns_group
    else:
        group, backend, owns_group = _connect()
    try:
        joined = world_to_join(backend)
        rank, size = backend.rank(), backend.size() if joined is None else joined.size
        ranks_per_machine = _ranks_per_machine(size)
        topology = see_topology(make(size), is_weighted, min(rank, size - 1), size)
        windows = previous.main.windows if previous is not None else {}
        items = [
            f"{environment.NODES_PER_MACHINE.name}={ranks_per_machine}",
            *topology.items(),
            *_items(windows),
        ]
        is_joining = previous.main.is_joining if previous is not None else joined is not None
        if not is_joining:
            check_same_everywhere(backend, "topology", items)
    except BaseException:
        if previous is None and owns_group:
            dist.destroy_process_group(group)
        raise
    main = Context(group, backend, rank, size, _machines(group, backend, ranks_per_machine)[:size], topology)
    main.is_joining = is_joining
    session = _Session(main, owns_group, ranks_per_machine, {})
    if previous is not None:
        # Ranks that gossip with this rank may not have called init again yet, so the numbers go on.
        main.gossips = previous.main.gossips
        _keep_windows(previous.main, main)
        for known, context in previous.contexts.items():
            if _is_registered(known) and context.survivors is not None:
                session.contexts[known] = context
            elif _is_registered(known):
                anew = _join(session, known)
                anew.gossips = context.gossips
                _keep_windows(context, anew)
    _session = session
    _was_shut_down = False


def shutdown() -> None:
    """Forgets topologies and other groups, and destroys the process group if `init` made it.

    Windows that are still open end, without waiting for other ranks; their tensors stay. A group that
    the user made stays. Operations raise RuntimeError from now on, until `init` is called again. Without a
    context it does nothing.
    """
    global _session, _was_shut_down
    if _session is None:
        return
    session, _session, _was_shut_down = _session, None, True
    for context in (session.main, *session.contexts.values()):
        for window in list(context.windows.values()):
            window.abandon("ended when fogdist was shut down")
    if session.owns_group and _is_registered(session.main.group):
        dist.destroy_process_group(session.main.group)


def is_initialized() -> bool:
    """Returns whether operations can be called: after `init`, and before `shutdown`."""
    return _session is not None and _is_registered(_session.main.group)


def rank(*, group: dist.ProcessGroup | None = None) -> int:
    """Returns the rank of this process in a group.

    Args:
        group: By default the group of `init`; else any group with a fog backend that this rank is in.

    Raises:
        TypeError: `group` is not a process group.
        ValueError: Before `init`; `group` has no fog backend for CPU tensors, or this rank is not in it.
        RuntimeError: After `shutdown`, or `group` was destroyed.
    """
    return current(group).rank


def size(*, group: dist.ProcessGroup | None = None) -> int:
    """Returns the number of ranks in a group; argument and errors as of `rank`."""
    return current(group).size


def set_topology(
    topology: nx.DiGraph | Topology | str | None = None, *, group: dist.ProcessGroup | None = None
) -> None:
    """Sets the topology that exchanges without weights of their own follow. Collective.

    Every rank must set the same one: the ranks compare what they were given, in 16 bytes each, and keep the
    topology they had if it differs.

    Args:
        topology: What an algorithm takes too, with one round: a graph whose nodes are the ranks 0 ... n-1, of which an
            edge i -> j means that i sends to j, so rank j gets ``sum_i W[i, j] * x_i``; a static `Topology`; or a name that
            `fog topology` lists. It is copied. A graph without weights stands for the plain mean of a rank and its
            in-neighbors. By default `fogdist.topology.exponential(size())`.
        group: As in `rank`; `topology` is in terms of its ranks. Each group has a topology of its own.

    Raises:
        TypeError: None of these. This and the next are found before anything is sent: if only some ranks are given such a
            graph, the others wait for them until the group's timeout.
        ValueError: The nodes are not the ranks, or not as many, a weight is not finite, the weights do not sum to 1 at a rank, the
            topology has several rounds, or before `init`. On all ranks alike: the ranks were given different edges or
            weights; the message names both.
        RuntimeError: The group has windows, and this is another topology than theirs: they have memory for these
            neighbors, so free them first. After `shutdown`; torch.distributed.DistBackendError if a rank does not come.
    """
    assign_topology(topology, None, group)


def assign_topology(
    topology: nx.DiGraph | Topology | str | None, is_weighted: bool | None, group: dist.ProcessGroup | None
) -> None:
    """See `set_topology`; `is_weighted` is that of `see_topology`."""
    context = current(group)
    graph = one_graph(topology, context.size)
    seen = see_topology(graph, is_weighted, context.viewpoint, context.size)
    if not context.is_joining:
        check_same_everywhere(context.backend, "topology", [*seen.items(), *_items(context.windows)])
    if why := _frozen_by(context, seen):
        raise RuntimeError(why)
    context.topology = seen


def load_topology(*, group: dist.ProcessGroup | None = None) -> nx.DiGraph:
    """Returns a copy of the current topology of a group; argument and errors as of `rank`."""
    return current(group).topology.graph.copy()


def in_neighbor_ranks(*, group: dist.ProcessGroup | None = None) -> list[int]:
    """Returns the ranks this one receives from in the current topology, without itself; as `rank`."""
    return list(current(group).topology.in_neighbors)


def out_neighbor_ranks(*, group: dist.ProcessGroup | None = None) -> list[int]:
    """Returns the ranks this one sends to in the current topology, without itself; as `rank`."""
    return list(current(group).topology.out_neighbors)


def require_session() -> _Session:
    """Returns what `init` has made; ValueError before it, RuntimeError after `shutdown`."""
    if _session is None:
        if _was_shut_down:
            raise RuntimeError("fogdist has been shut down; call fogdist.init() to start it again")
        raise ValueError("fogdist has not been initialized; call fogdist.init() first")
    return _session


def _join(session: _Session, group: dist.ProcessGroup | int) -> Context:
    """Makes the context of a group at the first call that names the group."""
    # new_group returns this value on ranks that are not in the group.
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group must contain this rank, got dist.GroupMember.NON_GROUP_MEMBER")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a torch.distributed.ProcessGroup, got {type(group).__name__}")
    for known in [known for known in session.contexts if not _is_registered(known)]:
        del session.contexts[known]
    if not _is_registered(group):
        raise RuntimeError("group must be a process group that torch still knows; it was destroyed")
    backend = _backend_of(group)
    if backend is None:
        raise ValueError(
            f"group must have the backend fog for CPU tensors, got one with {dist.get_backend(group)}"
        )
    rank, size = backend.rank(), backend.size()
    machines = _machines(group, backend, session.ranks_per_machine)
    topology = see_topology(exponential(size), False, rank, size)
    context = session.contexts[group] = Context(group, backend, rank, size, machines, topology)
    return context


def _backend_of(group: dist.ProcessGroup) -> ProcessGroupFog | None:
    backend = backend_of(group)
    if getattr(backend, "supports_reconfigure", False):  # torch 2.14 and later
        raise ValueError(
            "group must be a process group whose ranks stay, got one that was created with enable_reconfigure=True; "
            'fogdist.reconfigure() and on_loss="continue" need no such group'
        )
    return backend


def _items(windows: Iterable[str]) -> list[str]:
    """Returns the items about windows that the ranks must agree on when they set a topology."""
    return [f"window {name!r}" for name in sorted(windows)]


def _frozen_by(context: Context, topology: StaticTopology) -> str:
    """Returns why the group cannot take this topology; an empty text if it can."""
    if not context.windows or topology.items() == context.topology.items():
        return ""
    names = ", ".join(repr(name) for name in sorted(context.windows))
    return f"the topology stays as it is while there are windows: {names}; free them first"


def _keep_windows(previous: Context, context: Context) -> None:
    """Moves the windows of a group, with the topology that they need, to the group's context after another `init`."""
    context.windows = previous.windows
    if why := _frozen_by(previous, context.topology):
        _log.error(why)
        context.topology = previous.topology


def _machines(group: dist.ProcessGroup, backend: ProcessGroupFog, ranks_per_machine: int | None) -> list[int]:
    if ranks_per_machine is None:
        return list(backend.hosts)
    # A subgroup sees its ranks on the same machines as the default group does, as on real hosts.
    machines = [rank // ranks_per_machine for rank in dist.get_process_group_ranks(group)]
    numbers = {machine: number for number, machine in enumerate(dict.fromkeys(machines))}
    return [numbers[machine] for machine in machines]


def _ranks_per_machine(size: int) -> int | None:
    ranks = environment.NODES_PER_MACHINE.get()
    if ranks and size % ranks != 0:
        raise ValueError(
            f"{environment.NODES_PER_MACHINE.name}: got '{ranks}'; allowed are divisors of the number of ranks, {size}"
        )
    return ranks or None


def _is_registered(group: dist.ProcessGroup) -> bool:
    """Returns whether torch still knows the group, which the user may have destroyed."""
    if group is dist.group.WORLD:  # the most frequent case, and the fastest check
        return True
    try:
        dist.get_backend(group)
    except ValueError:
        return False
    return True


def _connect() -> tuple[dist.ProcessGroup, ProcessGroupFog, bool]:
    """Returns a group with a fog backend, the backend, and whether this function made the group."""
    owns_group = not dist.is_initialized()
    if owns_group:
        launch.connect()
    world = dist.group.WORLD
    assert world is not None  # it is initialized
    backend = _backend_of(world)
    if backend is not None:
        return world, backend, owns_group
    beside = dist.new_group(backend="fog")
    backend = backend_of(beside)
    if backend is None:
        raise RuntimeError(f"the backend of a new fog group must be a ProcessGroupFog, got {beside}")
    return beside, backend, True
