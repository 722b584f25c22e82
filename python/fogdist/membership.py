"""Which ranks of a group are left, and the group that they form: agreed in the Store, without a collective.

A group that loses a rank has failed on all its ranks: each operation in flight raises, and so does the next one of a rank
that has none in flight. So every living rank comes to a *meeting* in the Store sooner or later. Each appends that it has come, and
which ranks it knows to be lost or to have left. As soon as every member has come or is known to be gone, one rank's
compare-and-set decides for all who is left: the next epoch. The living then form a group over the same engine, which sends
nothing and waits for nobody, so a further loss at this point is simply the next epoch's. All that follows from an epoch is a
pure function of it (`fogdist.topology.Topology.without`).

Objects that exchange in step with other ranks have a `Seat`. Ranks may have come to the meeting in different exchanges. Each tells the
number of exchanges that it has completed, and the largest number is where all go on: a rank that has made fewer gives
up those between, and keeps its own values in them.
"""

from __future__ import annotations

import json
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fog_pg import Part
from fog_pg._known import backend_of
from fogdist import context as contexts
from fogdist.context import Context, Survivors
from fogdist.detection import suspend_detection
from fogdist.exchange import MACHINES, RANKS, Nodes
from fogdist.flight_record import note_epoch
from fogdist.lazy import nx
from fogdist.static_topology import StaticTopology, see_topology
from fogdist.topology import Topology, TopologyError, uniform_weights

if TYPE_CHECKING:
    from fog_pg._C import ProcessGroupFog

_log = logging.getLogger("fogdist")

# The pauses between two looks at the Store, in seconds, doubled from the first to the last.
_FIRST_PAUSE = 1e-3
_LAST_PAUSE = 50e-3


@dataclass(frozen=True)
class Membership:
    """The ranks of a group that take part, by their numbers in the group that they began with.

    Attributes:
        epoch: How many times the ranks have agreed on a loss.
        living: The ranks that take part, ascending.
        lost: The others: they were lost, or have left.
    """

    epoch: int
    living: tuple[int, ...]
    lost: frozenset[int]


def current(group: dist.ProcessGroup | None = None) -> Membership:
    """Returns the last membership that the ranks of a group have agreed on. It asks nobody.

    Args:
        group: The group that the ranks began with; by default that of `fogdist.init`.

    Raises:
        TypeError: `group` is not a process group.
        ValueError: Before `init`, or `group` has no fog backend.
        RuntimeError: After `shutdown`, or the group was destroyed.
    """
    return members_of(group).membership


