"""Which ranks of a group are left, and the group that they form: agreed by messages, without a collective and a Store.

A group that loses a rank has failed on all its ranks: each operation in flight raises, and so does the next one of a
rank that has none in flight. So every living rank comes to an *agreement round* sooner or later. Each tells the others
that it has come, and which ranks it knows to be lost or to have left. As soon as every member has come or is
known to be gone, a quorum decides who is left: the next epoch. The living then form a group
over the same engine, which sends nothing and waits for nobody, so a further loss at this point is simply the next
epoch's. All that follows from an epoch is a pure function of it (`fogdist.topology.Topology.among`).

A process that joins becomes a member by such a round too (`fogdist.elastic.joiner`), with the number of
a rank that is gone.

What is told, and what follows from it, is in `fogdist.elastic.protocol`, which knows neither torch nor the engine. This module
drives it.

Objects that exchange in step with other ranks have a `Participant`. Ranks may have come to the agreement round in
different exchanges. Each tells the number of exchanges that it has completed, and the largest number is where all go on: a rank
that has made fewer gives up those between, and keeps its own values in them.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fog_pg import _extension, _joining, environment
from fog_pg._known import backend_of
from fogdist import context as contexts
from fogdist.agreement import check_same_everywhere
from fogdist.context import Context, Survivors
from fogdist.elastic import protocol
from fogdist.elastic.admission import Admission
from fogdist.elastic.agreement_round import Carrier
from fogdist.elastic.groups import healed, new_group
from fogdist.elastic.joiner import Joiner
from fogdist.elastic.participant import Joinable, Participant
from fogdist.elastic.protocol import (
    Action,
    Decision,
    Fail,
    Form,
    LeaveToAnother,
    Meet,
    Member,
    Membership,
    Poll,
    Request,
    Send,
    Watch,
)
from fogdist.elastic.tickets import TOPOLOGY, check_object, publish_object
from fogdist.exchange import MACHINES
from fogdist.observe.detection import suspend_detection
from fogdist.topology import TopologyError

if TYPE_CHECKING:
    from fog_pg._C import ProcessGroupFog

_log = logging.getLogger("fogdist")

# The pauses between two looks for losses in an agreement round, in seconds, doubled from the first to the last.
_FIRST_PAUSE = 1e-3
_LAST_PAUSE = 50e-3
# How long the ranks wait for a process that joins after they have agreed: it is ready, and waits for them.
_CONNECT_TIMEOUT = timedelta(seconds=5)
# A rank of another host that is gone is known to be so after FOG_HOST_TIMEOUT and this time, in seconds.
_DOUBT = 2.0
# Why nobody can join a job.
_NO_SECRET = (
    "its ranks know no secret, because their Store is a file: set FOG_JOB_SECRET, the same on all ranks"
)


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

    Every living rank must call it; operations of the group raise on all of them. The ranks agree by messages, and a
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
            loss; this rank was declared lost; a rank did not come within the group's timeout; or too few ranks are left.
    """
    members = members_of(group)
    members.agree_if_needed()
    members.is_given = True
    return members.context.group


class Members:
    """The ranks of one group through all losses, on this rank.

    Attributes:
        is_given: Whether the user has got the present group, so that it must not be destroyed here.
    """

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        self.is_given = True
        self._group = weakref.ref(group)
        self._context: Context | None = None
        self._objects: weakref.WeakValueDictionary[str, Participant] = weakref.WeakValueDictionary()
        self._numbers: dict[str, int] = {}  # of the last decision
        self._admission: Admission | None = None
        self._told: dict[str, Sequence[str]] = {}  # what processes that join compare their objects with
        self._joiner: Joiner | None = None
        # Processes that joined with the last epoch and have ended before this rank could tell them.
        self._unconnected: Collection[int] = ()
        # The numbers whose processes are not those with which the group began.
        self._joined: set[int] = set()
        first = contexts.current(group)
        timeout = first.backend.options._timeout.total_seconds()
        self._protocol = Member(first.rank, size, timeout, environment.HOST_TIMEOUT.get() + _DOUBT)
        if first.is_joining:
            world = _joining.world_to_join(first.backend)
            assert world is not None  # its backend was made so
            self._joiner = Joiner(world, first.rank, timeout)

    @property
    def membership(self) -> Membership:
        """The last that they agreed on."""
        return self._protocol.membership

    @property
    def context(self) -> Context:
        """The group of the living: at first the whole group."""
        return self._whole() if self._context is None else self._context

    @property
    def epoch(self) -> int:
        """The epoch of the last membership."""
        return self.membership.epoch

    def participant(self, name: str, state: Joinable | None = None) -> Participant:
        """Returns a new participant.

        Args:
            name: The same on all ranks, and that of no other living participant.
            state: What a process that joins gets of the object; None if the object has another one for that, or cannot be
                joined.
        """
        participant = self._objects[name] = Participant(self, name, state)
        self._open_admission()
        # Other ranks may have made theirs, and exchanges, before the last loss.
        participant.resume = self._numbers.get(name, 0)
        return participant

    def check_same(self, name: str, argument: str, items: Sequence[str]) -> None:
        """Compares an object of the ranks: among themselves, or with that of the job if this process joins. Collective.

        Args:
            name: The object's.
            argument: As of `check_same_everywhere`.
            items: As of `check_same_everywhere`.

        Raises:
            ValueError: They differ. torch.distributed.DistBackendError: A rank does not come.
        """
        self._open_admission()
        told = {TOPOLOGY: self._whole().topology.items(), name: items}
        if self._joiner is not None:
            check_object(self._joiner.world, name, argument, items)
            check_object(self._joiner.world, TOPOLOGY, "the topology", told[TOPOLOGY])
        else:
            check_same_everywhere(self.context.backend, argument, items)
        self._told |= told
        if self._admission is not None and self.context.rank == 0:
            for each, its_items in told.items():
                publish_object(self._joining_store(), each, its_items)

    def enter(self, participant: Participant) -> bool:
        """See `Participant.enter`."""
        if self._joiner is not None:
            self._join(self._joiner, participant)
            return True
        if self._admission is not None and (self._protocol.waits or not self._admission.is_quiet(self.epoch)):
            self._attend(self._admission, participant)
        return False

    def agree_if_needed(self) -> None:
        """Agrees on the next membership if the present group has failed or a rank of it is gone."""
        backend = self.context.backend
        reason = backend.failure
        if reason:
            self.agree(dist.DistBackendError(reason))
        elif backend.lost_ranks() or backend.left_ranks():
            self.agree(dist.DistBackendError(f"{_described(backend)} is gone"))

    def agree(self, failure: BaseException, joins: Sequence[Request] = ()) -> None:
        """Agrees on the next membership with the other ranks, who all come to this too; see `Participant.agree`.

        Args:
            failure: Why they agree anew, which is raised if there is no change.
            joins: Processes that are ready to join.
        """
        if self._joiner is not None:  # it is none of them yet
            raise failure
        form = self._agreed(failure, joins)
        self._answer(form)
        for rank, join in form.decision.joins.items():
            assert self._admission is not None  # all ranks have one if the lowest has let a process in
            try:
                # Before the process is admitted: from then on it is the one that has this rank.
                self._publish(rank, join.entry, form.epoch)
                _joining.renew_stores()
                self._admission.admit(join, {"epoch": form.epoch, **form.decision.to_values()})
            except RuntimeError as error:
                # Another rank may still reach the Store. If none does, the process does not come.
                _log.warning("rank %d joins, but the job's Store does not answer: %s", rank, error)
        if form.decision.joins:
            entries = {rank: join.entry for rank, join in form.decision.joins.items()}
            _extension.load().connect_with(entries, True, _CONNECT_TIMEOUT)
        ended = self._adopt(form)
        # Those with which this rank has no connection cannot have heard from it that they joined, so they do not go on.
        self._unconnected = ()
        self._unconnected = self._lost()[1] & form.decision.joins.keys()
        objects = list(self._objects.values())
        for participant in objects:
            participant.resume = self._numbers.get(participant.name, 0)
        try:
            for participant in objects:
                participant.tell_of_change(form.decision)
        finally:
            if ended is not None:  # only now: until here, its windows have what arrived in them
                dist.destroy_process_group(ended)

    # --- inside ---

    def _whole(self) -> Context:
        return contexts.current(self._group())

    @functools.cached_property
    def _carrier(self) -> Carrier:
        first = self._whole()
        return Carrier(first.backend.id, first.backend.world_ranks)

    def _answer(self, form: Form) -> None:
        """Tells the engine what to answer to ranks that have missed a decision."""
        self._carrier.answer({"epoch": form.epoch, "decided": form.decision.to_values()})

    @suspend_detection()  # ranks wait for each other's messages, where they make no calls of fogdist
    def _agreed(self, failure: BaseException, joins: Sequence[Request]) -> Form:
        """Agrees with the other ranks; raises `failure` if no rank is gone, and none wanted to join."""
        protocol, carrier, pause = self._protocol, self._carrier, _FIRST_PAUSE
        objects = {name: participant.report() for name, participant in self._objects.items()}
        protocol.lost(*self._lost())
        actions = protocol.agree(time.monotonic(), objects, str(failure), joins)
        while True:
            for action in actions:
                match action:
                    case Send(rank, message):
                        carrier.send(rank, message)
                    case Form():
                        for fail in self._expelled():
                            raise dist.DistBackendError(fail.reason) from failure
                        return action
                    case Fail(None):
                        carrier.answer({"epoch": protocol.membership.epoch + 1, "decided": None})
                        raise failure
                    case Fail(reason):
                        raise dist.DistBackendError(reason) from failure
                    case Watch(ranks):
                        self._watch(ranks)
            # In this order: it may have stood still, and all others may have gone on without it and ended.
            actions = [*self._expelled(), *protocol.lost(*self._lost())]
            messages = carrier.receive(pause)
            actions += [action for message in messages for action in protocol.receive(*message)]
            actions += protocol.tick(time.monotonic())
            pause = _FIRST_PAUSE if messages else min(2 * pause, _LAST_PAUSE)

    def _lost(self) -> tuple[set[int], set[int]]:
        """Returns the ranks of this epoch that have ended, or have left, and those that may go on and are silent."""
        backend = self.context.backend
        lost = self._ranks_at(backend.lost_ranks())
        # A rank that has gone on leaves this group, but not the first one.
        if left := self._ranks_at(backend.left_ranks()):
            left_first = {*self._whole().backend.left_ranks()} - self._joined
            lost |= {rank for rank in left if rank in left_first or not self._carrier.reaches(rank)}
        # A rank of this host that is declared lost learns that in memory before it does anything else.
        silent = {*backend.silent_ranks()}.union(backend.expelling_ranks())
        silent = self._ranks_at(silent).difference(self._on_this_host(silent), self._unconnected)
        return lost - silent, silent

    def _expelled(self) -> list[Fail]:
        """Tells the protocol which ranks of this host count this one as lost."""
        counted = self._on_this_host(self.context.backend.silent_ranks())
        expelling = self._on_this_host(self.context.backend.expelling_ranks())
        return [fail for rank in expelling for fail in self._protocol.expelled(rank, rank in counted)]

    def _ranks_at(self, places: Collection[int]) -> set[int]:
        return {self.membership.living[place] for place in places}

    def _on_this_host(self, places: Collection[int]) -> set[int]:
        """Returns the ranks at places of the present group that share this one's host."""
        hosts = self.context.backend.hosts
        return self._ranks_at([place for place in places if hosts[place] == hosts[self.context.rank]])

    def _watch(self, ranks: Sequence[int]) -> None:
        self.context.backend.watch([self.membership.living.index(rank) for rank in ranks])

    def _adopt(self, form: Form) -> dist.ProcessGroup | None:
        """Makes the group of a decision the present one, without a message.

        Returns:
            The group that was the present one, for the caller to destroy; None if it is the first one, or the user's.
        """
        before, decision, epoch = self.membership, form.decision, form.epoch
        survivors = Survivors(decision.members, self._whole().size)
        context = self._formed(form, survivors)
        contexts.adopt(context)
        old, was_given = self._context, self.is_given
        self._context, self.is_given = context, False
        self._protocol.formed(time.monotonic(), form)
        _extension.load().note_epoch(epoch)  # for `fog top`
        if before.living and before.living[0] < decision.members[0] == self._whole().rank:
            _joining.tell_store_again()  # this rank answers joiners now
        self._joined.update(decision.joins if before.living else self.membership.lost.union(decision.members))
        new = sorted(decision.joins)
        _log.warning(
            "epoch %d of the membership: training goes on with the ranks %s%s%s",
            epoch,
            list(survivors.living),
            f", without {gone}" if (gone := sorted(self.membership.lost - before.lost)) else "",
            f", of which {new} joined" if new else "",
        )
        self._numbers = decision.numbers
        return None if old is None or was_given else old.group

    def _formed(self, form: Form, survivors: Survivors) -> Context:
        """Creates the group of some ranks of the first group, without a message."""
        first = self._whole()
        living = list(survivors.living)
        group = new_group(first, living, form.epoch, form.name)
        backend = backend_of(group)
        assert backend is not None  # it was created as such
        machines = [first.machine_of_later(rank) for rank in living]
        numbers = {machine: number for number, machine in enumerate(dict.fromkeys(machines))}
        rank = living.index(first.rank)
        return Context(
            group,
            backend,
            rank,
            len(living),
            [numbers[machine] for machine in machines],
            healed(first.topology, survivors, rank),
            None
            if first.machine_topology is None
            else healed(
                first.machine_topology,
                Survivors(tuple(sorted(set(machines))), len(first.machines)),
                numbers[machines[rank]],
                MACHINES,
            ),
            survivors=survivors,
        )

    # --- processes that join ---

    def _is_first(self) -> bool:
        """Whether this is the process's first group, and has several ranks: only such a group can be joined."""
        first = self._whole()
        return first.size > 1 and _joining.store_of_first(first.backend) is not None

    def _joining_store(self) -> dist.Store:
        store = _joining.store_of_first(self._whole().backend)
        assert store is not None  # this is the process's first group
        return store

    def _open_admission(self) -> None:
        """Tells the Store how to connect with this rank, when its first object that goes on after losses is made."""
        if self._admission is not None or self._joiner is not None or not self._is_first():
            return
        if not _extension.load().job_secret():
            if self.context.rank == 0:
                _joining.close(self._joining_store(), _NO_SECRET)
            return
        self._enter_store()
        _joining.follow_store(self._enter_store)

    def _enter_store(self) -> None:
        """Tells the job's Store, which may be a new one, what this rank has to tell."""
        store, before = self._joining_store(), self._admission
        has_moved = before is not None and before.store is not store
        if before is not None and has_moved:
            before.leave_to_another(self.epoch)  # the tickets are lost with the old one
        admission = Admission(store, self._whole().backend.id) if before is None or has_moved else before
        self._admission = admission
        self._publish(self._whole().rank, _extension.load().own_entry(), self.epoch)
        if self.context.rank == 0:
            self._tell_joiners(admission)
        elif has_moved:  # at its own pace, the rank that answers need not know yet that it does
            self._tell_job(answers=False)

    def _tell_joiners(self, admission: Admission) -> None:
        """Tells the Store what the rank that answers joiners has to tell, unless that has been done."""
        if admission.answers() and admission.told_epoch == self.epoch:
            return
        epoch = self.epoch
        admission.publish_nonce()
        self._tell_job(answers=True)
        admission.told_epoch = epoch

    def _tell_job(self, answers: bool) -> None:
        """Tells the Store what processes that join need to know of the job, and whether this rank answers them."""
        store = self._joining_store()
        if not environment.JOB_SECRET.is_set():
            _joining.publish_secret(store, _extension.load().job_secret())
        for name, items in self._told.items():
            publish_object(store, name, items)
        _joining.publish_hosts(store, self._whole().backend.hosts, self.epoch, answers)

    def _publish(self, rank: int, entry: str, epoch: int) -> None:
        first = self._whole()
        _joining.publish(self._joining_store(), rank, first.backend.id, first.size, entry, epoch)

    def _attend(self, admission: Admission, participant: Participant) -> None:
        """Answers joiners, on the rank with the lowest number, and agrees with the others if one is ready."""
        protocol = self._protocol
        protocol.lost(*self._lost())
        for action in protocol.exchange(time.monotonic()):
            match action:
                case Watch(ranks):
                    self._watch(ranks)
                case LeaveToAnother():
                    admission.leave_to_another(self.epoch)
                case Poll():
                    try:
                        self._tell_joiners(admission)
                        admission.poll(self.epoch, self._asked, self._saved, protocol.living)
                    except dist.DistBackendError:
                        raise
                    except RuntimeError as error:  # the Store does not answer
                        _log.warning(
                            "processes cannot join, because the group's Store does not answer: %s", error
                        )
                        return
                    for meet in protocol.polled(participant.name):
                        assert isinstance(meet, Meet)
                        self.context.backend.abort()
                        ranks = tuple(sorted(request.rank for request in meet.joins))
                        self.agree(dist.DistBackendError(f"the ranks {list(ranks)} join"), meet.joins)

    def _asked(self, request: Request, is_ready: bool, is_answered: bool) -> list[Action]:
        """Returns what is to be done for a joiner."""
        extension = _extension.load()
        last = _joining.entry_of(self._joining_store(), request.rank)
        is_visible = last is not None and extension.read_entry(last)["is_visible"]
        actions = self._protocol.asked(
            time.monotonic(),
            request,
            self._obstacle(request),
            runs=is_visible and last != request.entry and extension.announce(last),
            is_ready=is_ready,
            is_answered=is_answered,
        )
        for action in actions:
            if isinstance(action, Watch):
                self._watch(action.ranks)
        return actions

    def _saved(self) -> dict[str, Any]:
        """Returns the state for a process that joins."""
        return {name: each.state.save() for name, each in self._objects.items() if each.state is not None}

    def _obstacle(self, request: Request) -> str:
        """Returns why a joiner is refused whoever is a member; "" if it is not."""
        rank, own = request.rank, sorted(self._objects)
        most = _joining.max_ranks(self._whole().size)
        if not 0 <= rank < most:
            return f"rank {rank} is none of the {most} ranks that the job can have (FOG_MAX_RANKS)"
        if rank >= self._whole().size and (reason := self._why_it_cannot_grow()):
            return reason
        if list(request.objects) != own:
            return (
                f'it has {", ".join(request.objects) or "no object"} with on_loss="continue", the job\'s ranks have '
                f"{', '.join(own)}"
            )
        for name in own:
            if self._objects[name].state is None and not any(
                name.startswith(f"{other} ") for other in own if self._objects[other].state is not None
            ):
                return f"the job has {name}, which a process cannot join"
        return ""

    def _why_it_cannot_grow(self) -> str:
        """Returns why no rank can be added to those with which the job began; "" if it can."""
        first = self._whole()
        try:
            first.topology.as_topology()
            if first.machine_topology is not None:
                first.machine_topology.as_topology()
        except TopologyError as error:
            return f"the topology has no place for more ranks than {first.size}: {error}"
        return ""

    def _join(self, joiner: Joiner, participant: Participant) -> None:
        """Makes this process a member of the job."""
        try:
            state = joiner.pull(sorted(self._objects), participant.name)
            for name, each in list(self._objects.items()):
                if each.state is not None:
                    each.state.load(state[name])
            told = joiner.enter()
        except BaseException:
            joiner.leave()
            raise
        epoch, decision = told["epoch"], Decision.from_values(told)
        extension, rank = _extension.load(), self._whole().rank
        extension.connect_with(joiner.entries(sorted(decision.living)), False, _CONNECT_TIMEOUT)
        # Those that join with this process: they are as new as this one, so nobody has to wait for the other. They come last,
        # because one that stands still would keep this process away from the ranks, which wait no longer.
        beside = {other: join.entry for other, join in decision.joins.items() if other != rank}
        extension.connect_with(beside, True, _CONNECT_TIMEOUT)
        joiner.leave()
        self._joiner, self._whole().is_joining = None, False
        _joining.note_member()
        self._protocol.membership = Membership(epoch - 1, (), joiner.numbers())
        form = Form(epoch, decision)
        self._adopt(form)
        self._await_all(joiner.protocol, form)
        self._answer(form)
        self._enter_store()
        _joining.follow_store(self._enter_store)
        for name, each in list(self._objects.items()):
            each.start_at(self._numbers.get(name, 0), decision.report_of(name))
        for each in list(self._objects.values()):
            each.tell_of_change(decision)

    def _await_all(self, joiner: protocol.Joiner, form: Form) -> None:
        """Waits until all ranks know that this process has joined; see `fogdist.elastic.protocol.Joiner.admitted`."""
        carrier = self._carrier
        actions = joiner.admitted(time.monotonic(), form.epoch, form.decision)
        while joiner.state != "in":
            for action in actions:
                match action:
                    case Send(rank, message):
                        carrier.send(rank, message)
                    case Fail(reason):
                        raise dist.DistBackendError(reason)
            actions = joiner.lost(self._lost()[0])
            for rank, message in carrier.receive(_LAST_PAUSE):
                actions += joiner.receive(rank, message)
            actions += joiner.tick(time.monotonic())


_members: WeakKeyDictionary[dist.ProcessGroup, Members] = WeakKeyDictionary()


def members_of(group: dist.ProcessGroup | None = None) -> Members:
    """Returns the ranks of a group through all losses; argument and errors as of `current`."""
    context = contexts.current(group)
    return _members.setdefault(context.group, Members(context.group, context.size))


def _described(backend: ProcessGroupFog) -> str:
    gone = sorted({*backend.lost_ranks(), *backend.left_ranks()})
    return f"rank {gone[0]}" if len(gone) == 1 else f"each of the ranks {gone}"