def reconfigure(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Returns a working group of the ranks that are left, after an operation of a group has raised because of a loss.

    Every living rank must call it; operations of the group raise on all of them. The ranks meet in the group's Store, and a
    rank that is lost meanwhile is left out. The new group is one of torch's, over the connections that exist already. Its
    ranks are the living ones in their order, and its topology is what is left of the old group's. The old group stays as it
    is, whether this succeeds or not. If nothing was lost, the result is the group that is in use.

    Args:
        group: The group that the ranks began with, or one that this function returned; by default that of `fogdist.init`.

    Returns:
        The group. `fogdist.membership.current(group)` tells which ranks of the old one it consists of.

    Raises:
        TypeError: `group` is not a process group.
        ValueError: Before `init`, or `group` has no fog backend.
        RuntimeError: After `shutdown`. torch.distributed.DistBackendError: the group has failed for another reason than a
            loss; this rank was declared lost; a rank did not come within the group's timeout; or the Store is lost.
    """
    members = members_of(group)
    members.meet_if_needed()
    members.is_given = True
    return members.context.group


class Seat:
    """The place of one object in the exchanges that it makes in step with the same object of other ranks.

    Exchanges are numbered by `take`, and completed in that order. Both must be the same on all ranks.

    Attributes:
        name: The same on all ranks.
        completed: The number of exchanges completed, or given up, on this rank.
        resume: Exchanges with smaller numbers are given up, because other ranks have completed them already.
    """

    def __init__(self, members: Members, name: str) -> None:
        self._members = members
        self.name = name
        self.completed = self.resume = 0
        self._taken = 0
        self._listener: weakref.WeakMethod[Callable[[], None]] | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the membership that the rank knows of."""
        return self._members.membership.epoch

    @property
    def context(self) -> Context:
        """The group of the living."""
        return self._members.context

    def take(self) -> int:
        """Returns the number of the next exchange."""
        self._taken += 1
        return self._taken - 1

    def on_change(self, listener: Callable[[], None]) -> None:
        """Sets a method that is called after each change of the membership, before an exchange is repeated."""
        self._listener = weakref.WeakMethod(listener)

    def meet(self, failure: BaseException) -> None:
        """Agrees on the next membership with the other ranks, after an exchange of this epoch has failed.

        Raises:
            torch.distributed.DistBackendError: As `reconfigure`.
        """
        # Usually the group has failed. If not, the ranks that do not know of the loss learn of it by this.
        self._members.context.backend.abort()
        self._members.meet(failure)

    def tell_of_change(self) -> None:
        """Calls the listener."""
        listener = None if self._listener is None else self._listener()
        if listener is not None:
            listener()


class Members:
    """The ranks of one group through all losses, on this rank.

    Attributes:
        membership: The last that they agreed on.
        is_given: Whether the user has got the present group, so that it must not be destroyed here.
    """

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        self.membership = Membership(0, tuple(range(size)), frozenset())
        self.is_given = True
        self._group = weakref.ref(group)
        self._context: Context | None = None
        self._seats: weakref.WeakValueDictionary[str, Seat] = weakref.WeakValueDictionary()
        self._numbers: dict[str, int] = {}  # of the last decision

    @property
    def context(self) -> Context:
        """The group of the living: at first the whole group."""
        return self._whole() if self._context is None else self._context

    def seat(self, name: str) -> Seat:
        """Returns a new seat. `name` is the same on all ranks, and that of no other living seat."""
        seat = self._seats[name] = Seat(self, name)
        # Other ranks may have made theirs, and exchanges, before the last loss.
        seat.resume = self._numbers.get(name, 0)
        return seat

    def meet_if_needed(self) -> None:
        """Agrees on the next membership if the present group has failed or a rank of it is gone."""
        backend = self.context.backend
        reason = backend.failure
        if reason:
            self.meet(dist.DistBackendError(reason))
        elif backend.lost_ranks() or backend.left_ranks():
            self.meet(dist.DistBackendError(f"{_described(backend)} is gone"))

    def meet(self, failure: BaseException) -> None:
        """Agrees on the next membership with the other ranks, who all come to this too; see `Seat.meet`."""
        whole, before = self.context, self.membership
        living = self._agreed(whole, failure)
        if not living:
            raise failure
        survivors = Survivors(tuple(sorted(living)), len(before.living) + len(before.lost))
        lost = frozenset(range(survivors.size)).difference(living)
        context = self._formed(whole, before, survivors)
        contexts.adopt(context)
        old, was_given = self._context, self.is_given
        self._context, self.is_given = context, False
        self.membership = Membership(before.epoch + 1, survivors.living, lost)
        note_epoch(self.membership.epoch)
        _log.warning(
            "epoch %d of the membership: training goes on with the ranks %s, without %s",
            self.membership.epoch,
            list(survivors.living),
            sorted(lost - before.lost),
        )
        numbers: dict[str, int] = {}
        for seats in living.values():
            for name, number in seats.items():
                numbers[name] = max(number, numbers.get(name, 0))
        self._numbers = numbers
        all_seats = list(self._seats.values())
        for seat in all_seats:
            seat.resume = numbers.get(seat.name, 0)
        for seat in all_seats:
            seat.tell_of_change()
        if old is not None and not was_given:
            dist.destroy_process_group(old.group)

    # --- inside ---

    def _whole(self) -> Context:
        return contexts.current(self._group())

    @suspend_detection()  # ranks wait for each other in the Store, where they make no calls of fogdist
    def _agreed(self, whole: Context, failure: BaseException) -> dict[int, dict[str, int]]:
        """Meets the other ranks. Returns the living ranks with the exchanges that each had completed, by seat.

        The result is empty if no rank is gone.
        """
        before = self.membership
        numbers = before.living
        mine = numbers[whole.rank]
        prefix = f"fog/membership/{whole.backend.id & (2**64 - 1):x}/{before.epoch + 1}"
        timeout = whole.backend.options._timeout.total_seconds()
        deadline, pause = time.monotonic() + timeout, _FIRST_PAUSE
        try:
            log = _Log(distributed_c10d._get_process_group_store(whole.group), prefix)
            log.append({"came": mine, "seats": {name: seat.completed for name, seat in self._seats.items()}})
            told: set[int] = set()
            while True:
                gone = {numbers[rank] for rank in (*whole.backend.lost_ranks(), *whole.backend.left_ranks())}
                for rank in sorted(gone - told):
                    log.append({"gone": rank, "by": mine})
                told |= gone
                came, lost = log.read()
                missing = [rank for rank in numbers if rank not in came and rank not in lost]
                if not missing or log.is_decided():
                    living = {rank: seats for rank, seats in came.items() if rank not in lost}
                    living = {} if len(living) == len(numbers) else living
                    decided = {int(rank): seats for rank, seats in log.decide(living).items()}
                    break
                if time.monotonic() >= deadline:
                    raise dist.DistBackendError(
                        f"the ranks {missing} of the group did not come within {timeout:g} s to agree on who is "
                        f"left, after: {failure}"
                    ) from failure
                whole.backend.watch([numbers.index(rank) for rank in missing])
                time.sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE)
        except dist.DistBackendError:
            raise
        except RuntimeError as error:  # of the Store
            raise dist.DistBackendError(
                f"the membership cannot change, because the group's Store does not answer: {error}; it had to change "
                f"after: {failure}"
            ) from failure
        if decided and mine not in decided:
            raise dist.DistBackendError(
                f"this rank {mine} was declared lost in epoch {before.epoch + 1}, and takes no part any more"
            ) from failure
        return decided

    def _formed(self, whole: Context, before: Membership, survivors: Survivors) -> Context:
        """Creates the group of the survivors, without a message."""
        places = [before.living.index(rank) for rank in survivors.living]
        globals_ = dist.get_process_group_ranks(whole.group)
        group = dist.new_group(
            [globals_[place] for place in places],
            timeout=whole.backend.options._timeout,
            backend="fog",
            pg_options=Part(whole.backend, places, before.epoch + 1),
            use_local_synchronization=True,
            group_desc=f"epoch {before.epoch + 1}",
        )
        backend = backend_of(group)
        assert backend is not None  # it was created as such
        first = self._whole()
        machines = [whole.machine_of[place] for place in places]
        numbers = {machine: number for number, machine in enumerate(dict.fromkeys(machines))}
        rank = places.index(whole.rank)
        return Context(
            group,
            backend,
            rank,
            len(places),
            [numbers[machine] for machine in machines],
            _healed(first.topology, survivors.living, rank),
            None
            if first.machine_topology is None
            else _healed(
                first.machine_topology,
                sorted({first.machine_of[rank] for rank in survivors.living}),
                numbers[machines[rank]],
                MACHINES,
            ),
            survivors=survivors,
        )


_members: WeakKeyDictionary[dist.ProcessGroup, Members] = WeakKeyDictionary()


def members_of(group: dist.ProcessGroup | None = None) -> Members:
    """Returns the ranks of a group through all losses; argument and errors as of `current`."""
    context = contexts.current(group)
    return _members.setdefault(context.group, Members(context.group, context.size))


def _healed(
    topology: StaticTopology, living: Sequence[int], node: int, nodes: Nodes = RANKS
) -> StaticTopology:
    """Returns what is left of a topology, from the point of view of one of the nodes that are left."""
    graph = topology.graph if topology.is_weighted else uniform_weights(topology.graph)
    try:
        left = Topology.from_graph("group's topology", graph).among(living).graph()
    except (
        TopologyError
    ):  # a user's weights that do not sum to 1: nobody else can say what they mean for fewer ranks
        numbers = {old: new for new, old in enumerate(living)}
        left = nx.relabel_nodes(topology.graph.subgraph(living), numbers)
    return see_topology(left, True, node, len(living), nodes=nodes)


def _described(backend: ProcessGroupFog) -> str:
    gone = sorted({*backend.lost_ranks(), *backend.left_ranks()})
    return f"rank {gone[0]}" if len(gone) == 1 else f"each of the ranks {gone}"


class _Log:
    """A meeting in a Store: what the ranks have told, in the order in which they did, and the decision.

    Args:
        store: Any Store of torch; those that can append are faster.
        key: The meeting's.
    """

    def __init__(self, store: dist.Store, key: str) -> None:
        self._store: Any = store  # torch's stubs lack some of its methods
        self._told, self._decision = f"{key}/told", f"{key}/decision"

    def append(self, entry: dict[str, object]) -> None:
        """Adds an entry, which must differ from all others."""
        line = json.dumps(entry) + "\n"
        if self._store.has_extended_api():
            self._store.append(self._told, line)
            return
        while True:
            before = self._text()
            after = before + line
            if self._store.compare_set(self._told, before, after).decode() == after:
                return

    def read(self) -> tuple[dict[int, dict[str, int]], set[int]]:
        """Returns the exchanges of each rank that has come, by seat, and the ranks that are gone."""
        came: dict[int, dict[str, int]] = {}
        gone: set[int] = set()
        for line in self._text().splitlines():
            entry = json.loads(line)
            if "came" in entry:
                came[entry["came"]] = entry["seats"]
            else:
                gone.add(entry["gone"])
        return came, gone

    def is_decided(self) -> bool:
        """Returns whether a rank has decided."""
        return bool(self._store.check([self._decision]))

    def decide(self, living: dict[int, dict[str, int]]) -> dict[str, dict[str, int]]:
        """Decides, unless another rank has decided already; returns the decision."""
        decided = self._store.compare_set(self._decision, "", json.dumps(living))
        result: dict[str, dict[str, int]] = json.loads(decided)
        return result

    def _text(self) -> str:
        return self._store.get(self._told).decode() if self._store.check([self._told]) else ""
